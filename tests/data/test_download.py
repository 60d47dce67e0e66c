"""Test downloads from a local HTTP server."""

import hashlib
import http.server
import io
import re
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from data import download
from data.datasets import FORMATS, load_dataset
from data.download import SOURCES, DownloadError, Source, fetch
from tests.support.ports import reserved_ports

ROOT = Path(__file__).resolve().parents[2]
CONTENT = bytes(range(256)) * 4000  # 1 MB: several blocks


class Server(http.server.ThreadingHTTPServer):
    """A server of `content`, whose attributes set its faults."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges, self.etag, self.cut_after, self.with_length = CONTENT, True, '"v1"', None, True
        self.wrong_range = False
        self.requests = []  # (Range, status)
        self.url = f"http://127.0.0.1:{self.server_port}/files/data.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    """An HTTP handler that sends the server's content with its faults."""

    def do_GET(self):
        server, requested = self.server, self.headers.get("Range")
        if self.path.endswith("missing"):
            return self.send_error(404)
        start, status = 0, 200
        if_range = self.headers.get("If-Range")
        if requested and server.ranges and (if_range is None or if_range == server.etag):
            start, status = int(re.fullmatch(r"bytes=(\d+)-", requested)[1]), 206
            if start >= len(server.content):
                server.requests.append((requested, 416))
                return self.send_error(416)
        server.requests.append((requested, status))
        if status == 206 and server.wrong_range:
            start += 1
        body = server.content[start:]
        self.send_response(status)
        if status == 206:
            size = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if server.etag:
            self.send_header("ETag", server.etag)
        if server.with_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.cut_after is not None:
            body = body[: server.cut_after]
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "deep" / "data.bin"


def get(server, target, **options):
    return fetch(server.url, target, timeout=600, **options)


def interrupt(server, target, after=262_144):
    """Start a download that the server interrupts."""
    server.cut_after = after
    with pytest.raises(DownloadError, match=r"interrupted .* run the same command again to resume") as caught:
        get(server, target)
    assert "\n" not in str(caught.value)
    server.cut_after = None
    assert not target.exists()
    assert target.with_name("data.bin.part").stat().st_size == after
    server.requests.clear()


def is_clean(target):
    return {p.name for p in target.parent.iterdir()} <= {"data.bin", "data.bin.sha256"}


@pytest.mark.parametrize("progress", [True, False])
def test_full_download(server, target, progress):
    get(server, target, md5=hashlib.md5(CONTENT).hexdigest(), progress=progress)
    assert target.read_bytes() == CONTENT and is_clean(target)
    get(server, target)
    assert server.requests == [(None, 200)]  # the second call needs no request


def test_without_content_length(server, target):
    server.with_length = False
    assert get(server, target).read_bytes() == CONTENT


@pytest.mark.parametrize("etag", ['"v1"', None, 'W/"weak"'])
def test_resume(server, target, etag):
    server.etag = etag
    interrupt(server, target)
    get(server, target)
    assert server.requests == [("bytes=262144-", 206)]
    assert target.read_bytes() == CONTENT and is_clean(target)


def test_resume_twice(server, target):
    interrupt(server, target)
    server.cut_after = 196_608
    with pytest.raises(DownloadError, match="interrupted"):
        get(server, target)
    server.cut_after = None
    get(server, target)
    assert [r for r, _ in server.requests] == ["bytes=262144-", "bytes=458752-"]
    assert target.read_bytes() == CONTENT


def test_server_without_ranges_starts_over(server, target):
    server.ranges = False
    interrupt(server, target)
    get(server, target)
    assert server.requests == [("bytes=262144-", 200)]
    assert target.read_bytes() == CONTENT


def test_changed_file_starts_over(server, target):
    interrupt(server, target)
    server.content, server.etag = CONTENT[::-1], '"v2"'
    assert get(server, target).read_bytes() == CONTENT[::-1]
    assert server.requests == [("bytes=262144-", 200)]


