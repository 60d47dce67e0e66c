"""Test train.py and eval.py as a user runs them: resume, interruption, reports, predictions, and bad input."""

import contextlib
import importlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

import eval as evaluation
import train
from tests.support.forked import Forked
from training import loop
from training.checkpoints import checkpoints
from training.config import load_config
from training.dcp import read_tensors, saved_tensors
from training.run import TrainingError
from training.saved import load_folder
from training.weights import saved_weights

ROOT = Path(__file__).resolve().parents[2]
MAIN = {
    "train.py": train.main,
    "eval.py": evaluation.main,
    "compare.py": lambda arguments: importlib.import_module("compare").main(arguments),
    "serve.py": lambda arguments: importlib.import_module("serve").main(arguments),
}
SETTINGS = [
    "data.synthetic={num_users: 200, num_items: 80, mean_length: 15}",
    "model.max_seq_len=20",
    "model.embedding_dim=16",
    "train.epochs=4",
    "train.lr=5e-3",
    "train.batch_size=16",
    "train.checkpoint_seconds=1000",
    "eval.patience=null",
    "threads=1",
    "device=cpu",
]


def run(script, *arguments):
    """Run the script's main in this process, since each start of Python takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = MAIN[script]([str(argument) for argument in arguments])
    except SystemExit as left:  # invalid arguments
        status = left.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def start(folder, *more):
    return run("train.py", ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, *more, "--run", folder)


def final(folder):
    """Return the results that must not depend on interruptions: metrics and losses, but no durations."""
    result = json.loads((folder / "result.json").read_text())
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in history:
        del row["seconds"]
    return {key: result[key] for key in ("model", "popularity", "by_history", "epoch", "steps")}, history


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    done = start(folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_ends_with_a_table_and_a_report(finished):
    folder, done = finished
    assert "popularity, history removed" in done.stdout and "HR@10" in done.stdout
    assert "leave" in done.stdout  # the protocol and what it lets leak
    report = (folder / "report.md").read_text()
    for part in ("Full ranking", "By length of the history", "popularity, history removed", "removed from the ranking"):
        assert part in report
    images = re.findall(r"!\[.+\]\((\w+\.svg)\)", report)
    assert images == ["loss.svg", "metric.svg"]
    assert "![Training loss]" in report and "horizontal line: popularity" in report
    assert all(ElementTree.parse(folder / image) for image in images)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert any((folder / "tensorboard").iterdir())
    result = json.loads((folder / "result.json").read_text())
    assert result["model"]["history"]["HR@10"] > result["popularity"]["history"]["HR@10"]
    # The baselines are evaluated as the model is; the sentence is about the best baseline.
    assert {"popularity", "markov", "item-kNN", "EASE"} <= result["baselines"].keys()
    assert result["baselines"]["popularity"]["metrics"] == result["popularity"][result["filter_seen"]]
    verdict = result["against_baseline"]
    values = {name: baseline["metrics"][verdict["metric"]] for name, baseline in result["baselines"].items()}
    assert verdict["of_baseline"] == pytest.approx(max(values.values())) == pytest.approx(values[verdict["baseline"]])
    assert all(verdict["sentence"] in text for text in (done.stdout, report, (folder / "report.html").read_text()))


def signal_in(number, module, name, call, arguments):
    """Run train.py with the signal `number` in its `call`-th call of module.name."""
    module, calls = importlib.import_module(module), itertools.count(1)
    whole = getattr(module, name)

    def counted(*inputs, **named):
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return whole(*inputs, **named)

    setattr(module, name, counted)
    return train.main(arguments)


def signalled(number, arguments, *moment):
    """Run `signal_in` in a forked process; return (exit status, output)."""
    process = Forked(signal_in, number, *moment, list(map(str, arguments)))
    output = "".join(process.communicate())
    return process.returncode, output


def dies(arguments, *moment):
    status, output = signalled(signal.SIGKILL, arguments, *moment)
    assert status == -signal.SIGKILL, output


def test_killed_and_resumed_ends_the_same(tmp_path):
    """Kill a run within an epoch, as a checkpoint is moved into place, in best/, and between files of a checkpoint."""
    reference, folder = tmp_path / "reference", tmp_path / "run"
    varied = ["train.augment={window: 0.5, drop: 0.1, shuffle: 5.0}", "train.checkpoint_seconds=0", "train.epochs=3"]
    varied.append("train.batch_size=50")  # four steps an epoch
    assert start(reference, *varied).returncode == 0
    resume = ["--resume", folder]
    dies([ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, *varied, "--run", folder], "training.loop", "set_lr", 7)
    assert checkpoints(folder)[-1].name == "step-00000006"
    for moment in ("os", "rename", 2), ("training.saved", "save_file", 1), ("training.checkpoints", "write_facts", 3):
        dies(resume, *moment)
    assert not (folder / "result.json").exists()
    done = run("train.py", *resume)
    assert done.returncode == 0, done.stderr
    assert final(folder) == final(reference)


@pytest.mark.slow
def test_kills_in_a_long_epoch_lose_at_most_checkpoint_seconds(tmp_path):
    """Kill a run at 20 random moments of an epoch of some minutes; each start resumes from the last checkpoint."""
    folder, draw, steps = tmp_path / "run", random.Random(49), [0]
    long = [ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, "data.synthetic.num_users=40000", "train.batch_size=4"]
    long += ["train.checkpoint_seconds=2", "train.epochs=20", "eval.every=20"]
    for _ in range(20):
        arguments = ["--resume", folder] if folder.exists() else [*long, "--run", folder]
        command = [sys.executable, "train.py", *map(str, arguments)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (checkpoints(folder) and step_of(folder) > steps[-1]):
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 6))
        assert process.poll() is None
        process.kill()
        process.wait()
        age = time.time() - (checkpoints(folder)[-1] / "state.json").stat().st_mtime
        assert age < 2 + 5, age  # 5 s: a step and a checkpoint on a busy machine
        steps.append(step_of(folder))
    assert steps == sorted(set(steps))


def step_of(run):
    return int(checkpoints(run)[-1].name.removeprefix("step-"))


def test_sigterm_saves_midway_and_says_how_to_resume(finished, tmp_path):
    reference, _ = finished
    folder = tmp_path / "run"
    arguments = [ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, "--run", folder]
    status, output = signalled(signal.SIGTERM, arguments, "training.loop", "set_lr", 20)
    assert status == 128 + signal.SIGTERM, output
    assert f"python train.py --resume {folder}" in output.replace("\n", "")
    assert json.loads(sorted((folder / "checkpoints").glob("step-*"))[-1].joinpath("state.json").read_text())["step"]
    assert run("train.py", "--resume", folder).returncode == 0
    assert final(folder) == final(reference)


def terminated(monkeypatch, arguments, call):
    """Run train.py in this process, with SIGTERM when the learning rate is set for the `call`-th time."""
    set_lr, calls = loop.set_lr, itertools.count(1)

    def counted(*inputs):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return set_lr(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_lr", counted)
        return run("train.py", *arguments)


def test_a_signal_in_the_last_step_is_not_the_end_of_the_epoch(finished, tmp_path, monkeypatch):
    """Check the checkpoint that the signal causes: it has the epoch's last step, but is before its evaluation."""
    reference, _ = finished
    folder = tmp_path / "run"
    arguments = [ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, "--run", folder]
    assert terminated(monkeypatch, arguments, 52).returncode == 128 + signal.SIGTERM
    facts = [json.loads((checkpoints(folder)[-1] / "state.json").read_text())]
    assert run("train.py", "--resume", folder).returncode == 0
    facts.append(json.loads((checkpoints(folder)[-1] / "state.json").read_text()))
    assert [(of["step"], of["epoch"], of["batch"], len(of["records"])) for of in facts] == [
        (52, 3, 13, 3),
        (52, 4, 0, 4),
    ]
    assert final(folder) == final(reference)


