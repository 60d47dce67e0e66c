"""Test passes that are padded to a few sizes and, on a GPU, replayed as CUDA graphs."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hstu_sparse import cache as pages
from hstu_sparse.cache import paged
from hstu_sparse.core.launch import INTERPRET
from serving.graphs import MOST, Graphs
from serving.token_batch import Sizes, rounded_up
from tests.serving.plain import DENSE, NUM_ACTIONS, NUM_ITEMS, item_ids, make_config, make_model, serve

SOFTMAX = {"kind": "softmax", "position_bias": True, "time_bias": True}
CASES = [
    (DENSE, "retrieval", {"action_embedding": True, "tokens": True}, {}),
    (DENSE, "ranking", {}, {"slide": 1}),
    (DENSE, "retrieval", {"head": {"kind": "mol"}}, {}),
    (DENSE, "ranking", {}, {"cache": "8bit", "sink_tokens": 2}),
    (SOFTMAX, "retrieval", {}, {"cache": "bf16"}),
]


def play(served, other, config, rounds, same, most=90):
    """Send two recommenders the same events and requests; same(found, expected) compares their answers.

    most: a request has fewer candidates than this.
    """
    rng, now = np.random.default_rng(0), 0
    reads = config.task.kind == "ranking" or config.model.action_embedding
    for _ in range(rounds):
        count = int(rng.integers(1, 9)) if rng.random() < 0.8 else 60
        users = rng.permutation(11)[:count] if count < 9 else rng.integers(0, 11, count)
        times = now + np.cumsum(rng.integers(0, 20_000, count))
        now = int(times[-1])
        events = users, item_ids()[rng.integers(0, NUM_ITEMS, count)], times
        actions = rng.integers(0, NUM_ACTIONS, count) if reads else None
        known = rng.permutation(sorted(set(users.tolist())))
        candidates = item_ids()[rng.integers(0, NUM_ITEMS, (len(known), int(rng.integers(1, most))))]
        for one in (served, other):
            one.append(*events, actions)
            if config.data.features:
                one.add_users([0, 1], {"country": ["de", "fr"], "tags": [["a"] * (count % 2), []]})
        same(served.score(known, candidates, now + 60), other.score(known, candidates, now + 60))
        if config.task.kind == "retrieval":
            k, seen = int(rng.integers(1, 9)), bool(rng.random() < 0.7)
            actual, expected = (one.recommend(known, k, now + 60, seen) for one in (served, other))
            same(actual[1], expected[1])
            if same is np.testing.assert_array_equal:
                same(actual[0], expected[0])


@pytest.mark.parametrize(("attention", "task", "changes", "options"), CASES)
def test_padding_changes_nothing(attention, task, changes, options):
    """Compare the contents of users' pages and their answers, up to rounding."""
    config = make_config(attention, task=task, max_seq_len=40, **changes)
    model = make_model(config)
    served, padded = (serve(config, model, cache_bytes=2**20, **options) for _ in range(2))
    padded._engine.padded = True
    close = 5e-6 if not options.get("cache") else 3e-3
    play(padded, served, config, 12, lambda x, y: np.testing.assert_allclose(x, y, atol=close, rtol=close))
    for user, entry in served._engine.caches.entries.items():
        other = padded._engine.caches.entries[user]
        assert (list(entry.row), entry.begin, entry.length) == (list(other.row), other.begin, other.length)
        where = served._engine.caches.pool.table([entry.row]), torch.tensor([entry.length])
        times = [one._engine.caches.pool.read_timestamps(*where) for one in (served, padded)]
        assert torch.equal(*times)


@pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("attention", "task", "changes", "options"),
    [pytest.param(*CASES[3], marks=pytest.mark.slow), (SOFTMAX, "retrieval", {"tokens": True}, {})],
)
def test_kernels_of_padded_passes_stay_in_their_memory(attention, task, changes, options, monkeypatch):
    """Run in the interpreter, which checks that kernels stay within their tensors."""
    config = make_config(attention, task=task, max_seq_len=40, num_layers=1, **changes)
    model = make_model(config)
    served, padded = (serve(config, model, cache_bytes=2**20, **options) for _ in range(2))
    padded._engine.padded = True
    for module in (paged.api, pages.pool):
        monkeypatch.setattr(module, "choose_backend", lambda *_: "triton")
    close = 5e-6 if not options.get("cache") else 3e-3
    play(padded, served, config, 1, lambda x, y: np.testing.assert_allclose(x, y, atol=close, rtol=close), most=9)


def test_sizes():
    assert [rounded_up(count) for count in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    sizes = [rounded_up(count, 4) for count in range(1, 3000)]
    assert all(count <= size < 1.25 * count + 1 for count, size in enumerate(sizes, 1))
    assert len({size for size in sizes if 1024 < size <= 2048}) == 4
    parts = Sizes(5, 2, 3).split(torch.arange(7 * 5 + 3 * 2 + 3 + 3))
    assert [list(x.shape) for x in parts] == [[7, 5], [2], [2], [2], [3], [2, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize(("attention", "task", "changes", "options"), CASES)
def test_a_replay_gives_the_bits_of_a_run(attention, task, changes, options):
    config = make_config(attention, task=task, max_seq_len=40, **changes)
    model = make_model(config)
    captured, plain = (
        serve(config, copy.deepcopy(model).to("cuda"), cache_bytes=2**20, cuda_graphs=True, **options) for _ in range(2)
    )
    plain._engine.graphs = None  # the same padded passes without capture
    play(captured, plain, config, 60, np.testing.assert_array_equal)
    assert 5 < len(captured._engine.graphs.captured) <= MOST
    for tensors, other_tensors in zip(captured._engine.caches.pool.tensors, plain._engine.caches.pool.tensors):
        for name in tensors:
            assert torch.equal(tensors[name].view(torch.uint8), other_tensors[name].view(torch.uint8)), name


@pytest.mark.gpu
def test_the_number_of_graphs_is_limited():
    graphs, reserved = Graphs(torch.device("cuda"), most=4), []
    for turn in range(6):
        for size in range(1, 8):
            x = torch.arange(size) + turn
            assert graphs(size, lambda y: (y * y).sum(), x).item() == int((x * x).sum())
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert len(graphs.captured) == 4 and reserved[-1] <= reserved[-2]


@pytest.mark.gpu
def test_a_function_that_cannot_be_captured_is_an_error():
    """Run in a separate process: after a failed capture, torch's generator on the GPU may fail."""
    script = """
import torch
from serving import ServingError
from serving.graphs import Graphs

graphs = Graphs(torch.device("cuda"))
try:
    for _ in range(2):
        graphs("waits", lambda x: x * x.sum().item(), torch.ones(3))
except ServingError as error:
    print(error)
print(graphs("works", lambda x: x + 1, torch.ones(3)).tolist())
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    refusal = "cuda_graphs: a request of this model cannot be captured, set the option to false"
    assert refusal in done.stdout and "[2.0, 2.0, 2.0]" in done.stdout, done.stdout + done.stderr
