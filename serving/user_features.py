"""Define the part of `Recommender` that stores the features of users."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data.features.files import read_users
from data.features.vocabulary import table_rows
from serving.errors import InvalidRequest
from serving.ids import user_keys
from serving.served import ServedRun


class UserFeatures(ServedRun):
    """The features of users."""

    def add_users(self, users, features: Mapping[str, Sequence]) -> None:
        """Store the features of users and delete their earlier ones; users need no events.

        Args:
            users: [n] ids.
            features: the run's features of users, name -> a value for each user: text, an integer or a boolean for a
                category, a list of these, a number, or None. Values that training did not have count as unknown.

        Raises InvalidRequest, with nothing changed, for example if the run has no features of users.
        """
        keys = user_keys(users)
        self.put_users(keys, self.contexts.check_users(len(keys), features))

    def add_users_of(self, path: str | Path) -> int:
        """Store the features of all users in a file like that of data.features.users; return the number of users.

        Raises InvalidRequest if the run has no features of users, DataError for a file that cannot be read.
        """
        file = self.config.data.features.users if self.config.data.features else None
        if file is None or self.contexts.users is None:
            raise InvalidRequest("features: the run has no features of users")
        ids, features = read_users(file.model_copy(update={"path": str(path)}))
        self.put_users(ids, table_rows(self.contexts.known.of("users"), features, len(ids)))
        return len(ids)

    def put_users(self, users: Sequence[str], rows: np.ndarray | None) -> None:
        """Store the rows [B, F, L] of users' features, None if the run has none; users: ids as text."""
        if rows is None:
            return
        with self._lock:
            for user in self.contexts.put_users(users, rows):
                if user in self._engine.caches and (history := self._histories.get(user)) is not None:
                    self._engine.changed(user, history, 0)
