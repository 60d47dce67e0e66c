"""Test the files of eval.py and the output of train.py and eval.py: complete, readable, no other file overwritten."""

import io
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import eval as evaluation
from cli import terminal as printing
from cli.environment import wait_asleep
from tests.programs.test_train import run

CONFIG = """
name: t
seed: 1
device: cpu
threads: 1
data: {format: csv, path: PATH/events.csv, protocol: leave_one_out, cache_dir: PATH/cache}
model: {block: hstu, max_seq_len: 12, embedding_dim: 16, num_layers: 1, num_heads: 2, attention: {kind: dense}}
loss: {num_negatives: 4}
train: {epochs: 2, batch_size: 16, checkpoint_seconds: 1000}
"""


ROOT = Path(__file__).resolve().parents[2]
ODD = "a [/b] [red] [/]é/run"


def events(users=range(30), first=0):
    """Return a small CSV file in which each user goes through the items in steps of one or two."""
    rows = [(user, (user * 7 + k * (1 + user % 2)) % 20, first + 1000 * k + user) for user in users for k in range(8)]
    return "".join(f"u{user},i{item:02d}é,{when}\n" for user, item, when in rows)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return a folder with events.csv, run.yaml and a finished run; its name is markup."""
    place = tmp_path_factory.mktemp("made")
    (place / "events.csv").write_text("user,item,timestamp\n" + events())
    (place / "run.yaml").write_text(CONFIG.replace("PATH", str(place)))
    done = run("train.py", place / "run.yaml", "--run", place / ODD)
    assert done.returncode == 0, done.stderr
    assert ODD in done.stdout
    return place


@pytest.fixture
def place(finished_run, tmp_path, monkeypatch):
    shutil.copytree(finished_run / ODD, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments, says):
    done = run("eval.py", "run", *arguments)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_files_are_not_overwritten(finished_run, place):
    source = (finished_run / "events.csv").read_bytes()
    refused("--predict", finished_run / "events.csv", says="this is data.path")
    refused("--predict", finished_run / "events.csv", "--overwrite", says="this is data.path")
    os.link(finished_run / "events.csv", place / "hard.csv")
    refused("--predict", "hard.csv", "--overwrite", says="this is data.path")
    (place / "mine.csv").write_text("mine")
    (place / "mine.parquet").write_text("mine")
    for name in ("mine.csv", "mine.parquet"):
        refused("--predict", name, says="eval.py did not write the existing file; --overwrite replaces it")
        assert (place / name).read_text() == "mine"
        assert run("eval.py", "run", "--predict", name, "--overwrite").returncode == 0
        assert run("eval.py", "run", "--recommend", name).returncode == 0  # a table that eval.py has written
    (place / "full.csv").symlink_to("/dev/full")
    os.mkfifo(place / "pipe.csv")
    for name in ("full.csv", "pipe.csv"):
        refused("--predict", name, "--overwrite", says="is not a regular file")
    for option in ("--predict", "--recommend", "--export-items"):
        refused(option, "a\udcff.csv", says="a\\udcff.csv: the path is not valid UTF-8")
    for main in (run("train.py", finished_run / "run.yaml", "--run", "a\udcff"), run("eval.py", "a\udcff")):
        assert main.returncode == 2 and "a\\udcff: the path is not valid UTF-8" in main.stderr
    refused("--predict", "x" * 300 + ".csv", says="File name too long")
    refused("--predict", "top.txt", says=".parquet or .csv")
    assert (finished_run / "events.csv").read_bytes() == source
    assert stat.S_ISFIFO((place / "pipe.csv").stat().st_mode)


def test_a_full_disk_leaves_the_earlier_table(place):
    assert run("eval.py", "run", "--recommend", "top.csv").returncode == 0
    before = (place / "top.csv").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # items.npy has 1,408 bytes, so that an export fails at items.parquet.
    for limit, words in ((500, ("--recommend", "top.csv", "--top-k", 9)), (1500, ("--export-items", "items"))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            done = run("eval.py", "run", *words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert done.returncode == 2 and f"{words[1]}: cannot be written: " in done.stderr
        assert "File too large" in done.stderr
    assert (place / "top.csv").read_bytes() == before
    assert sorted(path.name for path in place.iterdir()) == ["run", "top.csv"]


def test_items_are_exported_with_their_ids(place):
    import numpy as np
    import polars as pl

    assert run("eval.py", "run", "--export-items", "items").returncode == 0
    vectors, ids = (np.load(place / "items" / name, allow_pickle=False) for name in ("items.npy", "item_ids.npy"))
    assert vectors.shape == (20, 16) and np.allclose((vectors**2).sum(1), 1, atol=1e-5)
    frame = pl.read_parquet(place / "items" / "items.parquet")
    assert frame["item"].to_list() == list(ids) and np.array_equal(np.array(frame["vector"].to_list()), vectors)
    refused("--export-items", "items", says="there is an earlier export; --overwrite replaces it")
    assert run("eval.py", "run", "--export-items", "items", "--overwrite").returncode == 0
    (place / "items" / "mine").write_text("mine")
    refused("--export-items", "items", "--overwrite", says="is not an export of eval.py")
    refused("--export-items", "more", "--sampled", "3", says="--sampled evaluates a split")


class Gone(io.StringIO):
    """Standard output whose reader closes the pipe after the first line."""

    def write(self, text):
        if self.tell():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_closed_pipe_loses_nothing(place, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone())
    assert evaluation.main(["run", "--predict", "top.csv"]) == 0
    assert json.loads((place / "run" / "eval-test.json").read_text())["users"] == 30
    assert (place / "top.csv").stat().st_size > 100


def test_standard_output_on_a_full_disk(place, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert evaluation.main(["run"]) == 2
        monkeypatch.undo()
    assert "standard output cannot be written: No space left" in capsys.readouterr().err
    assert (place / "run" / "eval-test.json").exists()


def program(*arguments, environment=None, **files):
    """Run a program in a new process; return (its exit status, the lines of its standard error)."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=600, **files)
    return done.returncode, done.stderr.splitlines()


