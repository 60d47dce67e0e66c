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

SMALL_BODY = 2**14  # bytes of a body that is parsed in the event loop; parsing 1 MiB takes tens of milliseconds


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

    Args:
        log: accepted events are written to it before they are acknowledged; None with a shared store, and in tests.
        token: the bearer token that all routes require except those of PUBLIC_ROUTES; None for none.
        store: the users' events in Redis, shared with other services, in place of a log.
        models: the runs that can replace the current model; None if there are no others.
        watch: the interval in seconds to look for a newer run; None to not look for one.
    """
    limits = limits or Limits()
    worker = Worker(recommender, log, limits.waiting, store=store)
    metrics = Metrics(lambda: worker.recommender)
    worker.observe = metrics.rounds.observe
    # One thread: parsing holds Python's GIL, so more threads would only delay the event loop.
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
        """Return the options of a route that requires the token; statuses: further statuses of its errors."""
        if token is None:
            return {"responses": errors(*statuses)}
        # For the OpenAPI document only: `Guard` checks the token.
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
        """Parse a JSON body, a large one in a thread; raise RequestValidationError if it is invalid."""
        kind, _, _ = request.headers.get("content-type", "").partition(";")
        if kind.strip().lower() != "application/json":
            raise HTTPException(415, "expected a body with content-type application/json")
        body = await request.body()
        try:
            if len(body) <= SMALL_BODY:
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
        """Return a function that builds the request of a user from the query."""
        chosen = bodies.query_filter(allow, deny, where, at_most, filters)
        return lambda user: Recommend([user], k, at, exclude_seen, chosen, cold)

    ListQuery = Annotated[Callable[[str], Recommend], Depends(list_query)]
    ListName = Annotated[str, Path(min_length=1, max_length=bodies.LONGEST_ID, description="the list's name")]
    lists_out: dict[str, Any] = {"include_in_schema": not recommender.ranking}
    known = recommender.vocabulary.features
    items_in: dict[str, Any] = {"include_in_schema": known is not None and known.trained is not None}

    @app.post("/events", **secured(507), openapi_extra=schemas.events_body(recommender, limits.events))
    async def append_events(request: Request) -> bodies.Accepted:
        """Add events. When the reply arrives, they are stored, and all later requests use them. The reply gives the
        state of each event: accepted, repeated (its id was sent before), or unknown item.
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
        """Add items that the model was not trained on, with their features. When the reply arrives, they are stored,
        and all later requests can use them. Items that exist already are not changed.
        """
        items = await parsed(request, lambda content: bodies.parse_items(content, limits))
        states = await answer(items)
        counts = Counter(states)
        return bodies.ItemsAdded(model=items.model, added=counts[ADDED], known=counts[KNOWN], items=states)

    if recommender.contexts.users is not None:

        @app.post("/users", **secured(507), openapi_extra=schemas.users_body(recommender, limits.users))
        async def add_users(request: Request) -> bodies.UsersStored:
            """Store the features of users and delete their earlier ones. When the reply arrives, they are stored, and
            all later requests use them. Users need no events.
            """
            users = await parsed(request, lambda content: bodies.parse_users(content, limits))
            await answer(users)
            return bodies.UsersStored(model=users.model, users=len(users.users))

    @app.get("/users/{user}/recommendations", **secured(), **lists_out)
    async def recommend(user: bodies.UserPath, query: ListQuery) -> bodies.Recommendations:
        """Return the k best items for a user among those that pass the filters, best first."""
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
        """Do the same as /users/{user}/recommendations, for ids that clients or proxies change in a path."""
        return await recommend(user, query)

    @app.post("/recommendations", **secured(), **lists_out, openapi_extra=schemas.lists_body(limits, features))
    async def recommend_many(request: Request) -> bodies.ListsOut:
        """Return the k best items or an error for each of many users, in the order of the users."""
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
        """Return the names of the uploaded lists and the number of items in each."""
        return bodies.NamedLists(filters=worker.recommender.filters.sizes)

    @app.put("/filters/{name}", **secured(507), **lists_out, openapi_extra=schemas.named_list_body())
    async def put_list(name: ListName, request: Request) -> bodies.NamedListOut:
        """Upload a named list of items, or replace it at once: each request uses either the old or the new list."""
        items, unknown = await answer(await parsed(request, partial(bodies.parse_named_list, name)))
        return bodies.NamedListOut(items=items, unknown=unknown)

    @app.delete("/filters/{name}", **secured(507), **lists_out)
    async def drop_list(name: ListName) -> bodies.Dropped:
        """Delete an uploaded list."""
        return bodies.Dropped(dropped=await answer(DropList(name)))

    @app.get("/model", **secured())
    async def model() -> bodies.ModelOut:
        """Return the current model, the finished runs, newest first, and why runs were refused."""
        runs = [] if models is None else await asyncio.to_thread(models.finished)
        refused = {} if models is None else dict(models.refused)
        return bodies.ModelOut(model=worker.recommender.label, runs=runs, refused=refused)

    @app.post("/model", **secured(), openapi_extra=schemas.model_body())
    async def exchange_model(request: Request) -> bodies.Exchanged:
        """Load another run while the current model answers, check it, and replace the model. The reply arrives when the
        new model answers requests. If the run is refused, the current model stays.
        """
        name = await parsed(request, bodies.parse_model)
        if models is None:
            raise ModelRefused("the service was started with a single run: restart it with a folder of runs")
        previous = await asyncio.to_thread(models.exchange, name, worker, log)
        ANSWERED_BY.set(worker.recommender.label)
        return bodies.Exchanged(model=worker.recommender.label, previous=previous)

    @app.post("/scores", **secured(), openapi_extra=schemas.scores_body(recommender, limits.candidates))
    async def score(request: Request) -> bodies.Scores:
        """Return the scores of candidates for a user, in the order of the candidates."""
        asked_for = await parsed(request, lambda content: bodies.parse_scores(content, limits))
        scores = await answer(asked_for)
        return bodies.Scores(model=asked_for.model, scores=scores)

    @app.get("/users/{user}", **secured())
    async def history(user: bodies.UserPath) -> bodies.HistoryOut:
        """Return the events of a user that the model sees."""
        user_history = await answer(Read(user))
        columns = [None if x is None else np.asarray(x).tolist() for x in user_history[:3]]
        return bodies.HistoryOut(items=columns[0], timestamps=columns[1], actions=columns[2], count=user_history.count)

    @app.get("/users", **secured())
    async def history_by_query(user: bodies.UserQuery) -> bodies.HistoryOut:
        """Do the same as /users/{user}, for ids that clients or proxies change in a path."""
        return await history(user)

    @app.delete("/users/{user}", **secured(507))
    async def forget(user: bodies.UserPath) -> bodies.Forgotten:
        """Delete all events of a user permanently, including those of the run's data. They are removed from the log's
        files at the next start or when the next segment is written; a mark with the user's id remains. Later events of
        the user are stored as usual.
        """
        return bodies.Forgotten(forgotten=await answer(Forget(user)))

    @app.delete("/users", **secured(507))
    async def forget_by_query(user: bodies.UserQuery) -> bodies.Forgotten:
        """Do the same as /users/{user}, for ids that clients or proxies change in a path."""
        return await forget(user)

    @app.get("/health")
    async def health() -> bodies.Health:
        """Check that the model thread is running; if it is not, the service must be restarted. Requires no token."""
        if not worker.is_alive():
            raise HTTPException(503, "the model thread is not running")
        return bodies.Health(status="ok", users=worker.recommender.num_users, model=worker.recommender.label)

    @app.get("/ready")
    async def ready() -> bodies.Ready:
        """Check that the service can take requests: it is not stopping or full, and its store answers. Requires no
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
        """Return the API page, which works without internet access."""
        return HTMLResponse(API_PAGE)

    return app
