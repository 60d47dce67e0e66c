"""Test users' files: literal paths and names, separators, times, actions, bad rows, duplicates, parts, compression."""

import base64
import contextlib
import gzip
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.datasets import DataError, load_dataset
from data.options import checked_separator
from data.reading.memory import available_memory
from tests.data.raw_files import error_of, events

pl = pytest.importorskip("polars")  # it reads raw files

HEADER = "user,item,timestamp\n"
ROWS = HEADER + "1,10,100\n2,20,200\n"
OTHER = HEADER + "7,70,700\n"
SECONDS = 1_700_000_000
ROOT = Path(__file__).resolve().parents[3]


def csv_of(times, header=HEADER):
    return header + "".join(f"u,{item},{time}\n" for item, time in enumerate(times))


def order(dataset):
    """Return (item, seconds) pairs in the order of the data set."""
    return [(item, time) for _, item, time, _ in events(dataset)]


# ---- paths and names are literal


@pytest.mark.parametrize(
    "name", ["data[1].csv", "data*.csv", "data?.csv", "^data$.csv", "{a,b}.csv", "s3:x.csv", "~x.csv"]
)
def test_path_of_a_file_is_no_pattern(load, tmp_path, name):
    for other in ("data1.csv", "dataX.csv", "a.csv", "b.csv"):
        (tmp_path / other).write_text(OTHER)
    assert load("csv", ROWS, name=name).user_ids.tolist() == [1, 2]


def test_path_of_a_parquet_file_or_a_fixed_format_is_no_pattern(load, tmp_path):
    for name, user in (("data[1].parquet", 1), ("data1.parquet", 7)):
        pl.DataFrame({"user": [user], "item": [2], "timestamp": [3]}).write_parquet(tmp_path / "x")
        (tmp_path / "x").rename(tmp_path / name)
    assert load("parquet", tmp_path / "data[1].parquet").user_ids.tolist() == [1]
    (tmp_path / "u1.data").write_text("7\t1\t1\t1\n")
    assert load("ml-100k", "1\t1\t1\t1\n", name="u[1].data").user_ids.tolist() == [1]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_name_of_a_column_is_no_pattern(load, tmp_path, kind):
    names = {"^user$": [1, 2], "user": [7, 7], "*": [10, 20], "^.*$": [100, 200]}
    columns = {"user": "^user$", "item": "*", "timestamp": "^.*$"}
    frame, file = pl.DataFrame(names), tmp_path / f"x.{kind}"
    frame.write_csv(file) if kind == "csv" else frame.write_parquet(file)
    assert events(load(kind, file, columns=columns)) == [(1, 10, 100, None), (2, 20, 200, None)]


# ---- parts


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_folder_and_pattern_of_parts(load, tmp_path, kind):
    for number, part in enumerate(("day=1/a", "day=2/a", "day=2/_x", ".b")):
        file = tmp_path / "log" / f"{part}.{kind}"
        file.parent.mkdir(parents=True, exist_ok=True)
        frame = pl.DataFrame({"user": [1, number], "item": [number, 5], "timestamp": [9, 9]})
        frame.write_csv(file) if kind == "csv" else frame.write_parquet(file)
    (tmp_path / "log" / "_SUCCESS").touch()
    expected = [(0, 5, 9, None), (1, 0, 9, None), (1, 1, 9, None), (1, 5, 9, None)]
    folder = load(kind, tmp_path / "log")
    assert events(folder) == expected and "folder of 2 files" in folder.notes[0]
    pattern = load(kind, tmp_path / "log" / "*" / f"a.{kind}")
    assert events(pattern) == expected and "a pattern that 2 files match" in pattern.notes[0]
    one = load(kind, tmp_path / "log" / "day=[1]" / f"*.{kind}")
    assert events(one) == [*expected[:1], (1, 0, 9, None)]
    assert "no file matches it as a pattern" in error_of(load, kind, tmp_path / "log" / "day=[3-9]*")


