"""Compare serving on a GPU with serving on a CPU, which test_random_operations.py compares with the model."""

import copy

import numpy as np
import pytest
import torch

from tests.serving.plain import DENSE, NUM_ACTIONS, NUM_ITEMS, item_ids, make_config, make_model, serve

pytestmark = pytest.mark.gpu
SOFTMAX = {"kind": "softmax", "position_bias": True, "time_bias": True}
BSA = {"kind": "bsa", "block_size": 16, "block_counts": 2, "selection_group": 2, "window_size": 3}
ROTARY = {"rotary": {"position": True, "time": True}}


@pytest.mark.parametrize(
    ("attention", "task", "changes", "options"),
    [
        (DENSE, "retrieval", ROTARY | {"action_embedding": True}, {}),
        (DENSE, "ranking", {}, {}),
        (DENSE, "ranking", {}, {"cache": "bf16"}),
        (DENSE, "targets", {}, {}),
        (SOFTMAX, "retrieval", {}, {"slide": 1}),
        (DENSE | {"window_size": 9}, "retrieval", ROTARY | {"tokens": True}, {}),
        (DENSE, "ranking", {"tokens": True}, {"cache": "8bit", "sink_tokens": 4}),
        (SOFTMAX, "retrieval", {"tokens": True}, {"slide": 1}),
        ({"kind": "softmax"}, "retrieval", {"tokens": True}, {}),
        (BSA, "retrieval", {}, {}),
        (BSA, "ranking", {}, {"cache": "bf16"}),
        (DENSE, "retrieval", {"head": {"kind": "mol"}}, {}),
        ({"kind": "rotatekv", "bits": 8, "sink_tokens": 3}, "retrieval", {}, {}),
        (DENSE, "ranking", {}, {"cache": "8bit", "sink_tokens": 2}),
    ],
)
def test_a_gpu_gives_the_answers_of_a_cpu(attention, task, changes, options, tmp_path):
    config = make_config(attention, task=task, max_seq_len=70, **changes)
    model = make_model(config)
    served = [
        serve(config, copy.deepcopy(model).to(device), cache_bytes=2**20, **options) for device in ("cpu", "cuda")
    ]
    rng, now = np.random.default_rng(0), 0
    # Numbers that differ in the last bit may have codes that differ by one; only few do.
    tolerance = 2e-2 if options.get("cache") or attention["kind"] == "rotatekv" else 2e-3
    reads = task != "retrieval" or "action_embedding" in changes
    for _ in range(12):
        count = int(rng.integers(1, 60))
        users, items = rng.integers(0, 4, count), item_ids()[rng.integers(0, NUM_ITEMS, count)]
        times = now + np.cumsum(rng.integers(0, 20_000, count))
        now = int(times[-1])
        actions = rng.integers(0, NUM_ACTIONS, count) if reads else None
        for one in served:
            one.append(users, items, times, actions)
            if "tokens" in changes:
                one.add_users(
                    [0, 1], {"country": ["de", ["fr", "xx"][count % 2]], "tags": [["a"] * (count % 3), ["b"]]}
                )
        known = sorted(set(users.tolist()))
        candidates = item_ids()[rng.integers(0, NUM_ITEMS, (len(known), 33))]
        expected, actual = (one.score(known, candidates, now + 60) for one in served)
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, expected, atol=tolerance * max(1, np.abs(expected).max()))
    order = rng.permutation(33)
    again = served[1].score(known, candidates[:, order], now + 60)
    np.testing.assert_array_equal(again, actual[:, order])
    if task == "retrieval":
        expected, actual = (one.recommend(known, 5, now + 60)[1] for one in served)
        np.testing.assert_allclose(actual, expected, atol=tolerance * max(1, np.abs(expected).max()))
    served[1].save(tmp_path / "store")
    served[1].evict(known)
    served[1].restore(tmp_path / "store")
    encoded = served[1].statistics["tokens_encoded"]
    np.testing.assert_array_equal(served[1].score(known, candidates[:, order], now + 60), again)
    assert served[1].statistics["tokens_encoded"] == encoded
    torch.cuda.synchronize()
