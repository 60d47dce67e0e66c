"""Test compare.py as a user runs it: resuming, failing runs, tables and files."""

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import compare
from cli.interrupt import Interrupts, Stopped
from experiments import runs
from experiments.runs import Job, run_all
from tests.programs.tiny import run_here, tiny
from tests.support.forked import Forked
from training import loop

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with plan.yaml; jobs run in this process, and `place.launched` has their names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny())
    write_plan()
    launched = []

    def launch(job, parallel):
        launched.append(job.name)
        return run_here(job)

    monkeypatch.setattr(runs, "launch", launch)
    return SimpleNamespace(launched=launched)


def write_plan(bsa="{model.attention.kind: bsa, model.attention.block_size: 8}", more=""):
    Path("plan.yaml").write_text(f"base: tiny.yaml\nseeds: [1, 2]\nsettings:\n  dense: {{}}\n  bsa: {bsa}\n{more}")


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = compare.main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def results(out="out"):
    return json.loads(Path(out, "comparison.json").read_text()), Path(out, "comparison.csv").read_text()


ALL = ["dense, seed 1", "bsa, seed 1", "dense, seed 2", "bsa, seed 2", "dense, speed", "bsa, speed"]


def test_stopped_and_started_again_repeats_no_finished_run(place, monkeypatch):
    set_lr = loop.set_lr

    def stopped_at_the_second_epoch(config, optimizer, step, steps):
        if config.seed == 1 and config.name == "bsa" and step >= steps // 2:
            raise Stopped(signal.SIGTERM)
        return set_lr(config, optimizer, step, steps)

    launch = runs.launch

    def killed(job, parallel):
        process = launch(job, parallel)
        if process.returncode:
            raise Stopped(signal.SIGINT)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_lr", stopped_at_the_second_epoch)
        patch.setattr(runs, "launch", killed)
        first = run("plan.yaml", "--out", "out")
    assert first.returncode == 130 and "To continue, give the same command again" in first.stdout
    assert place.launched == ALL[:2]
    finished = Path("out/dense/seed-1/result.json").stat().st_mtime_ns

    second = run("plan.yaml", "--out", "out")
    assert second.returncode == 0, second.stderr
    assert place.launched[2:] == ALL[1:]
    assert Path("out/dense/seed-1/result.json").stat().st_mtime_ns == finished
    assert json.loads(Path("out/bsa/seed-1/run.json").read_text())["command"]  # resumed, not restarted
    tree, table = results()

    third = run("plan.yaml", "--out", "out")
    assert place.launched[7:] == [] and results() == (tree, table)
    printed = third.stdout.splitlines()
    assert printed == second.stdout.splitlines()[-len(printed) :]
    assert max(map(len, printed)) <= 80
    assert any(line.lstrip().startswith("item-kNN ") for line in printed)

    # The same comparison in another folder gives the same figures.
    again = run("plan.yaml", "--out", "other", "--seeds", "1", "--no-speed")
    assert again.returncode == 0
    for one, other in zip(tree["settings"], results("other")[0]["settings"]):
        assert {name: values["by_seed"][:1] for name, values in one["metrics"].items()} == {
            name: values["by_seed"] for name, values in other["metrics"].items()
        }

    check_output(tree, table)
    check_existing_runs(place)


def check_output(tree, table):
    dense, bsa = tree["settings"]
    runs = [json.loads(Path(f"out/bsa/seed-{seed}/result.json").read_text()) for seed in (1, 2)]
    values = [result["model"][result["filter_seen"]]["NDCG@10"] for result in runs]
    row = bsa["metrics"]["NDCG@10"]
    assert row["by_seed"] == pytest.approx(values) and row["mean"] == pytest.approx(sum(values) / 2)
    assert row["ratio"] == pytest.approx(row["mean"] / dense["metrics"]["NDCG@10"]["mean"])
    assert row["low"] < row["ratio"] < row["high"] and row["p"] <= row["p_holm"] <= 1
    assert "model.attention.0.kind: dense -> bsa" in bsa["changes"] and dense["changes"] == []
    assert bsa["parameters"] > 0 and bsa["events_per_second"] > 0 and bsa["peak_memory_bytes"] > 2**20
    assert set(bsa["by_group"]) == {"events before the target", "training events of the target"}
    simple = tree["baselines"]["markov"]
    assert simple["ratio"] == pytest.approx(simple["mean"] / dense["metrics"]["NDCG@10"]["mean"])
    page = Path("out/report.html").read_text()
    assert "<td>item-kNN</td>" in page
    assert page.count("<svg") == 7 and "model.attention.0.kind: dense -&gt; bsa" in page
    assert not re.search(r"https?:|src=|@import|url\(", page)  # it loads nothing
    assert "nan" not in page and f"{row['low']:.3f} to {row['high']:.3f}" in page
    rows = list(csv.DictReader(io.StringIO(table)))
    assert {(x["setting"], x["metric"]) for x in rows} >= {("dense", "MRR"), ("bsa", "HR@10")}
    assert float(next(x for x in rows if (x["setting"], x["metric"]) == ("bsa", "NDCG@10"))["mean"]) == row["mean"]


