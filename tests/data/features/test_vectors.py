"""Test vectors of items: files to unit vectors in the order of the catalogue, with little memory, and errors."""

import tracemalloc

import numpy as np
import pytest

from data.features.features import VECTOR
from data.features.options import Features
from data.features.vectors import AT_ONCE, normalized, open_npy, packed
from data.features.vocabulary import fit_features, grown
from data.options import parse_options
from data.reading.sources import RawFile
from data.types import DataError
from data.vocabulary import united, vocabulary_of
from tests.data.raw_files import error_of
from tests.data.test_cache import folder_of

pl = pytest.importorskip("polars")  # it reads raw files

EVENTS = "user,item,timestamp\n" + "".join(f"u{n % 3},i{n % 5},{n}\n" for n in range(15))
IDS = ["i3", "i0", "i9", "i4", "i1"]  # i2 has none, i9 is in no event
VECTORS = np.random.default_rng(0).normal(size=(5, 3)) * [[1e30], [1], [1], [1e-30], [2]]


@pytest.fixture
def with_vectors(load, tmp_path):
    """Return with_vectors(vectors, ids, **options) -> Dataset of EVENTS with the vectors in a .npy file."""

    def read(vectors=VECTORS, ids=IDS, **options):
        np.save(tmp_path / "titles.npy", vectors)
        (tmp_path / "titles.ids.txt").write_text("\n".join(ids) + "\n")
        items = {"format": "npy", "path": str(tmp_path / "titles.npy"), "columns": {"title": "vector"}}
        return load("csv", EVENTS, features={"items": items | {"unknown": "drop"} | options})

    return read


def rows_of(feature):
    """Return the vector of each item, zeros for one without."""
    rows = np.zeros((len(feature.offsets) - 1, feature.values.shape[1]), np.float32)
    rows[np.diff(feature.offsets) > 0] = feature.values[feature.codes]
    return rows


def expected(items=("i0", "i1", "i2", "i3", "i4")):
    unit = dict(zip(IDS, VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)))
    return np.stack([unit.get(item, np.zeros(3)) for item in items])


def test_vectors_of_a_npy_file(with_vectors, tmp_path):
    dataset = with_vectors()
    (feature,) = dataset.features
    assert (feature.entity, feature.name, feature.kind) == ("items", "title", VECTOR)
    assert isinstance(feature.values, np.memmap) and feature.values.dtype == np.float16
    np.testing.assert_allclose(rows_of(feature), expected(), atol=5e-4)
    assert dataset.notes[-1] == "titles.npy: title of items; 1 of 5 items have no vector title and get zeros"
    # Only the data set's folder is left in the cache.
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [folder_of(tmp_path).name]
    added = with_vectors(unknown="add")
    np.testing.assert_allclose(rows_of(added.features[0]), expected([*added.item_ids]), atol=5e-4)
    assert added.item_ids.tolist() == ["i0", "i1", "i2", "i3", "i4", "i9"]


def test_rows_of_zeros_are_missing_vectors(with_vectors):
    vectors = VECTORS.copy()
    vectors[0] = 0
    dataset = with_vectors(vectors.astype(np.float32))
    assert not rows_of(dataset.features[0])[3].any()
    assert "2 of 5 items have no vector title" in dataset.notes[-1]


