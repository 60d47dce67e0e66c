"""Run the application on a socket until a signal comes."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from cli.interrupt import Interrupts
from cli.terminal import terminal
from data.types import shown
from serving.errors import ServingError


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; ServingError if there can be none."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ServingError(f"cannot listen on {shown(host)} port {port}: {error.strerror or error}") from None
    # Opened by number, a socket knows that its protocol is TCP; otherwise asyncio does not set TCP_NODELAY.
    return socket.socket(fileno=listener.detach())


class Server(uvicorn.Server):
    """A server that prints its address as soon as it answers, and ends when a signal is noted in `interrupts`."""

    def __init__(self, app, interrupts: Interrupts):
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
        self.interrupts = interrupts

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # Interrupts does

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.interrupts.signal != 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            terminal.say(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port} (routes: /docs)")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.interrupts.stage = "answering the accepted requests"
        await super().shutdown(sockets)
