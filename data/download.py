"""Fetch a public data set: `python -m data.download ml-100k --to raw`.

An interrupted download is resumed, and a file gets its name only when it is complete. The publisher's checksum is
verified; if there is none, the checksum of the first download is stored next to the file and verified later.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # run as a file: this folder must not hide Python's modules, such as types
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    __package__ = "data"

import argparse
import contextlib
import json
import logging
import lzma
import re
import shutil
import stat
import tarfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, NoReturn

try:
    import pooch
    import requests

    from data.reading.formats import FORMATS
    from data.reading.lines import first_line, split_row
    from data.reading.sources import RawFile, local_path

    from .atomic import replace_folder, sweep
    from .types import DataError, shown
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    missing = f"the package {error.name} is not installed in this Python"
    sys.exit(f"error: {missing}; run `make setup`, then `source .venv/bin/activate`")

BLOCK = 1 << 16  # bytes written at a time; whole blocks of an interrupted download are kept
# The data sets are 4 to 10 times as large as their archives: an archive that grows far more is refused.
MOST_GROWTH, ALWAYS_ALLOWED = 100, 2**26


class DownloadError(Exception):
    """A download failed; `str(error)` is one line."""


@dataclass(frozen=True)
class Source:
    """The download of a public data set.

    url: a .zip, .tar.gz or plain file; md5: the publisher's checksum, or None; format: the files' key in FORMATS;
    folder: the folder of the files, below the target folder.
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
    """Download `url` to `target`; resume from `target`.part if it exists. An existing target is only verified.

    md5: the publisher's checksum; None: the checksum of the first download, stored in `target`.sha256. check: called
    with the complete file, raises DownloadError if the content is wrong. timeout: seconds without data. DownloadError
    on any failure; the received part is kept for the next attempt, unless it is of another file.
    """
    if target.exists():
        _verify(target, md5)
        return target
    host = _checked_host(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    first = None if md5 else _first_sum(target)
    known = f"md5:{md5}" if md5 else first and f"sha256:{first}"
    transfer = Transfer(target, check, md5 is None and first is None, timeout, progress)
    pooch.get_logger().setLevel(logging.ERROR)
    try:
        pooch.retrieve(url, known, target.name, target.parent, downloader=transfer)
    except requests.HTTPError as error:
        answer = error.response
        assert answer is not None
        raise DownloadError(f"{url}: the server answered {answer.status_code} {shown(answer.reason, 200)}") from error
    except (requests.ConnectionError, requests.Timeout) as error:
        if not transfer.answered:
            raise DownloadError(
                f"cannot reach {host} ({_reason(error)}): if this machine is offline, put {target.name} into "
                f"{target.parent} yourself and run the same command again"
            ) from error
        raise DownloadError(f"{url}: interrupted ({_reason(error)}); run the same command again to resume") from error
    except requests.exceptions.ChunkedEncodingError as error:
        raise DownloadError(f"{url}: interrupted ({_reason(error)}); run the same command again to resume") from error
    except requests.RequestException as error:
        raise DownloadError(f"{url}: {shown(error, 200)}") from error
    except OSError as error:
        raise DownloadError(f"{url}: interrupted ({_reason(error)}); run the same command again to resume") from error
    except ValueError as error:  # wrong checksum; pooch has removed the file
        got = str(error).partition("but got ")[2].partition(".")[0]
        raise DownloadError(_mismatch(target, md5, got)) from error
    return target


class Transfer:
    """A downloader for pooch that resumes from `target`.part."""

    def __init__(
        self,
        target: Path,
        check: Callable[[Path], None] | None,
        store_sum: bool,
        timeout: float,
        progress: bool,
    ):
        self.part, self.state = (target.with_name(target.name + ending) for ending in (".part", ".part.json"))
        self.target, self.check, self.store_sum, self.timeout = target, check, store_sum, timeout
        self.progress = progress and sys.stderr.isatty()
        self.answered = False  # whether the server has begun to send a file

    def __call__(self, url: str, output_file: str, _: object) -> None:
        """Download to `target`.part, check it and move it to `output_file`, whose checksum pooch verifies."""
        try:
            self._transfer(url)
        finally:
            if self.part.exists() and not self.part.stat().st_size:
                self._forget()
        try:
            if self.check is not None:
                self.check(self.part)
        except DownloadError:
            self._forget()
            raise
        if self.store_sum:
            _sum_file(self.target).write_text(pooch.file_hash(str(self.part)) + "\n", encoding="utf-8")
        os.replace(self.part, output_file)
        self._forget()

    def _forget(self) -> None:
        self.part.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def _transfer(self, url: str) -> None:
        """Download the rest of the part."""
        known = _read_state(self.state, url)
        have = self.part.stat().st_size if known and self.part.exists() else 0
        if known and have and have == known["total"]:
            return
        headers = {"Accept-Encoding": "identity", "User-Agent": "hstu_sparse"}
        if known and have:
            headers["Range"] = f"bytes={have}-"
            if known["validator"]:  # If-Range: the server sends the whole file if it has changed
                headers["If-Range"] = known["validator"]
        total: int | None = None

        def read_headers(response: requests.Response, **_: object) -> None:
            nonlocal total
            if response.is_redirect:
                _check_redirect(response.url, urllib.parse.urljoin(response.url, response.headers["Location"]))
                return
            if response.status_code == 416 and have:  # the part is longer than the server's file
                raise _Changed
            if not response.ok:
                return
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
            if response.status_code == 206:
                match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
                total = int(match[2]) if match and match[2] != "*" else None
                if not match or int(match[1]) != have or (known and known["total"] not in (None, total)):
                    raise _Changed
            else:
                out.truncate(0)
            etag = response.headers.get("ETag", "")
            # If-Range takes strong validators only.
            validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
            self.state.write_text(json.dumps({"url": url, "total": total, "validator": validator}), encoding="utf-8")
            self.answered = True

        download = pooch.HTTPDownloader(
            self.progress, BLOCK, headers=headers, timeout=self.timeout, hooks={"response": read_headers}
        )
        try:
            with open(self.part, "ab" if have else "wb") as out:
                download(url, out, None)
        except _Changed:
            self._forget()
            return self._transfer(url)
        if total is not None and (got := self.part.stat().st_size) != total:
            raise requests.ConnectionError(f"{got:,} of {total:,} bytes came")


class _Changed(Exception):
    """Raised if a part cannot be resumed because the file has changed."""


def _check_redirect(before: str, after: str) -> None:
    if before.startswith("https:") and not after.startswith("https:"):
        raise DownloadError(f"{before}: redirects to {shown(after, 200)}, which is not https")


def _reason(error: BaseException) -> str:
    """Return the system's message for the first cause of an error."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    named = [cause for cause in causes if isinstance(cause, OSError) and cause.strerror]
    return shown(named[-1].strerror if named else causes[-1], 200)


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


def _read_state(state: Path, url: str) -> dict | None:
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
        return known if known["url"] == url and {"total", "validator"} <= known.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _sum_file(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _first_sum(target: Path) -> str | None:
    """Return the sha256 of the first download, or None."""
    with contextlib.suppress(FileNotFoundError):
        return _sum_file(target).read_text(encoding="utf-8", errors="replace").strip()
    return None


def _verify(file: Path, md5: str | None) -> None:
    """Check the md5 sum, or else that the file equals the first download; DownloadError if it does not."""
    expected = md5 or _first_sum(file)
    if expected is None or (got := pooch.file_hash(str(file), "md5" if md5 else "sha256")) == expected:
        return
    if md5:
        file.unlink()
    raise DownloadError(_mismatch(file, md5, got))


def _mismatch(file: Path, md5: str | None, got: str) -> str:
    if md5:
        return f"{file.name}: wrong checksum, expected md5 {md5}, got {got}; deleted it, try again"
    return (
        f"{file.name}: differs from the first download (its sha256 is {got}); if the publisher may have changed it, "
        f"delete {_sum_file(file)}"
    )


# Errors of zipfile and tarfile for damaged archives, unsupported compression (NotImplementedError) and impossible names
# of files (ValueError).
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
    """Unpack an archive with one top folder, which becomes `folder`, whole or not at all."""
    sweep(folder.parent, folder.name)
    try:
        with replace_folder(folder) as temporary:
            unpacked = temporary / ".unpacked"
            unpacked.mkdir()
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as z:
                    if any(member.flag_bits & 1 for member in z.infolist()):
                        raise DownloadError(f"{archive.name}: encrypted")
                    _check_members(archive, map(_zip_member, z.infolist()))
                    z.extractall(unpacked)
            else:
                with tarfile.open(archive) as t:
                    _check_members(archive, (Member(x.name, x.isfile() or x.isdir(), x.size) for x in t))
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


class Member(NamedTuple):
    """A member of an archive; plain: whether it is a file or a folder; size: bytes when unpacked."""

    name: str
    plain: bool
    size: int


def _zip_member(info: zipfile.ZipInfo) -> Member:
    kind = stat.S_IFMT(info.external_attr >> 16)
    return Member(info.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR), info.file_size)


def _check_members(archive: Path, members: Iterable[Member]) -> None:
    """Raise DownloadError for links, devices, paths out of the folder, and archives that are far too large unpacked."""
    most, total = max(ALWAYS_ALLOWED, MOST_GROWTH * archive.stat().st_size), 0
    for name, plain, size in members:
        path = PurePosixPath(name)
        if not plain or path.is_absolute() or ".." in path.parts:
            raise DownloadError(
                f"{archive.name}: cannot be unpacked: {shown(name)}: neither a file nor a folder inside the archive"
            )
        total += size
        if total > most:
            raise DownloadError(f"{archive.name}: expected at most {most:,} bytes when unpacked, got more")


def extract_tar(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack the checked members of a tar archive with default permissions."""
    members = archive.getmembers()
    for member in members:
        member.mode = 0o755 if member.isdir() else 0o644
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder, members)


