"""Save and restore a store: the events and pages of all users, in a folder.

store.json         properties of the run, the checksum of the weights that computed the pages, the users in the order of
                   their last use, the checksums of the other files
events.npz         the users' events as flat columns
pages.safetensors  the pages of users who have some; absent if there are none

A new folder can be read only by its owner; a replaced folder keeps its mode.
"""

import hashlib
import io
import json
import stat
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

import hstu_sparse
from data.atomic import find_folder, replace_folder
from data.types import shown
from serving.caches import Caches, Entry
from serving.contexts import Contexts
from serving.errors import StoreError
from serving.histories import Histories, History
from training.folder import FolderError, access, read_regular

LAYOUT = 2
MOST = 2**40  # most bytes of a file
STORE, EVENTS, PAGES = "store.json", "events.npz", "pages.safetensors"


def weights_checksum(model: nn.Module) -> str:
    """Compute the SHA-256 of a model's weights and buffers with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def save(folder: Path, facts: dict, weights: str, histories: Histories, caches: Caches, contexts: Contexts) -> None:
    """Write a store, whole or not at all.

    facts: properties that must be equal when the store is read; weights: the `weights_checksum` of the model, which
    must be equal for the pages to be read.
    """
    known = dict(histories)
    # Users without pages come first, then the others, the least recently used first.
    cached = [user for user in caches.entries if user in known and caches.entries[user].length]
    users = [user for user in known if user not in set(cached)] + cached
    content = io.BytesIO()
    rows, user_numbers = contexts.stored()
    arrays: dict[str, Any] = {**_columns([known[user] for user in users]), **_choices(caches, cached), **rows}
    np.savez(content, **arrays)
    entries = [caches.entries[user] for user in cached]
    meta: dict[str, Any] = {
        "layout": LAYOUT,
        "facts": facts,
        "format": repr(caches.pool.format),
        "weights": weights,
        "users": users,
        "pinned": sorted(caches.pinned),
        "features": user_numbers,
        "pages": [[entry.begin, entry.length] for entry in entries],
        "sha256": {EVENTS: hashlib.sha256(content.getvalue()).hexdigest()},
    }
    try:
        with access(folder, "written"), replace_folder(folder) as temporary:
            before = find_folder(folder)
            temporary.chmod(stat.S_IMODE(before.stat().st_mode) if before.is_dir() else 0o700)
            (temporary / EVENTS).write_bytes(content.getvalue())
            if cached:
                caches.pool.save(
                    temporary / PAGES, cast(Any, [entry.row for entry in entries]), [e.length for e in entries]
                )
                meta["sha256"][PAGES] = _digest(temporary / PAGES)
            (temporary / STORE).write_text(json.dumps(meta), encoding="utf-8")
    except FolderError as error:
        raise StoreError(str(error)) from None


def restore(
    folder: Path, facts: dict, weights: str, histories: Histories, caches: Caches, contexts: Contexts
) -> Histories:
    """Return the histories of a saved store, and replace the pages in `caches` and the features in `contexts`.

    Pages in another format, or computed with other weights than `weights`, are left out. If StoreError is raised,
    nothing has changed.
    """
    folder = find_folder(folder)
    meta, arrays = _read(folder)
    if meta["facts"] != facts:
        differing = [key for key in facts if meta["facts"].get(key) != facts[key]]
        raise StoreError(
            f"{shown(folder, 200)}: saved from another run or with other options ("
            + ", ".join(f"{key} {shown(meta['facts'].get(key))}, expected {shown(facts[key])}" for key in differing)
            + ")"
        )
    restored = Histories(histories.window, histories.has_actions, histories.most_users, histories.most_events)
    for user, history in zip(meta["users"], _histories(arrays, histories.has_actions)):
        restored.put(user, history)
    pool = None
    if meta["pages"] and (meta["format"], meta["weights"]) == (repr(caches.pool.format), weights):
        try:
            pool, rows, lengths = hstu_sparse.PagePool.load(folder / PAGES, caches.pool.device)
        except (ValueError, OSError) as error:
            raise StoreError(str(error)) from None
    contexts.restore(arrays, meta.get("features", {}))
    for user in list(caches.entries):
        caches.drop(user)
    caches.pinned = set(meta["pinned"])
    if pool is not None:
        cached = meta["users"][len(meta["users"]) - len(meta["pages"]) :]
        _take_over(caches, pool, list(zip(cached, rows, lengths, meta["pages"])), arrays)
    return restored


def _take_over(caches: Caches, pool, saved: list, arrays: dict) -> None:
    """Copy as many saved pages as fit into the caches' pool, the most recently used first."""
    layers = [name for name in arrays if name.startswith("choices_")]
    sinks = int(pool.format.sink_tokens > 0)
    for place in reversed(range(len(saved))):
        user, row, length, (begin, _) = saved[place]
        try:
            pages = caches.pool.reserve([], length)
        except hstu_sparse.PoolFull:
            break
        old, new = (torch.tensor(list(numbers), dtype=torch.int64, device=pool.device) for numbers in (row, pages))
        for target, source in zip(caches.pool.tensors, pool.tensors):
            for name, tensor in target.items():
                part = slice(0, 1) if name.startswith("sink_") else slice(sinks, None)
                tensor[new[part]] = source[name][old[part]]
        caches.pool.timestamps[new[sinks:]] = pool.timestamps[old[sinks:]]
        choices = {
            int(name.removeprefix("choices_")): torch.from_numpy(arrays[name][place]).to(pool.device) for name in layers
        }
        caches.entries[user] = Entry(pages, begin, length, choices or None)
        caches.entries.move_to_end(user, last=False)


