"""Test folders and patterns: files that are read, skipped, and errors."""

import bz2
import gzip
import lzma
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.data.raw_files import error_of, events

pl = pytest.importorskip("polars")

HEADER = "user,item,timestamp\n"


def write(path, content, kind="csv"):
    """Write rows `user,item,timestamp` as a CSV or Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "csv":
        path.write_text(HEADER + content)
    else:
        rows = [tuple(map(int, line.split(","))) for line in content.split()]
        pl.DataFrame(rows, schema=["user", "item", "timestamp"], orient="row").write_parquet(path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(
    "copy",
    [
        ".ipynb_checkpoints/orders-checkpoint",
        "_temporary/0/task_1/part-0",
        "a/.hidden/b/orders",
        "a/_b/c",
        "a/_SUCCESS",
        ".orders.csv",
    ],
)
def test_hidden_and_private_names_are_skipped_at_every_depth(load, tmp_path, kind, copy):
    rows = "1,1,1\n1,2,2\n2,1,3\n"
    write(tmp_path / "log" / f"orders.{kind}", rows, kind)
    write(tmp_path / "log" / f"{copy}.{kind}", rows, kind)
    for path in (tmp_path / "log", tmp_path / "log" / "**" / f"*.{kind}"):
        assert load(kind, path).num_events == 3


def test_private_names_are_read_if_the_pattern_has_their_prefix(load, tmp_path):
    write(tmp_path / "log" / "_new" / "a.csv", "1,1,1\n")
    write(tmp_path / "log" / "_new" / "_b.csv", "1,2,1\n")
    assert load("csv", tmp_path / "log" / "_new" / "*.csv").num_events == 1
    assert load("csv", tmp_path / "log" / "_*" / "_*.csv").num_events == 1


@pytest.fixture
def nobody():
    """Return a folder and become a user without root's rights, so that permissions apply."""
    folder, user = Path(tempfile.mkdtemp()), os.geteuid()
    if user == 0:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    yield folder
    if user == 0:
        os.seteuid(0)
    shutil.rmtree(folder)


@pytest.mark.parametrize("pattern", ["", "*/*.csv", "**/*.csv"])
@pytest.mark.parametrize("closed", ["b", "b/2.csv"])
def test_part_without_permission(nobody, pattern, closed):
    from data.datasets import load_dataset

    write(nobody / "a" / "1.csv", "1,1,1\n")
    write(nobody / "b" / "2.csv", "2,1,1\n")
    (nobody / closed).chmod(0)
    path = str(nobody / pattern)
    message = error_of(load_dataset, "csv", path, cache_dir=None)
    (nobody / closed).chmod(0o700)
    assert f"{closed}: cannot be read: Permission denied" in message
    assert load_dataset("csv", path, cache_dir=None).num_events == 2


def test_parts_that_are_broken_links_or_not_files(load, tmp_path):
    log = tmp_path / "log"
    write(log / "jan.csv", "1,1,1\n")
    for name, make, complaint in (
        (
            "feb.csv",
            lambda path: path.symlink_to("nowhere.csv"),
            "feb.csv: a link to nowhere.csv, which does not exist",
        ),
        ("old", lambda path: path.symlink_to("nowhere"), "old: a link to nowhere, which does not exist"),
        ("feb.csv", lambda path: path.symlink_to("jan.csv"), "a file that is already read by another name"),
        ("loop", lambda path: path.symlink_to("."), "loop: a folder that is already read by another name"),
        ("feb.csv", os.mkfifo, "feb.csv: not a regular file"),
        ("feb.csv.zip", Path.touch, "feb.csv.zip: expected .csv or .csv.gz, "),
        ("README.md", Path.touch, "README.md: expected .csv or .csv.gz, "),
        ("feb.parquet", Path.touch, "feb.parquet: expected .csv or .csv.gz, "),
    ):
        make(log / name)
        assert complaint in error_of(load, "csv", log)
        (log / name).unlink()
    assert load("csv", log).num_events == 1


def test_advice_for_an_unknown_ending_works(load, tmp_path):
    write(tmp_path / "log [1]" / "deep" / "jan.csv", "1,1,1\n")
    (tmp_path / "log [1]" / "README.md").touch()
    message = error_of(load, "csv", tmp_path / "log [1]")
    assert load("csv", Path(message.rpartition("to a pattern: ")[2])).num_events == 1


