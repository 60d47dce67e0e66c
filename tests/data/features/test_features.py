"""Test features: reading and checking files, the cache's key and its damage, table rows from training data only."""

import dataclasses
import json

import numpy as np
import pytest

from data.datasets import load_dataset
from data.features.features import feature_of
from data.features.options import Features
from data.features.vocabulary import fit_features, with_rows
from data.options import parse_options
from data.vocabulary import vocabulary_of
from tests.data.raw_files import error_of
from tests.data.test_cache import folder_of

pl = pytest.importorskip("polars")  # it reads raw files

EVENTS = "user,item,timestamp\n" + "".join(f"u{n % 3},i{n % 5},{n}\n" for n in range(15))
ITEMS = "item,brand,tags,price\ni0,a,x|y,1.5\ni1,b,,2\ni2,a,y|y| z ,\ni3,,x,-3e1\ni4,c,w,7\n"
COLUMNS = {"brand": "category", "tags": "list", "price": "number"}


@pytest.fixture
def with_items(load, tmp_path):
    """Return with_items(text or path, **options of data.features.items) -> Dataset of EVENTS with these features."""

    def read(content, name="items.csv", **options):
        path = content
        if isinstance(content, (str, bytes)):
            path = tmp_path / name
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        kind = {"csv": "csv", "json": "attributes", "parquet": "parquet"}.get(path.suffix[1:], path.name)
        items = {"format": kind, "path": str(path)} | ({"columns": COLUMNS} if kind in ("csv", "parquet") else {})
        return load("csv", EVENTS, features={"items": items | options})

    return read


def values_of(dataset):
    """Map each feature's name to the values of every item, user or event."""
    return {
        feature.name: [
            feature.values[feature.codes[begin:end]].tolist()
            for begin, end in zip(feature.offsets[:-1], feature.offsets[1:])
        ]
        for feature in dataset.features
    }


EXPECTED = {
    "brand": [["a"], ["b"], ["a"], [], ["c"]],
    "tags": [["x", "y"], [], ["y", "z"], ["x"], ["w"]],
    "price": [[1.5], [2.0], [], [-30.0], [7.0]],
}


def test_items_of_a_csv_file(with_items):
    dataset = with_items(ITEMS)
    assert values_of(dataset) == EXPECTED
    assert dataset.notes[-1] == "items.csv: brand, tags, price of items"
    # Another order of rows, other separators, quotes and a byte order mark give the same features.
    lines = ITEMS.replace("|", "/").replace(",", ";").splitlines()
    text = "\ufeff" + "\r\n".join([lines[0], *lines[:0:-1]]).replace("b;", '"b";')
    columns = COLUMNS | {"tags": {"kind": "list", "separator": "/"}}
    dataset = with_items(text, columns=columns)
    assert values_of(dataset) == EXPECTED
    assert "fields are separated by a semicolon (data.features.items.separator)" in dataset.notes


def test_items_of_a_parquet_file(with_items, tmp_path):
    frame = pl.DataFrame(
        {
            "sku": ["i4", "i0", "i1", "i2", "i3"],
            "maker": pl.Series([3, 1, 2, 1, None], dtype=pl.Int16),
            "tags": [["w"], ["x", "y"], [], ["y", "y", None, "z"], ["x"]],
            "price": [7.0, 1.5, 2.0, None, -30.0],
        }
    )
    frame.write_parquet(tmp_path / "items.parquet")
    columns = COLUMNS | {"brand": {"kind": "category", "column": "maker"}}
    values = values_of(with_items(tmp_path / "items.parquet", id="sku", columns=columns))
    assert values == EXPECTED | {"brand": [["1"], ["2"], ["1"], [], ["3"]]}


def test_attributes_in_json(with_items):
    content = {"i3": [3, "b"], "i0": [1, 1, 2], "i1": [], "i2": ["b"], "i4": [10]}
    values = values_of(with_items(json.dumps(content), "items.json"))
    assert values == {"attributes": [["1", "2"], [], ["b"], ["3", "b"], ["10"]]}


