"""Test lists that are text: in brackets, as Python, JSON, NumPy, Spark and Postgres write them."""

import numpy as np
import pytest

from data.reading.lists import values_in_brackets
from tests.data.raw_files import error_of

pl = pytest.importorskip("polars")

EVENTS = "user,item,timestamp\n" + "".join(f"1,{item},{item}\n" for item in range(1, 5))
TEXTS = {
    "['Action', 'Comedy']": ("Action", "Comedy"),
    '["Action", "Sci-Fi, hard"]': ("Action", "Sci-Fi, hard"),
    "[\"Children's\", 'Film \\'noir\\'']": ("Children's", "Film 'noir'"),
    '["Com\\u00e9die", "\\ud83d\\ude00"]': ("Comédie", "\U0001f600"),
    "['Action' 'Comedy'\n 'Drama']": ("Action", "Comedy", "Drama"),
    "[Action, Science Fiction, Children's]": ("Action", "Science Fiction", "Children's"),
    "{Action,Comedy}": ("Action", "Comedy"),
    "{'Action', 'Comedy'}": ("Action", "Comedy"),
    "('Action', 'Comedy',)": ("Action", "Comedy"),
    "[1, 2]": ("1", "2"),
    "[1 2  3]": ("1", "2", "3"),
    "['Action', None, nan]": ("Action",),
    "[]": (),
    " [ 'a' ] ": ("a",),
    "[['a'], ['b']]": None,
    "{'a': 1}": None,
    "['a', 'b]": None,
    "['\\x']": None,
}


@pytest.mark.parametrize("text", TEXTS)
def test_values_in_brackets(text):
    assert values_in_brackets(text) == TEXTS[text]


def items_of(load, column, kind="csv", **options):
    """Return the values of each item's list, read from a file of features with these four texts."""
    path = "items." + kind
    frame = pl.DataFrame({"item": [1, 2, 3, 4], "genres": column})
    folder = options.pop("folder")
    frame.write_csv(folder / path) if kind == "csv" else frame.write_parquet(folder / path)
    file = {"format": kind, "path": str(folder / path), "columns": {"genres": "list"}, **options}
    (feature,) = load("csv", EVENTS, features={"items": file}).features
    return [feature.values[feature.codes[a:b]].tolist() for a, b in zip(feature.offsets, feature.offsets[1:])]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_lists_in_brackets_are_read_and_others_split(load, tmp_path, kind):
    column = ["['Action', 'Comedy']", "Action|Comedy", "(1999)", "[]"]
    expected = [["Action", "Comedy"], ["Action", "Comedy"], ["(1999)"], []]
    assert items_of(load, column, kind, folder=tmp_path) == expected


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_list_that_cannot_be_read(load, tmp_path, kind):
    with pytest.raises(Exception, match=r"items.* [23], column genres: expected values between separators, or a list"):
        items_of(load, ["a", "[['a'], ['b']]", "b", "c"], kind, folder=tmp_path)


def test_real_lists_of_parquet_keep_brackets(load, tmp_path):
    column = pl.Series([["[a]", "b"], ["x|y"], [], None], dtype=pl.List(pl.String))
    assert items_of(load, column, "parquet", folder=tmp_path) == [["[a]", "b"], ["x|y"], [], []]


def test_lists_in_events(load, tmp_path):
    rows = "user;item;timestamp;tags\n1;1;1;['a', 'b']\n1;2;2;b|c\n"
    options = {"features": {"events": {"columns": {"tags": "list"}}}}
    (feature,) = load("csv", rows, **options).features
    assert feature.values.tolist() == ["a", "b", "c"] and np.diff(feature.offsets).tolist() == [2, 2]


def test_category_whose_values_are_lists(load, tmp_path):
    rows = "item,genres\n" + "".join(f"{item},\"['a', 'b{item}']\"\n" for item in (1, 2, 3, 4))
    (tmp_path / "items.csv").write_text(rows)
    file = {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": {"genres": "category"}}
    message = error_of(load, "csv", EVENTS, features={"items": file})
    assert "items.csv: genres: its values are lists, like \"['a', 'b1']\": set its kind to list" in message
    file["columns"] = {"genres": "list"}
    assert load("csv", EVENTS, features={"items": file}).features[0].values.tolist() == ["a", "b1", "b2", "b3", "b4"]


@pytest.mark.parametrize("partitions", [1, 2])
def test_ids_that_are_lists(load, partitions):
    rows = "user,item,timestamp\n" + "".join(f'{user},"[{user}, 12]",1\n' for user in range(4))
    message = error_of(load, "csv", rows, partitions=partitions)
    assert "expected one item id in each row, got lists like '[0, 12]'" in message
    assert load("csv", 'user,item,timestamp\n1,"[A, B]",1\n1,C,2\n1,D,3\n').num_items == 3


@pytest.mark.parametrize("line", ["u1 [1, 2, 3]", "u1,[1,2]", "u1\t['a' 'b']"])
def test_sequences_in_brackets(load, line):
    assert "line 1: a list in brackets, expected one item" in error_of(load, "sequences", f"{line}\n")
    assert load("sequences", "u1 a[1] [b]\n").num_events == 2
