"""Test raw formats, the checks of rows, the k-core filter and sorting."""

import time
from pathlib import Path

import numpy as np
import pytest

from data import prepare
from data.datasets import FORMATS, DataError, load_dataset
from data.download import SOURCES
from data.reading import lines as rows
from tests.data.raw_files import CSV, GOOD, error_of, events

pl = pytest.importorskip("polars")  # it reads raw files

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"

KUAIRAND_HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


def kuairand_line(user, item, time_ms, flags="0,0,0,0,0,0,0", profile=0):
    return f"{user},{item},20220408,1400,{time_ms},{flags},100,200,0,0,{profile},0,1"


# ---- formats

# Users 7 and 30, three events; user 7's are not in time order in the file.
MOVIELENS_EVENTS = [(7, 5, 100, 2), (7, 900, 200, 5), (30, 5, 150, 4)]


def test_ml_100k(load):
    assert events(load("ml-100k", "7\t900\t5\t200\n30\t5\t4\t150\n7\t5\t2\t100\n")) == MOVIELENS_EVENTS


def test_ml_1m(load):
    assert events(load("ml-1m", "7::900::5::200\n30::5::4::150\n7::5::2::100\n")) == MOVIELENS_EVENTS


@pytest.mark.parametrize("name", ["ml-20m", "ml-25m", "ml-32m"])
def test_ml_csv_codes_half_stars(load, name):
    dataset = load(name, "userId,movieId,rating,timestamp\n7,900,5.0,200\n30,5,4,150\n7,5,2.5,100\n")
    assert events(dataset) == [(7, 5, 100, 5), (7, 900, 200, 10), (30, 5, 150, 8)]


def test_amazon(load):
    text = "A2,B0001,5.0,1369699200\nA10,0594,1.0,1369699100\nA2,0594,3.0,1369699100\n"
    expected = [("A10", "0594", 1369699100, 1), ("A2", "0594", 1369699100, 3), ("A2", "B0001", 1369699200, 5)]
    dataset = load("amazon", text, name="ratings_Beauty.csv")
    assert events(dataset) == expected
    assert dataset.name == "ratings_Beauty"


def test_kuairand_parts_flags_and_milliseconds(tmp_path, load):
    folder = tmp_path / "KuaiRand" / "data"
    folder.mkdir(parents=True)
    later = kuairand_line(3, 11, 1649398545999, flags="1,0,0,0,0,0,1", profile=1)
    earlier = kuairand_line(3, 12, 1649398545001, flags="0,1,0,0,0,0,0")
    (folder / "log_standard_4_08_to_4_21_1k.csv").write_text(f"{KUAIRAND_HEADER}\n{later}\n")
    (folder / "log_standard_4_22_to_5_08_1k.csv").write_text(f"{KUAIRAND_HEADER}\n{earlier}\n")
    (folder / "log_random_4_22_to_5_08_1k.csv").write_text("must not be read\n")
    # In the same second, milliseconds give the order.
    expected = [(3, 12, 1649398545, 0b10), (3, 11, 1649398545, 0b11000001)]
    assert events(load("kuairand", folder.parent)) == expected
    assert events(load("kuairand", folder)) == expected


