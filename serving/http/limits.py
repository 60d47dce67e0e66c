"""Check each request before its route: the bearer token, limits on bodies and requests, metrics. Plain ASGI."""

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

BODY_SECONDS = 30.0  # a client may take to send a whole body
OPEN = ("/health", "/ready", "/docs", "/openapi.json")  # routes without a token: a browser opens the page without one
LEFT = 499  # the status in metrics of a request whose client left before it was whole
ANSWERED_BY: ContextVar[str] = ContextVar("ANSWERED_BY")  # the model that answered the request of this context
log = logging.getLogger("hstu_sparse.serve")


class Metrics:
    """The metrics for Prometheus: requests by route, status and model, their time, what became of events, lists of
    users, rounds of the model, sizes of the store.

    recommender: returns the one that answers now.
    """

    def __init__(self, recommender: Callable[[], Recommender]):
        self.recommender = recommender
        self.registry = CollectorRegistry()
        common: dict[str, Any] = dict(registry=self.registry)
        self.requests = Counter(
            "requests", "Answered requests", ["route", "status", "model"], namespace="hstu_sparse", **common
        )
        self.seconds = Histogram(
            "request_seconds", "Time of a request", ["route"], namespace="hstu_sparse",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10), **common,
        )  # fmt: skip
        self.events = Counter(
            "events", "Events by what became of them", ["state", "model"], namespace="hstu_sparse", **common
        )
        self.lists = Counter(
            "lists", "Lists of users who are known, cold (without events) or have an error", ["user", "model"],
            namespace="hstu_sparse", **common,
        )  # fmt: skip
        self.together = Histogram(
            "round_requests", "Requests that the model thread answered together", namespace="hstu_sparse",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256), **common,
        )  # fmt: skip
        for name in recommender().statistics:
            gauge = Gauge(f"store_{name}", f"{name.replace('_', ' ')} of the store", namespace="hstu_sparse", **common)
            gauge.set_function(functools.partial(lambda of: recommender().statistics[of], name))


def answer_of(name: str, message: str) -> bytes:
    """Return the body of an error: its name, and its message in one line."""
    return json.dumps({"error": {"name": name, "message": " ".join(message.split())}}).encode()


class Guard:
    """Refuse requests without the token, bodies and requests under way beyond the limits, and name the model in each
    reply, in the header x-model.

    token: None for none. Each body is read as a whole before the route is called. All requests are measured.
    """

    def __init__(self, app, *, metrics: Metrics, token: str | None, limits: Limits):
        self.app, self.metrics, self.token, self.limits = app, metrics, token, limits
        self.under_way = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), LEFT
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
        # The rest of a refused body is read and dropped, so that the client gets its answer; one that waits for
        # permission to send it may never send it, so that nothing can follow on its connection.
        close = b"expect" in headers
        if self.token is not None and scope["path"] not in OPEN:
            authorization = headers.get(b"authorization", b"")
            if not hmac.compare_digest(authorization, b"Bearer " + self.token.encode()):
                message = "expected the header Authorization: Bearer TOKEN"
                await refuse(send, 401, "Unauthorized", message, (b"www-authenticate", b"Bearer"), close=close)
                return
        length = headers.get(b"content-length", b"0")
        long = scope["path"].startswith("/filters/") or scope["path"] == "/items"
        most_body = self.limits.filter_body if long else self.limits.body
        if length.isdigit() and int(length[:20]) > most_body:
            await refuse(send, 413, "BodyTooLarge", f"a body may have {most_body:,} bytes", close=close)
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
                        await refuse(send, 413, "BodyTooLarge", f"a body may have {most_body:,} bytes")
                        return
        except TimeoutError:
            await refuse(send, 408, "Timeout", f"the body did not come within {BODY_SECONDS:g} seconds", close=True)
            return
        if self.under_way >= self.limits.waiting and scope["path"] not in OPEN:
            message = "more requests wait than the service takes, try again later"
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
    """Send an error as JSON; headers: more headers; close: close the connection."""
    body = answer_of(name, message)
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
