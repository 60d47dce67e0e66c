"""Map actions and features of events, and features of users, to integer codes and rows of the run's tables.

Letters: E events, B users, F features, L the most values of a feature.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.features.new_items import rows_of_columns
from data.features.vocabulary import FeatureVocabulary, KnownFeature
from data.types import DataError, shown
from data.vocabulary import Vocabulary
from serving.actions import ActionCodes
from serving.errors import InvalidRequest, LimitReached
from training.config import RunConfig

PACKED = "\0"  # prefix of `packed` texts; texts of clients contain no NUL
MOST_CODES = 2**31


def packed(action: Any, features: Mapping[str, Any] | None) -> Any:
    """Return an event's action and features as one value, which logs and stores save in the place of the action."""
    return PACKED + json.dumps([action, features], sort_keys=True) if features else action


def unpacked(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return (action, features) of a value that `packed` returned."""
    if isinstance(value, str) and value.startswith(PACKED):
        action, features = json.loads(value[1:])
        return action, features
    return value, {}


def as_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Return features by name, with a value for each user or event, None if it has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


class RowTable:
    """The distinct rows of feature values seen so far, numbered from 0; row 0 has no values.

    rows: [rows, F, L] int32, padded with -1
    """

    def __init__(self, num_features: int):
        self.rows = np.full((1, num_features, 1), -1, np.int32)
        self._numbers = {self.rows.tobytes(): 0}
        self._copy: Tensor | None = None
        self._copied = 0

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers [n] int64 of rows [n, F, L]; new rows are added."""
        if not len(rows):
            return np.zeros(0, np.int64)
        longest = max(rows.shape[2], self.rows.shape[2])
        if longest > self.rows.shape[2]:
            self.replace(_widened(self.rows, longest))
        distinct, inverse = np.unique(_widened(rows, longest), axis=0, return_inverse=True)
        numbers, new = np.empty(len(distinct), np.int64), list[np.ndarray]()
        for place, row in enumerate(distinct):
            number = self._numbers.setdefault(row.tobytes(), len(self._numbers))
            if number >= len(self.rows) + len(new):
                new.append(row)
            numbers[place] = number
        if new:
            self.rows = np.concatenate([self.rows, np.stack(new)])
        return numbers[inverse.reshape(-1)]

    def replace(self, rows: np.ndarray) -> None:
        """Replace all rows by these, [rows, F, L] int32."""
        self.rows, self._copy = np.ascontiguousarray(rows, np.int32), None
        self._numbers = {row.tobytes(): number for number, row in enumerate(self.rows)}

    def tensor(self, device: torch.device) -> Tensor:
        """Return the rows on the device, [at least as many, F, L] int64: the same tensor until it has to grow."""
        count = len(self.rows)
        if self._copy is None or count > len(self._copy):
            room = max(64, 2 * count)
            self._copy = torch.full((room, *self.rows.shape[1:]), -1, dtype=torch.int64, device=device)
            self._copied = 0
        if self._copied < count:
            self._copy[self._copied : count] = torch.from_numpy(self.rows[self._copied :]).to(self._copy)
            self._copied = count
        return self._copy


def _widened(rows: np.ndarray, longest: int) -> np.ndarray:
    more = longest - rows.shape[2]
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, 0), (0, more)), constant_values=-1), np.int32)


