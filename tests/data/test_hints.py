"""Test that the advice of every message about data works.

HINTS maps a part of each hint to the test that does it; `test_all_hints_are_followed` finds hints that are missing.
"""

import ast
import gzip
import re
from pathlib import Path

import pytest

import data.download
from data.datasets import DataError, load_dataset
from data.reading.formats import FORMATS
from data.update import missing_events, new_events

pl = pytest.importorskip("polars")

ROOT = Path(__file__).resolve().parents[2]
HEADER = "user,item,timestamp\n"
GOOD = HEADER + "u,1,5\nu,2,6\n"


def message_of(load, *arguments, **options):
    with pytest.raises(DataError) as caught:
        load(*arguments, **options)
    return str(caught.value)


def advised(message, pattern):
    """Return the advice in a message, by a pattern with one group."""
    match = re.search(pattern, message)
    assert match, message
    return match[1]


DATES = [
    "23/04/2024 02:33",
    "04/23/2024",
    "23.04.2024",
    "4/23/2024 2:33 PM",
    "2024/04/23 02:33:42",
    "23-04-24",
    "1/2/2024",
]
DATES += ["2024.04.23 02:33:42.250", "23.04.2024 02:33:42 +0200"]


def test_files_of_new_events(tmp_path):
    """A folder with the earlier files and the new one has all events, as the message advises."""
    (tmp_path / "old.csv").write_text(GOOD)
    before = load_dataset("csv", str(tmp_path / "old.csv"), cache_dir=None)
    (tmp_path / "new.csv").write_text(f"{HEADER}u,1,7\nu,2,8\n")
    alone, folder = (load_dataset("csv", str(path), cache_dir=None) for path in (tmp_path / "new.csv", tmp_path))
    message = str(missing_events(new_events(alone, before, before.user_offsets[1:]), alone, before))
    assert "give the path of a folder" in message
    assert missing_events(new_events(folder, before, before.user_offsets[1:]), folder, before) is None


@pytest.mark.parametrize("date", DATES)
def test_dates(load, date):
    text = f"user;item;timestamp\nu;1;{date}\nu;2;{date}\n"
    format = advised(message_of(load, "csv", text), "need data.columns.timestamp_format, for example '(.*)'")
    assert load("csv", text, columns={"timestamp_format": format}).num_events == 2


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("23 Apr 2024", "%d %b %Y"),
        ("Tue Apr 23 02:33:42 2024", "%a %b %d %H:%M:%S %Y"),
        ("2024/04/23T02:33", "%Y/%m/%dT%H:%M"),
    ],
)
def test_other_forms_of_times(load, tmp_path, text, format):
    """The hint is in the error about a column in this form alone, and about one among ISO 8601 (always in Parquet)."""
    pl.DataFrame({"user": "u", "item": ["i"], "timestamp": text}).write_parquet(tmp_path / "x")
    for kind, raw in (
        ("csv", f"{HEADER}u,1,{text}\n"),
        ("csv", f"{HEADER}u,1,{text}\nu,2,2024-04-23\n"),
        ("parquet", tmp_path / "x"),
    ):
        message = message_of(load, kind, raw)
        option = advised(message, rf"got '{text}' \(times in another form need data.columns.(\w+)\)")
    assert load("csv", f"{HEADER}u,1,{text}\n", columns={option: format}).num_events == 1
    assert load("parquet", tmp_path / "x", columns={option: format}).num_events == 1


def test_dates_among_iso_8601(load):
    text = f"{HEADER}u,1,2024-04-23\nu,2,23.04.2024\n"
    assert "need data.columns.timestamp_format, for example '%d.%m.%Y'" in message_of(load, "csv", text)


@pytest.mark.parametrize("wrong", ["never", "2024-13-45", "1,234", "1e9"])
def test_no_hint_for_values_in_no_form_of_times(load, wrong):
    assert "timestamp_format" not in message_of(load, "csv", f'{HEADER}u,1,2024-04-23\nu,2,"{wrong}"\n')


@pytest.mark.parametrize("date", ["20240423", "2024042302", "202404230233", "20240423023342"])
def test_dates_that_are_integers(load, date):
    format = advised(message_of(load, "csv", f"{HEADER}u,1,{date}\n"), 'set it to "(.*?)"')
    assert load("csv", f"{HEADER}u,1,{date}\n", columns={"timestamp_format": format}).timestamps[0] >= 1713830400
    unit = {"timestamp_unit": "s" if len(date) <= 10 else "ms"}
    assert load("csv", f"{HEADER}u,1,{date}\n", columns=unit).num_events == 1


