"""Test conditions on rows, data.where: SQL on the columns of the file, before rows are checked."""

import pytest

from tests.data.raw_files import error_of, events

pl = pytest.importorskip("polars")

SHOP = """invoice;customer;sku;bought;quantity;price;country
1;7;a;2024-01-01;2;1,50;UK
2;7;b;2024-01-02;-1;2,00;UK
3;;c;2024-01-03;1;2,00;UK
4;8;a;never;0;;France
5;8;a;2024-01-05;3;10,25;France
6;9;c;2024-01-06;;3,00;007
"""
COLUMNS = {"user": "customer", "item": "sku", "timestamp": "bought"}


def items(dataset):
    return [(str(user), item) for user, item, *_ in events(dataset)]


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize(
    ("where", "expected"),
    {
        "quantity > 0 AND customer IS NOT NULL": [("7", "a"), ("8", "a")],
        "quantity > 0 AND customer <> ''": [("7", "a"), ("8", "a")],
        "price >= 2.5": [("8", "a"), ("9", "c")],
        "quantity <= 0 and invoice <> 4": [("7", "b")],
        "country = 'UK' AND customer = 7": [("7", "a"), ("7", "b")],
        "country = '007'": [("9", "c")],
        "invoice = '2'": [("7", "b")],
        "invoice IN (1, 5)": [("7", "a"), ("8", "a")],
        "bought > '2024-01-04' AND bought <> 'never'": [("8", "a"), ("9", "c")],
        "LOWER(country) LIKE 'f%' AND quantity * price > 30": [("8", "a")],
    }.items(),
)
def test_conditions(load, monkeypatch, where, expected, partitions):
    monkeypatch.setattr("data.reading.partitions.PIECE", 60)
    options = {"columns": COLUMNS, "decimal": ",", "partitions": partitions}
    for text in (SHOP, SHOP.replace("\n", "\r\n")):
        dataset = load("csv", text, where=where, **options)
        assert items(dataset) == expected
        assert f"{6 - len(expected)} of 6 rows were left out by data.where: {where}" in dataset.notes
    assert load("csv", text, where=where, **options).notes == dataset.notes  # from the cache
    with_bad = SHOP + "7;8;a;never;5;20,00;France\n"
    if where.startswith("quantity > 0 AND customer IS"):
        assert "line 8, column bought: expected a time" in error_of(load, "csv", with_bad, where=where, **options)


def test_rows_that_a_condition_leaves_out_are_never_bad(load):
    rows = "user,item,timestamp,kind\n" + "1,2,3,view\n" + ",,x,test\n" * 50
    dataset = load("csv", rows, where="kind <> 'test'")
    assert dataset.num_events == 1 and not any("bad" in note for note in dataset.notes)
    message = error_of(load, "csv", rows + "1,2,x,view\n1,2\n", lines=3, where="kind <> 'test'")
    assert "line 53, column timestamp: expected a" in message and "line 54: expected 4 columns, got 2" in message
    assert "only 51 rows that data.where leaves out" in error_of(load, "csv", rows, where="kind = 'none'")


def test_text_among_numbers_of_a_condition_is_a_bad_row(load, monkeypatch):
    monkeypatch.setattr("data.reading.text.SAMPLE", 50)
    rows = "user,item,timestamp,n\n" + "1,2,3,4\n" * 30 + "1,2,3,abc\n1,2,3, \n"
    message = error_of(load, "csv", rows, where="n > 0")
    assert message == "raw.txt line 32, column n: expected a number, as in other rows (data.where), got 'abc'"
    dataset = load("csv", rows, where="n > 0", on_bad_row="drop")
    assert dataset.num_events == 30 and "1 of 32 rows were left out by data.where: n > 0" in dataset.notes


@pytest.mark.parametrize("partitions", [1, 2])
def test_parquet_and_columns_of_folders(load, tmp_path, monkeypatch, partitions):
    monkeypatch.setattr("data.reading.parquet.SAMPLE", 2)
    for day in (1, 2):
        folder = tmp_path / "log" / f"dt=2024-01-0{day}"
        folder.mkdir(parents=True)
        frame = {"user": [1, 2, 3, 4], "item": [5, 6, 7, 8], "timestamp": [day, day, -1, day], "n": [1, None, -1, 2]}
        pl.DataFrame(frame).write_parquet(folder / "a.parquet")
    options = {"where": "n > 0 AND dt > '2024-01-01'", "partitions": partitions}
    dataset = load("parquet", tmp_path / "log", **options)
    assert items(dataset) == [("1", 5), ("4", 8)]
    message = error_of(load, "parquet", tmp_path / "log", where="n < 0 OR n = 2", partitions=partitions)
    assert "a.parquet row 3, column timestamp: expected a timestamp >= 0" in message
    assert "data.where: " in error_of(load, "parquet", tmp_path / "log", where="n > 'a'")


@pytest.mark.parametrize(
    "wrong",
    [
        "quantity >",
        "SELECT 1",
        "MAX(n) > 3",
        "COUNT(*) OVER (PARTITION BY user) > 2",
        "1 = 1",
        "n > NOW()",
        "n IN (SELECT 1)",
    ],
)
def test_invalid_conditions(load, wrong):
    assert error_of(load, "csv", "user,item,timestamp,n\n1,2,3,4\n", where=wrong).startswith("data.where: ")


