"""Write the output files of eval.py: tables of recommendations and the vectors of the items.

They are written atomically. An existing table is replaced if eval.py wrote it or with `--overwrite`, an earlier export
of vectors only with `--overwrite`, and the run's source never.

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
from data.errors import ConfigError
from data.types import Dataset, shown
from evaluation.item_filters import ALL_ITEMS, ItemFilter, filtered_lists
from evaluation.scores import seen_by
from models.protocols import RankGroup
from models.tasks.scoring import model_scorer, normalized_items
from training.config import RunConfig
from training.folder import access, check_path, write_file
from training.ranks.processes import Ranks
from training.ranks.tables import rows_in_a_block

COLUMNS = ["user", "rank", "item", "score"]
TABLES = (".parquet", ".csv")
EXPORTED, INDEX = {"items.npy", "item_ids.npy", "items.parquet"}, "items.faiss"


def check_table(path: Path, option: str, config: RunConfig, overwrite: bool) -> None:
    """Raise ConfigError unless a table may be written to `path`."""
    with access(path, "written"):
        if path.suffix not in TABLES or path.is_dir():
            raise ConfigError(f"{option} {shown(path, 200)}: expected the name of a file that ends in .parquet or .csv")
        check_place(path, option, config)
        if not os.path.lexists(path):
            return
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"{option} {shown(path, 200)}: exists and is not a regular file, not replaced")
        if not overwrite and not _is_table(path):
            raise ConfigError(
                f"{option} {shown(path, 200)}: eval.py did not write the existing file; --overwrite replaces it"
            )


def check_export(path: Path, config: RunConfig, overwrite: bool) -> None:
    """Raise ConfigError unless the items' vectors may be written into the folder `path`."""
    option = "--export-items"
    if not config.model.head.has_item_vectors:
        raise ConfigError(f"{option}: model.head does not compute scores as products with one vector per item")
    with access(path, "written"):
        check_place(path, option, config)
        if not os.path.lexists(path):
            return
        if path.is_symlink() or not path.is_dir() or {file.name for file in path.iterdir()} - {INDEX} != EXPORTED:
            raise ConfigError(f"{option} {shown(path, 200)}: exists and is not an export of eval.py, not replaced")
        if not overwrite:
            raise ConfigError(f"{option} {shown(path, 200)}: there is an earlier export; --overwrite replaces it")


def check_place(path: Path, option: str, config: RunConfig) -> None:
    """Raise ConfigError unless the folder to write into exists and is not the run's source."""
    check_path(path)
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{option}: {shown(parent, 200)}: no such folder")
    if config.data.path is None:
        return
    source, target = Path(config.data.path).resolve(), parent.resolve() / path.name
    same = path.exists() and source.exists() and path.samefile(source)
    if same or source in (target, path.resolve(), *target.parents):
        raise ConfigError(f"{option} {shown(path, 200)}: this is data.path, the run's source")


def _is_table(path: Path) -> bool:
    """Return whether the file has the columns of a table of recommendations."""
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
    config: RunConfig,
    model,
    dataset: Dataset,
    batches: Iterable[Batch],
    k: int,
    ranks: RankGroup | None = None,
    *,
    filter_seen: str,
    passing: ItemFilter = ALL_ITEMS,
):
    """Return the k best items of each sequence as a frame with original ids: user, rank (from 1), item, score.

    ranks: the ranks that compute it together. filter_seen: the user's earlier items to remove, as eval.filter_seen.
    passing: the filter of all lists. A user with fewer than k remaining items has fewer rows.
    """
    import polars as pl

    score = model_scorer(model, config.train.autocast == "bf16", ranks)
    parts: list[tuple[np.ndarray, ...]] = []
    for batch in batches:
        seen = None if filter_seen == "none" else seen_by(filter_seen, batch)
        best, ids = filtered_lists(score(batch), k, seen, passing)
        parts.append((batch.users.cpu().numpy(), ids, best))
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
    """Write the frame atomically as Parquet or CSV, according to the file's extension."""
    content = io.BytesIO()
    if path.suffix == ".csv":
        frame.write_csv(content)
    else:
        frame.write_parquet(content)
    write_file(path, content.getvalue())


