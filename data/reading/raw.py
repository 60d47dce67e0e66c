"""Read raw files as a `Dataset`: parse and check rows, number the ids, sort the events.

Requires polars, imported inside the functions that use it, so that a prepared cache can be read without polars.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.features.files import features_of
from data.filtering import offsets_of
from data.progress import Progress
from data.reading.bad_rows import LIMIT, BadRows
from data.reading.conditions import note_of_condition
from data.reading.folders import unpacked_name
from data.reading.formats import RawFormat
from data.reading.lists import mostly_lists
from data.reading.memory import require_memory
from data.reading.order import by_user_and_time
from data.reading.parquet import read_parquet
from data.reading.sequences import read_sequences
from data.reading.sources import RawFile, unpacked
from data.reading.text import read_text, text_readings
from data.reading.times import NAMES, to_seconds
from data.reading.values import Readings
from data.types import ACTION_CODES, DataError, Dataset, shown

READERS = {"text": read_text, "sequences": read_sequences, "parquet": read_parquet}
MOST_TEXT_ACTIONS = 10_000  # distinct texts; with more of them the wrong column was read
NOTED_ACTIONS = 10
DENSE = 8  # if integer ids span at most this many times their number, a table is faster than a binary search


@dataclass(frozen=True)
class Handling:
    """The handling of rows.

    on_bad_row: `error` or `drop`; duplicates: `keep` or `drop` events that equal an earlier one in every column;
    bad_rows_limit: the greatest share of bad rows that may be dropped.
    """

    on_bad_row: str = "error"
    duplicates: str = "keep"
    bad_rows_limit: float = LIMIT

    def bad_rows(self) -> BadRows:
        """Return an empty collection of bad rows."""
        return BadRows(self.on_bad_row == "drop", self.bad_rows_limit)


PLAIN = Handling()


def read_raw(
    name: str,
    fmt: RawFormat,
    sources: list[RawFile],
    fingerprint: str,
    handling: Handling = PLAIN,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Read raw files as a data set; DataError with the line, column and value for bad data.

    scratch: the folder for unpacked files. progress: gets the stages.
    """
    try:
        import polars as pl
    except ImportError as error:
        raise DataError(
            "preparing raw files needs polars (pip install polars); a prepared cache folder as data.path does not"
        ) from error
    progress = progress or Progress()
    first = sources[0]
    with unpacked(sources, scratch, fmt) as files:
        frame, readings, bad, notes = _read_all(fmt, files, handling, progress)
    if frame.height == 0:
        raise no_events(first, bad.count, bad.left_out)
    if bad.left_out:
        notes.append(note_of_condition(bad.left_out, bad.rows, fmt))
    if bad.count:
        notes.append(bad.note())
    if handling.duplicates == "drop":
        refuse_duplicates(fmt)
        height = frame.height
        frame = frame.unique(keep="first", maintain_order=True)
        notes.append(duplicates_note(height - frame.height))

    progress.stage(f"numbering the ids of {frame.height:,} events")
    action_names = None
    if "action" in frame.columns and frame["action"].dtype == pl.String:
        texts = texts_of_actions(frame["action"].value_counts(name="count"), first)
        frame, action_names = frame.with_columns(codes_of_actions(texts)), tuple(texts.to_list())
        notes += notes_of_blanks(texts, "action")
    elif fmt.action_codes is not None:
        action_names = names_of(fmt.action_codes)
    if action_names:
        notes.append(note_of_actions(action_names))
    known_users, known_items = Ids(frame["user"], first, "user"), Ids(frame["item"], first, "item")
    users, items = known_users.codes(frame["user"]), known_items.codes(frame["item"])
    user_ids, item_ids = known_users.values, known_items.values
    notes += known_users.notes + known_items.notes
    columns = {"user": users, "item": items}
    columns |= {role: frame[role] for role in ("timestamp", "action", *fmt.features) if role in frame.columns}
    frame = pl.DataFrame(columns)
    del users, items, columns
    progress.stage(f"sorting {frame.height:,} events")
    frame = by_user_and_time(frame, fmt.has_timestamps)
    if fmt.has_timestamps:
        # Rounded after sorting, so that events are in the order of fractions of seconds.
        timestamps = to_seconds(frame["timestamp"], readings.time.unit)
    else:
        timestamps = np.zeros(frame.height, np.int64)
    return Dataset(
        name=name_of(name, fmt, first),
        items=frame["item"].to_numpy(),
        timestamps=timestamps,
        actions=frame["action"].to_numpy() if "action" in frame.columns else None,
        user_offsets=offsets_of(np.bincount(frame["user"].to_numpy(), minlength=len(user_ids))),
        user_ids=user_ids,
        item_ids=item_ids,
        has_timestamps=fmt.has_timestamps,
        fingerprint=fingerprint,
        action_names=action_names,
        notes=tuple(notes),
        features=tuple(
            features_of("events", name, kind, frame[role], first.name) for role, (kind, name) in fmt.features.items()
        ),
    )


