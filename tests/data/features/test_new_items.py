"""Test that new items get the rows and vectors that they would have in the model's data."""

from itertools import pairwise

import numpy as np
import pytest

from data.features.features import VECTOR, Feature, feature_of
from data.features.new_items import features_of_columns, new_items
from data.features.vocabulary import FeatureVocabulary, KnownFeature
from data.types import DataError
from data.vocabulary import Vocabulary, with_items

BRAND = feature_of("items", "brand", "category", 3, np.array([0, 2]), np.array(["a", "c"]))
PRICE = feature_of("items", "price", "number", 3, np.array([0, 1]), np.array([1.0, 5.0]))
TAGS = feature_of("items", "tags", "list", 3, np.array([0, 0, 1]), np.array(["x", "y", "y"]))
TITLE = Feature("items", "title", VECTOR, np.eye(3, 2, dtype=np.float16), np.arange(3, dtype=np.int32), np.arange(4))
KNOWN = FeatureVocabulary(
    (
        KnownFeature("items", "brand", "category", np.array(["a", "c"])),
        KnownFeature("items", "price", "number", np.array([4.0])),
        KnownFeature("items", "tags", "list", np.array(["x", "y"])),
    ),
    trained=np.ones(3, bool),
    items=(BRAND, PRICE, TAGS),
    vectors=(TITLE,),
)
COLUMNS = {
    "brand": ["c", "b", None, 7],
    "price": [5, 3.5, None, None],
    "tags": [["y", "x", "y"], [], None, ["z", "x", ""]],
    "title": [[3, 4], None, None, np.array([0.0, -2.0])],
}


def test_values_become_rows():
    items = new_items(KNOWN, 4, features_of_columns(KNOWN, 4, COLUMNS))
    lists = [[rows[a:b].tolist() for a, b in pairwise(ends)] for ends, rows in items.item_rows]
    assert lists == [[[2], [0], [], [0]], [[2], [1], [], []], [[2, 1], [], [], [0, 1]]]
    (title,) = items.vectors
    np.testing.assert_allclose(title, [[0.6, 0.8], [0, 0], [0, 0], [0, -1]], atol=1e-3)
    assert items.described.tolist() == [True, True, False, True]
    vocabulary = with_items(
        Vocabulary(np.array(["i", "j", "k"]), features=KNOWN), np.array(["long", "b", "c", "d"]), items
    )
    assert vocabulary.item_ids.tolist() == ["i", "j", "k", "long", "b", "c", "d"]
    brand, _, tags = vocabulary.features.items
    assert brand.values.tolist() == ["7", "a", "b", "c"]
    assert [brand.values[brand.codes[a:b]].tolist() for a, b in pairwise(brand.offsets)] == [
        ["a"], [], ["c"], ["c"], ["b"], [], ["7"],
    ]  # fmt: skip
    assert tags.offsets.tolist() == [0, 2, 3, 3, 5, 5, 5, 7]


def test_unknown_features_and_values_can_be_left_out():
    """Logs may have the features of another model."""
    columns = COLUMNS | {"colour": ["red"] * 4, "title": [[1, 2, 3], [1, 0], "x", None], "price": ["a", 1, 1, 1]}
    with pytest.raises(DataError, match=r"price of items.0: expected a number, got 'a'"):
        features_of_columns(KNOWN, 4, {"price": columns["price"]})
    with pytest.raises(DataError, match="colour is not a feature of the run"):
        features_of_columns(KNOWN, 4, COLUMNS | {"colour": columns["colour"]})
    items = new_items(KNOWN, 4, features_of_columns(KNOWN, 4, columns, strict=False))
    assert items.vectors[0].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert [np.diff(ends).tolist() for ends, _ in items.item_rows] == [[1, 1, 0, 1], [0, 1, 1, 1], [2, 0, 0, 2]]


def test_without_any_value():
    items = new_items(KNOWN, 2, features_of_columns(KNOWN, 2, {"title": [None, None], "brand": [" ", None]}))
    assert not items.described.any() and items.vectors[0].shape == (2, 2)
