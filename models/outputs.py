"""Files that a user asks eval.py for: tables of recommendations and the vectors of the items.

They are written beside their place and then take it, never over what is not an earlier output of the same kind, unless
`--overwrite` says so, and never over the run's own source.

Letters: B users of a batch, I items, E embedding size.
"""

import importlib.util
import io
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from data.atomic import replace_folder
from data.batch import Batch
from data.types import Dataset, shown
from models.config import ConfigError, RunConfig
from models.folder import access, write_file
from models.parallel.ranks import Ranks
from models.retrieval import best_items, model_scorer, normalized_items, seen_by

COLUMNS = ["user", "rank", "item", "score"]
TABLES = (".parquet", ".csv")
EXPORTED, INDEX = {"items.npy", "item_ids.npy", "items.parquet"}, "items.faiss"


def check_table(path: Path, option: str, config: RunConfig, overwrite: bool) -> None:
    """ConfigError unless a table may be written to `path`."""
    with access(path, "written"):
        if path.suffix not in TABLES or path.is_dir():
            raise ConfigError(f"{option} {shown(path, 200)}: expected the name of a file that ends in .parquet or .csv")
        _check_place(path, option, config)
        if not os.path.lexists(path):
            return
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"{option} {shown(path, 200)}: what is there is no regular file and is left alone")
        if not overwrite and not _is_table(path):
            raise ConfigError(
                f"{option} {shown(path, 200)}: there is a file that eval.py did not write; --overwrite replaces it"
            )


def check_export(path: Path, config: RunConfig, overwrite: bool) -> None:
    """ConfigError unless the items' vectors may be written into the folder `path`."""
    option = "--export-items"
    if config.model.head.kind != "dot":
        raise ConfigError(f"{option}: model.head.kind={config.model.head.kind} has no one vector for an item")
    with access(path, "written"):
        _check_place(path, option, config)
        if not os.path.lexists(path):
            return
        if path.is_symlink() or not path.is_dir() or {file.name for file in path.iterdir()} - {INDEX} != EXPORTED:
            raise ConfigError(f"{option} {shown(path, 200)}: there is something that eval.py did not write")
        if not overwrite:
            raise ConfigError(f"{option} {shown(path, 200)}: there is an earlier export; --overwrite replaces it")


def _check_place(path: Path, option: str, config: RunConfig) -> None:
    """ConfigError unless there is a folder to write into, which is not the run's source."""
    if "\0" in str(path):
        raise ConfigError(f"{option} {shown(path)}: a path cannot hold a NUL character")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{option}: {shown(parent, 200)}: no such folder")
    if config.data.path is None:
        return
    source, target = Path(config.data.path).resolve(), parent.resolve() / path.name
    same = path.exists() and source.exists() and path.samefile(source)
    if same or source in (target, path.resolve(), *target.parents):
        raise ConfigError(f"{option} {shown(path, 200)}: this is data.path, from which the run is read")


def _is_table(path: Path) -> bool:
    """Whether the file is an earlier table of ours, by its columns."""
    if path.suffix == ".csv":
        with path.open("rb") as file:
            return file.read(100).split(b"\n")[0].strip() == ",".join(COLUMNS).encode()
    import polars as pl

    try:
        with path.open("rb") as file:
            return list(pl.read_parquet_schema(file)) == COLUMNS
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        return False


