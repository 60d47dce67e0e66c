"""The routes of the service: events and items in, recommendations and scores out, filters, users, health, metrics."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, FastAPI, Path, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from pydantic.json_schema import SkipJsonSchema
from starlette.exceptions import HTTPException

from serving.errors import RequestError
from serving.http import bodies, schemas
from serving.http.bodies import Limits
from serving.http.event_log import EventLog
from serving.http.limits import ANSWERED_BY, Guard, Metrics
from serving.http.page import API_PAGE
from serving.http.redis_store import SharedUsers
from serving.http.requests import (
    ACCEPTED,
    ADDED,
    KNOWN,
    REPEATED,
    UNKNOWN_ITEM,
    DropList,
    Forget,
    Lists,
    Read,
    Recommend,
)
from serving.http.routing import EncodedRoute, answer_errors, check_query
from serving.http.swap import ModelRefused, Models, Watch
from serving.http.worker import Worker
from serving.recommender import Recommender

LITTLE = 2**14  # bytes of a body that is parsed at once; to parse one of 1 MiB takes tens of milliseconds


def create_app(
    recommender: Recommender,
    log: EventLog | None,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    store: SharedUsers | None = None,
    models: Models | None = None,
    watch: float | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Create the service of a recommender; it starts and stops the model thread with the application.

    log: the log that accepted events are written to before they are acknowledged; None with a store, which services
    share, and in tests. token: the bearer token for every route but those that say whether the service lives and the
    page of the routes. models: the runs that may take the place of the one that serves; None for no others. watch: look
    for a newer run every so many seconds.
    """
    limits = limits or Limits()
    worker = Worker(recommender, log, limits.waiting, store=store)
    metrics = Metrics(lambda: worker.recommender)
    worker.observe = metrics.together.observe
    # One thread: a body is parsed without releasing Python's lock, so that more would only keep the event loop waiting.
    parser = ThreadPoolExecutor(1, "parser")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        watching = None
        if watch is not None and models is not None:
            watching = Watch(models, worker, log, watch)
            watching.start()
        yield
        if watching is not None:
            await asyncio.to_thread(watching.stop)
        await asyncio.to_thread(worker.stop)
        parser.shutdown()

    def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
        return {status: {"model": bodies.Error} for status in statuses}

    def secured(*statuses: int) -> dict[str, Any]:
        """Return the options of a route that takes the token, and may answer with more statuses than all do."""
        if token is None:
            return {"responses": errors(*statuses)}
        # `Guard` checks the token: this is for the OpenAPI document.
        return {"responses": errors(401, *statuses), "dependencies": [Security(HTTPBearer(auto_error=False))]}

    app = FastAPI(
        title="hstu_sparse", description=__doc__, version="1", lifespan=lifespan,
        responses=errors(400, 404, 408, 409, 413, 415, 422, 500, 503), dependencies=[Depends(check_query)],
        redirect_slashes=False, docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.router.route_class = EncodedRoute
    app.add_middleware(Guard, metrics=metrics, token=token, limits=limits)
    answer_errors(app)

    async def answer(request) -> Any:
        """Return the model thread's answer to a request."""
        result = await asyncio.wrap_future(worker.put(request))
        ANSWERED_BY.set(request.model)
        return result

    async def parsed(request: Request, parse: Callable[[bytes], Any]) -> Any:
        """Parse a body, a large one in a thread; RequestValidationError for one that does not have the right form."""
        kind, _, _ = request.headers.get("content-type", "").partition(";")
        if kind.strip().lower() != "application/json":
            raise HTTPException(415, "expected a body of the type application/json")
        body = await request.body()
        try:
            if len(body) <= LITTLE:
                return parse(body)
            return await asyncio.get_running_loop().run_in_executor(parser, parse, body)
        except ValidationError as fault:
            first = fault.errors(include_url=False)[0]
            raise RequestValidationError([first | {"loc": ("body", *first["loc"])}]) from None

    async def answer_lists(request: Recommend) -> Lists:
        lists = await answer(request)
        for each in lists.users:
            kind = "error" if isinstance(each, RequestError) else "cold" if each.cold else "known"
            metrics.lists.labels(kind, request.model).inc()
        return lists

    Length = Annotated[int, Query(ge=1, le=limits.list)]
    At = Annotated[bodies.QuerySeconds | SkipJsonSchema[None], Query(description="seconds since 1970; by default now")]

    features = recommender.filters.features
    where_schema, most_schema = (schemas.pairs_schema(features, value) for value in (".+", "[0-9]{1,9}"))

    async def list_query(
        k: Length = 10,
        at: At = None,
        exclude_seen: Annotated[bool | SkipJsonSchema[None], Query(description=bodies.SEEN)] = None,
        cold: Annotated[bodies.Cold, Query(description=bodies.COLD)] = "popular",
        allow: Annotated[list[str], Query(description="only these items")] = [],  # noqa: B006
        deny: Annotated[list[str], Query(description="none of these items")] = [],  # noqa: B006
        where: Annotated[list[str], Query(description=bodies.WHERE, json_schema_extra=where_schema)] = [],  # noqa: B006
        at_most: Annotated[list[str], Query(description=bodies.AT_MOST, json_schema_extra=most_schema)] = [],  # noqa: B006
        filters: Annotated[list[str], Query(description="names of uploaded lists")] = [],  # noqa: B006
    ) -> Callable[[str], Recommend]:
        """Return a function that builds a user's request of the query."""
        chosen = bodies.query_filter(allow, deny, where, at_most, filters)
        return lambda user: Recommend([user], k, at, exclude_seen, chosen, cold)

    ListQuery = Annotated[Callable[[str], Recommend], Depends(list_query)]
    ListName = Annotated[str, Path(min_length=1, max_length=bodies.LONGEST_ID, description="the list's name")]
    lists_out: dict[str, Any] = {"include_in_schema": not recommender.ranking}
    known = recommender.vocabulary.features
    items_in: dict[str, Any] = {"include_in_schema": known is not None and known.trained is not None}

    @app.post("/events", **secured(507), openapi_extra=schemas.events_body(recommender, limits.events))
    async def append_events(request: Request) -> bodies.Accepted:
        """Add events. They are in the log when this answers, and every request from then on knows them. The answer says
        for each whether it was accepted, repeated or of an item that the model does not know.
        """
        events = await parsed(request, lambda content: bodies.parse_events(content, limits, int(clock())))
        states = await answer(events)
        counts = Counter(states)
        for state, count in counts.items():
            metrics.events.labels(state, events.model).inc(count)
        return bodies.Accepted(
            model=events.model, accepted=counts[ACCEPTED], repeated=counts[REPEATED], unknown=counts[UNKNOWN_ITEM],
            events=states,
        )  # fmt: skip

    @app.post("/items", **secured(507), **items_in, openapi_extra=schemas.items_body(recommender, limits.items))
    async def add_items(request: Request) -> bodies.ItemsAdded:
        """Add items that the model was not trained on and knows by their features. They are in the log when this
        answers, and every request from then on may have them. An item that there is already stays as it is.
        """
        items = await parsed(request, lambda content: bodies.parse_items(content, limits))
        states = await answer(items)
        counts = Counter(states)
        return bodies.ItemsAdded(model=items.model, added=counts[ADDED], known=counts[KNOWN], items=states)

    if recommender.contexts.users is not None:

        @app.post("/users", **secured(507), openapi_extra=schemas.users_body(recommender, limits.users))
        async def add_users(request: Request) -> bodies.UsersStored:
            """Store the features of users, in place of all that were known of them. They are in the log when this
            answers, and every request from then on knows them. Users need no events.
            """
            users = await parsed(request, lambda content: bodies.parse_users(content, limits))
            await answer(users)
            return bodies.UsersStored(model=users.model, users=len(users.users))

    @app.get("/users/{user}/recommendations", **secured(), **lists_out)
    async def recommend(user: bodies.UserPath, query: ListQuery) -> bodies.Recommendations:
        """Return the k best items for a user, best first, of those that pass the filters."""
        request = query(user)
        lists = await answer_lists(request)
        (only,) = lists.users
        if isinstance(only, RequestError):
            raise only
        return bodies.Recommendations(
            model=request.model, items=bodies.user_list(only), cold=only.cold, unknown=lists.unknown
        )

    @app.get("/recommendations", **secured(), **lists_out)
    async def recommend_by_query(user: bodies.UserQuery, query: ListQuery) -> bodies.Recommendations:
        """Do the same as /users/{user}/recommendations, for ids that a client or a proxy changes in a path."""
        return await recommend(user, query)

    @app.post("/recommendations", **secured(), **lists_out, openapi_extra=schemas.lists_body(limits, features))
    async def recommend_many(request: Request) -> bodies.ListsOut:
        """Return the k best items for each of many users, or a user's error, in their order."""
        asked_for, users = await parsed(request, lambda content: bodies.parse_lists(content, limits))
        lists = await answer_lists(asked_for)
        replies = []
        for user, each in zip(users, lists.users):
            if isinstance(each, RequestError):
                error = bodies.ErrorBody(name=type(each).__name__, message=str(each))
                replies.append(bodies.ListOut(user=user, error=error))
            else:
                replies.append(bodies.ListOut(user=user, items=bodies.user_list(each), cold=each.cold))
        return bodies.ListsOut(model=asked_for.model, lists=replies, unknown=lists.unknown)

    @app.get("/filters", **secured(), **lists_out)
    async def named_lists() -> bodies.NamedLists:
        """Return the names of the uploaded lists with the numbers of their items."""
        return bodies.NamedLists(filters=worker.recommender.filters.sizes)

    @app.put("/filters/{name}", **secured(507), **lists_out, openapi_extra=schemas.named_list_body())
    async def put_list(name: ListName, request: Request) -> bodies.NamedListOut:
        """Upload a list of items under a name, in place of an earlier one: every request has the old or the new one."""
        items, unknown = await answer(await parsed(request, partial(bodies.parse_named_list, name)))
        return bodies.NamedListOut(items=items, unknown=unknown)

    @app.delete("/filters/{name}", **secured(507), **lists_out)
    async def drop_list(name: ListName) -> bodies.Dropped:
        """Delete an uploaded list."""
        return bodies.Dropped(dropped=await answer(DropList(name)))

    @app.get("/model", **secured())
    async def model() -> bodies.ModelOut:
        """Return the model that serves, the finished runs that could, and why others were refused."""
        runs = [] if models is None else await asyncio.to_thread(models.finished)
        refused = {} if models is None else dict(models.refused)
        return bodies.ModelOut(model=worker.recommender.label, runs=runs, refused=refused)

    @app.post("/model", **secured(), openapi_extra=schemas.model_body())
    async def exchange_model(request: Request) -> bodies.Exchanged:
        """Load another run beside the model that serves, check it and let it answer. The answer comes when it does. A
        run that is refused never serves, and the same model goes on.
        """
        name = await parsed(request, bodies.parse_model)
        if models is None:
            raise ModelRefused("the service was started with one run: start it with a folder of runs")
        previous = await asyncio.to_thread(models.exchange, name, worker, log)
        ANSWERED_BY.set(worker.recommender.label)
        return bodies.Exchanged(model=worker.recommender.label, previous=previous)

    @app.post("/scores", **secured(), openapi_extra=schemas.scores_body(recommender, limits.candidates))
    async def score(request: Request) -> bodies.Scores:
        """Return the scores of candidates for a user, in their order."""
        asked_for = await parsed(request, lambda content: bodies.parse_scores(content, limits))
        scores = await answer(asked_for)
        return bodies.Scores(model=asked_for.model, scores=scores)

    @app.get("/users/{user}", **secured())
    async def history(user: bodies.UserPath) -> bodies.HistoryOut:
        """Return the part of a user's history that the model sees."""
        user_history = await answer(Read(user))
        columns = [None if x is None else np.asarray(x).tolist() for x in user_history[:3]]
        return bodies.HistoryOut(items=columns[0], timestamps=columns[1], actions=columns[2], count=user_history.count)

    @app.get("/users", **secured())
    async def history_by_query(user: bodies.UserQuery) -> bodies.HistoryOut:
        """Do the same as /users/{user}, for ids that a client or a proxy changes in a path."""
        return await history(user)

    @app.delete("/users/{user}", **secured(507))
    async def forget(user: bodies.UserPath) -> bodies.Forgotten:
        """Delete all events of a user, those of the run's data included, for good. They leave the log's files with the
        next start or segment; a mark with the user's id stays. Later events count.
        """
        return bodies.Forgotten(forgotten=await answer(Forget(user)))

    @app.delete("/users", **secured(507))
    async def forget_by_query(user: bodies.UserQuery) -> bodies.Forgotten:
        """Do the same as /users/{user}, for ids that a client or a proxy changes in a path."""
        return await forget(user)

    @app.get("/health")
    async def health() -> bodies.Health:
        """Return whether the model thread is alive: if it is not, restart the service. Needs no token."""
        if not worker.is_alive():
            raise HTTPException(503, "the model thread is not running")
        return bodies.Health(status="ok", users=worker.recommender.num_users, model=worker.recommender.label)

    @app.get("/ready")
    async def ready() -> bodies.Ready:
        """Return whether to send requests to the service: it is not stopping, not full, and its store answers. Needs no
        token.
        """
        if not worker.is_alive():
            raise HTTPException(503, "the model thread is not running")
        worker.check_room()
        if worker.store is not None:
            await asyncio.to_thread(worker.store.check)
        return bodies.Ready(status="ready", model=worker.recommender.label)

    plain: dict[str, Any] = {"responses": {"200": {"content": {"text/plain": {}}}}}

    @app.get("/metrics", **secured(), response_class=Response, openapi_extra=plain)
    async def prometheus() -> Response:
        """Return metrics for Prometheus."""
        return Response(await asyncio.to_thread(generate_latest, metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    async def page() -> HTMLResponse:
        """Return the page of the routes, which needs no network beyond the service."""
        return HTMLResponse(API_PAGE)

    return app
