"""Check targets that repeat an earlier item with each filter, in metrics and in lists."""

import csv
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from data.splits import repeats, target_events
from data.types import Dataset
from evaluation.ranking_metrics import REMOVED, ranking_metrics
from evaluation.scores import FILTERS, popularity_scorer, rank_targets
from serving import Recommender
from tests.programs.test_train import run
from training.config import load_config
from training.run import open_data

REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
NUM_ITEMS = 25
CONFIG = """
name: shop
seed: 1
device: cpu
threads: 1
data: {format: csv, path: PATH/NAME.csv, protocol: leave_one_out, cache_dir: PATH/cache}
model:
  {block: hstu, max_seq_len: 4, embedding_dim: 16, num_layers: 1, num_heads: 2, attention: {kind: dense},
   head: {kind: dot, repeats: auto}}
loss: {kind: cross_entropy, exclude: auto}
train: {epochs: 2, batch_size: 16, lr: 1e-2, checkpoint_seconds: 1000}
"""


def shop(repeated):
    """Return 9 events of each of 40 users.

    If `repeated`, the last two events of every second user repeat earlier items: the second last an item of the window,
    the last an item from before the window.
    """
    rng, lines = np.random.default_rng(0), []
    for user in range(40):
        items = rng.permutation(NUM_ITEMS)[:9]
        if repeated and user % 2:
            items[7], items[8] = items[5], items[1]
        lines += [f"u{user:02d},i{item:02d},{1000 * place + user}" for place, item in enumerate(items)]
    return "user,item,timestamp\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with the runs `again` and `new`, trained on data with and without repeats."""
    place = tmp_path_factory.mktemp("repeats")
    for name in ("again", "new"):
        (place / f"{name}.csv").write_text(shop(name == "again"))
        (place / f"{name}.yaml").write_text(CONFIG.replace("PATH", str(place)).replace("NAME", name))
        done = run("train.py", place / f"{name}.yaml", "--run", place / name)
        assert done.returncode == 0, done.stderr
    return place


