"""Test small inputs from public bug reports of others about reading data."""

import numpy as np
import pytest

from tests.data.raw_files import error_of, events

pl = pytest.importorskip("polars")
HEADER = "user,item,timestamp\n"


def times_of(load, text, format=None, header="user;item;timestamp\n"):
    return load("csv", f"{header}u;1;{text}\n", columns={"timestamp_format": format}).timestamps.tolist()


def second(text):
    return int(np.datetime64(text, "s").astype(int))


def test_times_of_one_minute_keep_their_order(load, tmp_path):  # RUCAIBox/RecBole#2204
    times = [880_000_000 + n for n in (3, 1, 2, 0)]
    rows = HEADER + "".join(f"u,{n},{time}.0\n" for n, time in enumerate(times))
    assert [item for _, item, *_ in events(load("csv", rows))] == [3, 1, 2, 0]
    pl.DataFrame({"user": [1], "item": [1], "timestamp": pl.Series([8.8e8]).cast(pl.Float32)}).write_parquet(
        tmp_path / "x"
    )
    assert "Float32 has too few digits" in error_of(load, "parquet", tmp_path / "x")


def test_blanks_between_fields(load):  # RUCAIBox/RecBole#2000
    text = "user item timestamp\n1 2 3\n"
    assert "no column 'user'" in (message := error_of(load, "csv", text)) and "it has user item timestamp" in message
    assert load("csv", text, separator=" ").num_events == 1


def test_column_of_times_that_is_missing(load):  # RUCAIBox/RecBole#1134, #1985, #1812
    assert "no column 'timestamp' (data.columns.timestamp); it has user, item" in error_of(
        load, "csv", "user,item\n1,2\n"
    )


def test_unexpected_header(load):  # NicolasHug/Surprise#41
    assert "u.data line 1, column user: expected an integer, got 'user'" in error_of(
        load, "ml-100k", "user\titem\trating\ttimestamp\n1\t2\t3\t4\n", name="u.data"
    )


def test_ratings_with_many_digits(load):  # NicolasHug/Surprise#117
    message = error_of(load, "ml-100k", "3\t1\t2.8978348799\t1\n")
    assert "line 1, column action: expected an integer 0 to 5, got '2.8978348799'" in message


def test_whole_number_with_a_point_among_others(load):  # pola-rs/polars#8145
    assert load("csv", HEADER + "1,2,3\n4,5,6\n7.0,8.0,9.0\n").timestamps.tolist() == [3, 6, 9]


@pytest.mark.parametrize("text", ['"u","1","5"\n"u","2","6', '"u","1","5"\n"u,"2","6"\n"u","3","7"\n'])
def test_quote_that_is_missing(load, text):  # pola-rs/polars#25462, #8843
    message = error_of(load, "csv", HEADER + text, on_bad_row="drop")
    assert "line 3: a quote" in message


def test_word_among_dates(load):  # pola-rs/polars#14064
    assert "line 3, column timestamp: expected a time" in error_of(
        load, "csv", HEADER + "u,1,2020-01-01\nu,2,banana\nu,3,2020-01-02\n"
    )


def test_dates_with_the_month_first(load):  # pola-rs/polars#9508
    assert "need data.columns.timestamp_format, for example '%m/%d/%Y'" in error_of(
        load, "csv", HEADER + "u,1,02/28/2020\n"
    )


def test_dates_in_quotes(load):  # pola-rs/polars#4011
    assert load("csv", HEADER + '"u","1","2020-01-01"\n').timestamps.tolist() == [second("2020-01-01")]


@pytest.mark.parametrize("name", [b"em\x97dash", b"Paris\xa0Nord", b"caf\xe9"])
def test_export_of_windows(load, name):  # pandas-dev/pandas#66391, #17036, ActivitySim/populationsim#83
    dataset = load("csv", b"user,item,timestamp\n1," + name + b",5\n")
    assert dataset.item_ids.tolist() == [name.decode("cp1252")]


def test_utf_16_and_32(load):  # pandas-dev/pandas#24130
    for encoding in ("utf-16", "utf-32"):
        assert load("csv", (HEADER + "1,2,3\n").encode(encoding)).num_events == 1


@pytest.mark.parametrize("quoted", [False, True])
def test_mark_before_the_first_column(load, quoted):  # adaltas/node-csv-parse#284, C2FO/fast-csv#131
    text = HEADER + "1,2,3\n"
    text = '"user","item","timestamp"\n"1","2","3"\n' if quoted else text
    assert load("csv", text.encode("utf-8-sig")).user_ids.tolist() == [1]
    assert load("amazon", "1,2,3,4\n".encode("utf-8-sig")).user_ids.tolist() == [1]


