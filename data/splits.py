"""Split the events of a data set into training, validation and test by a named protocol.

Letters: E events, U users, M samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.types import DataError, Dataset, did_you_mean

PROTOCOLS = ("leave_one_out", "published", "temporal", "all")

FUTURE_NOTE = (
    "Training data are split by user, not by time: the model may learn from other users' events that are later than "
    "the test event."
)
ALL_NOTE = "Protocol all: all events are for training; there is no evaluation."


@dataclass(frozen=True, eq=False)
class Split:
    """M samples: sample i has the events begin[i] .. end[i]-1 of the data set's flat columns.

    For retrieval, a sample has at least two events: its inputs are begin .. end-2, and the target of each is the next
    event. For ranking, each event is an input, and the labels of events scored[i] .. end[i]-1 count.

    users           [M] int64, user index
    begin           [M] int64
    end             [M] int64, exclusive
    scored          [M] int64; None for retrieval
    targets         [N] int64, the events to rank for each sample, which have the same time as event end[i]-1; None:
                    only event end[i]-1
    target_offsets  [M+1] int64, the offsets of `targets`; or None
    counted         [E] bool, the events of the data set whose target or label counts; None for all
    """

    users: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    scored: np.ndarray | None = None
    targets: np.ndarray | None = None
    target_offsets: np.ndarray | None = None
    counted: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.users)

    def select(self, samples: np.ndarray) -> Split:
        """Return the samples with these indices [S]."""
        scored = None if self.scored is None else self.scored[samples]
        columns = self.users[samples], self.begin[samples], self.end[samples], scored
        if self.targets is None or self.target_offsets is None:
            return Split(*columns, counted=self.counted)
        begin, end = self.target_offsets[samples], self.target_offsets[samples + 1]
        targets = np.concatenate([self.targets[b:e] for b, e in zip(begin, end)])
        return Split(*columns, targets, np.concatenate([[0], np.cumsum(end - begin)]), self.counted)


@dataclass(frozen=True, eq=False)
class Splits:
    """The samples for training, validation and test; `valid` and `test` may be None.

    skipped    "split: reason" -> the number of users left out of that split
    notes      sentences about the protocol, for reports
    train_end  [U] int64: training uses only the events user_offsets[u] .. train_end[u]-1 of user u
    """

    protocol: str
    train: Split
    valid: Split | None
    test: Split | None
    skipped: dict[str, int]
    notes: list[str]
    train_end: np.ndarray


def make_splits(
    dataset: Dataset,
    protocol: str,
    *,
    max_seq_len: int,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
    targets: str = "first",
    same_time: str = "seen",
) -> Splits:
    """Cut a data set into samples with a target and the latest inputs before it, at most max_seq_len.

    leave_one_out: a user's last event is the test target, the one before it the validation target, the others are for
    training.
    published: a user's last event is the test target, the others are for training; there is no validation.
    temporal: the latest `test_fraction` of all events is the test window, the `valid_fraction` before it the validation
    window; earlier events are for training. A user's target is their first event in a window; its inputs are the user's
    earlier events (for a test target, those of the validation window too). Events of the same second are in one window,
    the later one. With targets `all`, each event of a window is a target; its inputs are the user's earlier events.
    all: all events are for training; there is no validation and no test.

    same_time: with `hidden`, the history of a validation or test sample has no events with the target's time, and a
    user's targets with the same time are one sample.

    DataError for an unknown protocol, for `temporal` without timestamps, and if there is no training or test sample.
    """
    if protocol not in PROTOCOLS:
        raise DataError(f"data.protocol: expected one of {', '.join(PROTOCOLS)}, got {protocol!r}"
                        f"{did_you_mean(protocol, PROTOCOLS)}")  # fmt: skip
    if max_seq_len < 1:
        raise DataError(f"model.max_seq_len: expected at least 1, got {max_seq_len}")
    first, last = dataset.user_offsets[:-1], dataset.user_offsets[1:]
    skipped: dict[str, int] = {}

    def split(name: str, end: np.ndarray, has_target: np.ndarray, no_target: str, no_input: str) -> Split:
        """Return the samples that end at `end`, of users with a target and an input before it."""
        usable = has_target & (end - first >= 2)
        for reason, count in (
            (no_target, np.count_nonzero(~has_target)),
            (no_input, np.count_nonzero(has_target & ~usable)),
        ):
            if count:
                skipped[f"{name}: {reason}"] = int(count)
        users = np.flatnonzero(usable)
        end = end[users]
        return Split(users, np.maximum(first[users], end - (max_seq_len + 1)), end)

    all_users = np.ones(dataset.num_users, bool)
    if protocol == "temporal":
        valid_start, test_start, cuts = _time_windows(dataset, valid_fraction, test_fraction)
        train_end = valid_start
        no_history = "the first event in the window has no history"
        train = split("train", train_end, train_end > first, "no event before the first window", "only one event")
        test = split("test", test_start + 1, test_start < last, "no event in the window", no_history)
        valid = None
        if valid_fraction > 0:
            valid = split("valid", valid_start + 1, valid_start < test_start, "no event in the window", no_history)
        if targets == "all":
            test = _every_event(dataset, test_start, last, max_seq_len)
            valid = None if valid is None else _every_event(dataset, valid_start, test_start, max_seq_len)
        target_notes = {
            "first": "Each user's target is their first event in the window; its history is all earlier events.",
            "all": "Every event of the window is a target; its history is all earlier events of its user.",
        }
        notes = [
            f"Protocol temporal: events before {cuts[0]} are for training"
            + (f", those before {cuts[1]} for validation" if valid is not None else "")
            + ", later ones for the test (Unix seconds, the same for all users).",
            target_notes[targets],
            "No event of the training data is later than an event of the validation or test windows.",
        ]
        if valid is not None and not len(valid):
            valid = None
            notes.append(
                "No user with a history has an event in the validation window: the last weights are evaluated, since "
                "there is no validation."
            )
    elif protocol == "all":
        train_end, valid, test = last, None, None
        train = split("train", train_end, all_users, "", "fewer than two events")
        notes = [ALL_NOTE]
    else:
        held_out = 1 if protocol == "published" else 2
        train_end = np.maximum(first, last - held_out)
        train = split("train", train_end, all_users, "", "fewer than two events left")
        test = split("test", last, all_users, "", "fewer than two events")
        if protocol == "published":
            valid = None
            notes = [
                "Protocol published: a user's last event is the test target, the others are for training. There is no "
                "validation set; the last weights are evaluated."
            ]
        else:
            valid = split("valid", np.maximum(first, last - 1), all_users, "", "fewer than three events")
            notes = [
                "Protocol leave_one_out: a user's last event is the test target, the one before it the validation "
                "target, the others are for training; the test history includes the validation target."
            ]
        notes.append(FUTURE_NOTE)
    if same_time == "hidden":
        valid, test = (None if part is None else hide_same_time(dataset, part, max_seq_len) for part in (valid, test))
        valid = valid if valid is not None and len(valid) else None
        notes.append(
            "Events with the target's time are hidden from its history; a user's targets with the same time are ranked "
            "together, as several relevant items. Targets at a user's first time have no history and are left out."
        )
    for name, part in (("train", train), ("test", test)):
        if part is not None and not len(part):
            reasons = _reasons(skipped, name) or f"eval.same_time={same_time}"
            raise DataError(
                f"{dataset.name}: protocol {protocol} gives no {name} sample: a sample needs an input and a target "
                f"({reasons})"
            )
    return Splits(protocol, train, valid, test, skipped, notes, train_end)


def _every_event(dataset: Dataset, begin: np.ndarray, end: np.ndarray, max_seq_len: int) -> Split:
    """Return a sample for each event begin[u] .. end[u]-1 of each user u, if there is an earlier one."""
    first = dataset.user_offsets[:-1]
    begin = np.maximum(begin, first + 1)
    counts = np.maximum(end - begin, 0)
    users = np.repeat(np.arange(dataset.num_users), counts)
    last = np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(counts.sum()) + 1
    return Split(users, np.maximum(first[users], last - (max_seq_len + 1)), last)


def first_of_time(dataset: Dataset) -> np.ndarray:
    """Return the first event of the same user and time, for each event: [E] int64."""
    new = np.diff(dataset.timestamps, prepend=dataset.timestamps[:1] - 1) != 0
    new[dataset.user_offsets[:-1][np.diff(dataset.user_offsets) > 0]] = True
    return np.maximum.accumulate(np.where(new, np.arange(dataset.num_events), 0))


def hide_same_time(dataset: Dataset, split: Split, max_seq_len: int) -> Split:
    """Return samples that end at the first event with their target's time, with all distinct targets of that time.

    Targets without an earlier event are left out. DataError if the data have no timestamps.
    """
    if not dataset.has_timestamps:
        raise DataError(f"{dataset.name}: eval.same_time=hidden needs timestamps, and this source has none")
    targets = target_events(split)
    start = first_of_time(dataset)[targets]
    user_first = dataset.user_offsets[split.users]
    usable = start > user_first
    targets, start, users = targets[usable], start[usable], split.users[usable]
    starts, sample = np.unique(start, return_inverse=True)  # in the order of the users
    pairs = sample * np.int64(dataset.num_items) + dataset.items[targets]
    _, distinct = np.unique(pairs, return_index=True)
    offsets = np.append(0, np.cumsum(np.bincount(sample[distinct], minlength=len(starts))))
    sample_users = np.zeros(len(starts), np.int64)
    sample_users[sample] = users
    begin = np.maximum(dataset.user_offsets[sample_users], starts - max_seq_len)
    return Split(sample_users, begin, starts + 1, None, targets[distinct], offsets)


def _reasons(skipped: dict[str, int], name: str) -> str:
    return "; ".join(f"{n} users: {k.split(': ')[1]}" for k, n in skipped.items() if k.startswith(name + ":"))


def _time_windows(dataset: Dataset, valid_fraction: float, test_fraction: float):
    """Return (each user's first event from the begin of the validation window on [U], the same for the test, both
    begins).

    For a user without such an event, it is the end of the user's events.
    """
    if not dataset.has_timestamps:
        raise DataError(f"{dataset.name}: protocol temporal needs timestamps, and this source has none")
    if not (0 <= valid_fraction < 1 and 0 < test_fraction < 1 and valid_fraction + test_fraction < 1):
        raise DataError(
            "data.valid_fraction and data.test_fraction: expected fractions with a sum below 1, the second above 0, "
            f"got {valid_fraction} and {test_fraction}"
        )
    events = dataset.num_events
    ranks = [min(events - 1, round(events * (1 - test_fraction - f))) for f in (valid_fraction, 0.0)]
    cuts = [int(x) for x in np.partition(dataset.timestamps, ranks)[ranks]]
    starts = []
    for cut in cuts:
        before = np.zeros(events + 1, np.int64)
        np.cumsum(dataset.timestamps < cut, out=before[1:])
        first = dataset.user_offsets[:-1]
        starts.append(first + before[dataset.user_offsets[1:]] - before[first])
    return starts[0], starts[1], cuts


def target_events(split: Split) -> np.ndarray:
    """Return the events to rank, sample by sample: [N]."""
    return split.end - 1 if split.targets is None else split.targets


def target_samples(split: Split) -> np.ndarray:
    """Return the sample of each of `target_events`, [N]."""
    samples = np.arange(len(split))
    return samples if split.target_offsets is None else np.repeat(samples, np.diff(split.target_offsets))


def repeats(dataset: Dataset, events: np.ndarray) -> np.ndarray:
    """Return for each of `events` [N] whether its user had the same item before: [N] bool."""
    users = np.unique(dataset.users_of(events))
    begin, end = dataset.user_offsets[users], dataset.user_offsets[users + 1]
    counts = end - begin
    all_events = np.repeat(end - np.cumsum(counts), counts) + np.arange(counts.sum())
    pairs = np.repeat(users, counts) * np.int64(dataset.num_items) + dataset.items[all_events]
    _, first = np.unique(pairs, return_index=True)
    repeated = np.ones(len(pairs), bool)
    repeated[first] = False
    return repeated[np.searchsorted(all_events, events)]


def train_item_counts(dataset: Dataset, splits: Splits) -> np.ndarray:
    """Return the number of training events of each item, [num_items]; events outside of the window count, too."""
    in_training = train_events(dataset, splits.train_end)
    return np.bincount(dataset.items[in_training], minlength=dataset.num_items).astype(np.int64)


def train_events(dataset: Dataset, train_end: np.ndarray) -> np.ndarray:
    """Return the mask [E] of training events: user_offsets[u] .. train_end[u]-1 of each user u."""
    # +1 at the begin of a user's training events, -1 at their end: the cumulative sum is the mask.
    edges = np.zeros(dataset.num_events + 1, np.int8)
    has_events = train_end > dataset.user_offsets[:-1]
    edges[dataset.user_offsets[:-1][has_events]] += 1
    edges[train_end[has_events]] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)
