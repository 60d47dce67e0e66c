"""Generate a memory task: when an item returns after d events, the model must recall the item that followed it.

A sequence has random filler items and pairs of a key and the value after it. The key of a pair returns after d events,
followed by the same value; this second value is a recall. Only recalls are trained on and evaluated. `distances` has
the greatest distance of each group: d is uniform from d_max // 2 + 1 to d_max, so that no model can adapt to one
distance, and each group has the same number of pairs in every sequence. A key is in one pair of a sequence, and values
are drawn for each sequence, so that only the sequence determines them: a guess is right with probability
1 / num_values. Short sequences can be added for training: a model learns to find one event among a few hundred in far
fewer steps than among thousands.

Items are numbered: keys, then values, then fillers. Each event's action is its kind: 0 for `shown`, i for a recall of
the i-th group of distances (`Dataset.action_names`). Each sequence is a user, and whole users are held out.

Letters: E events, U users (sequences), N events of a sequence, M samples.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from data.batch import Batch, per_token
from data.batches import Batches, ranges
from data.options import RecallOptions, parse_options
from data.splits import Split, Splits
from data.types import DataError, Dataset

GENERATOR_VERSION = 1  # part of the fingerprint: increase it when the same options give other data
RECALL_PROTOCOL = "held_out_users"
TRIES = 200  # draws of a position for a pair before the sequence counts as full
CHUNK_CELLS = 1 << 26  # events generated at a time


def generate_recall(**options) -> Dataset:
    """Generate the data set with these RecallOptions; the same options and numpy version give the same data.

    DataError for wrong options (see `options.parse_options`), and if the pairs do not fit into a sequence.
    """
    o = parse_options(RecallOptions, options, "data.recall")
    rng = np.random.default_rng(o.seed)
    parts = [_sequences(rng, o)]
    if o.short:  # the last sequences are held out, so the short ones come first
        parts.insert(0, _sequences(rng, o.short_options()))
    items, codes = (np.concatenate([part.reshape(-1) for part in column]) for column in zip(*parts, strict=True))
    lengths = np.repeat([part.shape[1] for part, _ in parts], [len(part) for part, _ in parts])
    recipe = json.dumps(["recall", GENERATOR_VERSION, o.model_dump()], sort_keys=True)
    num_items = o.num_keys + o.num_values + o.num_fillers
    short = f"; {o.short.num_sequences:,} of {o.short.length:,} events for training" if o.short else ""
    return Dataset(
        name="recall",
        items=items,
        timestamps=np.zeros(items.size, np.int64),
        actions=codes,
        user_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        user_ids=np.arange(1, len(lengths) + 1),
        item_ids=np.arange(1, num_items + 1),
        has_timestamps=False,
        fingerprint=hashlib.sha256(recipe.encode()).hexdigest(),
        action_names=("shown", *(f"{distance // 2 + 1}-{distance}" for distance in o.distances)),
        notes=(
            f"{o.num_sequences:,} sequences of {o.length:,} events, {o.pairs} pairs at each of the distances "
            f"up to {', '.join(f'{distance:,}' for distance in o.distances)}{short}; {o.num_keys:,} keys, "
            f"{o.num_values:,} values, {o.num_fillers:,} fillers. A guess among the values is right in "
            f"{1 / o.num_values:.2%} of all cases.",
        ),
    )


def _sequences(rng: np.random.Generator, o: RecallOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return (items, action codes), [U, N] each."""
    items = np.empty((o.num_sequences, o.length), np.int32)
    codes = np.zeros((o.num_sequences, o.length), np.int32)
    step = max(1, CHUNK_CELLS // o.length)
    for first in range(0, o.num_sequences, step):
        fill(rng, o, items[first : first + step], codes[first : first + step])
    return items, codes


def fill(rng: np.random.Generator, o: RecallOptions, items: np.ndarray, codes: np.ndarray) -> None:
    """Write sequences into items and codes, both [U, N]; DataError if the pairs do not fit."""
    users = np.arange(len(items))
    items[:] = o.num_keys + o.num_values + rng.integers(0, o.num_fillers, items.shape, dtype=np.int32)
    free = np.ones(items.shape, bool)
    total = o.pairs * len(o.distances)
    keys = np.argsort(rng.random((len(items), o.num_keys), dtype=np.float32), axis=1)[:, :total].astype(np.int32)
    values = o.num_keys + rng.integers(0, o.num_values, (len(items), total), dtype=np.int32)
    # Pairs with the longest distances are placed first, since they have the fewest possible positions.
    order = sorted(range(len(o.distances)), key=lambda place: -o.distances[place])
    for pair, place in enumerate(place for place in order for _ in range(o.pairs)):
        longest, waiting = o.distances[place], users
        shown, returned = np.zeros((2, len(users)), np.int64)
        for _ in range(TRIES):
            distance = rng.integers(longest // 2 + 1, longest + 1, len(waiting))
            begin = (rng.random(len(waiting)) * (o.length - distance - 1)).astype(np.int64)
            shown[waiting], returned[waiting] = begin, begin + distance
            fits = free[waiting, begin] & free[waiting, begin + 1]
            fits &= free[waiting, begin + distance] & free[waiting, begin + distance + 1]
            waiting = waiting[~fits]
            if not len(waiting):
                break
        else:
            raise DataError(
                f"data.recall: length={o.length} is too short for pairs={o.pairs} of each of {len(o.distances)} "
                "distances: take fewer pairs or longer sequences"
            )
        for begin in (shown, returned):
            items[users, begin], items[users, begin + 1] = keys[:, pair], values[:, pair]
            free[users, begin] = free[users, begin + 1] = False
        codes[users, returned + 1] = 1 + place


@dataclass
class RecallBatch(Batch):
    """A batch whose targets are recalls only.

    events  [T] int64, the index of each token's target event in the data set
    """

    events: Tensor = field(default=None, metadata=per_token(padding=-1))  # type: ignore[assignment]


class RecallBatches(Batches):
    """The batches of a recall split; see `Batches`."""

    def _assemble(self, first, last, total, seen, users, begin, *others) -> RecallBatch:
        batch = super()._assemble(first, last, total, seen, users, begin, *others)
        events = ranges(begin[first:last], batch.seq_offsets, total) + 1
        actions = self._columns["actions"]
        assert actions is not None
        codes = actions.index_select(0, events)
        return RecallBatch(
            item_ids=batch.item_ids,
            timestamps=batch.timestamps,
            target_ids=batch.target_ids.masked_fill(codes == 0, -1),
            query_timestamps=batch.query_timestamps,
            seq_offsets=batch.seq_offsets,
            users=batch.users,
            events=events,
        )


def recall_splits(dataset: Dataset, valid_fraction: float, test_fraction: float) -> Splits:
    """Hold out whole users: the last `test_fraction` of them for the test, those before for validation.

    A sample has all events of a user. DataError if a part is empty.
    """
    users, last = np.arange(dataset.num_users), dataset.user_offsets[1:]
    cuts = [round(dataset.num_users * (1 - test_fraction - fraction)) for fraction in (valid_fraction, 0.0)]
    if not 0 < cuts[0] < cuts[1] < dataset.num_users:
        raise DataError(
            f"data.valid_fraction and data.test_fraction: {valid_fraction} and {test_fraction} of {dataset.num_users} "
            "users give an empty training, validation or test part"
        )
    train, valid, test = (Split(part, dataset.user_offsets[part], last[part]) for part in np.split(users, cuts))
    note = (
        f"Protocol {RECALL_PROTOCOL}: {len(train):,} sequences for training, {len(valid):,} others for validation, "
        f"{len(test):,} others for the test. Only the values of returning keys are trained on and evaluated."
    )
    train_end = np.where(users < cuts[0], last, dataset.user_offsets[:-1])
    return Splits(RECALL_PROTOCOL, train, valid, test, {}, [note], train_end)