def test_bad_row_of_a_part_is_named_with_its_folder(load, tmp_path):
    for part in "ab":
        (tmp_path / "log" / part).mkdir(parents=True)
        (tmp_path / "log" / part / "x.csv").write_text(HEADER + ("1,2,3\n" if part == "a" else "1,2,z\n"))
    assert error_of(load, "csv", tmp_path / "log") == "b/x.csv line 2, column timestamp: expected an integer, got 'z'"


def test_parts_with_ids_of_two_types(load, tmp_path):
    (tmp_path / "log").mkdir()
    for name, user in (("a", [1, 2]), ("b", ["x", "1"])):
        frame = {"user": user, "item": [1, 2], "timestamp": [1, 2]}
        pl.DataFrame(frame).write_parquet(tmp_path / "log" / f"{name}.parquet")
    assert load("parquet", tmp_path / "log").user_ids.tolist() == ["1", "2", "x"]
    frame = {"user": [1], "item": [1], "timestamp": [1.5]}
    pl.DataFrame(frame).write_parquet(tmp_path / "log" / "c.parquet")
    assert sorted(load("parquet", tmp_path / "log").timestamps.tolist()) == [1, 1, 1, 2, 2]


def test_compressed_files(load, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv.gz").write_bytes(gzip.compress(ROWS.encode()))
    frames = [zstandard.compress(part.encode()) for part in (HEADER, "3,30,300\n")]
    (tmp_path / "log" / "b.csv.zst").write_bytes(b"".join(frames))
    dataset = load("csv", tmp_path / "log")
    assert dataset.user_ids.tolist() == [1, 2, 3]
    assert load("csv", tmp_path / "log" / "a.csv.gz").name == "a"
    assert load("ml-100k", gzip.compress(b"1\t2\t3\t4\n"), name="u.data").num_events == 1
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    for content in (gzip.compress(ROWS.encode())[:-9], zstandard.compress(ROWS.encode())[:-3], b"\x1f\x8b\n\n"):
        assert "damaged, cannot be unpacked" in error_of(load, "csv", content)
    assert "the file is empty" in error_of(load, "csv", gzip.compress(b""))


# ---- separators


@pytest.mark.parametrize("separator, name", [(";", "a semicolon"), ("\t", "a tab"), ("|", "|"), (",", None)])
def test_separator_is_detected_from_the_header(load, separator, name):
    dataset = load("csv", ROWS.replace(",", separator))
    assert events(dataset) == [(1, 10, 100, None), (2, 20, 200, None)]
    assert (dataset.notes[0] == f"fields are separated by {name} (data.separator)") == bool(name)
    configured = load("csv", ROWS.replace(",", separator), separator=separator)
    assert events(configured) == events(dataset) and not any("separated" in note for note in configured.notes)


def test_separator_beside_a_wrong_column(load):
    message = error_of(load, "csv", "user;item;timestmp;note\n1;2;100;a, b\n")
    assert "no column 'timestamp' (data.columns.timestamp), did you mean timestmp?; it has user, item, t" in message


def test_column_in_another_case(load):
    message = error_of(load, "csv", "KUNDE,ARTIKEL,ZEIT\n1,2,100\n", columns={"user": "KUNDE", "item": "Artikel"})
    assert "no column 'Artikel' (data.columns.item), did you mean ARTIKEL?" in message
    message = error_of(load, "csv", "user,item,timestamp,MENGE\n1,2,100,3\n", where="menge > 0")
    assert "no column 'menge' (data.where), did you mean MENGE?" in message


def test_separator_that_is_set(load):
    assert load("csv", ROWS.replace(",", "\t"), separator="tab").num_events == 2
    assert load("csv", 'user#item#timestamp\n"a#b"#2#3\n', separator="#").user_ids.tolist() == ["a#b"]
    assert "no column 'user'" in error_of(load, "csv", ROWS, separator=";")
    assert "the separator of ml-1m is fixed" in error_of(load, "ml-1m", "1::2::3::4\n", separator=";")
    for wrong in ("", ",,", "a", "1", '"', "\n", "é", ".", 3):
        with pytest.raises(DataError, match="expected tab or one ASCII character"):
            checked_separator(wrong)


# ---- times


@pytest.mark.parametrize("unit, scale", [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_unit_is_detected_from_the_values(load, tmp_path, unit, scale, kind):
    times = [SECONDS * scale + 2 * (scale > 1), SECONDS * scale + 1 * (scale > 1), (SECONDS - 5) * scale]
    frame = pl.DataFrame({"user": ["u"] * 3, "item": [0, 1, 2], "timestamp": times})
    frame.write_csv(tmp_path / "x") if kind == "csv" else frame.write_parquet(tmp_path / "x")
    dataset = load(kind, tmp_path / "x")
    last = [(1, SECONDS), (0, SECONDS)] if scale > 1 else [(0, SECONDS), (1, SECONDS)]
    assert order(dataset) == [(2, SECONDS - 5), *last]
    assert order(load(kind, tmp_path / "x", columns={"timestamp_unit": unit})) == order(dataset)


def test_wrong_unit(load):
    text = csv_of([SECONDS, SECONDS + 1])
    message = error_of(load, "csv", text, columns={"timestamp_unit": "ms"})
    assert "timestamp_unit: expected milliseconds, got times like seconds, e.g. 1700000000" in message
    assert "expected seconds, got" in error_of(load, "csv", csv_of([SECONDS * 1000]), columns={"timestamp_unit": "s"})
    # Small times, from another origin, are in the user's unit.
    assert order(load("csv", csv_of([5000, 9000]), columns={"timestamp_unit": "ms"})) == [(0, 5), (1, 9)]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_two_units_in_one_column(load, tmp_path, kind):
    times = [SECONDS * 1000 + i for i in range(9)] + [SECONDS, SECONDS + 1]
    frame = pl.DataFrame({"user": ["u"] * 11, "item": range(11), "timestamp": times})
    frame.write_csv(tmp_path / "x") if kind == "csv" else frame.write_parquet(tmp_path / "x")
    message = error_of(load, kind, tmp_path / "x", lines=3)
    assert "2 bad rows" in message and "expected milliseconds, got 1700000000, which looks like seconds" in message
    dropped = load(kind, tmp_path / "x", on_bad_row="drop")
    assert dropped.num_events == 9 and "2 bad rows were left out" in " ".join(dropped.notes)


@pytest.mark.parametrize("text, format", [("20240423", "%Y%m%d"), ("202404230233", "%Y%m%d%H%M")])
def test_dates_written_as_integers(load, text, format):
    assert f'set it to "{format}"' in error_of(load, "csv", csv_of([text]))
    dataset = load("csv", csv_of([text]), columns={"timestamp_format": format})
    assert dataset.timestamps[0] == np.datetime64("2024-04-23T02:33" if "H" in format else "2024-04-23", "s").astype(
        int
    )


ISO = [
    ("2024-04-23T02:33:42Z", 1713839622),
    ("2024-04-23 02:33:42", 1713839622),
    ("2024-04-23T08:03:42.5+05:30", 1713839622.5),
    ("2024-04-22T23:03:42.000000001-0330", 1713839622.000000001),
    ("2024-04-23T02:33", 1713839580),
    ("2024-04-23", 1713830400),
    ("2024-04-23 02:33:43,25 UTC", 1713839623.25),
]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_iso_8601(load, tmp_path, kind):
    frame = pl.DataFrame({"user": ["u"] * 7, "item": range(7), "timestamp": [text for text, _ in ISO]})
    frame.write_csv(tmp_path / "x") if kind == "csv" else frame.write_parquet(tmp_path / "x")
    dataset = load(kind, tmp_path / "x")
    # In time order, also within a second: 3 is a nanosecond after 0 and 1.
    assert order(dataset) == [(i, int(ISO[i][1])) for i in (5, 4, 0, 1, 3, 2, 6)]
    assert "ISO 8601 text; times without a zone are UTC" in dataset.notes[-1]


@pytest.mark.parametrize("text", ["inf", "nan", "1e9", "9" * 40, "-5"])
def test_numbers_that_are_not_times(load, text):
    assert "line 2, column timestamp: expected a" in error_of(load, "csv", csv_of([text]))


@pytest.mark.parametrize(
    "wrong", ["2024-02-30", "2024-04-23T24:00:00", "2024-04-23T02:33:42 IST", "23/04/2024", "1969-12-31", "2300-01-01"]
)
def test_text_that_is_not_a_time(load, wrong):
    message = error_of(load, "csv", csv_of(["2024-04-23", "2024-04-24T01:02:03Z", wrong]))
    assert message.startswith("raw.txt line 4, column timestamp: expected a t")


@pytest.mark.parametrize(
    "format, text",
    [
        ("%d/%m/%Y %H:%M", "23/04/2024 02:33"),
        ("%m/%d/%Y %I:%M %p", "04/23/2024 02:33 AM"),
        ("%Y-%m-%dT%H:%M:%S.%f%z", "2024-04-23T04:33:00.250000+0200"),
        ("%Y-%m-%dT%H:%M:%S%z", "2024-04-23T02:33:00Z"),
    ],
)
def test_timestamp_format(load, format, text):
    header = "user;item;timestamp\n"
    dataset = load("csv", f"{header}u;1;{text}\n", columns={"timestamp_format": format})
    assert dataset.timestamps.tolist() == [1713839580]
    message = error_of(load, "csv", f"{header}u;1;{text}\nu;2;x\n", columns={"timestamp_format": format})
    assert f"line 3, column timestamp: expected a time like {format} from 1970" in message


def test_error_for_dates_without_a_format_names_the_option(load):
    message = error_of(load, "csv", "user;item;timestamp\nu;1;23/04/2024 02:33\n")
    assert "line 2, column timestamp: expected an integer, got '23/04/2024 02:33'" in message
    assert "(dates like this need data.columns.timestamp_format, for example '%d/%m/%Y %H:%M')" in message


def test_fractions_of_a_format_keep_the_order(load):
    times = ["2024-04-23 02:33:42.000002", "2024-04-23 02:33:42.000001"]
    dataset = load("csv", csv_of(times), columns={"timestamp_format": "%Y-%m-%d %H:%M:%S.%f"})
    assert order(dataset) == [(1, 1713839622), (0, 1713839622)]


@pytest.mark.parametrize("format", ["%H:%M", "%Y-%m-%d %Z", "%Y %H", "%Y%f"])
def test_timestamp_format_that_gives_no_time(load, format):
    assert "data.columns.timestamp_format: " in error_of(load, "csv", ROWS, columns={"timestamp_format": format})


def test_decimals(load, tmp_path):
    times = [f"{SECONDS}.000000002", f"{SECONDS}.000000001", f"{SECONDS - 1}.5", f"{SECONDS}"]
    assert order(load("csv", csv_of(times))) == [(2, SECONDS - 1), (3, SECONDS), (1, SECONDS), (0, SECONDS)]
    assert order(load("csv", csv_of([f"{SECONDS}999.5", f"{SECONDS}999.25"]))) == [(1, SECONDS), (0, SECONDS)]
    for values in (
        pl.Series([SECONDS + 0.5, SECONDS + 0.25]),
        pl.Series([f"{SECONDS}.5", f"{SECONDS}.25"]).cast(pl.Decimal(20, 3)),
    ):
        frame = pl.DataFrame({"user": ["u", "u"], "item": [0, 1], "timestamp": values})
        frame.write_parquet(tmp_path / "x")
        assert order(load("parquet", tmp_path / "x")) == [(1, SECONDS), (0, SECONDS)]
    frame.with_columns(pl.col("timestamp").cast(pl.Float32)).write_parquet(tmp_path / "x")
    assert "Float32 has too few digits" in error_of(load, "parquet", tmp_path / "x")


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_datetimes_of_parquet_keep_their_order_within_a_second(load, tmp_path, unit):
    scale = {"ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    for zone in (None, "UTC", "Europe/Berlin"):
        times = pl.Series([SECONDS * scale + 2, SECONDS * scale + 1, SECONDS * scale]).cast(pl.Datetime(unit, zone))
        pl.DataFrame({"user": ["u"] * 3, "item": [0, 1, 2], "timestamp": times}).write_parquet(tmp_path / "x")
        for columns in (None, {"timestamp_unit": "s"}):
            assert order(load("parquet", tmp_path / "x", columns=columns)) == [(i, SECONDS) for i in (2, 1, 0)]


def test_dates_of_parquet(load, tmp_path):
    days = pl.Series([19_000, 18_000]).cast(pl.Int32).cast(pl.Date)
    pl.DataFrame({"user": ["u"] * 2, "item": [0, 1], "timestamp": days}).write_parquet(tmp_path / "x")
    assert order(load("parquet", tmp_path / "x")) == [(1, 18_000 * 86_400), (0, 19_000 * 86_400)]


# ---- actions


ACTIONS = "user,item,timestamp,how\n1,1,1,view\n1,2,2,buy\n1,3,3,view\n2,1,1,cart\n2,2,2,view\n2,3,3,buy\n"
HOW = {"action": "how"}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_text_as_actions(load, tmp_path, kind):
    (tmp_path / "x").write_text(ACTIONS)
    if kind == "parquet":
        pl.read_csv(tmp_path / "x").with_columns(pl.col("how").cast(pl.Categorical)).write_parquet(tmp_path / "x")
    for _ in range(2):  # prepared, then from the cache
        dataset = load(kind, tmp_path / "x", columns=HOW)
        assert dataset.action_names == ("view", "buy", "cart")
        assert dataset.actions.tolist() == [0, 1, 0, 2, 0, 1] and dataset.actions.dtype == np.int32
        assert dataset.notes[-1] == "codes of the actions: view 0, buy 1, cart 2"
    coded = load(kind, tmp_path / "x", columns=HOW | {"action_codes": {"cart": 2, "view": 2, "buy": 4}})
    assert coded.actions.tolist() == [2, 4, 2, 2, 2, 4] and coded.action_names == ("", "", "cart", "", "buy")
    message = error_of(load, kind, tmp_path / "x", columns=HOW | {"action_codes": {"view": 1, "buy": 0}})
    assert "column how: expected one of view, buy, got 'cart'" in message


def test_actions_of_new_data_have_the_known_codes(load):
    from data.vocabulary import vocabulary_of

    vocabulary = vocabulary_of(load("csv", ACTIONS, columns=HOW))
    new = ACTIONS.splitlines()[0] + "\n5,1,1,buy\n5,2,2,buy\n5,3,3,view\n"
    dataset = load("csv", new, columns=HOW, vocabulary=vocabulary)
    assert dataset.actions.tolist() == [1, 1, 0]
    assert not any("codes of the actions" in note for note in dataset.notes)  # the note has the new file's codes
    assert "action 'like' is not known to the trained model, which knows view, buy, cart" in error_of(
        load, "csv", new + "5,1,9,like\n", columns=HOW, vocabulary=vocabulary
    )
    numbers = HEADER.replace("stamp", "stamp,how") + "5,1,1,0\n"
    assert "the actions are numbers, those of the trained model text" in error_of(
        load, "csv", numbers, columns=HOW, vocabulary=vocabulary
    )


def test_cache_as_path_with_a_vocabulary(load, tmp_path):
    from data.vocabulary import vocabulary_of

    old = load("csv", ACTIONS, columns=HOW, min_user_events=2)
    (folder,) = (path for path in (tmp_path / "cache").iterdir())
    again = load("csv", folder, columns=HOW, vocabulary=vocabulary_of(old))
    assert events(again) == events(old) and again.left_out == {"items": 0, "events": 0, "users": 0}
    assert again.action_names == old.action_names and again.fingerprint != old.fingerprint


def test_numbers_among_text_as_actions(load):
    message = error_of(load, "csv", ACTIONS.replace("cart", "3"), columns=HOW, lines=6)
    assert "expected an integer 0 to 999999, got 'view'" in message
    assert "line 8, column how: the value is missing" in error_of(load, "csv", ACTIONS + "3,1,1,\n", columns=HOW)


# ---- bad rows and duplicates


MESSY = HEADER + "1,10,100\n1,,5\nx\n\n2,20,soon\n2,20,200\n3,30,-1\n3,30,300,4\n3,30,300\n"


def test_bad_rows_are_reported_together(load):
    message = error_of(load, "csv", MESSY, lines=7)
    assert message.splitlines() == [
        "raw.txt: 6 bad rows (data.on_bad_row=drop leaves them out):",
        "  raw.txt line 3, column item: the value is missing",
        "  raw.txt line 4: expected 3 columns, got 1",
        "  raw.txt line 5: empty line",
        "  raw.txt line 6, column timestamp: expected an integer, got 'soon'",
        "  raw.txt line 8, column timestamp: expected a timestamp >= 0, got -1",
        "  raw.txt line 9: expected 3 columns, got 4",
    ]
    many = error_of(load, "csv", ROWS + "1,2,x\n" * 50, lines=21)
    assert "50 bad rows, the first 20:" in many


def test_bad_rows_are_dropped(load):
    for _ in range(2):  # prepared, then from the cache
        dataset = load("csv", MESSY, on_bad_row="drop")
        assert events(dataset) == [(1, 10, 100, None), (2, 20, 200, None), (3, 30, 300, None)]
        (note,) = (note for note in dataset.notes if "bad rows" in note)
        assert note.startswith(
            "6 bad rows were left out (data.on_bad_row: drop), the first: raw.txt line 3, column item"
        )
        assert "line 8" in note and "line 9" not in note
    assert "the file has no events, only 1 bad rows" in error_of(load, "csv", HEADER + "x\n", on_bad_row="drop")


@pytest.mark.parametrize("name, good, bad", [
    ("ml-1m", "1::2::3::4\n", ["1::2::3", "1:x:2:y:3:z:4", "a::2::3::4", "1::2::9::4"]),
    ("ml-100k", "1\t2\t3\t4\n", ["1\t2\t3", "1\t2\tx\t4", "", "1\t2\t3\t-4"]),
    ("lines", "1 2\n", ["1", "1 2 3", "a 2", "1 "]),
])  # fmt: skip
def test_bad_rows_of_other_formats_are_dropped(load, name, good, bad):
    text = good + "".join(f"{row}\n{good}" for row in bad)
    assert load(name, text, on_bad_row="drop").num_events == 5
    assert "4 bad rows" in error_of(load, name, text, lines=5)


def test_rows_that_are_not_utf_8(load):
    content = ROWS.encode() + b"caf\x81,1,1\n5,50,500\n"
    assert load("csv", content, on_bad_row="drop").user_ids.tolist() == [1, 2, 5]
    assert "line 4, column user: not valid UTF-8" in error_of(load, "csv", content)


def test_misplaced_quote_is_an_error_even_if_bad_rows_are_dropped(load):
    for row in ('1,a"b,3\n', '1,"a"b,3\n', '1,"a,3\n'):
        assert "a quote" in error_of(load, "csv", ROWS + row + OTHER, on_bad_row="drop")


def test_bad_rows_of_parquet(load, tmp_path):
    frame = {"user": [1, None, 2], "item": [1, 2, 3], "timestamp": [1, 2, -3]}
    pl.DataFrame(frame).write_parquet(tmp_path / "x")
    message = error_of(load, "parquet", tmp_path / "x", lines=3)
    assert "x row 2, column user: the value is missing\n  x row 3, column timestamp: expected a timestamp" in message
    assert events(load("parquet", tmp_path / "x", on_bad_row="drop")) == [(1, 1, 1, None)]


def test_duplicates(load):
    text = HEADER + "1,5,100\n1,5,100\n1,5,101\n2,5,100\n"
    assert load("csv", text).num_events == 4
    dropped = load("csv", text, duplicates="drop")
    assert [e[:3] for e in events(dropped)] == [(1, 5, 100), (1, 5, 101), (2, 5, 100)]
    assert "1 events equal to an earlier one were left out" in dropped.notes[-1]
    milliseconds = csv_of([SECONDS * 1000, SECONDS * 1000 + 1]).replace("u,1", "u,0")
    assert load("csv", milliseconds, duplicates="drop").num_events == 2
    assert "needs timestamps" in error_of(load, "lines", "1 1\n1 1\n", duplicates="drop")


# ---- sequences


@pytest.mark.parametrize("separator", [" ", "\t", ","])
def test_sequences(load, separator):
    text = "ann 3 1 3\r\nbob 2 1\nann 7\n".replace(" ", separator)
    dataset = load("sequences", text, name="log.txt")
    assert [e[:2] for e in events(dataset)] == [("ann", 3), ("ann", 1), ("ann", 3), ("ann", 7), ("bob", 2), ("bob", 1)]
    assert not dataset.has_timestamps and dataset.actions is None and dataset.name == "log"


def test_bad_sequences(load):
    text = "1 2 3\n4\n\n5  6\n7 8 \n" + "9 " + "x" * 300 + "\n10 11\n"
    message = error_of(load, "sequences", text, lines=6)
    for line, what in (
        (2, "expected a user and items"),
        (3, "empty line"),
        (4, "an empty field"),
        (6, "an id of more"),
    ):
        assert f"raw.txt line {line}: {what}" in message
    assert load("sequences", text, on_bad_row="drop").user_ids.tolist() == [1, 10]


# ---- caches as paths, files that never end


def test_cache_as_path_must_have_the_requested_options(load, tmp_path):
    columns = {"user": "who", "item": "what", "timestamp": "when"}
    text = "who,what,when,user,item,timestamp\n1,2,3,4,5,6\n"
    expected = load("csv", text, columns=columns)
    (folder,) = (path for path in (tmp_path / "cache").iterdir())
    (tmp_path / "raw.txt").unlink()
    assert events(load("csv", folder, columns=columns)) == events(expected)
    message = error_of(load, "csv", folder)
    assert 'got one of csv with columns={"user": "who"' in message and "expected a cache of csv with" in message
    for other in ({"on_bad_row": "drop"}, {"duplicates": "drop"}, {"separator": ";"}):
        assert f"{next(iter(other))}=" in error_of(load, "csv", folder, columns=columns, **other)
    other = columns | {"timestamp_unit": "ms"}
    assert "timestamp_unit=ms" in error_of(load, "csv", folder, columns=other)


def test_files_that_never_end(load, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in error_of(load, "csv", tmp_path / "pipe")
    assert "neither a file nor a folder" in error_of(load, "csv", Path("/dev/zero"))
    for kind, content in (("csv", ROWS.encode()), ("parquet", b"PAR1"), ("ml-100k", b"")):
        with open(tmp_path / "sparse", "wb") as file:
            file.write(content)
            file.truncate(1 << 40)
            file.seek(0, 2)
            file.write(b"PAR1")
        assert "were never written" in error_of(load, kind, tmp_path / "sparse")


def test_nothing_is_written_next_to_the_source(load, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv.gz").write_bytes(gzip.compress(ROWS.encode()))
    load_dataset("csv", tmp_path / "data", cache_dir=tmp_path / "cache")
    assert os.listdir(tmp_path / "data") == ["x.csv.gz"]


# ---- Parquet that others wrote


def with_zone(file, zone):
    """Write a Parquet file of datetimes with a zone of six characters that polars cannot write."""
    times = pl.Series([SECONDS * 10**6 + 2, SECONDS * 10**6 + 1]).cast(pl.Datetime("us", "Turkey"))
    pl.DataFrame({"user": ["u"] * 2, "item": [0, 1], "timestamp": times}).write_parquet(file)
    content = file.read_bytes()
    schema = re.search(rb"ARROW:schema.{1,6}?([A-Za-z0-9+/=]{100,})", content, re.DOTALL)[1]
    other = base64.b64decode(schema).replace(b"Turkey", zone.encode())
    file.write_bytes(content.replace(schema, base64.b64encode(other)))


@pytest.mark.parametrize("zone", ["+05:30", "Xurkey", "\0\1\2\3\4\5"])
def test_zone_that_polars_does_not_know(load, tmp_path, zone):
    with_zone(tmp_path / "x", zone)
    assert order(load("parquet", tmp_path / "x")) == [(1, SECONDS), (0, SECONDS)]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_datetimes_out_of_range(load, tmp_path, unit):
    """Test a datetime out of range, as in a damaged file: polars panics on it, and Python cannot print it."""
    for far in (2**63 - 1, -(2**63) + 1, 2**62):
        times = pl.Series([SECONDS, far]).cast(pl.Datetime(unit))
        pl.DataFrame({"user": ["u"] * 2, "item": [0, 1], "timestamp": times}).write_parquet(tmp_path / "x")
        if unit != "ns" or far < 0:
            assert "row 2, column timestamp: expected a time" in error_of(load, "parquet", tmp_path / "x")


def test_more_rows_than_memory_holds(load, tmp_path, monkeypatch):
    rows = {name: pl.repeat(1, 1_000_000, dtype=pl.Int64, eager=True) for name in ("user", "item", "timestamp")}
    pl.DataFrame(rows).write_parquet(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 100_000
    monkeypatch.setattr("data.reading.memory.available_memory", lambda: 2**25)
    message = error_of(load, "parquet", tmp_path / "x")
    assert message == "x: 1,000,000 rows need some 0.1 GiB of memory, 0.0 GiB are left"
    monkeypatch.setattr("data.reading.memory.available_memory", lambda: 1)
    assert "of rows need some" in error_of(load, "csv", ROWS)


def test_memory_that_is_left(monkeypatch):
    whole = available_memory()
    assert whole > 2**20
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + 2**20, used + 2**20))
    assert available_memory() <= 2**20


@pytest.mark.parametrize("seed", range(3))
def test_changed_bytes_of_parquet(load, tmp_path, seed):
    """Check that damaged files give a data set or a DataError, but no panic."""
    frame = {"user": [f"u{i % 7}" for i in range(50)], "item": range(50), "timestamp": range(50)}
    pl.DataFrame(frame).write_parquet(tmp_path / "x")
    content, rng = (tmp_path / "x").read_bytes(), np.random.default_rng(seed)
    for _ in range(10):
        changed = bytearray(content)
        for place in rng.integers(0, len(content), rng.integers(1, 9)):
            changed[place] = rng.integers(256)
        (tmp_path / "x").write_bytes(changed)
        with contextlib.suppress(DataError):
            load("parquet", tmp_path / "x")


def test_accents_in_a_locale_of_ascii(tmp_path):
    """Check that a path that the locale cannot encode is a one-line error."""
    program = (
        "from data.datasets import load_dataset\n"
        "for path in ('x.csv', 'caf\\u00e9.csv'):\n"
        "    try: print(ascii(load_dataset('csv', path, cache_dir=None).user_ids.tolist()))\n"
        "    except ValueError as error: print(type(error).__name__, ascii(str(error)))\n"
    )
    (tmp_path / "x.csv").write_text(HEADER + "é,1,1\n", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    read, refused = done.stdout.splitlines()
    assert read == r"['\xe9']" and refused.startswith("DataError") and "cannot be encoded in" in refused