def no_events(first: RawFile, bad: int, left_out: int = 0) -> DataError:
    """Return the error for a source without good rows; bad, left_out: the numbers of bad and left out rows."""
    others = [f"{bad:,} bad rows"] * bool(bad) + [f"{left_out:,} rows that data.where leaves out"] * bool(left_out)
    return DataError(f"{first.name}: the file has no events{', only ' if others else ''}{' and '.join(others)}")


def refuse_duplicates(fmt: RawFormat) -> None:
    """Raise DataError if data.duplicates=drop is not possible for this format."""
    if not fmt.has_timestamps:
        raise DataError("data.duplicates=drop needs timestamps: without them, a repeated event need not be a duplicate")


def duplicates_note(count: int) -> str:
    """Return a sentence about the duplicates that were dropped."""
    return f"{count:,} events equal to an earlier one were left out (data.duplicates: drop)"


def _read_all(fmt: RawFormat, files: list[RawFile], handling: Handling, progress: Progress):
    """Return (the good rows of all files as a frame, their readings, the bad rows, notes)."""
    import polars as pl

    size = sum(file.path.stat().st_size for file in files)
    if fmt.kind != "parquet":  # read_parquet checks the memory
        require_memory(2 * size, f"{files[0].name}: {size / 2**30:.1f} GiB of rows")
    bad, frames, notes = handling.bad_rows(), [], []
    readings: Any = None
    rows = 0
    if fmt.kind == "text" and len(files) > 1:
        readings = text_readings(files, fmt)
    for number, file in enumerate(files):
        part = f" (file {number + 1} of {len(files)}, {rows:,} rows so far)" if len(files) > 1 else ""
        progress.stage(f"reading {file.name}{part}")
        before = readings
        try:
            frame, readings, file_notes = READERS[fmt.kind](file, fmt, bad, readings)
            file_notes += file.notes(fmt)
        except pl.exceptions.PanicException as error:  # a panic of polars, e.g. on a damaged file, is not an Exception
            raise DataError(f"{file.name}: cannot be read: {shown(str(error).strip(), 200)}") from None
        check_unit(file, files[0], before, readings)
        rows += frame.height
        frames.append(frame)
        notes += [note for note in file_notes if note not in notes]
    bad.check_limit(files[0].name)
    if fmt.named_columns and fmt.has_timestamps:
        notes.append(time_note(fmt, readings))
    return pl.concat(alike(frames, files)), readings, bad, notes


def check_unit(file: RawFile, first: RawFile, before: Readings | None, readings: Readings) -> None:
    """Raise DataError if the unit of a file's times differs from that of earlier files."""
    if before is not None and before.time.unit != readings.time.unit:
        raise DataError(
            f"{file.name}: expected times in {NAMES[before.time.unit]}, as in {first.name}, got "
            f"{NAMES[readings.time.unit]}"
        )


def alike(frames: list, files: list[RawFile]) -> list:
    """Convert ids to text in all frames if they are text in one, and times to one type.

    DataError if other columns have different types.
    """
    import polars as pl

    for role in frames[0].columns:
        kinds = {frame[role].dtype for frame in frames}
        if len(kinds) == 1:
            continue
        if role in ("user", "item"):
            kind: Any = pl.String
        elif role == "timestamp":
            kind = pl.Decimal(38, 9)
        else:
            other = next(n for n, frame in enumerate(frames) if frame[role].dtype != frames[0][role].dtype)
            raise DataError(
                f"{files[other].name}: the {role} column has type {frames[other][role].dtype}, but "
                f"{frames[0][role].dtype} in {files[0].name}"
            )
        frames = [frame.with_columns(pl.col(role).cast(kind)) for frame in frames]
    return frames


def time_note(fmt: RawFormat, readings: Readings) -> str:
    """Return a sentence about how the times were read."""
    reading, column = readings.time, fmt.columns["timestamp"]
    if reading.kind in ("integer", "decimal"):
        source = "" if fmt.timestamp_unit else ", detected from the values"
        return f"times ({shown(column)}) are numbers of {NAMES[reading.unit]}{source}"
    text = {"iso": "ISO 8601 text", "format": "text", "datetime": "datetimes"}[reading.kind]
    return f"times ({shown(column)}) are {text}; times without a zone are UTC"


def texts_of_actions(counts, first: RawFile):
    """Return the actions that are text in the order of their codes, most frequent first, as a polars Series.

    counts: a polars frame with the columns `action` and `count`. DataError for too many distinct texts.
    """
    counts = counts.sort(["count", "action"], descending=[True, False])
    if counts.height > MOST_TEXT_ACTIONS:
        raise DataError(
            f"{first.name}: expected at most {MOST_TEXT_ACTIONS:,} distinct actions, got {counts.height:,}: is this "
            "the column of actions?"
        )
    return counts["action"]


