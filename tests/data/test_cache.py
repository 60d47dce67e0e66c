"""Test the cache of prepared data: its key, damage, killed and concurrent writers."""

import itertools
import json
import logging
import os
import shutil
import signal
import sys
import time

import numpy as np
import pytest

from data import atomic, cache, prepare
from data.datasets import load_dataset
from tests.data.raw_files import CSV, GOOD, error_of, events
from tests.support.forked import Forked

pytest.importorskip("polars")  # it reads raw files


@pytest.fixture
def count_reads(monkeypatch):
    calls = []
    original = prepare.read_raw
    monkeypatch.setattr(prepare, "read_raw", lambda *args: calls.append(1) or original(*args))
    return calls


def folder_of(tmp_path):
    (folder,) = [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")]
    return folder


def test_cache_is_reused(load, count_reads, tmp_path):
    first = load("ml-100k", GOOD)
    again = load("ml-100k", tmp_path / "raw.txt")
    assert len(count_reads) == 1
    assert events(first) == events(again) and first.fingerprint == again.fingerprint


def test_key_depends_on_content_and_options(load, count_reads, tmp_path):
    prints = {
        load("csv", CSV).fingerprint,
        load("csv", CSV, min_user_events=1, columns={"action": "how"}).fingerprint,
        load("csv", CSV, columns={"timestamp_unit": "ms"}).fingerprint,
        load("csv", CSV, columns={"timestamp": ""}).fingerprint,
        load("csv", CSV + "u,i,2,0\n").fingerprint,
        load("csv", CSV + "u,i,2,0\n", min_user_events=2).fingerprint,
        load("csv", CSV + "u,i,2,0\n", min_item_events=2).fingerprint,
    }
    assert len(prints) == 7 == len(count_reads)
    # The same size and time of modification, but other content.
    file = tmp_path / "raw.txt"
    stat = file.stat()
    file.write_text(CSV + "u,j,2,0\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load("csv", file).fingerprint not in prints


@pytest.mark.parametrize("column", [*cache.COLUMNS, "meta"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damaged_cache_is_rebuilt(load, count_reads, caplog, tmp_path, column, damage):
    expected = events(load("ml-100k", GOOD))
    file = folder_of(tmp_path) / (f"{column}.npy" if column != "meta" else "meta.json")
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-5])
    elif damage == "flipped":
        content[2 if column == "meta" else -1] ^= 0x40
        file.write_bytes(content)
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING):
        assert events(load("ml-100k", tmp_path / "raw.txt")) == expected
    assert len(count_reads) == 2 and "damaged" in caplog.text
    load("ml-100k", tmp_path / "raw.txt")
    assert len(count_reads) == 2
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [file.parent.name]


def test_exception_midway_leaves_nothing(load, monkeypatch, tmp_path):
    original, calls = np.save, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    monkeypatch.setattr(np, "save", failing)
    assert "cannot write the cache: No space left on device" in error_of(load, "ml-100k", GOOD)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert load("ml-100k", tmp_path / "raw.txt").num_events == 16


def prepare_and_die(file, cache):
    """Prepare a file, but kill this process before the third array is saved."""
    save, calls = np.save, itertools.count(1)

    def mortal(*arguments, **options):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*arguments, **options)

    np.save = mortal
    load_dataset("ml-100k", str(file), cache_dir=str(cache))


def test_kill_midway_leaves_no_half_cache(load, tmp_path):
    file = tmp_path / "raw.txt"
    file.write_text(GOOD)
    process = Forked(prepare_and_die, file, tmp_path / "cache")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (leftover,) = (tmp_path / "cache").iterdir()
    assert leftover.name.startswith(".")
    assert load("ml-100k", file).num_events == 16
    # Recent temporary folders may belong to a running process; the next preparation removes old ones.
    assert leftover.exists()
    os.utime(leftover, (time.time() - 86400,) * 2)
    shutil.rmtree(folder_of(tmp_path))
    load("ml-100k", file)
    assert not leftover.exists()


def test_two_writers_at_once(load, tmp_path, monkeypatch):
    """Check that the slower of two processes keeps the cache of the faster one."""
    place, meta = atomic._place, []

    def after_another(temporary, folder, keep):
        if not folder.exists():
            shutil.copytree(temporary, folder)
            meta.append((folder / "meta.json").stat().st_ino)
        place(temporary, folder, keep)

    monkeypatch.setattr(atomic, "_place", after_another)
    assert load("ml-100k", GOOD).num_events == 16
    assert (folder_of(tmp_path) / "meta.json").stat().st_ino == meta[0]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_writing_into_a_column_never_reaches_the_file(load, tmp_path):
    load("ml-100k", GOOD).items[:] = 99
    assert not load("ml-100k", tmp_path / "raw.txt").items.any()


def test_cache_folder_as_path_needs_no_polars(load, tmp_path, monkeypatch):
    expected = events(load("ml-100k", GOOD))
    folder = folder_of(tmp_path)
    raw = tmp_path / "raw.txt"
    monkeypatch.setitem(sys.modules, "polars", None)
    assert events(load("ml-100k", raw)) == expected
    raw.unlink()
    assert events(load("ml-100k", folder)) == expected
    assert "got one of ml-100k" in error_of(load, "ml-1m", folder)
    assert "expected a cache of ml-100k with" in error_of(load, "ml-100k", folder, min_user_events=2)
    assert "needs polars" in error_of(load, "ml-100k", GOOD + "1\t1\t1\t1\n")
    (folder / "items.npy").unlink()
    assert "damaged cache" in error_of(load, "ml-100k", folder)


def test_meta_has_the_sources_and_options(load, tmp_path):
    load("ml-100k", GOOD)
    meta = json.loads((folder_of(tmp_path) / "meta.json").read_text())
    assert meta["sources"] == [str(tmp_path / "raw.txt")]
    assert (meta["num_users"], meta["num_items"], meta["num_events"]) == (1, 1, 16)


def test_cache_dir_that_cannot_be_written(load, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert "cannot write the cache" in error_of(load, "ml-100k", GOOD)
