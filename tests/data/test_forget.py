"""Test the removal of users from prepared data, and the list of runs that were trained on them."""

import shutil

import numpy as np
import pytest

from data.cache import read_cache
from data.datasets import load_dataset
from data.forget import prepared_folders, remove_users, without_users
from data.types import DataError
from data.vocabulary import vocabulary_of
from tools import forget
from training.vocabulary import save_vocabulary

ROWS = [("ann", "x", 1), ("bob", "y", 1), ("ann", "y", 2), ("7", "x", 3), ("eve", "z", 4), ("bob", "x", 5)]


@pytest.fixture
def prepared(tmp_path):
    """Return the folder of a data set in a cache, with an array computed from it."""
    (tmp_path / "shop.csv").write_text("user,item,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t in ROWS))
    load_dataset("csv", tmp_path / "shop.csv", cache_dir=tmp_path / "cache")
    (folder,) = prepared_folders(tmp_path / "cache")
    np.savez(f"{folder}-baselines-0123.npz", x=np.zeros(1))
    return folder


def events(folder):
    dataset, _ = read_cache(folder)
    users = np.repeat(dataset.user_ids, np.diff(dataset.user_offsets)).tolist()
    return sorted(zip(users, dataset.item_ids[dataset.items].tolist(), dataset.timestamps.tolist()))


def test_a_user_is_removed_from_a_cache(prepared, capsys):
    runs = prepared.parents[1] / "runs"
    for name, users in (("with", None), ("without", ["ann"])):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.yaml").write_text("")
        dataset, _ = read_cache(prepared)
        dataset = dataset if users is None else without_users(dataset, users)
        save_vocabulary(runs / name, dataset, vocabulary_of(dataset))
    assert forget.main(["ann", "nobody", "--data", str(prepared.parent), "--runs", str(runs)]) == 0
    output = capsys.readouterr().out
    assert "removed 1 users with 2 events" in output and f"{runs / 'with'}: was trained" in output
    assert f"{runs / 'without'}: " not in output
    assert "nobody: in no prepared data set and no run\n" in output and "ann: in no" not in output
    assert "checked: 1 prepared data sets; runs trained on data with these users: 1" in output
    (left,) = prepared_folders(prepared.parent)
    assert left != prepared and events(left) == sorted(row for row in ROWS if row[0] != "ann")
    assert not any(b"ann" in file.read_bytes() for file in prepared.parent.rglob("*.npy"))
    assert [path.name for path in prepared.parent.iterdir()] == [left.name]
    assert remove_users(left, ["ann"]) is None
    dataset = load_dataset("csv", left, cache_dir=None)
    assert dataset.user_ids.tolist() == ["7", "bob", "eve"] and dataset.num_items == 3
    assert forget.main(["ann", "--data", str(left), "--runs", str(runs)]) == 0


def test_a_user_is_removed_from_a_prepared_folder(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "mine")
    removed = remove_users(tmp_path / "mine", ["7", "eve"])
    assert (removed.users, removed.events, removed.folder) == (["7", "eve"], 2, tmp_path / "mine")
    assert events(tmp_path / "mine") == sorted(row for row in ROWS if row[0] in ("ann", "bob"))
    assert read_cache(tmp_path / "mine")[0].fingerprint != read_cache(prepared)[0].fingerprint
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_user_that_is_nowhere_is_an_error(prepared, tmp_path, capsys):
    (tmp_path / "runs" / "damaged").mkdir(parents=True)
    (tmp_path / "runs" / "damaged" / "config.yaml").write_text("")
    with pytest.raises(DataError, match="none of these users is in the prepared data or runs"):
        forget.main(["Kd 99999", "--data", str(prepared.parent), "--runs", str(tmp_path / "runs")])
    output = capsys.readouterr().out
    assert "Kd 99999: in no prepared data set and no run that could be checked\n" in output
    assert "Remove the users" not in output and len(events(prepared)) == len(ROWS)


def test_errors(prepared, tmp_path):
    with pytest.raises(DataError, match="no event is left without these users"):
        remove_users(prepared, ["ann", "bob", "eve", "7"])
    assert len(events(prepared)) == len(ROWS)
    (prepared / "items.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"damaged cache: items\.npy"):
        remove_users(prepared, ["ann"])
    for option in ("--data", "--runs"):
        with pytest.raises(DataError, match=f"{option}: .*: no such folder"):
            forget.main(["ann", "--data", str(prepared.parent), option, str(tmp_path / "none")])
