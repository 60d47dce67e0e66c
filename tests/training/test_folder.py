"""Test a run's folder: claims, atomic files, and resuming a run that was killed or changed."""

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

import eval as evaluation
import train
from training import writer
from training.folder import FolderError, access, check_run, claimed, write_file
from training.monitor import MetricsLog, explain_faults
from training.tracking import TensorBoard

CONFIG = """
name: t
seed: 1
device: cpu
threads: 1
data: {format: synthetic, protocol: leave_one_out, synthetic: {num_users: 40, num_items: 20, num_clusters: 4,
  mean_length: 8, max_length: 12}}
model: {block: hstu, max_seq_len: 12, embedding_dim: 8, num_layers: 1, attention: {kind: dense}}
loss: {num_negatives: 4}
train: {epochs: 2, batch_size: 16, checkpoint_seconds: 1000}
"""


def test_one_process_at_a_time_has_the_folder(tmp_path):
    folder = tmp_path / "run"
    with claimed(folder, new=True):
        write_file(folder / "config.yaml", "x")
        with pytest.raises(FolderError, match=rf"another process is using it \(process {os.getpid()} on"):
            claimed(folder, new=False).__enter__()
    with claimed(folder, new=False):
        pass
    with pytest.raises(FolderError, match="already has a run"), claimed(folder, new=True):
        pass
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FolderError, match="is not empty; choose another folder"), claimed(tmp_path, new=True):
        pass


def test_an_empty_new_folder_is_removed(tmp_path):
    with pytest.raises(KeyError), claimed(tmp_path / "a" / "b", new=True):
        raise KeyError
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    with claimed(tmp_path / "a" / "b", new=True):
        write_file(tmp_path / "a" / "b" / "config.yaml", "x")
    assert (tmp_path / "a" / "b" / "config.yaml").read_text() == "x"


def test_runs_that_start_together_get_a_folder_each(tmp_path):
    """Folders with the same name get numbers, and an empty one is removed."""
    folder, gate = tmp_path / "runs" / "name" / "20260101-120000", threading.Barrier(8)
    names = []

    def start():
        gate.wait()
        with claimed(folder, new=True, another=True) as path:
            names.append(path.name)
            write_file(path / "config.yaml", "x")
            gate.wait()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == [folder.name, *(f"{folder.name}-{count}" for count in range(2, 9))]
    with pytest.raises(KeyError), claimed(folder, new=True, another=True):
        raise KeyError
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(names)


