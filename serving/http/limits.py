"""ASGI middleware that checks the bearer token and the limits of each request, and records metrics."""

import asyncio
import functools
import hmac
import json
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.errors import RequestError
from serving.http.bodies import Limits
from serving.recommender import Recommender

BODY_SECONDS = 30.0  # most time for a client to send a whole body
# Routes that require no token; browsers open the API page without one.
PUBLIC_ROUTES = ("/health", "/ready", "/docs", "/openapi.json")
CLIENT_LEFT = 499  # the status, in metrics only, of requests whose client disconnected before sending all of it
ANSWERED_BY: ContextVar[str] = ContextVar("ANSWERED_BY")  # the name of the model that answered the current request
log = logging.getLogger("hstu_sparse.serve")


class Metrics:
    """The Prometheus metrics of a service.

    recommender: returns the current recommender.
    """

    def __init__(self, recommender: Callable[[], Recommender]):
        self.recommender = recommender
        self.registry = CollectorRegistry()
        common: dict[str, Any] = dict(registry=self.registry)
        self.requests = Counter(
            "requests", "Requests by status", ["route", "status", "model"], namespace="hstu_sparse", **common
        )
        self.seconds = Histogram(
            "request_seconds", "Time from a request to its reply in seconds", ["route"], namespace="hstu_sparse",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10), **common,
        )  # fmt: skip
        self.events = Counter(
            "events", "Received events by state", ["state", "model"], namespace="hstu_sparse", **common
        )
        self.lists = Counter(
            "lists", "Recommendation lists by user: known, cold (without events) or error", ["user", "model"],
            namespace="hstu_sparse", **common,
        )  # fmt: skip
        self.rounds = Histogram(
            "round_requests", "Requests that the model thread answered together", namespace="hstu_sparse",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256), **common,
        )  # fmt: skip
        for name in recommender().statistics:
            text = f"Current value of {name.replace('_', ' ')}"
            gauge = Gauge(f"store_{name}", text, namespace="hstu_sparse", **common)
            gauge.set_function(functools.partial(lambda key: recommender().statistics[key], name))


def error_body(name: str, message: str) -> bytes:
    """Return the JSON body of an error: its name, and its message in one line."""
    return json.dumps({"error": {"name": name, "message": " ".join(message.split())}}).encode()


class Guard:
    """Refuse requests without the token or beyond the limits, and add the model's name to replies as header x-model.

    The whole body is read before the route is called. All requests are recorded in `metrics`.

    token: None if no token is required.
    """

    def __init__(self, app, *, metrics: Metrics, token: str | None, limits: Limits):
        self.app, self.metrics, self.token, self.limits = app, metrics, token, limits
        self.under_way = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_LEFT
        ANSWERED_BY.set(self.metrics.recommender().label)

        async def watched(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = quote(ANSWERED_BY.get(), safe=" /:+@=,").encode()
                message = message | {"headers": [*message.get("headers", ()), (b"x-model", name)]}
            await send(message)

        try:
            await self.answer(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - began
            self.metrics.requests.labels(route, str(status), ANSWERED_BY.get()).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            log.debug("%s %s %d %.1f ms", scope["method"], route, status, 1000 * seconds)

    async def answer(self, scope, receive, send) -> None:
        headers = dict(scope["headers"])
        # The rest of a refused body is read and ignored, so that the client reads the reply. A client with the header
        # `Expect` may never send its body, so its connection is closed.
        close = b"expect" in headers
        if self.token is not None and scope["path"] not in PUBLIC_ROUTES:
            authorization = headers.get(b"authorization", b"")
            if not hmac.compare_digest(authorization, b"Bearer " + self.token.encode()):
                message = "expected the header Authorization: Bearer TOKEN"
                await refuse(send, 401, "Unauthorized", message, (b"www-authenticate", b"Bearer"), close=close)
                return
        length = headers.get(b"content-length", b"0")
        long = scope["path"].startswith("/filters/") or scope["path"] == "/items"
        most_body = self.limits.filter_body if long else self.limits.body
        if length.isdigit() and int(length[:20]) > most_body:
            await refuse(send, 413, "BodyTooLarge", f"expected a body of at most {most_body:,} bytes", close=close)
            return
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most_body:
                        await refuse(send, 413, "BodyTooLarge", f"expected a body of at most {most_body:,} bytes")
                        return
        except TimeoutError:
            await refuse(send, 408, "Timeout", f"the body did not arrive within {BODY_SECONDS:g} seconds", close=True)
            return
        if self.under_way >= self.limits.waiting and scope["path"] not in PUBLIC_ROUTES:
            message = "too many requests are waiting, try again later"
            await refuse(send, 503, "Busy", message, (b"retry-after", b"1"))
            return
        sent = False

        async def whole():
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        self.under_way += 1
        try:
            await self.app(scope, whole, send)
        finally:
            self.under_way -= 1


async def refuse(
    send, status: int, name: str, message: str, *headers: tuple[bytes, bytes], close: bool = False
) -> None:
    """Send an error as JSON; headers: further headers; close: close the connection afterwards."""
    body = error_body(name, message)
    every = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    if close:
        every.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": body})


def status_of(error: RequestError) -> int:
    """Return the HTTP status of an error."""
    return {
        "NoHistory": 404,
        "UnknownItem": 404,
        "UnknownFilter": 404,
        "TooEarly": 409,
        "LimitReached": 409,
        "ModelRefused": 409,
        "Loading": 409,
        "CacheFull": 503,
        "StoreUnavailable": 503,
        "Busy": 503,
        "Stopping": 503,
        "NotStored": 507,
    }.get(type(error).__name__, 422)