@torch.no_grad()
def recommendations(
    config: RunConfig, model, dataset: Dataset, batches: Iterable[Batch], k: int, ranks: Ranks | None = None
):
    """The k best items of each sequence, as a frame in original ids: user, rank (from 1), item, score.

    ranks: those that compute it together. A user for whom fewer items are left has fewer rows.
    """
    import polars as pl

    score, how = model_scorer(model, config.train.autocast == "bf16", ranks), config.eval.filter_seen
    parts: list[tuple[np.ndarray, ...]] = []
    for batch in batches:
        best, ids = best_items(score(batch), k, None if how == "none" else seen_by(how, batch))
        parts.append(tuple(x.cpu().numpy() for x in (batch.users, ids, best)))
    users, items, values = (np.concatenate(columns) for columns in zip(*parts))
    width = items.shape[1]
    frame = pl.DataFrame(
        {
            "user": np.asarray(dataset.user_ids)[np.repeat(users, width)],
            "rank": np.tile(np.arange(1, width + 1, dtype=np.int32), len(users)),
            "item": np.asarray(dataset.item_ids)[items.ravel()],
            "score": values.ravel(),
        }
    )
    return frame.filter(pl.col("score").is_finite())


def write_table(path: Path, frame) -> None:
    """The frame as Parquet or CSV, by the name's end; whole, or what was there before stays."""
    content = io.BytesIO()
    if path.suffix == ".csv":
        frame.write_csv(content)
    else:
        frame.write_parquet(content)
    write_file(path, content.getvalue())


def whole_histories(
    dataset: Dataset, users: np.ndarray, at: int, longest: int, batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Batches of the users' latest `longest` events; what comes next is asked for at the time `at`.

    users: [M] indices of users who have events. `seen_items` are their whole histories.
    """

    def column(values: np.ndarray | None, index: np.ndarray):
        return None if values is None else torch.from_numpy(np.asarray(values[index], np.int64)).to(device)

    for first in range(0, len(users), batch_size):
        chosen = users[first : first + batch_size]
        start, end = dataset.user_offsets[chosen], dataset.user_offsets[chosen + 1]
        whole, whole_offsets = _ranges(start, end)
        index, offsets = _ranges(np.maximum(start, end - longest), end)
        last = offsets[1:] - 1
        following = np.minimum(index + 1, dataset.num_events - 1)
        targets, times = column(dataset.items, following), column(dataset.timestamps, following)
        targets[last], times[last] = -1, at
        yield Batch(
            item_ids=column(dataset.items, index),
            timestamps=column(dataset.timestamps, index),
            target_ids=targets,
            query_timestamps=times,
            seq_offsets=torch.from_numpy(offsets).to(device),
            users=torch.from_numpy(np.asarray(chosen, np.int64)).to(device),
            actions=column(dataset.actions, index),
            user_features=column(dataset.user_rows, chosen),
            event_features=column(dataset.event_rows, index),
            seen_items=column(dataset.items, whole),
            seen_offsets=torch.from_numpy(whole_offsets).to(device),
        )


def _ranges(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begin[i] .. end[i]-1 for each i, laid end to end; their offsets)."""
    offsets = np.append(0, np.cumsum(end - begin)).astype(np.int64)
    return np.repeat(begin - offsets[:-1], end - begin) + np.arange(offsets[-1]), offsets


@torch.no_grad()
def export_items(path: Path, model, item_ids: np.ndarray) -> tuple[int, int]:
    """Writes items.npy [I, E] fp32, item_ids.npy [I] and items.parquet (item, vector) into the folder; returns (I, E).

    Rows have length one: a score is the product of one with the model's output. With faiss installed (the extra
    `serve`), items.faiss is an exact index of inner products; what it finds are rows of items.npy.
    """
    import polars as pl

    vectors = normalized_items(model.item_table).cpu().numpy()
    frame = pl.DataFrame({"item": np.asarray(item_ids), "vector": vectors})
    with access(path, "written"), replace_folder(path) as folder:
        np.save(folder / "items.npy", vectors, allow_pickle=False)
        np.save(folder / "item_ids.npy", np.asarray(item_ids), allow_pickle=False)
        content = io.BytesIO()
        frame.write_parquet(content)
        (folder / "items.parquet").write_bytes(content.getvalue())
        if importlib.util.find_spec("faiss") is not None:
            import faiss

            index = faiss.IndexFlatIP(vectors.shape[1])
            index.add(vectors)
            faiss.write_index(index, str(folder / INDEX))
    return vectors.shape
