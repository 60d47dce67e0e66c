"""Follow a user from a CSV file to recommendations, including mistakes on the way."""

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys

import pytest

import hstu_sparse
from cli.interrupt import Interrupts, Stopped
from cli.program import run_program
from models.attention import ATTENTION
from tests.programs.test_outputs import CONFIG, events
from tests.programs.test_train import ROOT, final, run
from training import ending, loop, setup


def interrupted(monkeypatch, place, name, call):
    """Send SIGINT when `name` of an object is called for the `call`-th time."""
    whole, calls = getattr(place, name), []

    def counted(*arguments, **more):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*arguments, **more)

    monkeypatch.setattr(place, name, counted)


def test_the_story(tmp_path, monkeypatch):
    import polars as pl

    monkeypatch.chdir(tmp_path)
    (tmp_path / "events.csv").write_text("user,item,timestamp\n" + events())
    (tmp_path / "run.yaml").write_text(CONFIG.replace("PATH", "."))
    assert run("train.py", "run.yaml", "--run", "whole").returncode == 0
    layers = ", ".join(f"{{kind: {kind}}}" for kind in ATTENTION)
    every = [f"model.attention=[{layers}]", f"model.num_layers={len(ATTENTION)}", "train.epochs=1"]
    done = run("train.py", "run.yaml", *every, "--run", "every-kind")
    assert done.returncode == 0, done.stderr

    # Interrupted while the data are prepared, in the first epoch, in its evaluation, and at the end.
    stops = (
        (setup, "open_data", 1, "preparing the data. To start, give the same command again"),
        (loop, "set_lr", 2, "training. Saved at step 2 of 4. To continue: python train.py --resume run"),
        (loop.ProgressBatches, "epoch", 1, "training. Saved at step 2 of 4. To continue"),
        (ending, "judge", 1, "evaluating; all epochs are saved. To evaluate: python train.py --resume run"),
    )
    arguments = ("run.yaml", "--run", "run")
    for place, name, call, doing in stops:
        with monkeypatch.context() as patch:
            interrupted(patch, place, name, call)
            done = run("train.py", *arguments)
        assert done.returncode == 130 and f"Stopped while {doing}" in done.stdout, (name, done.stdout, done.stderr)
        if name != "open_data":
            arguments = ("--resume", "run")
    assert run("train.py", *arguments).returncode == 0
    assert final(tmp_path / "run") == final(tmp_path / "whole")

    # Recommend for all users, for some, and for one that the run has never seen.
    assert run("eval.py", "run", "--recommend", "all.csv", "--top-k", 3).returncode == 0
    top = pl.read_csv("all.csv")
    assert top.columns == ["user", "rank", "item", "score"] and len(top) == 3 * 30
    seen = pl.read_csv("events.csv").group_by("user").agg(pl.col("item"))
    listed = top.join(seen, on="user", suffix="_seen")
    assert not any(row["item"] in row["item_seen"] for row in listed.iter_rows(named=True))
    (tmp_path / "users.txt").write_text("u3\nu1\n")
    assert run("eval.py", "run", "--recommend", "two.parquet", "--users", "users.txt", "--top-k", 3).returncode == 0
    two = pl.read_parquet("two.parquet")
    assert two["user"].to_list() == ["u3"] * 3 + ["u1"] * 3
    assert two.filter(pl.col("user") == "u3")["item"].to_list() == top.filter(pl.col("user") == "u3")["item"].to_list()
    (tmp_path / "users.txt").write_text("u3\nnobody\n")
    done = run("eval.py", "run", "--recommend", "two.parquet", "--users", "users.txt")
    assert done.returncode == 2 and "1 of 2 users are not in the data: nobody" in done.stderr
    history = (tmp_path / "events.csv").read_text().splitlines()
    rows = [row.replace("u3,", "new,") for row in history if row.startswith("u3,")]
    (tmp_path / "new.csv").write_text("\n".join([history[0], *rows, "new,unheard-of,5"]) + "\n")

    # Without the raw file, the prepared copy is used; without both, all that needs no data still works.
    (tmp_path / "events.csv").rename("moved.csv")
    done = run("eval.py", "run")
    assert done.returncode == 0 and "using the prepared copy of the run's data" in done.stdout
    (tmp_path / "cache").rename("gone")
    done = run("eval.py", "run")
    assert done.returncode == 2 and "--history FILE" in done.stderr and "--init-from" in done.stderr
    assert run("eval.py", "run", "--recommend", "new-top.csv", "--history", "new.csv", "--top-k", 3).returncode == 0
    last = str(max(int(row.rpartition(",")[2]) for row in history[1:]))
    at = ("--at", last, "--top-k", 3)
    assert run("eval.py", "run", "--recommend", "new-top.csv", "--history", "new.csv", *at).returncode == 0
    new = pl.read_csv("new-top.csv")
    assert set(new["user"]) == {"new"}
    assert new["item"].to_list() == top.filter(pl.col("user") == "u3")["item"].to_list()

    # With rows appended to the data, the run is not evaluated on them silently, and training continues.
    grown = (tmp_path / "moved.csv").read_text() + events(range(30, 40), 10**6).replace("i01", "fresh")
    (tmp_path / "events.csv").write_text(grown)
    done = run("eval.py", "run")
    assert done.returncode == 2 and "trained on other data than" in done.stderr
    done = run("eval.py", "run", "--data", "events.csv")
    assert done.returncode == 0 and "1 items are not known to the trained model" in done.stdout
    done = run("train.py", "run.yaml", "--init-from", "run", "--run", "warm", "train.epochs=1", "train.lr=1e-30")
    assert done.returncode == 0 and "with the rows of 20 of 21 items" in done.stdout
    done = run("train.py", "run.yaml", "--init-from", "run", "--run", "other", "model.embedding_dim=32")
    assert done.returncode == 2 and "another model, embedding.position does not fit" in done.stderr


