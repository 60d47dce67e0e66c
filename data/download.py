"""Fetch a public data set: `python -m data.download ml-100k --to raw`.

An interrupted download resumes where it stopped, and a file appears under its name only when it is whole. The checksum
that the publisher states is verified; if there is none, the checksum of the first download is stored beside the file
and later downloads must equal it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import lzma
import os
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .atomic import replace_folder, sweep
from .formats import FORMATS
from .lines import first_line, split_row
from .sources import RawFile, local_path
from .types import DataError, shown

BLOCK = 1 << 18


class DownloadError(Exception):
    """The download failed; `str(error)` is one line for the user."""


@dataclass(frozen=True)
class Source:
    """The place from which a public data set is downloaded.

    url: a .zip, .tar.gz or plain file. md5: as the publisher states it, None if none is published. format: the key of
    datasets.FORMATS that reads the files. folder: where the files end up, below the target folder.
    """

    url: str
    md5: str | None
    format: str
    folder: str


_GROUPLENS = "https://files.grouplens.org/datasets/movielens/"
_AMAZON = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/"
_KUAIRAND = "https://zenodo.org/records/10439422/files/"

SOURCES: dict[str, Source] = {
    "ml-100k": Source(_GROUPLENS + "ml-100k.zip", "0e33842e24a9c977be4e0107933c0723", "ml-100k", "ml-100k"),
    "ml-1m": Source(_GROUPLENS + "ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906", "ml-1m", "ml-1m"),
    "ml-20m": Source(_GROUPLENS + "ml-20m.zip", "cd245b17a1ae2cc31bb14903e1204af3", "ml-20m", "ml-20m"),
    "ml-25m": Source(_GROUPLENS + "ml-25m.zip", "6b51fb2759a8657d3bfcbfc42b592ada", "ml-25m", "ml-25m"),
    "ml-32m": Source(_GROUPLENS + "ml-32m.zip", "d472be332d4daa821edc399621853b57", "ml-32m", "ml-32m"),
    "amazon-beauty": Source(_AMAZON + "ratings_Beauty.csv", None, "amazon", "amazon-beauty"),
    "amazon-books": Source(_AMAZON + "ratings_Books.csv", None, "amazon", "amazon-books"),
    "kuairand-pure": Source(
        _KUAIRAND + "KuaiRand-Pure.tar.gz", "0820331067a3784d9691136f772b35a7", "kuairand", "KuaiRand-Pure"
    ),
    "kuairand-1k": Source(
        _KUAIRAND + "KuaiRand-1K.tar.gz", "6b0b9c8222d67fcd4c676218edca3f1f", "kuairand", "KuaiRand-1K"
    ),
    "kuairand-27k": Source(
        _KUAIRAND + "KuaiRand-27K.tar.gz", "3e3c799a24e2d23a4d2c757fbf9adf59", "kuairand", "KuaiRand-27K"
    ),
}


def fetch(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    check: Callable[[Path], None] | None = None,
    timeout: float = 30.0,
    progress: bool = True,
) -> Path:
    """Download `url` to `target`, resuming `target`.part if an earlier attempt left one.

    md5: as the publisher states it; None for the checksum of the first download, which is stored in `target`.sha256.
    check: a further check of the complete file, which raises DownloadError if the content is wrong. timeout: seconds
    without any data. An existing target is only verified. DownloadError on any failure; the received part stays for the
    next attempt, unless it belongs to another file.
    """
    part, state = target.with_name(target.name + ".part"), target.with_name(target.name + ".part.json")
    if target.exists():
        _verify(target, md5)
        return target
    host = _checked_host(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _transfer(url, part, state, timeout, progress)
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{url}: the server answered {error.code} {shown(error.reason, 200)}") from error
    except http.client.HTTPException as error:
        raise DownloadError(f"{url}: interrupted ({error!r}); run the same command again to resume") from error
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        if part.exists() and not isinstance(error, urllib.error.URLError):
            raise DownloadError(f"{url}: interrupted ({reason}); run the same command again to resume") from error
        raise DownloadError(
            f"cannot reach {host} ({reason}): is this machine offline? Or put {target.name} into {target.parent} "
            "yourself and run the same command again"
        ) from error
    try:
        _verify(part, md5)
        if check is not None:
            check(part)
    except DownloadError:
        part.unlink(missing_ok=True)
        state.unlink(missing_ok=True)
        raise
    if md5 is None:
        _sum_file(target).write_text(_digest(part, hashlib.sha256) + "\n", encoding="utf-8")
    os.replace(part, target)
    state.unlink(missing_ok=True)
    return target


def _checked_host(url: str) -> str:
    """Return the host of an http or https address; DownloadError for anything else."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a bad port or IPv6 address
        good = False
    if not good or not re.fullmatch(r"[!-~]+", url):
        raise DownloadError(f"{shown(url, 200)}: expected an address like https://host/file, ASCII without spaces")
    return parts.netloc


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, fp, code, msg, headers, newurl):
        if request.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise DownloadError(f"{request.full_url}: redirects to {shown(newurl, 200)}, which is not https")
        return super().redirect_request(request, fp, code, msg, headers, newurl)


