"""Test `train.py --plan` against the sizes of a real model and optimiser, and of the tensors that autograd saves.

Plans are made in a separate process: after an imitated GPU some cached tensors are fake, and Triton's interpreter must
be off.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import scale_tables, scaling
from tests.programs.test_train import ROOT
from training.config import load_config
from training.planning.meter import BLOCK, Meter
from training.ranks.processes import Ranks
from training.run import build_model, open_data
from training.step import build_step, train_batches

SMALL = "data.synthetic={num_users: 60, num_items: 100, mean_length: 20, min_length: 5, max_length: 60}"
KINDS = {
    "dense": [],
    "bsa": ["model.attention.kind=bsa", "train.ema_decay=.9"],
    "indexer": ["model.attention.kind=indexer", "model.attention.warmup_steps=3"],
    "htree": ["model.attention.kind=htree"],
    "rotatekv": ["model.attention.kind=rotatekv"],
    "softmax": [
        *("model.attention.kind=softmax", "model.table_dtype=bfloat16", "loss.kind=in_batch", "train.ema_decay=.9"),
    ],
}
LARGE = ["train.batch_size=512", "data.synthetic.num_items=4000", "loss.num_negatives=4"]
FOUR = [*LARGE, "parallel.data=4"]
RANKS = {
    "one": LARGE,
    "replicated": FOUR,
    # Without graphs, as the whole catalogue is trained.
    "sharded": [*FOUR, "parallel.embedding=auto", "train.cuda_graphs=false"],
    "column": [*FOUR, "parallel.embedding=column_wise"],
    "fused": [*FOUR, "parallel.embedding=row_wise", "parallel.fused=rowwise_adagrad"],
    "whole": [*FOUR, "parallel.embedding=row_wise", "loss.kind=cross_entropy"],
}
RANKING = ["task={kind: ranking, actions: [{name: liked, at_least: 1}]}", "data.protocol=last_tenth", "loss={}"]
RANKING += ["data.synthetic.actions=true", "data.synthetic.mean_length=40"]
# Prints the plan of each case (a list of overrides) with the bytes that autograd saves in a forward pass; then the
# prediction for RECORD, and the output of train.py --plan with the arguments PROGRAM.
SCRIPT = """
import gc
gc.disable()  # to look through all that is imported takes seconds
import json, sys
from dataclasses import asdict
import torch
from benchmarks import scale_tables
from training.config import load_config
from training.planning import plan as planning
from training.run import open_data
from training.step import build_step
import train
gc.freeze()
gc.enable()

CONFIG, RECORD, PROGRAM, *CASES = sys.argv[1:]
for case in CASES:
    data = open_data(load_config(CONFIG, json.loads(case)), device=torch.device("cpu"))
    saved = {}
    def recorded(*arguments):
        optimizer, step = build_step(*arguments)
        def counted(batch):
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                return step(batch)
        parameters.update(p.untyped_storage()._cdata for p in arguments[1].parameters())
        return optimizer, counted
    def keep(x):
        key = x.untyped_storage()._cdata
        if key not in parameters:
            saved[key] = x.untyped_storage().nbytes()
        return x
    parameters = set()
    plan = planning.plan(data.config, data, recorded, planning.GPU_BYTES)
    print(json.dumps(asdict(plan) | {"peak": plan.peak, "training_peak": plan.training_peak,
                                     "saved": sum(saved.values())}))
print(json.dumps(scale_tables.predicted(json.loads(RECORD))), flush=True)
sys.exit(train.main([CONFIG, "--plan", *json.loads(PROGRAM)]))
"""
# A record of benchmarks/scale.py for two ranks, with the keys that the prediction reads.
RECORD = {"case": "whole", "overrides": ["train.cuda_graphs=true", "parallel.data=auto", "parallel.embedding=row_wise"]}
RECORD |= {"items": 100_000, "ranks": 2, "steps": 2, "largest": [2000, 16], "before": 0}
RECORD["overrides"] += ["model.embedding_dim=128", "loss={kind: cross_entropy}", "train.batch_size=16"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[dict[str, dict], list[str], Path]:
    """Return the plan of each case by its name, the lines printed after them, and the folder for runs."""
    folder = tmp_path_factory.mktemp("plans")
    path = folder / "items.csv"
    path.write_text("item,group\n" + "\n".join(f"{item},{item % 7}" for item in range(1, 121)) + "\n")
    features = f"{{items: {{format: csv, path: {path}, unknown: add, columns: {{group: category}}}}}}"
    features = f"data.features={features}"
    sharded = [features, "parallel.embedding=row_wise"]
    cases = KINDS | RANKS | {"ranking": RANKING, "recomputed": ["train.recompute=true"]}
    cases |= {"features": [features], "features, sharded": sharded}
    cases |= {"features, whole": [*sharded, "loss.kind=cross_entropy"]}
    program = [SMALL, f"run_dir={folder / 'runs'}", "--gpu-memory", "80"]
    environ = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, "configs/synthetic-hstu.yaml", json.dumps(RECORD), json.dumps(program)]
    command += [json.dumps([SMALL, *case]) for case in cases.values()]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return dict(zip(cases, map(json.loads, lines))), lines[len(cases) :], folder / "runs"


def check_weights_and_optimiser(plan, overrides):
    """Check that the plan counts weights, gradients and the optimiser's state to the byte, as a real step has them."""
    few = "train.batch_size=2"  # these sizes do not depend on it
    config = load_config(ROOT / "configs/synthetic-hstu.yaml", [SMALL, *overrides, few])
    data = open_data(config, device=torch.device("cpu"))
    model = build_model(data.config, data.vocabulary, data.device)
    optimizer, step = build_step(data.config, model, data.device)
    step(next(train_batches(data.config, data, Ranks(data.config)).epoch(0)))

    def total(tensors) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    persistent = plan["persistent"]
    assert persistent["weights"] == total([*model.parameters(), *model.buffers()])
    assert persistent["gradients"] == total(p.grad for p in model.parameters() if p.grad is not None)
    assert persistent["optimiser"] == total(x for state in optimizer.state.values() for x in state.values())
    fp32 = sum(4 * p.numel() for p in model.parameters())
    assert persistent.get("average of the weights", 0) == (fp32 if config.train.ema_decay else 0)


