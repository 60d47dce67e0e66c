"""The routes of the service: POST /events, GET recommendations, POST /scores, a user's history, health, metrics."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import numpy as np
from fastapi import Depends, FastAPI, Path, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)  # fmt: skip
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from data.explain import custom, explain
from data.types import shown
from serving.errors import InvalidRequest, RequestError
from serving.http.event_log import EventLog
from serving.http.limits import Guard, Metrics, answer_of, status_of
from serving.http.worker import Events, Forget, Read, Recommend, Score, Worker
from serving.recommender import Recommender

LONGEST_ID = 256
LATEST = 10**11  # seconds: in the year 5138; milliseconds are beyond it from March 1973 on
LITTLE = 2**14  # bytes of a body that is parsed at once; to parse one of 1 MiB takes tens of milliseconds


def _whole(value: Any, what: str) -> int:
    """Return a whole number, which JSON may write as 7.0."""
    if type(value) not in (int, float) or not abs(value) < math.inf or value != int(value):
        raise custom(f"expected {what}, got {shown(repr(value), 200)}")
    return int(value)


def _id(value: Any) -> int:
    number = _whole(value, "a whole number or a text")
    if abs(number) >= 10**LONGEST_ID:
        raise custom(f"expected at most {LONGEST_ID} digits")
    return number


def _seconds(value: Any) -> int:
    number = _whole(value, "whole seconds")
    if not 0 <= number < LATEST:
        hint = ": milliseconds?" if number > 0 else ""
        raise custom(f"expected seconds since 1970, from 0 to below {LATEST:,}, got {number}{hint}")
    return number


SECONDS = WithJsonSchema({"type": "integer", "minimum": 0, "exclusiveMaximum": LATEST})
Text = Annotated[StrictStr, Field(min_length=1, max_length=LONGEST_ID, pattern=r"^[^\x00]*$")]
Id = Annotated[int, BeforeValidator(_id), WithJsonSchema({"type": "integer"})] | Text
Seconds = Annotated[int, BeforeValidator(_seconds), SECONDS]
QuerySeconds = Annotated[int, AfterValidator(_seconds), SECONDS]
UserPath = Annotated[str, Path(min_length=1, max_length=LONGEST_ID, description="the user's id, percent-encoded")]
UserQuery = Annotated[str, Query(alias="user", min_length=1, max_length=LONGEST_ID, description="the user's id")]


class EncodedRoute(APIRoute):
    """A route that is compared with the path before it is decoded, so that a parameter may hold a slash (%2F)."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches({**scope, "path": scope["raw_path"].decode("latin-1")})
        for name, value in child.get("path_params", {}).items():
            child["path_params"][name] = unquote_to_bytes(value.encode("latin-1")).decode("utf-8", "surrogateescape")
        return match, child


def encoded_query(request: Request) -> None:
    """Raise InvalidRequest for a query that is not UTF-8, which Starlette would replace by another one."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the query is not UTF-8") from None


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    body        bytes of a body
    events      events of a request
    candidates  candidates of a request
    list        items of a list of recommendations
    waiting     requests under way
    """

    body: int = 2**20
    events: int = 10_000
    candidates: int = 10_000
    list: int = 1_000
    waiting: int = 1_024


