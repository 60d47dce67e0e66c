"""Test eval.py --export-model: a process with only torch computes the same lists as `Recommender`; errors."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import fit
from serving import Recommender
from tests.experiments.test_fitting import CONFIG, orders
from tests.programs.test_train import ROOT, run
from training.config import load_config
from training.portable import NextItems, exported
from training.run import open_weights, trained_model

compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
# Runs the loader of examples/ where no package of the checkout can be imported.
ALONE = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("loader", sys.argv[1])
loader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loader)
recommend = loader.load(sys.argv[2])
answers = [recommend(*case) for case in json.load(open(sys.argv[3]))]
print(json.dumps([answers, [name for name in ("hstu_sparse", "models", "serving", "torchrec") if name in sys.modules]]))
"""
KINDS = {
    "dense": {},
    "softmax": {"model": {"attention": {"kind": "softmax", "position_bias": True, "time_bias": True}}},
    "transformer": {"model": {"attention": {"kind": "softmax"}, "block": "transformer", "feed_forward_dim": 16}},
    "repeats": {
        "model": {"head": {"kind": "dot", "repeats": 4}},
        "loss": {"kind": "cross_entropy"},
        "eval": {"filter_seen": "none"},
    },
    "window and rotary": {"model": {"attention": {"window_size": 3}, "rotary": {"position": True}}},
}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda changes: fit(orders(), config=CONFIG, run="run", quiet=True, **changes)


def next_items(folder):
    config, known, weights, source, _ = open_weights(folder, [])
    return NextItems(trained_model(config, known, weights, source), 9, config.eval.filter_seen != "none")


@pytest.mark.parametrize(
    "kind", [kind if kind == "dense" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_exported_program_is_the_model(trained, kind):
    """The exported program, before it is compiled, is right for every length; it was traced for one."""
    module = next_items(trained(KINDS[kind]).folder)
    program = exported(module, 8).module()
    for length in range(1, 9):
        inputs = torch.randint(9, (length,)), 1000 * torch.arange(length), torch.tensor(10_000)
        with torch.no_grad():
            for actual, expected in zip(program(*inputs), module(*inputs)):
                torch.testing.assert_close(actual, expected)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_gives_the_lists_of_the_recommender(tmp_path, trained, kind):
    trained(KINDS[kind])
    done = run("eval.py", "run", "--export-model", "model.pt2", "--top-k", "20")
    assert done.returncode == 0 and "Written: model.pt2" in done.stdout, done.stderr
    longest = load_config("run/config.yaml").model.max_seq_len
    cases = []
    for length in range(1, longest + 1):
        rng = np.random.default_rng(length)
        items, times = rng.integers(0, 9, length), np.cumsum(rng.integers(0, 9000, length))
        cases.append(([f"s{item}" for item in items], times.tolist(), 10**6))
    Path("cases.json").write_text(json.dumps(cases))
    shutil.copy(ROOT / "examples/load_exported.py", tmp_path)
    command = [sys.executable, "-c", ALONE, "load_exported.py", "model.pt2", "cases.json"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert process.returncode == 0, process.stderr
    answers, imported = json.loads(process.stdout)
    assert not imported
    served = Recommender.load("run", cache_bytes=2**24)
    for user, ((items, times, at), (listed, scores)) in enumerate(zip(cases, answers)):
        served.append([user] * len(items), items, times)
        expected, values = served.recommend([user], k=9, at=at)
        some = np.isfinite(values[0])
        np.testing.assert_allclose(scores, values[0][some], atol=1e-5)
        assert set(listed) == set(expected[0][some].tolist())


@compiled
@pytest.mark.slow
def test_the_file_is_as_fast_as_the_model(trained):
    """The file takes at most 1.2 times the eager time, by the best of several measurements, as other work may run."""
    folder = trained({"model": {"max_seq_len": 200, "embedding_dim": 64, "num_layers": 2}}).folder
    assert run("eval.py", folder, "--export-model", "model.pt2").returncode == 0
    eager, packed = next_items(folder), torch._inductor.aoti_load_package("model.pt2")
    for length in (5, 50, 200):
        inputs = torch.randint(9, (length,)), torch.arange(length), torch.tensor(length)
        with torch.no_grad():
            seconds = [best_of(lambda call=call, inputs=inputs: call(*inputs)) for call in (eager, packed)]
        assert seconds[1] < 1.2 * seconds[0], (length, seconds)


def best_of(call, repeats=5, calls=20):
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - began)
    return min(times)


def test_a_model_that_cannot_be_exported_is_refused(trained):
    trained({"model": {"attention": {"kind": "bsa", "block_size": 8}}})
    done = run("eval.py", "run", "--export-model", "model.pt2")
    assert done.returncode == 2 and "model.attention.kind=bsa: expected dense or softmax" in done.stderr
