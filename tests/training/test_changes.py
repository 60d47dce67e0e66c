"""Test that every option has a rule for resumed runs and evaluations, and that refused changes write no file."""

import json
import re
import shutil

import pytest

import eval as evaluation
import train
from training.changes import CLASSES, RULES, class_of
from training.config import load_config
from training.keys import sections

CONFIG = """
name: t
device: cpu
threads: 1
data: {format: csv, path: PLACE/events.csv, cache_dir: PLACE/cache, protocol: leave_one_out}
model: {block: hstu, max_seq_len: 12, embedding_dim: 8, num_layers: 1, attention: {kind: dense}}
loss: {num_negatives: 4}
train: {epochs: 2, batch_size: 16}
"""
OPTIONS = {key.name for section in sections() for key in section.keys}


def events(users):
    rows = [f"u{user},i{(user + 3 * n) % 11},{n}" for user in users for n in range(6)]
    return "\n".join(["user,item,timestamp", *rows, ""])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with data and a finished run of protocol leave_one_out, and one of protocol all."""
    place = tmp_path_factory.mktemp("changes")
    (place / "events.csv").write_text(events(range(20)))
    (place / "run.yaml").write_text(CONFIG.replace("PLACE", str(place)))
    for name, more in (("run", []), ("everything", ["data.protocol=all"])):
        assert train.main([str(place / "run.yaml"), *more, "--run", str(place / name)]) == 0
    return place


@pytest.fixture
def copy(place, tmp_path):
    return shutil.copytree(place / "run", tmp_path / "run")


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def refuses(place, capsys, main, *arguments):
    """Call `main`, which must fail with one line and change no file; return the line."""
    before = content(place)
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert content(place) == before
    return line


def test_every_option_is_in_one_class():
    named = [option for rule in RULES.values() for option in rule.options.split()]
    assert len(named) == len(CLASSES) > 60
    assert not set(named) - OPTIONS
    above = {name.rpartition(".")[0] for name in OPTIONS}
    single = {name.replace(".0.", ".").replace(".NAME.", ".") for name in OPTIONS - above}
    assert not [name for name in single if class_of(name) is None]
    assert class_of("train.new_option") is class_of("data.new_option") is class_of("new_option") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.protocol=published", "data.protocol: leave_one_out -> published (start a new run"),
        ("data.min_item_events=2", "data.min_item_events: 1 -> 2 (start a new run"),
        ("data.min_user_events=7", "data.min_user_events: 1 -> 7 (start a new run"),
        ("data.duplicates=drop", "data.duplicates: keep -> drop (start a new run"),
        ("data.columns={action: item, item: timestamp, timestamp: ''}", "data.columns: None -> {"),
        ("data.where=item > 'i3'", "data.where: None -> item > 'i3' (start a new run"),
        ("seed=7", "seed: 0 -> 7 (start a new run"),
        ("model.dropout=0.5", "model.dropout: 0.0 -> 0.5 (start a new run"),
        ("model.attention.0.scale=2.0", "model.attention.0.scale: 1.0 -> 2.0 (start a new run"),
        ("eval.filter_seen=window", "-> window (eval.py RUN evaluates with another value)"),
        ("eval.metrics=[HR@5]", "eval.metrics: None -> ['HR@5'] (eval.py RUN evaluates with another value)"),
        ("train.epochs=1", "train.epochs=1: expected at least 2, the epochs that have begun"),
        ("train.steps=1", "train.epochs=1 (by train.steps=1): expected at least 2, the epochs that have begun"),
        ("eval.best_metric=HR@7", "eval.best_metric: metrics.jsonl has no HR@7 for epoch 1 of this run"),
    ],
)
def test_a_resumed_run_names_a_refused_option(place, capsys, change, message):
    line = refuses(place, capsys, train.main, "--resume", place / "run", change)
    assert message in line


def test_all_refused_options_are_in_one_line(place, capsys):
    changed = ("data.protocol=published", "train.lr=0.5", "eval.same_time=hidden", "train.epochs=5")
    line = refuses(place, capsys, train.main, "--resume", place / "everything", *changed)
    assert "data.protocol: all -> published, train.lr: 0.001 -> 0.5 (start" in line
    assert "eval.same_time: seen -> hidden (eval.py" in line and "epochs" not in line


def test_a_resumed_run_may_change_its_place_device_and_length(copy, tmp_path):
    free = ("name=other", "threads=2", "eval.batch_size=7", "train.checkpoint_seconds=5", "data.partitions=2")
    longer = ("train.epochs=3", "eval.patience=9", "eval.best_metric=HR@10", "train.compile=false")
    assert train.main(["--resume", str(copy), *free, *longer, f"run_dir={tmp_path}"]) == 0
    config = load_config(copy / "config.yaml")
    assert (config.name, config.train.epochs, config.eval.best_metric, config.threads) == ("other", 3, "HR@10", 2)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert evaluation.main([str(copy)]) == 0


def test_data_may_move_but_not_change(place, copy, tmp_path, capsys):
    """The run is unchanged if the checksum differs, and other data are not prepared."""
    (tmp_path / "new.csv").write_text(events(range(21)))
    caches = sorted(path.name for path in (place / "cache").iterdir())
    for path, message in ((tmp_path / "new.csv", "trained on other data than"), (tmp_path / "gone.csv", "gone.csv")):
        line = refuses(copy, capsys, train.main, "--resume", copy, f"data.path={path}", "train.epochs=3")
        assert message in line
        assert message in refuses(copy, capsys, evaluation.main, copy, f"data.path={path}")
    assert sorted(path.name for path in (place / "cache").iterdir()) == caches
    line = refuses(copy, capsys, train.main, "--resume", copy, f"data.path={tmp_path / 'new.csv'}")
    assert "data.path" in line and "--init-from RUN" in line and "eval.py RUN --data NEW" in line
    moved = shutil.copy(place / "events.csv", tmp_path / "moved.csv")
    assert evaluation.main([str(copy), f"data.path={moved}"]) == 0
    assert train.main(["--resume", str(copy), f"data.path={moved}", f"data.cache_dir={tmp_path / 'c'}"]) == 0
    assert load_config(copy / "config.yaml").data.path == str(moved)
    assert evaluation.main([str(copy)]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.protocol=published", "data.protocol: leave_one_out -> published (the weights were trained on events"),
        ("data.valid_fraction=0.2", "data.valid_fraction: 0.1 -> 0.2 (the weights were trained on events"),
        ("data.min_user_events=2", "data.min_user_events: 1 -> 2 (it applies only to other data, given by --data"),
        ("model.dropout=0.5", "model.dropout: 0.0 -> 0.5 (the weights were trained with it)"),
        ("train.lr=0.5", "train.lr: 0.001 -> 0.5 (the weights were trained with it)"),
        ("train.epochs=5", "train.epochs: 2 -> 5 (it has no effect on an evaluation)"),
    ],
)
def test_an_evaluation_names_a_refused_option(place, capsys, change, message):
    assert f"an evaluation cannot change {message}" in refuses(place, capsys, evaluation.main, place / "run", change)


def test_an_evaluation_may_change_options_that_need_no_training(place, copy, tmp_path):
    changed = ("eval.filter_seen=none", "eval.metrics=[HR@7]", "train.autocast=bf16", "model.attention.0.scale=2.0")
    assert evaluation.main([str(copy), *changed, "threads=2", "eval.batch_size=5"]) == 0
    result = json.loads((copy / "eval-test.json").read_text())
    assert result["filter_seen"] == "none" and "HR@7" in result["model"]["none"]
    notes = "\n".join(result["notes"])
    assert "Evaluated with model.attention.0.scale=2.0; trained with 1.0." in notes
    assert "Evaluated with train.autocast=bf16; trained with none." in notes
    # Options of reading may differ for other data.
    (tmp_path / "other.csv").write_text(re.sub(r"^user,item", "who,what", events(range(5))).replace(",", ";"))
    columns = ("data.columns={user: who, item: what}", "data.separator=;", "data.min_user_events=2")
    assert evaluation.main([str(copy), "--data", str(tmp_path / "other.csv"), *columns]) == 0