def test_vectors_next_to_other_features(load, tmp_path):
    np.save(tmp_path / "titles.npy", VECTORS.astype(np.float32))
    np.save(tmp_path / "names.npy", np.array(IDS))
    (tmp_path / "items.csv").write_text("item,brand\n" + "".join(f"i{n},b{n % 2}\n" for n in range(5)))
    title = {"kind": "vector", "path": str(tmp_path / "titles.npy"), "ids": str(tmp_path / "names.npy")}
    columns = {"title": title, "brand": "category"}
    items = {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": columns, "unknown": "drop"}
    dataset = load("csv", EVENTS, features={"items": items})
    assert [feature.name for feature in dataset.features] == ["brand", "title"]
    np.testing.assert_allclose(rows_of(dataset.features[1]), expected(), atol=5e-4)
    before = dataset.fingerprint
    np.save(tmp_path / "titles.npy", VECTORS[::-1].astype(np.float32))
    assert load("csv", EVENTS, features={"items": items}).fingerprint != before


@pytest.mark.parametrize("kind", [pl.Array(pl.Float32, 3), pl.List(pl.Float64)])
def test_vectors_of_a_parquet_file(load, tmp_path, kind):
    vectors = [*VECTORS.tolist()[1:], None]
    frame = pl.DataFrame({"sku": [*IDS[1:], "i2"], "a": pl.Series(vectors, dtype=kind), "brand": list("xyxyx")})
    frame.write_parquet(tmp_path / "items.parquet", row_group_size=2)
    columns = {"title": {"kind": "vector", "column": "a"}, "brand": "category"}
    items = {"format": "parquet", "path": str(tmp_path / "items.parquet"), "id": "sku", "columns": columns}
    dataset = load("csv", EVENTS, features={"items": items | {"unknown": "drop"}})
    assert [feature.name for feature in dataset.features] == ["brand", "title"]
    np.testing.assert_allclose(rows_of(dataset.features[1]), expected() * [[1], [1], [1], [0], [1]], atol=5e-4)
    assert "2 of 5 items have no vector title" in dataset.notes[-1]
    only = items | {"columns": {"title": columns["title"]}, "unknown": "drop"}
    assert [feature.name for feature in load("csv", EVENTS, features={"items": only}).features] == ["title"]


def test_without_a_cache_vectors_are_in_memory(load, tmp_path):
    from data.datasets import load_dataset

    np.save(tmp_path / "titles.npy", VECTORS)
    np.save(tmp_path / "titles.ids.npy", np.array(IDS))
    (tmp_path / "e.csv").write_text(EVENTS)
    items = {"format": "npy", "path": str(tmp_path / "titles.npy"), "columns": {"t": "vector"}, "unknown": "drop"}
    dataset = load_dataset("csv", tmp_path / "e.csv", cache_dir=None, features={"items": items})
    np.testing.assert_allclose(rows_of(dataset.features[0]), expected(), atol=5e-4)


def test_many_vectors_are_read_in_parts(with_vectors):
    """Test a first part without vectors of items, and a second part with them."""
    width = 64
    many = np.zeros((AT_ONCE // width + 3, width), np.float32)
    many[-3:] = np.arange(3)[:, None] + 1
    ids = [f"x{n}" for n in range(len(many) - 3)] + ["i2", "i0", "i1"]
    assert rows_of(with_vectors(many, ids).features[0])[:, 0].tolist() == [0.125, 0.125, 0.125, 0, 0]


def test_memory_does_not_grow_with_the_vectors(monkeypatch, tmp_path):
    """Test with 5 MB of vectors, read 16 KiB at a time."""
    monkeypatch.setattr("data.features.vectors.AT_ONCE", 2**12)
    np.save(tmp_path / "v.npy", np.ones((20_000, 64), np.float32))
    file = open_npy(RawFile(tmp_path / "v.npy", "v.npy"), "title")
    place = np.arange(20_000)[::-1]
    tracemalloc.start()
    feature, _ = packed(file, place, tmp_path / "out")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000 < feature.values.nbytes and feature.values[-1, 0] == 0.125  # 8 bytes an item, and a part


def test_vectors_whose_squares_overflow():
    vectors, finite = normalized(np.array([[3e38, 3e38], [1e-45, 0], [np.inf, 1], [0, 0]], np.float32))
    assert finite.tolist() == [True, True, False, True]
    np.testing.assert_allclose(vectors[:2].astype(float), [[0.5**0.5] * 2, [1, 0]], atol=1e-3)
    assert not vectors[2:].any()


NAN = VECTORS.copy()
NAN[1, 1] = np.nan
BAD = {
    "not finite": (NAN, IDS, "titles.npy: expected finite numbers, got NaN or infinity in row 2"),
    "one dimension": (VECTORS[0], IDS, "expected an array [items, size] of floating-point numbers, got [3] of float64"),
    "integers": (np.ones((5, 3), int), IDS, "of floating-point numbers, got [5, 3] of int64"),
    "objects": (np.array([[None]]), IDS, "not a readable .npy file"),
    "too few ids": (VECTORS, IDS[1:], "titles.ids.txt: 4 ids, titles.npy has 5 vectors"),
    "an id twice": (VECTORS, ["i3", "i0", "i9", "i4", "i0"], "two rows for item 'i0', rows 2 and 5"),
    "an empty id": (VECTORS, ["i3", "", "i9", "i4", "i0"], "titles.ids.txt row 2: expected an id of 1 to 256"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_vectors_get_one_line(with_vectors, tmp_path, name):
    vectors, ids, message = BAD[name]
    assert message in error_of(with_vectors, vectors, ids)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_other_errors(with_vectors, load, tmp_path):
    message = error_of(with_vectors, unknown="error")
    assert "titles.npy: 1 of 5 items are in no event: 'i9'; data.features.items.unknown=drop leaves them out" in message
    (tmp_path / "titles.ids.txt").unlink()
    items = {"format": "npy", "path": str(tmp_path / "titles.npy"), "columns": {"title": "vector"}}
    message = error_of(load, "csv", EVENTS, features={"items": items})
    assert (
        "data.features.items.columns.title.ids: expected the ids of the vectors in titles.ids.npy or titles.ids.txt"
        in message
    )
    rows = {"item": ["i0", "i1", "i2"], "a": [[1.0, 2.0], [1.0, 2.0], [1.0]], "b": [1.0, 2.0, 3.0]}
    pl.DataFrame(rows).write_parquet(tmp_path / "items.parquet")
    for column, expected in (
        ("a", "items.parquet row 3, column a: expected 2 numbers, as in the other rows, got 1"),
        ("b", "items.parquet, column b: expected lists of floating-point numbers, got Float64"),
        ("c", "items.parquet: no column 'c' (data.features.items.columns.c)"),
    ):
        items = {"format": "parquet", "path": str(tmp_path / "items.parquet"), "columns": {column: "vector"}}
        assert expected in error_of(load, "csv", EVENTS, features={"items": items})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"format": "csv", "columns": {"t": "vector"}}, "columns.t.path: missing, a csv file has no vectors"),
        ({"format": "npy", "columns": {"t": "category"}}, "a .npy file is one feature, expected NAME: vector"),
        ({"format": "npy", "columns": None}, "columns: missing"),
        (
            {"format": "csv", "columns": {"t": {"kind": "list", "path": "x"}}},
            "path, ids: expected kind vector, got list",
        ),
        ({"format": "parquet", "columns": {"t": "vector"}, "on_bad_row": "drop"}, "on_bad_row: drop is not for files"),
        (
            {"format": "parquet", "columns": {"t": {"kind": "vector", "ids": "x"}}},
            "columns.t.ids: the ids of a Parquet",
        ),
    ],
)
def test_inconsistent_options(items, message):
    with pytest.raises(DataError, match=message):
        parse_options(Features, {"items": {"path": "x"} | items}, "data.features")
    with pytest.raises(DataError, match="kind"):
        users = {"format": "parquet", "path": "x", "columns": {"t": "vector"}}
        parse_options(Features, {"users": users}, "data.features")


def test_damaged_vectors_are_read_anew(with_vectors, caplog, tmp_path):
    with_vectors()
    file = folder_of(tmp_path) / "feature-0-values.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    np.testing.assert_allclose(rows_of(with_vectors().features[0]), expected(), atol=5e-4)
    assert "damaged" in caplog.text


def test_vectors_of_items_that_are_not_in_new_data_are_kept(with_vectors):
    """Check an update with other items: those only in the run keep their vectors. Another size is refused."""
    options = parse_options(Features, {"items": {"format": "npy", "path": "x", "columns": {"title": "vector"}}}, "f")
    first = with_vectors(unknown="add")
    known = vocabulary_of(first, fit_features(first, first.user_offsets[1:], options))
    second = united(with_vectors(VECTORS[[0, 1, 3]], ["i3", "i0", "i4"]), known)
    assert second.item_ids.tolist() == first.item_ids.tolist()
    rows = rows_of(second.features[0])
    np.testing.assert_allclose(rows[[0, 3, 4, 5]], expected(["i0", "i3", "i4", "i9"]), atol=5e-4)
    assert not rows[[1, 2]].any()  # in the new data, without a vector there
    narrow = with_vectors(VECTORS[:, :2], unknown="add")
    narrow = fit_features(narrow, narrow.user_offsets[1:], options)
    with pytest.raises(DataError, match=r"title of items .vector of 2. is in the data, not in the run"):
        grown(narrow, known.features, np.arange(6))
