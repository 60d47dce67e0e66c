"""train.py over several processes that share each batch: the losses and metrics of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.scale_cases import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(case, processes) -> what tests/programs/scale_cases.py found."""
    out = tmp_path_factory.mktemp("scale")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for world in (1, 2, 4):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        command = [sys.executable, *launcher, "-m", "tests.programs.scale_cases", str(out), *CASES]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
    return lambda case, world: json.loads((out / f"{case}-{world}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one(trained, case, world):
    alone, shared = trained(case, 1), trained(case, world)
    assert len(alone["losses"]) >= 30 and alone["losses"][-1] < 0.9 * alone["losses"][0]
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
    assert shared["users"] == alone["users"]