def test_lastfm_1k_artists_by_name_and_times_as_text(load):
    text = (
        'user_000002\t2009-05-04T13:54:10Z\t\tSigur "Rós"\t\tOne\n'
        "user_000001\t2009-05-04T23:08:57Z\tf1b1cf71\tDeep Dish\t\tTwo\n"
        "user_000001\t2009-05-04T13:54:10Z\ta7f7df4a\t坂本龍一\t\tThree\n"
    )
    name = "userid-timestamp-artid-artname-traid-traname.tsv"
    assert events(load("lastfm-1k", text, name=name)) == [
        ("user_000001", "坂本龍一", 1241445250, None),
        ("user_000001", "Deep Dish", 1241478537, None),
        ("user_000002", 'Sigur "Rós"', 1241445250, None),
    ]
    message = error_of(load, "lastfm-1k", text.replace("2009-05-04T23:08:57Z", "yesterday"), name=name)
    assert "line 2, column timestamp: " in message


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_lines_keeps_the_order_of_the_file(load, separator):
    dataset = load("lines", "2 9\n1 4\n2 3\n1 4\n2 9\n".replace(" ", separator), name="shop.txt")
    assert [e[:2] for e in events(dataset)] == [(1, 4), (1, 4), (2, 9), (2, 3), (2, 9)]
    assert not dataset.has_timestamps and not dataset.timestamps.any() and dataset.actions is None
    assert dataset.name == "shop"


def test_csv_with_default_and_other_columns(load):
    default = load("csv", "item,extra,user,timestamp\nb,x,u1,20\na,y,u1,10\n")
    assert events(default) == [("u1", "a", 10, None), ("u1", "b", 20, None)]
    text = '\ufeffwhen,who,what,how\n20000,"Doe, Jane",b,3\n10000,"Doe, Jane","say ""a""",1\n'
    columns = {"user": "who", "item": "what", "timestamp": "when", "action": "how", "timestamp_unit": "ms"}
    dataset = load("csv", text, columns=columns)
    assert events(dataset) == [("Doe, Jane", 'say "a"', 10, 1), ("Doe, Jane", "b", 20, 3)]


def test_csv_without_timestamps(load):
    dataset = load("csv", "user,item\n1,20\n1,10\n", columns={"timestamp": ""})
    assert [e[:2] for e in events(dataset)] == [(1, 20), (1, 10)] and not dataset.has_timestamps


def test_ids_are_integers_only_if_none_changes(load):
    header = "user,item,timestamp\n"
    numbers = load("csv", header + "10,1,1\n9,2,2\n-3,3,3\n")
    assert numbers.user_ids.tolist() == [-3, 9, 10] and numbers.user_ids.dtype == np.int64
    zeros = load("csv", header + "007,1,1\n7,2,2\n")
    assert zeros.user_ids.tolist() == ["007", "7"] and zeros.user_ids.dtype.kind == "U"


def test_crlf_and_missing_last_newline(load):
    assert events(load("ml-100k", "7\t900\t5\t200\r\n30\t5\t4\t150\r\n7\t5\t2\t100")) == MOVIELENS_EVENTS


@pytest.mark.parametrize("time_type", ["int", "datetime"])
def test_parquet(tmp_path, load, time_type):
    frame = pl.DataFrame({"user": ["b", "a", "b"], "item": [4, 4, 2], "timestamp": [2, 1, 1], "how": [1, 2, 3]})
    if time_type == "datetime":
        frame = frame.with_columns(pl.from_epoch("timestamp", time_unit="s"))
    frame.write_parquet(tmp_path / "log.parquet")
    dataset = load("parquet", tmp_path, columns={"action": "how"})
    assert events(dataset) == [("a", 4, 1, 2), ("b", 2, 1, 3), ("b", 4, 2, 1)]


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.kind == "text"])
def test_path_may_be_the_folder(tmp_path, load, name):
    """Check that the file of every text format is found in its folder by its published name."""
    fmt = FORMATS[name]
    file = tmp_path / Path(fmt.files[0]).name.replace("*", "x")
    names = list(fmt.columns.values()) + list(fmt.flags)
    lines = [list(range(1, 1 + (fmt.width or len(fmt.columns)))) + [1] * len(fmt.flags)]
    if fmt.timestamp_format:
        lines[0][fmt.columns["timestamp"]] = time.strftime(fmt.timestamp_format)
    if fmt.header:
        lines.insert(0, names)
    file.write_text("".join(fmt.separator.join(map(str, line)) + "\n" for line in lines))
    dataset = load(name, tmp_path)
    assert dataset.num_events == 1
    assert dataset.fingerprint == load(name, file).fingerprint