def history_of(place, name):
    """Return the items of each user in order of time, by id."""
    with (place / f"{name}.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["timestamp"]))
    return {user: [row["item"] for row in rows if row["user"] == user] for user in {row["user"] for row in rows}}


def ranks_in(path, targets):
    """Return the place of each user's target in the user's list, REMOVED where the list has no such item."""
    rows = pl.read_csv(path).group_by("user", maintain_order=True).agg("item")
    lists = dict(zip(rows["user"], rows["item"].to_list()))
    return np.array([lists[u].index(target) + 1 if target in lists[u] else REMOVED for u, target in targets.items()])


@pytest.mark.parametrize("name", ["again", "new"])
@pytest.mark.parametrize("serve", [(), ("--serve", "--slide", "1", "--cache-bytes", "16777216")])
def test_metrics_agree_with_the_lists(runs, name, serve):
    history = history_of(runs, name)
    for how in FILTERS:
        options = ("--predict", runs / "lists.csv", "--top-k", NUM_ITEMS, "--overwrite", *serve)
        done = run("eval.py", runs / name, f"eval.filter_seen={how}", *options)
        assert done.returncode == 0, done.stderr
        result = json.loads((runs / name / f"eval-test{'-serve-slide=1' if serve else ''}.json").read_text())
        ranks = ranks_in(runs / "lists.csv", {user: items[-1] for user, items in history.items()})
        for metric in ("HR@1", "HR@10", "NDCG@10", "MRR"):
            assert result["model"][how][metric] == pytest.approx(ranking_metrics(ranks)[metric], abs=1e-12)
        assert result["filter_seen"] == how and result["repeated"] == (0.5 if name == "again" else 0.0)
        missed = (ranks == REMOVED).mean()
        assert missed == (0.5 if name == "again" and how == "history" else 0.0)
        # The window of four events begins after the repeated item: a filter of the window does not remove it.
        assert result["model"]["window"]["HR@50"] == 1.0
        assert result["popularity"]["history"]["HR@50"] == result["model"]["history"]["HR@50"]


def test_auto_follows_the_data_and_is_recorded(runs):
    for name, how, patterns in (("again", "none", 8), ("new", "history", 0)):
        config = load_config(runs / name / "config.yaml")
        assert config.eval.filter_seen == config.loss.exclude == how and config.model.head.repeats == patterns
        assert json.loads((runs / name / "result.json").read_text())["filter_seen"] == how
    assert "50.00% of the targets repeat an earlier item of their user." in (runs / "again" / "report.md").read_text()
    # For other data, `auto` still has the value of the run's data.
    done = run("eval.py", runs / "again", "--data", runs / "new.csv", "eval.filter_seen=auto")
    assert done.returncode == 0, done.stderr
    result = json.loads((runs / "again" / "eval-test-of-new.csv.json").read_text())
    assert result["filter_seen"] == "none" and result["repeated"] == 0.0
    # Without a validation split, the last training events determine it.
    config = load_config(runs / "again.yaml", ["data.protocol=published"])
    assert open_data(config).config.eval.filter_seen == "none"
    assert run("train.py", "--resume", runs / "again", "train.epochs=3").returncode == 0


def test_sampled_ranks_among_unseen_items(runs):
    """A user has seen 8 of 25 items; without these and the target, 16 remain."""
    for count, warned in ((16, False), (20, True)):
        done = run("eval.py", runs / "new", "--sampled", count)
        assert done.returncode == 0, done.stderr
        assert ("40 users have fewer unseen items, all of which were ranked" in done.stdout) == warned
        # Ranking among all unseen items is the full ranking without the history.
        result = json.loads((runs / "new" / "eval-test.json").read_text())
        assert result["sampled"]["MRR"] == pytest.approx(result["model"]["history"]["MRR"])


@pytest.mark.parametrize("name", ["again", "new"])
def test_all_lists_follow_the_filter_of_the_run(runs, name):
    """Lists with filter `none` may have seen items, lists with other filters never do."""
    history = history_of(runs, name)
    assert run("eval.py", runs / name, "--recommend", runs / "next.csv", "--top-k", NUM_ITEMS).returncode == 0
    lists = set(pl.read_csv(runs / "next.csv").filter(pl.col("user") == "u01")["item"])
    served = Recommender.load(runs / name, history=True, cache_bytes=2**24)
    by_service = served.recommend(["u01"], k=NUM_ITEMS, at=8001)[0][0].tolist()
    assert lists == {item for item in by_service if item}
    owned = set(history["u01"])
    assert (owned <= lists) if name == "again" else not (owned & lists)
    for exclude in (True, False):
        chosen = set(served.recommend(["u01"], k=NUM_ITEMS, at=8001, exclude_seen=exclude)[0][0].tolist())
        assert (not owned & chosen) if exclude else (owned <= chosen)


def test_repeats_are_found_by_user():
    class Tiny:
        items, user_offsets, num_items = np.array([3, 1, 3, 3, 2, 1, 1]), np.array([0, 3, 3, 5, 7]), 4
        users_of = classmethod(Dataset.users_of)

    assert repeats(Tiny, np.arange(7)).tolist() == [False, False, True, False, False, False, True]
    assert repeats(Tiny, np.array([6, 2])).tolist() == [True, True]
    assert repeats(Tiny, np.array([4])).tolist() == [False]


@pytest.mark.skipif(not (REAL / "ml-100k").exists(), reason="the data are not here")
def test_movielens_has_no_repeats(tmp_path):
    """Removing all seen items except the target gives the same ranks as the filter."""
    config = load_config("configs/ml-100k-hstu.yaml", [f"data.path={REAL}/ml-100k", f"data.cache_dir={tmp_path}"])
    data = open_data(config)
    counts, test = np.bincount(data.dataset.items, minlength=data.dataset.num_items), data.splits.test
    assert not repeats(data.dataset, target_events(test)).any()
    scorer = popularity_scorer(counts, torch.device("cpu"))
    for how, ranks in zip(FILTERS, rank_targets(scorer, data.eval_batches("test").epoch(0), filters=FILTERS)):
        begin = {"none": test.end - 1, "window": test.begin, "history": data.dataset.user_offsets[test.users]}[how]
        for rank, first, end in zip(ranks[::7], begin[::7], test.end[::7]):
            target = data.dataset.items[end - 1]
            allowed = np.ones(len(counts), bool)
            allowed[data.dataset.items[first : end - 1]] = False
            allowed[target] = True
            better = (counts > counts[target]) | ((counts == counts[target]) & (np.arange(len(counts)) < target))
            assert rank == 1 + (better & allowed).sum()
