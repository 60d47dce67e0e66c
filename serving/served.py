"""Define the base class of the parts of `Recommender`, with the model, the users' events and checks of requests."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from data.types import Dataset, shown
from data.vocabulary import Vocabulary
from models.hstu import SequenceModel
from models.tasks.build import build_task
from serving.contexts import Contexts
from serving.engine import Engine, UserRequest
from serving.errors import NoHistory
from serving.filters import FilterLists
from serving.histories import Histories, History
from serving.ids import ItemIds
from serving.options import ServingOptions, served_form, window_of
from serving.popularity import Popularity
from serving.search import Search
from serving.times import request_times
from training.config import RunConfig


class ServedRun:
    """A served run: the base class of `Recommender` and of its parts."""

    def __init__(
        self,
        model: SequenceModel,
        config: RunConfig,
        vocabulary: Vocabulary,
        *,
        has_timestamps: bool = True,
        name: str = "",
        label: str = "",
        options: ServingOptions | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """Serve a model.

        Args:
            model, config: a `SequenceModel` with its weights on its device, and the configuration it was built from.
            vocabulary: the ids of the rows of its tables.
            has_timestamps: whether the data had times; if not, times only order events, and the model ignores them.
            name: the run's id; a saved store is restored only if it has the same one.
            label: the model's name in replies; by default the configuration's name.
            options: see `ServingOptions`.
            clock: returns the current time in seconds, the time of requests without one.

        Raises ServingError for a model or an option that cannot be served.
        """
        options = options or ServingOptions()
        self.config, self.options, self.name, self.clock = config, options, name, clock
        self.label = label or config.name
        self.dataset: Dataset | None = None  # loaded by `history=True`; None once a log was replayed
        self.has_timestamps = has_timestamps
        self.ranking, self._task = served_form(config).candidates > 0, build_task(config)
        self.items, self.vocabulary = ItemIds(vocabulary.item_ids), vocabulary
        self.contexts = Contexts(config, vocabulary)
        self.actions = self.contexts.actions
        self.window = window_of(config, options.slide)
        self._histories = Histories(self.window, self.contexts.reads, options.most_users, options.most_events)
        self._engine = Engine(model, config, self.window, options, self.contexts)
        self._search = None if self.ranking else Search(self._engine, len(self.items))
        self.filters = FilterLists(self.items, vocabulary)
        half_life = options.popular_days * 86_400 if has_timestamps else None
        self._popularity = Popularity(len(self.items), half_life, clock)
        window, reads = self.window, self.actions is not None
        self._facts = {  # properties that a saved store must have, too
            "run": name, "items": len(self.items), "actions": reads, "capacity": window.capacity, "slide": window.slide
        }  # fmt: skip
        self._lock = threading.RLock()

    @property
    def model(self) -> SequenceModel:
        """The model that is served, in evaluation mode on its device."""
        return self._engine.model

    def _history(self, user: str) -> History:
        """Return the history of a user; NoHistory if there is none."""
        history = self._histories.get(user)
        if history is None:
            raise NoHistory(f"user {shown(user)} has no event")
        return history

    def check_requests(self, users: Sequence[str], at, features=None) -> list[UserRequest]:
        """Return checked requests of users (ids as text), valid until events are added.

        at: see `recommend`; features: see `score`.
        """
        if features:
            codes = self.contexts.next_codes(len(users), features, self.ranking).tolist()
            return [one._replace(code=code) for one, code in zip(self.check_requests(users, at), codes)]
        histories = [self._history(user) for user in users]
        last = np.array([history.last for history in histories], np.int64)
        if not self.has_timestamps:
            return [UserRequest(*each) for each in zip(users, histories, last.tolist())]
        times = request_times(at, users, last, self.clock)
        return [UserRequest(*each) for each in zip(users, histories, times.tolist())]

    @property
    def statistics(self) -> dict[str, int]:
        """Return counts by name: users, users with pages, pinned users, pages, pages in use, bytes and so on.

        Examples:
            >>> recommender.statistics["users"], recommender.statistics["users_with_pages"]
            (24, 0)
        """
        with self._lock:
            return {"users": len(self._histories)} | self._engine.statistics

    @property
    def description(self) -> dict:
        """The pages' format, the bytes of a full window in it and in bf16, the events of a window, and the slide.

        Examples:
            >>> recommender.description["cache"], recommender.description["events_of_a_window"]
            ('float32', 8)
        """
        return self._engine.description | {"events_of_a_window": self.window.capacity, "slide": self.window.slide}
