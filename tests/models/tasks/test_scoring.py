"""Ranks, filters, top-k lists and metrics on cases small enough to count by hand."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from data.batch import Batch
from models.tasks import scoring as retrieval
from models.tasks.ranking_metrics import (
    REMOVED,
    Rankings,
    describe_lists,
    metrics_by_length,
    ranking_metrics,
    user_metrics,
    weighted_ndcg,
)
from models.tasks.scoring import (
    SampledCandidates,
    best_items,
    mask_seen,
    model_scorer,
    popularity_scorer,
    rank_targets,
    seen_by,
    target_ranks,
    top_items,
)


def batch_of(histories, windows, targets):
    """One sequence for each user: `windows` are the model's inputs, `histories` everything before the target."""
    flat = [item for window in windows for item in window]
    following = [item for window, target in zip(windows, targets) for item in [*window[1:], target]]
    offsets = lambda rows: torch.tensor([0, *np.cumsum([len(row) for row in rows]).tolist()])
    return Batch(
        item_ids=torch.tensor(flat),
        timestamps=torch.zeros(len(flat), dtype=torch.long),
        target_ids=torch.tensor(following),
        query_timestamps=torch.zeros(len(flat), dtype=torch.long),
        seq_offsets=offsets(windows),
        users=torch.arange(len(windows)),
        seen_items=torch.tensor([item for row in histories for item in row]),
        seen_offsets=offsets(histories),
    )


def test_ranks_count_what_scores_higher():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]])
    assert target_ranks(scores, torch.tensor([0, 2])).tolist() == [4, 3]  # ties go to the smaller id
    assert target_ranks(scores, torch.tensor([3, 0])).tolist() == [3, 1]


def test_nan_ranks_last():
    scores = torch.full((1, 5), float("nan"))
    assert target_ranks(scores, torch.tensor([0])).tolist() == [5]


def test_filters_take_out_window_or_history_and_a_target_in_it():
    # Item 4 scores best, then 3, 2, 1, 0. The user saw 4 long ago and 3 lately; the target is 2.
    batch = batch_of([[4, 3], [4, 2]], [[3], [2]], [2, 2])
    scorer = lambda batch: torch.arange(5.0).repeat(2, 1)
    none, window, history = rank_targets(scorer, [batch], filters=("none", "window", "history"))
    assert none.tolist() == [3, 3]
    assert window.tolist() == [2, REMOVED]  # the second user's target repeats an event of the window
    assert history.tolist() == [1, REMOVED]
    # The order asked for does not matter.
    again = rank_targets(scorer, [batch], filters=("history", "none"))
    assert [ranks.tolist() for ranks in again] == [[1, REMOVED], [3, 3]]


def test_popularity_is_the_same_for_all_users():
    batch = batch_of([[0], [1]], [[0], [1]], [1, 2])
    (ranks,) = rank_targets(popularity_scorer(np.array([5, 3, 1]), torch.device("cpu")), [batch], filters=("none",))
    assert ranks.tolist() == [2, 3]


def test_sampled_candidates_flatter_and_are_seeded():
    batch = batch_of([[0]] * 200, [[0]] * 200, [500] * 200)
    scorer = lambda batch: -torch.arange(1000.0).repeat(200, 1)
    (full,) = rank_targets(scorer, [batch], filters=("none",))
    sampled = [
        rank_targets(scorer, [batch], filters=("none",), candidates=SampledCandidates(100, seed=7))[0] for _ in range(2)
    ]
    assert (full == 501).all()
    assert (sampled[0] == sampled[1]).all()
    assert 45 < sampled[0].mean() < 57  # half of 100 different candidates score higher


def test_sampled_candidates_are_distinct_and_unseen():
    histories = [[3, 1, 3], list(range(12)), [7]]
    batch = batch_of(histories, [history[-1:] for history in histories], [5, 12, 7])
    everyone = set()
    for seed in range(40):
        candidates = SampledCandidates(8, seed=seed)
        drawn = candidates(batch, 16)
        for history, target, row in zip(histories, [5, 12, 7], drawn.tolist()):
            chosen = [item for item in row if item >= 0]
            left = set(range(16)) - {*history, target}
            assert len(set(chosen)) == len(chosen) == min(8, len(left)) and set(chosen) <= left
        assert candidates.short == 1  # the second user has three unseen items besides the target
        everyone |= set(drawn[0].tolist())
    assert everyone == set(range(16)) - {3, 1, 5}
    # All items score alike: each candidate with a smaller id comes before the target, and nothing else does.
    (ranks,) = rank_targets(lambda _: torch.zeros(3, 16), [batch], filters=("none",), candidates=lambda *_: drawn)
    expected = [1 + sum(0 <= item < target for item in row) for row, target in zip(drawn.tolist(), [5, 12, 7])]
    assert ranks.tolist() == expected


def test_top_items_break_ties_by_id():
    values, items = top_items(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]]), 4)
    assert items.tolist() == [[1, 3, 2, 4]] and values.tolist() == [[3.0, 3.0, 2.0, 2.0]]
    assert top_items(torch.tensor([[1.0, 2.0]]), 10)[1].tolist() == [[1, 0]]