def test_closed_standard_output(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)  # as in a new Python
    assert evaluation.main(["run"]) == 2
    monkeypatch.undo()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: standard output cannot be written: Bad file descriptor; all files are complete"


@pytest.mark.slow
def test_closed_standard_output_loses_nothing(place):
    """Check that no file that is opened as descriptor 1 gets the output."""
    (place / "run" / "eval-test.json").unlink(missing_ok=True)
    status, errors = program(ROOT / "eval.py", "run", preexec_fn=lambda: os.close(1))
    assert status == 2 and len(errors) == 1
    assert "standard output cannot be written: Bad file descriptor; all files are complete" in errors[0]
    assert json.loads((place / "run" / "eval-test.json").read_text())["users"] == 30


@pytest.mark.parametrize("script", ["train.py", "eval.py", "compare.py", "tune.py", "serve.py"])
def test_help_on_a_full_disk_is_one_line(script):
    with open("/dev/full", "w") as full:
        status, errors = program(ROOT / script, "--help", stdout=full)
    assert (status, errors) == (2, ["error: standard output cannot be written: No space left on device"])
    status, errors = program(ROOT / script, "--version", preexec_fn=lambda: os.close(1))
    assert (status, errors) == (2, ["error: standard output cannot be written: Bad file descriptor"])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("POLARS_MAX_THREADS", "0", "POLARS_MAX_THREADS in the environment: expected 1 to 1,024, got '0'"),
        ("POLARS_MAX_THREADS", "many", "got 'many'"),
        ("POLARS_MAX_THREADS", "100000000", "got '100000000'"),
        ("OMP_NUM_THREADS", "4,x", "OMP_NUM_THREADS in the environment: expected 1 to 1,024, got '4,x'"),
        ("TORCH_LOGS", "nonsense", "torch cannot be imported: Invalid log settings: nonsense"),
        ("PYTORCH_JIT", "x", "torch cannot be imported: Unknown setting of PYTORCH_JIT"),
    ],
)
def test_an_environment_that_libraries_refuse_is_one_line(name, value, says):
    status, errors = program(ROOT / "eval.py", "run", environment={name: value})
    assert status == 2 and len(errors) == 1 and errors[0].startswith("error: ") and says in errors[0], errors


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_sleep_unless_the_environment_says_otherwise(environment, count):
    with patch.dict(os.environ, environment, clear=True):
        wait_asleep()
        assert os.environ.get("GOMP_SPINCOUNT") == count


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_of_a_narrow_encoding(finished_run, tmp_path, monkeypatch, encoding):
    folder = shutil.copytree(finished_run / ODD, tmp_path / ODD)
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert evaluation.main([str(folder)]) == 0
    out.flush()
    assert (
        b"Written: " in out.buffer.getvalue() and "[/]é".encode(encoding, "backslashreplace") in out.buffer.getvalue()
    )


