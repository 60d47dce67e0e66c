"""Copy files of object stores and web servers (s3, gs, az, http) into the cache, once for each version of a file.

They are read by fsspec and its package for each kind of store, which take credentials from environment variables.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from data.atomic import replace_file
from data.reading.folders import check_ending, is_private
from data.types import DataError, shown

ADDRESS = re.compile(r"(s3|gs|az|https?)://")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "http": "aiohttp", "https": "aiohttp"}
# Keys of a file's version in the metadata of stores.
VERSION = (
    "ETag", "etag", "LastModified", "last_modified", "mtime", "md5Hash", "content_md5", "Content-MD5", "Digest",
    "Last-Modified", "VersionId", "generation", "updated",
)  # fmt: skip


def is_remote(path: object) -> bool:
    """Return whether a path is the address of an object store or a web server."""
    return ADDRESS.match(str(path)) is not None


def public(address: str) -> str:
    """Return an address for messages, without user, password and query."""
    return shown(re.sub(r"//[^/@]*@", "//", address).partition("?")[0], 200)


def local_copy(
    address: str, key: str, ending: str | None, cache_dir: Path | None, stage: Callable[[str], None] = lambda _: None
) -> Path:
    """Copy the file, the folder or the pattern's files at an address into the cache; return their path there.

    key: the configuration key of the address; ending: the ending of a folder's files, None if the format has one file;
    stage: called with a description of each step, may raise. DataError if a file cannot be read.
    """
    scheme = address.partition("://")[0]
    if cache_dir is None:
        raise DataError(f"{key}: {public(address)} needs data.cache_dir, into which it is copied")
    try:
        import fsspec

        store, place = fsspec.core.url_to_fs(address)
        stage(f"listing {public(address)}")
        files, root = _files(store, place, scheme, address, key, ending)
    except ImportError:
        package = PACKAGES[scheme]
        raise DataError(f"{key}: {scheme}:// needs {package} (pip install {package})") from None
    except DataError:
        raise
    except Exception as error:  # each kind of store raises its own
        raise DataError(f"{public(address)}: cannot be read: {_line(error, address)}") from error
    folder = cache_dir / "remote" / hashlib.sha256(address.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    known = _known(folder)
    versions = {}
    for name, (place, info) in sorted(files.items()):
        target, versions[name] = folder / "files" / name, {key: str(info[key]) for key in VERSION if key in info}
        size = info.get("size")
        if versions[name] and known.get(name) == versions[name] and target.is_file() and target.stat().st_size == size:
            continue
        stage(f"copying {public(name)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(target, functools.partial(store.get_file, place))
        except Exception as error:
            raise DataError(f"{public(address)}: {public(name)} cannot be copied: {_line(error, address)}") from error
        if size is not None and target.stat().st_size != size:
            raise DataError(f"{public(address)}: {public(name)} changed while it was copied; try again")
    for target in (folder / "files").rglob("*"):
        if target.is_file() and target.relative_to(folder / "files").as_posix() not in files:
            target.unlink()  # no longer in the store
    replace_file(folder / "versions.json", json.dumps(versions))
    return folder / "files" if root else folder / "files" / next(iter(files))


def _files(store, place: str, scheme: str, address: str, key: str, ending: str | None) -> tuple[dict, bool]:
    """Return (name in the copy -> (path in the store, metadata), whether the address has several files)."""
    if scheme in ("http", "https"):
        name = PurePosixPath(address.partition("?")[0].partition("://")[2]).name or "file"
        return {name: (place, store.info(place))}, False
    root, pattern = place.rstrip("/"), glob.has_magic(place)
    if not pattern and store.isfile(root):
        return {PurePosixPath(root).name: (root, store.info(root))}, False
    if ending is None:
        raise DataError(f"{key}: {public(address)}: expected a file")
    if pattern:
        matched = store.glob(place, detail=True)
        fixed = PurePosixPath(place).parts
        root = "/".join(fixed[: next(number for number, part in enumerate(fixed) if glob.has_magic(part))])
    else:
        matched = store.find(root, detail=True)
    files = {}
    for path, info in matched.items():
        name = PurePosixPath(path).relative_to(root).as_posix()
        if info.get("type") != "file" or is_private(name):
            continue
        check_ending(name, ending, public(address).rstrip("/"))
        files[name] = (path, info)
    if not files:
        raise DataError(f"{public(address)}: no such file or folder, or no *{ending} in it")
    return files, True


def _known(folder: Path) -> dict:
    try:
        versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
        return versions if isinstance(versions, dict) else {}
    except (OSError, ValueError):
        return {}


def _line(error: Exception, address: str) -> str:
    text = str(error).strip().replace(address, public(address)) or type(error).__name__
    return shown(text.splitlines()[0], 200)