def check_activations(plan, kind):
    """Check that the plan counts the activations that autograd saves."""
    activations = sum(plan["activations"].values())
    # The plan of a batch is allocated too, but not saved by autograd.
    assert 0.98 * plan["saved"] < activations <= 1.6 * plan["saved"]
    assert any(name.startswith(f"attention {kind}") for name in plan["activations"])
    assert activations < plan["step"] < plan["training_peak"] <= plan["peak"]


def test_plans_of_one_process(planned):
    plans, _, _ = planned
    for kind, overrides in KINDS.items():
        check_weights_and_optimiser(plans[kind], overrides)
        check_activations(plans[kind], kind)

    dense, plan = plans["dense"], plans["recomputed"]
    # Only the outputs of two layers are saved; the plan of the batch, which attention makes, remains.
    assert plan["activations"]["layers without attention"] < 1.1 * 2 * plan["tokens"] * 64 * 4
    assert plan["saved"] < 0.3 * dense["saved"] and plan["step"] < 0.7 * dense["step"]
    assert plan["persistent"] == dense["persistent"]

    plan = plans["ranking"]
    assert plan["activations"] and min(plan["step"], plan["evaluation"]) > plan["tokens"] * 64 * 4

    one, split, whole = (plans[name] for name in ("features", "features, sharded", "features, whole"))
    for plan in (one, split, whole):  # the table has rows for 7 groups, and for items without an event
        assert plan["persistent"]["weights"] > dense["persistent"]["weights"] + 7 * 64 * 4
        assert plan["activations"] and plan["evaluation"] > 0
    assert split["persistent"]["optimiser"] == one["persistent"]["optimiser"]


