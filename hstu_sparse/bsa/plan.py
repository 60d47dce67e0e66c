"""Plan the block-sparse kernels' look-ups of time buckets for a batch, once for all layers.

Letters: T tokens of the batch, B sequences, BS block size. tiles/rows.py explains the slots of blocks and tiles.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.buckets import (
    EXACT_SECONDS,
    TokenTimes,
    device_cells,
    extremes,
    num_time_buckets,
    split_times,
    tile_entry,
)
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.jagged import fingerprint
from hstu_sparse.core.launch import cdiv, run
from hstu_sparse.core.registration import register_preparation
from hstu_sparse.tiles.assembly import proven
from hstu_sparse.tiles.rows import locate

# The number of queries in a tile of the plan; BS if blocks are longer, so that no group of queries lies in two tiles.
MIN_TILE = tl.constexpr(64)
# Blocks that a program processes at a time.
_CHUNK = 16


class Purpose(NamedTuple):
    """The properties of a call that its plan depends on."""

    total: int
    num_seqs: int
    max_seq_len: int
    block_size: int
    num_buckets: int | None
    batch: str | None  # `fingerprint` of offsets and times; None without a time bias, since the plan is then empty

    @property
    def key(self) -> tuple:
        """Return the key that distinguishes the plans of one batch."""
        return "bsa_plan", *self._replace(total=0, num_seqs=0)


class BlockPlan(NamedTuple):
    """The result of `bsa_plan`; empty without a time bias.

    keys, queries  the times of keys and queries
    entries        [slots, at least min(N, T) / BS] int16: the `tile_entry` of a tile of max(BS, MIN_TILE) queries and a
                   block of keys, -1 also if either spans 2^24 seconds or more
    """

    purpose: Purpose
    keys: TokenTimes | None = None
    queries: TokenTimes | None = None
    entries: torch.Tensor | None = None

    def flat(self) -> list[torch.Tensor]:
        """Return the tensors as a list, for an operator's `Tensor?[]`."""
        return [] if self.entries is None else [*self.keys, *self.queries, self.entries]

    @staticmethod
    def from_flat(tensors: list[Any]) -> tuple[TokenTimes | None, TokenTimes | None, Any]:
        """Invert `flat`: return the times of keys, the times of queries and the entries."""
        return (TokenTimes(*tensors[:2]), TokenTimes(*tensors[2:4]), tensors[4]) if tensors else (None, None, None)


def tile_size(block_size: int) -> int:
    """Return the number of queries in a tile of the plan."""
    return max(block_size, MIN_TILE.value)


@triton.jit
def entries_row(start, b, begin, BS: tl.constexpr):
    """Return the row of the plan's entries for queries from position `begin` of sequence b, which begins at `start`."""
    SIZE: tl.constexpr = BS if BS > MIN_TILE else MIN_TILE
    return (start // SIZE + b + begin // SIZE).to(tl.int64)


@triton.jit(
    do_not_specialize=["B", "blocks"],
    do_not_specialize_on_alignment=["offsets", "timestamps", "query_timestamps"],
)
def bsa_entries_kernel(
    offsets, timestamps, query_timestamps, cells, entries, B, blocks, BS: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute, in one program, the entries of a tile of queries and all blocks up to the tile's end."""
    slot = tl.program_id(0)
    _b, start, length, i = locate(offsets, slot, B, TILE)
    if i * TILE < length:
        origin = tl.load(timestamps + start)
        t = i * TILE + tl.arange(0, TILE)
        first, last = extremes(query_timestamps + start + t, origin, t < length, 0)
        end = tl.minimum(i * TILE + TILE, length)
        for c in range(0, (end + BS - 1) // BS, CHUNK):
            j = c + tl.arange(0, CHUNK)
            s = j[:, None] * BS + tl.arange(0, BS)[None, :]
            key_first, key_last = extremes(timestamps + start + s, origin, s < length, 1)
            entry = tile_entry(first, last, key_first, key_last, cells, ASM)
            short = (last - first < EXACT_SECONDS) & (key_last - key_first < EXACT_SECONDS)
            entry = tl.where(short & (j * BS < length), entry, -1)
            tl.store(entries + slot.to(tl.int64) * blocks + j, entry.to(tl.int16), j < blocks)


def _entries(seq_offsets, timestamps, query_timestamps, max_seq_len, block_size, num_buckets):
    (entries,) = _fake_entries(seq_offsets, timestamps, query_timestamps, max_seq_len, block_size, num_buckets)
    if timestamps.shape[0] and entries.shape[0]:
        run(
            bsa_entries_kernel, (entries.shape[0],), seq_offsets, timestamps, query_timestamps,
            device_cells(num_buckets, seq_offsets.device), entries, seq_offsets.shape[0] - 1, entries.shape[1],
            BS=block_size, TILE=tile_size(block_size), CHUNK=_CHUNK, ASM=proven(seq_offsets.device), num_warps=4,
        )  # fmt: skip
    return [entries]


def _fake_entries(seq_offsets, timestamps, query_timestamps, max_seq_len, block_size, num_buckets):
    tokens = timestamps.shape[0]
    blocks = cdiv(torch.sym_min(max_seq_len, tokens) // block_size + 1, _CHUNK) * _CHUNK
    slots = tokens // tile_size(block_size) + seq_offsets.shape[0] - 1
    return [seq_offsets.new_zeros(slots, blocks, dtype=torch.int16)]


_SCHEMA = (
    "Tensor seq_offsets, Tensor timestamps, Tensor query_timestamps, SymInt max_seq_len, int block_size, "
    "int num_buckets"
)
_entries_operator = register_preparation("bsa_entries", _SCHEMA, _entries, _fake_entries)


def purpose_of(
    tokens: int, seq_offsets: torch.Tensor, max_seq_len: int, block_size: int, bias: RelativeBias
) -> Purpose:
    """Return the `Purpose` of a plan for these arguments."""
    buckets = num_time_buckets(bias.time)
    batch = None if buckets is None else fingerprint(seq_offsets, *bias[2:])
    return Purpose(tokens, seq_offsets.shape[0] - 1, max_seq_len, block_size, buckets, batch)


def make_plan(purpose: Purpose, seq_offsets: torch.Tensor, bias: RelativeBias) -> BlockPlan:
    """Compute `bsa_plan` for checked arguments."""
    if purpose.num_buckets is None:
        return BlockPlan(purpose)
    keys, queries = split_times(seq_offsets, *bias[2:])
    sizes = purpose.max_seq_len, purpose.block_size, purpose.num_buckets
    return BlockPlan(purpose, keys, queries, *_entries_operator(seq_offsets, *bias[2:], *sizes))
