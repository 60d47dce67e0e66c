"""Run the application with uvicorn: handle signals, limit connections and the time that clients may take.

By itself, uvicorn never closes a connection whose request does not arrive or whose reply is not read, and it accepts
connections until the process has no file descriptors left.
"""

import asyncio
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from cli.interrupt import Interrupts
from cli.terminal import terminal
from data.types import shown
from serving.errors import ServingError
from serving.http.limits import error_body

CLIENT_SECONDS = 65.0  # to send the next request's head or read a reply; many proxies keep connections for 60 s
SPARE_FILES = 64  # file descriptors for everything except connections
ACCEPTED_TOGETHER = 16  # 1 / 16 of all connections may be accepted at once, before any is read


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ServingError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ServingError(f"cannot listen on {shown(host)} port {port}: {error.strerror or error}") from None
    # A socket created from a descriptor has the protocol TCP, without which asyncio does not set TCP_NODELAY.
    return socket.socket(fileno=listener.detach())


def possible_connections(most: int) -> int:
    """Raise the soft limit of file descriptors; return how many connections, up to `most`, it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + SPARE_FILES
    limit = needed + most + most // ACCEPTED_TOGETHER + 1
    if soft != resource.RLIM_INFINITY and soft < limit:
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        most = min(most, (soft - needed - 1) * ACCEPTED_TOGETHER // (ACCEPTED_TOGETHER + 1))
    if most < 2:
        raise ServingError(f"no file descriptors are left for connections: raise `ulimit -n`, which is {soft}")
    return most


class Connections(ServerState):
    """The connections of a server, at most `most`: one more closes that which has waited longest for its client.

    waiting: connection -> the time since which it waits for its client to send a request or to read a reply, longest
    first. The other connections are being answered.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most, self.closing = most, False
        self.waiting: dict[Connection, float] = {}

    def make_room(self) -> None:
        while len(self.connections) > self.most and self.waiting:
            next(iter(self.waiting)).drop()

    def drop_late(self) -> None:
        """Close the connections that have waited for too long; `Guard` limits the time of a body."""
        before = time.monotonic() - CLIENT_SECONDS
        late = []
        for connection, since in self.waiting.items():
            if since > before:
                break
            if not connection.reads_body:
                late.append(connection)
        for connection in late:
            connection.drop()


class Connection(H11Protocol):
    """A connection that records since when it waits for its client."""

    server_state: Connections

    @property
    def reads_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    def note(self) -> None:
        """Record whether the connection waits for its client or is being answered."""
        answering = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if answering and not self.flow.write_paused:
            self.server_state.waiting.pop(self, None)
        else:
            self.server_state.waiting.setdefault(self, time.monotonic())

    def drop(self) -> None:
        """Close the connection at once, without sending the rest of a reply."""
        self.server_state.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if self.server_state.closing:
            self.drop()
            return
        self.note()
        self.server_state.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.server_state.waiting.pop(self, None)

    def handle_events(self) -> None:
        if not self.transport.is_closing():
            super().handle_events()
            self.note()

    def on_response_complete(self) -> None:
        self.server_state.waiting.pop(self, None)  # so that it is added again with the current time
        super().on_response_complete()
        self.note()
        if self.server_state.closing:
            self.shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.note()

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # invalid data after an answered request
            self.drop()
            return
        body = error_body("InvalidRequest", msg)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        if self.cycle is not None:  # a request with an invalid body must not be answered a second time
            self.cycle.disconnected = True
            self.cycle.message_event.set()


class Server(uvicorn.Server):
    """A server that prints its address once it accepts requests, and stops when `interrupts` has received a signal."""

    server_state: Connections

    def __init__(self, app, most: int, interrupts: Interrupts):
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="on",
            log_level="error",  # otherwise each invalid request prints a line
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=max(1, most // ACCEPTED_TOGETHER),
            timeout_keep_alive=int(CLIENT_SECONDS),
        )
        super().__init__(config)
        self.server_state = Connections(most)
        self.interrupts = interrupts

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `Interrupts` captures them

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.interrupts.signal != 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._dropping = asyncio.create_task(self._drop_late())
        for listener in sockets or ():
            listener.listen(2048)  # the kernel's queue; asyncio made it as short as `backlog`
            host, port = listener.getsockname()[:2]
            terminal.say(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port} (API page: /docs)")

    async def _drop_late(self) -> None:
        while True:
            await asyncio.sleep(1)
            self.server_state.drop_late()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.interrupts.stage = "answering the accepted requests"
        self.server_state.closing = True
        await super().shutdown(sockets)
