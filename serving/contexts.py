"""Number what events carry beside item and time, and the features of users, in the terms of the run's tables.

Numpy, and torch for the copies on the device. Letters: E events, F features, L the most values of one.
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

PACKED = "\0"  # begins the text of an event's action and features in a log or a store; no client's text has it
MOST_CODES = 2**31


def packed(action: Any, features: Mapping[str, Any] | None) -> Any:
    """Return an event's action and features as one value, which a log and a store have in place of the action."""
    return PACKED + json.dumps([action, features], sort_keys=True) if features else action


def unpacked(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return (action, features) of a value of `packed`."""
    if isinstance(value, str) and value.startswith(PACKED):
        action, features = json.loads(value[1:])
        return action, features
    return value, {}


def as_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Return the features of users or events by name: a value for each, None for one without."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


class RowTable:
    """The distinct rows of features that were met, numbered; number 0 has no value.

    rows: [numbers, F, L] int32, -1 behind the last value
    """

    def __init__(self, num_features: int):
        self.rows = np.full((1, num_features, 1), -1, np.int32)
        self._numbers = {self.rows.tobytes(): 0}
        self._copy: Tensor | None = None
        self._copied = 0

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of rows [n, F, L], int64, of which new ones get the next."""
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
        """Take these rows, [numbers, F, L] int32, in place of all."""
        self.rows, self._copy = np.ascontiguousarray(rows, np.int32), None
        self._numbers = {row.tobytes(): number for number, row in enumerate(self.rows)}

    def tensor(self, device: torch.device) -> Tensor:
        """Return the rows on the device, [at least as many, F, L] int64: the same tensor until it is full."""
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

    A code is the number of an event's features times the run's number of actions, plus the action's own code; without
    features it is the action's.

    actions  of a run that reads actions
    events   the features of events that were met; None for a run that knows none
    users    the same of users
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
        self._of_users: dict[str, int] = {}

    def codes(self, actions: Any, count: int, features: Mapping[str, Sequence] | None = None) -> np.ndarray | None:
        """Return the codes [E] int32 of `count` events; None for a run that reads none.

        actions: [E], or `packed` with features; features: by name a value for each event.

        Raises MissingActions, InvalidRequest, LimitReached.
        """
        if features is None and isinstance(actions, list):
            split = [unpacked(value) for value in actions]
            features = as_columns([one for _, one in split])
            actions = [action for action, _ in split]
            actions = None if all(action is None for action in actions) else actions
        if self.actions is None and actions is not None:
            raise InvalidRequest("actions: the run reads none, leave them out")
        action_codes = None if self.actions is None else self.actions.codes(actions, count)
        return self.joined(action_codes, self._rows("events", count, features or {}))

    def check_events(self, actions: list | None) -> None:
        """Raise InvalidRequest for features, `packed` with actions, that the run does not know or that do not fit."""
        columns = as_columns([unpacked(value)[1] for value in actions or ()])
        if columns:
            self._rows("events", len(actions or ()), columns)

    def known_before(self, ranking: bool) -> list[KnownFeature]:
        """Return the features of events that are known before the user acts, of which ranking may be told."""
        return [one for one in self.known.of("events") if ranking and one.known == "before"]

    def next_codes(self, count: int, features: Mapping[str, Sequence], ranking: bool) -> np.ndarray:
        """Return the codes [B] of the next events of `count` users, by features that are known before the user acts."""
        before = {one.name for one in self.known_before(ranking)}
        if wrong := [name for name in features if name not in before]:
            names = ", ".join(sorted(before)) or "none"
            raise InvalidRequest(
                f"features: {shown(wrong[0])} is not known of an event before the user acts (these are: {names})"
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
        """Return codes [E] int32 of the actions' codes [E] and rows of events' features [E, F, L]."""
        if self.events is None or rows is None:
            return None if not self.reads else actions
        codes = self.events.numbers(rows) * self.base
        if self.actions is not None and actions is not None:
            codes += actions
        if codes.max(initial=0) >= MOST_CODES:
            raise LimitReached("features: too many distinct ones of events")
        return codes.astype(np.int32)

    def lookup(self, values: list) -> tuple[np.ndarray | None, np.ndarray]:
        """Return (codes or None, which events the run knows) of actions of a log: numbers, text, None, or `packed`."""
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
        """Return the actions' own codes of events; None for a run that reads no actions."""
        return None if self.actions is None else codes % self.base

    def check_users(self, count: int, features: Mapping[str, Sequence]) -> np.ndarray:
        """Return the rows [count, F, L] of users' features, given by name; InvalidRequest."""
        rows = self._rows("users", count, features)
        if rows is None:
            raise InvalidRequest("features: the run has no features of users")
        return rows

    def lenient_users(self, features: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """Return the rows of users' features as a log has them; None for a run that knows none."""
        if self.users is None:
            return None
        return rows_of_columns(self.known, "users", len(features), as_columns(features), strict=False)

    def put_users(self, users: Sequence[str], rows: np.ndarray) -> list[str]:
        """Store the rows [B, F, L] of users' features; return the users whose features changed."""
        assert self.users is not None
        numbers = self.users.numbers(rows).tolist()
        changed = [user for user, number in zip(users, numbers) if self._of_users.get(user, 0) != number]
        self._of_users.update(zip(users, numbers))
        return changed

    def put_data(self, users: Sequence[str], rows: np.ndarray | None) -> None:
        """Store the rows of the users of a data set whose events were just added, so that no page has to change."""
        if rows is not None:
            self.put_users(users, rows)

    def of_user(self, user: str) -> int:
        """Return the number of a user's features, 0 for none."""
        return self._of_users.get(user, 0)

    def forget(self, user: str) -> bool:
        """Drop a user's features; return whether there were any."""
        return self._of_users.pop(user, None) is not None

    def batch_columns(self, codes: Tensor, users: Tensor) -> dict[str, Any]:
        """Return the columns of a batch by codes of events and numbers of users' features, [T] each."""
        columns: dict[str, Any] = {"actions": codes}
        if self.events is not None:
            details = torch.div(codes, self.base, rounding_mode="floor")
            columns = {"actions": codes % self.base, "event_features": self.events.tensor(codes.device)[details]}
        if self.users is not None:
            columns["user_features"] = self.users.tensor(codes.device)[users]
        return columns

    def tensors(self, device: torch.device) -> list[int]:
        """Bring the rows on the device up to date; return where they are, which changes when they have moved."""
        tables = [table for table in (self.events, self.users) if table is not None]
        return [table.tensor(device).data_ptr() for table in tables]

    def stored(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return (arrays by name, the numbers of users' features) for a saved store."""
        tables = {"event_rows": self.events, "user_rows": self.users}
        return {name: table.rows for name, table in tables.items() if table is not None}, dict(self._of_users)

    def restore(self, arrays: Mapping[str, np.ndarray], of_users: Mapping[str, int]) -> None:
        """Take what `stored` returned in place of all."""
        for name, table in (("event_rows", self.events), ("user_rows", self.users)):
            if table is not None and name in arrays:
                table.replace(arrays[name])
        self._of_users = dict(of_users)
