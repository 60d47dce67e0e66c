"""Test the preparation in ranges of users: the cache is bit-identical to that of one pass, also after kills."""

import gzip
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from data.atomic import replace_folder
from data.datasets import DataError, load_dataset
from data.reading import partitions
from tests.data.test_prepare import REAL

pl = pytest.importorskip("polars")

ROWS = 3000


def table(seed: int = 0) -> dict[str, list]:
    """Return unordered events of 60 users and 90 items, many with equal times or equal rows."""
    rng = np.random.default_rng(seed)
    return {
        "user": (60 * rng.random(ROWS) ** 2).astype(int).tolist(),
        "item": (90 * rng.random(ROWS) ** 2).astype(int).tolist(),
        "rating": rng.integers(1, 4, ROWS).tolist(),
        "timestamp": (1_000_000_000 + rng.integers(0, 500, ROWS)).tolist(),
    }


def ml_100k(folder: Path) -> dict:
    rows = zip(*table().values())
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return {"format": "ml-100k", "path": folder / "u.data"}


def text_csv(folder: Path) -> dict:
    """Write text ids and actions, times in milliseconds, bad rows, and a quoted field with a line end."""
    events = table()
    lines = ["user,item,timestamp,how,more"]
    for user, item, rating, time in zip(*events.values()):
        more = '"two\nlines"' if item == 3 else "one"
        lines.append(f"u{user},{item:03d},{time * 1000 + rating},{('view', 'like', 'buy')[rating - 1]},{more}")
    lines[50] = "u1,2,never,view,one"
    lines[2000] = "u1,2"
    (folder / "events.csv").write_text("\n".join(lines) + "\n")
    return {
        "format": "csv", "path": folder / "events.csv", "on_bad_row": "drop", "duplicates": "drop",
        "columns": {"action": "how"},
    }  # fmt: skip


def parts_of_csv(folder: Path) -> dict:
    """Write three files without actions: one compressed, one without rows, the last one with text ids."""
    for number, change in enumerate((str, str, lambda user: f"x{user}")):
        events = table(number)
        rows = zip(map(change, events["user"]), events["item"], events["timestamp"])
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        (folder / f"part-{number}.csv").write_text("user,item,timestamp\n" + text)
    (folder / "part-1.csv.gz").write_bytes(gzip.compress((folder / "part-1.csv").read_bytes()))
    (folder / "part-1.csv").unlink()
    (folder / "part-3.csv").write_text("user,item,timestamp\n")
    return {"format": "csv", "path": folder}


def parquet(folder: Path) -> dict:
    """Write two files: users that are numbers and text, datetimes with two units."""
    for number, unit in enumerate(("ms", "us")):
        frame = pl.DataFrame(table(number)).rename({"rating": "action"})
        user = pl.col("user") if number == 0 else pl.col("user").cast(pl.String)
        frame = frame.with_columns(user, pl.from_epoch("timestamp").cast(pl.Datetime(unit)))
        frame.write_parquet(folder / f"{number}.parquet", row_group_size=500)
    return {"format": "parquet", "path": folder, "columns": {"action": "action"}}


def lines(folder: Path) -> dict:
    events = table()
    (folder / "raw.txt").write_text("".join(f"{user} {item}\n" for user, item in zip(events["user"], events["item"])))
    return {"format": "lines", "path": folder / "raw.txt"}