def test_plans_of_ranks_and_of_the_program(planned):
    plans, (predicted, *printed), runs = planned
    one, replicated, sharded, column, fused, whole = (plans[name] for name in RANKS)
    assert (one["ranks"], replicated["ranks"], sharded["ranks"]) == (1, 4, 4)
    assert replicated["tokens"] < one["tokens"] / 3 and replicated["step"] < one["step"]
    assert replicated["persistent"]["weights"] == one["persistent"]["weights"]
    table, quarter = 4000 * 64 * 4, 1000 * 64 * 4
    for name, table_bytes, shard_bytes, fused_bytes in (
        ("weights", table, quarter, quarter),
        ("gradients", table, quarter, 0),
        ("optimiser", 2 * table, 2 * quarter, 1000 * 4),
    ):
        rest = one["persistent"][name] - table_bytes
        for plan in (sharded, column):
            # abs: the optimiser's count of steps
            assert plan["persistent"][name] - shard_bytes == pytest.approx(rest, abs=16)
        assert fused["persistent"][name] - fused_bytes == pytest.approx(rest, abs=16)
    assert sharded["sharded"]["kind"] == "row_wise" and len(sharded["sharded"]["lines"]) == 5
    assert fused["sharded"]["lines"][3] == "  item table on rank:3: rows 3,000 .. 3,999, 64 columns from 0 on"
    assert column["sharded"]["lines"][3] == "  item table on rank:3: rows 0 .. 3,999, 16 columns from 48 on"
    assert "outputs of all ranks" in whole["sharded"]["buffers"]
    # The rows and their gradient: input, target and four negatives for each token, with repetitions among 4,000 items.
    rows = [plan["persistent"].get("rows of captured steps", 0) // (2 * 64 * 4) for plan in (sharded, column, fused)]
    assert rows[0] == 0 and 2 * column["tokens"] < rows[1] == rows[2] <= 4096
    # The shard has two gradients for a while, of the look-up and of the loss.
    assert whole["step"] > sharded["step"] + quarter

    shard, workspaces = 50_000 * 128 * 4, 64 * 2**20
    # A weight, two gradients, two moments; in addition rows and activations.
    assert 5 * shard < json.loads(predicted) - workspaces < 7 * shard

    text = "\n".join(printed)
    assert "MiB, of 81,920 MiB on a GPU" in text and "peak, including evaluations" in text
    assert not runs.exists()


def test_meter_counts_live_tensors():
    with Meter() as meter:
        meter.part = "first"
        x = torch.zeros(1000)
        view = x[10:]
        meter.part = "second"
        y = x + 1
        del x
        assert meter.live == 2 * 8 * BLOCK and meter.by_part == {"first": 8 * BLOCK, "second": 8 * BLOCK}
        del view
        assert meter.live == 8 * BLOCK and meter.peak == 2 * 8 * BLOCK
    assert y.sum() == 1000


def test_docs_have_the_figures_of_the_model():
    page = (ROOT / "docs/scaling.md").read_text()
    for gpus in (8, 64, 1024):
        separate, shared, fused, whole = (scaling.step(scaling.SETTINGS[n], gpus, 65_536, 10**8) for n in (0, 2, 3, 4))
        cells = [f"{step.ms:.0f} ms, {step.memory / 1e9:.0f} GB" for step in (separate, shared, fused)]
        cells.append(f"{whole.ms / 1e3:.1f} s, {whole.memory / 1e9:.0f} GB")
        assert f"| {gpus:,} | {' | '.join(cells)} |" in page
    separate, shared, fused, whole = (scaling.step(scaling.SETTINGS[n], 8, 65_536, 10**8) for n in (0, 2, 3, 4))
    learned = (ROOT / "docs/learned.md").read_text()
    assert f"{8 * (shared.table + shared.optimizer) / 1e9:.0f} GB with AdamW" in learned
    assert f"fused rowwise Adagrad ({8 * (fused.table + fused.optimizer) / 1e9:.0f} GB)" in learned
    assert f"{whole.loss_ms / 1e3:.0f} s a step however many" in learned
    assert f"{separate.looked_up / shared.looked_up:.0f} times fewer rows" in learned
    assert f"{shared.optimizer_ms:.0f} of {shared.ms:.0f} ms on 8 GPUs" in learned
    assert f"{10**10 / 1024 / 65_536:.0f} steps an epoch" in learned
    assert "".join(scaling.users(10**8, 10**10, 10**8)).endswith("38 GB for a machine of 8 GPUs.")


def test_weak_scaling_is_computed_from_tokens_per_gpu(tmp_path):
    record = {"case": "large", "items": 10, "imbalance": 1.0, "peaks": [None]}
    lines = [record | {"how": "captured", "ranks": 1, "queued": 4.0, "tokens": 100.0}]
    lines += [record | {"how": "shared", "ranks": 1, "queued": 5.0, "tokens": 100.0}, {"case": "whole", "error": "..."}]
    lines += [record | {"how": "shared", "ranks": 2, "queued": 6.0, "tokens": 216.0}]
    path = tmp_path / "scale.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    (row,) = scale_tables.scaling_rows(scale_tables.records(path))
    assert row == ["large", "shared", "10", "108", "4.00", "", "5.00", "2", "6.00", "90.0%", "1.0000"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_exchange_is_fitted_to_measurements(tmp_path, ranks):
    path, gigabytes = tmp_path / "scale.jsonl", {"large": 1.7716e6 * 200 / 1e9, "fused": 1.9125e6 * 512 / 1e9}
    lines, others = [], (ranks - 1) / ranks
    for case, items in (("large", 10**7), ("fused", 5 * 10**7)):
        # Rows of other ranks are received, and as many gradients are sent: in 3 ms plus 1 ms for each 0.1 GB.
        exchange = 3 + 10 * 2 * others * gigabytes[case]
        # The other ranks update their parts of the table; a fused optimiser takes no time.
        spared = 1e3 * 9 * others * 1e7 * 200 / scaling.COPY if case == "large" else 0
        overrides = [*scale_tables.CASES[case].overrides, *scale_tables.CASES[case].shared, f"parallel.data={ranks}"]
        record = {"case": case, "how": "shared", "items": items, "device": "NVIDIA H200", "overrides": overrides}
        lines.append(record | {"ranks": 1, "queued": 30.0, "tokens": 15_000.0})
        lines.append(record | {"ranks": ranks, "queued": 30.0 + exchange - spared, "tokens": 15_000.0 * ranks})
    path.write_text("\n".join(map(json.dumps, lines)))
    assert scaling.measured_exchange(path) == pytest.approx((3e-3, 100e9), rel=1e-3)
    slower, default = (
        scaling.step(scaling.SETTINGS[0], 8, 65_536, 10**8, scaling.MACHINE._replace(wait=3e-3, nvlink=nvlink))
        for nvlink in (100e9, 200e9)
    )
    assert slower.exchange_ms - 3 == pytest.approx(2 * (default.exchange_ms - 3))


def test_the_model_has_the_measured_exchange():
    measured = scaling.measured_exchange(ROOT / "benchmarks/results/scale.jsonl")
    assert measured == pytest.approx((scaling.WAIT, scaling.NVLINK), rel=0.01)