MESSY = """user;item;timestamp;price;big;size;note;amount;none
1;2;3;12,50;1.234,50;n/a;x;2;
1;3;4;60;7;3;y;3;
"""


@pytest.mark.parametrize(
    ("where", "advice", "cured", "options"),
    [
        ("price > 50", "(i32): price is text, like '12,50' (set data.decimal to ',')", "price > 50", {"decimal": ","}),
        ("amount * price > 99 AND note = 'y'", "cast first: price is text", None, {"decimal": ","}),
        ("note > 5", "note is text, like 'x': compare it with text in quotes", "note = 'y'", {}),
        ("size > 1", "is text, like 'n/a': compare it with text in quotes", "TRY_CAST(size AS DOUBLE) > 1", {}),
        ("size > 1", "or as a number with TRY_CAST(size AS DOUBLE)", "TRY_CAST(size AS DOUBLE) > 1", {}),
        ("big > 9", "like '1.234,50': compare it with text in quotes", "big = '7'", {}),
        ("none > 1 OR amount > 2", "(i32): none has no value in", "TRY_CAST(none AS DOUBLE) > 1 OR amount > 2", {}),
        ("price > 12,5", "(write numbers in it with a decimal point: 12.5)", "price > 12.5", {"decimal": ","}),
    ],
)  # fmt: skip
def test_columns_that_are_text(load, where, advice, cured, options):
    """An error names the columns that are text and what cures that, and no other columns."""
    message = error_of(load, "csv", MESSY, where=where)
    assert advice in message and ": amount" not in message and "; amount" not in message
    assert load("csv", MESSY, where=cured or where, **options).num_events == 1


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize(
    ("where", "advice", "cured"),
    [
        ("p > 5", "p is text, like '12,50': compare it with text in quotes", "p = '12,50'"),
        ("c > 6", "c is text, like '6'", "TRY_CAST(c AS DOUBLE) > 6"),
        ("n = '1'", "n has type Int64: compare it with numbers without quotes", "n = 1"),
        ("n LIKE '1%'", "or as text with CAST(n AS VARCHAR)", "CAST(n AS VARCHAR) LIKE '1%'"),
        ("day > '2024-06-26'", "day has type Date: compare it with DATE '", "day > DATE '2024-06-26'"),
        ("n = '1' AND p > 5", "p is text, like '12,50': compare it with text in quotes", "n = 1 AND p = '12,50'"),
    ],
)
def test_columns_of_another_type_in_parquet(load, tmp_path, where, advice, cured, partitions):
    frame = {"user": [1, 1], "item": [1, 2], "timestamp": [5, 6], "p": ["12,50", "3"], "n": [1, 2], "c": ["6", "7"]}
    frame = pl.DataFrame({**frame, "day": [19900, 19901]}).cast({"c": pl.Categorical, "day": pl.Date})
    frame.write_parquet(tmp_path / "x")
    assert advice in error_of(load, "parquet", tmp_path / "x", where=where, partitions=partitions)
    assert load("parquet", tmp_path / "x", where=cured, partitions=partitions).num_events == 1


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["7", "10", "9"])])
def test_categories_are_text(load, tmp_path, kind):
    frame = pl.DataFrame({"user": 1, "item": [1, 2, 3], "timestamp": 5, "c": pl.Series(["7", "10", "9"], dtype=kind)})
    frame.write_parquet(tmp_path / "x")
    for where in ("c > '8'", "TRY_CAST(c AS DOUBLE) = 9", "c LIKE '9%'"):
        assert items(load("parquet", tmp_path / "x", where=where)) == [("1", 3)]


def test_other_wrong_conditions(load):
    rows = "user,item,timestamp,num\n1,2,3,4\n"
    assert "raw.txt: no column 'nun' (data.where), did you mean num?" in error_of(load, "csv", rows, where="nun > 3")
    assert "its result is Float64" in error_of(load, "csv", rows, where="num + 1")
    assert "data.where: " in error_of(load, "csv", rows.replace("4", "x"), where="num > 3")
    for kind in ("ml-100k", "sequences"):
        assert "data.where: the columns of format" in error_of(load, kind, "1 2\n", where="user > 3")
    movies = "userId,movieId,rating,timestamp\n1,2,5.0,4\n1,3,0.5,5\n"
    assert load("ml-20m", movies, where="rating > 1").actions.tolist() == [10]


def test_condition_is_part_of_the_cache(load, tmp_path):
    rows = "user,item,timestamp,n\n1,2,3,4\n1,3,3,5\n"
    assert [load("csv", rows, where=where).num_events for where in (None, "n > 4", "n > 3")] == [2, 1, 2]
    (cache,) = [path for path in (tmp_path / "cache").iterdir() if '"n > 4"' in (path / "meta.json").read_text()]
    assert "got one of csv with where=n > 4" in error_of(load, "csv", cache)
    assert load("csv", cache, where="n > 4").num_events == 1