@pytest.mark.parametrize(
    ("wrong", "right", "text"),
    [
        ("%Y%m%d%H%M%S%f", "%Y%m%d%H%M%S%3f", "20240423023342123"),
        ("%Y%m%d%H%M%S%f", "%Y%m%d%H%M%S%6f", "20240423023342123456"),
        ("%Y-%m-%d %H:%M:%S_%f", "%Y-%m-%d %H:%M:%S.%f", "2024-04-23 02:33:42.1234"),
        (None, "%d.%m.%Y %H:%M:%S,%f", "23.04.2024 02:33:42,25"),
        (None, "%d.%m.%Y %H", "23.04.2024 02"),
    ],
)
def test_fractions_of_formats(load, wrong, right, text):
    rows = f"user;item;timestamp\nu;1;{text}\n"
    if wrong:
        message = message_of(load, "csv", rows, columns={"timestamp_format": wrong})
        assert 'write the fraction of a second as ".%f", or without a point as "%3f", "%6f" or "%9f"' in message
    assert load("csv", rows, columns={"timestamp_format": right}).timestamps[0] // 3600 == 1713837600 // 3600


def test_units_of_times(load):
    text = HEADER + "u,1,5\nu,2,99999999999999\n"
    assert "if these are milliseconds set data.columns.timestamp_unit to ms" in message_of(load, "csv", text)
    assert load("csv", text, columns={"timestamp_unit": "ms"}).num_events == 2
    both = {"timestamp_unit": "s", "timestamp_format": "%Y"}
    assert "timestamp_unit is for numbers, timestamp_format for text: give one" in message_of(
        load, "csv", GOOD, columns=both
    )


def test_decimal_signs(load):
    for value, decimal in (("1700000000,5", "."), ("1700000000.5", ",")):
        text = f"user;item;timestamp\nu;1;{value}\nu;2;1700000000\n"
        chosen = advised(message_of(load, "csv", text, decimal=decimal), "set data.decimal to '(.)'")
        assert load("csv", text, decimal=chosen).num_events == 2


def test_encodings_and_formats(load, tmp_path):
    content = (HEADER + "u,Москва,5\n").encode("cp1251")
    assert "if the file has another encoding, set data.encoding to it" in message_of(load, "csv", content)
    assert load("csv", content, encoding="cp1251").num_events == 1
    pl.DataFrame({"user": [1], "item": [2], "timestamp": [3]}).write_parquet(tmp_path / "x")
    kind = advised(message_of(load, "csv", tmp_path / "x"), "set data.format to (.*)")
    assert load(kind, tmp_path / "x").num_events == 1
    kind = advised(message_of(load, "parquet", GOOD), "for text set data.format to (.*)")
    assert load(kind, GOOD).num_events == 2
    for options in ({"columns": {"user": "user"}}, {"features": {"events": {"columns": {"x": "category"}}}}):
        kind = advised(message_of(load, "ml-20m", GOOD, **options), "use format (csv) or parquet to set columns")
    assert load(kind, GOOD, columns={"user": "user"}).num_events == 2
    assert "is fixed; use format csv to set it" in message_of(load, "ml-20m", GOOD, separator=",")


def test_names(load):
    assert load(advised(message_of(load, "cvs", GOOD), "did you mean (csv)"), GOOD).num_events == 2
    user = advised(message_of(load, "csv", GOOD, columns={"user": "usr"}), r"did you mean (\w+)\?")
    assert load("csv", GOOD, columns={"user": user}).num_events == 2
    key = advised(message_of(load, "csv", GOOD, columns={"usr": "user"}), r"did you mean (\w+)\?")
    assert load("csv", GOOD, columns={key: "user"}).num_events == 2
    where = advised(message_of(load, "csv", GOOD, where="itm > 1"), r"did you mean (\w+)\?")
    assert load("csv", GOOD, where=f"{where} > 1").num_events == 1


def test_ids_in_two_ways(load):
    text = HEADER + "7,1,5\n7.0,2,6\n"
    assert "write all without the point" in message_of(load, "csv", text)
    assert load("csv", text.replace(".0", "")).num_users == 1


def test_codes_of_actions(load):
    text, codes = "user,item,timestamp,how\n1,2,3,view\n", {"action_codes": {"view": 4}}
    assert "name the column of the actions, too (action)" in message_of(load, "csv", text, columns=codes)
    assert load("csv", text, columns=codes | {"action": "how"}).actions.tolist() == [4]


def test_bad_rows(load):
    text = GOOD + "u,1,x\nu,2,y\n"
    choice = advised(message_of(load, "csv", text), r"data.on_bad_row=(\w+) leaves them out")
    assert load("csv", text, on_bad_row=choice).num_events == 2


def test_paths(load, tmp_path):
    (tmp_path / "ml").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "ml" / name).write_text("1 2\n")
    assert "give the path of one" in message_of(load, "lines", tmp_path / "ml")
    assert load("lines", tmp_path / "ml" / "a.txt").num_events == 1
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_text(GOOD)
    (tmp_path / "log" / "b.txt").touch()
    pattern = advised(message_of(load, "csv", tmp_path / "log"), "set the path to a pattern: (.*)")
    assert load("csv", Path(pattern)).num_events == 2
    assert "unpack it first (only .gz, .zst, .bz2, .xz are read as they are)" in message_of(load, "csv", b"PK\x03\x04")
    assert load("csv", gzip.compress(GOOD.encode())).num_events == 2
    assert "needs the path of" in message_of(load_dataset, "csv", None, cache_dir=tmp_path)