@pytest.mark.parametrize("k", [1, 7, 40, 300])
def test_top_items_break_ties_at_the_boundary(k):
    """Few different scores, so that ties stand at the k-th place of every row; some are infinite or NaN."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (20, 300), generator=generator).float()
    scores[5:10, ::3] = float("-inf")
    scores[7] = float("-inf")
    scores[8:11, 1::7] = float("nan")
    scores[11] = 2.0
    values, items = top_items(scores, k)
    for row, best, chosen in zip(scores.nan_to_num(float("-inf"), neginf=float("-inf")).tolist(), values, items):
        expected = sorted(range(300), key=lambda item, row=row: (-row[item], item))[:k]
        assert chosen.tolist() == expected
        assert best.tolist() == [row[item] for item in expected]


@pytest.mark.parametrize("tile", [1, 24, 100, 10**6])
def test_tiles_change_nothing(tile, monkeypatch):
    """Ranks and lists of a catalogue in tiles, the last one narrower, with ties within and across them."""
    generator = torch.Generator().manual_seed(0)
    users, items = 12, 83
    scores = torch.randint(0, 9, (users, items), generator=generator).float()
    scores[3, 50] = float("nan")
    draw = lambda count: torch.randint(items, (count,), generator=generator).tolist()
    histories = [draw(20) for _ in range(users)]
    targets = draw(users)
    targets[3] = 50
    histories[4][2] = targets[4]
    batch = batch_of(histories, [history[-5:] for history in histories], targets)
    filters = ("none", "window", "history")
    drawn = SampledCandidates(30, seed=1)(batch, items)

    def evaluated():
        ranks = rank_targets(lambda batch: scores, [batch], filters=filters)
        few = rank_targets(lambda batch: scores, [batch], filters=("history",), candidates=lambda *_: drawn)
        lists = [best_items(scores, k, seen) for k in (1, 10, 83) for seen in (None, seen_by("history", batch))]
        return ranks, few, lists

    monkeypatch.setattr(retrieval, "TILE", 10**9)
    whole = evaluated()
    monkeypatch.setattr(retrieval, "TILE", users * tile)
    parts = evaluated()
    for a, b in zip(whole[0] + whole[1], parts[0] + parts[1]):
        assert (a == b).all()
    for a, b in zip(whole[2], parts[2]):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    finite_scores = scores.clone().nan_to_num(float("-inf"))
    assert torch.equal(best_items(scores, 83)[1], top_items(finite_scores, 83)[1])
    assert whole[0][0].tolist() == target_ranks(scores, torch.tensor(targets)).tolist()


def test_a_tile_of_the_model_is_a_part_of_its_scores(monkeypatch):
    """A tile has the same width wherever it begins: an item that stands twice has one score."""
    table = torch.randn(90, 16, generator=torch.Generator().manual_seed(0))
    table[70] = table[10]
    out = F.normalize(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), dim=1)

    class Model(torch.nn.Module):
        item_weight, item_table, head = table, table, None

        def forward(self, batch):
            return out, {}

    scorer = model_scorer(Model())
    batch = batch_of([[1]] * 4, [[2]] * 4, [3] * 4)
    monkeypatch.setattr(retrieval, "TILE", 4 * 32)
    scores = scorer(batch)
    tiles = list(scores.tiles())
    assert [(begin, start, tile.shape[1]) for begin, start, tile in tiles] == [(0, 0, 32), (32, 32, 32), (64, 58, 32)]
    torch.testing.assert_close(tiles[2][2], out @ F.normalize(table, dim=1)[58:].T)
    assert torch.equal(tiles[0][2][:, 10], tiles[2][2][:, 70 - 58])


def test_mask_seen_in_place():
    scores = torch.zeros(2, 4)
    mask_seen(scores, torch.tensor([1, 1, 3]), torch.tensor([0, 2, 3]))
    assert scores.isinf().tolist() == [[False, True, False, False], [False, False, False, True]]


def test_metrics_by_hand():
    metrics = ranking_metrics(np.array([1, 2, 11, 300]))
    assert metrics["HR@1"] == 0.25 and metrics["HR@10"] == 0.5 and metrics["HR@50"] == 0.75
    assert metrics["NDCG@10"] == pytest.approx((1 + 1 / math.log2(3)) / 4)
    assert metrics["NDCG@200"] == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(12)) / 4)
    assert metrics["MRR"] == pytest.approx((1 + 1 / 2 + 1 / 11 + 1 / 300) / 4)
    assert set(ranking_metrics(np.array([REMOVED])).values()) == {0.0}


@pytest.mark.parametrize("library", ["torchmetrics", pytest.param("ranx", marks=pytest.mark.slow)])
def test_metrics_equal_ranx_and_torchmetrics(library):
    """Several relevant items in a ranking, scores with ties; the libraries get the order that ties by id give."""
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
    """Return the metrics of torchmetrics; its MAP@k has another denominator, so that only MAP is compared."""
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
    # Shown 2, 1, 0 and 0 times: the mean difference of all pairs over twice the mean.
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