def check_existing_runs(place):
    """Compare finished runs without a plan: a folder with several, a single run, and runs with themselves."""
    before = len(place.launched)
    done = run("--runs", "a=out/dense", "b=out/bsa/seed-1", "b=out/bsa/seed-2", "c=out/dense", "--out", "there")
    assert done.returncode == 0, done.stderr
    assert place.launched[before:] == ["a, speed", "b, speed", "c, speed"]
    _, b, c = results("there")[0]["settings"]
    separate = results()[0]["settings"][1]["metrics"]["MRR"]
    # p_holm depends on the number of p values.
    assert {**b["metrics"]["MRR"], "p_holm": None} == {**separate, "p_holm": None}
    same = c["metrics"]["NDCG@10"]
    assert (same["ratio"], same["low"], same["high"], same["p"]) == (1, 1, 1, 1)
    os.remove("out/bsa/seed-1/judged.npz")
    for arguments, message in (
        (["--runs", "a=out/dense", "b=nowhere"], "nowhere: no finished run in this folder or its subfolders"),
        (["--runs", "a=out/dense", "b=out/bsa"], "judged.npz: cannot be read: No such file"),
        (["--runs", "a=out/dense"], "expected at least two settings or runs to compare, got 1"),
    ):
        wrong = run(*arguments, "--out", "there")
        assert wrong.returncode == 2 and message in wrong.stderr


def test_a_failing_setting_is_named_and_the_others_finish(place):
    write_plan("{train.lr: 1e30, train.clip_norm: null}")
    done = run("plan.yaml", "--out", "out", "--seeds", "1")
    assert done.returncode == 2 and place.launched == ["dense, seed 1", "bsa, seed 1", "dense, speed"]
    assert "1 failed: bsa, seed 1: error: the loss is nan" in done.stderr
    assert "<dd>error: the loss is nan" in Path("out/report.html").read_text()
    (dense,), (failed,) = (results()[0][key] for key in ("settings", "failed"))
    assert dense["name"] == "dense" and failed["run"] == "bsa, seed 1"
    # Corrected under the same name: the existing run has another configuration.
    write_plan()
    other = run("plan.yaml", "--out", "out", "--seeds", "1")
    assert other.returncode == 2 and "out/bsa: has runs of another configuration (" in other.stderr
    assert "train.lr: 1e+30 -> 0.01" in other.stderr


def test_invalid_arguments(capsys):
    for arguments, message in (
        ([], "give a plan or --runs, and --out DIR"),
        (["plan.yaml", "--out", "x", "--seeds", "1,b"], "expected whole numbers like 1,2,3"),
        (["plan.yaml", "--out", "x", "--parallel", "0"], "expected a whole number of at least 1"),
        (["--out", "x", "--runs", "dense"], "expected NAME=FOLDER"),
    ):
        with pytest.raises(SystemExit) as ended:
            compare.main(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_parallel_jobs(tmp_path):
    """Run jobs in processes: all run although one fails, whose last line is reported."""
    code = {
        "good": "print('fine')",
        "bad": "import sys; print('no\\n\\nreason'); sys.exit(3)",
        "shot": "import os; os.abort()",
    }
    jobs = [Job(name, ["-I", "-S", "-c", text], tmp_path / f"{name}.log") for name, text in code.items()]
    with Interrupts() as interrupts:
        failed = run_all(jobs, interrupts, parallel=2)
    assert sorted(failed) == [("bad", "reason"), ("shot", "ended by SIGABRT")]
    assert (tmp_path / "good.log").read_text() == "fine\n"


def run_one(job):
    run_all([job], Interrupts())


def test_a_killed_comparison_ends_its_runs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    child = (
        f"import time; pipe = open({str(tmp_path / 'pipe')!r}, 'w'); print(1, file=pipe, flush=True); time.sleep(600)"
    )
    process = Forked(run_one, Job("x", ["-c", child], tmp_path / "log"))
    with (tmp_path / "pipe").open() as pipe:
        assert pipe.readline() == "1\n"
        process.kill()
        assert pipe.read() == ""  # end of file: the child has ended
    process.communicate()
