"""Check time windows with all targets, and hidden events of the same time, against plain loops over events."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batches import Batches
from data.datasets import load_dataset
from data.splits import make_splits, target_events
from evaluation.ranking_metrics import Rankings, ranking_metrics
from evaluation.scores import rank_targets
from models.tasks.scoring import model_scorer
from tests.data.test_splits import dataset_of
from tests.programs.test_train import run
from tests.serving.plain import NUM_ITEMS, make_config, make_model

REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
LONGEST = 6
NAMES = ["HR@5", "NDCG@10", "Recall@10", "MAP@10", "MRR"]


def baskets(users=12, items=NUM_ITEMS, seed=0):
    """Return a data set with up to three events of a user at the same time."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(users):
        times = np.sort(rng.integers(0, 1000, 6))
        rows.append([(int(rng.integers(items)), int(t)) for t in times for _ in range(rng.integers(1, 4))])
    return dataset_of(rows, num_items=items)


def scores_by(history, num_items):
    """Score items by a hash of the history, with ties."""
    return (np.arange(num_items) * 7 + sum(history) * 31) % 97


def by_a_loop(dataset, fraction, hidden):
    """Compute the metrics of the last `fraction` of time by a loop over users and their events."""
    times = np.sort(dataset.timestamps)
    cut = times[round(len(times) * (1 - fraction))]
    by_user = []
    for user in range(dataset.num_users):
        span = range(dataset.user_offsets[user], dataset.user_offsets[user + 1])
        events = [(int(dataset.items[e]), int(dataset.timestamps[e])) for e in span]
        rankings = {}  # (time, place) or time -> (history, relevant items)
        for place, (item, time) in enumerate(events):
            history = [i for i, t in events[:place] if not (hidden and t == time)]
            if time >= cut and history:
                key = time if hidden else (time, place)
                rankings.setdefault(key, (history, set()))[1].add(item)
        values = []
        for history, relevant in rankings.values():
            scores = scores_by(history, dataset.num_items)
            order = sorted(range(dataset.num_items), key=lambda item, scores=scores: (-scores[item], item))
            places = sorted(order.index(item) + 1 for item in relevant)
            hits = [p for p in places if p <= 10]
            ideal = sum(1 / math.log2(i + 2) for i in range(min(10, len(places))))
            values.append([
                float(any(p <= 5 for p in places)),
                sum(1 / math.log2(p + 1) for p in hits) / ideal,
                len(hits) / len(places),
                sum((i + 1) / p for i, p in enumerate(hits)) / len(places),
                1 / places[0],
            ])  # fmt: skip
        if values:
            by_user.append(np.mean(values, 0))
    return dict(zip(NAMES, np.mean(by_user, 0)))


def by_batches(dataset, fraction, hidden):
    options = {"max_seq_len": LONGEST, "valid_fraction": 0.1, "test_fraction": fraction}
    same_time = "hidden" if hidden else "seen"
    test = make_splits(dataset, "temporal", targets="all", same_time=same_time, **options).test

    def scorer(batch):
        histories = np.split(batch.seen_items.numpy(), batch.seen_offsets[1:-1].numpy())
        rows = [scores_by([int(x) for x in history], dataset.num_items) for history in histories]
        return torch.from_numpy(np.stack(rows)).float()

    batches = Batches(dataset, test, batch_size=5, shuffle=False, with_seen=True)
    (ranks,) = rank_targets(scorer, batches.epoch(0), filters=["none"])
    return ranking_metrics(ranks, NAMES, Rankings.of(test))


@pytest.mark.parametrize("hidden", [False, True])
def test_all_targets_equal_a_plain_loop(hidden):
    dataset = baskets()
    assert by_batches(dataset, 0.4, hidden) == pytest.approx(by_a_loop(dataset, 0.4, hidden))


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "ml-100k").exists(), reason="the data are not here")
@pytest.mark.parametrize("hidden", [False, True])
def test_all_targets_equal_a_plain_loop_on_movielens(hidden, tmp_path):
    dataset = load_dataset("ml-100k", str(REAL / "ml-100k"), cache_dir=str(tmp_path))
    assert by_batches(dataset, 0.02, hidden) == pytest.approx(by_a_loop(dataset, 0.02, hidden))