# ---- order and filter


def test_sort_is_stable_with_ties_and_disorder(load):
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 5, 400), np.arange(400), rng.integers(0, 6, 400)], 1)
    text = "".join(f"{u}\t{i}\t1\t{t}\n" for u, i, t in rows.tolist())
    expected = sorted(rows.tolist(), key=lambda r: (r[0], r[2]))  # Python's sort is stable
    assert [[u, i, t] for u, i, t, _ in events(load("ml-100k", text))] == expected


def naive_k_core(pairs, min_user, min_item):
    while True:
        users, items = [u for u, _ in pairs], [i for _, i in pairs]
        left = [(u, i) for u, i in pairs if users.count(u) >= min_user and items.count(i) >= min_item]
        if left == pairs:
            return left
        pairs = left


@pytest.mark.parametrize("seed", range(4))
def test_k_core_reaches_the_fixpoint(load, seed):
    rng = np.random.default_rng(seed)
    pairs = list(zip(rng.integers(0, 40, 160).tolist(), (rng.zipf(1.6, 160) % 50).tolist()))
    expected = sorted(naive_k_core(pairs, 4, 3), key=lambda p: p[0])
    text = "".join(f"{u} {i}\n" for u, i in pairs)
    dataset = load("lines", text, min_user_events=4, min_item_events=3)
    assert [e[:2] for e in events(dataset)] == expected
    assert dataset.item_ids.tolist() == sorted({i for _, i in expected})


def test_k_core_that_unravels_step_by_step(load):
    # A chain: each removal makes the next user or item too rare, until only the square at the end is left.
    pairs = [(0, 100)]
    for n in range(20):
        pairs += [(n + 1, 100 + n), (n + 1, 101 + n)]
    pairs += [(50, 200), (50, 201), (51, 200), (51, 201)]
    dataset = load("lines", "".join(f"{u} {i}\n" for u, i in pairs), min_user_events=2, min_item_events=2)
    assert [e[:2] for e in events(dataset)] == pairs[-4:]


def test_filter_that_leaves_nothing(load):
    message = error_of(load, "lines", "1 1\n2 2\n", min_user_events=5)
    assert "no event is left with min_user_events=5" in message


def test_user_with_one_event_and_duplicates_stay(load):
    dataset = load("lines", "1 1\n2 2\n2 2\n")
    assert np.diff(dataset.user_offsets).tolist() == [1, 2]


# ---- the validator


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("7\t900\t5\tabc", "raw.txt line 17, column timestamp: expected an integer, got 'abc'"),
        ("7\t900\t5\t1.5", "raw.txt line 17, column timestamp: expected an integer, got '1.5'"),
        ("7\t900\t5\t-1", "raw.txt line 17, column timestamp: expected a timestamp >= 0, got -1"),
        ("7\t900\t5\t881250949000", "raw.txt line 17, column timestamp: expected seconds, got 881250949000"),
        ("7\t900\t5\t99999999999999999999", "raw.txt line 17, column timestamp: expected a 64-bit integer"),
        ("7\t900\t5", "raw.txt line 17: expected 4 columns, got 3"),
        ("7\t900\t5\t1\t2", "raw.txt line 17: expected 4 columns, got 5"),
        ("", "raw.txt line 17: empty line"),
        ("\t900\t5\t1", "raw.txt line 17, column user: the value is missing"),
        ("7\tx\t5\t1", "raw.txt line 17, column item: expected an integer, got 'x'"),
        ("7\t900\tgood\t1", "raw.txt line 17, column action: expected an integer 0 to 5, got 'good'"),
        ("7\t900\t4.5\t1", "raw.txt line 17, column action: expected an integer 0 to 5, got '4.5'"),
        ("7\t900\t-1\t1", "raw.txt line 17, column action: expected an integer 0 to 5, got '-1'"),
        ("7\t900\t4 \t1", "raw.txt line 17, column action: expected an integer 0 to 5, got '4 '"),
        ("7\t900\tnan\t1", "raw.txt line 17, column action: expected an integer 0 to 5, got 'nan'"),
        ("7 900 5 1", "raw.txt line 17: expected 4 columns, got 1"),
    ],
)
def test_validator_names_line_column_value(load, line, complaint):
    assert complaint in error_of(load, "ml-100k", GOOD + line + "\n" + GOOD)


