"""Define cases of raw files, each a line `(format, name, content, expected end, overrides)`.

If a run works, the data set must have the numbers of users, items and events in the file (FACTS).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import train
from data.datasets import FORMATS, load_dataset
from tests.hostile.configs import BASE
from tests.hostile.harness import ERROR, WORKS, Case
from training.config import load_config

BEFORE, AFTER = BASE.split("data: {", 1)[0], BASE.split("\nmodel:", 1)[1]
RAW = f"{BEFORE}data: {{format: F, path: P, protocol: leave_one_out}}\nmodel:{AFTER}"
# user, item, rating, time of 12 users with 6 events each over 10 items.
ROWS = [(u, (u * 3 + i * 7) % 10 + 1, (u + i) % 5 + 1, 10**9 + i * 1000 + u) for i in range(6) for u in range(1, 13)]
FACTS = (12, 10, 72)
ONE_MORE = (13, 10, 73)  # with one event of another user
NAMES = {"ml-100k": "u.data", "ml-1m": "ratings.dat", "lines": "x.txt", "parquet": "x.parquet"}
NAMES |= {"kuairand": "log_standard_1.csv"}


def table(separator: str, rows=None, header: str = "", end: str = "\n") -> str:
    lines = [header] * bool(header) + [separator.join(map(str, row)) for row in (ROWS if rows is None else rows)]
    return "".join(line + end for line in lines)


def with_row(separator: str, row: str, header: str = "", at: int = 5) -> str:
    lines = table(separator, header=header).splitlines(True)
    return "".join([*lines[:at], row + "\n", *lines[at:]])


T, ML = "\t", "userId,movieId,rating,timestamp"
PAIRS = [row[:2] for row in ROWS]
TIMED, CSV = [(u, i, t) for u, i, _, t in ROWS], "user,item,timestamp"
NOTED = table(",", [(*row, 1) for row in TIMED], CSV + ",note")
AMAZON = table(",", [(f"A{u}", f"B{i}", r, t) for u, i, r, t in ROWS])
FLAGS = FORMATS["kuairand"].flags
KUAIRAND_HEADER = ",".join(["user_id", "video_id", "time_ms", *FLAGS])
KUAIRAND = table(",", [(u, i, t * 1000, *[0] * 8) for u, i, _, t in ROWS], KUAIRAND_HEADER)


def csv(row: str) -> str:
    return table(",", TIMED, CSV) + row + "\n" + table(",", TIMED[:3])


# Rows of u.data that must be refused.
BAD_ROWS = {
    "no number as rating": "1\t2\tnan\t5",
    "id beyond int64": "9223372036854775808\t2\t3\t5",
    "id of 5,000 digits": "9" * 5000 + "\t2\t3\t5",
    "fraction as id": "1.0\t2\t3\t5",
    "negative time": "1\t2\t3\t-5",
    "time in milliseconds": "1\t2\t3\t1700000000000",
    "no time": "1\t2\t3\t",
    "no user": "\t2\t3\t4",
    "empty line": "",
    "line of blanks": "   ",
    "a field too many": "1\t2\t3\t4\t5",
    "a field too few": "1\t2\t3",
    "rating 2.5": "1\t2\t2.5\t4",
    "infinite rating": "1\t2\tinf\t4",
    "rating -1": "1\t2\t-1\t4",
    "rating 1e10": "1\t2\t1e10\t4",
    "rating 10^9": "1\t2\t1000000000\t4",
    "rating 6": "1\t2\t6\t4",
    "underscore in an id": "1_0\t2\t3\t4",
    "arabic digits": "١\t2\t3\t4",
    "time 1e9": "1\t2\t3\t1e9",
    "time 4.5": "1\t2\t3\t4.5",
    "NUL": "1\0\t2\t3\t4",
    "hexadecimal id": "0x1\t2\t3\t4",
    "line of 10 MB": "1\t" + "2" * 10_000_000 + "\t3\t4",
    "blank at the end": "1\t2\t3\t4 ",
    "tab at the end": "1\t2\t3\t4\t",
}
BAD_CSV_ROWS = {
    "time NaN": "1,1,NaN",
    "no time": "1,1,",
    "a date": "1,1,2020-01-01",
    "milliseconds": "1,1,1700000000000",
    "negative time": "1,1,-1",
    "no user": ",1,5",
    "quoted nothing as user": '"",1,5',
    "a field too few": "1,1",
    "a field too many": "1,1,5,6",
    "empty line": "",
    "comment": "# x",
    "quote inside a field": 'a"b,1,5',
    "text behind a quote": '"a"b,1,5',
    "quote never closed": '"a,1,5',
    "id of 300 characters": "a" * 300 + ",1,5",
    "id of 10 MB": "a" * 10_000_000 + ",1,5",
    "NUL in an id": "a\0,1,5",
}
NO_TIMES = 'data.columns={timestamp:""}'
Content = str | bytes | Callable[[Path], None]
# (format, name, content, expected end, overrides). The expected end is ERROR, or the numbers of users, items and events
# that the data set must have, such as FACTS.
CASES: list[tuple[str, str, Content, object, str]] = [
    *[("ml-100k", name, with_row(T, row), ERROR, "") for name, row in BAD_ROWS.items()],
    *[("csv", name, csv(row), ERROR, "") for name, row in BAD_CSV_ROWS.items()],
    ("ml-100k", "valid", table(T), FACTS, ""),
    ("ml-100k", "CRLF", table(T, end="\r\n"), FACTS, ""),
    ("ml-100k", "no last line end", table(T).rstrip(), FACTS, ""),
    ("ml-100k", "rows in reverse", table(T, ROWS[::-1]), FACTS, ""),
    ("ml-100k", "byte order mark", "\ufeff" + table(T), FACTS, ""),
    ("ml-100k", "huge ids", table(T, [(u * 10**17, i * 10**17, 1, t) for u, i, _, t in ROWS]), FACTS, ""),
    ("ml-100k", "a user with one event", table(T, [*ROWS, (99, 1, 3, 5)]), ONE_MORE, ""),
    ("ml-100k", "negative user", with_row(T, "-1\t2\t3\t5"), ONE_MORE, ""),
    ("ml-100k", "spaces before numbers", with_row(T, " +1\t2\t3\t4"), (12, 10, 73), ""),
    ("ml-100k", "one item", table(T, [(u, 1, 3, t) for u, _, _, t in ROWS]), (12, 1, 72), ""),
    ("ml-100k", "three columns", table(T, [row[:3] for row in ROWS]), ERROR, ""),
    ("ml-100k", "commas", table(","), ERROR, ""),
    ("ml-100k", "CR alone", table(T, end="\r"), ERROR, ""),
    ("ml-100k", "quotes", table(T, [[f'"{x}"' for x in row] for row in ROWS]), ERROR, ""),
    ("ml-100k", "bytes of no encoding", table(T).encode() + b"\x81\t1\t1\t1\n", ERROR, ""),
    ("ml-100k", "utf-16", table(T).encode("utf-16"), FACTS, ""),
    ("ml-100k", "empty", "", ERROR, ""),
    ("ml-100k", "one line end", "\n", ERROR, ""),
    ("ml-100k", "blanks", "  \n \n", ERROR, ""),
    ("ml-100k", "gzip", b"\x1f\x8b\x08\0" + b"\0" * 50, ERROR, ""),
    ("ml-100k", "users with one event each", table(T, [(u, u, 3, 5) for u in range(1, 9)]), ERROR, ""),
    ("ml-100k", "filter that leaves nothing", table(T), ERROR, "data.min_user_events=100"),
    ("ml-100k", "filter beyond int64", table(T), ERROR, "data.min_user_events=99999999999999999999"),
    ("ml-100k", "windows of more than all", table(T), ERROR, "data.protocol=temporal data.test_fraction=0.95"),
    ("ml-100k", "one time, temporal", table(T, [(*row[:3], 7) for row in ROWS]), ERROR, "data.protocol=temporal"),
    ("ml-100k", "columns of a fixed format", table(T), ERROR, "data.columns={user:a}"),
    ("ml-1m", "valid", table("::"), FACTS, ""),
    ("ml-1m", "CRLF", table("::", end="\r\n"), FACTS, ""),
    ("ml-1m", "single colons", table(":"), ERROR, ""),
    ("ml-1m", "three fields", with_row("::", "1::2::3"), ERROR, ""),
    ("ml-1m", "text between the colons", with_row("::", "1:x:2:y:3:z:4"), ERROR, ""),
    ("ml-1m", "seven fields, single colons", table(":", [(u, 9, i, 9, r, 9, t) for u, i, r, t in ROWS]), ERROR, ""),
    ("ml-1m", "three colons", with_row("::", "1:::2::3:4"), ERROR, ""),
    ("ml-1m", "tabs", table(T), ERROR, ""),
    ("ml-1m", "bytes of no encoding", table("::").encode() + b"\x81::1::1::1\n", ERROR, ""),
    ("ml-20m", "valid", table(",", header=ML), FACTS, ""),
    ("ml-20m", "byte order mark", "\ufeff" + table(",", header=ML), FACTS, ""),
    ("ml-20m", "CRLF", table(",", header=ML, end="\r\n"), FACTS, ""),
    ("ml-20m", "columns in reverse", table(",", [r[::-1] for r in ROWS], "timestamp,rating,movieId,userId"), FACTS, ""),
    ("ml-20m", "header alone", ML + "\n", ERROR, ""),
    ("ml-20m", "no header", table(","), ERROR, ""),
    ("ml-20m", "a column missing", table(",", [row[:3] for row in ROWS], "userId,movieId,rating"), ERROR, ""),
    ("ml-20m", "a column twice", table(",", [(*row, 5) for row in ROWS], ML + ",userId"), ERROR, ""),
    ("ml-20m", "quoted header", table(",", header='"userId","movieId","rating","timestamp"'), ERROR, ""),
    ("ml-20m", "lower case header", table(",", header=ML.lower()), ERROR, ""),
    ("ml-20m", "utf-16 header", table(",", header=ML).encode("utf-16"), FACTS, ""),
    ("ml-20m", "semicolons", table(";", header=ML.replace(",", ";")), ERROR, ""),
    ("ml-20m", "rating 0.3", with_row(",", "1,2,0.3,4", ML), ERROR, ""),
    ("ml-20m", "rating 5.5", with_row(",", "1,2,5.5,4", ML), ERROR, ""),
    ("ml-20m", "a field too many", with_row(",", "1,2,3,4,5", ML), ERROR, ""),
    ("ml-20m", "a field too few", with_row(",", "1,2,3", ML), ERROR, ""),
    ("ml-20m", "empty line at the end", table(",", header=ML) + "\n", ERROR, ""),
    ("amazon", "valid", AMAZON, FACTS, ""),
    ("amazon", "item before user", table(",", [(f"B{i}", f"A{u}", r, t) for u, i, r, t in ROWS]), (10, 12, 72), ""),
    ("amazon", "nan as id", AMAZON + "nan,B1,5,4\n", ONE_MORE, ""),
    ("amazon", "header", table(",", header="user,item,rating,timestamp"), ERROR, ""),
    ("amazon", "no item", AMAZON + "A,,5,4\n", ERROR, ""),
    ("amazon", "id of 300 characters", AMAZON + "A" * 300 + ",B,5,4\n", ERROR, ""),
    ("amazon", "comma in quotes", AMAZON + '"a,b",c,5,4\n', ERROR, ""),
    ("amazon", "time 4.0", AMAZON + "A,B,5.0,4.0\n", ERROR, ""),
    ("amazon", "NUL at the end of an id", AMAZON + "A\0,B,5,4\nA,B,5,4\n", ERROR, ""),
    ("amazon", "bytes of no encoding", AMAZON.encode() + b"\x81,B,5,4\n", ERROR, ""),
    ("lines", "valid", table(" ", PAIRS), FACTS, ""),
    ("lines", "tabs", table(T, PAIRS), FACTS, ""),
    ("lines", "CRLF", table(" ", PAIRS, end="\r\n"), FACTS, ""),
    ("lines", "two blanks", table("  ", PAIRS), ERROR, ""),
    ("lines", "tab after blanks", table(" ", PAIRS) + "1\t2\n", ERROR, ""),
    ("lines", "blank at the end", table(" ", [(*row, "") for row in PAIRS]), ERROR, ""),
    ("lines", "four columns", table(" "), ERROR, ""),
    ("lines", "words", table(" ", PAIRS) + "a b\n", ERROR, ""),
    ("lines", "fraction", table(" ", PAIRS) + "1 2.0\n", ERROR, ""),
    ("lines", "commas", table(",", PAIRS), ERROR, ""),
    ("lines", "time bias without times", table(" ", PAIRS), ERROR, "model.attention.time_bias=true"),
    ("lines", "rotary by time without times", table(" ", PAIRS), ERROR, "model.rotary={time:true}"),
    ("lines", "temporal without times", table(" ", PAIRS), ERROR, "data.protocol=temporal"),
    ("csv", "valid", table(",", TIMED, CSV), FACTS, ""),
    ("csv", "CRLF", table(",", TIMED, CSV, "\r\n"), FACTS, ""),
    ("csv", "byte order mark", "\ufeff" + table(",", TIMED, CSV), FACTS, ""),
    ("csv", "no last line end", table(",", TIMED, CSV).rstrip(), FACTS, ""),
    ("csv", "line end in a quoted id", table(",", TIMED, CSV) + '"a\nb",1,5\n', ONE_MORE, ""),
    ("csv", "quote in a quoted id", table(",", TIMED, CSV) + '"a""b",1,5\n', ONE_MORE, ""),
    ("csv", "1.0 beside 1", table(",", TIMED, CSV) + "1.0,1,5\n", ERROR, ""),
    ("csv", "id beyond int64", table(",", TIMED, CSV) + "9223372036854775808,1,5\n", ONE_MORE, ""),
    ("csv", "user of blanks", table(",", TIMED, CSV) + "  ,1,5\n", ONE_MORE, ""),
    ("csv", "null as id", table(",", TIMED, CSV) + "null,1,5\n", ONE_MORE, ""),
    ("csv", "a column missing", table(",", PAIRS, "user,item"), ERROR, ""),
    ("csv", "semicolons", table(";", TIMED, "user;item;timestamp"), FACTS, ""),
    ("csv", "blanks in the header", table(",", TIMED, "user, item, timestamp"), ERROR, ""),
    ("csv", "a column twice", table(",", [(*row, 1) for row in TIMED], CSV + ",user"), ERROR, ""),
    ("csv", "header alone", CSV + "\n", ERROR, ""),
    ("csv", "empty header", "\n" + table(",", TIMED), ERROR, ""),
    ("csv", "quote never closed in the header", '"user,item,timestamp\n' + table(",", TIMED), ERROR, ""),
    ("csv", "header of 2 MB", "x" * 2_000_000 + f",{CSV}\n" + table(",", [(1, *row) for row in TIMED]), ERROR, ""),
    ("csv", "too few fields, the last is not read", NOTED + "1,1,5\n", ERROR, ""),
    ("csv", "too many fields, the last is not read", NOTED + "1,1,5,6,7\n", ERROR, ""),
    ("csv", "bytes of no encoding in a column that is not read", NOTED.encode() + b"13,1,5,\x81\n", ERROR, ""),
    ("csv", "unknown role", table(",", TIMED, CSV), ERROR, "data.columns={usr:user}"),
    ("csv", "one column for two roles", table(",", TIMED, CSV), ERROR, "data.columns={user:item}"),
    ("csv", "number as column", table(",", TIMED, CSV), ERROR, "data.columns={user:1}"),
    ("csv", "no such column", table(",", TIMED, CSV), ERROR, "data.columns={timestamp:tim}"),
    ("csv", "no column for the user", table(",", TIMED, CSV), ERROR, 'data.columns={user:""}'),
    ("csv", "unit us", table(",", TIMED, CSV), ERROR, "data.columns={timestamp_unit:us}"),
    ("csv", "no times", table(",", PAIRS, "user,item"), FACTS, NO_TIMES),
    ("csv", "action 4.5", table(",", [(*r, 4.5) for r in TIMED], CSV + ",a"), ERROR, "data.columns={action:a}"),
    ("csv", "action 10^9", table(",", [(*r, 10**9) for r in TIMED], CSV + ",a"), ERROR, "data.columns={action:a}"),
    ("csv", "no action", table(",", [(*r, "") for r in TIMED], CSV + ",a"), ERROR, "data.columns={action:a}"),
    ("kuairand", "valid", KUAIRAND, FACTS, ""),
    ("kuairand", "flag 2", KUAIRAND + "1,1,5,2,0,0,0,0,0,0,0\n", ERROR, ""),
    ("kuairand", "flag 256", KUAIRAND + "1,1,5,256,0,0,0,0,0,0,0\n", ERROR, ""),
    ("kuairand", "a flag missing", KUAIRAND.replace(",is_profile_enter", "").replace(",0\n", "\n"), ERROR, ""),
]


def parquet(**columns) -> Callable[[Path], None]:
    """Return a function that writes the valid table with some columns replaced, by values or (values, a type).

    The type is a function of polars, which must not be imported in this process.
    """

    def write(file: Path) -> None:
        import polars as pl

        frame = {"user": USERS, "item": [row[1] for row in TIMED], "timestamp": TIMES}
        for name, column in columns.items():
            values, kind = column if isinstance(column, tuple) else (column, None)
            frame[name] = pl.Series(values) if kind is None else pl.Series(values).cast(kind(pl))
        pl.DataFrame(frame).write_parquet(file)

    return write


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        parquet()(file)
        file.write_bytes(change(file.read_bytes()))

    return write


USERS, TIMES = [row[0] for row in TIMED], [row[2] for row in TIMED]
TEXTS, MICRO, REST = [str(user) for user in USERS], [time * 10**6 for time in TIMES], USERS[1:]


def micro(pl):
    return pl.Datetime("us")


CASES += [
    ("parquet", "valid", parquet(), FACTS, ""),
    ("parquet", "int8 ids", parquet(user=(USERS, lambda pl: pl.Int8)), FACTS, ""),
    ("parquet", "categories as ids", parquet(user=(TEXTS, lambda pl: pl.Categorical)), FACTS, ""),
    ("parquet", "enumeration as ids", parquet(user=(TEXTS, lambda pl: pl.Enum(sorted(set(TEXTS))))), FACTS, ""),
    ("parquet", "datetime", parquet(timestamp=(MICRO, lambda pl: pl.Datetime("us", "UTC"))), FACTS, ""),
    ("parquet", "datetime, ms", parquet(timestamp=(MICRO, micro)), FACTS, "data.columns={timestamp_unit:ms}"),
    ("parquet", "fractions as ids", parquet(user=[float(user) for user in USERS]), ERROR, ""),
    ("parquet", "no id", parquet(user=[None, *REST]), ERROR, ""),
    ("parquet", "no ids at all", parquet(user=[None] * len(USERS)), ERROR, ""),
    ("parquet", "empty id", parquet(user=["", *TEXTS[1:]]), ERROR, ""),
    ("parquet", "lists as ids", parquet(user=[[user] for user in USERS]), ERROR, ""),
    ("parquet", "structs as ids", parquet(user=[{"a": user} for user in USERS]), ERROR, ""),
    ("parquet", "truth as ids", parquet(user=[user > 3 for user in USERS]), ERROR, ""),
    ("parquet", "bytes as ids", parquet(user=[b"x%d" % user for user in USERS]), ERROR, ""),
    ("parquet", "decimals as ids", parquet(user=(USERS, lambda pl: pl.Decimal(10, 0))), ERROR, ""),
    ("parquet", "uint64 beyond int64", parquet(user=([2**64 - u for u in USERS], lambda pl: pl.UInt64)), ERROR, ""),
    ("parquet", "negative time", parquet(timestamp=[-1, *TIMES[1:]]), ERROR, ""),
    ("parquet", "text as time", parquet(timestamp=[str(time) for time in TIMES]), ERROR, ""),
    ("parquet", "date as time", parquet(timestamp=(list(range(len(TIMES))), lambda pl: pl.Date)), FACTS, ""),
    ("parquet", "no datetime", parquet(timestamp=([None, *MICRO[1:]], micro)), ERROR, ""),
    ("parquet", "the year 1900", parquet(timestamp=([-(10**15), *MICRO[1:]], micro)), ERROR, ""),
    ("parquet", "action NaN", parquet(a=[float("nan")] * len(USERS)), ERROR, "data.columns={action:a}"),
    ("parquet", "action -1", parquet(a=[-1] * len(USERS)), ERROR, "data.columns={action:a}"),
    ("parquet", "a column missing", parquet(), ERROR, "data.columns={user:usr}"),
    ("parquet", "text", table(",", TIMED, CSV), ERROR, ""),
    ("parquet", "cut short", damaged(lambda content: content[:-30]), ERROR, ""),
    ("parquet", "bytes changed", damaged(lambda content: content[:20] + b"\xff" * 9 + content[29:]), ERROR, ""),
    ("parquet", "magic alone", b"PAR1", ERROR, ""),
    ("parquet", "magic twice", b"PAR1\0\0\0\0PAR1", ERROR, ""),
]


def start(folder: Path, format: str, path: Path | str, *overrides: str) -> int:
    text = RAW.replace("format: F", f"format: {format}").replace("path: P", f"path: {path}")
    (folder / "run.yaml").write_text(text.replace("protocol:", f"cache_dir: {folder}/cache, protocol:"))
    return train.main([str(folder / "run.yaml"), *overrides, "--run", str(folder / "run")])


def _run(folder: Path, format: str, content: Content, facts: object, overrides: list[str]) -> int:
    file = folder / NAMES.get(format, "ratings.csv")
    if callable(content):
        content(file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    status = start(folder, format, file, *overrides)
    if status == 0:
        c = load_config(folder / "run.yaml", overrides).data
        options = {"separator": c.separator, "on_bad_row": c.on_bad_row, "duplicates": c.duplicates}
        data = load_dataset(c.format, c.path, cache_dir=c.cache_dir, columns=c.columns, **options)
        actual = (data.num_users, data.num_items, data.num_events)
        assert actual == facts, f"misread: expected {facts} users, items and events, got {actual}"
    return status


def cases(place: Path) -> list[Case]:
    return from_table("raw", CASES) + _paths()


def from_table(area: str, entries: list[tuple[str, str, Content, object, str]]) -> list[Case]:
    """Return a case for each line of a table like CASES."""
    listed = []
    for number, (format, name, content, expect, overrides) in enumerate(entries):
        words = [word.replace(":", ": ") if "={" in word and '"%' not in word else word for word in overrides.split()]

        def run(folder: Path, format=format, content=content, facts=expect, words=words) -> int:
            return _run(folder, format, content, facts, words)

        quick = number % 4 == 0 or (name == "valid" and number % 2 == 0)
        listed.append(
            Case(area, f"{area} {format}: {name}", run, ERROR if expect == ERROR else WORKS, short=quick, seconds=30)
        )
    return listed


def _paths() -> list[Case]:
    def folder(place: Path) -> Path:
        (place / "given").mkdir()
        return place / "given"

    def file(place: Path, name: str = "u.data", mode: int = 0o644) -> Path:
        path = folder(place) / name
        path.write_text(table(T))
        path.chmod(mode)
        return path

    def two(place: Path) -> Path:
        (file(place, "a.txt").parent / "b.txt").write_text(table(" ", PAIRS))
        return place / "given"

    def special(place: Path, name: str) -> Path:
        path = folder(place) / name
        if name == "u.data":
            path.mkdir()
            return path.parent
        if name == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(path if name == "loop" else place / "nowhere")
        return path

    def closed(place: Path) -> Path:
        path = file(place)
        path.parent.chmod(0)
        return path

    def case(name: str, path: Callable[[Path], object], *overrides: str, format="ml-100k", **more) -> Case:
        def run(place: Path) -> int:
            return start(place, format, path(place), *[o.format(place=place) for o in overrides])

        return Case("raw", f"raw path: {name}", run, ERROR, seconds=20, **more)

    return [
        case("empty folder", folder),
        case("nothing there", lambda f: f / "nope"),
        case("u.data is a folder", lambda f: special(f, "u.data")),
        case("dangling link", lambda f: special(f, "dangling")),
        case("loop of links", lambda f: special(f, "loop")),
        case("named pipe", lambda f: special(f, "fifo")),
        case("/dev/zero", lambda f: "/dev/zero"),
        case("two files in the folder", two, format="lines"),
        case("5,000 characters", lambda f: "a" * 5000),
        case("NUL", lambda f: '"a\\0b"'),
        case("~nosuchuser", lambda f: "~nosuchuser/x"),
        case("empty", lambda f: '""'),
        case("file that cannot be read", lambda f: file(f, mode=0), nobody=True),
        case("folder that cannot be read", lambda f: closed(f).parent, nobody=True),
        case("below a folder that cannot be read", closed, nobody=True),
        case("cache_dir is a file", file, "data.cache_dir={place}/run.yaml"),
        case("cache_dir with NUL", file, 'data.cache_dir="a\\0b"'),
        case("cache_dir of 5,000 characters", file, "data.cache_dir=" + "a" * 5000),
        case("cache_dir cannot be written", file, "data.cache_dir=/proc/nope"),
    ]
