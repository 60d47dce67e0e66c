"""train.py over several processes: the losses and metrics of one process, also when ranks are killed on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.scale_cases import CASES

ROOT = Path(__file__).resolve().parents[2]


def launch(world, out, *cases, restarts=0, kill=None, more=None):
    """What tests/programs/scale_cases.py prints in `world` processes; an error when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {} if kill is None else {"SCALE_KILL": kill}
    environment |= {} if more is None else {"SCALE_CASES": str(more)}
    out.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    launcher += ["--max-restarts", str(restarts)]
    command = [sys.executable, *(launcher if world > 1 else []), "-m", "tests.programs.scale_cases", str(out), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def found(out, case, world):
    return json.loads((out / f"{case}-{world}.json").read_text())


def check(shared, alone):
    count = len(shared["losses"])  # a run that was gone on with has the last steps
    assert shared["losses"] == pytest.approx(alone["losses"][-count:], rel=1e-4)
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
    assert shared["users"] == alone["users"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("scale")
    launch(1, out, *CASES)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_as_one(alone, world):
    launch(world, alone, *CASES)
    for case in CASES:
        one = found(alone, case, 1)
        assert len(one["losses"]) >= 30 and one["losses"][-1] < 0.9 * one["losses"][0], case
        check(found(alone, case, world), one)


@pytest.mark.apart
@pytest.mark.parametrize(("case", "kill"), [("sasrec-row-whole", "1:step:14"), ("bsa-column-mixed", "0:save:9")])
def test_a_killed_rank_changes_nothing(alone, tmp_path, case, kill):
    """SIGKILL of one rank, between two steps or within a checkpoint; torchrun starts both again."""
    errors = launch(2, tmp_path, f"{case}:resume:train.checkpoint_seconds=0", restarts=1, kill=kill)
    assert errors.count("error: ") == errors.count("error: another process of this run was lost") <= 1
    resumed = found(tmp_path, case, 2)
    assert 0 < len(resumed["losses"]) < 32
    check(resumed, found(alone, case, 1))


@pytest.mark.apart
def test_resumed_on_other_ranks_and_shardings(alone, tmp_path):
    case = "hstu"
    for world, epochs, kind in ((2, 2, "row_wise"), (1, 5, "column_wise"), (2, 8, "table_wise")):
        launch(world, tmp_path, f"{case}:resume:train.epochs={epochs}:parallel.embedding={kind}")
    check(found(tmp_path, case, 2), found(alone, case, 1))


@pytest.mark.slow
def test_two_ranks_judge_a_run(alone):
    run = alone / "hstu-row-fused-1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += ["eval.py", str(run), "--predict", str(alone / "lists.csv"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    judged, trained = (json.loads((run / name).read_text()) for name in ("eval-test.json", "result.json"))
    assert judged["users"] == 37
    for how, metrics in trained["model"].items():
        assert judged["model"][how] == pytest.approx(metrics, rel=1e-4)
    assert len((alone / "lists.csv").read_text().splitlines()) > 300