def _check_first_row(format: str) -> Callable[[Path], None]:
    """Return a check of the first row of a file without a checksum, which may be a proxy's error page."""
    fmt = FORMATS[format]

    def check(file: Path) -> None:
        text = first_line(RawFile(file, file.name), fmt).decode("utf-8", "replace").rstrip("\r\n")
        if len(split_row(text, fmt)) != len(fmt.columns):
            raise DownloadError(
                f"the download is not the expected file: it starts with {shown(text)!r}, "
                f"which is not a row of format {format}"
            )

    return check


def download(name: str, to: str | Path, *, url: str | None = None, progress: bool = True) -> Path:
    """Download and unpack the data set `name` (a key of SOURCES) below `to`; return its folder, a data.path.

    url: another address of the same file. Nothing is downloaded if the folder exists or, for a single .csv file, that
    file. DownloadError on any failure.
    """
    if name not in SOURCES:
        raise DownloadError(f"unknown data set {name!r}; known: {', '.join(SOURCES)}")
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _Parser(prog="python -m data.download", description="Fetch a public data set.")
    parser.add_argument("name", choices=list(SOURCES), metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument("--to", default="raw", metavar="DIR", help="folder for raw data (default: %(default)s)")
    parser.add_argument("--url", help="another address of the same file, such as a mirror")
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
            f"{options.name}: no published checksum; the checksum of the first download is stored next to the file, "
            "and later downloads must have the same checksum"
        )
    print(f"{options.name} is in {folder}; in the YAML: data.format: {source.format}, data.path: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
