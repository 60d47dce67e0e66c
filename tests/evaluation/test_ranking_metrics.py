"""Test ranking metrics on cases small enough to count by hand, and against other libraries."""

import math

import numpy as np
import pytest
import torch

from evaluation.ranking_metrics import (
    REMOVED,
    Rankings,
    describe_lists,
    metrics_by_length,
    ranking_metrics,
    user_metrics,
    weighted_ndcg,
)


def test_metrics_by_hand():
    metrics = ranking_metrics(np.array([1, 2, 11, 300]))
    assert metrics["HR@1"] == 0.25 and metrics["HR@10"] == 0.5 and metrics["HR@50"] == 0.75
    assert metrics["NDCG@10"] == pytest.approx((1 + 1 / math.log2(3)) / 4)
    assert metrics["NDCG@200"] == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(12)) / 4)
    assert metrics["MRR"] == pytest.approx((1 + 1 / 2 + 1 / 11 + 1 / 300) / 4)
    assert set(ranking_metrics(np.array([REMOVED])).values()) == {0.0}


@pytest.mark.parametrize("library", ["torchmetrics", pytest.param("ranx", marks=pytest.mark.slow)])
def test_metrics_equal_ranx_and_torchmetrics(library):
    """Compare rankings with several relevant items and ties; the libraries get scores ordered with ties by id."""
    rng = np.random.default_rng(0)
    rankings, items = 60, 40
    scores = rng.integers(0, 7, (rankings, items)).astype(np.float64)
    relevant = [np.sort(rng.choice(items, rng.integers(1, 9), replace=False)) for _ in range(rankings)]
    place = np.argsort([np.lexsort((np.arange(items), -row)) for row in scores], 1) + 1
    ranks = np.concatenate([row[chosen] for row, chosen in zip(place, relevant)])
    of = Rankings(np.repeat(np.arange(rankings), [len(chosen) for chosen in relevant]), np.arange(rankings))
    theirs = {"ranx": by_ranx, "torchmetrics": by_torchmetrics}[library](place, relevant)
    for name, value in theirs.items():
        assert ranking_metrics(ranks, [name], of)[name] == pytest.approx(value, abs=1e-6), name


def by_ranx(place, relevant):
    ranx = pytest.importorskip("ranx")

    qrels = ranx.Qrels({f"q{q}": {f"i{item}": 1 for item in chosen} for q, chosen in enumerate(relevant)})
    lists = ranx.Run({f"q{q}": {f"i{item}": 1.0 / p for item, p in enumerate(row)} for q, row in enumerate(place)})
    names = {"HR": "hit_rate", "NDCG": "ndcg", "Recall": "recall", "Precision": "precision", "MAP": "map", "MRR": "mrr"}
    return {
        f"{name}@{k}": ranx.evaluate(qrels, lists, f"{theirs}@{k}")
        for name, theirs in names.items()
        for k in (1, 3, 10, 25)
    }


def by_torchmetrics(place, relevant):
    """Return the metrics of torchmetrics, without MAP@k, which has another denominator there."""
    import torchmetrics.functional.retrieval as theirs

    pairs = [(torch.from_numpy(-row.astype(np.float32)), torch.zeros(len(row), dtype=torch.long)) for row in place]
    for (_, target), chosen in zip(pairs, relevant):
        target[chosen] = 1
    functions = {
        "HR": theirs.retrieval_hit_rate,
        "NDCG": theirs.retrieval_normalized_dcg,
        "Recall": theirs.retrieval_recall,
        "Precision": theirs.retrieval_precision,
    }
    values = {
        f"{name}@{k}": np.mean([float(function(*pair, top_k=k)) for pair in pairs])
        for name, function in functions.items()
        for k in (1, 3, 10, 25)
    }
    whole = {"MAP": theirs.retrieval_average_precision, "MRR": theirs.retrieval_reciprocal_rank}
    return values | {name: np.mean([float(function(*pair)) for pair in pairs]) for name, function in whole.items()}


def test_metrics_are_means_over_rankings_then_users():
    of = Rankings(np.array([0, 1, 2, 2]), np.array([7, 7, 3]))
    ranks = np.array([1, 30, 2, REMOVED])
    values = user_metrics(ranks, ["HR@10", "Recall@10", "MAP"], of)
    assert values["HR@10"].tolist() == [1.0, 0.5]  # user 3, user 7
    assert values["Recall@10"].tolist() == [0.5, 0.5]
    assert values["MAP"].tolist() == pytest.approx([0.25, (1 + 1 / 30) / 2])
    rows = metrics_by_length(ranks, np.array([3, 30, 4]), ["HR@10"], of)
    assert rows == [{"history": "1-5", "users": 2, "HR@10": 1.0}, {"history": "21-50", "users": 1, "HR@10": 0.0}]


def test_lists_are_described():
    described = describe_lists(np.array([[0, 1], [0, -1]]), np.array([3, 0, 0, 1]))
    assert described["coverage"] == 0.5
    # Items are in 2, 1, 0 and 0 lists: the mean difference of all pairs divided by twice the mean.
    assert described["gini"] == pytest.approx(14 / 16 / (2 * 0.75))
    assert weighted_ndcg(np.array([1, 20]), np.array([9, 0]), 10) == pytest.approx(0.1 / 1.1)


def test_no_user_gives_nan():
    assert all(math.isnan(value) for value in ranking_metrics(np.empty(0, np.int64)).values())


def test_metrics_by_length_of_history():
    rows = metrics_by_length(np.array([1, 20, 1]), np.array([5, 6, 1000]))
    assert [(row["history"], row["users"], row["HR@10"]) for row in rows] == [
        ("1-5", 1, 1.0),
        ("6-10", 1, 0.0),
        ("201+", 1, 1.0),
    ]