BAD_ITEMS = {
    "a missing column": (ITEMS.replace("brand", "brnd"), "no column 'brand' (data.features.items.columns.brand)"),
    "no ids": (ITEMS.replace("item", "sku"), "no column 'item' (data.features.items.id)"),
    "two rows": (ITEMS + "i1,b,,2\n", "items.csv: two rows for item 'i1', rows 2 and 6"),
    "no number": (ITEMS.replace("-3e1", "cheap"), "line 5, column price: expected a number, got 'cheap'"),
    "decimal comma": (
        ITEMS.replace("-3e1", '"3,5"'),
        "column price: expected a number, got '3,5' (set data.features.items.decimal to ',')",
    ),
    "infinite": (ITEMS.replace("-3e1", "inf"), "line 5, column price: expected a number, got 'inf'"),
    "not a number": (ITEMS.replace("-3e1", "nan"), "line 5, column price: expected a number, got 'nan'"),
    "no id": (ITEMS.replace("i3", ""), "line 5, column item: the value is missing"),
    "a long value": (
        ITEMS.replace(",c,", f",{'c' * 300},"),
        "line 6, column brand: a value of more than 256 characters",
    ),
    "a long value in a list": (
        ITEMS.replace("|y|", f"|{'y' * 300}|"),
        "tags: expected values of at most 256 characters, got 300",
    ),
    "NUL": (ITEMS.replace(",c,", ",c\0,"), "line 6, column brand: a value with a NUL character"),
    "not UTF-8": (ITEMS.replace(",c,", ",\x81,").encode("latin-1"), "line 6, column brand: not valid UTF-8"),
    "a short row": (ITEMS.replace(",7", ""), "line 6: expected 4 columns, got 3"),
    "unknown": (ITEMS + "i9,a,,1\n", "1 of 6 items are in no event: 'i9'; data.features.items.unknown=drop leaves"),
    "empty": ("", "items.csv: the file is empty"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_bad_file_of_items_gets_one_line(with_items, name):
    content, expected = BAD_ITEMS[name]
    assert expected in error_of(with_items, content)


BAD_JSON = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ("[1]", "expected an object {item: [attribute, ...]}, got [1]"),
    "twice": ('{"i1": [1], "i1": [2]}', "two rows for item 'i1'"),
    "no list": ('{"i1": "ab"}', "item i1: expected a list of attributes, got 'ab'"),
    "a number": ('{"i1": [1.5]}', "item i1: expected attributes that are text or integers, got 1.5"),
    "true": ('{"i1": [true]}', "item i1: expected attributes that are text or integers, got True"),
    "deep": ("[" * 100_000, "not valid JSON"),
    "others": ('{"x": [1]}', "none of its 1 items is in an event: expected ids like 'i0', got 'x'"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_attributes_get_one_line(with_items, name):
    content, expected = BAD_JSON[name]
    assert expected in error_of(with_items, content, "items.json")


def test_wrong_types(with_items, tmp_path):
    plain = {"item": ["i0"], "brand": ["a"], "tags": [["x"]], "price": [1.0]}
    for column, values, expected in (
        ("brand", [1.5], "column brand: expected text, integers or booleans, got Float64"),
        ("tags", [3], "column tags: expected lists of text or integers, or text, got Int64"),
        ("price", ["1"], "column price: expected numbers, got String"),
        ("price", [float("nan")], "row 1, column price: expected a number, got 'nan'"),
    ):
        pl.DataFrame(plain | {column: values}).write_parquet(tmp_path / "items.parquet")
        assert expected in error_of(with_items, tmp_path / "items.parquet")


BAD_OPTIONS = {
    "no columns": ({"items": {"format": "csv", "path": "x"}}, "data.features.items: columns: missing"),
    "kind": ({"items": {"format": "csv", "path": "x", "columns": {"a": "text"}}}, "data.features.items.columns.a.kind"),
    "name": ({"items": {"format": "csv", "path": "x", "columns": {"a.b": "list"}}}, "data.features.items.columns.a.b"),
    "nothing": ({}, "expected items, users or events"),
    "fixed": (
        {"items": {"format": "movies.dat", "path": "x", "id": "a"}},
        "id, separator: expected format csv or parquet, got movies.dat",
    ),
    "calendar": ({"events": {"calendar": ["month"]}}, "data.features.events.calendar.0"),
    "misspelt": ({"item": {}}, "data.features.item: unknown key, did you mean items?"),
    "users that add": (
        {"users": {"format": "users.dat", "path": "x", "unknown": "add"}},
        "data.features.users.unknown",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_get_one_line(load, name):
    options, expected = BAD_OPTIONS[name]
    assert expected in error_of(load, "csv", EVENTS, features=options)


def test_columns_of_a_fixed_format_are_chosen(load, tmp_path):
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    ratings = "1::1::5::978300760\n2::1::3::978302109\n"

    def read(columns):
        users = {"format": "users.dat", "path": str(tmp_path), "columns": columns}
        return load("ml-1m", ratings, name="ratings.dat", features={"users": users})

    assert values_of(read({"sex": {"kind": "category", "column": "gender"}})) == {"sex": [["F"], ["M"]]}
    assert "users.dat has gender, age, occupation, not zip" in error_of(read, {"zip": "category"})
    assert "expected kind category, got number" in error_of(read, {"age": "number"})
    assert "the columns of ml-1m are fixed" in error_of(
        load, "ml-1m", tmp_path / "ratings.dat", features={"events": {"columns": {"a": "list"}}}
    )


def test_movielens_files(load, tmp_path):
    """Test Latin-1 in titles, genres as flags and as lists, the year in two places, and items without ratings."""
    none = "|".join(["0"] * 17)
    (tmp_path / "u.item").write_bytes(
        f"1|Toy Story (1995)|01-Jan-1995||http://x|0|1|{none}\n2|Les Mis\xe9rables||||0|0|{none}\n"
        f"3|Nobody's||||1|0|{none}\n".encode("latin-1")
    )
    (tmp_path / "u.user").write_text("1|24|M|technician|85711\n2|53|F|other|94043\n")
    features = {
        "items": {"format": "u.item", "path": str(tmp_path)},
        "users": {"format": "u.user", "path": str(tmp_path)},
    }
    dataset = load("ml-100k", "1\t1\t5\t874965758\n2\t2\t3\t876893171\n", name="u.data", features=features)
    assert values_of(dataset) == {
        "genres": [["Action"], []],
        "year": [[1995.0], []],
        "age": [[24.0], [53.0]],
        "gender": [["M"], ["F"]],
        "occupation": [["technician"], ["other"]],
    }
    (tmp_path / "u.item").write_text("1|Toy Story (1995)|01-Jan-1995||http://x|0|2|" + none + "\n")
    assert "u.item line 1, column Action: expected 0 or 1, got '2'" in error_of(
        load, "ml-100k", tmp_path / "u.data", features=features
    )
    (tmp_path / "movies.dat").write_bytes(
        "1::Toy Story (1995)::Animation|Comedy\n2::Mis\xe9rables, Les (1998) ::Drama\n9::X::War\n".encode("latin-1")
    )
    movies = {"items": {"format": "movies.dat", "path": str(tmp_path / "movies.dat")}}
    dataset = load("ml-1m", "1::1::5::978300760\n1::2::3::978302109\n", name="ratings.dat", features=movies)
    assert values_of(dataset) == {"genres": [["Animation", "Comedy"], ["Drama"]], "year": [[1995.0], [1998.0]]}


def test_features_of_events_are_columns_of_their_file(load):
    text = "user,item,timestamp,device,spent\nu1,i1,30,phone,1.5\nu1,i2,10,,\nu0,i1,20,web,3\n"
    events = {"columns": {"device": {"kind": "category", "known": "before"}, "spent": "number"}}
    dataset = load("csv", text, features={"events": events})
    assert dataset.items.tolist() == [0, 1, 0]  # sorted by user and time, with the features
    assert values_of(dataset) == {"device": [["web"], [], ["phone"]], "spent": [[3.0], [], [1.5]]}
    assert load("csv", text).fingerprint == dataset.events_fingerprint != dataset.fingerprint
    twice = {"events": {"columns": {"x": {"kind": "category", "column": "item"}}}}
    assert "column item is named twice" in error_of(load, "csv", text, features=twice)
    bad = text.replace("3\n", "x\n")
    assert "line 4, column spent: expected a number, got 'x'" in error_of(load, "csv", bad, features={"events": events})
    missing = error_of(load, "csv", text.replace("device", "app"), features={"events": events})
    assert "no column 'device' (data.features.events.columns.device)" in missing
    dropped = load("csv", bad, features={"events": events}, on_bad_row="drop")
    assert dropped.num_events == 2 and values_of(dropped)["device"] == [[], ["phone"]]


@pytest.mark.parametrize(("time", "format"), [("2024-01-03", None), ("03.01.2024", "%d.%m.%Y")])
def test_error_for_a_bad_number_names_its_column_and_not_that_of_times(load, time, format):
    text = f"user,item,timestamp,spent\nu1,i1,{time},1.5\nu1,i2,{time},1;5\n"
    options = {"features": {"events": {"columns": {"spent": "number"}}}, "columns": {"timestamp_format": format}}
    message = error_of(load, "csv", text, **options)
    assert "line 3, column spent: expected a number, got '1;5'" in message and "timestamp:" not in message


def test_filter_selects_features(load, tmp_path):
    (tmp_path / "items.csv").write_text(ITEMS.replace("i4,c,w,7\n", "i4,c,w,7\nrare,c,w,7\n"))
    items = {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": {"brand": "category"}}
    dataset = load("csv", EVENTS + "u1,rare,99\n", min_item_events=2, features={"items": items})
    assert dataset.item_ids.tolist() == ["i0", "i1", "i2", "i3", "i4"]
    assert values_of(dataset)["brand"] == EXPECTED["brand"]


def test_items_without_events(with_items):
    text = ITEMS + "i10,z,,1\na,b,,2\n"
    dropped = with_items(text, unknown="drop")
    assert values_of(dropped) == EXPECTED
    added = with_items(text, unknown="add")
    assert added.item_ids.tolist() == ["a", "i0", "i1", "i10", "i2", "i3", "i4"]
    assert added.item_ids[added.items].tolist() == dropped.item_ids[dropped.items].tolist()
    assert values_of(added)["brand"] == [["b"], ["a"], ["b"], ["z"], ["a"], [], ["c"]]
    assert any("2 items without events are part of the catalogue" in note for note in added.notes)


def test_key_of_the_cache_covers_files_and_options(with_items):
    prints = [
        with_items(ITEMS).fingerprint,
        with_items(ITEMS.replace("i1,b", "i1,d")).fingerprint,
        with_items(ITEMS, columns={"brand": "category"}).fingerprint,
        with_items(ITEMS, columns=COLUMNS | {"price": "category"}).fingerprint,
        with_items(ITEMS, columns=COLUMNS | {"tags": {"kind": "list", "separator": "/"}}).fingerprint,
        with_items(ITEMS, unknown="add").fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    # Options for table rows are not part of a cache.
    tuned = COLUMNS | {"price": {"kind": "number", "quantiles": 3}, "brand": {"kind": "category", "min_count": 7}}
    assert with_items(ITEMS, columns=tuned).fingerprint == prints[0]


@pytest.mark.parametrize("column", ["feature-0-values", "feature-1-codes", "feature-2-offsets"])
def test_damaged_features_are_read_anew(with_items, caplog, tmp_path, column):
    with_items(ITEMS)
    file = folder_of(tmp_path) / f"{column}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert values_of(with_items(ITEMS)) == EXPECTED and "damaged" in caplog.text


def test_given_cache_has_its_features(with_items, load, tmp_path):
    expected = with_items(ITEMS)
    folder = folder_of(tmp_path)
    (tmp_path / "items.csv").unlink()
    items = {"format": "csv", "path": "gone.csv", "columns": COLUMNS}
    assert values_of(load("csv", folder, features={"items": items})) == EXPECTED
    assert load("csv", folder).fingerprint == expected.fingerprint  # a run need not use them
    other = {"items": items | {"columns": {"brand": "category"}}}
    assert "got one of csv with features=" in error_of(load, "csv", folder, features=other)


# ---- from values to rows


def options(**features):
    return parse_options(Features, features, "data.features")


def test_rows_come_from_training_data_alone(load):
    """Check that values only in the three held-out events of ten have no row and do not change quantiles."""
    rows = [("u", f"i{n}", n, "ab"[n % 2] if n < 7 else "z", float(n if n < 7 else 1000 * n)) for n in range(10)]
    text = "user,item,timestamp,device,spent\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    columns = {"device": {"kind": "category", "min_count": 4}, "spent": {"kind": "number", "quantiles": 2}}
    chosen = options(events={"columns": columns})
    dataset = load("csv", text, features=chosen)
    known = fit_features(dataset, np.array([7]), chosen)
    device, spent = known.features
    assert device.values.tolist() == ["a"] and spent.values.tolist() == [3.0]  # the value b occurs three times
    assert (device.num_rows, spent.num_rows) == (2, 3)
    feature_rows = with_rows(dataset, known).event_rows[:, :, 0]
    assert feature_rows[:, 0].tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert feature_rows[:, 1].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert known.trained is None  # without features of items


def test_each_item_counts_once_and_cold_ones_not(with_items):
    chosen = options(items={"format": "csv", "path": "x", "columns": COLUMNS})
    dataset = with_items(ITEMS)
    known = fit_features(dataset, dataset.user_offsets[:-1] + 1, chosen)  # i0, i1 and i2 train
    brand, tags, price = known.features
    assert known.trained.tolist() == [True, True, True, False, False]
    assert brand.values.tolist() == ["a"] and tags.values.tolist() == ["y"] and price.values.tolist() == [2.0]
    assert [rows.tolist() for _, rows in known.item_rows] == [[1, 0, 1, 0], [0, 1, 1, 0, 0, 0], [1, 2, 1, 2]]


def test_rows_of_lists_are_padded():
    feature = feature_of("users", "tags", "list", 3, np.array([0, 0, 2]), np.array(["b", "a", "c"]))
    dataset = load_dataset(
        "synthetic", None, cache_dir=None, synthetic={"num_users": 3, "num_items": 9, "num_clusters": 1}
    )
    chosen = options(users={"format": "csv", "path": "x", "columns": {"tags": {"kind": "list", "min_count": 1}}})
    dataset = dataclasses.replace(dataset, features=(feature,))
    known = fit_features(dataset, dataset.user_offsets[1:], chosen)
    assert with_rows(dataset, known).user_rows.tolist() == [[[2, 1]], [[-1, -1]], [[3, -1]]]
    assert vocabulary_of(dataset, known).features is known


def test_another_data_set_with_the_vocabulary_of_the_first(load, tmp_path):
    """Check that other values are unknown, and that an error names a missing feature."""
    columns = {"device": {"kind": "category", "min_count": 1}}
    chosen = options(events={"columns": columns})
    first = load("csv", "user,item,timestamp,device\nu,i,1,web\nu,j,2,tv\n", features=chosen)
    vocabulary = vocabulary_of(first, fit_features(first, first.user_offsets[1:], chosen))
    text = "user,item,timestamp,device\nv,j,1,car\nv,k,2,web\nv,i,3,web\n"
    other = load("csv", text, name="other.csv", features=chosen, vocabulary=vocabulary)
    assert with_rows(other, vocabulary.features).event_rows.tolist() == [[[0]], [[2]]]
    bare = load("csv", text, name="other.csv", vocabulary=vocabulary)
    assert "no feature device of events" in error_of(with_rows, bare, vocabulary.features)
