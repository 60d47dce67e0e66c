"""Reserve ports for programs that must be told their port."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_ports(count: int = 1) -> Iterator[list[str]]:
    """Yield ports of 127.0.0.1, on which a server can listen any number of times, and which no other socket gets.

    Linux lets a second socket listen on a bound port if both set SO_REUSEADDR, as most servers do, and never chooses
    such a port for a socket without one.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", 0))  # and does not listen
        yield [str(bound.getsockname()[1]) for bound in sockets]
