"""train.py under torchrun with sequences cut over two processes: the losses of one process, and one run folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.test_train import run

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "data.synthetic={num_users: 40, num_items: 50, mean_length: 30}",
    "model.max_seq_len=60",
    "model.embedding_dim=16",
    "model.dropout=0",
    "train.epochs=50",
    "train.lr=5e-3",
    "train.batch_size=40",
    "train.checkpoint_seconds=1000",
    "eval.patience=null",
    "eval.every=50",
    "threads=1",
    "device=cpu",
]
KINDS = {
    "softmax": ["model.attention={kind: ring, inner: softmax, num_kv_heads: 1}"],
    "hstu": [
        "model.attention={kind: ring, inner: hstu, position_bias: true, time_bias: true}",
        "model.rotary={position: true, time: true}",
    ],
}


def by_two(*arguments):
    """train.py in two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, str(ROOT / "train.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(kind, tmp_path):
    given = [ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, *KINDS[kind]]
    one = run("train.py", *given, "--run", tmp_path / "one")
    assert one.returncode == 0, one.stderr[-3000:]
    two = by_two(*given, "parallel.context=2", "--run", tmp_path / "two")
    assert two.returncode == 0, two.stderr[-3000:]
    alone, together = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(alone) == 50 and alone[-1] < 0.95 * alone[0]
    # An epoch has one step.
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert {"result.json", "report.md", "config.yaml", "best"} <= names and "ranks" not in names
    assert two.stdout.count("Report:") == 1


def test_the_number_of_processes_must_fit(tmp_path):
    done = run("train.py", ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, *KINDS["softmax"], "parallel.context=2")
    assert done.returncode == 2 and "torchrun --nproc-per-node 2" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.context=2"], "only model.attention.kind=ring"),
        (["parallel.context=2", "model.head={kind: mol}", *KINDS["hstu"]], "heads other than dot"),
        (["model.attention={kind: ring, inner: softmax, time_bias: true}"], "for inner=hstu"),
        (["model.attention={kind: ring, inner: hstu, dropout: 0.1}"], "for inner=softmax"),
    ],
)
def test_what_cannot_be_cut_is_refused(overrides, message):
    from models.config import ConfigError, load_config

    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / "configs/synthetic-hstu.yaml", overrides)
