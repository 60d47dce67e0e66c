"""Define cases of files and options of features of items, users and events, a line for each case.

If a run works, the data set must have the number of values of each feature in the file.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import eval as evaluation
import train
from data.datasets import load_dataset
from tests.hostile.harness import ERROR, WORKS, Case, Process
from tests.hostile.raw import AFTER, BEFORE, TIMED, table
from training.config import load_config

CONFIG = (
    f"{BEFORE}data: {{format: csv, path: P/events.csv, protocol: leave_one_out, cache_dir: P/cache}}\nmodel:{AFTER}"
)
EVENTS = table(",", [(*row, ["phone", "tv"][row[0] % 2], row[1] / 4) for row in TIMED], "user,item,timestamp,with,for")
ITEMS = table(",", [(i, f"b{i % 3}", f"x|y{i % 4}", i * 1.5) for i in range(1, 11)], "item,brand,tags,price")
USERS = table(",", [(u, 20 + u, ["de", "fr"][u % 2]) for u in range(1, 13)], "user,age,country")
LISTS = json.dumps({str(i): ["x", f"y{i % 4}"] for i in range(1, 11)})
MOVIES = table("::", [(i, f"Film {i} ({1990 + i})", "Drama|War") for i in range(1, 11)])
WATCHERS = table("::", [(u, "FM"[u % 2], 25, u % 5, "12345") for u in range(1, 13)])
COLUMNS = {
    "items": "{brand: category, tags: list, price: number}",
    "users": "{age: number, country: category}",
    "events": "{device: {kind: category, column: with}, seconds: {kind: number, column: for}}",
}
FACTS = {"items": (10, 20, 10), "users": (12, 12), "events": (72, 72)}
ENDING = {"csv": "items.csv", "parquet": "items.parquet", "attributes": "items.json"}
Content = str | bytes | Callable[[Path], None]


@dataclass(frozen=True)
class Given:
    """One case: a file of items, users or events, its options, and the number of values of each feature in it."""

    content: Content
    expect: object = ERROR
    options: str = ""
    entity: str = "items"
    format: str = "csv"


def changed(old: str, new: str, text: str = ITEMS, **more) -> Given:
    assert old in text
    return Given(text.replace(old, new, 1), **more)


def frame(**columns: object) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        import polars as pl

        plain = {"item": range(1, 11), "brand": ["b"] * 10, "tags": [["x"]] * 10, "price": [1.0] * 10}
        pl.DataFrame(plain | columns).write_parquet(file)

    return write


def json_of(change: Callable[[dict], object]) -> Given:
    content = json.loads(LISTS)
    change(content)
    return Given(json.dumps(content), format="attributes")


ROWS = (10, 20, 9)  # without a price
CASES: dict[str, Given] = {
    "items": Given(ITEMS, FACTS["items"]),
    "users": Given(USERS, FACTS["users"], entity="users"),
    "events": Given(EVENTS, FACTS["events"], entity="events"),
    "attributes": Given(LISTS, (20,), format="attributes"),
    "movies.dat": Given(MOVIES, (20, 10), format="movies.dat"),
    "users.dat": Given(WATCHERS, (12, 12, 12), entity="users", format="users.dat"),
    "parquet": Given(frame(), (10, 10, 10), format="parquet"),
    "gzip": Given(gzip.compress(ITEMS.encode()), FACTS["items"]),
    "gzip cut short": Given(gzip.compress(ITEMS.encode())[:-9]),
    "empty": Given(""),
    "header alone": Given("item,brand,tags,price\n"),
    "no header": Given(ITEMS.split("\n", 1)[1]),
    "binary": Given(os.urandom(1000)),
    "two columns of one name": changed("price", "brand"),
    "no ids": changed("item,", "sku,"),
    "ids by another name": changed("item,", "sku,", expect=FACTS["items"], options="id: sku"),
    "an id that is missing": changed("\n3,", "\n,"),
    "two rows for an item": changed("\n3,", "\n2,"),
    "two rows for an item, dropped": changed("\n3,", "\n2,", options="DROP"),
    "an item that no event has": Given(ITEMS + "11,b,x,1\n"),
    "an item that no event has, drop": Given(ITEMS + "11,b,x,1\n", FACTS["items"], "unknown: drop"),
    "an item that no event has, add": Given(ITEMS + "11,b,x,1\n", (11, 21, 11), "unknown: add"),
    "text as an id, add": Given(ITEMS + "new,b,x,1\n", (11, 21, 11), "unknown: add"),
    "an id of 300 characters, add": Given(ITEMS + "n" * 300 + ",b,x,1\n", options="unknown: add"),
    "none that an event has": Given("item,brand,tags,price\n99,b,x,1\n", options="unknown: drop"),
    "another word for unknown": Given(ITEMS, options="unknown: keep"),
    "users that add": Given(USERS, options="unknown: add", entity="users"),
    "half the items": Given("\n".join(ITEMS.split("\n")[:6]) + "\n", (5, 10, 5)),
    "no value": changed(",1.5\n", ",\n", expect=ROWS),
    "text as a number": changed(",1.5\n", ",cheap\n"),
    "text as a number, dropped": changed(",1.5\n", ",cheap\n", expect=(9, 18, 9), options="on_bad_row: drop"),
    "infinity": changed(",1.5\n", ",inf\n"),
    "NaN": changed(",1.5\n", ",nan\n"),
    "1e400": changed(",1.5\n", ",1e400\n"),
    "1e300 and -1e300": Given(ITEMS.replace(",1.5\n", ",1e300\n").replace(",3.0\n", ",-1e300\n"), FACTS["items"]),
    "hexadecimal": changed(",1.5\n", ",0x1\n"),
    "a value of 300 characters": changed("b1", "b" * 300),
    "a value of 10 MB": changed("b1", "b" * 10_000_000),
    "a list of 5,000 values": changed("x|y1", "|".join(map(str, range(5000))), expect=(10, 5018, 10)),
    "a list of nothing but bars": changed("x|y1", "||| |", expect=(10, 18, 10)),
    "NUL": changed("b1", "b\0"),
    "latin-1": Given(ITEMS.replace("b1", "bé").encode("latin-1"), FACTS["items"]),
    "bytes of no encoding": Given(ITEMS.replace("b1", "b\x81").encode("latin-1")),
    "a field too few": changed(",1.5\n", "\n"),
    "a field too many": changed(",1.5\n", ",1.5,2\n"),
    "quote never closed": changed("b1", '"b1'),
    "CRLF": Given(ITEMS.replace("\n", "\r\n"), FACTS["items"]),
    "one value for all": Given(ITEMS.replace("b0", "b").replace("b1", "b").replace("b2", "b"), FACTS["items"]),
    "semicolons": Given(ITEMS.replace(",", ";"), FACTS["items"]),
    "separator that is none": Given(ITEMS, options="separator: ab"),
    "a folder": Given(lambda file: file.mkdir()),
    "a pipe": Given(lambda file: os.mkfifo(file)),
    "nothing there": Given(lambda file: None),
    "a link to nothing": Given(lambda file: file.symlink_to("nowhere")),
    "attributes: no JSON": Given(LISTS[:-1], format="attributes"),
    "attributes: a list": Given("[1, 2]", format="attributes"),
    "attributes: nothing": Given("{}", format="attributes"),
    "attributes: 100,000 deep": Given("[" * 100_000, format="attributes"),
    "attributes: an item twice": Given('{"1": [1], "1": [2]}', format="attributes"),
    "attributes: text": json_of(lambda lists: lists.update({"1": "xy"})),
    "attributes: a fraction": json_of(lambda lists: lists.update({"1": [1.5]})),
    "attributes: true": json_of(lambda lists: lists.update({"1": [True]})),
    "attributes: null": json_of(lambda lists: lists.update({"1": [None]})),
    "attributes: an integer of 5,000 digits": Given(LISTS.replace('"x"', "9" * 5000), format="attributes"),
    "attributes: an empty list": Given(LISTS.replace('["x", "y1"]', "[]", 1), (18,), format="attributes"),
    "attributes with columns of one's own": Given(LISTS, options="columns: {a: list}", format="attributes"),
    "movies.dat: two rows": Given(MOVIES + MOVIES[:30].split("\n")[0] + "\n", format="movies.dat"),
    "movies.dat: no year": Given(MOVIES.replace(" (1991)", ""), (20, 9), format="movies.dat"),
    "movies.dat: commas": Given(MOVIES.replace("::", ","), format="movies.dat"),
    "parquet: lists as a category": Given(frame(brand=[["b"]] * 10), format="parquet"),
    "parquet: a fraction as a category": Given(frame(brand=[0.5] * 10), format="parquet"),
    "parquet: booleans as a category": Given(frame(brand=[True] * 10), (10, 10, 10), format="parquet"),
    "parquet: text as a number": Given(frame(price=["1"] * 10), format="parquet"),
    "parquet: nulls throughout": Given(frame(price=[None] * 10), format="parquet"),
    "parquet: infinity": Given(frame(price=[float("inf")] * 10), format="parquet"),
    "parquet: numbers in lists": Given(frame(tags=[[1, None, 1]] * 10), (10, 10, 10), format="parquet"),
    "parquet: fractions in lists": Given(frame(tags=[[0.5]] * 10), format="parquet"),
    "parquet: lists of lists": Given(frame(tags=[[["x"]]] * 10), format="parquet"),
    "parquet: csv": Given(ITEMS, format="parquet"),
    "csv: parquet": Given(frame()),
    "users: two rows": Given(USERS + "3,1,de\n", entity="users"),
    "users: another one": Given(USERS + "99,1,de\n", entity="users"),
    "events: no such column": Given(EVENTS.replace(",with,", ",without,"), entity="events"),
    "events: text as a number": Given(EVENTS.replace(",1.75\n", ",long\n"), entity="events"),
    "events: no value": Given(EVENTS.replace(",tv,", ",,"), (36, 72), entity="events"),
}
# Options of `data.features` that must be refused.
REFUSED = """
=3; =[]; ={}; ={itms: {}}; items=null; items={}; items.path=; items.path=null; items.path="a\\0b"; items.format=xml
items.format=u.user; items.columns={}; items.columns=[brand]; items.columns={brand: text}; items.columns={a.b: list}
items.columns={brand: {kind: list, separator: ""}}; items.columns={price: {kind: number, quantiles: 1}}
items.columns={price: {kind: number, quantiles: HUGE}}; items.columns={brand: {kind: category, min_count: 0}}
items.columns={brand: {kind: category, known: before}}; items.columns={brand: {kind: category, column: nope}}
items.columns={item: {kind: category, colum: brand}}; items.id=nope; items.columns={item: null}
items.columns={same: {kind: category, column: item}}
events={}; events={calendar: []}; events={calendar: [month]}; events={calendar: [hour, hour]}; events={calendar: hour}
events={columns: {a: category}}; events={columns: {user: {kind: category, known: during}}}
"""
WORKING = """
items.columns={brand: {kind: category, min_count: 1000}}; items.columns={price: {kind: number, quantiles: 10000}}
events={calendar: [weekday, hour]}
"""


def start(folder: Path, *overrides: str) -> int:
    return train.main([str(folder / "run.yaml"), *overrides, "--run", str(folder / "run")])


def prepare(folder: Path, side: Given) -> list[str]:
    """Write the files and the configuration of a case; return the overrides."""
    (folder / "run.yaml").write_text(CONFIG.replace("P/", f"{folder}/"))
    (folder / "events.csv").write_text(EVENTS)
    needs_columns = side.format in ("csv", "parquet") and "columns:" not in side.options
    columns = f"columns: {COLUMNS[side.entity]}" if needs_columns else ""
    drop, options = (["data.on_bad_row=drop"], "") if side.options == "DROP" else ([], side.options)
    file = folder / ("events.csv" if side.entity == "events" else ENDING.get(side.format, side.format))
    where = f"format: {side.format}, path: {file}" if side.entity != "events" else ""
    described = ", ".join(filter(None, (where, columns, options)))
    if callable(side.content):
        side.content(file)
    else:
        file.write_bytes(side.content.encode() if isinstance(side.content, str) else side.content)
    return [*drop, f"data.features={{{side.entity}: {{{described}}}}}"]


def run(folder: Path, side: Given, *more: str) -> int:
    overrides = [*prepare(folder, side), *more]
    status = start(folder, *overrides)
    if status == 0 and side.expect != WORKS:
        c = load_config(folder / "run.yaml", overrides).data
        data = load_dataset(c.format, c.path, cache_dir=c.cache_dir, features=c.features, on_bad_row=c.on_bad_row)
        actual = tuple(len(feature.codes) for feature in data.features)
        assert actual == side.expect, f"misread: expected {side.expect} values of the features, got {actual}"
    return status


def options(text: str, expect: str) -> list[Case]:
    listed = []
    for number, option in enumerate(filter(None, (part.strip() for part in text.replace("\n", "; ").split("; ")))):
        key, _, value = option.partition("=")
        override = f"data.features{'.' * bool(key)}{key}={value.replace('HUGE', '9' * 30)}"

        def go(folder: Path, override=override) -> int:
            return run(folder, Given(ITEMS, WORKS), override)

        listed.append(Case("side", f"side option: {option}", go, expect, short=number % 8 == 0, seconds=30))
    return listed


def damaged(place: Path) -> list[Case]:
    """Return cases of a finished run whose folder has other features than its weights and data."""
    finished = place / "made"
    finished.mkdir()
    overrides = prepare(finished, Given(ITEMS))
    ended = Process(lambda: start(finished, *overrides), seconds=60).wait()
    assert ended.status == 0, ended.output

    def state(change: Callable[[dict], object]) -> Callable[[Path], None]:
        def go(run: Path) -> None:
            file = run / "vocabulary/state.json"
            facts = json.loads(file.read_text())
            change(facts)
            file.write_text(json.dumps(facts))

        return go

    changes: dict[str, Callable[[Path], object]] = {
        "a kind that is none": state(lambda facts: facts["features"][0].__setitem__(2, "text")),
        "a calendar that is none": state(lambda facts: facts.update(calendar=["month"])),
        "no features": state(lambda facts: facts.pop("features")),
        "features null": state(lambda facts: facts.update(features=None)),
        "features of text": state(lambda facts: facts.update(features="brand")),
        "a feature too few": state(lambda facts: facts["features"].pop()),
        "a feature too many": state(lambda facts: facts["features"].append(["items", "x", "list", "after"])),
        "features of users": state(lambda facts: facts["features"][0].__setitem__(0, "users")),
        "a calendar more": state(lambda facts: facts.update(calendar=["hour"])),
        "no trained items": lambda run: (run / "vocabulary/trained.npy").unlink(),
        "rows of another feature": lambda run: os.replace(
            run / "vocabulary/items-0-rows.npy", run / "vocabulary/items-1-rows.npy"
        ),
    }

    def judge(change: Callable[[Path], object]) -> Callable[[Path], int]:
        def go(folder: Path) -> int:
            shutil.copytree(finished / "run", folder / "run")
            change(folder / "run")
            return evaluation.main([str(folder / "run")])

        return go

    listed = [
        Case("side", f"side vocabulary: {name}", judge(change), ERROR, short=number < 3, seconds=30)
        for number, (name, change) in enumerate(changes.items())
    ]
    return [*listed, Case("side", "side vocabulary: as it was", judge(lambda run: None), WORKS, seconds=30)]


def cases(place: Path) -> list[Case]:
    listed = [
        Case(
            "side",
            f"side file: {name}",
            lambda folder, side=side: run(folder, side),
            ERROR if side.expect == ERROR else WORKS,
            short=number % 8 == 0,
            seconds=30,
        )
        for number, (name, side) in enumerate(CASES.items())
    ]
    return listed + options(REFUSED, ERROR) + options(WORKING, WORKS) + damaged(place)