@pytest.mark.parametrize("same_time", ["seen", "hidden"])
def test_no_later_event_changes_a_score(same_time):
    """Flipping the items of later events, with `hidden` also of events at the target's time, changes no score."""
    dataset, model = baskets(), make_model(make_config())
    options = {"max_seq_len": LONGEST, "test_fraction": 0.4, "targets": "all", "same_time": same_time}
    split = make_splits(dataset, "temporal", **options).test
    hidden, seen = same_time == "hidden", 0

    def scores(data, sample):
        part = replace(split, **{name: getattr(split, name)[sample : sample + 1] for name in ("users", "begin", "end")})
        part = replace(part, targets=None, target_offsets=None)
        (batch,) = Batches(data, part, batch_size=1, shuffle=False, with_seen=True).epoch(0)
        return next(iter(model_scorer(model)(batch).tiles()))[2], batch.seen_items

    for sample in range(0, len(split), 3):
        event = split.end[sample] - 1
        flipped = dataset.items.copy()
        later = dataset.timestamps >= dataset.timestamps[event] if hidden else np.arange(len(flipped)) >= event
        flipped[later] = (flipped[later] + 1) % NUM_ITEMS
        before, after = scores(dataset, sample), scores(replace(dataset, items=flipped), sample)
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        flipped[event - 1] = (flipped[event - 1] + 1) % NUM_ITEMS
        seen += not torch.equal(before[0], scores(replace(dataset, items=flipped), sample)[0])
    assert seen  # an earlier event does change scores


def test_hidden_holds_for_other_protocols():
    dataset = dataset_of([[(1, 10), (2, 20), (3, 30), (4, 30), (5, 30)], [(1, 7), (2, 7)]])
    splits = make_splits(dataset, "leave_one_out", max_seq_len=4, same_time="hidden")
    assert target_events(splits.test).tolist() == [4] and splits.test.end.tolist() == [3]
    assert splits.test.users.tolist() == [0]  # all of the other user's events have one time


def test_a_run_with_all_targets(tmp_path):
    """Train, report, serve and sample with baskets in the test window."""
    dataset = baskets(users=30)
    rows = [
        f"u{user},i{dataset.items[event]:02d},{dataset.timestamps[event]}"
        for user in range(30)
        for event in range(dataset.user_offsets[user], dataset.user_offsets[user + 1])
    ]
    (tmp_path / "shop.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    (tmp_path / "run.yaml").write_text(f"""
name: shop
device: cpu
threads: 1
data: {{format: csv, path: {tmp_path}/shop.csv, protocol: temporal, targets: all, cache_dir: {tmp_path}/cache}}
model: {{block: hstu, max_seq_len: 8, embedding_dim: 8, num_layers: 1, attention: {{kind: dense}}}}
loss: {{num_negatives: 4}}
train: {{epochs: 1, batch_size: 16, checkpoint_seconds: 1000}}
eval: {{same_time: hidden, metrics: [HR@5, Recall@10], best_metric: MAP@7}}
""")
    done = run("train.py", tmp_path / "run.yaml", "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(result["model"]["none"]) == ["HR@5", "Recall@10", "MAP@7"]
    assert result["targets"] > result["rankings"] > 0 and 0 < result["same_time"] < 1
    assert "are hidden from their history" in (tmp_path / "run" / "report.md").read_text()
    done = run("eval.py", tmp_path / "run", "--sampled", "5")
    assert done.returncode == 0, done.stderr
    done = run("eval.py", tmp_path / "run", "--serve", "--slide", "1", "--cache-bytes", "16777216")
    assert done.returncode == 0, done.stderr
    served = json.loads((tmp_path / "run" / "eval-test-serve-slide=1.json").read_text())
    assert served["model"]["none"] == pytest.approx(result["model"]["none"], abs=1e-6)
    done = run("eval.py", tmp_path / "run", "--predict", tmp_path / "lists.csv")
    assert done.returncode == 2 and "expected data.targets=first, got all" in done.stderr
