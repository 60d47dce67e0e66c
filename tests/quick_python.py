"""A `python` that starts at once: its programs are forks of a process that has imported what they import.

Starting Python with torch and torchrec takes some six seconds of a core, and a page of the docs starts twenty programs.
`QuickPython` starts a server, which imports everything once, and writes a client, `folder/python`, that may stand for
`sys.executable` and on the PATH. The client hands its arguments, environment, folder and files to the server, which
forks a process that runs the program as `__main__`. Signals reach that process, it dies with the client, and the client
ends as it does. A program that needs another interpreter (TRITON_INTERPRET differs, options like -I) gets a real one.

All of pytest-xdist's processes share one server: it ends with the last that holds a connection to it.
"""

import contextlib
import fcntl
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SETTING = "TRITON_INTERPRET"  # read when triton is imported, so that the server's holds for all of its programs
CLIENT = """#!{python} -ISs
import os, signal, socket, sys
given = sys.argv[1:]
while given[:1] in (["-u"], ["-B"]):
    del given[0]
if not given or (given[0].startswith("-") and given[0] not in ("-c", "-m")) or os.environ.get({setting!r}) != {value!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [file for file in files if os.path.exists(f"/proc/self/fd/{{file}}")]  # not that of the listing
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in {forwarded}:
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
message = json.dumps(dict(arguments=given, folder=os.getcwd(), environment=dict(os.environ), numbers=files))
message = message.encode()
socket.send_fds(server, [len(message).to_bytes(8, "big")], files)
server.sendall(message)
status = server.recv(8)
status = int.from_bytes(status, "big", signed=True) if status else 1
if status < 0:
    if -status in {forwarded}:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class QuickPython:
    """A context: `executable` stands for `sys.executable`; `path` is a PATH on which it is `python`.

    folder: the same one in several processes is one server. setting: what TRITON_INTERPRET is for its programs.
    """

    def __init__(self, folder: Path, setting: str | None = os.environ.get(SETTING)):
        self.setting = setting
        self.executable = str(folder / "python")
        self.path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.lock, self.address, self.door = (str(folder / name) for name in ("lock", "socket", "door"))
        facts = {"python": sys.executable, "address": self.address, "setting": SETTING}
        facts |= {"value": setting, "forwarded": [int(number) for number in FORWARDED]}
        self.client = CLIENT.format(**facts)

    def __enter__(self) -> "QuickPython":
        with self.locked():
            self.holder = socket.socket(socket.AF_UNIX)
            try:
                self.holder.connect(self.door)
            except OSError:
                self.start()
                self.holder.connect(self.door)
            assert self.holder.recv(1) == b"1"
        return self

    def __exit__(self, *error) -> None:
        with self.locked():
            self.holder.shutdown(socket.SHUT_WR)
            self.holder.recv(1)  # the server knows, and if that was its last holder, it takes no others
            self.holder.close()

    @contextlib.contextmanager
    def locked(self):
        """Within, no other process begins or ends to hold the server."""
        with open(self.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def start(self) -> None:
        Path(self.executable).write_text(self.client)
        Path(self.executable).chmod(0o755)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {} if self.setting is None else {SETTING: self.setting}
        command = [sys.executable, "-m", "tests.quick_python", self.executable, self.address, self.door]
        # Its end is not waited for: another process may be the last that holds it.
        self.server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.server.stdout.readline() == b"ready\n"


def serve(executable: str, address: str, door: str) -> None:
    """Fork a keeper for every client that connects, until all who came through the door have left."""
    import torch.distributed.run
    import torch.utils.tensorboard  # noqa: F401

    import compare  # noqa: F401
    import eval  # noqa: F401
    import serve  # noqa: F401
    import serving  # noqa: F401
    import train  # noqa: F401
    import tune  # noqa: F401

    draw_once()
    gc.freeze()  # programs copy less
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork of this process would miss all but one"
    listener, entrance = (listen(path) for path in (address, door))
    print("ready", flush=True)
    holders: list[socket.socket] = []
    keepers: list[int] = []
    while True:
        ready = select.select([listener, entrance, *holders], [], [])[0]
        if entrance in ready:
            holders.append(entrance.accept()[0])
            holders[-1].send(b"1")
        for holder in holders[:]:
            if holder in ready:
                holders.remove(holder)
                if not holders:
                    entrance.close()
                    os.unlink(door)
                    os.unlink(address)
                    return
                holder.close()
        if listener in ready:
            client, _ = listener.accept()
            if (keeper := os.fork()) == 0:
                for other in (listener, entrance, *holders):
                    other.close()
                keep(client, executable)
            client.close()
            keepers = [one for one in [*keepers, keeper] if not os.waitpid(one, os.WNOHANG)[0]]


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path, on which one that was killed may have listened before."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def draw_once() -> None:
    """Draw a figure as reports do, to spare forked processes the imports, which take longer than a tiny run."""
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([0, 1], [0, 1], marker=".", label="x")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png")
    pyplot.close(figure)


def keep(client: socket.socket, executable: str) -> None:
    """Fork the process of a client's program, hand it the client's signals, and tell the client how it ended."""
    size, files, _, _ = socket.recv_fds(client, 8, 100)
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        message += client.recv(1 << 20)
    if (process := os.fork()) == 0:
        client.close()
        os._exit(run_program(executable, files, **json.loads(message)))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(process)
    while ended not in select.select([client, ended], [], [])[0]:
        number = client.recv(1)
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            break
    _, status = os.waitpid(process, 0)
    try:
        client.send(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    finally:
        os._exit(0)


def run_program(
    executable: str, files: list[int], numbers: list[int], arguments: list[str], folder: str, environment: dict
) -> int:
    """The exit status of `python ARGUMENTS` in this process, in which `files` get these numbers."""
    # Through copies above all of them, since one may have the number that another shall get.
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, max(*files, *numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for number, copy in zip(numbers, copies):
        os.dup2(copy, number)
        os.close(copy)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", buffering=1, closefd=False) for n in range(3))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = executable
    kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
    first = {"": os.path.dirname(os.path.realpath(arguments[0])), "-c": "", "-m": os.getcwd()}[kind]
    sys.path[0] = first
    sys.argv = ["-c", *arguments[1:]] if kind == "-c" else arguments
    try:
        if kind == "-c":
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        status = {None: 0}.get(left.code, left.code if isinstance(left.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        status = 1
    return leave(status)


def leave(status: int) -> int:
    """Do the work of an exiting interpreter: wait for threads, call the functions registered with atexit, flush."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = 120
    return status & 0xFF


if __name__ == "__main__":
    serve(*sys.argv[1:])