class Contexts:
    """The codes of events' actions and features, and the features of users.

    The code of an event is the row number of its features in `events` times the run's number of actions, plus the code
    of its action; without features it is the code of the action.

    actions  the codes of actions; None if the run does not read actions
    events   the rows of features of events seen so far; None if the run has no features of events
    users    the same for users
    reads    whether events have codes
    """

    def __init__(self, config: RunConfig, vocabulary: Vocabulary):
        known = vocabulary.features
        self.known = known or FeatureVocabulary(())
        self.actions = ActionCodes(config, vocabulary) if config.embeds_actions else None
        self.events, self.users = (
            RowTable(len(features)) if (features := self.known.of(entity)) else None for entity in ("events", "users")
        )
        self.reads = self.actions is not None or self.events is not None
        self.base = 1 if self.actions is None else max(1, self.actions.count)
        self._user_numbers: dict[str, int] = {}

    def codes(self, actions: Any, count: int, features: Mapping[str, Sequence] | None = None) -> np.ndarray | None:
        """Return the codes [E] int32 of `count` events; None if the run reads neither actions nor features of events.

        actions: [E], or `packed` with features; features: name -> a value for each event.

        Raises MissingActions, InvalidRequest, LimitReached.
        """
        if features is None and isinstance(actions, list):
            split = [unpacked(value) for value in actions]
            features = as_columns([one for _, one in split])
            actions = [action for action, _ in split]
            actions = None if all(action is None for action in actions) else actions
        if self.actions is None and actions is not None:
            raise InvalidRequest("actions: the run does not read actions, leave them out")
        action_codes = None if self.actions is None else self.actions.codes(actions, count)
        return self.joined(action_codes, self._rows("events", count, features or {}))

    def check_events(self, actions: list | None) -> None:
        """Raise InvalidRequest if features, `packed` with actions, are unknown to the run or have invalid values."""
        columns = as_columns([unpacked(value)[1] for value in actions or ()])
        if columns:
            self._rows("events", len(actions or ()), columns)

    def known_before(self, ranking: bool) -> list[KnownFeature]:
        """Return the features of events that are known before the user acts; none if the run is not a ranking run."""
        return [one for one in self.known.of("events") if ranking and one.known == "before"]

    def next_codes(self, count: int, features: Mapping[str, Sequence], ranking: bool) -> np.ndarray:
        """Return the codes [B] of the next events of `count` users, from features known before the user acts."""
        before = {one.name for one in self.known_before(ranking)}
        if wrong := [name for name in features if name not in before]:
            if not ranking:
                raise InvalidRequest("features: only a run of task ranking takes features of the next event")
            names = ", ".join(sorted(before)) or "none"
            raise InvalidRequest(
                f"features: {shown(wrong[0])} is not a feature of events with known=before; the run has {names}"
            )
        codes = self.joined(None, self._rows("events", count, features))
        assert codes is not None
        return codes

    def _rows(self, entity: str, count: int, features: Mapping[str, Sequence]) -> np.ndarray | None:
        if not features and getattr(self, entity) is None:
            return None
        try:
            return rows_of_columns(self.known, entity, count, features)
        except DataError as error:
            raise InvalidRequest(str(error)) from None

    def joined(self, actions: np.ndarray | None, rows: np.ndarray | None) -> np.ndarray | None:
        """Combine codes of actions [E] and rows of features of events [E, F, L] into codes [E] int32."""
        if self.events is None or rows is None:
            return None if not self.reads else actions
        codes = self.events.numbers(rows) * self.base
        if self.actions is not None and actions is not None:
            codes += actions
        if codes.max(initial=0) >= MOST_CODES:
            raise LimitReached(f"features: expected at most {MOST_CODES:,} combinations of action and features")
        return codes.astype(np.int32)

    def lookup(self, values: list) -> tuple[np.ndarray | None, np.ndarray]:
        """Return (codes or None, mask of known events) for a log's actions: numbers, text, None, or `packed`."""
        split = [unpacked(value) for value in values]
        actions = [action for action, _ in split]
        if self.actions is None:
            codes, known = None, np.array([action is None for action in actions], bool)
        else:
            codes, known = self.actions.lookup(actions)
        rows = None
        if self.events is not None:
            columns = as_columns([features for _, features in split])
            rows = rows_of_columns(self.known, "events", len(values), columns, strict=False)
        return self.joined(codes, rows), known

    def action_codes(self, codes: np.ndarray) -> np.ndarray | None:
        """Return the action codes in codes of events; None if the run does not read actions."""
        return None if self.actions is None else codes % self.base

    def check_users(self, count: int, features: Mapping[str, Sequence]) -> np.ndarray:
        """Return the rows [count, F, L] of users' features, given by name; raise InvalidRequest if they are invalid."""
        rows = self._rows("users", count, features)
        if rows is None:
            raise InvalidRequest("features: the run has no features of users")
        return rows

    def lenient_users(self, features: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """Return the rows of users' features from a log, unknown features left out; None if the run has none."""
        if self.users is None:
            return None
        return rows_of_columns(self.known, "users", len(features), as_columns(features), strict=False)

    def put_users(self, users: Sequence[str], rows: np.ndarray) -> list[str]:
        """Store the rows [B, F, L] of users' features; return the users whose features changed."""
        assert self.users is not None
        numbers = self.users.numbers(rows).tolist()
        changed = [user for user, number in zip(users, numbers) if self._user_numbers.get(user, 0) != number]
        self._user_numbers.update(zip(users, numbers))
        return changed

    def put_data(self, users: Sequence[str], rows: np.ndarray | None) -> None:
        """Store the rows of users of a data set, before any of their events is encoded."""
        if rows is not None:
            self.put_users(users, rows)

    def user_number(self, user: str) -> int:
        """Return the row number of a user's features in `users`, 0 if there are none."""
        return self._user_numbers.get(user, 0)

    def forget(self, user: str) -> bool:
        """Delete a user's features; return whether there were any."""
        return self._user_numbers.pop(user, None) is not None

    def batch_columns(self, codes: Tensor, users: Tensor) -> dict[str, Any]:
        """Return a batch's columns for codes of events and row numbers of users' features, [T] each."""
        columns: dict[str, Any] = {"actions": codes}
        if self.events is not None:
            details = torch.div(codes, self.base, rounding_mode="floor")
            columns = {"actions": codes % self.base, "event_features": self.events.tensor(codes.device)[details]}
        if self.users is not None:
            columns["user_features"] = self.users.tensor(codes.device)[users]
        return columns

    def tensors(self, device: torch.device) -> list[int]:
        """Copy new rows to the device; return the addresses of the tables, which change when a table grows."""
        tables = [table for table in (self.events, self.users) if table is not None]
        return [table.tensor(device).data_ptr() for table in tables]

    def stored(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return (arrays by name, the row numbers of users' features) for a saved store."""
        tables = {"event_rows": self.events, "user_rows": self.users}
        return {name: table.rows for name, table in tables.items() if table is not None}, dict(self._user_numbers)

    def restore(self, arrays: Mapping[str, np.ndarray], user_numbers: Mapping[str, int]) -> None:
        """Replace everything by what `stored` returned."""
        for name, table in (("event_rows", self.events), ("user_rows", self.users)):
            if table is not None and name in arrays:
                table.replace(arrays[name])
        self._user_numbers = dict(user_numbers)
