"""Add the records of a log to a recommender."""

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

import numpy as np

from data.types import Dataset
from serving.histories import no_garbage_collection
from serving.http.log_reader import LogReader
from serving.recommender import Recommender


@no_garbage_collection()
def replay(recommender: Recommender, log: LogReader) -> dict[str, int]:
    """Add the events, items, named lists and users' features of a log to a recommender, without encoding events.

    Users whom the log deletes are deleted from the recommender, including their events of the run's data. Events of
    items or actions that the run does not know are left out: the log may be older than the run, or shared by two runs.
    Events that the run's data contain, with the same user, item and second, are left out, too.

    Returns the numbers of events: taken, left_out (unknown to the run), repeated (in the run's data).

    Raises LimitReached if there are more users or events than the recommender may store, LogError for a damaged log.
    """
    add_items(recommender, log.new_items.values())
    places: dict[str, int] = {}
    parts: list[tuple] = []
    counts = {"taken": 0, "left_out": 0, "repeated": 0}
    for part in log.parts():
        rows, known_items = item_rows(recommender, part.items)
        codes, known_actions = action_codes(recommender, part.actions)
        known = known_items[part.item] & known_actions[part.action]
        owners = np.repeat(np.arange(len(part.users)), part.counts)
        log.left_out.update(part.users[place] for place in np.unique(owners[~known]).tolist())
        present, owners = np.unique(owners[known], return_inverse=True)
        taken = [places.setdefault(part.users[place], len(places)) for place in present.tolist()]
        actions = None if codes is None else codes[part.action[known]]
        parts.append((np.array(taken, np.int64)[owners], rows[part.item[known]], part.timestamps[known], actions))
        counts["taken"] += len(owners)
        counts["left_out"] += len(known) - len(owners)
    for user in log.forgotten:
        recommender.forget(user)
    describe(recommender, {user: features for user, (_, features) in log.described.items()})
    for name, listed in log.lists.items():
        recommender.filters.put(name, listed)
    if counts["taken"]:
        columns: list[Any] = [None if x[0] is None else np.concatenate(x) for x in zip(*parts)]
        names = list(places)
        if recommender.dataset is not None:
            numbers = user_numbers(recommender.dataset)
            numbered = [-1 if user in log.forgotten else numbers.get(user, -1) for user in names]
            new = ~in_data(recommender.dataset, numbered, *columns[:3])
            counts["repeated"], counts["taken"] = int((~new).sum()), int(new.sum())
            columns = [column if column is None else column[new] for column in columns]
            present, columns[0] = np.unique(columns[0], return_inverse=True)
            names = [names[place] for place in present.tolist()]
        if names:
            recommender.add_many(names, *columns)
    recommender.dataset = None
    return counts


def add_items(recommender: Recommender, records: Iterable[dict]) -> None:
    """Add the items in records of a log or store to a recommender, except items with none of the run's features."""
    records = [*records]
    if not records:
        return
    items = [item for record in records for item in record["new_items"]]
    names = dict.fromkeys(name for record in records for name in record["features"])
    features = {
        name: [value for record in records for value in record["features"].get(name, [None] * len(record["new_items"]))]
        for name in names
    }
    recommender.add_checked(recommender.check_items(original_ids(items), features, strict=False))


def original_ids(items: list) -> list:
    """Convert the items of a log, integers or text, to ids of one type."""
    return items if all(isinstance(item, int) for item in items) else [str(item) for item in items]


def known_rows(
    recommender: Recommender, items: list, actions: list
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Return (rows of the item table, codes of events or None, mask of events known to the run) for events of a log.

    items: integers or text; actions: as in `action_codes`.
    """
    (rows, known), (codes, known_actions) = item_rows(recommender, items), action_codes(recommender, actions)
    return rows, codes, known & known_actions


def item_rows(recommender: Recommender, items: list) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows of the item table, mask of items known to the run) for integers or text."""
    return recommender.items.lookup(np.array(original_ids(items) or np.zeros(0, np.int64)))


def action_codes(recommender: Recommender, actions: list) -> tuple[np.ndarray | None, np.ndarray]:
    """Return (codes or None if the run reads none, mask of actions known to the run).

    actions: numbers, text or None, or `packed` with features.
    """
    return recommender.contexts.lookup(actions)


def describe(recommender: Recommender, features: Mapping[str, Mapping[str, Any]]) -> None:
    """Store users' features from a log or store, except features that the run does not know."""
    recommender.put_users([*features], recommender.contexts.lenient_users([*features.values()]))


def user_numbers(dataset: Dataset) -> dict[str, int]:
    """Return the numbers of the users of a data set by id as text."""
    return {str(user): number for number, user in enumerate(np.asarray(dataset.user_ids).tolist())}


def in_data(
    dataset: Dataset, numbers: list[int], places: np.ndarray, rows: np.ndarray, times: np.ndarray
) -> np.ndarray:
    """Return the mask [E] of events that the data set contains, with the same user, item and time.

    numbers: the users' numbers in the data set, -1 for a user to ignore; places: [E] indices into `numbers`; rows: [E]
    of the item table; times: [E] seconds.
    """
    counts = [0 if number < 0 else int(np.diff(dataset.user_offsets[number : number + 2])[0]) for number in numbers]
    events = np.concatenate(
        [np.arange(dataset.user_offsets[n], dataset.user_offsets[n + 1]) for n in numbers if n >= 0]
        or [np.zeros(0, np.int64)]
    )
    owners = np.concatenate([np.repeat(np.arange(len(numbers)), counts), places])
    items, seconds = np.concatenate([dataset.items[events], rows]), np.concatenate([dataset.timestamps[events], times])
    order = np.lexsort((seconds, items, owners))  # stable: among equal events, those of the data set come first
    first = np.ones(len(order), bool)
    for column in (owners, items, seconds):
        first[1:] &= column[order][1:] == column[order][:-1]
    first[1:] = ~first[1:]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    in_data = np.zeros(len(order), bool)
    in_data[order] = order[begins] < len(events)
    return in_data[len(events) :]


def catch_up(recommender: Recommender, log: LogReader, size: int) -> None:
    """Add the records after those that `replay` read, in order, up to `size` bytes of the log."""
    for record in log.further(size):
        if "forget" in record:
            log.left_out.discard(record["forget"])
            recommender.forget(record["forget"])
        elif "new_items" in record:
            add_items(recommender, [record])
        elif "user" in record:
            describe(recommender, {record["user"]: record["features"]})
        elif "list" in record:
            if record["items"] is None:
                recommender.filters.drop(record["list"])
            else:
                recommender.filters.put(record["list"], record["items"])
        else:
            users, actions = record["users"], record["actions"] or [None] * len(record["users"])
            rows, codes, known = known_rows(recommender, record["items"], actions)
            log.left_out.update(compress(users, ~known))
            if known.any():
                times = np.array(record["timestamps"], np.int64)[known]
                codes = None if codes is None else codes[known]
                recommender.append_rows(list(compress(users, known)), rows[known], times, codes, encode=False)