def test_eval_needs_nothing_but_the_folder(finished, tmp_path, monkeypatch):
    import polars as pl

    folder, _ = finished
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "top.parquet"
    done = run("eval.py", folder, "--predict", out, "--top-k", 5, "--sampled", 20)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "eval-test.json").read_text())
    trained = json.loads((folder / "result.json").read_text())
    assert result["model"] == trained["model"] and result["by_history"] == trained["by_history"]
    assert "SAMPLED" in result["sampled"]["label"] and "SAMPLED" in done.stdout
    assert result["sampled"]["HR@10"] > result["model"]["none"]["HR@10"]
    frame = pl.read_parquet(out)
    assert frame.columns == ["user", "rank", "item", "score"]
    best = frame.filter(pl.col("user") == frame["user"][0]).sort("rank")
    assert best["rank"].to_list() == [1, 2, 3, 4, 5] and best["item"].n_unique() == 5
    assert best["score"].is_sorted(descending=True)
    assert len(frame) == 5 * result["users"]


def test_eval_of_other_splits(finished, tmp_path):
    folder, _ = finished
    for split in ("valid", "train"):
        assert run("eval.py", folder, "--split", split).returncode == 0
        assert json.loads((folder / f"eval-{split}.json").read_text())["split"] == split
    # The best checkpoint is the best one on the validation split.
    best = json.loads((folder / "best" / "state.json").read_text())
    valid = json.loads((folder / "eval-valid.json").read_text())
    assert valid["model"][valid["filter_seen"]]["NDCG@10"] == pytest.approx(best["value"], abs=1e-12)