def test_downloads():
    """Check that the commands are of an existing module, with names of its data sets."""
    for fmt in FORMATS.values():
        for name in fmt.downloads:
            assert name in data.download.SOURCES


def features_of(tmp_path, text, kind="category", **options):
    (tmp_path / "items.csv").write_text(text)
    return {"items": {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": {"x": kind}, **options}}


def test_features(load, tmp_path):
    features = features_of(tmp_path, "item,x\n1,a\n2,b\n9,c\n")
    message = message_of(load, "csv", GOOD, features=features)
    drop = advised(message, r"data.features.items.unknown=(\w+) leaves them out")
    add = advised(message, r", (\w+) makes them part of the catalogue")
    features["items"]["unknown"] = drop
    assert load("csv", GOOD, features=features).num_items == 2
    features["items"]["unknown"] = add
    assert load("csv", GOOD, features=features).num_items == 3
    text = "item,x\n1,\"['a','b']\"\n2,\"['a','c']\"\n"
    kind = advised(message_of(load, "csv", GOOD, features=features_of(tmp_path, text)), "set its kind to (.*)")
    assert load("csv", GOOD, features=features_of(tmp_path, text, kind)).num_items == 2
    (tmp_path / "more").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "more" / name).write_text("item,x\n1,a\n2,b\n")
    features = {"items": {"format": "csv", "path": str(tmp_path / "more"), "columns": {"x": "category"}}}
    assert "give the path of one" in message_of(load, "csv", GOOD, features=features)
    features["items"]["path"] = str(tmp_path / "more" / "a.csv")
    assert load("csv", GOOD, features=features).num_items == 2
    missing = {"items": {"format": "csv", "path": "x"}}
    assert "columns: missing, name the file's columns and their kinds (brand: category)" in message_of(
        load, "csv", GOOD, features=missing
    )


def test_options_that_need_others(load, tmp_path):
    (tmp_path / "x").write_text(GOOD)
    message = message_of(load_dataset, "csv", str(tmp_path / "x"), cache_dir=None, partitions=2)
    assert "data.partitions: needs data.cache_dir" in message
    assert load_dataset("csv", str(tmp_path / "x"), cache_dir=tmp_path / "c", partitions=2).num_events == 2
    message = message_of(load, "lines", "1 2\n", duplicates="drop")
    assert "data.duplicates=drop needs timestamps" in message
    assert load("csv", GOOD, duplicates="drop").num_events == 2
    message = message_of(load, "csv", GOOD, min_user_events=9)
    assert "lower them" in message and load("csv", GOOD, min_user_events=2).num_events == 2


HINTS = {
    "dates like this need": test_dates,
    "times in another form need": test_other_forms_of_times,
    'set it to "': test_dates_that_are_integers,
    "write the fraction": test_fractions_of_formats,
    "set data.columns.timestamp_unit": test_units_of_times,
    "timestamp_format for text: give one": test_units_of_times,
    " (set ": test_decimal_signs,
    "if the file has another encoding": test_encodings_and_formats,
    "a Parquet file; ": test_encodings_and_formats,
    "use format csv or parquet": test_encodings_and_formats,
    "use format csv to set it": test_encodings_and_formats,
    "did you mean": test_names,
    "on_bad_row=drop leaves them out": test_bad_rows,
    "give the path of one": test_paths,
    "give the path of a folder": test_files_of_new_events,
    "set the path to a pattern": test_paths,
    "unpack it first": test_paths,
    "are read as they are)": test_paths,
    "needs the path of": test_paths,
    "to fetch it": test_downloads,
    "name the column of the actions": test_codes_of_actions,
    "write all without the point": test_ids_in_two_ways,
    "unknown=drop leaves them out": test_features,
    "makes them part of the catalogue": test_features,
    "set its kind to list": test_features,
    "name the file's columns": test_features,
    "needs data.cache_dir": test_options_that_need_others,
    "data.duplicates=drop needs": test_options_that_need_others,
    "lower them": test_options_that_need_others,
}
# Advice to try again, advice about packages and sizes, and sentences without advice.
NO_HINTS = ("try again", "pip install", ":// needs ", "need some ", "needs a length of", "needs an input")
NO_HINTS += (
    "data.where leaves out",
    "needs timestamps, and this source has none",
    "unknown data set",
    "write the cache",
    "(write null for none)",
    "(write numbers in it with a decimal point",
)
ADVICE = re.compile(
    r"\b(set (it|its|data|timestamp)\b|set $|give (the|one)|did you mean|to fetch it|unpack it|pip install|"
    r"leaves? them out|leaves out|makes them|use format|name the|set the path|try again|write |needs? |lower )"
)


def test_all_hints_are_followed():
    others = []
    for file in sorted((ROOT / "data").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
                text = node.value
                if ADVICE.search(text) and not any(part in text for part in (*HINTS, *NO_HINTS)):
                    others.append(f"{file.relative_to(ROOT)} line {node.lineno}: {text}")
    assert not others
