"""Prepare data that do not fit into memory: in pieces of the files, then in ranges of users.

The result is bit-identical to that of raw.py and filtering.py. A folder next to the caches has:

    pieces/N     the N-th piece of the raw files, read and checked: good rows, distinct ids with counts, the state
    numbered/N   the piece's rows with numbers in place of ids, divided by ranges of users
    users/P      the P-th range of users with sorted events, as arrays
    columns      the data after the filter, in the layout of the cache

Each folder appears whole or not at all, so that an interrupted preparation continues after the last one. Memory holds
two pieces while they are read, later one piece or range for each core; in addition, the id of each user and item, with
8 more bytes for each.

Letters: E events, U users of a range, K ranges.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import replace_file, replace_folder
from data.filtering import nothing_left, offsets_of
from data.progress import Progress
from data.reading.conditions import note_of_condition
from data.reading.formats import RawFormat
from data.reading.memory import available_memory
from data.reading.order import by_user_and_time
from data.reading.parallel import CORES, Overlapped, in_parallel
from data.reading.parquet import memory_of, parquet_pieces
from data.reading.raw import (
    Handling,
    Ids,
    alike,
    check_unit,
    codes_of_actions,
    duplicates_note,
    name_of,
    names_of,
    no_events,
    note_of_actions,
    notes_of_blanks,
    refuse_duplicates,
    texts_of_actions,
    time_note,
)
from data.reading.sources import RawFile, literal, unpacked
from data.reading.text import text_pieces, text_readings
from data.reading.times import Reading, to_seconds
from data.reading.values import Readings
from data.types import DataError, Dataset

PIECES = {"text": text_pieces, "parquet": parquet_pieces}
PIECE = 1 << 27  # bytes of a raw file read at a time
BYTES_PER_EVENT = 64  # memory for sorting
SHARE = 0.3  # the share of the free memory for the ranges that are sorted at the same time, one for each core
MOST = 4096  # the greatest number of ranges
BUCKETS = 64  # the greatest number of parts of a piece's distinct ids
COLUMNS = {"items": np.int32, "timestamps": np.int64, "actions": np.int32}


def num_ranges(fmt: RawFormat, files: list[RawFile]) -> int:
    """Return the number of ranges K for these files: 1 if all events fit into memory."""
    free = available_memory()
    if free is None or fmt.kind not in PIECES:
        return 1
    if fmt.kind == "text":
        size = sum(file.path.stat().st_size for file in files)
        once, events = 2 * size, size / 20
    else:
        events = sum(_parquet_rows(file) for file in files)
        once = memory_of(int(events), fmt)
    if once <= free:
        return 1
    return min(MOST, max(2, -(-int(events * BYTES_PER_EVENT * CORES) // int(SHARE * free))))


def _parquet_rows(file: RawFile) -> int:
    import polars as pl

    try:
        with literal(file.path) as opened:
            return pl.scan_parquet(opened).select(pl.len()).collect().item()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        return 0  # read_parquet reports the error


def read_in_partitions(
    name: str,
    fmt: RawFormat,
    sources: list[RawFile],
    fingerprint: str,
    handling: Handling,
    options: dict,
    folder: Path,
    count: int | None,
    progress: Progress,
) -> Dataset | None:
    """Return the result of `read_raw` and then `filter_dataset` with `options`; None if one range is enough.

    count: K, or None to choose it. folder: the folder of intermediate files; the columns of the result are memory maps
    of files there. The caller removes it.
    """
    with unpacked(sources, folder.parent, fmt) as files:
        plan = folder / "plan.json"
        saved = _read_json(plan) if plan.exists() else {}
        if saved.get("fingerprint") == fingerprint and count in (None, saved.get("count")):
            count = saved["count"]
        else:
            count = count or num_ranges(fmt, files)
            if count == 1:
                return None
            if fmt.kind not in PIECES:
                raise DataError(f"data.partitions: {name} cannot be read in pieces")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _write_json(plan, {"fingerprint": fingerprint, "count": count})
        if handling.duplicates == "drop":
            refuse_duplicates(fmt)
        work = _Preparation(name, fmt, files, handling, folder, count, progress)
        work.read()
    return work.dataset(fingerprint, options)


@dataclasses.dataclass
class _State:
    """The part of the raw files that has been read.

    pieces, rows: the numbers of pieces and rows; file, begin: the file and position of the next piece; bad, left_out,
    described: `count`, `left_out` and `first` of `BadRows`; piece_files: the index of each piece's file.
    """

    pieces: int = 0
    rows: int = 0
    file: int = 0
    begin: list[int] | None = None
    bad: int = 0
    left_out: int = 0
    described: list[str] = dataclasses.field(default_factory=list)
    bad_note: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    plain_readings: dict[str, Any] | None = None
    piece_files: list[int] = dataclasses.field(default_factory=list)

    def readings(self) -> Readings | None:
        """Return the readings of the last piece, or None."""
        plain = self.plain_readings
        return (
            None
            if plain is None
            else Readings(Reading(**plain["time"]), plain["text_actions"], tuple(plain["numbers"]))
        )


class _Preparation:
    """One preparation: `read`, then `dataset`; both write only the folders that are missing."""

    def __init__(self, name, fmt, files, handling, folder, count, progress):
        self.name, self.fmt, self.files, self.handling = name, fmt, files, handling
        self.folder, self.count, self.progress = folder, count, progress

    def read(self) -> None:
        """Write pieces/N, then reading.json."""
        state_file = self.folder / "reading.json"
        if state_file.exists():
            return
        pieces = sorted((self.folder / "pieces").glob("[0-9]*"))
        state = _State(**_read_json(pieces[-1] / "state.json")) if pieces else _State()
        bad = self.handling.bad_rows()
        if not state.pieces and self.fmt.kind == "text" and len(self.files) > 1:
            state.plain_readings = dataclasses.asdict(text_readings(self.files, self.fmt))
        bad.count, bad.left_out, bad.first = state.bad, state.left_out, state.described
        bad.rows = state.rows + state.bad + state.left_out
        with Overlapped() as writer:
            while state.file < len(self.files):
                file, before = self.files[state.file], state.readings()
                place = None if state.begin is None else (state.begin[0], state.begin[1])
                self.progress.stage(f"reading {file.name}, {state.rows:,} rows so far")
                for frame, readings, piece_notes, begin in PIECES[self.fmt.kind](
                    file, self.fmt, bad, before, PIECE, place
                ):
                    check_unit(file, self.files[0], before, readings)
                    state.piece_files.append(state.file)
                    piece_notes = [*piece_notes, *file.notes(self.fmt)]
                    state.notes += [note for note in piece_notes if note not in state.notes]
                    state.begin, state.plain_readings = list(begin), dataclasses.asdict(readings)
                    state.rows, state.pieces = state.rows + frame.height, state.pieces + 1
                    state.bad, state.left_out, state.described = bad.count, bad.left_out, bad.first
                    # The next piece is read while this one is written.
                    copy = _State(**json.loads(json.dumps(dataclasses.asdict(state))))
                    writer.start(functools.partial(self._write_piece, frame, copy))
                    self.progress.stage(f"reading {file.name}, {state.rows:,} rows so far")
                writer.finish()
                bad.check(file.name)
                state.file, state.begin = state.file + 1, None
        bad.check_limit(self.files[0].name)
        state.bad_note = bad.note() if bad.count else None
        _write_json(state_file, dataclasses.asdict(state))

    def _write_piece(self, frame, state: _State) -> None:
        with replace_folder(self.folder / "pieces" / f"{state.pieces - 1:06d}") as place:
            frame.write_ipc(place / "rows.arrow")
            frame.head(0).write_ipc(place / "columns.arrow")
            for role in ("user", "item"):
                for bucket, part in enumerate(self._buckets(frame[role].value_counts(name="count"), role)):
                    part.write_ipc(place / f"{role}s-{bucket}.arrow")
            if "action" in frame.columns and frame["action"].dtype == _text():
                frame["action"].value_counts(name="count").write_ipc(place / "actions.arrow")
            _write_json(place / "state.json", dataclasses.asdict(state))

    def _buckets(self, counts, role: str) -> list:
        """Divide ids and their counts by the ids' hashes into min(K, BUCKETS) frames."""
        import polars as pl

        ids = counts[role]
        if self.fmt.kind == "parquet":  # the same ids may be text in another file
            ids = ids.cast(pl.String)
        bucket = (ids.hash() % min(BUCKETS, self.count)).cast(pl.Int32)
        counts = counts.with_columns(bucket.alias("bucket")).sort("bucket")
        begins = np.searchsorted(counts["bucket"].to_numpy(), np.arange(min(BUCKETS, self.count) + 1)).tolist()
        counts = counts.drop("bucket")
        return [counts.slice(begin, end - begin) for begin, end in itertools.pairwise(begins)]

    def dataset(self, fingerprint: str, options: dict) -> Dataset:
        """Write numbered/N, users/P and columns; return the data set."""
        state, first = _State(**_read_json(self.folder / "reading.json")), self.files[0]
        pieces = sorted((self.folder / "pieces").glob("[0-9]*"))
        readings = state.readings()
        if not state.rows or readings is None:
            raise no_events(first, state.bad, state.left_out)
        self.kinds = self._kinds(pieces, state)
        notes, names, texts = list(state.notes), None, None
        if self.fmt.named_columns and self.fmt.has_timestamps:
            notes.append(time_note(self.fmt, readings))
        if state.left_out:
            notes.append(note_of_condition(state.left_out, state.rows + state.bad + state.left_out, self.fmt))
        if state.bad_note:
            notes.append(state.bad_note)
        if self.kinds.get("action") == _text():
            counts = _summed([_read(piece / "actions.arrow") for piece in pieces], "action")
            texts = texts_of_actions(counts, first)
            names = tuple(texts.to_list())
        elif self.fmt.action_codes is not None:
            names = names_of(self.fmt.action_codes)
        users, events = self._numbered(pieces, "user")
        items, _ = self._numbered(pieces, "item")
        bounds = self._bounds(events)
        in_parallel(lambda piece: self._number(piece, users, items, texts, bounds), self._staged("numbering", pieces))
        ranges = self._staged("sorting", range(self.count))
        dropped = sum(in_parallel(lambda number: self._sort(number, bounds, readings, len(pieces)), ranges))
        if self.handling.duplicates == "drop":
            notes.append(duplicates_note(dropped))
        if texts is not None:
            notes += notes_of_blanks(texts, "action")
        if names:
            notes.append(note_of_actions(names))
        notes += users.notes + items.notes
        remaining_users, remaining_items, offsets = self._filter(bounds, len(items.values), options)
        files = {column: self.folder / "columns" / f"{column}.npy" for column in COLUMNS}
        columns = {name: np.load(file, mmap_mode="c") for name, file in files.items() if file.exists()}
        return Dataset(
            name=name_of(self.name, self.fmt, first),
            actions=columns.pop("actions", None),
            **columns,
            user_offsets=offsets,
            user_ids=users.values[remaining_users],
            item_ids=items.values[remaining_items],
            has_timestamps=self.fmt.has_timestamps,
            fingerprint=fingerprint,
            action_names=names,
            notes=tuple(notes),
        )

    def _staged(self, what: str, parts: Sequence) -> Iterator:
        """Yield the parts, and report the stage of each; what: the work on the parts."""
        for number, part in enumerate(parts):
            self.progress.stage(f"{what} the events, part {number + 1} of {len(parts)}")
            yield part

    def _kinds(self, pieces: list[Path], state: _State) -> dict:
        """Map each role to the common polars type of its column in all pieces."""
        frames = [_read(piece / "columns.arrow") for piece in pieces]
        return dict(alike(frames, [self.files[file] for file in state.piece_files])[0].schema)

    def _numbered(self, pieces: list[Path], role: str) -> tuple[Ids, np.ndarray]:
        """Return (all ids of a role, the number of events of each)."""
        import polars as pl

        buckets = []
        for bucket in range(min(BUCKETS, self.count)):
            self.progress.stage(f"numbering the ids of {role}s, part {bucket + 1}")
            parts = (_read(piece / f"{role}s-{bucket}.arrow") for piece in pieces)
            buckets.append(_summed([part.with_columns(pl.col(role).cast(self.kinds[role])) for part in parts], role))
        counted_ids = pl.concat(buckets)
        ids = Ids(counted_ids[role], self.files[0], role)
        counts = np.zeros(len(ids.values), np.int64)
        counts[ids.codes(counted_ids[role]).to_numpy()] = counted_ids["count"].to_numpy()
        return ids, counts

    def _bounds(self, events: np.ndarray) -> np.ndarray:
        """Return the bounds [K + 1] of ranges of users with about the same number of events; events: by user."""
        before = np.cumsum(events)
        targets = before[-1] * np.arange(1, self.count) // self.count
        return np.concatenate([[0], np.searchsorted(before, targets), [len(events)]])

    def _number(self, piece: Path, users: Ids, items: Ids, texts, bounds: np.ndarray) -> None:
        """Write numbered/N for a piece."""
        import polars as pl

        place = self.folder / "numbered" / piece.name
        if place.exists():
            return
        frame = _read(piece / "rows.arrow").cast(self.kinds)
        codes = [users.codes(frame["user"]).alias("user"), items.codes(frame["item"]).alias("item")]
        if texts is not None:
            codes.append(codes_of_actions(texts))
        frame = frame.with_columns(codes)
        part = np.searchsorted(bounds[1:-1], frame["user"].to_numpy(), side="right").astype(np.int32)
        frame = frame.with_columns(pl.Series("part", part)).sort("part", maintain_order=True)
        begins = np.searchsorted(frame["part"].to_numpy(), np.arange(self.count + 1))
        frame = frame.drop("part")
        with replace_folder(place) as temporary:
            for number, (begin, end) in enumerate(itertools.pairwise(begins.tolist())):
                if end > begin:
                    frame.slice(begin, end - begin).write_ipc(temporary / f"{number}.arrow")
        (piece / "rows.arrow").unlink()

    def _sort(self, number: int, bounds: np.ndarray, readings: Readings, pieces: int) -> int:
        """Write users/P; return the number of duplicates that were dropped."""
        import polars as pl

        place = self.folder / "users" / f"{number:06d}"
        if not place.exists():
            files = [self.folder / "numbered" / f"{piece:06d}" / f"{number}.arrow" for piece in range(pieces)]
            frames = [_read(file) for file in files if file.exists()]
            frame, dropped = pl.concat(frames) if frames else None, 0
            with replace_folder(place) as temporary:
                if frame is not None:
                    height = frame.height
                    if self.handling.duplicates == "drop":
                        frame = frame.unique(keep="first", maintain_order=True)
                    dropped = height - frame.height
                    frame = by_user_and_time(frame, self.fmt.has_timestamps)
                    lengths = np.bincount(frame["user"].to_numpy() - bounds[number], minlength=np.diff(bounds)[number])
                    times = np.zeros(frame.height, np.int64)
                    if self.fmt.has_timestamps:
                        times = to_seconds(frame["timestamp"], readings.time.unit)
                    np.save(temporary / "lengths.npy", lengths)
                    np.save(temporary / "items.npy", frame["item"].to_numpy())
                    np.save(temporary / "timestamps.npy", times)
                    if "action" in frame.columns:
                        np.save(temporary / "actions.npy", frame["action"].to_numpy())
                _write_json(temporary / "dropped.json", dropped)
            for file in files:
                file.unlink(missing_ok=True)
        return _read_json(place / "dropped.json")

    def _filter(self, bounds: np.ndarray, num_items: int, options: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Write columns; return (the mask of users that remain, the mask of items, the offsets of these users)."""
        least_user, least_item = options["min_user_events"], options["min_item_events"]
        places = [self.folder / "users" / f"{number:06d}" for number in range(self.count)]
        places = [place for place in places if (place / "lengths.npy").exists()]
        firsts = [int(bounds[int(place.name)]) for place in places]
        self.progress.stage("filtering")
        items_left, changed = np.ones(num_items, bool), True
        users_left = np.ones(int(bounds[-1]), bool)
        while changed:
            # Count the events of remaining users and items, then drop users and items with too few.
            counts, changed, total = np.zeros(num_items, np.int64), False, 0
            for place, first in zip(places, firsts):
                self.progress.stage("filtering")
                alive, users, lengths = _alive(place, first, users_left, items_left)
                user_counts = np.bincount(users[alive], minlength=len(lengths))
                total += int(alive.sum())
                counts += np.bincount(np.load(place / "items.npy")[alive], minlength=num_items)
                too_few = users_left[first : first + len(lengths)] & (user_counts < least_user)
                changed |= bool(too_few.any())
                users_left[first : first + len(lengths)] &= ~too_few
            too_few = items_left & (counts < least_item)
            changed |= bool(too_few.any())
            items_left &= ~too_few
        if not total:
            raise nothing_left(name_of(self.name, self.fmt, self.files[0]), least_user, least_item)
        lengths = self._write_columns(places, firsts, users_left, items_left, total)
        return users_left, items_left, offsets_of(lengths[users_left])

    def _write_columns(self, places, firsts, users_left, items_left, total: int) -> np.ndarray:
        """Write columns; return the number of events of each user."""
        numbers = np.cumsum(items_left, dtype=np.int64) - 1
        lengths = np.zeros(len(users_left), np.int64)
        with replace_folder(self.folder / "columns") as temporary:
            files = {name: temporary / f"{name}.npy" for name in COLUMNS if (places[0] / f"{name}.npy").exists()}
            opened = {name: _begin(file, COLUMNS[name], total) for name, file in files.items()}
            for place, first in zip(places, firsts):
                self.progress.stage("writing the columns")
                alive, users, user_lengths = _alive(place, first, users_left, items_left)
                lengths[first : first + len(user_lengths)] = np.bincount(users[alive], minlength=len(user_lengths))
                for name, file in opened.items():
                    values = np.load(place / f"{name}.npy")[alive]
                    values = numbers[values] if name == "items" else values
                    values.astype(COLUMNS[name]).tofile(file)
            for file in opened.values():
                file.close()
        return lengths


def _alive(place: Path, first: int, users_left: np.ndarray, items_left: np.ndarray):
    """Return (the mask of a range's events that remain [E], their users as indices in the range [E], lengths [U])."""
    lengths = np.load(place / "lengths.npy")
    users = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    alive = users_left[first : first + len(lengths)][users]
    alive &= items_left[np.load(place / "items.npy")]
    return alive, users, lengths


def _begin(file: Path, dtype, count: int):
    """Create a .npy file for `count` values; return it open at the first value."""
    opened = open(file, "wb")  # noqa: SIM115 (the caller closes it)
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(opened, header)
    return opened


def _summed(frames: list, role: str):
    """Sum the counts of all frames by id."""
    import polars as pl

    return pl.concat(frames).group_by(role).agg(pl.col("count").sum())


def _text():
    import polars as pl

    return pl.String


def _read(file: Path):
    import polars as pl

    with literal(file) as opened:
        return pl.read_ipc(opened)


def _read_json(file: Path):
    return json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: Path, value) -> None:
    replace_file(file, json.dumps(value))