def test_links_capital_letters_and_compressed_parts(load, tmp_path):
    log = tmp_path / "log"
    write(log / "1.csv", "1,1,1\n")
    write(tmp_path / "other" / "2.csv", "2,1,1\n")
    write(tmp_path / "3.csv", "3,1,1\n")
    (log / "linked").symlink_to("../other")
    (log / "3.csv").symlink_to("../3.csv")
    write(log / "4.CSV", "4,1,1\n")
    for user, (ending, compress) in enumerate(
        {"csv.bz2": bz2.compress, "csv.xz": lzma.compress, "CSV.GZ": gzip.compress}.items()
    ):
        (log / f"{user + 5}.{ending}").write_bytes(compress(f"{HEADER}{user + 5},1,1\n".encode()))
    assert load("csv", log).user_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert [load("csv", log / name).name for name in ("5.csv.bz2", "6.csv.xz", "7.CSV.GZ")] == ["5", "6", "7"]
    for compress in (bz2.compress, lzma.compress):
        damaged = compress(b"user,item,timestamp\n1,2,3\n" * 99)[:-9]
        assert "damaged, cannot be unpacked" in error_of(load, "csv", damaged)
    assert "a zip archive; unpack it first" in error_of(load, "csv", b"PK\x03\x04")


def test_files_of_a_known_format(load, tmp_path):
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml" / "README").touch()
    (tmp_path / "ml" / "u.data").symlink_to("nowhere")
    assert "u.data: a link to nowhere" in error_of(load, "ml-100k", tmp_path / "ml")
    (tmp_path / "ml" / "u.data").unlink()
    (tmp_path / "ml" / "U.DATA.bz2").write_bytes(bz2.compress(b"1\t2\t3\t4\n"))
    assert load("ml-100k", tmp_path / "ml").num_events == 1
    flags = "is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,is_profile_enter"
    (tmp_path / "kuai").mkdir()
    rows = f"user_id,video_id,time_ms,{flags}\n1,1,1000,0,0,0,0,0,0,0,0\n"
    (tmp_path / "kuai" / "log_standard_a.csv").write_text(rows)
    (tmp_path / "kuai" / "log_standard_b.csv.zip").touch()
    assert "log_standard_b.csv.zip: unpack it first" in error_of(load, "kuairand", tmp_path / "kuai")


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_in_the_names_of_folders(load, tmp_path, kind, partitions):
    expected = []
    for day, hour in (("2026-01-01", "7"), ("2026-01-02", "8")):
        for item, user in enumerate(("u1", "u2")):
            file = tmp_path / "log" / f"dt={day}" / f"shop=A%2F{hour}" / f"{user}.{kind}"
            file.parent.mkdir(parents=True, exist_ok=True)
            frame = pl.DataFrame({"user": [user], "item": [item]})
            frame.write_csv(file) if kind == "csv" else frame.write_parquet(file)
            time = int(pl.Series([day]).str.to_date().dt.epoch("s")[0])
            expected.append((user, item, time, 0 if hour == "7" else 1))
    columns = {"timestamp": "dt", "action": "shop", "action_codes": {"A/7": 0, "A/8": 1}}
    for path in (tmp_path / "log", tmp_path / "log" / "dt=*" / "**" / f"*.{kind}"):
        dataset = load(kind, path, columns=columns, partitions=partitions)
        assert sorted(events(dataset)) == sorted(expected)
    one = load(kind, tmp_path / "log" / "dt=2026-01-01" / "*" / "*", columns={"timestamp": "", "action": "shop"})
    assert one.action_names == ("A/7",)
    # Another day in the folder's name makes another data set, although no file has changed.
    (tmp_path / "log" / "dt=2026-01-02").rename(tmp_path / "log" / "dt=2026-01-03")
    again = load(kind, tmp_path / "log", columns=columns, partitions=partitions)
    assert again.timestamps.max() == dataset.timestamps.max() + 86_400
    (tmp_path / "log" / "dt=2026-01-01").rename(tmp_path / "log" / "dt=__HIVE_DEFAULT_PARTITION__")
    message = error_of(load, kind, tmp_path / "log", columns=columns, partitions=partitions)
    assert "column dt: the value is missing" in message and "dt=__HIVE_DEFAULT_PARTITION__" in message
