"""Choose the events of an update: those that a trained run has not seen, and older ones for replay.

Letters: E events, U users, I items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from data.ranking import Layout, training_windows
from data.splits import Split, Splits, hide_same_time, train_events
from data.types import DataError, Dataset, shown
from data.vocabulary import index_of


@dataclass(frozen=True, eq=False)
class NewEvents:
    """The events of a data set that a run was not trained on, as ascending indices.

    after  the time of the run's last training event
    new    later events, and unseen events of the same second
    late   earlier events that are not in the run's data
    lost   indices in the run's data: events that the data set lacks, though it has their user and their item; None if
           unknown
    num_present   the number of the run's events that the data set has; None if unknown
    left_out      the number of the run's events that are in the source, but left out by `data.where`; those of users or
           items that the data set does not have at all are not counted
    """

    after: int
    new: np.ndarray
    late: np.ndarray
    lost: np.ndarray | None = None
    num_present: int | None = None
    left_out: int = 0

    def notes(self) -> list[str]:
        """Return a sentence about events that are left out, in a list that is empty if there are none."""
        text = f"{self.left_out:,} events on which the run was trained are left out by data.where."
        return [text] if self.left_out else []


def new_events(dataset: Dataset, before: Dataset, train_end: np.ndarray) -> NewEvents:
    """Compare a data set with a run's data set, `before`; train_end: [U], that of the run's `Splits`.

    Events with the same user, item and time are equal; if `before` has n equal events, the first n are known.
    """
    for one in (dataset, before):
        if not one.has_timestamps:
            raise DataError(f"{one.name}: an update needs timestamps, and this source has none")
    after = int(before.timestamps[train_events(before, train_end)].max())
    users = np.repeat(index_of(before.user_ids, dataset.user_ids), np.diff(before.user_offsets))
    items = index_of(before.item_ids, dataset.item_ids)[before.items]
    has_both = (users >= 0) & (items >= 0)
    has_both &= (np.bincount(dataset.items, minlength=dataset.num_items) > 0)[items]
    old = users[has_both], items[has_both], before.timestamps[has_both]
    current = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets)), dataset.items, dataset.timestamps
    is_current = np.repeat([False, True], [len(old[0]), len(current[0])])
    user, item, time = (np.concatenate(pair) for pair in zip(old, current))
    order = np.lexsort((is_current, time, item, user))
    user, item, time, is_current = user[order], item[order], time[order], is_current[order]
    begins = np.append(True, (np.diff(user) != 0) | (np.diff(item) != 0) | (np.diff(time) != 0))
    group = np.cumsum(begins) - 1
    size = int(group[-1]) + 1
    old_count, current_count = (np.bincount(group[mask], minlength=size)[group] for mask in (~is_current, is_current))
    # The index of an event in its group of equal events, in which those of `before` come first.
    place = np.arange(len(group)) - np.flatnonzero(begins)[group]
    known = np.zeros(dataset.num_events, bool)
    known[order[is_current] - len(old[0])] = (place < 2 * old_count)[is_current]
    lost = np.flatnonzero(has_both)[order[~is_current & (current_count == 0)]]
    times = dataset.timestamps
    new = (times > after) | ((times == after) & ~known)
    late, num_present = np.flatnonzero((times < after) & ~known), int(has_both.sum()) - len(lost)
    return NewEvents(after, np.flatnonzero(new), late, np.sort(lost), num_present)


def with_left_out(events: NewEvents, all_rows: NewEvents) -> NewEvents:
    """Return `events` with lost events that the source has as `left_out` instead.

    all_rows: the comparison of the run with all rows of the source, also those that `data.where` leaves out.
    """
    assert events.lost is not None and all_rows.lost is not None
    lost = np.intersect1d(events.lost, all_rows.lost)
    return replace(events, lost=lost, left_out=len(events.lost) - len(lost))


def missing_events(events: NewEvents, dataset: Dataset, before: Dataset) -> DataError | None:
    """Return the error for a data set that is missing events of a run, or None; before: the run's data.

    Events of users or items that the data set does not have at all may be missing, unless these are all of the run's
    events.
    """
    assert events.lost is not None and events.num_present is not None
    if events.num_present and not len(events.lost):
        return None
    event = int(events.lost[0]) if len(events.lost) else 0
    user = shown(str(before.user_ids[before.users_of(np.array(event))]))
    item, time = shown(str(before.item_ids[before.items[event]])), before.timestamps[event]
    missing = before.num_events - events.num_present - events.left_out
    count = f"{missing:,}" if events.num_present else "all"
    left_out = f" and the {events.left_out:,} that data.where leaves out" if events.left_out else ""
    return DataError(
        f"{dataset.name}: {count} of the {before.num_events:,} events of the run are missing, for example user {user}, "
        f"item {item}, at {time}: expected all events, old and new, except those of deleted users{left_out}; to add a "
        "file of new events, give the path of a folder or a pattern with all files"
    )


def update_split(
    dataset: Dataset,
    splits: Splits,
    events: NewEvents,
    *,
    replay: float,
    max_seq_len: int,
    seed: int,
    layout: Layout | None = None,
) -> Split:
    """Return training samples whose targets are the new events, and `replay` older known events for each new one.

    Older events are taken from windows of random users and times, as many as possible from each window, so that there
    are few sequences. Only training events of the splits are targets. layout: for ranking tasks. DataError if no
    training event is new.
    """
    lead = int(layout is None)
    first, end = dataset.user_offsets[:-1] + lead, splits.train_end
    users = np.flatnonzero(end > first)
    first, end = first[users], end[users]
    if layout is None:
        windows = training_windows(users, first, end, max_seq_len)
    else:
        windows = layout.training(users, first, first, end)
    assert windows.scored is not None
    possible = np.zeros(dataset.num_events + 1, bool)
    possible[:-1] = train_events(dataset, splits.train_end)
    if lead:
        possible[dataset.user_offsets[:-1]] = False
    possible = possible[:-1]
    counted, older = np.zeros(dataset.num_events, bool), possible.copy()
    counted[events.new] = possible[events.new]
    older[events.new] = older[events.late] = False
    if not counted.any():
        later = f"; later events ({len(events.new):,}) are held out for evaluation or are the first ones of their users"
        raise DataError(
            f"{dataset.name}: no event to train on is later than the run's last one, at {events.after} (Unix seconds)"
            + (later if len(events.new) else "")
        )

    def inside(mask: np.ndarray) -> np.ndarray:
        total = np.append(0, np.cumsum(mask))
        return total[windows.end] - total[windows.scored]

    chosen, budget, older_counts = inside(counted) > 0, round(replay * int(counted.sum())), inside(older)
    for window in np.random.default_rng([seed, 2]).permutation(np.flatnonzero(older_counts)):
        if budget <= 0:
            break
        more = windows.scored[window] + np.flatnonzero(older[windows.scored[window] : windows.end[window]])
        counted[more[-budget:]] = True
        budget -= len(more)
        chosen[window] = True
    scored = None if layout is None else windows.scored[chosen]
    return Split(windows.users[chosen], windows.begin[chosen] - lead, windows.end[chosen], scored, counted=counted)


def judging_splits(
    dataset: Dataset,
    splits: Splits,
    events: NewEvents,
    *,
    max_seq_len: int,
    targets: str,
    same_time: str,
    layout: Layout | None = None,
) -> Splits:
    """Return splits whose test split has the new events as targets, with all earlier events of their user as history.

    targets: `first` for each user's first new event, `all` for every new event; ranking tasks, which have a layout, use
    every new event.
    """
    first, last = dataset.user_offsets[:-1], dataset.user_offsets[1:]
    owners = dataset.users_of(events.new)
    train_end = last.copy()
    np.minimum.at(train_end, owners, events.new)
    if layout is not None:
        test = layout.scoring(np.arange(dataset.num_users), first, train_end, last)
        counted = np.zeros(dataset.num_events, bool)
        counted[events.new] = True
        test = Split(test.users, test.begin, test.end, test.scored, counted=counted)
    else:
        usable = events.new > first[owners]
        chosen, users = events.new[usable], owners[usable]
        if targets == "first":
            users, places = np.unique(users, return_index=True)
            chosen = chosen[places]
        test = Split(users, np.maximum(first[users], chosen - max_seq_len), chosen + 1)
        if same_time == "hidden":
            test = hide_same_time(dataset, test, max_seq_len)
    note = (
        f"Evaluated on the events after the run's last training event, at {events.after} (Unix seconds); the history "
        "of each is all earlier events of its user."
    )
    notes = [note, *events.notes()]
    return Splits("new", splits.train, None, test if len(test) else None, {}, notes, train_end)
