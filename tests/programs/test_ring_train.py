"""Test train.py under torchrun with sequences divided between two processes, by a ring and by heads.

The losses are those of one process, and there is one run folder.
"""

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
    "train.epochs=8",
    "train.lr=3e-2",
    "train.batch_size=40",
    "train.checkpoint_seconds=1000",
    "eval.patience=null",
    "eval.every=8",
    "threads=1",
    "device=cpu",
]
KINDS = {
    "softmax": ["model.attention={kind: ring, inner: softmax, num_kv_heads: 1}"],
    "hstu": [
        "model.attention={kind: ring, inner: hstu, position_bias: true, time_bias: true}",
        "model.rotary={position: true, time: true}",
    ],
    "indexer": [
        "model.attention={kind: indexer, num_kv_heads: 2, top_k: 8, warmup_steps: 5}",
        "data.features.events={calendar: [hour]}",
    ],
}
# The options of two processes, and those with which the run is resumed after half of its epochs, by two or by one.
TWO = {
    "softmax": (["parallel.context=2"], None),  # by a ring, since two ranks cannot divide its key head
    "hstu": (["parallel.context=2", "parallel.context_by=ring"], ["parallel.context=2", "parallel.context_by=heads"]),
    "indexer": (["parallel.context=2"], ["parallel.context=1"]),
}
HALF, WHOLE = "train.epochs=4", "train.epochs=8"


# Runs train.py for each list of arguments in a file, in one process, since each start of Python takes seconds.
EACH = """
import json, runpy, sys
for arguments in json.load(open(sys.argv[1])):
    sys.argv = ["train.py", *arguments]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise
"""


def by_two(folder, calls):
    """Run train.py in two processes for each list of arguments."""
    (folder / "each.py").write_text(EACH)
    (folder / "calls.json").write_text(json.dumps([[str(argument) for argument in call] for call in calls]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, str(folder / "each.py"), str(folder / "calls.json")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_as_one(tmp_path):
    calls = {kind: [ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, *KINDS[kind]] for kind in KINDS}
    together, alone = [], []
    for kind, (first, then) in TWO.items():
        folder = ["--run", tmp_path / f"{kind}-two"]
        together.append([*calls[kind], *first, WHOLE if then is None else HALF, *folder])
        if then is not None:
            resumed = [*calls[kind], *then, WHOLE, *folder, "--resume", "auto"]
            (together if "parallel.context=2" in then else alone).append(resumed)
    two = by_two(tmp_path, together)
    assert two.returncode == 0, two.stderr[-3000:]
    assert two.stdout.count("Report:") == len(together)
    for call in alone:
        assert run("train.py", *call).returncode == 0
    for kind, call in calls.items():
        one = run("train.py", *call, "--run", tmp_path / f"{kind}-one")
        assert one.returncode == 0, one.stderr[-3000:]
        alone, shared = losses(tmp_path / f"{kind}-one"), losses(tmp_path / f"{kind}-two")
        assert len(alone) == 8 and alone[-1] < 0.95 * alone[0], kind
        # An epoch has one step.
        assert max(abs(a - b) for a, b in zip(alone, shared, strict=True)) < 1e-5, kind
        names = {path.name for path in (tmp_path / f"{kind}-two").iterdir()}
        assert {"result.json", "report.md", "config.yaml", "best"} <= names and "ranks" not in names


def test_the_number_of_processes_must_fit(tmp_path):
    done = run("train.py", ROOT / "configs/synthetic-hstu.yaml", *SETTINGS, *KINDS["softmax"], "parallel.context=2")
    assert done.returncode == 2 and "torchrun --nproc-per-node 2" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.context=3"], "model.num_heads=2 must be a multiple of parallel.context=3"),
        (["parallel.context=2", "model.head={kind: mol}", *KINDS["hstu"]], "not supported by model.head.kind=mol"),
        (["model.attention={kind: ring, inner: softmax, time_bias: true}"], "for inner=hstu"),
        (["model.attention={kind: ring, inner: hstu, dropout: 0.1}"], "for inner=softmax"),
    ],
)
def test_options_that_cannot_be_split_are_refused(overrides, message):
    from data.errors import ConfigError
    from training.config import load_config

    with pytest.raises(ConfigError, match=message):
        load_config(ROOT / "configs/synthetic-hstu.yaml", overrides)