AMAZON = "A1,B1,5.0,10\n"


@pytest.mark.parametrize(
    "name, text, complaint",
    [
        ("ml-1m", "1::2::3::4\n1::2::3::x\n", "line 2, column timestamp: expected an integer, got 'x'"),
        ("ml-1m", "1::2::3::4\n1:2:3:4\n", "line 2: expected 4 columns, got 1"),
        ("ml-20m", "userId,movieId,rating,timestamp\n1,2,3.5,4\n1,2,3.7,4\n", "line 3, column rating: expected a mul"),
        ("ml-25m", "userId,movieId,timestamp\n1,2,4\n", "no column 'rating'; it has userId, movieId, timestamp"),
        ("ml-32m", "userId,movieId,rating,timestamp\n1,2,3.5,\n", "line 2, column timestamp: the value is missing"),
        ("amazon", AMAZON + "A1,,5.0,10\n", "line 2, column item: the value is missing"),
        ("amazon", AMAZON + "A1,B1,5.0,1e9\n", "line 2, column timestamp: expected an integer, got '1e9'"),
        ("lines", "1 2\n1 2 3\n", "line 2: expected 2 columns, got 3"),
        ("lines", "1 2\n1 b\n", "line 2, column item: expected an integer, got 'b'"),
        ("lines", "1 2\n\n1 3\n", "line 2: empty line"),
        ("csv", CSV + ",i,1,0\n", "line 3, column user: the value is missing"),
        ("csv", CSV + "u,i,soon,0\n", "line 3, column timestamp: expected an integer, got 'soon'"),
        ("csv", CSV + "u,i,1700000000000,0\n", "set data.columns.timestamp_unit to ms"),
        ("csv", CSV + "u,i,-5,0\n", "line 3, column timestamp: expected a timestamp >= 0, got -5"),
        ("csv", CSV + '"u\nv",i,1,0\nu,i,x,0\n', "line 5, column timestamp: expected an integer, got 'x'"),
        (
            "csv",
            "user,item,timestmp\nu,i,1\n",
            "no column 'timestamp' (data.columns.timestamp), did you mean timestmp?",
        ),
        (
            "kuairand",
            f"{KUAIRAND_HEADER}\n{kuairand_line(1, 2, 3)}\n{kuairand_line(1, 2, 3, flags='0,0,2,0,0,0,0')}\n",
            "line 3, column is_follow: expected 0 or 1, got '2'",
        ),
        (
            "kuairand",
            f"{KUAIRAND_HEADER}\n{kuairand_line(1, '', 3)}\n",
            "line 2, column video_id: the value is missing",
        ),
    ],
)
def test_validator_for_every_format(load, name, text, complaint):
    assert complaint in error_of(load, name, text)


@pytest.mark.parametrize("name", ["ml-100k", "csv"])
def test_validator_far_into_the_file(load, monkeypatch, name):
    """Check line numbers across blocks of the search for bad rows, with line ends in quoted fields."""
    monkeypatch.setattr(rows, "BLOCK", 64)
    monkeypatch.setattr(rows, "SEARCH_BLOCK", 100)
    if name == "ml-100k":
        text, lines = GOOD * 20, 16 * 20
        bad = "1\t2\t3\tx\n"
    else:
        text, lines = CSV + '"u\n,v",i,1,0\n' * 100 + "u,i,1,0\n" * 7, 2 + 2 * 100 + 7
        bad = "u,i,x,0\n"
    assert load(name, text).num_events > 100
    assert f"line {lines + 1}, column timestamp: expected an integer, got 'x'" in error_of(
        load, name, text + bad + text.removeprefix("user,item,timestamp,how\n")
    )


