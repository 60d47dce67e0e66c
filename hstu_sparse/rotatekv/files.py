"""A cache's file: one safetensors file with the packed tensors, the options as metadata, and a checksum of both."""

import errno
import hashlib
import json
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from hstu_sparse.pages.layout import Layout, RotateKVOptions
from hstu_sparse.rotatekv.cache import DTYPES, PACKED, PackedCache
from hstu_sparse.validation import FLOATING_DTYPES, check_int

FORMAT = "hstu_sparse.rotatekv.2"
SIZES = ("heads", "head_size", "value_size")
FACTS = {"options", "dtype", "used_pages", *SIZES}
INDEX = ("seq_offsets", "page_offsets", "page_table")


def save(cache: PackedCache, path) -> None:
    from safetensors.torch import save as to_bytes

    path = Path(path)
    if path.exists() and not path.is_file():  # a link counts as what it leads to
        raise FileExistsError(errno.EEXIST, "is no regular file", str(path))
    tensors = {name: x.cpu().contiguous() for name, x in cache.tensors().items()}
    _check_values(tensors)
    layout = cache.layout
    facts = {
        "options": {name: getattr(cache.options, name) for name in RotateKVOptions.__dataclass_fields__},
        "heads": layout.heads,
        "head_size": layout.head_size,
        "value_size": layout.value_size,
        "dtype": str(cache.dtype).removeprefix("torch."),
        "used_pages": cache.used_pages,
    }
    text = json.dumps(facts, sort_keys=True)
    metadata = {"format": FORMAT, "facts": text, "sha256": _checksum(text, tensors)}
    # Of its own in every process and thread.
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(to_bytes(tensors, metadata))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:  # in the name of the file that the caller knows
        raise OSError(error.errno, error.strerror, str(path)) from None


def load(kind: type[PackedCache], path) -> PackedCache:
    """A cache of the class `kind`."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("is no regular file")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"not a RotateKV cache (format {metadata.get('format')!r}, expected {FORMAT!r})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        text = metadata.get("facts", "")
        if metadata.get("sha256") != _checksum(text, tensors):
            raise ValueError("damaged (its checksum differs from the one it was written with)")
        return _build(kind, json.loads(text), tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "not found" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
        raise ValueError(f"{str(path)[:200]}: {reason[:300]}".splitlines()[0]) from None


def _build(kind: type[PackedCache], facts: dict, tensors: dict[str, Tensor]) -> PackedCache:
    if not isinstance(facts, dict) or facts.keys() != FACTS:
        raise ValueError(f"its facts must be {', '.join(sorted(FACTS))}")
    for name in SIZES:
        check_int(name, facts[name], 1)
    pages = facts["used_pages"]
    check_int("used_pages", pages, 0)
    layout = Layout(RotateKVOptions(**facts["options"]), *(facts[name] for name in SIZES))
    dtype = {str(known): known for known in FLOATING_DTYPES}.get(f"torch.{facts['dtype']}")
    if dtype is None:
        raise ValueError(f"cannot hold keys of {facts['dtype']}")
    if tensors["seq_offsets"].dim() != 1 or not len(tensors["seq_offsets"]):
        raise ValueError(f"seq_offsets must be [B+1], got {list(tensors['seq_offsets'].shape)}")
    sequences = tensors["seq_offsets"].shape[0] - 1
    sinks = (sequences, layout.options.sink_tokens, layout.heads)
    expected = {name: (shape, DTYPES[name[2:]]) for name, shape in layout.shapes(pages).items()}
    expected["seq_offsets"] = (sequences + 1,), torch.int64
    expected["page_offsets"] = (sequences + 1,), torch.int32
    expected["page_table"] = (pages,), torch.int32
    if layout.options.sink_tokens:
        expected["sink_k"] = (*sinks, layout.head_size), dtype
        expected["sink_v"] = (*sinks, layout.value_size), dtype
    order = tensors.get("channel_order")
    if order is not None:
        expected["channel_order"] = (layout.head_groups, layout.keys.channels), torch.int64
    if tensors.keys() != expected.keys():
        raise ValueError(f"holds other tensors than its options say: {', '.join(tensors.keys() ^ expected.keys())}")
    for name, (shape, wanted) in expected.items():
        x = tensors[name]
        if tuple(x.shape) != tuple(shape) or x.dtype != wanted:
            raise ValueError(f"{name} must be {list(shape)} {wanted}, got {list(x.shape)} {x.dtype}")
    _check_index(layout, tensors, pages)
    _check_values(tensors)
    if layout.sparse:
        _check_bitmap(layout, tensors)
    empty = kind.empty(layout, sequences, dtype, torch.device("cpu"), order)
    empty.packed = {name: tensors[name] for name in PACKED if name in tensors}
    for name in (*INDEX, "sink_k", "sink_v"):
        if name in tensors:
            setattr(empty, name, tensors[name])
    empty.used_pages = pages
    return empty


def _check_index(layout: Layout, tensors: dict[str, Tensor], pages: int) -> None:
    """The kernels follow the page table wherever it points, so it has to point into the pages."""
    lengths, counts = tensors["seq_offsets"].diff(), tensors["page_offsets"].diff()
    needed = ((lengths - layout.options.sink_tokens).clamp(min=0) + layout.page - 1) // layout.page
    table = tensors["page_table"].long().sort().values
    whole = int(tensors["seq_offsets"][0]) == 0 and int(tensors["page_offsets"][0]) == 0 and bool((lengths >= 0).all())
    if not (whole and torch.equal(needed, counts.long()) and torch.equal(table, torch.arange(pages))):
        raise ValueError("its offsets and page table do not fit together")


def _check_bitmap(layout: Layout, tensors: dict[str, Tensor]) -> None:
    """Every cached token keeps as many channels as the sparsity says: the kernels read codes of just as many."""
    lengths = (tensors["seq_offsets"].diff() - layout.options.sink_tokens).clamp(min=0)
    counts = tensors["page_offsets"].diff().long()
    place = torch.cat([torch.arange(count) for count in counts.tolist()]) if len(counts) else counts
    used = (lengths.repeat_interleave(counts) - place * layout.page).clamp(max=layout.page)
    expected = torch.zeros(len(place), layout.page, dtype=torch.int64)
    expected[tensors["page_table"].long()] = (torch.arange(layout.page) < used[:, None]).long() * layout.kept
    bytes_ = tensors["k_bitmap"].contiguous().view(torch.uint8).unflatten(-1, (-1, 8))  # [P, HG, C, 8], low bits first
    found = torch.stack([(bytes_ >> bit & 1).sum(2) for bit in range(8)], -1).flatten(-2)  # [P, HG, slots]
    if not torch.equal(found, expected[:, None].expand_as(found)):
        raise ValueError(f"k_bitmap does not keep {layout.kept} channels of every token, as its options say")


def _check_values(tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity: keys or values that were none were cached")
        if name.endswith("ranges") and (x[..., 0] < 0).any():
            raise ValueError(f"{name} holds a scale below 0")
    order = tensors.get("channel_order")
    if order is not None and not torch.equal(order.sort(-1).values, torch.arange(order.shape[1]).expand_as(order)):
        raise ValueError("channel_order does not hold each channel once")


def _checksum(facts: str, tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        found.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        found.update(x.flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return found.hexdigest()
