"""Test bad rows: how many may be dropped, of events and of features, and the column that is named."""

import pytest

from tests.data.raw_files import error_of

pl = pytest.importorskip("polars")

HEADER = "user,item,timestamp\n"


def rows_of(good, bad):
    return HEADER + "".join(f"1,{item},5\n" for item in range(good)) + "1,1,x\n" * bad


@pytest.mark.parametrize("kind", ["csv", "parts", "pieces", "parquet"])
@pytest.mark.parametrize(
    ("good", "bad", "limit", "fits"),
    [(1, 10, 0.01, True), (989, 11, 0.01, False), (1089, 11, 0.01, True), (3, 17, 0.84, False), (3, 17, 0.85, True)],
)
def test_share_of_bad_rows_that_may_be_dropped(load, tmp_path, monkeypatch, kind, good, bad, limit, fits):
    text, path, partitions = rows_of(good, bad), tmp_path / "log", 2 if kind == "pieces" else 1
    monkeypatch.setattr("data.reading.partitions.PIECE", 1000)
    path.mkdir()
    if kind == "parquet":
        frame = {"user": [1] * (good + bad), "item": [2] * (good + bad), "timestamp": [5] * good + [-1] * bad}
        pl.DataFrame(frame).write_parquet(path / "a.parquet")
    elif kind == "parts":  # the limit is for the whole source
        (path / "a.csv").write_text(rows_of(good, 0))
        (path / "b.csv").write_text(rows_of(0, bad))
    else:
        (path / "a.csv").write_text(text)
    options = {"on_bad_row": "drop", "bad_rows_limit": limit, "partitions": partitions}
    kind = "parquet" if kind == "parquet" else "csv"
    if fits:
        assert load(kind, path, **options).num_events == good
    else:
        message = error_of(load, kind, path, lines=1 + min(bad, 20), **options)
        assert f"{bad} of {good + bad:,} rows are bad (data.on_bad_row: drop), more than data.bad_rows_limit" in message


def test_limit_of_a_cache_that_was_prepared_with_another(load):
    text = rows_of(1, 20)
    assert load("csv", text, on_bad_row="drop", bad_rows_limit=1.0).num_events == 1
    assert "20 of 21 rows are bad" in error_of(load, "csv", text, lines=21, on_bad_row="drop")


def test_sequences_have_the_limit_too(load):
    assert "12 of 14 rows are bad" in error_of(
        load, "sequences", "1 2\n3 4\n" + "x\n" * 12, lines=13, on_bad_row="drop"
    )


def test_dropping_is_not_advised_for_too_many_rows(load):
    assert "data.on_bad_row=drop leaves them out" in error_of(load, "csv", rows_of(1, 2), lines=3)
    assert "data.on_bad_row" not in error_of(load, "csv", rows_of(1, 30), lines=21)


def test_features_have_a_separate_option(load, tmp_path):
    events = HEADER + "".join(f"1,i{item},5\n" for item in range(50))
    prices = "item,price\n" + "".join(f"i{item},{'x' if item < 20 else 1}\n" for item in range(50))
    (tmp_path / "items.csv").write_text(prices.replace("x", "1", 18))
    items = {"format": "csv", "path": str(tmp_path / "items.csv"), "columns": {"price": "number"}}
    message = error_of(load, "csv", events, lines=3, features={"items": items}, on_bad_row="drop")
    assert "items.csv: 2 bad rows (data.features.items.on_bad_row=drop leaves them out):" in message
    items["on_bad_row"] = "drop"
    dataset = load("csv", events, features={"items": items})
    assert "2 bad rows were left out (data.features.items.on_bad_row: drop)" in " ".join(dataset.notes)
    assert "2 of 50 items have no row in it" in dataset.notes[-1]
    (tmp_path / "items.csv").write_text(prices)
    message = error_of(load, "csv", events, lines=21, features={"items": items})
    assert "20 of 50 rows are bad (data.features.items.on_bad_row: drop), more than data.bad_rows_limit=0.01" in message
    assert load("csv", events, features={"items": items}, bad_rows_limit=0.4).num_items == 50


def test_invalid_bytes_are_reported_for_their_column(load):
    text = "user;item;timestamp;shop\nu;1;23.04.2024;Köln\n".encode() + b"u;2;24.04.2024;K\xf6ln\n"
    message = error_of(load, "csv", text, columns={"timestamp_format": "%d.%m.%Y"})
    assert message.startswith("raw.txt line 3, column shop: not valid UTF-8: ") and r"'K\xf6ln'" in message
