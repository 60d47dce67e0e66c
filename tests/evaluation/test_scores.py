"""Test ranks, filters and top-k lists on cases small enough to count by hand."""

import numpy as np
import pytest
import torch

from data.batch import Batch
from evaluation import scores as scores_module
from evaluation.ranking_metrics import REMOVED
from evaluation.scores import (
    SampledCandidates,
    best_items,
    mask_seen,
    popularity_scorer,
    rank_targets,
    seen_by,
    target_ranks,
    top_items,
)


def batch_of(histories, windows, targets):
    """Return a batch of one sequence a user; windows: the model's inputs, histories: all items before the target."""
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


def test_ranks_count_items_with_higher_scores():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]])
    assert target_ranks(scores, torch.tensor([0, 2])).tolist() == [4, 3]  # ties go to the smaller id
    assert target_ranks(scores, torch.tensor([3, 0])).tolist() == [3, 1]


def test_nan_ranks_last():
    scores = torch.full((1, 5), float("nan"))
    assert target_ranks(scores, torch.tensor([0])).tolist() == [5]


def test_filters_remove_the_window_or_history_and_a_target_in_it():
    # Item 4 scores best, then 3, 2, 1, 0. Item 4 is before the first user's window, 3 in it; the target is 2.
    batch = batch_of([[4, 3], [4, 2]], [[3], [2]], [2, 2])
    scorer = lambda batch: torch.arange(5.0).repeat(2, 1)
    none, window, history = rank_targets(scorer, [batch], filters=("none", "window", "history"))
    assert none.tolist() == [3, 3]
    assert window.tolist() == [2, REMOVED]  # the second user's target repeats an event of the window
    assert history.tolist() == [1, REMOVED]
    # The order of filters does not matter.
    again = rank_targets(scorer, [batch], filters=("history", "none"))
    assert [ranks.tolist() for ranks in again] == [[1, REMOVED], [3, 3]]


def test_popularity_is_the_same_for_all_users():
    batch = batch_of([[0], [1]], [[0], [1]], [1, 2])
    (ranks,) = rank_targets(popularity_scorer(np.array([5, 3, 1]), torch.device("cpu")), [batch], filters=("none",))
    assert ranks.tolist() == [2, 3]


def test_sampled_candidates_give_better_ranks_and_are_seeded():
    batch = batch_of([[0]] * 200, [[0]] * 200, [500] * 200)
    scorer = lambda batch: -torch.arange(1000.0).repeat(200, 1)
    (full,) = rank_targets(scorer, [batch], filters=("none",))
    sampled = [
        rank_targets(scorer, [batch], filters=("none",), candidates=SampledCandidates(100, seed=7))[0] for _ in range(2)
    ]
    assert (full == 501).all()
    assert (sampled[0] == sampled[1]).all()
    assert 45 < sampled[0].mean() < 57  # half of 100 distinct candidates score higher


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
        assert candidates.short == 1  # the second user has three unseen items other than the target
        everyone |= set(drawn[0].tolist())
    assert everyone == set(range(16)) - {3, 1, 5}
    # All scores are equal: exactly the candidates with a smaller id come before the target.
    (ranks,) = rank_targets(lambda _: torch.zeros(3, 16), [batch], filters=("none",), candidates=lambda *_: drawn)
    expected = [1 + sum(0 <= item < target for item in row) for row, target in zip(drawn.tolist(), [5, 12, 7])]
    assert ranks.tolist() == expected


def test_top_items_break_ties_by_id():
    values, items = top_items(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]]), 4)
    assert items.tolist() == [[1, 3, 2, 4]] and values.tolist() == [[3.0, 3.0, 2.0, 2.0]]
    assert top_items(torch.tensor([[1.0, 2.0]]), 10)[1].tolist() == [[1, 0]]


@pytest.mark.parametrize("k", [1, 7, 40, 300])
def test_top_items_break_ties_at_the_boundary(k):
    """Test few distinct scores, so that every row has a tie at position k; some are infinite or NaN."""
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
    """Test ranks and lists of a catalogue in tiles, the last one narrower, with ties within and across tiles."""
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

    monkeypatch.setattr(scores_module, "TILE", 10**9)
    whole = evaluated()
    monkeypatch.setattr(scores_module, "TILE", users * tile)
    parts = evaluated()
    for a, b in zip(whole[0] + whole[1], parts[0] + parts[1]):
        assert (a == b).all()
    for a, b in zip(whole[2], parts[2]):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    finite_scores = scores.clone().nan_to_num(float("-inf"))
    assert torch.equal(best_items(scores, 83)[1], top_items(finite_scores, 83)[1])
    assert whole[0][0].tolist() == target_ranks(scores, torch.tensor(targets)).tolist()


def test_mask_seen_in_place():
    scores = torch.zeros(2, 4)
    mask_seen(scores, torch.tensor([1, 1, 3]), torch.tensor([0, 2, 3]))
    assert scores.isinf().tolist() == [[False, True, False, False], [False, False, False, True]]