def test_early_stopping(tmp_path):
    done = start(tmp_path / "run", "eval.patience=1", "train.epochs=200", "train.lr=0.1", "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    history = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line)["NDCG@10"] for line in history]
    assert len(values) < 200
    assert values[-1] <= max(values[:-1])


def test_a_budget_of_steps_ends_with_an_epoch_and_can_be_raised(tmp_path):
    """Test train.steps with 13 steps an epoch: 14 steps give two epochs, 60 steps more than train.epochs=4."""
    assert start(tmp_path / "run", "train.steps=14", "train.decay=linear").returncode == 0
    assert load_config(tmp_path / "run" / "config.yaml").train.epochs == 2
    _, history = final(tmp_path / "run")
    assert [row["step"] for row in history] == [13, 26]
    done = run("train.py", "--resume", tmp_path / "run", "train.steps=60", "train.epochs=4")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in final(tmp_path / "run")[1]] == [13, 26, 39, 52]


def test_options_of_training(tmp_path):
    """Train with bf16, clipping, warm-up, length groups, another loss, a learned temperature, other attention kinds."""
    done = start(
        tmp_path / "run",
        "train.autocast=bf16",
        "train.clip_norm=1.0",
        "train.warmup_steps=5",
        "train.group_by_length=true",
        "train.epochs=1",
        "loss.kind=cross_entropy",
        "model.attention=[{kind: bsa, block_size: 4}, {kind: softmax}]",
        "loss.label_smoothing=0.1",
        "model.head={kind: dot, learned_temperature: true, item_dropout: 0.1}",
        "data.protocol=temporal",
    )
    assert done.returncode == 0, done.stderr
    weights, _ = saved_weights(checkpoints(tmp_path / "run")[-1])
    assert 0.001 < weights["log_temperature"].abs() < 1
    assert "temporal" in (tmp_path / "run" / "report.md").read_text()


@pytest.fixture
def copy(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished[0], folder)
    return folder