class Strict(BaseModel):
    """A body that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class EventIn(Strict):
    """One event: what a user met, when, and what the user did, where the run reads actions."""

    user: Id
    item: Id
    timestamp: Seconds | None = Field(None, description="seconds since 1970; by default now")
    action: StrictInt | StrictFloat | Text | None = None


class EventsIn(Strict):
    """Events to append."""

    events: list[EventIn] = Field(min_length=1)


class Accepted(BaseModel):
    """The answer to appended events."""

    accepted: int = Field(description="events that are in the log now")


class Recommended(BaseModel):
    """A recommended item and its score."""

    item: int | str
    score: float


class Recommendations(BaseModel):
    """The recommended items of a user, best first."""

    items: list[Recommended]


class ScoresIn(Strict):
    """Candidates to score for a user."""

    user: Id
    candidates: list[Id] = Field(min_length=1)
    at: Seconds | None = Field(None, description="seconds since 1970; by default now")


class Scores(BaseModel):
    """Scores in the order of the candidates; of a ranking run with several kinds of action, one for each kind."""

    scores: list[float] | list[list[float]]


class HistoryOut(BaseModel):
    """The events that the model sees of a user, of all that the user had."""

    items: list[int | str]
    timestamps: list[int]
    actions: list[int] | None
    count: int


class Forgotten(BaseModel):
    """The answer to a request to delete a user: whether the service had events of the user."""

    forgotten: bool


class Health(BaseModel):
    """The state of the service."""

    status: str
    users: int


class ErrorBody(BaseModel):
    """The name of an error and its message in one line."""

    name: str
    message: str


class Error(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorBody


def create_app(
    recommender: Recommender,
    log: EventLog | None,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Create the service of a recommender; it starts and stops the model thread with the application.

    log: the log that accepted events are written to before they are acknowledged; None only in tests. token: the bearer
    token for every route but health.
    """
    limits, metrics = limits or Limits(), Metrics(recommender)
    worker = Worker(recommender, log, limits.waiting, metrics.together.observe)
    # One thread: a body is parsed without releasing Python's lock, so that more would only keep the event loop waiting.
    parser = ThreadPoolExecutor(1, "parser")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)
        parser.shutdown()

    def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
        return {status: {"model": Error} for status in statuses}

    def secured(*statuses: int, checks: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Return the options of a route that takes the token, and may answer with more statuses than all do."""
        if token is None:
            return {"responses": errors(*statuses), "dependencies": list(checks)}
        # `Guard` checks the token: this is for the OpenAPI document.
        bearer = Security(HTTPBearer(auto_error=False))
        return {"responses": errors(401, *statuses), "dependencies": [bearer, *checks]}

    by_query = (Depends(encoded_query),)

    app = FastAPI(
        title="hstu_sparse", description=__doc__, version="1", lifespan=lifespan,
        responses=errors(400, 404, 408, 409, 413, 415, 422, 500, 503),
        redirect_slashes=False, redoc_url=None, swagger_ui_oauth2_redirect_url=None,
    )  # fmt: skip
    app.router.route_class = EncodedRoute
    app.add_middleware(Guard, metrics=metrics, token=token, most_body=limits.body, most_waiting=limits.waiting)

    def error(status: int, name: str, message: str, **headers: str) -> Response:
        if status == 503:
            headers["Retry-After"] = "1"
        return Response(answer_of(name, message), status, headers, "application/json")

    @app.exception_handler(RequestError)
    async def refused(request: Request, fault: RequestError) -> Response:
        return error(status_of(fault), type(fault).__name__, str(fault))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, fault: RequestValidationError) -> Response:
        first = fault.errors()[0]
        if first["type"] == "json_invalid":
            return error(422, "InvalidRequest", f"the body is not JSON: {first['ctx']['error']}")
        # A union of types reports an error for each of its types, all for the same place.
        place = [part for part in first["loc"][1:] if not _is_type(part)]
        if not place:
            return error(422, "InvalidRequest", "expected a JSON object as the body (/docs has the routes)")
        return error(422, "InvalidRequest", ascii(explain(first, lambda _: (), place))[1:-1])

    @app.exception_handler(HTTPException)
    async def other(request: Request, fault: HTTPException) -> Response:
        names = {404: "NotFound", 405: "MethodNotAllowed", 415: "UnsupportedMediaType"}
        headers = {}
        if fault.status_code == 405:  # of all routes of the path; the error itself names those of one route
            routes = [route for route in app.routes if route.matches(request.scope)[0] != Match.NONE]
            headers["Allow"] = ", ".join(sorted({name for route in routes for name in getattr(route, "methods", ())}))
        return error(fault.status_code, names.get(fault.status_code, "HTTPError"), str(fault.detail), **headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, fault: Exception) -> Response:
        return error(500, "InternalError", "internal error, the service's output has the traceback")

    async def answer(request) -> Any:
        return await asyncio.wrap_future(worker.put(request))

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

    def check(name: str, count: int, most: int) -> None:
        if count > most:
            raise InvalidRequest(f"{name}: at most {most:,} in a request, got {count:,}")

    def parse_events(content: bytes) -> Events:
        body = EventsIn.model_validate_json(content)
        check("events", len(body.events), limits.events)
        now = int(clock())
        actions = [event.action for event in body.events]
        if any(action is None for action in actions) and any(action is not None for action in actions):
            raise InvalidRequest("actions: expected one for each event, or none at all")
        return Events(
            [str(event.user) for event in body.events],
            _ids([event.item for event in body.events]),
            [now if event.timestamp is None else event.timestamp for event in body.events],
            None if actions[0] is None else actions,
        )

    Length = Annotated[int, Query(ge=1, le=limits.list)]
    At = Annotated[QuerySeconds | None, Query(description="seconds since 1970; by default now")]

    def parse_scores(content: bytes) -> Score:
        body = ScoresIn.model_validate_json(content)
        check("candidates", len(body.candidates), limits.candidates)
        return Score(str(body.user), _ids(body.candidates), body.at)

    @app.post("/events", **secured(507), openapi_extra=events_body(recommender, limits.events))
    async def append_events(request: Request) -> Accepted:
        """Add events. They are in the log when this answers, and every request from then on knows them."""
        return Accepted(accepted=await answer(await parsed(request, parse_events)))

    @app.get("/users/{user}/recommendations", **secured(), include_in_schema=not recommender.ranking)
    async def recommend(
        user: UserPath, k: Length = 10, at: At = None, exclude_seen: bool | None = None
    ) -> Recommendations:
        """Return the k best items for a user, best first. `exclude_seen` chooses whether to leave out those that the
        user met before; by default they are left out unless the run's `eval.filter_seen` is `none`.
        """
        items, scores = await answer(Recommend(user, k, at, exclude_seen))
        return Recommendations(items=[Recommended(item=item, score=score) for item, score in zip(items, scores)])

    @app.get("/recommendations", **secured(checks=by_query), include_in_schema=not recommender.ranking)
    async def recommend_by_query(
        user: UserQuery, k: Length = 10, at: At = None, exclude_seen: bool | None = None
    ) -> Recommendations:
        """Do the same as /users/{user}/recommendations, for ids that a client or a proxy changes in a path."""
        return await recommend(user, k, at, exclude_seen)

    @app.post("/scores", **secured(), openapi_extra=scores_body(limits.candidates))
    async def score(request: Request) -> Scores:
        """Return the scores of candidates for a user, in their order."""
        return Scores(scores=await answer(await parsed(request, parse_scores)))

    @app.get("/users/{user}", **secured())
    async def history(user: UserPath) -> HistoryOut:
        """Return the part of a user's history that the model sees."""
        user_history = await answer(Read(user))
        columns = [None if x is None else np.asarray(x).tolist() for x in user_history[:3]]
        return HistoryOut(items=columns[0], timestamps=columns[1], actions=columns[2], count=user_history.count)

    @app.get("/users", **secured(checks=by_query))
    async def history_by_query(user: UserQuery) -> HistoryOut:
        """Do the same as /users/{user}, for ids that a client or a proxy changes in a path."""
        return await history(user)

    @app.delete("/users/{user}", **secured(507))
    async def forget(user: UserPath) -> Forgotten:
        """Delete all events of a user, those of the run's data included, for good. They leave the log with the next
        start; a mark with the user's id stays in it. Later events count.
        """
        return Forgotten(forgotten=await answer(Forget(user)))

    @app.delete("/users", **secured(507, checks=by_query))
    async def forget_by_query(user: UserQuery) -> Forgotten:
        """Do the same as /users/{user}, for ids that a client or a proxy changes in a path."""
        return await forget(user)

    @app.get("/health")
    async def health() -> Health:
        """Return whether the model thread is alive. Needs no token."""
        if not worker.is_alive():
            raise HTTPException(503, "the model thread is not running")
        return Health(status="ok", users=recommender.num_users)

    plain: dict[str, Any] = {"responses": {"200": {"content": {"text/plain": {}}}}}

    @app.get("/metrics", **secured(), response_class=Response, openapi_extra=plain)
    async def prometheus() -> Response:
        """Return metrics for Prometheus."""
        return Response(await asyncio.to_thread(generate_latest, metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def events_body(recommender: Recommender, most: int) -> dict[str, Any]:
    """Return the part of the OpenAPI document about appended events: of the run's actions, `most` at most."""
    schema = _inlined(EventsIn.model_json_schema())
    schema["properties"]["events"]["maxItems"] = most
    event, actions = schema["properties"]["events"]["items"], recommender.actions
    del event["properties"]["action"]
    if actions is not None:
        event["properties"]["action"] = {"enum": list(actions.texts)} if actions.texts is not None else {
            "type": "number", "minimum": 0, "maximum": (actions.count - 1) / actions.scale,
            "multipleOf": 1 / actions.scale,
        }  # fmt: skip
        event["required"].append("action")
    return _json_body(schema)


def scores_body(most: int) -> dict[str, Any]:
    """Return the part of the OpenAPI document about candidates to score, `most` at most."""
    schema = _inlined(ScoresIn.model_json_schema())
    schema["properties"]["candidates"]["maxItems"] = most
    return _json_body(schema)


def _json_body(schema: dict) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: dict) -> dict:
    """Return a JSON schema with its definitions in place of the references to them."""
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return inline(definitions[part["$ref"].rpartition("/")[2]])
            return {key: inline(value) for key, value in part.items()}
        return [inline(one) for one in part] if isinstance(part, list) else part

    return inline(schema)


def _ids(ids: list) -> list:
    """Return ids of one type: all as texts unless all are integers of 64 bits."""
    return ids if all(isinstance(one, int) and -(2**63) <= one < 2**63 for one in ids) else [str(one) for one in ids]


def _is_type(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith(("int", "str", "float", "constrained", "function"))
