"""Test that folders and files are written whole or not at all, whatever fails."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import atomic
from data.atomic import find_folder, replace_folder, sweep

REPOSITORY = Path(__file__).resolve().parents[2]


def write(folder, text, **options):
    with replace_folder(folder, **options) as temporary:
        (temporary / "file").write_text(text)


def content(folder):
    return (find_folder(folder) / "file").read_text()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_appears_whole_and_is_replaced_whole(tmp_path):
    folder = tmp_path / "deep" / "folder"
    with replace_folder(folder) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("one")
        assert not folder.exists()
    assert (folder / "inner" / "file").read_text() == "one"
    write(folder, "two")
    assert names(folder) == ["file"] and content(folder) == "two"
    assert names(tmp_path / "deep") == ["folder"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "empty folder"])
def test_an_existing_path_of_any_kind_is_replaced(tmp_path, kind):
    folder, other = tmp_path / "folder", tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("another's")
    if kind == "file":
        folder.write_text("x")
    elif kind == "empty folder":
        folder.mkdir()
    else:
        folder.symlink_to(other if kind == "link" else tmp_path / "nowhere")
    write(folder, "new")
    assert content(folder) == "new" and not folder.is_symlink()
    assert content(other) == "another's" and names(tmp_path) == ["folder", "other"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError("x")]
)
def test_an_error_in_the_block_changes_nothing(tmp_path, error):
    folder = tmp_path / "folder"
    write(folder, "old")
    with pytest.raises(type(error)), replace_folder(folder) as temporary:
        (temporary / "file").write_text("half")
        raise error
    assert content(folder) == "old" and names(tmp_path) == ["folder"]


def test_disk_full_while_syncing_changes_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    write(folder, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space"):
        write(folder, "new")
    assert content(folder) == "old" and names(tmp_path) == ["folder"]


def test_all_files_are_synced_before_the_rename(tmp_path, monkeypatch):
    order, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda h: order.append(os.path.basename(os.readlink(f"/proc/self/fd/{h}"))) or fsync(h)
    )
    monkeypatch.setattr(os, "rename", lambda a, b: order.append("rename") or rename(a, b))
    write(tmp_path / "folder", "new")
    assert order[0] == "file" and order[1].startswith(".folder.tmp-") and order[2:] == ["rename", tmp_path.name]


def test_the_old_folder_is_found_after_a_crash_between_the_two_renames(tmp_path, monkeypatch):
    folder, rename, moves = tmp_path / "folder", os.rename, []
    write(folder, "old")

    def dies(source, target):
        if moves.append(target) or len(moves) == 3:  # 1: to the folder, which fails; 2: from it; 3: crash
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        write(folder, "new")
    monkeypatch.undo()
    assert not folder.exists() and content(folder) == "old"
    write(folder, "newer")
    assert content(folder) == "newer" and names(tmp_path) == ["folder"]


def test_an_older_renamed_folder_is_ignored(tmp_path):
    folder = tmp_path / "folder"
    write(tmp_path / ".folder.old", "older")
    write(folder, "old")
    assert content(folder) == "old" and names(tmp_path) == ["folder"]
    write(tmp_path / ".folder.old", "older")
    write(folder, "new")
    assert content(folder) == "new" and names(tmp_path) == ["folder"]


def test_keep_leaves_the_folder_of_another_process(tmp_path):
    folder = tmp_path / "folder"
    write(folder, "theirs")
    write(folder, "ours", keep=lambda existing: content(existing) == "theirs")
    assert content(folder) == "theirs" and names(tmp_path) == ["folder"]
    write(folder, "ours", keep=lambda existing: False)
    assert content(folder) == "ours"


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write(tmp_path / "file" / "folder", "x")


KILLED = """
import sys, time
from pathlib import Path
from data.atomic import replace_folder
for number in range(10**9):
    with replace_folder(Path(sys.argv[1])) as temporary:
        for part in "ab":
            (temporary / part).write_text(str(number))
    if number == 0:
        print("started", flush=True)
"""


def test_a_folder_is_always_whole_after_kills_at_random_moments(tmp_path):
    folder = tmp_path / "folder"
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", KILLED, folder], cwd=REPOSITORY, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        whole = find_folder(folder)
        assert names(whole) == ["a", "b"] and (whole / "a").read_text() == (whole / "b").read_text()


def test_sweep_removes_only_old_folders(tmp_path):
    for name in (".folder.tmp-1-0000000a", ".folder.tmp-2-0000000b", ".other.tmp-1-0000000a", ".folder.old", "folder"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".folder.tmp-1-0000000a", (time.time() - 86400,) * 2)
    sweep(tmp_path, "folder")
    assert names(tmp_path) == [".folder.old", ".folder.tmp-2-0000000b", ".other.tmp-1-0000000a", "folder"]
    sweep(tmp_path, older_than=0)
    assert names(tmp_path) == [".folder.old", "folder"]


def test_sweep_reads_names_literally_and_removes_no_other_files(tmp_path):
    long = "x" * 250
    temporaries = [".data[1].tmp-1-0000000a", f".{long[:200]}.tmp-1-0000000a"]
    others = [".data1.tmp-1-0000000a", ".data[1].tmp-notes", ".data[1].tmp-1-0000000a.csv"]
    for name in temporaries + others:
        (tmp_path / name).mkdir()
    for name in ("data[1]", "data*", long):
        sweep(tmp_path, name, older_than=0)
    assert names(tmp_path) == sorted(others)


def test_an_error_is_raised_if_others_always_replace_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    write(folder, "theirs")
    monkeypatch.setattr(atomic, "_remove", lambda path: None)
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: rename(a, b) if b == folder else None)
    with pytest.raises(OSError, match="keep replacing"):
        write(folder, "ours")
    assert content(folder) == "theirs" and names(tmp_path) == ["folder"]
