"""Test numbers: integers and decimals in one column, in any order of rows and parts, and decimal commas."""

import itertools

import pytest

from tests.data.raw_files import error_of, events

pl = pytest.importorskip("polars")

HEADER = "user,item,timestamp\n"
SECONDS = 1_700_000_000


def rows_of(times, first=0, header=HEADER):
    return header + "".join(f"u,{first + number},{time}\n" for number, time in enumerate(times))


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("place", [0, 10, 20])
def test_one_fraction_among_whole_seconds(load, monkeypatch, partitions, place):
    monkeypatch.setattr("data.reading.partitions.PIECE", 100)
    times = [str(SECONDS + number) for number in range(20)]
    times.insert(place, f"{SECONDS}.5")
    dataset = load("csv", rows_of(times), partitions=partitions)
    ordered = sorted(range(21), key=lambda item: float(times[item]))
    assert [(item, time) for _, item, time, _ in events(dataset)] == [(i, int(float(times[i]))) for i in ordered]
    bad = rows_of([*times, "x", "-3.5"])
    message = error_of(load, "csv", bad, lines=3, partitions=partitions)
    assert "line 23, column timestamp: expected a" in message and "expected a timestamp >= 0, got -3.5" in message
    assert load("csv", bad, partitions=partitions, on_bad_row="drop").num_events == 21


PARTS = {
    "whole": [f"{SECONDS + 2}", f"{SECONDS + 4}"],
    "fractions": [f"{SECONDS + 3}.5", f"{SECONDS}.25"],
    "both": [f"{SECONDS + 2}.0", f"{SECONDS + 1}"],
}


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("names", list(itertools.permutations(PARTS)))
def test_parts_in_any_order(load, tmp_path, names, partitions):
    (tmp_path / "log").mkdir()
    for number, name in enumerate(names):
        (tmp_path / "log" / f"{number}.csv").write_text(rows_of(PARTS[name], 10 * number))
    dataset = load("csv", tmp_path / "log", partitions=partitions)
    times = [(float(time), 10 * n + i) for n, name in enumerate(names) for i, time in enumerate(PARTS[name])]
    assert [event[1] for event in events(dataset)] == [item for _, item in sorted(times)]


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("kinds", list(itertools.permutations([pl.Int64, pl.Float64, pl.Decimal(20, 3), pl.Int32], 3)))
def test_parquet_parts_of_several_types(load, tmp_path, kinds, partitions):
    (tmp_path / "log").mkdir()
    for number, kind in enumerate(kinds):
        times = pl.Series([SECONDS + 5 - number, SECONDS + number]).cast(kind)
        frame = pl.DataFrame({"user": "u", "item": [2 * number, 2 * number + 1], "timestamp": times})
        frame.write_parquet(tmp_path / "log" / f"{number}.parquet")
    dataset = load("parquet", tmp_path / "log", partitions=partitions)
    assert [item for _, item, _, _ in events(dataset)] == [1, 3, 5, 4, 2, 0]


def test_actions_of_parts_that_are_text_and_numbers(load, tmp_path):
    """Such parts are an error that names one of them, in any order of the parts."""
    (tmp_path / "log").mkdir()
    texts = {"view": "user,item,timestamp,how\n1,1,1,view\n", "number": "user,item,timestamp,how\n1,1,1,3\n"}
    for names in (("view", "number"), ("number", "view")):
        for number, name in enumerate(names):
            (tmp_path / "log" / f"{number}.csv").write_text(texts[name])
            pl.read_csv(tmp_path / "log" / f"{number}.csv").write_parquet(tmp_path / f"{number}.parquet")
        message = error_of(load, "csv", tmp_path / "log", columns={"action": "how"})
        assert "column how: expected an integer 0 to 999999, got 'view'" in message
        message = error_of(load, "parquet", tmp_path / "*.parquet", columns={"action": "how"})
        assert "1.parquet: the actions are numbers" in message or "got 'view'" in message


def test_decimal_commas(load):
    text = (
        "user;item;timestamp;rating;spent\nu;1;1700000000,5;4,0;+1,25\nu;2;1700000000,25;3;\nu;3;1700000001;2,00;-3\n"
    )
    options = {"columns": {"action": "rating"}, "features": {"events": {"columns": {"spent": "number"}}}}
    dataset = load("csv", text, decimal=",", **options)
    assert [(item, action) for _, item, _, action in events(dataset)] == [(2, 3), (1, 4), (3, 2)]
    assert dataset.features[0].values.tolist() == [-3.0, 1.25]
    dataset = load("csv", text.replace("1700000000,25", "x"), decimal=",", on_bad_row="drop", **options)
    assert dataset.num_events == 2
    for row, column in (("u;4;1700000000.5;1;1", "timestamp"), ("u;4;1;4.0;1", "rating"), ("u;4;1;1;1.250,5", "spent")):
        message = error_of(load, "csv", text + row + "\n", decimal=",", **options)
        assert f"line 5, column {column}: expected a" in message
    iso = "user;item;timestamp\nu;1;2024-04-23 02:33:43,25\n"
    assert load("csv", iso, decimal=",").timestamps.tolist() == [1713839623]
    for wrong in ("ml-100k", "sequences"):
        assert f"data.decimal: the decimal sign of {wrong} is fixed" in error_of(load, wrong, "1 2\n", decimal=",")


def test_decimal_commas_of_features_and_of_parquet(load, tmp_path):
    text = HEADER + "u,1,1\nu,2,2\n"
    (tmp_path / "items.csv").write_text("item;price\n1;2,50\n2;10\n")
    items = {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": {"price": "number"}, "decimal": ","}
    assert load("csv", text, features={"items": items}).features[0].values.tolist() == [2.5, 10.0]
    frame = pl.DataFrame({"user": ["u", "u"], "item": [1, 2], "timestamp": ["1700000001,5", "1700000001,25"]})
    frame.write_parquet(tmp_path / "x")
    columns = {"timestamp_unit": "s"}
    assert [event[1] for event in events(load("parquet", tmp_path / "x", decimal=",", columns=columns))] == [2, 1]


@pytest.mark.parametrize("partitions", [1, 2])
def test_ids_that_are_written_in_two_ways(load, tmp_path, partitions):
    """Test a part that pandas wrote with a missing value, with 7.0 where another part has 7."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_text(HEADER + "7,1,1\n8,2,1\n")
    (tmp_path / "log" / "b.csv").write_text(HEADER + "7.0,1,2\n9.0,2,2\n")
    message = error_of(load, "csv", tmp_path / "log", partitions=partitions)
    assert "the user ids 7 and 7.0 are the same number written in two ways" in message
    (tmp_path / "log" / "a.csv").unlink()
    assert load("csv", tmp_path / "log", partitions=partitions).user_ids.tolist() == ["7.0", "9.0"]
    assert load("csv", HEADER + "7,1,1\n7.0,1,1\nx,2,1\n").num_users == 3  # names, such as those of versions
