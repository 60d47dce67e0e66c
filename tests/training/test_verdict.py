"""Test the comparison of the model with the best baseline."""

from types import SimpleNamespace

import numpy as np
import pytest

from training.verdict import against_baselines


def verdict(ours, less_is_better=False, **baselines):
    task = SimpleNamespace(
        config=SimpleNamespace(
            best_metric="NDCG@10", task=SimpleNamespace(less_is_better=lambda metric: less_is_better)
        ),
        user_values=lambda judged: (np.arange(len(ours)), {"NDCG@10": ours}),
        baseline_values=lambda judged: baselines,
    )
    return against_baselines(task, {}).get("against_baseline")


def test_the_best_baseline_decides():
    rng = np.random.default_rng(0)
    weak = rng.random(400)
    strong, ours = weak + 0.2, weak + 0.3 + 0.01 * rng.random(400)
    facts = verdict(ours, popularity=weak, again=strong)
    assert facts["baseline"] == "again" and facts["low"] > 1 and not facts["behind"]
    assert facts["ratio"] == pytest.approx(ours.mean() / strong.mean())
    assert "better than the best baseline, again" in facts["sentence"]
    assert "worse than" in verdict(weak, again=strong)["sentence"] and verdict(weak, again=strong)["behind"]
    assert "not distinguishable" in verdict(rng.permutation(strong), again=strong)["sentence"]


def test_the_least_baseline_decides_if_less_is_better():
    rng = np.random.default_rng(0)
    weak = 1 + rng.random(400)
    strong, ours = weak - 0.2, weak - 0.3 - 0.01 * rng.random(400)
    facts = verdict(ours, less_is_better=True, popularity=weak, again=strong)
    assert facts["baseline"] == "again" and facts["high"] < 1 and not facts["behind"]
    assert "better than the best baseline, again" in facts["sentence"]
    worse = verdict(weak, less_is_better=True, again=strong)
    assert "worse than" in worse["sentence"] and worse["behind"]


def test_without_values_there_is_no_interval():
    nothing = np.zeros(50)
    assert verdict(np.ones(50), popularity=nothing)["low"] is None
    assert "Too few users" in verdict(np.ones(50), popularity=nothing)["sentence"]
    assert verdict(np.ones(50)) is None