def test_changed_size_without_etag_starts_over(server, target):
    server.etag = None
    interrupt(server, target)
    server.content = CONTENT[::-1] + b"more"
    assert get(server, target).read_bytes() == server.content
    assert server.requests == [("bytes=262144-", 206), (None, 200)]


def test_file_that_shrank_below_the_part_starts_over(server, target):
    interrupt(server, target)
    server.content = b"short"
    assert get(server, target).read_bytes() == b"short"
    assert server.requests == [("bytes=262144-", 416), (None, 200)]


def test_wrong_range_in_the_answer_starts_over(server, target):
    interrupt(server, target)
    server.wrong_range = True
    assert get(server, target).read_bytes() == CONTENT


def test_part_without_state_starts_over(server, target):
    interrupt(server, target)
    target.with_name("data.bin.part.json").write_text("{")
    assert get(server, target).read_bytes() == CONTENT
    assert server.requests == [(None, 200)]


def test_killed_between_the_last_byte_and_the_rename(server, target):
    interrupt(server, target)
    target.with_name("data.bin.part").write_bytes(CONTENT)
    assert get(server, target).read_bytes() == CONTENT and server.requests == []


def test_wrong_checksum(server, target):
    with pytest.raises(DownloadError, match=r"wrong checksum, expected md5 0000, got [0-9a-f]{32}"):
        get(server, target, md5="0000")
    assert list(target.parent.iterdir()) == []
    target.write_bytes(b"put here by hand, but broken")
    with pytest.raises(DownloadError, match="wrong checksum"):
        get(server, target, md5="0000")
    assert not target.exists()


def test_not_found(server, target):
    with pytest.raises(DownloadError, match="the server answered 404 Not Found"):
        fetch(server.url + "-missing", target, timeout=600)
    assert list(target.parent.iterdir()) == []


