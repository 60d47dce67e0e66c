"""Define cases of downloads: damaged and hostile archives, invalid addresses, servers with faults."""

from __future__ import annotations

import http.server
import io
import os
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from data import download
from tests.hostile.harness import EITHER, ERROR, WORKS, Case


def zipped(*members: tuple[object, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        for name, content in members:
            z.writestr(name, content)
    return out.getvalue()


def tarred(*members: tuple[str, bytes, str]) -> bytes:
    """Return a tar archive of members (name, type, target of a link or "")."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as t:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o755
            content = b"abc" * 9000 if kind == tarfile.REGTYPE else b""
            info.size = len(content)
            t.addfile(info, io.BytesIO(content))
    return out.getvalue()


def edited(content: bytes, *changes: tuple[int, int]) -> bytes:
    changed = bytearray(content)
    for position, value in changes:
        changed[position] = value
    return bytes(changed)


LINK = zipfile.ZipInfo("top/link")
LINK.external_attr = 0o120777 << 16
ONE = zipped(("top/x", b"abc"))
CENTRAL = ONE.index(b"PK\1\2")
DEFLATED = zipped(("top/x", b"abc" * 9000), method=zipfile.ZIP_DEFLATED)
TOP, FILE, GOOD_TAR = ("top", tarfile.DIRTYPE, ""), tarfile.REGTYPE, None
GOOD_TAR = tarred(TOP, ("top/x", FILE, ""))
OUTSIDE = "../../outside"  # from the temporary folder: next to the folder to unpack to
# Archives: (name, content, expected end). No file may be written outside of the folder, and no link may be left.
ARCHIVES: list[tuple[str, bytes, str]] = [
    ("good.zip", ONE, WORKS),
    ("good.tar.gz", GOOD_TAR, WORKS),
    ("two dots.zip", zipped(("top/x", b"x"), (f"top/../{OUTSIDE}", b"x")), ERROR),
    ("absolute path.zip", zipped(("top/x", b"x"), ("/tmp/campaign-outside", b"x")), ERROR),
    ("symbolic link.zip", zipped(("top/x", b"x"), (LINK, b"/etc/passwd")), ERROR),
    ("bomb.zip", zipped(("top/x", bytes(2**26 + 1)), method=zipfile.ZIP_DEFLATED), ERROR),
    ("two folders.zip", zipped(("a/x", b"x"), ("b/x", b"x")), ERROR),
    ("empty.zip", zipped(), ERROR),
    ("a name with NUL.zip", ONE.replace(b"top/x", b"top/\0"), EITHER),
    ("cut short.zip", DEFLATED[:60], ERROR),
    ("corrupt.zip", edited(DEFLATED, (38, 0x55), (39, 0xAA), (40, 0x55)), ERROR),
    ("encrypted.zip", edited(ONE, (6, 1), (CENTRAL + 8, 1)), ERROR),
    ("unknown method.zip", edited(ONE, (8, 97), (CENTRAL + 10, 97)), ERROR),
    ("wrong checksum.zip", edited(ONE, (CENTRAL + 16, 0x12)), ERROR),
    ("no archive.zip", b"hello", ERROR),
    ("nothing.zip", b"", ERROR),
    ("two dots.tar.gz", tarred(TOP, (f"top/../{OUTSIDE}", FILE, "")), ERROR),
    ("absolute path.tar.gz", tarred(TOP, ("/tmp/campaign-outside", FILE, "")), ERROR),
    ("link outside.tar.gz", tarred(TOP, ("top/l", tarfile.SYMTYPE, "/etc/passwd")), ERROR),
    ("through a link.tar.gz", tarred(TOP, ("top/l", tarfile.SYMTYPE, "/tmp"), ("top/l/x", FILE, "")), ERROR),
    ("hard link outside.tar.gz", tarred(TOP, ("top/h", tarfile.LNKTYPE, "/etc/passwd")), ERROR),
    ("device.tar.gz", tarred(TOP, ("top/d", tarfile.CHRTYPE, "")), ERROR),
    ("pipe.tar.gz", tarred(TOP, ("top/f", tarfile.FIFOTYPE, "")), ERROR),
    ("folder is a link.tar.gz", tarred(("top", tarfile.SYMTYPE, ".")), ERROR),
    ("cut short.tar.gz", GOOD_TAR[:60], ERROR),
    ("corrupt.tar.gz", edited(GOOD_TAR, (40, 0x55), (41, 0xAA)), ERROR),
    ("no archive.tar.gz", b"hello", ERROR),
]
# Addresses; SERVER is a server whose answer depends on the path.
URLS = """
SERVERx SERVER404 SERVERfile SERVERloop SERVERshort SERVERgarbage file:///etc/passwd foo ftp://127.0.0.1:1/x
http://127.0.0.1:99999/x http://127.0.0.1:0/x http://127.0.0.1:1/x http://[::1 http:///x gopher://x/y SERVERé
""".split()  # noqa: SIM905 (a line of addresses is easier to add to)


class Handler(http.server.BaseHTTPRequestHandler):
    """An HTTP handler whose answer depends on the path."""

    def do_GET(self) -> None:
        if "404" in self.path:
            return self.send_error(404)
        if "hang" in self.path:
            return time.sleep(30)
        if "garbage" in self.path:
            self.wfile.write(b"\0\xff\r\n\r\n")
            return None
        if "file" in self.path or "loop" in self.path:
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd" if "file" in self.path else self.path)
            return self.end_headers()
        self.send_response(200)
        self.send_header("Content-Length", "2000" if "short" in self.path else "1000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)
        return None

    def log_message(self, *args) -> None:
        pass


def serving(run: Callable[[str], int]) -> int:
    """Call `run` with the address of a new server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        os.environ.pop(name, None)
    return run(f"http://127.0.0.1:{server.server_port}/")


def unpack(folder: Path, name: str, content: bytes) -> int:
    inner = folder / "inner"
    inner.mkdir()
    (inner / name).write_bytes(content)
    try:
        download.extract(inner / name, inner / "out")
    except download.DownloadError as error:
        print("error:", error)
        return 2
    links = [path for path in [inner / "out", *(inner / "out").rglob("*")] if path.is_symlink()]
    assert not links, links
    return 0


def inside(folder: Path, output: str) -> str | None:
    """Return the fault if there are files other than the unpacked folder and the archive, else None."""
    files = [path for path in folder.rglob("*") if "out" not in path.relative_to(folder).parts[:2]]
    stray = [str(path) for path in files if path.name != "inner" and path.suffix not in (".zip", ".gz")]
    stray += [str(path) for path in (Path("/tmp/campaign-outside"), folder.parent / "outside") if path.exists()]
    return f"stands where it should not: {stray}" if stray else None


def silent(folder: Path) -> int:
    """Download from a server that accepts the request and never answers."""
    try:
        serving(lambda url: download.fetch(url + "hang", folder / "x", timeout=1, progress=False))
    except download.DownloadError as error:
        print("error:", error)
        return 2
    return 0


def cases(place: Path) -> list[Case]:
    def case(name: str, run, expect: str = ERROR, **more) -> Case:
        return Case("download", f"download {name}", run, expect, **more)

    def nothing(folder: Path, output: str) -> str | None:
        return "a folder appeared" if (folder / "raw" / "ml-100k").exists() else None

    def fetch(name: str, *more: str) -> Callable[[Path], int]:
        return lambda folder: download.main([name, "--to", str(folder / "raw"), *more])

    def from_server(name: str, url: str) -> Callable[[Path], int]:
        return lambda folder: serving(lambda server: fetch(name, "--url", url.replace("SERVER", server))(folder))

    def to(path: str) -> Callable[[Path], int]:
        return lambda folder: download.main(
            ["ml-100k", "--to", path.format(folder=folder), "--url", "http://127.0.0.1:1/x"]
        )

    def occupied(folder: Path) -> int:
        (folder / "raw").write_text("x")
        return fetch("ml-100k", "--url", "http://127.0.0.1:1/x")(folder)

    return [
        *(
            case(f"unpack {n}", lambda f, n=n, c=c: unpack(f, n, c), e, check=inside, seconds=20)
            for n, c, e in ARCHIVES
        ),
        *(case(f"--url {url}", from_server("ml-100k", url), check=nothing, seconds=30) for url in URLS),
        case("--url with a blank", from_server("ml-100k", "SERVERa b"), check=nothing),
        case("--url with a line end", from_server("ml-100k", "SERVERa\nb"), check=nothing),
        case("of a table, something else comes", from_server("amazon-beauty", "SERVERx")),
        case("from a server that says nothing", silent, seconds=20),
        case("of an unknown name", fetch("foo")),
        case("--to is a file", occupied),
        case("--to with NUL", to("a\0b")),
        case("--to ~nosuchuser", to("~nosuchuser/x")),
        case("--to of 5,000 characters", to("{folder}/" + "a" * 5000)),
        case("--to in /proc", to("/proc/nope")),
    ]