def test_protocol_all_recommends_after_the_last_event(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "events.csv").write_text("user,item,timestamp\n" + events())
    (tmp_path / "run.yaml").write_text(CONFIG.replace("PATH", "."))
    assert run("train.py", "run.yaml", "--run", "run", "data.protocol=all").returncode == 0
    done = run("eval.py", "run", "--recommend", "all.csv")
    assert done.returncode == 0 and "for 30 users" in done.stdout


def test_signals():
    with pytest.raises(Stopped), Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        ctypes.CDLL(None).usleep(0)
    with Interrupts() as interrupts:
        with pytest.raises(Stopped) as stopped, interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            reached = interrupts.signal == signal.SIGINT  # Stopped is raised only at the end of the block
        assert reached and stopped.value.number == signal.SIGINT


def test_garbage_is_collected_while_a_program_works():
    """Turn garbage collection off first, as `parse_early` does."""
    gc.disable()
    try:
        status = run_program(lambda _: None if gc.isenabled() else pytest.fail("garbage collection is off"))
    finally:
        gc.enable()
        gc.unfreeze()
    assert status == 0


def test_a_signal_after_the_end_is_not_reported_as_stopped_while_starting():
    code = """
import os, signal
from cli.interrupt import Interrupts, leave
signal.signal(signal.SIGTERM, leave)
with Interrupts():
    pass
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


STUCK = """
import ctypes
from cli.interrupt import Interrupts

with Interrupts() as interrupts:
    interrupts.stage = "counting"
    # One call in C, which sends the signal to this process and takes a minute.
    ctypes.CDLL(None).system(b"kill -TERM $PPID; exec sleep 60 > /dev/null 2>&1")
"""


def test_a_signal_ends_a_library_call_that_does_not_return():
    ended = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGTERM and "Stopped while counting" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("train.py", ["--help"], "--resume"),
        ("eval.py", ["--help"], "--recommend"),
        ("eval.py", [], "give the folder of a run"),
        ("train.py", [], "give a config"),
        ("train.py", ["ml-100k-hstu"], "did you mean"),
        ("train.py", ["c.yaml", "--dryrun"], "unrecognized arguments: --dryrun, did you mean --dry-run?"),
        ("train.py", ["c.yaml", "--train.epochs=2"], "did you mean train.epochs=2?"),
        ("train.py", ["--version"], f"hstu_sparse {hstu_sparse.__version__}, commit "),
        ("eval.py", ["run", "--top-k", "0"], "at least 1"),
        ("eval.py", ["run", "--users", "x"], "--users requires --recommend"),
    ],
)
def test_arguments_are_checked_before_slow_imports(program, arguments, says, monkeypatch, capfd):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            for slow in ("torch", "rich", "polars", "pydantic"):
                patch.setitem(sys.modules, slow, None)  # an import of it fails
            patch.setattr(sys, "argv", [program, *arguments])
            runpy.run_path(str(ROOT / program), run_name="__main__")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out = capfd.readouterr()
    assert says in out.out + out.err and "Traceback" not in out.err