@pytest.fixture
def unreachable(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with reserved_ports() as (port,):  # on which nothing listens
        yield f"http://127.0.0.1:{port}/data.zip"


def test_connection_refused(unreachable, target):
    with pytest.raises(DownloadError, match=r"cannot reach 127\.0\.0\.1:\d+ .*refused.*is offline") as caught:
        fetch(unreachable, target, timeout=600)
    assert "\n" not in str(caught.value)


def test_silent_server(target):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        with pytest.raises(DownloadError, match="timed out"):
            fetch(f"http://127.0.0.1:{s.getsockname()[1]}/x", target, timeout=0.3)


# ---- whole data sets


def zip_of(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, content in files.items():
            z.writestr(name, content)
    return out.getvalue()


def tar_of(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as t:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            t.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def serve(server, monkeypatch):
    """Return serve(name, content), which replaces the publisher of a data set by a local server."""

    def serve(name, content, md5="right"):
        server.content = content
        source = SOURCES[name]
        md5 = hashlib.md5(content).hexdigest() if md5 == "right" else md5
        monkeypatch.setitem(SOURCES, name, Source(source.url, md5, source.format, source.folder))
        return ["--url", server.url]

    return serve


def test_command_fetches_unpacks_and_the_result_loads(serve, server, tmp_path, capsys):
    pytest.importorskip("polars")
    options = serve("ml-100k", zip_of({"ml-100k/u.data": "1\t2\t3\t4\n", "ml-100k/README": "hello"}))
    to = tmp_path / "raw"
    assert download.main(["ml-100k", "--to", str(to), *options]) == 0
    assert sorted(p.name for p in to.iterdir()) == ["ml-100k"]
    assert f"data.path: {to / 'ml-100k'}" in capsys.readouterr().out
    assert load_dataset("ml-100k", str(to / "ml-100k"), cache_dir=tmp_path / "cache").num_events == 1
    assert download.main(["ml-100k", "--to", str(to), *options]) == 0
    assert len(server.requests) == 1


def test_tar_and_plain_csv(serve, tmp_path, capsys):
    pytest.importorskip("polars")
    options = serve("kuairand-pure", tar_of({"KuaiRand-Pure/data/log_standard_a.csv": b"x"}), md5=None)
    assert download.main(["kuairand-pure", "--to", str(tmp_path), *options]) == 0
    assert (tmp_path / "KuaiRand-Pure" / "data" / "log_standard_a.csv").read_bytes() == b"x"
    options = serve("amazon-beauty", b"A,B,5.0,10\n", md5=None)
    assert download.main(["amazon-beauty", "--to", str(tmp_path), *options]) == 0
    assert "no published checksum" in capsys.readouterr().out
    dataset = load_dataset("amazon", str(tmp_path / "amazon-beauty"), cache_dir=tmp_path / "cache")
    assert dataset.num_events == 1


@pytest.mark.parametrize("content", [b"not an archive", zip_of({"a/x": "", "b/y": ""})])
def test_bad_archive_leaves_no_folder(serve, tmp_path, capsys, content):
    options = serve("ml-1m", content)
    assert download.main(["ml-1m", "--to", str(tmp_path), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ml-1m.zip: ") and error.count("\n") == 1
    assert not (tmp_path / "ml-1m").exists() and not list(tmp_path.glob(".ml-1m*"))


def test_tar_may_not_reach_outside(serve, tmp_path):
    options = serve("kuairand-1k", tar_of({"KuaiRand-1K/x": b"", "../evil": b"x"}))
    assert download.main(["kuairand-1k", "--to", str(tmp_path / "raw"), *options]) == 1
    assert not (tmp_path / "evil").exists()


def test_offline_command_says_so_in_one_line(unreachable, tmp_path, capsys):
    assert download.main(["ml-20m", "--to", str(tmp_path), "--url", unreachable]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is offline" in error and f"put ml-20m.zip into {tmp_path}" in error


def test_archive_that_the_user_has_downloaded(serve, unreachable, tmp_path):
    content = zip_of({"ml-25m/ratings.csv": "userId,movieId,rating,timestamp\n1,2,3.5,4\n"})
    serve("ml-25m", content)
    (tmp_path / "ml-25m.zip").write_bytes(content)
    assert download.main(["ml-25m", "--to", str(tmp_path), "--url", unreachable]) == 0
    assert (tmp_path / "ml-25m" / "ratings.csv").exists()


def test_interrupted_by_ctrl_c(monkeypatch, tmp_path, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "download", stop)
    assert download.main(["ml-1m", "--to", str(tmp_path)]) == 130
    assert "again to resume" in capsys.readouterr().err


def test_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert download.main(["ml-1m", "--to", str(tmp_path / "file" / "raw")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_published_checksum_later_downloads_must_equal_the_first(serve, tmp_path, capsys):
    options = serve("amazon-beauty", b"A,B,5.0,10\n", md5=None)
    assert download.main(["amazon-beauty", "--to", str(tmp_path), *options]) == 0
    file = tmp_path / "amazon-beauty" / "ratings_Beauty.csv"
    assert file.with_name(file.name + ".sha256").read_text().strip() == hashlib.sha256(b"A,B,5.0,10\n").hexdigest()
    file.unlink()
    options = serve("amazon-beauty", b"A,C,5.0,10\n", md5=None)
    assert download.main(["amazon-beauty", "--to", str(tmp_path), *options]) == 1
    error = capsys.readouterr().err
    assert "differs from the first download" in error and error.count("\n") == 1
    assert [p.name for p in file.parent.iterdir()] == [file.name + ".sha256"]
    options = serve("amazon-beauty", b"A,B,5.0,10\n", md5=None)
    assert download.main(["amazon-beauty", "--to", str(tmp_path), *options]) == 0
    file.write_bytes(b"changed on the disk")
    assert download.main(["amazon-beauty", "--to", str(tmp_path), *options]) == 1
    assert file.exists()


def test_a_page_in_place_of_a_table_is_refused(serve, tmp_path, capsys):
    options = serve("amazon-beauty", b"<html>please log in</html>\n", md5=None)
    assert download.main(["amazon-beauty", "--to", str(tmp_path), *options]) == 1
    assert "starts with '<html>please" in capsys.readouterr().err
    assert list((tmp_path / "amazon-beauty").iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "foo",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://[::1",
        "http://127.0.0.1:99999/x",
        "http://127.0.0.1:0/x",
        "http:///x",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/a\nb",
        "http://127.0.0.1/\xe9",
    ],
)
def test_invalid_address(url, target):
    with pytest.raises(DownloadError, match="expected an address like https") as caught:
        fetch(url, target)
    assert "\n" not in str(caught.value) and not target.parent.exists()


def test_redirects_from_https_to_http_are_refused():
    with pytest.raises(DownloadError, match="redirects to http://host/file, which is not https"):
        download._check_redirect("https://host/file", "http://host/file")


@pytest.mark.parametrize("to", ["a\0b", "~nosuchuser/x"])
def test_impossible_folder(to, capsys):
    assert download.main(["ml-1m", "--to", to]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --to: ") and error.count("\n") == 1


def edited(content, *changes):
    content = bytearray(content)
    for position, value in changes:
        content[position] = value
    return bytes(content)


def deflated():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("top/x", b"abc" * 9000)
    return out.getvalue()


CENTRAL = zip_of({"top/x": "abc"}).index(b"PK\1\2")
BROKEN = {
    "encrypted.zip": edited(zip_of({"top/x": "abc"}), (6, 1), (CENTRAL + 8, 1)),
    "unknown-method.zip": edited(zip_of({"top/x": "abc"}), (8, 97), (CENTRAL + 10, 97)),
    "corrupt.zip": edited(deflated(), (38, 0x55), (39, 0xAA)),
    "truncated.zip": deflated()[:40],
    "corrupt.tar.gz": edited(tar_of({"top/x": b"abc" * 9000}), (40, 0x55), (41, 0xAA)),
    "truncated.tar.gz": tar_of({"top/x": b"abc" * 9000})[:60],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_archives(tmp_path, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(DownloadError, match=r"cannot be unpacked|encrypted") as caught:
        download.extract(tmp_path / name, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_top_folder_that_is_a_link(tmp_path):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as t:
        link = tarfile.TarInfo("top")
        link.type, link.linkname = tarfile.SYMTYPE, "."
        t.addfile(link)
    with pytest.raises(DownloadError, match="top: neither a file nor a folder inside the archive"):
        download.extract(tmp_path / "x.tar.gz", tmp_path / "out")


def linked():
    link = zipfile.ZipInfo("top/link")
    link.external_attr = 0o120777 << 16
    return link


HOSTILE = {
    "dots.zip": zip_of({"top/x": "", "top/../../evil": "x"}),
    "absolute.zip": zip_of({"top/x": "", "/tmp/evil": "x"}),
    "link.zip": zip_of({"top/x": "", linked(): "/etc/passwd"}),
    "absolute.tar.gz": tar_of({"top/x": b"", "/tmp/evil": b"x"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_archives_with_links_or_devices_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(DownloadError, match="neither a file nor a folder inside the archive") as caught:
        download.extract(tmp_path / name, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["bomb.zip", "bomb.tar.gz"])
def test_archives_that_grow_too_much_are_refused(tmp_path, name, monkeypatch):
    monkeypatch.setattr(download, "ALWAYS_ALLOWED", 10_000)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("top/x", bytes(10**6))
    content = out.getvalue() if name == "bomb.zip" else tar_of({"top/x": bytes(10**6)})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DownloadError, match=r"expected at most [0-9,]+ bytes when unpacked, got more"):
        download.extract(tmp_path / name, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [name]
    monkeypatch.setattr(download, "ALWAYS_ALLOWED", 10**6)
    download.extract(tmp_path / name, tmp_path / "out")
    assert (tmp_path / "out" / "x").stat().st_size == 10**6


@pytest.mark.parametrize("command", [["-m", "data.download"], [str(ROOT / "data" / "download.py")]])
def test_both_commands_print_help(command):
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "ml-100k" in done.stdout and not done.stderr


def test_sources_are_well_formed():
    for name, source in SOURCES.items():
        assert source.format in FORMATS, name
        assert source.md5 is None or re.fullmatch("[0-9a-f]{32}", source.md5), name
        assert source.url.startswith("https://"), name
