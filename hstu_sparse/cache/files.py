"""Save sequences of a pool in one safetensors file: their pages, facts (JSON: the format, sizes) and a checksum.

Pages are stored in the order of the sequences, so that the lengths alone assign pages to sequences.
"""

import dataclasses
import errno
import hashlib
import json
import os
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hstu_sparse.cache.format import PageFormat
from hstu_sparse.core.validation import FLOATING_DTYPES, check_bool, check_int

FORMAT = "hstu_sparse.pages.1"
FACTS = {"format", "layers", "num_pages", "num_sequences", "timed"}


def write_atomically(path, kind: str, facts: dict, tensors: dict[str, Tensor]) -> None:
    """Write tensors and facts to a safetensors file atomically; raise OSError if this fails."""
    from safetensors.torch import save as to_bytes

    path = Path(path)
    if path.exists() and not path.is_file():  # follows links
        raise FileExistsError(errno.EEXIST, "is not a regular file", str(path))
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    metadata = {"format": kind, "facts": text, "sha256": checksum(text, tensors)}
    # A random name, so that no two processes or threads write to the same file.
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
    except OSError as error:  # name the caller's path, not the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_checked(path, kind: str, build):
    """Return build(facts, tensors) for a file that `write_atomically` wrote; raise ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("is not a regular file")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != kind:
                raise ValueError(f"expected format {kind!r}, got {metadata.get('format')!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        text = metadata.get("facts", "")
        if metadata.get("sha256") != checksum(text, tensors):
            raise ValueError("damaged (its checksum differs from the one it was written with)")
        return build(json.loads(text), tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "not found" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
        raise ValueError(f"{str(path)[:200]}: {reason[:300]}".splitlines()[0]) from None


def checksum(facts: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the facts and of names, shapes, dtypes and values of the tensors."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        if x.numel():
            digest.update(memoryview(x.flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Raise ValueError if names, shapes or dtypes of a file's tensors are not the expected ones."""
    if tensors.keys() != expected.keys():
        raise ValueError(
            f"the tensors do not match the metadata: {', '.join(sorted(tensors.keys() ^ expected.keys()))}"
        )
    for name, (shape, dtype) in expected.items():
        x = tensors[name]
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
            raise ValueError(f"{name} must be {list(shape)} {dtype}, got {list(x.shape)} {x.dtype}")


def describe(format: PageFormat) -> dict:
    """Return a format as a dict of JSON values."""
    return dataclasses.asdict(format) | {"dtype": str(format.dtype).removeprefix("torch.")}


def format_from(facts: dict) -> PageFormat:
    """Return the format for a result of `describe`; raise ValueError or TypeError for anything else."""
    dtype = {str(known): known for known in FLOATING_DTYPES}.get(f"torch.{facts['dtype']}")
    if dtype is None:
        raise ValueError(f"dtype must be floating point, got {facts['dtype']}")
    return PageFormat(**facts | {"dtype": dtype})


def save(pool, path, rows: Sequence[array], lengths: Sequence[int], channel_order: Tensor | None = None) -> None:
    """Write the sequences of a pool to a file. channel_order: that of a RotateKV cache."""
    format, sinks = pool.format, int(pool.format.sink_tokens > 0)
    if len(rows) != len(lengths):
        raise ValueError(f"lengths must have one entry for each of {len(rows)} rows, got {len(lengths)}")
    pages, sequences = array("i"), array("i")
    for row, length in zip(rows, lengths):
        check_int("lengths", length, 0)
        count = format.num_pages(length)
        if length and len(row) < count + sinks:
            raise ValueError(f"the row of {length} tokens must have {count + sinks} entries, got {len(row)}")
        if length:
            pages.extend(row[sinks : sinks + count])
            sequences.extend(row[:sinks])
    if len(set(pages)) != len(pages) or len(set(sequences)) != len(sequences):
        raise ValueError("rows must not share pages")
    page, sequence = (torch.tensor(x, dtype=torch.int64, device=pool.device) for x in (pages, sequences))
    tensors = {"lengths": torch.tensor(list(lengths), dtype=torch.int64)}
    if pool.timed:
        tensors["timestamps"] = pool.timestamps[page]
    if channel_order is not None:
        tensors["channel_order"] = channel_order
    for layer, layer_tensors in enumerate(pool.tensors):
        for name, x in layer_tensors.items():
            tensors[f"{layer}.{name}"] = x[sequence if name.startswith("sink") else page]
    facts = {"format": describe(format), "layers": pool.layers, "timed": pool.timed}
    facts |= {"num_pages": pool.num_pages, "num_sequences": pool.num_sequences}
    write_atomically(path, FORMAT, facts, tensors)


