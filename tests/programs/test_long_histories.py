"""Run the configs for data sets whose users have thousands of events, each on a generated file of its format."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

import train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
USERS, EVENTS, ITEMS = 6, 120, 40
SMALL = [
    "model.max_seq_len=100", "model.embedding_dim=8", "model.num_layers=1", "model.num_heads=2", "train.epochs=1",
    "train.batch_size=2", "loss.num_negatives=8", "train.autocast=none", "device=cpu", "threads=1",
    "data.min_item_events=2", "eval.every=1",
]  # fmt: skip


def rows():
    """Yield (user, item, time, result) of USERS users with EVENTS events each, latest first."""
    rng = np.random.default_rng(0)
    for user in range(1, USERS + 1):
        for event in reversed(range(EVENTS)):
            yield user, int(rng.integers(1, ITEMS + 1)), 1_600_000_000 + 3600 * event + user, int(rng.integers(2))


def write_kuairand(folder):
    names = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view"
    names += ",play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
    lines = [f"{u},{i},20220408,1400,{1000 * t},{a},0,0,0,0,0,{a},100,200,0,0,0,0,1" for u, i, t, a in rows()]
    half = len(lines) // 2
    (folder / "data").mkdir(parents=True)
    for name, part in (("4_08_to_4_21_1k", lines[:half]), ("4_22_to_5_08_1k", lines[half:])):
        (folder / f"data/log_standard_{name}.csv").write_text("\n".join([names, *part]) + "\n")


def write_lastfm(folder):
    def moment(seconds):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))

    lines = [f'user_{u:06}\t{moment(t)}\t\tArtist "{i}"\t\tTrack, {a}' for u, i, t, a in rows()]
    lines.insert(5, "user_000001\tyesterday\t\tArtist 1\t\tTrack")  # a bad row, which the config drops
    folder.mkdir(parents=True)
    (folder / "userid-timestamp-artid-artname-traid-traname.tsv").write_text("\n".join(lines) + "\n")


def write_ml_20m(folder):
    lines = [f"{u},{i},{3.5 + a / 2},{t}" for u, i, t, a in rows()]
    folder.mkdir(parents=True)
    (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")


@pytest.mark.parametrize(
    "name, write",
    [("kuairand-1k-hstu", write_kuairand), ("lastfm-1k-hstu", write_lastfm), ("ml-20m-long-hstu", write_ml_20m)],
)
def test_a_run_on_a_generated_file(tmp_path, monkeypatch, name, write):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "raw")
    arguments = [str(CONFIGS / f"{name}.yaml"), "data.path=raw", *SMALL, "--run", "run", "--quiet"]
    assert train.main(arguments) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["users"] == USERS and result["items"] == ITEMS and 0 < result["model"]["none"]["MRR"] < 1
    assert any("1 bad row" in note or "1 row" in note for note in result["notes"]) == (name == "lastfm-1k-hstu")
    # The whole history was read and cut to the window: at least EVENTS / 2 events come before the last target.
    assert result["by_history"][-1]["history"] == "101-200"