def fails(done, *parts):
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_eval_takes_the_best_weights_after_a_crash_while_they_were_replaced(copy):
    """Evaluate a run killed between the two moves of the replacement: the old best/ has its temporary name."""
    assert run("eval.py", copy).returncode == 0
    before = json.loads((copy / "eval-test.json").read_text())
    assert before["weights"] == "best"
    (copy / "best").rename(copy / ".best.old")
    assert run("eval.py", copy).returncode == 0
    assert json.loads((copy / "eval-test.json").read_text()) == before


def all_finite(run):
    """Return whether all saved weights and moments of a run are finite and its state can be read."""
    saved, tensors = checkpoints(run), []
    for folder in saved:
        tensors.append({name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved_tensors(folder).items()})
        read_tensors(folder, tensors[-1])
    if (run / "best").exists():
        saved, tensors = [*saved, run / "best"], [*tensors, load_file(run / "best" / "model.safetensors")]
    for folder in saved:
        json.loads((folder / "state.json").read_text(), parse_constant=pytest.fail)
    return len(tensors) >= 1 and all(value.float().isfinite().all() for of in tensors for value in of.values())


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["train.batch_size=200"],  # one step an epoch: its loss is finite, its weights are not
        ["train.ema_decay=0.5", "train.batch_size=200"],
    ],
)
def test_a_diverged_run_ends_with_one_line_and_is_not_saved(tmp_path, options):
    folder = tmp_path / "run"
    done = start(folder, "train.lr=1e30", *options)
    fails(done, "error: ", "try a lower train.lr", f"{checkpoints(folder)[-1]} is kept")
    assert all_finite(folder)
    config = load_config(folder / "config.yaml")
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(TrainingError):
        train.train(config, tmp_path / "other", resume=False)


def test_a_signal_saves_nothing_that_is_not_finite(tmp_path, monkeypatch):
    """Send a signal before the third step, when the weights are infinite."""
    arguments = [ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, "train.lr=1e38", "--run", tmp_path / "run"]
    ended = terminated(monkeypatch, arguments, 4)
    assert ended.returncode == 2 and f"{checkpoints(tmp_path / 'run')[-1]} is kept" in ended.stderr, ended
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000000"] and all_finite(tmp_path / "run")


@pytest.mark.parametrize("file", [pytest.param(".metadata", marks=pytest.mark.slow), "__0_0.distcp"])
def test_a_flipped_byte_goes_back_to_the_checkpoint_before(finished, copy, file):
    reference, _ = finished
    before, last = checkpoints(copy)
    content = bytearray((last / file).read_bytes())
    content[-5] ^= 1
    (last / file).write_bytes(content)
    fails(run("train.py", "--resume", copy), f"{last / file}: damaged", f"resume from {before.name}")
    done = start(copy, "--resume", "auto")
    assert done.returncode == 0 and f"{last}: damaged checkpoint, renamed" in done.stdout, done.stderr
    assert final(copy) == final(reference)


def test_damaged_checkpoint_is_one_line(copy):
    weights = copy / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    fails(run("eval.py", copy), "best/model.safetensors: damaged")
    fails(run("train.py", "--resume", copy), "best/model.safetensors: damaged")
    last = sorted((copy / "checkpoints").iterdir())[-1]
    (last / "state.json").write_text("{")
    fails(run("train.py", "--resume", copy), "damaged", "remove that folder to resume from step-")


def test_damaged_config_of_a_run_is_one_line(copy):
    (copy / "config.yaml").write_text("name: [")
    fails(run("eval.py", copy), "config.yaml line")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["configs/absent.yaml"], ["absent.yaml", "No such file"]),
        (["configs/synthetic-hstu.yaml", "train.epocs=3"], ["train.epocs: unknown key, did you mean epochs?"]),
        (["configs/ml-100k-hstu.yaml", "data.path=/absent"], ["/absent"]),
        (["configs/synthetic-hstu.yaml", "data.format=ml-100"], ["ml-100"]),
        (
            ["configs/synthetic-hstu.yaml", "model.attention={kind: softmax, num_kv_heads: 3}"],
            ["num_kv_heads=3 does not divide model.num_heads=2"],
        ),
        (["--resume", "/absent"], ["/absent: no such folder"]),
        (["configs/synthetic-hstu.yaml", "device=cuda"], ["finds no GPU"]),
    ],
)
def test_bad_input_is_one_line(arguments, parts, tmp_path):
    if "device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    fails(
        run("train.py", *arguments, *(["--run", tmp_path / "run"] if "--resume" not in arguments else [])),
        *parts,
    )
    assert not (tmp_path / "run").exists()