@pytest.mark.parametrize("width", [60, 80])
def test_tables_on_narrow_terminals(place, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    done = run("eval.py", "run", "--sampled", "15")
    table = done.stdout[done.stdout.index("t: test") :]
    lines = table[: table.index("Written")].splitlines()
    assert max(map(len, lines)) <= width
    result = json.loads((place / "run" / "eval-test.json").read_text())
    for values in (result["model"]["history"], result["popularity"]["none"], result["sampled"]):
        numbers = [f"{values[name]:.4f}" for name in ("HR@1", "HR@10", "NDCG@10", "MRR")]
        assert any(all(number in line for number in numbers) for line in lines)
    assert "HR@50" not in table  # with twenty items, HR@50 has no meaning
    assert "Written: run/eval-test.json" in done.stdout.splitlines()


def test_progress_in_a_pipe_and_quiet(place, monkeypatch):
    monkeypatch.setattr(printing, "EVERY", 0.0)
    done = run("train.py", "--resume", "run", "train.epochs=3")
    assert done.returncode == 0, done.stderr
    for part in ("epoch 3/3: ", "evaluating on valid: ", "evaluating on test: ", "evaluating the baseline on valid: "):
        assert part in done.stdout
    done = run("eval.py", "run", "--recommend", "top.csv", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bars_on_a_terminal(monkeypatch):
    """Draw bars within bars, and lines between them, which rich's redirection of sys.stdout would send back to rich."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(printing.Output, "isatty", lambda self: True)
    monkeypatch.setattr(printing.Bar, "due", lambda self: True)
    terminal = printing.Terminal()
    with terminal.bar(3, unit="steps") as bar:
        for step in range(3):
            bar.show(step, "epoch 1/1", "loss 1.0")
            assert list(terminal.track(iter("ab"), 2, "evaluating")) == ["a", "b"]
            terminal.say(f"a line {step}")
    assert terminal.live is None
    assert all(part in out.getvalue() for part in ("a line 0", "a line 2", "epoch 1/1", "evaluating", "loss 1.0"))


def test_an_unknown_matplotlib_backend_loses_no_report():
    plot = "from training.plots import Series, curves; print(curves([Series(0, [(1, 1.0)])], 'epoch', 'loss'))"
    command = [sys.executable, "-c", plot]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MPLBACKEND": "nonsense"}, capture_output=True, text=True
    )
    assert ended.returncode == 0 and ended.stdout.startswith("<svg"), ended.stderr


def test_the_report_says_where_it_comes_from(place):
    assert run("train.py", "--resume", "run", "train.epochs=3").returncode == 0
    report = (place / "run" / "report.md").read_text()
    manifest = json.loads((place / "run" / "run.json").read_text())
    for part in (manifest["commit"], manifest["created"], "- command: `", "95% intervals", "coverage", "next event"):
        assert part in report
    assert "HR@50" not in report and "0.0 minutes" not in report
    result = json.loads((place / "run" / "result.json").read_text())
    low, high = result["intervals"]["NDCG@10"]
    assert low < result["model"]["history"]["NDCG@10"] < high
    assert 0 < result["lists"]["coverage"] <= 1 and len(result["lists"]["samples"]) == 3
    assert result["plotted_baseline"]["HR@10"] > 0
    assert "horizontal line: popularity](metric.svg)" in report


def test_tensorboard_has_prefixes_and_rates(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(place / "run" / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/grad_norm", "train/events_per_second", "valid/NDCG@10"} <= tags
    assert not [tag for tag in tags if "/" not in tag]


def test_more_epochs_by_an_override(place):
    assert run("train.py", "--resume", "run", "train.epochs=4").returncode == 0
    assert len((place / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert "epochs: 4" in (place / "run" / "config.yaml").read_text()
    assert run("train.py", "--resume", "run").returncode == 0 and run("eval.py", "run").returncode == 0
    config = place / "run" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.01"))
    done = run("train.py", "--resume", "run", "train.epochs=5")
    assert done.returncode == 2 and "train.lr: 0.001 -> 0.01" in done.stderr


def test_a_dry_run_leaves_nothing(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [f"data.path={finished_run / 'events.csv'}", f"data.cache_dir={tmp_path / 'cache'}", "--dry-run"]
    done = run("train.py", finished_run / "run.yaml", *arguments)
    assert done.returncode == 0 and "A step takes about" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_bf16_on_a_cpu(finished_run, tmp_path):
    """Train heads and serve under autocast on a CPU."""
    base = [
        finished_run / "run.yaml",
        f"data.path={finished_run / 'events.csv'}",
        f"data.cache_dir={tmp_path}",
        "train.autocast=bf16",
    ]
    mol = "model.head={kind: mol, query_components: 2, item_components: 2, component_dim: 8, gate_hidden_dim: 8}"
    for name, more in (("mol", mol), ("learned", "model.head={kind: dot, learned_temperature: true}")):
        done = run("train.py", *base, "train.epochs=1", "model.attention.kind=rotatekv", more, "--run", tmp_path / name)
        assert done.returncode == 0, done.stderr
        done = run("eval.py", tmp_path / name, "--serve", "--cache-bytes", str(2**24))
        assert done.returncode == 0, done.stderr
    done = run("eval.py", tmp_path / "mol", "--export-items", tmp_path / "items")
    assert done.returncode == 2 and "products with one vector per item" in done.stderr


def test_a_validation_window_without_users(finished_run, tmp_path):
    """Check a window with only new users: the last weights are evaluated, the run resumes, patience is refused."""
    rows = [f"a{user},i{k % 9},{1000 * k + user}" for user in range(20) for k in range(9)]
    rows += [f"n{user},i{user % 9},{20_000 + user}" for user in range(20)]  # the validation window
    rows += [f"a{user},i{user % 9},{30_000 + user}" for user in range(20)]
    (tmp_path / "t.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    arguments = [finished_run / "run.yaml", f"data.path={tmp_path / 't.csv'}", f"data.cache_dir={tmp_path}"]
    arguments += ["data.protocol=temporal", "data.valid_fraction=0.09", "data.test_fraction=0.09"]
    done = run("train.py", *arguments, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (
        "No user with a history has an event in the validation window" in (tmp_path / "run" / "report.md").read_text()
    )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["epoch"] == 2
    assert run("train.py", "--resume", tmp_path / "run").returncode == 0
    done = run("train.py", *arguments, "eval.patience=1", "--run", tmp_path / "other")
    assert done.returncode == 2 and "eval.patience: there is no validation split" in done.stderr


def test_impossible_requests_fail_at_once(finished_run, tmp_path):
    base = [finished_run / "run.yaml", f"data.path={finished_run / 'events.csv'}", f"data.cache_dir={tmp_path}"]
    for override, says in (
        ("threads=4096", "threads: 4096 on a machine of"),
        (
            "model=small",
            "model: expected a mapping with keys like block, max_seq_len, embedding_dim, num_layers, got 'small'",
        ),
        ("eval.best_metric=HR@50", "eval.best_metric: HR@50 is 1 for any model of 20 items"),
    ):
        done = run("train.py", *base, override, "--run", tmp_path / "run")
        assert done.returncode == 2 and says in done.stderr, done.stderr
    done = run("train.py", *base, "train.compile=true", "model.attention.kind=htree", "--run", tmp_path / "run")
    assert done.returncode == 2 and "does not finish with htree on a CPU" in done.stderr
    assert not (tmp_path / "run").exists()
