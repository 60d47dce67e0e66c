"""Build samples and batches for ranking, in one of two layouts.

interleaved  Each event is two tokens, its item and its action. At an item token, the model predicts the action that
             follows. Histories are cut between events, not between an item and its action.
targets      Each event is one token, of its item and its action. The last tokens of a sequence are candidates without
             their actions, which the model predicts.

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
from data.splits import ALL_NOTE, FUTURE_NOTE, Split, Splits
from data.types import DataError, Dataset, shown
from hstu_sparse.core.jagged import sequence_ids

RANKING_PROTOCOLS = ("last_tenth", "all")


@dataclass
class RankingBatch(Batch):
    """Sequences of tokens for ranking; `item_ids`, `actions` and `timestamps` are those of a token's event.

    target_ids is -1 for all tokens. A token without its event's action predicts that action; its query time is the
    event's time. The query time of a token with its event's action is the time of the next event of the sample; at the
    last event, it is the event's time.

    labels  [T, A] int8: for tokens that predict and whose label counts, 1 for each kind of action that happened and 0
            for others; -1 for other tokens
    events  [T] int64, the index of a token's event in the data set
    """

    labels: Tensor = field(default=None, metadata=per_token(padding=-1))  # type: ignore[assignment]
    events: Tensor = field(default=None, metadata=per_token(padding=-1))  # type: ignore[assignment]


class RankingBatches(Batches):
    """The batches of one ranking split in the interleaved layout; for other arguments see `Batches`.

    label_table: [codes, A] int8, 1 for each kind of action that an action code of the data set includes.
    """

    def __init__(self, dataset: Dataset, split: Split, *, label_table: np.ndarray, **options):
        super().__init__(dataset, split, **options)
        self._labels = torch.from_numpy(np.ascontiguousarray(label_table, np.int8)).to(self._assemble_on)

    def _tokens(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return 2 * (end - begin)

    def _assemble(self, first, last, total, seen, users, begin, scored, seen_begin, offsets, seen_offsets):
        seq_offsets = offsets[first : last + 1] - offsets[first]
        events, times, following, labels = self._events(first, last, total // 2, seq_offsets // 2, begin, scored)

        def both(x: Any) -> Any:  # a tensor or None
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
        """Return (events, times, the times of the next events, labels [., A]) of samples first .. last-1.

        count: the number of these samples' events; event_offsets: [B+1], their offsets.
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
    """The batches of one ranking split in the layout `targets`; the events scored[i] .. end[i]-1 are candidates."""

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
    """Cut the events begin .. end-1 of each user into disjoint samples of C = `capacity` events, from the end back.

    users, begin, end: [U] int64. The labels of all events count.
    """
    counts = -(-(end - begin) // capacity)
    sample_user = np.repeat(np.arange(len(users)), counts)
    place = np.arange(len(sample_user)) - np.repeat(np.cumsum(counts) - counts, counts)
    last = end[sample_user] - place * capacity
    first = np.maximum(begin[sample_user], last - capacity)
    return Split(users[sample_user], first, last, first)


def scoring_windows(users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray, capacity: int) -> Split:
    """Cut samples that score each of the events scored .. end-1 of each user exactly once.

    Windows of C = `capacity` events begin at every max(1, C // 2)-th event from the user's first one, `begin`. An event
    is scored in the first window that contains it, where its history is longest. users, begin, scored, end: [U] int64.
    """
    hop = max(1, capacity // 2)
    has_scored = scored < end
    users, begin, scored, end = users[has_scored], begin[has_scored], scored[has_scored], end[has_scored]
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
    """Cut samples of at most C = `capacity` events that score each of the events scored .. end-1 of each user once.

    From the end backwards, each sample scores up to `targets` events, after as many earlier events of the user as fit.
    users, begin, scored, end: [U] int64; begin: the users' first events.
    """
    blocks = training_windows(users, scored, end, targets)
    owners = np.searchsorted(users, blocks.users)
    start = np.maximum(begin[owners], blocks.end - capacity)
    return Split(blocks.users, start, blocks.end, blocks.begin)


class Layout(NamedTuple):
    """The layout of ranking tokens.

    capacity  C, the number of events of a sequence
    targets   m, the number of candidates at the end of a training sequence; None for the interleaved layout. In
              evaluation, a sequence has one candidate after at most C - m events, since a training sequence has at most
              so many events before its m candidates
    """

    capacity: int
    targets: int | None = None

    def training(self, users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray) -> Split:
        """Cut training samples on the events scored .. end-1 of each user, [U] each."""
        if self.targets is None:
            return training_windows(users, scored, end, self.capacity)
        return target_windows(users, begin, scored, end, self.capacity, self.targets)

    def scoring(self, users: np.ndarray, begin: np.ndarray, scored: np.ndarray, end: np.ndarray) -> Split:
        """Cut evaluation samples on the events scored .. end-1 of each user, [U] each."""
        if self.targets is None:
            return scoring_windows(users, begin, scored, end, self.capacity)
        return target_windows(users, begin, scored, end, self.capacity - self.targets + 1, 1)


def label_table(dataset: Dataset, data_format: str, actions: dict[str, float | None]) -> np.ndarray:
    """Return [codes, A] int8: 1 for each kind of action in `actions` that an action code of the data set includes.

    actions: the name of each kind -> the least value of the action column that counts, or None if the name is a flag
    or one of that column's values. ConfigError for names that the data do not have, and for kinds of action in all or
    no events.
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
            raise ConfigError(f"task.actions: {name}: at_least expects numbers, but the actions are {named}")
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
    """Cut a data set into ranking samples.

    last_tenth: the last floor(n / 10) of a user's n events are for the test, the floor(n / 10) before them for
    validation, the others for training; with `train_on_valid`, validation events are for training and valid is None.
    all: all events are for training. The history of a test event is all earlier events of the user, cut to the window.

    DataError for another protocol, and if there is no training or test sample.
    """
    if protocol not in RANKING_PROTOCOLS:
        raise DataError(f"data.protocol: expected {' or '.join(RANKING_PROTOCOLS)} for ranking, got {protocol!r}")
    first, last = dataset.user_offsets[:-1], dataset.user_offsets[1:]
    users = np.arange(dataset.num_users)
    tenth = (last - first) // 10
    if protocol == "all":
        notes = [ALL_NOTE]
        return Splits(protocol, layout.training(users, first, first, last), None, None, {}, notes, last)
    test_start = last - tenth
    valid_start = test_start - tenth
    train_end = test_start if train_on_valid else valid_start
    valid = None if train_on_valid else layout.scoring(users, first, valid_start, test_start)
    test = layout.scoring(users, first, test_start, last)
    if not len(test):
        raise DataError(f"{dataset.name}: protocol last_tenth gives no test event: no user has 10 events")
    held_out = int((tenth == 0).sum())
    skipped = {"test: fewer than ten events, all for training": held_out} if held_out else {}
    notes = [
        "Protocol last_tenth: the last floor(n / 10) of a user's n events are for the test"
        + (
            ", the others for training."
            if train_on_valid
            else ", the floor(n / 10) before them for validation, the others for training."
        ),
        "The history of a test event is the user's earlier events with their actions, including those of earlier "
        "events in the same second.",
        FUTURE_NOTE,
    ]
    return Splits(protocol, layout.training(users, first, first, train_end), valid, test, skipped, notes, train_end)
