"""Cut ranking samples and batches, in one of two layouts.

interleaved  A user's events become the tokens item, action, item, action, ... At an item token a model predicts the
             action that follows. Histories are cut between events, never between an item and its action.
targets      An event is one token, of its item and its action; the last ones of a sequence are candidates, without
             their actions, which a model predicts there.

Letters: T tokens of the batch, B sequences, A kinds of action, M samples, U users, C events of a window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch, per_token
from data.batches import Batches, ranges
from data.errors import ConfigError
from data.reading.formats import FORMATS
from data.splits import FUTURE_NOTE, Split, Splits
from data.types import DataError, Dataset, shown
from hstu_sparse.core.jagged import sequence_ids

RANKING_PROTOCOLS = ("last_tenth", "all")


@dataclass
class RankingBatch(Batch):
    """Sequences of item and action tokens; `item_ids`, `actions` and `timestamps` are those of a token's event.

    No token has an item as its target: target_ids is -1 throughout. The query time of a token that predicts is its own
    event's, that of another one, which has its event's action, the next event's (its own if it is the sample's last).

    labels     [T, A] int8 at tokens whose label counts, without their actions: 1 for each kind of action that happened,
               else 0; -1 at tokens without a prediction
    events     [T] int64, the index in the data set of a token's event
    """

    labels: Tensor = field(default=None, metadata=per_token(padding=-1))  # type: ignore[assignment]
    events: Tensor = field(default=None, metadata=per_token(padding=-1))  # type: ignore[assignment]


class RankingBatches(Batches):
    """The samples of one ranking split, batch by batch; see `Batches`.

    label_table: [codes, A] int8, the kinds of action that each action code of the data set stands for.
    """

    def __init__(self, dataset: Dataset, split: Split, *, label_table: np.ndarray, **options):
        super().__init__(dataset, split, **options)
        self._labels = torch.from_numpy(np.ascontiguousarray(label_table, np.int8)).to(self._assemble_on)

    def _tokens(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return 2 * (end - begin)

    def _assemble(self, first, last, total, seen, users, begin, scored, seen_begin, offsets, seen_offsets):
        seq_offsets = offsets[first : last + 1] - offsets[first]
        events, times, following, labels = self._events(first, last, total // 2, seq_offsets // 2, begin, scored)

        def both(x: Any) -> Any:  # a tensor, or None for what is not there
            return None if x is None else x.repeat_interleave(2, 0)

        return RankingBatch(
            item_ids=both(self._taken("items", events)),
            timestamps=both(times),
            target_ids=torch.full((total,), -1, device=events.device),
            query_timestamps=torch.stack([times, following], 1).flatten(),
            seq_offsets=seq_offsets,
            users=users[first:last],
            actions=both(self._taken("actions", events)),
            user_features=self._taken("user_rows", users[first:last]),
            event_features=both(self._taken("event_rows", events)),
            has_action=torch.arange(total, device=events.device) % 2 == 1,
            labels=torch.stack([labels, torch.full_like(labels, -1)], 1).flatten(0, 1),
            events=both(events),
        )

    def _taken(self, name: str, index: Tensor) -> Any:
        column = self._columns[name]
        return None if column is None else column.index_select(0, index).long()

    def _events(self, first: int, last: int, count: int, event_offsets: Tensor, begin: Tensor, scored: Tensor):
        """Return (events, their times, those of the next events of their samples, labels) of samples first .. last-1.

        count: the events of these samples; event_offsets: [B+1] where those of each begin among them.
        """
        events = ranges(begin[first:last], event_offsets, count)
        sequence = torch.repeat_interleave(
            torch.arange(last - first, device=events.device), event_offsets.diff(), output_size=count
        )
        times, codes = self._taken("timestamps", events), self._taken("actions", events)
        after = torch.arange(1, count + 1, device=events.device)
        following = torch.minimum(after, event_offsets[1:].index_select(0, sequence) - 1)
        counts = events >= scored[first:last].index_select(0, sequence)
        if (counted := self._columns["counted"]) is not None:
            counts &= counted.index_select(0, events)
        labels = torch.where(counts[:, None], self._labels.index_select(0, codes), -1)
        return events, times, times.index_select(0, following), labels


class TargetBatches(RankingBatches):
    """The samples of one ranking split whose events scored[i] .. end[i]-1 are candidates; see `RankingBatches`."""

    def _tokens(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return end - begin

    def _assemble(self, first, last, total, seen, users, begin, scored, seen_begin, offsets, seen_offsets):
        seq_offsets = offsets[first : last + 1] - offsets[first]
        events, times, following, labels = self._events(first, last, total, seq_offsets, begin, scored)
        num_targets = begin[first:last] + seq_offsets.diff() - scored[first:last]
        sequence = sequence_ids(seq_offsets, total)
        history = events < scored[first:last].index_select(0, sequence)
        return RankingBatch(
            item_ids=self._taken("items", events),
            timestamps=times,
            target_ids=torch.full((total,), -1, device=events.device),
            query_timestamps=torch.where(history, following, times),
            seq_offsets=seq_offsets,
            users=users[first:last],
            actions=self._taken("actions", events),
            user_features=self._taken("user_rows", users[first:last]),
            event_features=self._taken("event_rows", events),
            has_action=history,
            num_targets=num_targets,
            labels=labels,
            events=events,
        )


def training_windows(users: np.ndarray, begin: np.ndarray, end: np.ndarray, capacity: int) -> Split:
    """Cut the events begin .. end-1 of each user into disjoint samples of C = `capacity` events, starting from the end.

    users, begin, end: [U] int64. Every label counts.
    """
    counts = -(-(end - begin) // capacity)
    sample_user = np.repeat(np.arange(len(users)), counts)
    place = np.arange(len(sample_user)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = end[sample_user] - place * capacity
    first = np.maximum(begin[sample_user], last - capacity)
    return Split(users[sample_user], first, last, first)


def scoring_windows(users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray, capacity: int) -> Split:
    """Cut samples in which each of the events scored .. end-1 of each user is scored exactly once.

    Windows of C = `capacity` events begin every max(1, C // 2) events from the user's first one, `begin`. An event is
    scored in the first window that contains it, which has the longest history. users, begin, scored, end: [U] int64.
    """
    hop = max(1, capacity // 2)
    some = scored < end
    users, begin, scored, end = users[some], begin[some], scored[some], end[some]
    # The event at index p of a history belongs to window max(0, ceil((p - C + 1) / hop)).
    first = np.maximum(0, -(-(scored - begin - capacity + 1) // hop))
    last = np.maximum(0, -(-(end - 1 - begin - capacity + 1) // hop))
    counts = last - first + 1
    window_user = np.repeat(np.arange(len(users)), counts)
    number = first[window_user] + np.arange(len(window_user)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = begin[window_user] + number * hop
    stop = np.minimum(start + capacity, end[window_user])
    new = np.where(number == 0, start, start - hop + capacity)  # earlier events are scored in the previous window
    return Split(users[window_user], start, stop, np.maximum(new, scored[window_user]))


def target_windows(
    users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray, capacity: int, targets: int
) -> Split:
    """Cut samples of at most C = `capacity` events in which each of the events scored .. end-1 of each user is scored
    once: up to `targets` at a time, starting from the end, with as many of the user's earlier events as there is room.

    users, begin, scored, end: [U] int64; begin: the users' first events.
    """
    blocks = training_windows(users, scored, end, targets)
    of_user = np.searchsorted(users, blocks.users)
    start = np.maximum(begin[of_user], blocks.end - capacity)
    return Split(blocks.users, start, blocks.end, blocks.begin)


class Layout(NamedTuple):
    """Describe how ranking lays out its tokens.

    capacity  the events of a sequence, C
    targets   the candidates at the end of a training sequence, m; None for the interleaved layout. An evaluation has
              one in a sequence, which sees all that happened before, of which there are C - m events as in training.
    """

    capacity: int
    targets: int | None = None

    def training(self, users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray) -> Split:
        """Cut samples for training on the events scored .. end-1 of each user, [U] each."""
        if self.targets is None:
            return training_windows(users, scored, end, self.capacity)
        return target_windows(users, begin, scored, end, self.capacity, self.targets)

    def scoring(self, users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray) -> Split:
        """Cut samples in which the events scored .. end-1 of each user, [U] each, are judged."""
        if self.targets is None:
            return scoring_windows(users, begin, scored, end, self.capacity)
        return target_windows(users, begin, scored, end, self.capacity - self.targets + 1, 1)


def label_table(dataset: Dataset, data_format: str, actions: dict[str, float | None]) -> np.ndarray:
    """Return [codes, A] int8: which of `actions` each action code of the data set stands for.

    actions: A names of flags or of values of the action column, or with a number the least value that counts.
    """
    source = FORMATS[data_format]
    assert dataset.actions is not None
    codes = np.arange(int(dataset.actions.max()) + 1)
    texts = dataset.action_names or ()
    named = ", ".join(shown(name) for name in (source.flags or texts)[:20] if name)
    columns: list[np.ndarray] = []
    for name, at_least in actions.items():
        if at_least is not None and not named:
            columns.append(codes >= at_least * source.action_scale)
        elif at_least is not None:
            raise ConfigError(f"task.actions: {name}: at_least is for numbers, the actions here are {named}")
        elif name in source.flags:
            columns.append(codes >> source.flags.index(name) & 1)
        elif name in texts:
            columns.append(codes == texts.index(name))
        else:
            raise ConfigError(f"task.actions: {name}: expected {named or 'a threshold, at_least'}")
    table = np.stack(columns, 1).astype(np.int8)
    for name, column in zip(actions, table[dataset.actions].T):
        if column.min() == column.max():
            raise ConfigError(f"task.actions: {name} is {column.min()} in every event of {dataset.name}")
    return table


def ranking_splits(dataset: Dataset, protocol: str, layout: Layout, *, train_on_valid: bool = False) -> Splits:
    """Cut a dataset into ranking samples of a layout.

    last_tenth: of a user's n events the last floor(n / 10) are the test, the floor(n / 10) before them the validation,
    and the others train; with `train_on_valid` the validation events train too, and valid is None. all: everything
    trains. Test events are scored with all earlier events of the user as history, as far as the window reaches.

    DataError for another protocol and where no training or test sample is left.
    """
    if protocol not in RANKING_PROTOCOLS:
        raise DataError(f"data.protocol: ranking takes {' or '.join(RANKING_PROTOCOLS)}, got {protocol!r}")
    first, last = dataset.user_offsets[:-1], dataset.user_offsets[1:]
    users = np.arange(dataset.num_users)
    tenth = (last - first) // 10
    if protocol == "all":
        notes = ["Protocol all: training uses every event; nothing is held out, so that nothing can be judged."]
        return Splits(protocol, layout.training(users, first, first, last), None, None, {}, notes, last)
    test_start = last - tenth
    valid_start = test_start - tenth
    train_end = test_start if train_on_valid else valid_start
    valid = None if train_on_valid else layout.scoring(users, first, valid_start, test_start)
    test = layout.scoring(users, first, test_start, last)
    if not len(test):
        raise DataError(f"{dataset.name}: protocol last_tenth leaves no test event: no user has 10 events")
    held_out = int((tenth == 0).sum())
    skipped = {"test: fewer than ten events, which all train": held_out} if held_out else {}
    notes = [
        "Protocol last_tenth: of a user's n events the last floor(n / 10) are the test"
        + (
            ", the rest trains."
            if train_on_valid
            else ", the floor(n / 10) before them the validation, the rest trains."
        ),
        "Every test event is scored with the user's earlier events as its history, their actions included; the actions "
        "of events in the same second are visible to later ones of that second.",
        FUTURE_NOTE,
    ]
    return Splits(protocol, layout.training(users, first, first, train_end), valid, test, skipped, notes, train_end)
