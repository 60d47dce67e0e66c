"""Test a few random operations; `python -m tests.serving.random_operations` runs many."""

import pytest

from tests.serving.plain import DENSE, make_config
from tests.serving.random_operations import Campaign

BSA = {"kind": "bsa", "block_size": 4, "block_counts": 2, "selection_group": 2, "window_size": 3}
SOFTMAX = {"kind": "softmax", "position_bias": True, "time_bias": True}
ROTARY = {"rotary": {"position": True, "time": True}}


@pytest.mark.parametrize(
    ("attention", "task", "changes", "options"),
    [
        (DENSE, "retrieval", {"action_embedding": True}, {}),
        (DENSE | {"window_size": 5}, "ranking", ROTARY, {"slide": 1}),
        (DENSE, "targets", ROTARY, {"slide": 3}),
        (SOFTMAX, "retrieval", {"block": "transformer", "feed_forward_dim": 8}, {"slide": 1}),
        (BSA, "retrieval", {}, {}),
        (BSA | {"selection_group": 4, "window_size": 0}, "ranking", {}, {}),
        (BSA | {"block_size": 1, "selection_group": 1}, "ranking", {}, {"slide": 3}),
        (DENSE, "retrieval", {"head": {"kind": "mol"}}, {}),
        (DENSE | {"window_size": 5}, "retrieval", ROTARY | {"tokens": True}, {}),
        (DENSE, "ranking", {"tokens": True}, {"slide": 1}),
        (DENSE, "targets", ROTARY | {"tokens": True}, {"slide": 3}),
        (SOFTMAX, "retrieval", {"block": "transformer", "feed_forward_dim": 8, "tokens": True}, {}),
    ],
)
def test_against_a_model_that_recomputes_everything(attention, task, changes, options, tmp_path):
    campaign = Campaign(make_config(attention, task=task, **changes), 1, 6, 3, tmp_path, **options)
    campaign.run(40)
    if campaign.config.data.features:
        assert campaign.worst < 1e-6
    assert campaign.worst > 0 and campaign.served.statistics["tokens_encoded"] > 0
