"""Ring attention on GPUs over NCCL: errors against fp64, devices by rank, HSTU; the HSTU kernels on one GPU."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.operators.ring_on_gpus import CASES, HSTU_CASES
from tests.random.cases import ring_hstu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_hstu_kernels_against_reference(seed):
    ring_hstu.check("cuda", **ring_hstu.draw(random.Random(seed), False))


@pytest.mark.multigpu
@pytest.mark.parametrize("case", [*CASES, *HSTU_CASES, "heads", "captured"])
def test_two_gpus(case):
    """Every form over NCCL, at the bounds of the errors and at no more than twice those of SDPA on one GPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.operators.ring_on_gpus", case], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