SOURCES = {source.__name__: source for source in (ml_100k, text_csv, parts_of_csv, parquet, lines)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(partitions, "PIECE", 12_000)
    monkeypatch.setattr("data.atomic.sync", lambda path: None)  # needed only after a power cut
    monkeypatch.setattr("data.reading.parquet.SAMPLE", 700)


def prepare(folder: Path, source: dict, count: int | None, **options) -> dict[str, bytes]:
    """Prepare in `count` ranges; return the cache's files by name, and check that no other files are left."""
    load_dataset(cache_dir=folder, partitions=count, **{"min_user_events": 6, "min_item_events": 4} | source | options)
    (cache,) = folder.iterdir()
    return {file.name: file.read_bytes() for file in cache.iterdir()}


@pytest.mark.parametrize("source", SOURCES)
def test_ranges_make_the_same_cache(tmp_path, source):
    (tmp_path / "raw").mkdir()
    source_files = SOURCES[source](tmp_path / "raw")
    for name, least, count in (("few", {}, 12), ("all", {"min_user_events": 1, "min_item_events": 1}, 2)):
        expected = prepare(tmp_path / f"{name}-1", source_files, 1, **least)
        assert prepare(tmp_path / f"{name}-{count}", source_files, count, **least) == expected


@pytest.mark.skipif(not (REAL / "ml-100k" / "u.data").exists(), reason="no MovieLens 100K here")
def test_real_ml_100k(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "PIECE", 200_000)  # ten pieces
    source = {"format": "ml-100k", "path": REAL / "ml-100k"}
    expected = prepare(tmp_path / "1", source, 1)
    assert prepare(tmp_path / "7", source, 7) == expected


class Killed(BaseException):
    """Raised in place of a kill."""

    pass


@pytest.mark.parametrize("source", ["text_csv", "parquet"])
def test_continues_where_it_was_killed(tmp_path, monkeypatch, source):
    """Kill at every fifth folder, alternately before and after it is moved into place.

    No folder is made twice, except that of the columns.
    """
    (tmp_path / "raw").mkdir()
    source_files = SOURCES[source](tmp_path / "raw")
    expected = prepare(tmp_path / "once", source_files, 1)
    begun, placed = [], []

    @contextmanager
    def mortal(folder):
        begun.append(folder)
        fatal = len(begun) % 5 == 0
        with replace_folder(folder) as temporary:
            yield temporary
            if fatal and len(begun) % 2:
                raise Killed
        placed.append(folder)
        if fatal:
            raise Killed

    monkeypatch.setattr(partitions, "replace_folder", mortal)
    kills, actual = 0, None
    while actual is None:
        try:
            actual = prepare(tmp_path / "killed", source_files, 3)
        except Killed:
            kills += 1
    assert actual == expected and kills >= 4
    assert all(placed.count(folder) == 1 for folder in placed if folder.name != "columns")


def test_starts_again_with_another_count(tmp_path, monkeypatch):
    source = ml_100k(tmp_path)
    monkeypatch.setattr(partitions._Preparation, "_sort", lambda *arguments: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        prepare(tmp_path / "cache", source, 3)
    monkeypatch.undo()
    assert prepare(tmp_path / "cache", source, 5) == prepare(tmp_path / "once", source, 1)


def test_errors_are_those_of_one_pass(tmp_path):
    source = text_csv(tmp_path)
    empty = tmp_path / "empty.data"
    empty.write_text("\n")
    for source_files in (
        source | {"on_bad_row": "error"},
        source | {"min_user_events": 10_000},
        source | {"columns": {"action": "none"}},
        {"format": "ml-100k", "path": empty, "on_bad_row": "drop"},
        lines(tmp_path) | {"duplicates": "drop"},
    ):
        messages = []
        for count in (1, 4):
            with pytest.raises(DataError) as caught:
                prepare(tmp_path / f"cache-{count}", source_files, count)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
        assert not list((tmp_path / "cache-4").iterdir())


def test_unsupported_sources_are_errors(tmp_path):
    source = ml_100k(tmp_path)
    with pytest.raises(DataError, match=r"^data\.partitions: expected 1 to"):
        load_dataset(cache_dir=tmp_path / "c", partitions=0, **source)
    with pytest.raises(DataError, match=r"^data\.partitions: needs data\.cache_dir"):
        load_dataset(cache_dir=None, partitions=2, **source)
    (tmp_path / "s.txt").write_text("1 2 3\n")
    with pytest.raises(DataError, match=r"^data\.partitions: sequences cannot be read in pieces"):
        load_dataset("sequences", tmp_path / "s.txt", cache_dir=tmp_path / "c", partitions=2)


@pytest.mark.parametrize("source", ["ml_100k", "parquet"])
def test_memory_decides(tmp_path, monkeypatch, source):
    (tmp_path / "raw").mkdir()
    source_files = SOURCES[source](tmp_path / "raw")
    monkeypatch.setattr(partitions, "available_memory", lambda: 10**9)
    assert len(prepare(tmp_path / "much", source_files, None)) == 7

    def kill(work):
        assert work.count > 1
        raise Killed

    monkeypatch.setattr(partitions._Preparation, "read", kill)
    monkeypatch.setattr(partitions, "available_memory", lambda: 40_000)
    with pytest.raises(Killed):
        prepare(tmp_path / "little", source_files, None)