def _transfer(url: str, part: Path, state: Path, timeout: float, progress: bool) -> None:
    """Download the rest of `part`."""
    known = _read_state(state, url) or {}
    have = part.stat().st_size if known and part.exists() else 0
    if have and have == known["total"]:
        return
    headers = {"Accept-Encoding": "identity", "User-Agent": "hstu_sparse"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if known["validator"]:  # If-Range: the server sends the whole file if it has changed
            headers["If-Range"] = known["validator"]
    try:
        opener = urllib.request.build_opener(_Redirects)
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if not (error.code == 416 and have):
            raise
        error.close()
        part.unlink()  # longer than the server's current file
        return _transfer(url, part, state, timeout, progress)
    with response:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
            total = int(match[2]) if match and match[2] != "*" else None
            if not match or int(match[1]) != have or known["total"] not in (None, total):
                part.unlink()
                return _transfer(url, part, state, timeout, progress)
        else:
            have = 0
        etag = response.headers.get("ETag", "")
        # If-Range takes strong validators only.
        validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
        state.write_text(json.dumps({"url": url, "total": total, "validator": validator}), encoding="utf-8")
        with open(part, "ab" if have else "wb") as out, _bar(part.stem, have, total, progress) as advance:
            while block := response.read(BLOCK):
                out.write(block)
                advance(len(block))
        got = part.stat().st_size
    if total is not None and got != total:
        raise http.client.IncompleteRead(b"", total - got)


def _read_state(state: Path, url: str) -> dict | None:
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
        return known if known["url"] == url and {"total", "validator"} <= known.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextlib.contextmanager
def _bar(name: str, done: int, total: int | None, progress: bool):
    """Show a progress bar, and yield the function that advances it by a number of bytes."""
    try:
        from rich import progress as rich_progress
    except ImportError:
        progress = False
    if not progress:
        yield lambda n: None
        return
    columns = (
        rich_progress.TextColumn(name),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda n: bar.advance(task, n)


def _digest(file: Path, algorithm) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, algorithm).hexdigest()


def _sum_file(target: Path) -> Path:
    return target.with_name(target.name.removesuffix(".part") + ".sha256")


def _verify(file: Path, md5: str | None) -> None:
    """Check the md5 sum, or else that the file equals the first download; DownloadError if it does not."""
    if md5 is not None:
        if (got := _digest(file, lambda: hashlib.md5(usedforsecurity=False))) != md5:
            file.unlink()
            raise DownloadError(f"{file.name}: wrong checksum, expected md5 {md5}, got {got}; deleted it, try again")
        return
    sum_file, got = _sum_file(file), _digest(file, hashlib.sha256)
    if sum_file.exists() and sum_file.read_text(encoding="utf-8", errors="replace").strip() != got:
        raise DownloadError(
            f"{file.name.removesuffix('.part')}: not the file that was first downloaded here (its sha256 is {got}); "
            f"if it may have changed, delete {sum_file}"
        )


# Errors of zipfile and tarfile for archives that are damaged or compressed in a way that this Python does not know
# (NotImplementedError), and for names that no file system can have (ValueError).
UNPACKING = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
    NotImplementedError,
)