def test_a_run_without_a_folder_gets_the_next_free_one(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-120000")
    config = str(finished.parent / "config.yaml")
    for _ in range(2):
        assert train.main([config, f"run_dir={tmp_path}", "train.epochs=1"]) == 0
    assert train.main([config, f"run_dir={tmp_path}", "data.protocol=temporal", "data.valid_fraction=0.99"]) == 2
    folders = sorted((tmp_path / "t").iterdir())
    assert [path.name for path in folders] == ["20260101-120000", "20260101-120000-2"]
    assert all((path / "result.json").exists() for path in folders)


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    for name in (".config.yaml.tmp-1-0000000a", "checkpoints/.step-00000001.tmp-1-0000000a", ".best.old"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("x")
    with claimed(tmp_path, new=False):
        assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "best", "checkpoints", "config.yaml"]


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "/proc/nope"])
def test_invalid_paths(path):
    with pytest.raises(FolderError) as error:
        claimed(Path(path), new=True).__enter__()
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_errors_of_the_file_system_name_the_path(tmp_path):
    with pytest.raises(FolderError, match="here: cannot be written: No space"), access(tmp_path / "here", "written"):
        raise OSError(28, "No space left on device")
    with pytest.raises(FolderError, match="not a run folder"):
        check_run(tmp_path)
    with pytest.raises(FolderError, match="absent: no such folder"):
        check_run(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        (None, True),
        (b"", True),
        (b'{"a": 1}\n{"a', True),
        (b'{"a": 1}\n{"a": 2}\n', False),
        (b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"', False),
        (b'{"a": 1}\n{"a": 2}\n\0\0\xff', False),
        (b'\xff{"a": 1}\n{"a": 2}\n', True),
    ],
)
def test_metrics_are_reset_to_those_of_the_checkpoint(tmp_path, content, lost):
    file = tmp_path / "metrics.jsonl"
    if content is not None:
        file.write_bytes(content)
    log = MetricsLog(tmp_path, [{"a": 1}, {"a": 2}], TensorBoard(tmp_path, 0))
    assert log.lost == lost
    log.write({"a": 3, "step": 1}, 0.5, {})
    log.close(finished=True)
    assert [json.loads(line)["a"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert log.records[-1] == {"a": 3, "step": 1, "seconds": 0.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.yaml").write_text(CONFIG)
    assert train.main([str(folder / "config.yaml"), "--run", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_beginning(finished, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(finished / "config.yaml", run / "config.yaml")
    assert train.main(["--resume", str(run)]) == 0
    assert metrics(run) == metrics(finished)


@pytest.mark.parametrize("name", ["write_file", "save_vocabulary"])
def test_a_run_killed_while_its_first_files_are_written_can_be_resumed(finished, tmp_path, monkeypatch, name):
    """The first file in the folder is config.yaml, the only one that a resumed run needs."""
    run, write = tmp_path / "run", getattr(writer, name)

    class Killed(BaseException):
        pass

    def killed(*arguments):
        write(*arguments)
        raise Killed

    monkeypatch.setattr(writer, name, killed)
    with pytest.raises(Killed):
        train.main([str(finished.parent / "config.yaml"), "--run", str(run)])
    monkeypatch.undo()
    assert train.main(["--resume", str(run)]) == 0
    assert metrics(run) == metrics(finished)


def test_missing_checkpoints_are_an_error(copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    assert train.main(["--resume", str(copy)]) == 2
    assert "no checkpoint to resume from, though metrics.jsonl has lines" in capsys.readouterr().err


def test_a_changed_configuration_is_refused_or_accepted(copy, capsys):
    """A change in config.yaml is like one on the command line."""
    config = copy / "config.yaml"
    text = config.read_text().replace("epochs: 2", "epochs: 3", 1)
    config.write_text(text.replace("lr: 0.001", "lr: 0.002"))
    assert train.main(["--resume", str(copy)]) == 2
    assert "a resumed run cannot change train.lr: 0.001 -> 0.002 (" in capsys.readouterr().err
    config.write_text(text)
    assert train.main(["--resume", str(copy)]) == 0
    assert len(metrics(copy)) == 3
    assert train.main(["--resume", str(copy)]) == 0  # it is this run's configuration now


def test_weights_know_their_configuration(copy, capsys):
    """Another configuration with the same shapes, and best/ of another run, are errors."""
    config = copy / "config.yaml"
    text = config.read_text()
    others = (
        (text.replace("scale: 1.0", "scale: 5.0"), "model.attention.0.scale: 1.0 -> 5.0"),
        (text.replace("temperature: 0.05", "temperature: 0.5"), "loss.temperature: 0.05 -> 0.5"),
        (
            text[: text.index("  attention:")] + "  attention: {kind: softmax}\n" + text[text.index("loss:") :],
            "-> softmax",
        ),
    )
    for other, message in others:
        config.write_text(other)
        assert evaluation.main([str(copy)]) == 2
        assert message in capsys.readouterr().err
    config.write_text(text.replace("filter_seen: history", "filter_seen: none").replace("threads: 1", "threads: 2"))
    assert evaluation.main([str(copy)]) == 0
    config.write_text(text)
    assert evaluation.main([str(copy), "model.attention.0.scale=5.0"]) == 0
    assert train.main([str(config), "--run", str(copy.parent / "other")]) == 0  # with the same weights
    shutil.rmtree(copy / "best")
    shutil.copytree(copy.parent / "other" / "best", copy / "best")
    for main, arguments in ((evaluation.main, [str(copy)]), (train.main, ["--resume", str(copy)])):
        assert main(arguments) == 2
        assert "best: belongs to another run" in capsys.readouterr().err


def test_an_accepted_configuration_is_also_stored_with_the_best_weights(copy):
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 2", "epochs: 3", 1))
    assert train.main(["--resume", str(copy)]) == 0
    assert evaluation.main([str(copy)]) == 0
    assert json.loads((copy / "best" / "state.json").read_text())["config"]["train"]["epochs"] == 3


@pytest.mark.parametrize("name", ["checkpoints", "best", "tensorboard", ".lock"])
def test_links_in_place_of_folders_are_refused(copy, name, capsys):
    (copy / name).rename(copy.parent / "moved")
    (copy / name).symlink_to(copy.parent / "moved")
    assert train.main(["--resume", str(copy)]) == 2
    assert f"{name}: a symbolic link" in capsys.readouterr().err


def test_links_in_place_of_files_are_not_followed(copy):
    names = ("loss.svg", "metric.svg", "result.json", "report.md", "metrics.jsonl", "eval-test.json")
    (copy.parent / "mine").write_text("mine")
    for name in names:
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(copy.parent / "mine")
    assert train.main(["--resume", str(copy)]) == 0
    assert evaluation.main([str(copy)]) == 0
    assert (copy.parent / "mine").read_text() == "mine"
    assert not [name for name in names if (copy / name).is_symlink()]


def test_lost_metrics_are_restored_and_reported(copy, finished, capsys):
    (copy / "metrics.jsonl").unlink()
    assert train.main(["--resume", str(copy)]) == 0
    assert "restored from the checkpoint" in capsys.readouterr().out
    assert metrics(copy) == metrics(finished)


def test_an_unexpected_exception_has_a_traceback_and_advice(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_faults()
    try:
        raise LookupError("surprise")
    except LookupError as error:
        sys.excepthook(LookupError, error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "LookupError: surprise" in shown and "Please report it" in shown
