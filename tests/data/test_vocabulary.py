"""Test new data with a trained model's vocabulary: known items keep their numbers, others are left out and counted."""

import numpy as np
import pytest

from data.datasets import DataError, Vocabulary, load_dataset
from data.vocabulary import index_of, united, vocabulary_of
from tests.data.raw_files import error_of, events

pytest.importorskip("polars")  # it reads raw files

HEADER = "user,item,timestamp,how\n"
OLD = HEADER + "ann,tea,1,0\nann,milk,2,1\nbob,milk,3,2\n"
NEW = HEADER + "eve,milk,5,1\neve,salt,6,0\neve,tea,7,2\ndan,salt,8,1\nbob,tea,9,0\nbob,tea,10,0\n"
ACTIONS = {"columns": {"action": "how"}}


def test_index_of():
    known = np.array([30, 10, 20])
    assert index_of(np.array([20, 5, 30, 99]), known).tolist() == [2, -1, 0, -1]
    assert index_of(np.array(["20", "020", "x"]), known).tolist() == [2, -1, -1]
    assert index_of(np.array([7, 70]), np.array(["a", "7"])).tolist() == [1, -1]
    assert index_of(np.array([7]), known[:0]).tolist() == [-1]


def test_known_items_keep_their_numbers(load):
    old = load("csv", OLD, **ACTIONS)
    vocabulary = vocabulary_of(old)
    assert (vocabulary.item_ids.tolist(), vocabulary.num_actions) == (["milk", "tea"], 3)
    new = load("csv", NEW, vocabulary=vocabulary, **ACTIONS)
    assert events(new) == [
        ("bob", "tea", 9, 0),
        ("bob", "tea", 10, 0),
        ("eve", "milk", 5, 1),
        ("eve", "tea", 7, 2),
    ]
    assert new.item_ids.tolist() == old.item_ids.tolist() and new.items.dtype == np.int32
    assert new.left_out == {"items": 1, "events": 2, "users": 1}
    assert "1 items are not known" in new.notes[-1] and "2 of 6 events and 1 of 3 users" in new.notes[-1]
    assert new.fingerprint not in (old.fingerprint, load("csv", NEW, **ACTIONS).fingerprint)


def test_filters_with_a_vocabulary(load):
    vocabulary = Vocabulary(np.array(["tea", "milk", "beer"]))
    new = load("csv", NEW, vocabulary=vocabulary, min_user_events=2, min_item_events=99)
    assert [e[:2] for e in events(new)] == [("bob", "tea"), ("bob", "tea"), ("eve", "milk"), ("eve", "tea")]
    assert new.items.tolist() == [0, 0, 1, 0] and new.num_items == 3
    assert "no user has 3 events" in error_of(load, "csv", NEW, vocabulary=vocabulary, min_user_events=3)
    assert "none of its 3 items is known" in error_of(load, "csv", NEW, vocabulary=Vocabulary(np.array([1, 2])))


def test_action_that_the_model_has_no_row_for(load):
    vocabulary = Vocabulary(np.array(["milk", "tea"]), num_actions=2)
    assert "action 2 is not known to the trained model, which knows 0 to 1" in error_of(
        load, "csv", NEW, vocabulary=vocabulary, **ACTIONS
    )


def test_without_a_cache_nothing_is_written(load, tmp_path):
    cached = load("csv", OLD)
    file = tmp_path / "raw.txt"
    before = sorted(tmp_path.rglob("*"))
    in_memory = load_dataset("csv", file, cache_dir=None)
    assert events(in_memory) == events(cached) and in_memory.fingerprint == cached.fingerprint
    assert sorted(tmp_path.rglob("*")) == before


def test_united_items_and_actions(load):
    """Check that known text keeps its codes, items are ascending, and a data set without new ones is unchanged."""
    data = load("csv", HEADER + "ann,9,1,buy\nann,tea,2,view\n", **ACTIONS)
    known = Vocabulary(np.array([30, 9]), 2, ("view", "like"))
    both = united(data, known)
    assert both.item_ids.tolist() == ["30", "9", "tea"] and both.action_names == ("view", "like", "buy")
    assert both.items.tolist() == [1, 2] and both.actions.tolist() == [2, 0]
    assert not any("buy" in note for note in both.notes) and both.fingerprint == data.fingerprint
    assert united(both, vocabulary_of(both)) is both
    numbers = load("csv", OLD, **ACTIONS)
    with pytest.raises(DataError, match="the actions are numbers, those of the trained model text"):
        united(numbers, known)