def _columns(histories: list[History]) -> dict[str, np.ndarray]:
    """Return all histories as flat columns with the sizes of their parts."""

    def joined(parts: list[np.ndarray], dtype) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *parts])

    arrays = {
        "count": np.array([h.count for h in histories], np.int64),
        "first": np.array([h.first for h in histories], np.int64),
        "kept": np.array([len(h.items) for h in histories], np.int64),
        "items": joined([h.items for h in histories], np.int32),
        "timestamps": joined([h.timestamps for h in histories], np.int64),
        "seen_count": np.array([len(h.seen) for h in histories], np.int64),
        "seen": joined([h.seen for h in histories], np.int32),
    }
    if histories and histories[0].actions is not None:
        arrays["actions"] = joined([h.actions for h in histories if h.actions is not None], np.int32)
    return arrays


def _histories(arrays: dict[str, np.ndarray], has_actions: bool):
    """Yield the histories from the flat columns of `_columns`."""
    ends, seen_ends = np.cumsum(arrays["kept"]), np.cumsum(arrays["seen_count"])
    for count, first, end, size, seen_end, seen_size in zip(
        arrays["count"].tolist(),
        arrays["first"].tolist(),
        ends.tolist(),
        arrays["kept"].tolist(),
        seen_ends.tolist(),
        arrays["seen_count"].tolist(),
    ):
        events = slice(end - size, end)
        yield History(
            count,
            first,
            arrays["items"][events].copy(),
            arrays["timestamps"][events].copy(),
            arrays["actions"][events].copy() if has_actions else None,
            arrays["seen"][seen_end - seen_size : seen_end].copy(),
        )


def _choices(caches: Caches, users: list[str]) -> dict[str, np.ndarray]:
    """Return for bsa the choices of open selection groups by layer, [users, H, S] int32, -1 if none is open."""
    known = [caches.entries[user].choices for user in users]
    first = next((choices for choices in known if choices is not None), {})
    arrays = {}
    for layer, example in first.items():
        none = torch.full_like(example, -1)
        stacked = torch.stack([none if choices is None else choices[layer] for choices in known])
        arrays[f"choices_{layer}"] = stacked.cpu().numpy()
    return arrays


def _read(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Return (store.json, the arrays of events.npz); raise StoreError if a file is missing or damaged."""
    path = folder / STORE
    try:
        with access(path, "read"):
            meta = json.loads(read_regular(path, MOST))
        if meta["layout"] != LAYOUT or not all(isinstance(user, str) for user in meta["users"]):
            raise StoreError(f"{shown(path, 200)}: written by another version of this program")
        for name, digest in meta["sha256"].items():
            path = folder / Path(name).name
            with access(path, "read"):
                if _digest(path) != digest:
                    raise StoreError(
                        f"{shown(path, 200)}: damaged, its checksum differs from the one it was saved with"
                    )
        path = folder / EVENTS
        with np.load(io.BytesIO(read_regular(path, MOST)), allow_pickle=False) as arrays:
            return meta, dict(arrays)
    except StoreError:
        raise
    except (FolderError, OSError) as error:
        raise StoreError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError, zipfile.BadZipFile) as error:
        raise StoreError(f"{shown(path, 200)}: damaged ({type(error).__name__})") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
