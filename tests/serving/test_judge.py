"""Test the evaluation of runs as served, and the kind rotatekv, which is trained for its codes."""

import json

import numpy as np
import pytest

from benchmarks import kv_cache
from tests.programs.test_train import run, start
from tests.serving.plain import make_config
from training.folder import read_judged, write_judged

ROTATE = {"kind": "rotatekv", "bits": 2, "sink_tokens": 3}
SMALL = ["--cache-bytes", str(2**24)]  # the default of 1 GiB takes longer to clear than to use
BSA = {"kind": "bsa", "block_size": 4, "block_counts": 2, "selection_group": 2, "window_size": 3}


def trained(folder, *overrides):
    """Return the folder of a small run of one epoch."""
    done = start(folder / "run", "model.num_heads=2", "train.epochs=1", *overrides)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def judged(folder, *options, name="eval-test.json"):
    pages = SMALL if "--serve" in options else []
    done = run("eval.py", folder, "device=cpu", *options, *pages)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / name).read_text())


def same(one, other):
    """Return whether both have the same values up to 1e-6."""
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == pytest.approx(other, abs=1e-6) if isinstance(one, float) else one == other


@pytest.mark.parametrize("attention", [{"kind": "dense"}, BSA, ROTATE])
def test_a_service_has_the_metrics_of_the_model(attention, tmp_path):
    """With slide 1, the windows of the service are those of the batches of evaluation."""
    folder = trained(tmp_path, "model.max_seq_len=12", f"model.attention={json.dumps(attention)}")
    whole = judged(folder)
    served = judged(folder, "--serve", "--slide", "1", name="eval-test-serve-slide=1.json")
    assert same(whole, served) and served["served"]["slide"] == 1
    assert served["served"]["cache"] == ("2bit" if attention is ROTATE else "float32")
    if attention["kind"] == "dense":
        packed = judged(folder, "--serve", "4bit", "--sink-tokens", "2", name="eval-test-serve-4bit-sink_tokens=2.json")
        assert packed["popularity"] == whole["popularity"]
        assert packed["served"]["bytes_per_user"] < packed["served"]["bytes_per_user_bf16"]
        compared(tmp_path)


def compared(out):
    """Run benchmarks/kv_cache.py on the run as if compare.py had trained it."""
    (out / "small").mkdir()
    folder = (out / "run").rename(out / "small" / "seed-1")
    for sinks in (0, 20):
        kv_cache.rank(folder, out, {"bits": 2, "sink_tokens": sinks})
    write_judged(folder, read_judged(folder) | {"history": np.load(out / "ranks" / "small+2bit+20sinks-1.npy")})
    rows = {row.name: row for row in kv_cache.table(out)}
    assert rows["small+2bit"].size < rows["small+2bit+20sinks"].size and rows["small+2bit"].size < rows["small"].size
    assert rows["small"].value == pytest.approx(rows["small+2bit+20sinks"].value)
    # Equal ranks in equal runs: no spread, although users and runs are resampled.
    same = rows["small+2bit+20sinks"]
    assert same.low == pytest.approx(1.0) and same.high == pytest.approx(1.0)
    kv_cache.plot(kv_cache.table(out), out / "plot.png")
    # A run that was interrupted has a result too.
    result = folder / "result.json"
    assert kv_cache.finished_runs(out / "small") == [folder]
    result.write_text(json.dumps(json.loads(result.read_text()) | {"finished": False}))
    assert kv_cache.finished_runs(out / "small") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slide", "2"], "--slide requires --serve"),
        (["--serve", "5bit"], "cache: expected one of auto, fp32"),
        (["--serve", "2bit", "--head-group", "4"], "must divide the number of heads"),
        (["--serve", "--slide", "1000"], "slide: expected 1 to"),
        (["--serve", "--cache-bytes", "100"], "cache_bytes: a window of"),
    ],
)
def test_refused(options, message, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "refused"
    if not folder.exists():
        folder.mkdir()
        trained(folder)
    done = run("eval.py", folder / "run", "device=cpu", *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_kind_refuses_heads_when_the_configuration_is_loaded():
    with pytest.raises(ValueError, match=r"the Hadamard transform needs .* D=16 or D=32"):
        make_config(ROTATE, embedding_dim=50)


@pytest.mark.parametrize("layout", [{}, {"layout": "targets", "num_targets": 6}])
def test_ranking_is_evaluated_event_by_event(tmp_path, layout):
    """If windows contain whole histories, the service has the metrics of evaluation's batches."""
    from tests.models.tasks.test_ranking import CONFIG

    path = tmp_path / "t.yaml"
    tree = CONFIG | {"model": CONFIG["model"] | {"max_seq_len": 82}, "train": CONFIG["train"] | {"epochs": 1}}
    tree["task"] = tree["task"] | layout
    path.write_text(json.dumps(tree))
    assert run("train.py", path, "--run", tmp_path / "run").returncode == 0
    whole = judged(tmp_path / "run")
    served = judged(tmp_path / "run", "--serve", name="eval-test-serve.json")
    assert served["model"] == pytest.approx(whole["model"], abs=1e-6)
    done = run("eval.py", tmp_path / "run", "--serve", "--split", "train")
    assert done.returncode == 2 and "in which every target has a history, got train" in done.stderr
