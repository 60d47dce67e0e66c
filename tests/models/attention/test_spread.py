"""Check attention with heads divided over ranks (gloo), the choice of `context_by`, and its errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.errors import ConfigError
from models.attention import spread
from tests.models.attention import heads_cases
from tests.operators.distributed import run_ranks
from training.config import load_config

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs/synthetic-hstu.yaml"


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_equals_one_process(world):
    ranks = run_ranks(heads_cases.all_of_rank, world, world)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    for case in heads_cases.cases(world):
        whole = heads_cases.results(case)
        # Outputs leave the model in fp32, and so do the gradients that come in.
        heads_cases.assert_as_one(case, [rank[case] for rank in ranks], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.multigpu
def test_every_kind_over_nccl():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.models.attention.heads_cases"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


RING = "model.attention={kind: ring}"


@pytest.mark.parametrize(
    ("overrides", "way"),
    [
        (["parallel.context=2"], "heads"),
        (["parallel.context=2", RING], "heads"),
        (["parallel.context=3", RING], "ring"),  # of two heads
        (["parallel.context=2", RING, "parallel.context_by=ring"], "ring"),
    ],
)
def test_auto_is_heads_where_they_can_be_divided(overrides, way):
    assert spread.context_by(load_config(CONFIG, overrides)) == way


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.context=3"], r"context_by=heads: model\.num_heads=2 must be a multiple of parallel\.context=3"),
        (["parallel.context_by=ring"], r"context_by=ring: model\.attention\.kind=dense supports heads"),
        (["model.attention={kind: softmax, num_kv_heads: 1}"], r"num_kv_heads=1 must be a multiple of"),
        (
            ["model.attention={kind: rotatekv, head_group: 2}"],
            r"head_group=2 does not divide the heads of a rank, 1 with",
        ),
        (["parallel.context=3", RING, "parallel.context_by=heads"], r"model\.num_heads=2 must be a multiple"),
        (["model.head={kind: mol}"], r"parallel\.context=2 is not supported by model\.head\.kind=mol"),
    ],
)
def test_attention_that_cannot_be_divided_raises(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, ["parallel.context=2", *overrides])


def test_a_part_by_heads_has_consecutive_tokens():
    batch = heads_cases.batch_of("dense")
    parts = []
    for rank in range(3):
        ranks = heads_cases.ranks_of(rank, 1)
        ranks.context, ranks.by_heads = 3, True
        parts.append(ranks.cut(batch))
    assert torch.equal(torch.cat([part.cut.index for part in parts]), torch.arange(batch.num_tokens))
    assert [part.num_tokens for part in parts] == [9, 9, 10] == list(parts[0].cut.tokens)
    assert parts[1].seq_offsets.tolist() == [0, 0, 0, 9, 9, 9]
    assert parts[2].positions.tolist() == [9, 10, 11, 0, 0, 1, 2, 3, 4, 5]
