"""Decide for each event of a request whether it is accepted, before any event is logged."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from serving.errors import LimitReached, RequestError
from serving.http.event_ids import EventIds
from serving.http.requests import ACCEPTED, REPEATED, UNKNOWN_ITEM, Events
from serving.recommender import Recommender

EventRows = tuple[list[str], np.ndarray, np.ndarray, np.ndarray | None]


@dataclass
class Plan:
    """The outcome of a valid request.

    states   for each event ACCEPTED, REPEATED or UNKNOWN_ITEM
    columns  the accepted events in the form of `Recommender.append_rows`; None if there are none
    """

    request: Events
    states: list[str]
    columns: EventRows | None

    @property
    def users(self) -> list[str]:
        """The users of the accepted events."""
        return [] if self.columns is None else self.columns[0]

    @property
    def users_of_unknown(self) -> set[str]:
        """The users of events whose items the run does not know."""
        return {user for user, state in zip(self.request.users, self.states) if state == UNKNOWN_ITEM}

    @property
    def record(self) -> dict | None:
        """The record of the log: all events except repeated ones; unknown items may be known to a later run."""
        users, items, timestamps, actions, ids = self.request.columns([state != REPEATED for state in self.states])
        if not users:
            return None
        record = {"users": users, "items": items, "timestamps": timestamps, "actions": actions}
        return record if ids is None else record | {"ids": ids}


def planned(recommender: Recommender, ids: EventIds, requests: Sequence[Events]) -> list[Plan]:
    """Return plans of the valid requests that fit into the limits; set the errors of the others.

    The second of two events with the same user and id is repeated, even if both are in `requests`.
    """
    plans: list[Plan] = []
    names: set[tuple[str, str | None]] = set()
    for request in requests:
        try:
            plan = _plan(recommender, ids, names, request)
        except RequestError as error:
            request.done.set_exception(error)
        else:
            plans.append(plan)
            names.update(zip(request.users, request.ids or ()))
    with suppress(LimitReached):
        recommender.check_room([user for plan in plans for user in plan.users])
        return plans
    fitting: list[Plan] = []
    names.clear()
    for plan in plans:
        request = plan.request
        plan = _plan(recommender, ids, names, request)  # again: an earlier event with the id may be refused
        try:
            recommender.check_room([user for each in (*fitting, plan) for user in each.users])
        except LimitReached as error:
            request.done.set_exception(error)
        else:
            fitting.append(plan)
            names.update(zip(request.users, request.ids or ()))
    return fitting


def _plan(recommender: Recommender, ids: EventIds, names: set[tuple[str, str | None]], request: Events) -> Plan:
    """Plan a request; raise RequestError if it is invalid. names: (user, id) of events of the same round."""
    _, known = recommender.items.lookup(np.array(request.items))
    states = np.where(known, ACCEPTED, UNKNOWN_ITEM).tolist()
    earlier: set[tuple[str, str]] = set()
    for place, (user, event) in enumerate(zip(request.users, request.ids or ())):
        if event is not None:
            if (user, event) in names or (user, event) in earlier or ids.has(user, event):
                states[place] = REPEATED
            earlier.add((user, event))
    recommender.contexts.check_events(request.actions)
    if ACCEPTED not in states:
        return Plan(request, states, None)
    users, items, timestamps, actions, _ = request.columns([state == ACCEPTED for state in states])
    return Plan(request, states, recommender.checked(users, items, timestamps, actions))
