"""Test with real data sets, where present: preparation, a shortened training, evaluation over the full catalogue."""

import json
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real data sets are not here")


def result_of(folder, config, *settings):
    assert train.main([str(ROOT / "configs" / config), *settings, "--run", str(folder)]) == 0
    return json.loads((folder / "result.json").read_text())


@needs_data
@pytest.mark.parametrize("epochs", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_shortened_ml_100k_learns_and_its_popularity_is_the_published_one(tmp_path, epochs):
    result = result_of(
        tmp_path / "run",
        "ml-100k-hstu.yaml",
        f"data.path={DATA / 'ml-100k'}",
        f"data.cache_dir={tmp_path}",
        f"train.epochs={epochs}",
        "train.lr=4e-3",
        "eval.every=0",
    )
    popularity = result["popularity"]["window"]
    assert (round(popularity["HR@10"], 3), round(popularity["NDCG@10"], 3)) == (0.075, 0.041)
    assert result["users"] == 943 and result["epoch"] == epochs
    # After one epoch, better than an untrained model; after eight, better than popularity.
    assert result["model"]["window"]["HR@10"] > (1.3 * popularity["HR@10"] if epochs == 8 else 3 * 10 / 1682)


@needs_data
@pytest.mark.slow
def test_beauty_trains_and_ranks_the_full_catalogue(tmp_path):
    """Train a few steps only: an epoch takes minutes (README)."""
    result = result_of(
        tmp_path / "run",
        "beauty-hstu.yaml",
        f"data.path={DATA / 'beauty'}",
        f"data.cache_dir={tmp_path}",
        "data.min_user_events=40",
        "train.epochs=1",
        "eval.every=0",
        "eval.patience=null",
    )
    assert result["users"] > 200
    assert 0 < result["model"]["history"]["HR@200"] < 1