def test_data_that_do_not_fit_are_one_line(copy, tmp_path):
    lines = tmp_path / "events.txt"
    lines.write_text("".join(f"{user} {item}\n" for item in range(9) for user in range(5)))
    base = [
        ROOT / "configs/synthetic-hstu.yaml",
        "data.format=lines",
        f"data.path={lines}",
        f"data.cache_dir={tmp_path}",
    ]
    fails(
        run("train.py", *base, "model.attention.time_bias=true", "--run", tmp_path / "run"),
        "model.attention.time_bias: events has no timestamps, set it to auto or false",
    )
    fails(
        run("train.py", *base, "model.attention=[{kind: dense}, {kind: indexer, index_time_bias: true}]"),
        "model.attention.1.index_time_bias: events has no timestamps",
    )
    fails(run("train.py", *base, "model.action_embedding=true"), "has no actions")
    fails(run("eval.py", copy, "data.synthetic={num_users: 50, num_items: 60}"), "the weights were trained with it")
    lines.write_text("")
    fails(run("train.py", *base), "events.txt")


def test_a_run_is_never_overwritten(copy):
    fails(start(copy), "already has a run")


def test_users_with_too_few_events_are_left_out_and_counted(tmp_path):
    lines = tmp_path / "events.txt"
    rows = [(user, item) for item in range(6) for user in range(30)] + [(100, 1)]
    lines.write_text("".join(f"{user} {item}\n" for user, item in rows))
    folder = tmp_path / "run"
    data_options = ["data.format=lines", f"data.path={lines}", f"data.cache_dir={tmp_path}"]
    done = start(folder, "data.synthetic=null", *data_options)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "result.json").read_text())["users"] == 30
    report = (folder / "report.md").read_text()
    assert "Left out of test: 1 user, fewer than two events." in report


@pytest.mark.parametrize(
    ("timed", "kind"),
    [(True, "dense"), (True, "indexer"), (False, "dense"), pytest.param(False, "indexer", marks=pytest.mark.slow)],
)
def test_time_biases_are_on_by_default_if_the_data_have_times(tmp_path, timed, kind):
    events = tmp_path / "events.csv"
    rows = [f"{user},{(user + place) % 9},{place}" for user in range(30) for place in range(6)]
    events.write_text("\n".join(["user,item,timestamp", *rows]) + "\n")
    folder = tmp_path / "run"
    data_options = ["data.format=csv", f"data.path={events}", f"data.cache_dir={tmp_path}", "data.synthetic=null"]
    data_options += [] if timed else ['data.columns={timestamp: ""}']
    done = start(folder, *data_options, "train.epochs=1", f"model.attention.kind={kind}")
    assert done.returncode == 0, done.stderr
    (attention,) = load_config(folder / "config.yaml").model.attention
    assert [getattr(attention, name) for name in attention.time_options()] == len(attention.time_options()) * [timed]
    weights = load_folder(folder / "best", "model")[0]["model"]
    tables = {"dense": ("attention.time_bias",), "indexer": ("attention.time_bias", "index_tables.time")}[kind]
    assert all(any(name.endswith(table) for name in weights) == timed for table in tables)
    assert run("eval.py", folder).returncode == 0
    result, again = (json.loads((folder / name).read_text()) for name in ("result.json", "eval-test.json"))
    assert again["model"] == result["model"]
    assert run("train.py", "--resume", folder).returncode == 0
