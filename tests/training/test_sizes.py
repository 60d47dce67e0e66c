"""Test the choice of options that are `auto` from the data."""

import numpy as np
import pytest
import yaml

from data.errors import ConfigError
from tests.programs.test_train import run
from training.config import AUTO_DEFAULTS, as_yaml, load_config
from training.sizes import longest_of, resolve_auto


class Histories:
    """A data set of users with histories of these lengths, in which each item occurs `times` times in a row."""

    num_items = 20_000

    def __init__(self, *lengths, times=1):
        self.user_offsets = np.append(0, np.cumsum(np.concatenate(lengths)))
        self.num_users, self.num_events = len(self.user_offsets) - 1, int(self.user_offsets[-1])
        self.items = np.arange(self.num_events) // times % self.num_items


def config(*overrides):
    return load_config("configs/default.yaml", overrides)


def sizes(dataset, *overrides):
    c = resolve_auto(config(*overrides), dataset)
    assert c.auto == []
    return c.model.embedding_dim, c.model.num_layers, c.model.num_heads, c.train.batch_size, c.model.max_seq_len


def test_sizes_follow_the_histories():
    short, middle, long = (Histories(np.full(60_000 // events, events)) for events in (9, 40, 150))
    assert sizes(short) == (512, 2, 8, 256, 10)
    assert sizes(middle) == (256, 3, 4, 128, 40)
    assert sizes(long) == (128, 4, 2, 32, 150)
    assert sizes(Histories(np.full(100, 90))) == (64, 2, 1, 32, 90)  # few events
    assert sizes(Histories(np.full(400, 150), times=3)) == (256, 3, 4, 32, 150)  # users return to items
    assert longest_of(Histories(np.full(990, 12), np.full(10, 10_000)), 200) == 20
    assert longest_of(Histories(np.full(100, 10_000)), 200) == 200


@pytest.mark.slow
def test_evaluations_and_windows_follow_the_users():
    few, many = (resolve_auto(config(), Histories(np.full(users, 1000))) for users in (60, 6400))
    assert few.eval.every == 54 and many.eval.every == 2  # steps of 32 users, at least 100 steps
    assert few.train.augment.window == 0.5
    assert resolve_auto(config(), Histories(np.full(6000, 150))).train.augment.window == 0


def test_auto_values_fit_values_that_are_set():
    c = resolve_auto(config("model.embedding_dim=96", "train.batch_size=7"), Histories(np.full(6000, 9)))
    assert (c.model.embedding_dim, c.model.num_heads, c.model.feed_forward_dim, c.train.batch_size) == (96, 1, 192, 7)
    assert c.model.num_layers == 2


def test_auto_is_a_list_of_known_options():
    before = config()
    assert (
        sorted(before.auto) == sorted(AUTO_DEFAULTS)
        and before.model.embedding_dim == AUTO_DEFAULTS["model.embedding_dim"]
    )
    again = type(before).model_validate(yaml.safe_load(as_yaml(before)))
    assert again == before  # the options are still `auto` in a written configuration
    with pytest.raises(ConfigError, match="lr"):
        config("train.lr=auto")


def test_a_dry_run_prints_values_chosen_from_the_data(tmp_path):
    (tmp_path / "events.csv").write_text(
        "user,item,timestamp\n" + "\n".join(f"{e % 30},{e % 7},{e}" for e in range(300)) + "\n"
    )
    place = [f"data.path={tmp_path}/events.csv", f"data.cache_dir={tmp_path}", "device=cpu", "threads=1"]
    done = run("train.py", "configs/default.yaml", "--dry-run", *place)
    assert done.returncode == 0, done.stderr
    for words in ("model.embedding_dim=64", "model.head.repeats=8", "loss.exclude=none", "train.batch_size=32"):
        assert words in done.stdout
