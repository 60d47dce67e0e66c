"""Define cases of users' csv, parquet and sequences files, valid and invalid; tables as in `raw`."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from data.datasets import load_dataset
from tests.hostile.harness import ERROR, WORKS, Case
from tests.hostile.raw import (
    CSV,
    FACTS,
    MICRO,
    PAIRS,
    ROWS,
    TIMED,
    TIMES,
    USERS,
    Content,
    T,
    from_table,
    micro,
    parquet,
    start,
    table,
)

HEADER = "user;item;timestamp"
DROP = "data.on_bad_row=drop"
ISO = [(u, i, datetime.fromtimestamp(t, UTC).isoformat()) for u, i, t in TIMED]
GERMAN = [(u, i, datetime.fromtimestamp(t, UTC).strftime("%d.%m.%Y-%H:%M:%S")) for u, i, t in TIMED]
TEXTS = [(*row, ("view", "buy")[row[0] % 2]) for row in TIMED]
ACTION = "data.columns={action:a}"
GOOD = table(",", TIMED, CSV)
ACTED = table(",", TEXTS, CSV + ",a")
HISTORIES = [(u, *[i for v, i, *_ in ROWS if v == u]) for u in range(1, 13)]
SECONDS = "data.columns={timestamp_unit:s}"
BAD = "1,1\n,1,5\n1,1,x\n\n1,1,5,6\n"


def timed(change: Callable[[int], object]) -> str:
    return table(",", [(u, i, change(t)) for u, i, t in TIMED], CSV)


def format_of(text: str) -> str:
    """Return the override of timestamp_format, without blanks, which would end it."""
    return f'data.columns={{"timestamp_format":"{text}"}}'


CASES: list[tuple[str, str, Content, object, str]] = [
    ("csv", "tabs", table(T, TIMED, HEADER.replace(";", T)), FACTS, ""),
    ("csv", "bars", table("|", TIMED, HEADER.replace(";", "|")), FACTS, ""),
    ("csv", "semicolons, commas in ids", table(";", [(f"a,{u}", i, t) for u, i, t in TIMED], HEADER), FACTS, ""),
    ("csv", "semicolons, separator given", table(";", TIMED, HEADER), FACTS, "data.separator=;"),
    ("csv", "commas, another separator given", GOOD, ERROR, "data.separator=;"),
    ("csv", "tabs in the header alone", table(",", TIMED, HEADER.replace(";", T)), ERROR, ""),
    ("csv", "separator of two characters", GOOD, ERROR, "data.separator=;;"),
    ("csv", "separator that numbers hold", GOOD, ERROR, "data.separator=1"),
    ("csv", "separator that is none", GOOD, ERROR, 'data.separator=""'),
    ("ml-100k", "separator of a fixed format", table(T), ERROR, "data.separator=;"),
    ("csv", "ISO 8601", table(",", ISO, CSV), FACTS, ""),
    ("csv", "ISO 8601 and an integer", table(",", ISO, CSV) + "13,1,5\n", ERROR, ""),
    ("csv", "an integer and ISO 8601", GOOD + "13,1,2020-01-01\n", ERROR, ""),
    ("csv", "the 30th of February", table(",", ISO, CSV) + "13,1,2020-02-30\n", ERROR, ""),
    ("csv", "a zone by its name", table(",", ISO, CSV) + "13,1,2020-02-03T04:05:06 IST\n", ERROR, ""),
    ("csv", "the year 9999", table(",", ISO, CSV) + "13,1,9999-01-01\n", ERROR, ""),
    ("csv", "milliseconds throughout", timed(lambda t: t * 1000), FACTS, ""),
    ("csv", "nanoseconds throughout", timed(lambda t: t * 10**9), FACTS, ""),
    ("csv", "seconds with a fraction", timed(lambda t: f"{t}.25"), FACTS, ""),
    ("csv", "seconds among milliseconds", timed(lambda t: t * 1000) + f"13,1,{TIMES[0]}\n", ERROR, ""),
    ("csv", "half seconds, half milliseconds", timed(lambda t: t * 1000 ** (t % 2)), ERROR, ""),
    ("csv", "seconds given as ms", GOOD, ERROR, "data.columns={timestamp_unit:ms}"),
    ("csv", "seconds given as ns", GOOD, ERROR, "data.columns={timestamp_unit:ns}"),
    ("csv", "dates as integers", timed(lambda t: 20200101 + t % 9), ERROR, ""),
    ("csv", "scientific", timed(lambda t: f"{t:.9e}"), ERROR, ""),
    ("csv", "infinite times", timed(lambda t: "inf"), ERROR, ""),
    ("csv", "own form", table(",", GERMAN, CSV), FACTS, format_of("%d.%m.%Y-%H:%M:%S")),
    ("csv", "own form without a year", table(",", GERMAN, CSV), ERROR, format_of("%d.%m-%H:%M:%S")),
    ("csv", "own form that is none", table(",", GERMAN, CSV), ERROR, format_of("%Q%Y")),
    ("csv", "own form with the name of a zone", table(",", GERMAN, CSV), ERROR, format_of("%Y-%Z")),
    ("csv", "form and unit", GOOD, ERROR, 'data.columns={"timestamp_format":"%Y","timestamp_unit":s}'),
    ("csv", "text as actions", ACTED, FACTS, ACTION),
    ("csv", "text and a number as actions", ACTED + "1,1,5,3\n", ERROR, ACTION),
    ("csv", "text and nothing as actions", ACTED + "1,1,5,\n", ERROR, ACTION),
    ("csv", "an action without a code", ACTED, ERROR, "data.columns={action:a,action_codes:{buy:1}}"),
    ("csv", "a code below 0", ACTED, ERROR, "data.columns={action:a,action_codes:{buy:-1,view:0}}"),
    ("csv", "codes without a column", ACTED, ERROR, "data.columns={action_codes:{buy:1}}"),
    ("csv", "bad rows", GOOD + BAD, ERROR, ""),
    ("csv", "bad rows dropped", GOOD + BAD, FACTS, DROP),
    ("csv", "nothing but bad rows, dropped", CSV + "\n" + BAD, ERROR, DROP),
    ("csv", "quote out of place, dropped", GOOD + '1,a"b,5\n' + BAD, ERROR, DROP),
    ("csv", "a column missing, dropped", table(",", PAIRS, "user,item"), ERROR, DROP),
    ("csv", "bytes of no encoding, dropped", GOOD.encode() + b"\x81,1,5\n", FACTS, DROP),
    ("csv", "row of 10 MB, dropped", GOOD + "a" * 10_000_000 + ",1,5\n", ERROR, DROP),
    ("csv", "another word for dropped", GOOD, ERROR, "data.on_bad_row=skip"),
    ("ml-1m", "bad rows dropped", table("::") + "1:2:3:4\n1::2::3\n\n", FACTS, DROP),
    ("csv", "all rows twice", GOOD + table(",", TIMED), FACTS, "data.duplicates=drop"),
    ("csv", "another word for duplicates", GOOD, ERROR, "data.duplicates=first"),
    ("lines", "duplicates without times", table(" ", PAIRS), ERROR, "data.duplicates=drop"),
    ("csv", "gzip", gzip.compress(GOOD.encode()), FACTS, ""),
    ("ml-100k", "gzip, valid", gzip.compress(table(T).encode()), FACTS, ""),
    ("csv", "gzip cut short", gzip.compress(GOOD.encode())[:-9], ERROR, ""),
    ("csv", "gzip of nothing", gzip.compress(b""), ERROR, ""),
    ("csv", "gzip of gzip", gzip.compress(gzip.compress(GOOD.encode())), ERROR, ""),
    ("csv", "zstd that is none", b"\x28\xb5\x2f\xfd" + b"\0" * 50, ERROR, ""),
    ("sequences", "valid", table(" ", HISTORIES), FACTS, ""),
    ("sequences", "pairs", table(T, PAIRS), FACTS, ""),
    ("sequences", "a user alone", table(" ", PAIRS) + "5\n", ERROR, ""),
    ("sequences", "two blanks", table(" ", PAIRS) + "5  6\n", ERROR, ""),
    ("sequences", "empty line", table(" ", PAIRS) + "\n1 2\n", ERROR, ""),
    ("sequences", "temporal", table(" ", PAIRS), ERROR, "data.protocol=temporal"),
    ("sequences", "line of 70 MB", table(" ", PAIRS) + "1 2" * 25_000_000, ERROR, ""),
    ("parquet", "ISO 8601", parquet(timestamp=[text for *_, text in ISO]), FACTS, ""),
    ("parquet", "text as time, unit given", parquet(timestamp=[str(t) for t in TIMES]), FACTS, SECONDS),
    ("parquet", "seconds with a fraction", parquet(timestamp=[t + 0.5 for t in TIMES]), FACTS, ""),
    ("parquet", "Float32 as time", parquet(timestamp=(TIMES, lambda pl: pl.Float32)), ERROR, ""),
    ("parquet", "durations as time", parquet(timestamp=(MICRO, lambda pl: pl.Duration("us"))), ERROR, ""),
    ("parquet", "half seconds, half milliseconds", parquet(timestamp=[t * 1000 ** (t % 2) for t in TIMES]), ERROR, ""),
    ("parquet", "text as actions", parquet(a=[("view", "buy")[u % 2] for u in USERS]), FACTS, ACTION),
    ("parquet", "no user, dropped", parquet(user=[None, *USERS[1:]]), (12, 10, 71), DROP),
    ("parquet", "datetimes, unit ns", parquet(timestamp=(MICRO, micro)), FACTS, "data.columns={timestamp_unit:ns}"),
]  # fmt: skip


def zone(name: str) -> Callable[[Path], None]:
    """Return a function that writes datetimes with a zone of six characters that polars cannot write."""

    def write(file: Path) -> None:
        parquet(timestamp=(MICRO, lambda pl: pl.Datetime("us", "Turkey")))(file)
        content = file.read_bytes()
        schema = re.search(rb"ARROW:schema.{1,6}?([A-Za-z0-9+/=]{100,})", content, re.DOTALL)[1]
        other = base64.b64decode(schema).replace(b"Turkey", name.encode())
        file.write_bytes(content.replace(schema, base64.b64encode(other)))

    return write


CASES += [
    ("parquet", "zone +05:30", zone("+05:30"), FACTS, ""),
    ("parquet", "zone that nobody knows", zone("Xurkey"), FACTS, ""),
]


def cases(place: Path) -> list[Case]:
    return from_table("own", CASES) + _paths()


def _paths() -> list[Case]:
    """Return cases of names that look like patterns, parts, and files that never end."""

    def read(folder: Path, name: str, facts: tuple, *others: str, format: str = "csv") -> int:
        given_folder = folder / "given"
        for other in others:
            (given_folder / other).parent.mkdir(parents=True, exist_ok=True)
            (given_folder / other).write_text(table(",", [(99, item, item) for item in range(5)], CSV))
        if name in others or not set(name) & set("*?[") or name.startswith("data"):
            (given_folder / name).parent.mkdir(parents=True, exist_ok=True)
            if not (given_folder / name).exists():
                (given_folder / name).write_text(GOOD)
        status = start(folder, format, f'"{given_folder / name}"')
        if status == 0:
            data = load_dataset(format, given_folder / name, cache_dir=folder / "cache")
            actual = (data.num_users, data.num_items, data.num_events)
            assert actual == facts, f"misread: expected {facts} users, items and events, got {actual}"
        return status

    def sparse(folder: Path, name: str, content: bytes) -> int:
        with open(folder / name, "wb") as file:
            file.write(content)
            file.truncate(1 << 40)
            file.seek(0, 2)
            file.write(content[-4:])
        return start(folder, name.partition(".")[2] if name != "u.data" else "ml-100k", folder / name)

    def works(name: str, run: Callable[[Path], int]) -> Case:
        return Case("own", f"own path: {name}", run, WORKS, seconds=30)

    def error(name: str, run: Callable[[Path], int]) -> Case:
        return Case("own", f"own path: {name}", run, ERROR, seconds=30)

    other = (1, 5, 5)
    return [
        works("data[1].csv beside data1.csv", lambda f: read(f, "data[1].csv", FACTS, "data1.csv")),
        works("data* beside dataX", lambda f: read(f, "data*", FACTS, "dataX", "data")),
        works("data?.csv beside data1.csv", lambda f: read(f, "data?.csv", FACTS, "data1.csv")),
        works("pattern", lambda f: read(f, "x[1].csv", other, "x1.csv", "y1.csv")),
        works("nested parts", lambda f: read(f, "log", (1, 5, 10), "log/a/x.csv", "log/b/x.csv", "log/_y.csv")),
        error("pattern that matches nothing", lambda f: read(f, "x[2-9].csv", other, "x1.csv")),
        error("pattern for a fixed format", lambda f: read(f, "x[1].csv", other, "x1.csv", format="ml-20m")),
        error("sparse csv of 1 TB", lambda f: sparse(f, "x.csv", GOOD.encode())),
        error("sparse parquet of 1 TB", lambda f: sparse(f, "x.parquet", b"PAR1")),
        error("sparse u.data of 1 TB", lambda f: sparse(f, "u.data", table(T).encode())),
    ]
