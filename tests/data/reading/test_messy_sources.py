"""Test random messy sources against a reading in plain Python: the same events, or an error with a true cause.

A source has an encoding, a separator, a decimal sign, line ends, a format of times, bad rows, parts in folders,
compression and a condition. The plain reading has these options and uses only Python's csv, codecs and datetime.
"""

import bz2
import csv
import gzip
import io
import lzma
import random
from datetime import UTC, datetime, timedelta, timezone

import pytest

from data.datasets import DataError, load_dataset
from tests.data.raw_files import events

pl = pytest.importorskip("polars")

ITEMS = ["Käse", "Crème brûlée", "Wein, rot", 'das "Beste"', "007", "Brot; dunkel", "Öl|Essig", "Tee"]
USERS = ["Müller", "O'Neil", "García", "u 7", "42", "Åse"]
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1252", "cp1252"]
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
MARK = {"utf-16-le": b"\xff\xfe"}
ZONES = [timezone(timedelta(hours=h, minutes=m)) for h, m in ((0, 0), (2, 0), (-5, 0), (5, 30))]


def time_of(moment, form, rng, decimal):
    """Return the text of a time in a format."""
    if form in ("s", "ms"):
        return str(int(moment.timestamp() * {"s": 1, "ms": 1000}[form]))
    if form == "fraction":
        fraction = rng.choice(["", f"{decimal}5", f"{decimal}25"])
        return f"{int(moment.timestamp())}{fraction}"
    if form == "iso":
        return moment.astimezone(rng.choice(ZONES)).isoformat(sep=rng.choice(" T"))
    return moment.strftime(form)


def second_of(text, form, decimal):
    """Return the time of a text by the plain reading; None if it is not a time."""
    try:
        if form == "s":
            return float(int(text))
        if form == "ms":
            return int(text) / 1000
        if form == "fraction":
            return float(text.replace(decimal, "."))
        moment = datetime.fromisoformat(text) if form == "iso" else datetime.strptime(text, form)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def messy(seed, folder):
    """Write a source; return (options of load_dataset, the events of a plain reading, the bad rows, all rows)."""
    rng = random.Random(seed)
    encoding, separator = rng.choice(ENCODINGS), rng.choice(",;\t|")
    decimal = rng.choice(".,")
    form = rng.choice(["s", "ms", "fraction", "iso", "%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M:%S %p"])
    end, where = rng.choice(["\n", "\r\n"]), rng.random() < 0.4
    bad_share = rng.choice([0, 0, 0.005, 0.2])
    parts = rng.choice([1, 1, 2, 3])
    names = ["user", "note", "item", "when", "quantity"]
    rng.shuffle(names)
    begin, expected, bad, rows = datetime(2024, 1, 1, tzinfo=UTC), [], 0, 0
    for part in range(parts):
        place = folder / rng.choice(["", f"day={part}", "deep/er"])
        place.mkdir(parents=True, exist_ok=True)
        packed = rng.choice(list(PACK))
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator=end, quoting=rng.choice([0, 1]))
        writer.writerow(names)
        for _ in range(rng.randrange(30, 120)):
            moment = begin + timedelta(minutes=rng.randrange(500_000))
            row = {"user": rng.choice(USERS), "item": rng.choice(ITEMS), "note": rng.choice(["", "x", "süß", "a b"])}
            row["when"] = time_of(moment, form, rng, decimal)
            row["quantity"] = rng.choice(["1", "2", f"0{decimal}5", "-1", ""])
            if rng.random() < bad_share:
                row[rng.choice(["user", "item", "when"])] = ""
            writer.writerow([row[name] for name in names])
        content = text.getvalue().encode(encoding)
        content = MARK.get(encoding, b"") + content
        (place / f"part-{part}.csv{packed}").write_bytes(PACK[packed](content))
        hidden = place / rng.choice([".ipynb_checkpoints", "_temporary"])
        hidden.mkdir(exist_ok=True)
        (hidden / "part.csv").write_bytes(content)
    # The plain reading, in the order of the parts' paths.
    for path in sorted(path for path in folder.rglob("part-*.csv*") if path.is_file()):
        raw = path.read_bytes()
        opened = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}
        raw = opened[path.suffix](raw) if path.suffix in opened else raw
        text = raw.decode("utf-16" if encoding == "utf-16-le" else encoding)
        for row in csv.DictReader(io.StringIO(text, newline=""), delimiter=separator):
            rows += 1
            quantity = float(row["quantity"].replace(decimal, ".")) if row["quantity"] else None
            if where and (quantity is None or quantity <= 0):
                continue
            second = second_of(row["when"], form, decimal)
            if not row["user"] or not row["item"] or second is None:
                bad += 1
                continue
            expected.append((row["user"], row["item"], second))
    options = {"columns": {"timestamp": "when"}, "decimal": decimal}
    if form.startswith("%"):
        options["columns"]["timestamp_format"] = form
    if where:
        options["where"] = "quantity > 0"
    if bad and rng.random() < 0.7:
        options["on_bad_row"] = "drop"
    if rng.random() < 0.3:
        options["partitions"] = 2
    if rng.random() < 0.3:
        options["encoding"] = "utf-16" if encoding == "utf-16-le" else encoding
    return options, expected, bad, rows


def check(seed, tmp_path):
    folder = tmp_path / f"source-{seed}"
    options, expected, bad, rows = messy(seed, folder)
    allowed = options.get("on_bad_row") == "drop" and (bad <= 10 or bad <= 0.01 * rows)
    try:
        dataset = load_dataset("csv", folder, cache_dir=tmp_path / f"cache-{seed}", **options)
    except DataError as error:
        message = str(error)
        assert bad and not allowed, (seed, options, message)
        assert "the value is missing" in message or "expected a" in message, (seed, message)
        return
    assert not bad or allowed, (seed, options, bad)
    by_user = sorted(enumerate(expected), key=lambda event: (event[1][0], event[1][2], event[0]))
    assert [(user, item, second) for user, item, second, _ in events(dataset)] == [
        (user, item, int(second)) for _, (user, item, second) in by_user
    ], (seed, options)


@pytest.mark.parametrize("seed", range(12))
def test_messy_sources(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_messy_sources(seed, tmp_path):
    check(1000 + seed, tmp_path)


@pytest.mark.parametrize("partitions", [1, 2])
def test_texts_that_differ_by_blanks(load, partitions):
    """Ids and actions stay as they are written, but a note counts those that equal others up to blanks."""
    rows = ["u,a 1,5,buy", "u,a 1 ,6,buy ", "u, a 1,7,view", "u\u00a0,b ,8,view", "7,b,9,view", "8,c ,9,view"]
    text = "user,item,timestamp,how\n" + "\n".join(rows) + "\n"
    options = {"columns": {"action": "how"}, "partitions": partitions, "duplicates": "drop"}
    dataset = load("csv", text, **options)
    assert dataset.item_ids.tolist() == [" a 1", "a 1", "a 1 ", "b", "b ", "c "]
    assert dataset.notes[-4:] == (
        "1 actions equal others up to blanks at their ends, for example 'buy ': they are different actions",
        "codes of the actions: view 0, buy 1, buy  2",
        r"1 user ids equal others up to blanks at their ends, for example 'u\xa0': they are different users",
        "3 item ids equal others up to blanks at their ends, for example ' a 1': they are different items",
    )
    without = text.replace(" ", "").replace("\u00a0", "")
    assert not any("blanks" in note for note in load("csv", without, **options).notes)
