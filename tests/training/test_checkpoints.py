"""Test checkpoints: atomic writes, resuming with the same bits, errors about damaged ones."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.damage import damaged_files
from training import saved
from training.average import WeightAverage
from training.checkpoints import Checkpoints, Progress, checkpoints, set_aside_damaged
from training.config import load_config
from training.dcp import read_tensors, saved_tensors
from training.ranks.processes import Ranks
from training.saved import CheckpointError, exists, load_folder, not_finite, save_folder
from training.weights import saved_weights

ROOT = Path(__file__).parents[2]
RANKS = Ranks(load_config(ROOT / "configs/synthetic-hstu.yaml", []))  # a single process
FILES = [".metadata", "__0_0.distcp", "state.json"]


def setup(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return model, optimizer


def make_checkpoints(run, model, optimizer, average=None):
    return Checkpoints(run, model, optimizer, average, RANKS)


def save_checkpoint(run, model, optimizer, progress, average=None):
    make_checkpoints(run, model, optimizer, average).save(progress)


def load_checkpoint(run, model, optimizer, average=None):
    return make_checkpoints(run, model, optimizer, average).load()


def at(step, **facts):
    return Progress(**{"run": "r", "fingerprint": "x", "step": step, **facts})


def step(model, optimizer):
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_resumed_training_has_the_same_bits(tmp_path):
    model, optimizer = setup()
    for _ in range(3):
        step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, at(3, losses={"loss": [0.1, 3]}))
    for _ in range(3):
        step(model, optimizer)
    other, other_optimizer = setup(seed=1)
    assert load_checkpoint(tmp_path, other, other_optimizer) == at(3, losses={"loss": [0.1, 3]})
    for _ in range(3):
        step(other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


def test_keeps_the_last_two(tmp_path):
    model, optimizer = setup()
    for number in (1, 2, 10):
        save_checkpoint(tmp_path, model, optimizer, at(number))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_pruning_removes_no_files_of_the_user(tmp_path):
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))
    place = tmp_path / "checkpoints"
    others = ("step-00000001.bak", "step-00000001-before-the-change", "step-00000000-notes", "step-", "step-1")
    for name in others:
        (place / name).mkdir()
    (place / "step-00000000").write_text("a file")
    shutil.copytree(place / "step-00000001", place / "step-00000002")  # its state.json has step 1
    (place / "step-00000001" / "notes.txt").write_text("mine")
    (place / "step-00000003").symlink_to(place / "step-00000001")
    for number in (4, 5, 6):
        save_checkpoint(tmp_path, model, optimizer, at(number))
    save_checkpoint(tmp_path, model, optimizer, at(7, run="another"))
    left = {path.name for path in place.iterdir()}
    assert left == {*others, *(f"step-0000000{number}" for number in (0, 1, 2, 3, 5, 6, 7))}
    assert [path.name for path in (place / "step-00000001").iterdir()] == ["notes.txt"]
    assert len(list((place / "step-00000002").iterdir())) == 3


def test_damaged_checkpoints_are_renamed(tmp_path):
    """The newest intact checkpoint is then the last one; intact checkpoints are unchanged."""
    model, optimizer = setup()
    for number in (1, 2):
        step(model, optimizer)
        save_checkpoint(tmp_path, model, optimizer, at(number))
    assert set_aside_damaged(tmp_path) == []
    before, last = checkpoints(tmp_path)
    for damage in damaged_files(last):
        (aside,) = set_aside_damaged(tmp_path)
        assert aside == last and checkpoints(tmp_path) == [before], damage
        assert load_checkpoint(tmp_path, model, optimizer).step == 1
        (moved,) = (tmp_path / "checkpoints").glob("damaged-step-00000002-*")
        moved.rename(last)
    assert load_checkpoint(tmp_path, model, optimizer).step == 2


def test_unreadable_checkpoints_are_not_renamed(tmp_path, monkeypatch):
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saved, "checksum", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        set_aside_damaged(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize("where", ["weight", "moment", "average"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_named(where, value):
    model, optimizer = setup()
    average = WeightAverage(model, 0.9)
    step(model, optimizer)
    checkpoints = make_checkpoints(Path("unused"), model, optimizer, average)
    assert not_finite(checkpoints.tensors()) is None
    tensor = {
        "weight": model.weight.data,
        "moment": optimizer.state[model.weight]["exp_avg_sq"],
        "average": average.averages[0],
    }[where]
    tensor[1, 2] = value
    name = {"weight": "model.weight", "moment": "optimizer.weight.exp_avg_sq", "average": "average.weight"}[where]
    assert not_finite(checkpoints.tensors()) == name


def test_nothing_that_is_not_finite_is_written(tmp_path):
    save_folder(tmp_path / "best", {"model": {"x": torch.ones(3), "n": torch.ones(0)}}, {"value": 1})
    with pytest.raises(CheckpointError, match="best: not written, x is not finite; the previous content is unchanged"):
        save_folder(tmp_path / "best", {"model": {"x": torch.tensor([1.0, float("nan")])}}, {"value": 2})
    assert load_folder(tmp_path / "best", checked=slice(None))[1] == {"value": 1}


def test_modes_follow_the_umask(tmp_path):
    model, optimizer = setup()
    before = os.umask(0o022)
    try:
        save_checkpoint(tmp_path, model, optimizer, at(1))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in checkpoints(tmp_path)[0].iterdir()} == {0o644}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_only_regular_files_are_read(tmp_path, file, kind):
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))
    path = checkpoints(tmp_path)[-1] / file
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    with pytest.raises(CheckpointError, match=r"cannot be read: (not a regular file|1,099,511,627,776 bytes)"):
        load_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_gives_an_error_of_one_line(tmp_path, file, damage):
    model, optimizer = setup()
    step(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, at(1))
    save_checkpoint(tmp_path, model, optimizer, at(2))
    path = checkpoints(tmp_path)[-1] / file
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2 if file != "state.json" else 0] ^= 0xFF
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"step-00000002.*step-00000001") as error:
        load_checkpoint(tmp_path, model, optimizer)
    assert len(str(error.value).splitlines()) == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))
    wide = nn.Linear(4, 2)
    with pytest.raises(CheckpointError, match=r"belongs to another model.* model\.weight"):
        load_checkpoint(tmp_path, wide, torch.optim.AdamW(wide.parameters()))


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        load_checkpoint(tmp_path, *setup())


def test_progress_of_another_version_is_refused(tmp_path):
    model, optimizer = setup()
    save_folder(
        tmp_path / "checkpoints" / "step-00000001", {"model": model.state_dict(), "state": {}}, {"step": 1, "x": 2}
    )
    with pytest.raises(
        CheckpointError,
        match=r"step-00000001: written by another version.*\(only one of the versions has batch, .*, x\)",
    ):
        load_checkpoint(tmp_path, model, optimizer)


def test_checkpoints_of_version_0_2_0_cannot_be_resumed_but_evaluated(tmp_path):
    model, optimizer = setup()
    tensors = {"model": model.state_dict(), "state": {"random.cpu": torch.get_rng_state()}}
    save_folder(tmp_path / "checkpoints" / "step-00000001", tensors, at(1).model_dump() | {"optimizer": []})
    with pytest.raises(CheckpointError, match=r"step-00000001: was saved by version 0\.2\.0.*--init-from RUN"):
        load_checkpoint(tmp_path, model, optimizer)
    weights, facts = saved_weights(checkpoints(tmp_path)[0])
    assert torch.equal(weights["weight"], model.weight) and facts["step"] == 1
    save_checkpoint(tmp_path / "ranks", model, optimizer, at(1))
    (folder,) = checkpoints(tmp_path / "ranks")
    _, facts = load_folder(folder)
    del facts["tensors"]  # as in a checkpoint by several ranks
    saved.write_facts(folder, facts, {name: saved.checksum(folder / name) for name in FILES[:2]})
    with pytest.raises(CheckpointError, match=r"step-00000001: was saved by version 0\.2\.0"):
        load_checkpoint(tmp_path / "ranks", model, optimizer)
    assert torch.equal(saved_weights(folder)[0]["weight"], model.weight)


def test_weights_to_evaluate_are_the_averages(tmp_path):
    model, optimizer = setup()
    model.to(torch.bfloat16)
    average = WeightAverage(model, 0.9)
    nn.init.constant_(model.weight, 2.0)
    average.update()
    save_checkpoint(tmp_path, model, optimizer, at(1), average)
    weights, _ = saved_weights(checkpoints(tmp_path)[0])
    assert torch.equal(weights["weight"], average.averages[0].bfloat16()) and weights["weight"].dtype == torch.bfloat16
    read = {"model.weight": torch.empty(2, 3, dtype=torch.bfloat16)}
    read_tensors(checkpoints(tmp_path)[0], read)
    assert torch.equal(read["model.weight"], torch.full((2, 3), 2.0, dtype=torch.bfloat16))


def test_best_weights_are_the_averages(tmp_path):
    model, optimizer = setup()
    average = WeightAverage(model, 0.9)
    nn.init.constant_(model.weight, 2.0)
    make_checkpoints(tmp_path, model, optimizer, average).save_best({"value": 1})
    assert torch.equal(saved_weights(tmp_path / "best")[0]["weight"], average.averages[0])
    assert torch.equal(model.weight, torch.full((2, 3), 2.0)) and not torch.equal(model.weight, average.averages[0])


class Bomb:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_metadata_cannot_run_code(tmp_path, monkeypatch):
    """A forged .metadata has the right checksum."""
    monkeypatch.chdir(tmp_path)
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))
    (folder,) = checkpoints(tmp_path)
    assert saved_tensors(folder)["model.weight"] == ((2, 3), torch.float32)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    _, facts = load_folder(folder)
    saved.write_facts(folder, facts, {name: saved.checksum(folder / name) for name in FILES[:2]})
    with pytest.raises(CheckpointError, match=r"cannot be read \(posix\.system is not allowed in a checkpoint\)"):
        load_checkpoint(tmp_path, model, optimizer)
    assert not (tmp_path / "pwned").exists()


def test_after_a_full_disk_there_are_one_error_line_and_no_files(tmp_path, monkeypatch):
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="step-00000002: cannot be written: No space left on device") as error:
            save_checkpoint(tmp_path, model, optimizer, at(2))
    assert len(str(error.value).splitlines()) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path, model, optimizer).step == 1


def test_after_a_crash_while_writing_the_old_checkpoint_is_intact(tmp_path, monkeypatch):
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))
    monkeypatch.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, model, optimizer, at(2))
    monkeypatch.undo()
    assert load_checkpoint(tmp_path, model, optimizer).step == 1


def test_files_with_a_right_checksum_are_not_called_damaged(tmp_path):
    """The files are not valid although their checksums are right."""
    save_folder(tmp_path / "best", {"model": {"x": torch.ones(3)}}, {"value": 1})
    (tmp_path / "best" / "model.safetensors").write_bytes(b"x" * 100)
    saved.write_facts(tmp_path / "best", {}, {"model.safetensors": saved.checksum(tmp_path / "best/model.safetensors")})
    for what in ({"checked": slice(None)}, {}):
        with pytest.raises(CheckpointError, match=r"best/model.safetensors: cannot be read \(SafetensorError") as error:
            load_folder(tmp_path / "best", "model", **what)
        assert "damaged" not in str(error.value)
    model, optimizer = setup()
    save_checkpoint(tmp_path, model, optimizer, at(1))
    (folder,) = checkpoints(tmp_path)
    _, facts = load_folder(folder)
    saved.write_facts(folder, facts | {"batch": -1}, {name: saved.checksum(folder / name) for name in FILES[:2]})
    with pytest.raises(CheckpointError, match="step-00000001: not valid, batch"):
        load_checkpoint(tmp_path, model, optimizer)
    assert set_aside_damaged(tmp_path) == []


def test_replaced_folder_is_never_missing(tmp_path):
    folder = tmp_path / "best"
    save_folder(folder, {"model": {"x": torch.zeros(1)}}, {"value": 1})
    save_folder(folder, {"model": {"x": torch.ones(1)}}, {"value": 2})
    assert load_folder(folder, "model")[1]["value"] == 2
    # After a kill between the two moves of a replacement, the old folder is still found under its temporary name.
    folder.rename(tmp_path / ".best.old")
    assert exists(folder) and load_folder(folder, "model")[0]["model"]["x"].item() == 1
    save_folder(folder, {"model": {"x": torch.zeros(1)}}, {"value": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert not exists(tmp_path / "other")