def test_zip_archive(load):
    assert "a zip archive; unpack it first" in error_of(load, "ml-20m", b"PK\x03\x04\n\n")


def test_header_of_another_encoding_is_shown_in_one_line(load):
    message = error_of(load, "csv", CSV.encode("utf-16"), encoding="utf-8")
    assert "no column 'user'" in message and message.isprintable()


def test_quoted_empty_id_is_missing(load):
    assert "line 3, column user: the value is missing" in error_of(load, "csv", CSV + '"",i,1,0\n')


def test_spaces_before_numbers_are_fine(load):
    assert events(load("csv", "user,item,timestamp\n1,2, 3\n")) == [(1, 2, 3, None)]


def test_source_that_cannot_be_read(load, monkeypatch, tmp_path):
    def fail(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(prepare, "file_sha256", fail)
    assert "raw.txt: cannot be read: Permission denied" in error_of(load, "lines", "1 1\n")


def test_source_that_changes_meanwhile(load, monkeypatch, tmp_path):
    original = prepare.read_raw

    def read_and_append(*args):
        dataset = original(*args)
        with open(tmp_path / "raw.txt", "a") as f:
            f.write("9 9\n")
        return dataset

    monkeypatch.setattr(prepare, "read_raw", read_and_append)
    assert "changed while it was being read" in error_of(load, "lines", "1 1\n")
    assert not (tmp_path / "cache").exists()


def test_validator_csv_action(load):
    message = error_of(load, "csv", CSV + "u,i,1,buy\n", columns={"action": "how"})
    assert "line 3, column how: expected an integer 0 to 999999, got 'buy'" in message


def test_validator_not_utf8(load):
    message = error_of(load, "csv", CSV.encode() + b"u,caf\x81,1,0\n")
    assert "line 3, column item: not valid UTF-8" in message


@pytest.mark.parametrize(
    "column, values, complaint",
    [
        ("user", ["a", None], "row 2, column user: the value is missing"),
        ("timestamp", [1, -1], "row 2, column timestamp: expected a timestamp >= 0, got -1"),
        ("timestamp", [1, None], "row 2, column timestamp: the value is missing"),
        ("timestamp", [1.5, float("nan")], "row 2, column timestamp: expected a number, got 'nan'"),
        ("timestamp", [[1], [2]], "column timestamp: expected numbers (Float32 has too few digits), datetimes, dates"),
        ("item", [1.0, 2.0], "column item: expected integers or strings, got Float64"),
        ("how", [0.0, 1.5], "row 2, column how: expected an integer 0 to 999999, got '1.5'"),
    ],
)
def test_validator_parquet(tmp_path, load, column, values, complaint):
    frame = {"user": [1, 2], "item": [1, 2], "timestamp": [1, 2], "how": [0, 1]} | {column: values}
    pl.DataFrame(frame).write_parquet(tmp_path / "log.parquet")
    assert complaint in error_of(load, "parquet", tmp_path / "log.parquet", columns={"action": "how"})


def test_parquet_read_as_text_and_text_read_as_parquet(tmp_path, load):
    assert "not a Parquet file; for text set data.format to csv" in error_of(load, "parquet", "user,item\n", name="x")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1, and then nothing")
    assert "not a readable Parquet file" in error_of(load, "parquet", tmp_path / "cut.parquet")
    pl.DataFrame({"user": [1], "item": [2], "timestamp": [3]}).write_parquet(tmp_path / "log.csv")
    assert "this is a Parquet file; set data.format to parquet" in error_of(load, "csv", tmp_path / "log.csv")


def test_files_that_are_missing_empty_or_ambiguous(tmp_path, load):
    assert "no such file" in error_of(load, "ml-100k", tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    assert "no u.data in this folder" in error_of(load, "ml-100k", tmp_path / "folder")
    assert "the file is empty" in error_of(load, "ml-100k", "")
    assert "no events" in error_of(load, "csv", "user,item,timestamp\n")
    for name in "ab":
        (tmp_path / "folder" / f"{name}.txt").write_text("1 1\n")
    assert "2 files match" in error_of(load, "lines", tmp_path / "folder")
    with pytest.raises(DataError, match=r"data\.path: format ml-1m needs .*: python -m data\.download ml-1m$"):
        load_dataset("ml-1m", None, cache_dir=tmp_path)


def test_error_for_missing_data_says_how_to_fetch_them(tmp_path, load):
    assert error_of(load, "ml-1m", tmp_path / "nowhere").endswith("to fetch it: python -m data.download ml-1m")
    (tmp_path / "folder").mkdir()
    message = error_of(load, "kuairand", tmp_path / "folder")
    assert message.endswith("data.download NAME (NAME is one of kuairand-pure, kuairand-1k, kuairand-27k)")
    for name, fmt in FORMATS.items():
        assert list(fmt.downloads) == [source for source, entry in SOURCES.items() if entry.format == name]


def test_wrong_options(tmp_path, load):
    assert "did you mean ml-100k?" in error_of(load, "ml-100", "1 1\n")
    assert "min_user_events: expected an integer >= 1, got 0" in error_of(load, "lines", "1 1\n", min_user_events=0)
    assert "are fixed" in error_of(load, "lines", "1 1\n", columns={"user": "u"})
    assert "did you mean item?" in error_of(load, "csv", CSV, columns={"itm": "u"})
    assert "should be 's', 'ms', 'us' or 'ns', got 'days'" in error_of(
        load, "csv", CSV, columns={"timestamp_unit": "days"}
    )
    assert "named twice" in error_of(load, "csv", CSV, columns={"user": "item"})
    assert "these options are for format synthetic, not lines" in error_of(
        load, "lines", "1 1\n", synthetic={"seed": 1}
    )
    with pytest.raises(DataError, match="takes no path"):
        load_dataset("synthetic", "somewhere", cache_dir=tmp_path)
    assert "more than 256 characters" in error_of(load, "csv", CSV + "u" * 300 + ",i,1,0\n")


# ---- real data


@pytest.mark.skipif(not (REAL / "ml-100k" / "u.data").exists(), reason="no MovieLens 100K here")
def test_real_ml_100k(load):
    dataset = load("ml-100k", REAL / "ml-100k")
    assert (dataset.num_users, dataset.num_items, dataset.num_events) == (943, 1682, 100_000)
    assert (dataset.items.dtype, dataset.timestamps.dtype, dataset.actions.dtype) == (np.int32, np.int64, np.int32)
    raw = np.loadtxt(REAL / "ml-100k" / "u.data", dtype=np.int64)
    order = np.lexsort((raw[:, 3], raw[:, 0]))
    assert np.array_equal(dataset.item_ids[dataset.items], raw[order, 1])
    assert np.array_equal(dataset.actions, raw[order, 2])
    assert np.array_equal(dataset.timestamps, raw[order, 3])


@pytest.mark.skipif(not (REAL / "beauty" / "beauty.txt").exists(), reason="no Amazon Beauty here")
def test_real_beauty(load):
    dataset = load("lines", REAL / "beauty")
    assert (dataset.num_users, dataset.num_items, dataset.num_events) == (40_226, 54_542, 353_962)
    raw = np.loadtxt(REAL / "beauty" / "beauty.txt", dtype=np.int64)
    assert np.array_equal(dataset.item_ids[dataset.items], raw[np.argsort(raw[:, 0], kind="stable"), 1])
