"""Define cases of prepared caches: damaged, hostile, not writable, or written by several processes at once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.cache import _meta_crc32
from data.datasets import DataError, load_dataset
from tests.hostile.harness import ERROR, WORKS, Case, Process
from tests.hostile.raw import start, table

Change = Callable[[Path], object]


def load(path: Path, cache: Path) -> int:
    """Load a data set and print a digest of it."""
    try:
        data = load_dataset("ml-100k", path, cache_dir=cache)
    except DataError as error:
        print("error:", error)
        return 2
    columns = (data.items, data.timestamps, data.actions, data.user_offsets, data.user_ids, data.item_ids)
    digest = hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()
    print("DIGEST", data.name, data.has_timestamps, digest)
    return 0


def edited(change: Callable[[dict], object]) -> Change:
    """Return a change of meta.json without its checksum, as by an editor."""

    def go(folder: Path) -> None:
        file = folder / "meta.json"
        meta = json.loads(file.read_text())
        file.write_text(json.dumps(change(meta) or meta))

    return go


def forged(change: Callable[[dict], object]) -> Change:
    """Return a change of meta.json with its checksum."""

    def go(folder: Path) -> None:
        file = folder / "meta.json"
        meta = json.loads(file.read_text())
        change(meta)
        meta.pop("crc32", None)
        file.write_text(json.dumps(meta | {"crc32": _meta_crc32(meta)}))

    return go


def column(name: str, make: Callable[[np.ndarray], np.ndarray], pickled: bool = False) -> Change:
    """Return a change of a column with all checksums."""

    def go(folder: Path) -> None:
        content = io.BytesIO()
        np.save(content, make(np.load(folder / f"{name}.npy")), allow_pickle=pickled)
        replace(name, content.getvalue())(folder)

    return go


def replace(name: str, content: bytes) -> Change:
    def go(folder: Path) -> None:
        (folder / f"{name}.npy").write_bytes(content)
        entry = {"size": len(content), "crc32": zlib.crc32(content)}
        forged(lambda meta: meta["files"].update({name: entry}))(folder)

    return go


class Bomb:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def header(text: str) -> bytes:
    """Return a .npy file with this header and no data."""
    padded = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded


def second(folder: Path) -> None:
    shutil.copy(folder / "items.npy", folder / "zzz.npy")
    forged(lambda meta: meta["files"].update(zzz=meta["files"]["items"]))(folder)


# Changes of a cache after which it must not be used.
DAMAGE: dict[str, Change] = {
    "layout 99": forged(lambda meta: meta.update(layout=99)),
    "layout of version 1": forged(lambda meta: meta.pop("layout")),
    "meta.json is a list": edited(lambda meta: [1]),
    "meta.json is null": lambda folder: (folder / "meta.json").write_text("null"),
    "meta.json of 100,000 brackets": lambda folder: (folder / "meta.json").write_text("[" * 100000),
    "meta.json in latin-1": lambda folder: (folder / "meta.json").write_bytes(b"\xe9"),
    "meta.json without its checksum": edited(lambda meta: meta.pop("crc32") and None),
    "no files": forged(lambda meta: meta.update(files={})),
    "files is a list": forged(lambda meta: meta.update(files=[])),
    "files is a number": forged(lambda meta: meta.update(files=3)),
    "a file's entry is a number": forged(lambda meta: meta["files"].update(items=3)),
    "a file outside": forged(lambda meta: meta["files"].update({"../../x": {"size": 1, "crc32": 1}})),
    "an unknown column": second,
    "has_timestamps turned": edited(lambda meta: meta.update(has_timestamps=False)),
    "has_timestamps turned and forged": forged(lambda meta: meta.update(has_timestamps=False)),
    "another name": edited(lambda meta: meta.update(name="other")),
    "num_users lies": forged(lambda meta: meta.update(num_users=3)),
    "num_items lies": forged(lambda meta: meta.update(num_items=10**6)),
    "num_events is text": forged(lambda meta: meta.update(num_events="72")),
    "half deleted": lambda folder: [(folder / name).unlink() for name in ("items.npy", "user_ids.npy", "meta.json")],
    "offsets fall": column("user_offsets", lambda a: a[::-1].copy()),
    "offsets beyond the events": column("user_offsets", lambda a: a * 1000),
    "offsets of one user less": column("user_offsets", lambda a: a[:-1]),
    "offsets start at 1": column("user_offsets", lambda a: np.append(1, a[1:])),
    "no offsets": column("user_offsets", lambda a: a[:0]),
    "items negative": column("items", lambda a: -a - 1),
    "items beyond the catalogue": column("items", lambda a: a + 1000),
    "items as fractions": column("items", lambda a: a.astype(float)),
    "items in two dimensions": column("items", lambda a: a.reshape(2, -1)),
    "items of no dimension": column("items", lambda a: np.int32(3)),
    "fewer items": column("items", lambda a: a[:5].copy()),
    "fewer timestamps": column("timestamps", lambda a: a[:5].copy()),
    "timestamps fall": column("timestamps", lambda a: a[::-1].copy()),
    "timestamps negative": column("timestamps", lambda a: a - 10**10),
    "actions negative": column("actions", lambda a: a - 10),
    "ids as bytes": column("user_ids", lambda a: a.astype("S")),
    "ids as records": column("user_ids", lambda a: a.astype([("a", "i8")])),
    "pickled objects": column("items", lambda a: np.array([Bomb()], dtype=object), pickled=True),
    "a pickle": replace("items", pickle.dumps(Bomb())),
    "a header that is code": replace("items", header("__import__('os').system('touch pwned')")),
    "a header of terabytes": replace(
        "items", header("{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,)}")
    ),
    "a header of a negative shape": replace(
        "items", header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,)}")
    ),
    "an empty file": replace("items", b""),
    "a zip": replace("items", b"PK\x03\x04" + b"\0" * 200),
}


def _each_file(name: str) -> dict[str, Change]:
    def bit(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) * 2 // 3] ^= 4
        (folder / name).write_bytes(content)

    def swap(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return {
        f"{name} cut short": lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-7]),
        f"{name} with a bit turned": bit,
        f"{name} deleted": lambda folder: (folder / name).unlink(),
        f"{name} empty": lambda folder: (folder / name).write_bytes(b""),
        f"{name} is a folder": swap,
    }


def cases(place: Path) -> list[Case]:
    source, good = place / "u.data", place / "good"
    source.write_text(table("\t"))
    first_load = Process(lambda: load(source, place / "cache"), seconds=60).wait()
    digest = first_load.output.strip().splitlines()[-1]
    assert digest.startswith("DIGEST"), first_load.output
    (folder,) = (path for path in (place / "cache").iterdir())
    folder.rename(good)
    name = folder.name
    damage = DAMAGE | {n: c for file in sorted(os.listdir(good)) for n, c in _each_file(file).items()}

    def same(folder: Path, output: str) -> str | None:
        if (Path.cwd() / "pwned").exists():
            return "code was run"
        return None if digest in output else f"other data: {output.strip().splitlines()[-1][:200]}"

    def in_place(change: Change) -> Callable[[Path], int]:
        def run(folder: Path) -> int:
            shutil.copytree(good, folder / "cache" / name)
            change(folder / "cache" / name)
            return load(source, folder / "cache")

        return run

    def from_cache(change: Change) -> Callable[[Path], int]:
        def run(folder: Path) -> int:
            shutil.copytree(good, folder / "given")
            change(folder / "given")
            return load(folder / "given", folder / "cache")

        return run

    def case(name: str, run, expect: str = WORKS, check=same, **more) -> Case:
        return Case("cache", f"cache {name}", run, expect, check=check if expect == WORKS else None, **more)

    listed = [case(f"in its place: {name}", in_place(change), short=False) for name, change in damage.items()]
    for name_, change in damage.items():
        # Without a meta.json it is not a cache folder, but one of raw files.
        listed.append(case(f"given as data.path: {name_}", from_cache(change), ERROR))
    listed += _places(case, source, good, name, same)
    return listed


def _places(case, source: Path, good: Path, name: str, same) -> list[Case]:
    def locked(folder: Path, inside: bool) -> Path:
        cache = folder / "cache"
        cache.mkdir()
        if inside:
            shutil.copytree(good, cache / name)
        cache.chmod(0o555)
        return cache

    def occupied(folder: Path, link: bool) -> Path:
        (folder / "cache").mkdir()
        if link:
            (folder / "cache" / name).symlink_to(folder / "gone")
        else:
            (folder / "cache" / name).write_text("x")
        return folder / "cache"

    def clean(folder: Path, output: str) -> str | None:
        left = list((folder / "cache").iterdir())
        return f"left behind {left}" if left else None

    def together(folder: Path) -> int:
        """Prepare the same data in three processes at once."""
        processes = [Process(lambda: load(source, folder / "cache"), seconds=60) for _ in range(3)]
        outputs = [process.wait().output for process in processes]
        print(*outputs, sep="\n")
        assert len({output.strip().splitlines()[-1] for output in outputs}) == 1
        assert [path.name for path in (folder / "cache").iterdir()] == [name]
        return 0

    return [
        case("unchanged, given as data.path", lambda f: load(good, f / "cache")),
        case(
            "that was prepared with another filter",
            lambda f: start(f, "ml-100k", good, "data.min_user_events=2"),
            ERROR,
        ),
        case("of another format", lambda f: start(f, "ml-1m", good), ERROR),
        case("folder that cannot be written", lambda f: load(source, locked(f, False)), ERROR, nobody=True),
        case("folder that cannot be written, cache there", lambda f: load(source, locked(f, True)), nobody=True),
        case("folder's place taken by a file", lambda f: load(source, occupied(f, False))),
        case("folder's place taken by a dangling link", lambda f: load(source, occupied(f, True))),
        case("three processes at once", together),
        Case("cache", "cache disk full", lambda f: load(source, f / "cache"), ERROR, check=clean, disk=100),
    ]