def whole_histories(
    dataset: Dataset, users: np.ndarray, at: int, longest: int, batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Yield batches of the users' latest `longest` events; `at` is the time of the next event, to be predicted.

    users: [M] indices of users who have events. `seen_items` of the batches has their whole histories.
    """

    def column(values: np.ndarray | None, index: np.ndarray):
        return None if values is None else torch.from_numpy(np.asarray(values[index], np.int64)).to(device)

    for first in range(0, len(users), batch_size):
        chosen = users[first : first + batch_size]
        start, end = dataset.user_offsets[chosen], dataset.user_offsets[chosen + 1]
        seen, seen_offsets = _ranges(start, end)
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
            seen_items=column(dataset.items, seen),
            seen_offsets=torch.from_numpy(seen_offsets).to(device),
        )


def _ranges(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the integers begin[i] .. end[i] - 1 for each i, concatenated; the offsets of the parts)."""
    offsets = np.append(0, np.cumsum(end - begin)).astype(np.int64)
    return np.repeat(begin - offsets[:-1], end - begin) + np.arange(offsets[-1]), offsets


@torch.no_grad()
def export_items(path: Path, model, item_ids: np.ndarray, ranks: Ranks | None = None) -> tuple[int, int]:
    """Write items.npy [I, E] fp32, item_ids.npy [I] and items.parquet (item, vector) into the folder; return (I, E).

    Rows have Euclidean length one: a score is the product of a row and the model's output. If faiss is installed (the
    extra `serve`), items.faiss is an exact inner-product index, whose results are row numbers of items.npy.

    ranks: the ranks that share the table. The first one writes the same files as a single process, block by block, so
    that only the index is in memory as a whole.
    """
    ids, shape = np.asarray(item_ids), (len(item_ids), model.embedding.position.shape[1])
    blocks = (normalized_items(rows).cpu().numpy() for rows in item_blocks(model, ranks))
    if ranks is not None:
        ranks.broadcast(None)  # wait until all ranks have checked the path
        if not ranks.first:
            for _ in blocks:
                pass
            return shape
    with access(path, "written"), replace_folder(path) as folder:
        np.save(folder / "item_ids.npy", ids, allow_pickle=False)
        with (folder / "items.npy").open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for vectors in blocks:
                file.write(vectors.data)
        vectors = np.load(folder / "items.npy", mmap_mode="r", allow_pickle=False)
        _write_vectors(folder / "items.parquet", ids, vectors)
        if importlib.util.find_spec("faiss") is not None:
            import faiss

            index = faiss.IndexFlatIP(vectors.shape[1])
            index.add(vectors)
            faiss.write_index(index, str(folder / INDEX))
    return shape


def item_blocks(model, ranks: RankGroup | None) -> Iterator[torch.Tensor]:
    """Yield the representations of all items in blocks [R, E]; on ranks other than the first, R is 0."""
    embedding = model.embedding
    if embedding.sharded is not None and model.targets is None:
        for begin, rows in embedding.sharded.blocks():
            yield embedding.with_features(rows, begin)
    elif ranks is None or ranks.first:
        table = model.item_table
        yield from table.split(rows_in_a_block(table.shape[1]))


def _write_vectors(path: Path, ids: np.ndarray, vectors: np.ndarray) -> None:
    """Write a Parquet file (item, vector) block by block, to save memory."""
    import polars as pl
    from polars.io.plugins import register_io_source

    step = rows_in_a_block(vectors.shape[1])

    def frames(*_) -> Iterator[pl.DataFrame]:
        for begin in range(0, len(ids), step):
            rows = slice(begin, begin + step)
            yield pl.DataFrame({"item": ids[rows], "vector": np.asarray(vectors[rows])})

    schema = pl.DataFrame({"item": ids[:1], "vector": np.asarray(vectors[:1])}).schema
    try:
        register_io_source(frames, schema=schema).sink_parquet(path)
    except pl.exceptions.ComputeError as error:  # polars raises it for errors of the file system
        raise OSError(str(error)) from error