def extract(archive: Path, folder: Path) -> None:
    """Unpack an archive whose files all lie in one top folder; that folder appears as `folder`, whole or not at all."""
    sweep(folder.parent, folder.name)
    try:
        with replace_folder(folder) as temporary:
            unpacked = temporary / ".unpacked"
            unpacked.mkdir()
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as z:
                    if any(member.flag_bits & 1 for member in z.infolist()):
                        raise DownloadError(f"{archive.name}: encrypted")
                    z.extractall(unpacked)
            else:
                with tarfile.open(archive) as t:
                    extract_tar(t, unpacked)
            tops = [p for p in unpacked.iterdir() if p.is_dir() and not p.is_symlink() and p.name != "__MACOSX"]
            if len(tops) != 1:
                names = ", ".join(shown(p.name) for p in sorted(tops)[:5]) or "none"
                raise DownloadError(f"{archive.name}: expected one folder inside, got {names}")
            for path in tops[0].iterdir():
                path.rename(temporary / path.name)
            shutil.rmtree(unpacked)
    except UNPACKING as error:
        raise DownloadError(f"{archive.name}: cannot be unpacked: {shown(error, 200)}") from error


def extract_tar(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack the files and folders of a tar archive; tarfile.TarError for links, devices and paths out of `folder`.

    Python before 3.11.4 has no extraction filters, so the members are checked here.
    """
    members = archive.getmembers()
    for member in members:
        path = PurePosixPath(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{shown(member.name)}: neither a file nor a folder inside the archive")
        member.mode = 0o755 if member.isdir() else 0o644
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder, members)


def _check_first_row(format: str) -> Callable[[Path], None]:
    """Return a check that replaces the checksum on the first download, since a proxy's error page is no table."""
    fmt = FORMATS[format]

    def check(file: Path) -> None:
        text = first_line(RawFile(file, file.name), fmt).decode("utf-8", "replace").rstrip("\r\n")
        if len(split_row(text, fmt)) != len(fmt.columns):
            raise DownloadError(
                f"the download is not the expected file: it starts with {shown(text)!r}, "
                f"which is no row of format {format}"
            )

    return check


def download(name: str, to: str | Path, *, url: str | None = None, progress: bool = True) -> Path:
    """Fetch and unpack the data set `name` (a key of SOURCES) below `to`; returns its folder, usable as data.path.

    url: another address of the same file. Nothing is fetched when the folder exists. DownloadError on any failure.
    """
    if name not in SOURCES:
        raise DownloadError(f"unknown data set {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    try:
        to = local_path(to, "--to")
        folder = to / source.folder
        file_name = Path(urllib.parse.urlsplit(source.url).path).name
        to.mkdir(parents=True, exist_ok=True)
        if file_name.endswith(".csv"):
            check = _check_first_row(source.format) if source.md5 is None else None
            fetch(url or source.url, folder / file_name, md5=source.md5, check=check, progress=progress)
        elif not folder.exists():
            archive = fetch(url or source.url, to / file_name, md5=source.md5, progress=progress)
            extract(archive, folder)
            archive.unlink()
    except DataError as error:
        raise DownloadError(str(error)) from error
    except OSError as error:
        raise DownloadError(f"{shown(error.filename or to, 200)}: {error.strerror or error}") from error
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data.download", description="Fetch a public data set.")
    parser.add_argument("name", choices=list(SOURCES), metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument("--to", default="raw", metavar="DIR", help="folder for raw data (default: %(default)s)")
    parser.add_argument("--url", help="get the same file from another address, a mirror say")
    options = parser.parse_args(arguments)
    try:
        folder = download(options.name, options.to, url=options.url)
    except DownloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to resume", file=sys.stderr)
        return 130
    source = SOURCES[options.name]
    if source.md5 is None:
        print(
            f"{options.name}: no published checksum is known; the checksum of the first download is stored beside "
            "the file, and later downloads must have the same"
        )
    print(f"{options.name} is in {folder}; in the YAML: data.format: {source.format}, data.path: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