def load(kind, path, device, num_pages: int | None, num_sequences: int | None, check=lambda *_: None):
    """Return (pool of class `kind`, rows, lengths, channel order); check(format, layers, tensors) may raise."""

    def checked(facts, tensors):
        _check(facts, tensors)
        check(format_from(facts["format"]), facts["layers"], tensors)
        return facts, tensors

    facts, tensors = read_checked(path, FORMAT, checked)
    format = format_from(facts["format"])
    lengths = tensors.pop("lengths").tolist()
    num_pages = facts["num_pages"] if num_pages is None else num_pages
    num_sequences = facts["num_sequences"] if num_sequences is None else num_sequences
    options = dict(layers=facts["layers"], num_sequences=num_sequences, timed=facts["timed"], device=device)
    pool = kind(format, num_pages, **options)
    rows = [pool.reserve([], length) for length in lengths]  # a new pool assigns pages in order
    into = {
        f"{layer}.{name}": x for layer, layer_tensors in enumerate(pool.tensors) for name, x in layer_tensors.items()
    }
    for name, x in (into | ({"timestamps": pool.timestamps} if pool.timed else {})).items():
        x[: len(tensors[name])] = tensors[name].to(pool.device)
    order = tensors.get("channel_order")
    return pool, rows, lengths, None if order is None else order.to(pool.device)


def _check(facts: dict, tensors: dict[str, Tensor]) -> None:
    if not isinstance(facts, dict) or facts.keys() != FACTS:
        raise ValueError(f"the metadata must have exactly {', '.join(sorted(FACTS))}")
    check_int("layers", facts["layers"], 1, len(tensors))
    format = format_from(facts["format"])
    lengths = tensors["lengths"]
    if lengths.dim() != 1 or lengths.dtype != torch.int64 or (lengths < 0).any():
        raise ValueError("lengths must be [sequences] int64, all at least 0")
    pages = int(((lengths + format.page_size - 1) // format.page_size).sum())
    sequences = int((lengths > 0).sum()) if format.sink_tokens else 0
    check_int("num_pages", facts["num_pages"], pages)
    check_int("num_sequences", facts["num_sequences"], sequences)
    shapes = format.shapes(pages) | format.sink_shapes(sequences)
    expected = {f"{layer}.{name}": x for layer in range(facts["layers"]) for name, x in shapes.items()}
    expected["lengths"] = (lengths.shape, torch.int64)
    check_bool("timed", facts["timed"])
    if facts["timed"]:
        expected["timestamps"] = ((pages, format.page_size), torch.int64)
    order = tensors.get("channel_order")
    if order is not None and format.bits is not None:
        shape = format.head_groups, format.keys.channels
        expected["channel_order"] = shape, torch.int64
    check_tensors(tensors, expected)
    if order is not None and not torch.equal(order.sort(-1).values, torch.arange(shape[1]).expand_as(order)):
        raise ValueError("each row of channel_order must be a permutation of the channels")
    for layer in range(facts["layers"]) if format.sparse else ():
        _check_bitmap(format, tensors[f"{layer}.k_bitmap"], lengths)


def _check_bitmap(format: PageFormat, bitmap: Tensor, lengths: Tensor) -> None:
    """Raise ValueError unless each token keeps `format.num_kept` channels, which the kernels require."""
    counts = (lengths + format.page_size - 1) // format.page_size
    place = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(count) for count in counts.tolist())])
    position = place[:, None] * format.page_size + torch.arange(format.page_size)
    packed = (position >= format.sink_tokens) & (position < lengths.repeat_interleave(counts)[:, None])
    bytes_ = bitmap.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))  # [P, HG, C, 8], low bits first
    num_marked = torch.stack([(bytes_ >> bit & 1).sum(2) for bit in range(8)], -1).flatten(-2)  # [P, HG, slots]
    if not torch.equal(num_marked, (packed * format.num_kept)[:, None].expand_as(num_marked)):
        raise ValueError(f"k_bitmap must keep {format.num_kept} channels of every token")