def codes_of_actions(texts):
    """Return the polars expression that maps text actions to their codes."""
    import polars as pl

    return pl.col("action").replace_strict(texts, pl.Series(np.arange(len(texts), dtype=np.int32)))


def note_of_actions(names: tuple[str, ...]) -> str:
    """Return a sentence with the code of each text action."""
    codes = [f"{shown(text)} {code}" for code, text in enumerate(names[:NOTED_ACTIONS]) if text]
    return f"{ACTION_CODES}{', '.join(codes)}{', ...' if len(names) > len(codes) else ''}"


def notes_of_blanks(distinct, role: str) -> list[str]:
    """Return a sentence about ids or text actions that differ only by blanks at their ends, if there are any.

    distinct: the texts, a polars Series; role: user, item or action.
    """
    bare = distinct.str.strip_chars()
    if not (with_blanks := bare != distinct).any():
        return []
    alike = distinct.filter(with_blanks & bare.is_duplicated())
    if not len(alike):
        return []
    texts, example = "actions" if role == "action" else f"{role} ids", shown(repr(alike[0]))
    return [
        f"{len(alike):,} {texts} equal others up to blanks at their ends, for example {example}: they are different "
        f"{role}s"
    ]


def names_of(codes: dict[str, int]) -> tuple[str, ...] | None:
    """Return the text of each code, "" for a code without a text, the first one of several texts with the same code.

    None if the codes are too large for a list of texts.
    """
    if max(codes.values()) >= MOST_TEXT_ACTIONS:
        return None
    names = [""] * (max(codes.values()) + 1)
    for text, code in codes.items():
        names[code] = names[code] or text
    return tuple(names)


def name_of(name: str, fmt: RawFormat, first: RawFile) -> str:
    """Return the name of a data set: its format, or the file's stem for general formats such as csv."""
    if not fmt.named_columns and name not in ("lines", "sequences", "amazon"):
        return name
    return Path(unpacked_name(first.name)).stem


def refuse_two_writings(distinct, first: RawFile, role: str) -> None:
    """Raise DataError if ids are integers, and some are written in two ways, such as 7 and 7.0."""
    if not len(distinct) or not distinct.str.contains(r"^-?[0-9]+([.]0)?$").all():
        return
    with_point = distinct.filter(distinct.str.ends_with(".0"))
    twice = with_point.filter(with_point.str.strip_suffix(".0").is_in(distinct.implode()))
    if len(twice):
        raise DataError(
            f"{first.name}: the {role} ids {twice[0].removesuffix('.0')} and {twice[0]} are the same number written in "
            "two ways, as pandas writes columns with missing values: write all without the point"
        )


class Ids:
    """The numbers of original ids, in ascending order of the ids.

    Args:
        ids: the ids, with repetitions, as a polars Series.

    Attributes:
        values: [n] numpy int64 or str, the id of each number.
        notes: a sentence about ids that differ only by blanks, if there are any.
    """

    def __init__(self, ids, first: RawFile, role: str):
        import polars as pl

        distinct = ids.unique().sort()
        if len(distinct) >= 2**31:
            raise DataError(f"{first.name}: expected at most 2147483647 distinct {role} ids, got {len(distinct)}")
        self._text = None
        self.notes: list[str] = []
        if distinct.dtype == pl.String:
            if (example := mostly_lists(distinct)) is not None:
                raise DataError(
                    f"{first.name}: expected one {role} id in each row, got lists like {shown(repr(example))}"
                )
            refuse_two_writings(distinct, first, role)
            as_int = distinct.cast(pl.Int64, strict=False)
            # Ids are integers only if all have the same text as integers: "007" and "7" are different ids.
            if as_int.null_count() or not (as_int.cast(pl.String) == distinct).all():
                self._text = pl.Enum(distinct)
                self.notes = notes_of_blanks(distinct, role)
                self.values = distinct.to_numpy().astype(np.str_)
                return
            distinct = as_int.sort()
        self.values = distinct.to_numpy().astype(np.int64)
        self._table = None
        if len(self.values) and (size := int(self.values[-1]) - int(self.values[0]) + 1) <= DENSE * len(self.values):
            self._table = np.zeros(size, np.int32)
            self._table[self.values - self.values[0]] = np.arange(len(self.values), dtype=np.int32)

    def codes(self, ids):
        """Return the numbers of ids, as a polars Series of int32."""
        import polars as pl

        if self._text is not None:
            return ids.cast(self._text).to_physical().cast(pl.Int32)
        numbers = ids.cast(pl.Int64).to_numpy()
        if self._table is not None:
            return pl.Series(self._table[numbers - self.values[0]])
        return pl.Series(np.searchsorted(self.values, numbers).astype(np.int32))