def test_marks_of_spark_among_parts(load, tmp_path):  # pola-rs/polars#21762, #17362
    for key in "ab":
        folder = tmp_path / "log" / f"key={key}"
        folder.mkdir(parents=True)
        pl.DataFrame({"user": [key], "item": [1], "timestamp": [1]}).write_parquet(folder / "part.parquet")
        (folder / "_other.txt").write_text("x")
        (folder / ".part.parquet.crc").write_text("x")
    (tmp_path / "log" / "_SUCCESS").touch()
    assert load("parquet", tmp_path / "log").user_ids.tolist() == ["a", "b"]


def test_numbers_of_folders_of_two_kinds(load, tmp_path):  # pola-rs/polars#13892, #18294
    for time in ("1700000001", "1700000000.5"):
        folder = tmp_path / "log" / f"time={time}"
        folder.mkdir(parents=True)
        (folder / "a.csv").write_text(f"user,item\nu,{time[-1]}\n")
    dataset = load("csv", tmp_path / "log", columns={"timestamp": "time"})
    assert [item for _, item, *_ in events(dataset)] == [5, 1]


def test_part_without_rows_and_with_another_type(load, tmp_path):  # pola-rs/polars#15747
    (tmp_path / "log").mkdir()
    frame = pl.DataFrame({"user": [1], "item": [2], "timestamp": [3.5]})
    frame.write_parquet(tmp_path / "log" / "a.parquet")
    frame.head(0).with_columns(pl.col("timestamp").cast(pl.Decimal(28, 9))).write_parquet(
        tmp_path / "log" / "b.parquet"
    )
    for partitions in (1, 2):
        assert load("parquet", tmp_path / "log", partitions=partitions).num_events == 1


def test_ids_with_gaps(load):  # benfred/implicit#165, #567
    dataset = load("csv", HEADER + "10,7,1\n40,9,1\n")
    assert dataset.num_users == 2 and dataset.num_items == 2 and dataset.user_ids.tolist() == [10, 40]


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("%Y-%m-%d %H", "2023-07-30 06", "2023-07-30T06:00"),  # pola-rs/polars#10178
        ("%Y%m%d%H%z", "2023010413-0500", "2023-01-04T18:00"),  # pola-rs/polars#13449
        ("%Y-%m-%d|%H", "2023-05-04|7", "2023-05-04T07:00"),  # pola-rs/polars#8849
        ("%Y-%m-%d|%H", "2023-05-04|10", "2023-05-04T10:00"),
        ("%Y-%B-%d %I:%M %p", "2020-January-01 10:43 PM", "2020-01-01T22:43"),  # pola-rs/polars#7187
        ("%Y-%m-%d %H:%M:%S.%f", "2024-06-03 20:02:48.680000", "2024-06-03T20:02:48"),  # pola-rs/polars#17167
        (None, "2024-06-03 20:02:48.6800000", "2024-06-03T20:02:48"),
        (None, "2018-09-05T04:24:01.9", "2018-09-05T04:24:01"),  # pola-rs/polars#3195
    ],
)
def test_formats_of_times(load, format, text, expected):
    assert times_of(load, text, format) == [second(expected)]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("%Y-%B-%d %M:%S", "2020-January-01 12:34"),  # pola-rs/polars#9673: the time was cut off
        ("%Y-%B-%d %I:%M", "2020-January-01 10:43"),
    ],
)
def test_formats_that_give_no_time_of_the_day(load, format, text):
    assert "data.columns.timestamp_format: " in error_of(
        load, "csv", f"user;item;timestamp\nu;1;{text}\n", columns={"timestamp_format": format}
    )


def test_column_without_values(load):  # alibaba/TorchEasyRec#56
    text = "user,item,timestamp,empty\n1,2,3,\n1,3,4,\n"
    features = {"events": {"columns": {"empty": "number"}}}
    assert len(load("csv", text, features=features).features[0].codes) == 0


def test_users_of_events_without_a_row_in_the_file_of_users(load, tmp_path):  # recsyschallenge/2016#25
    (tmp_path / "users.csv").write_text("user,age\n1,30\n")
    users = {"format": "csv", "path": str(tmp_path / "users.csv"), "columns": {"age": "number"}}
    dataset = load("csv", HEADER + "1,2,3\n9,2,3\n", features={"users": users})
    assert "1 of 2 users have no row in it" in dataset.notes[-1]
