"""What the block-sparse kernels need to know of a batch's times: computed once a batch, shared by its layers.

Letters: T tokens of the batch, B sequences, BS block size, NB slots of blocks (see hstu_sparse/tiles.py).

Seconds are kept as two fp32 numbers, a multiple of 2^20 and the rest. The difference of two times is then right to the
last bit of fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.assembly import proven
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bsa.reach import CHUNK, LEAST_TILE, bsa_means_kernel, bucket_cells, find_bucket, own_places, span
from hstu_sparse.jagged import fingerprint
from hstu_sparse.launch import cdiv, run
from hstu_sparse.registration import register_preparation
from hstu_sparse.tiles import locate

# Zeros behind the tokens, which tiles past a batch's end read.
MARGIN = 256


class Purpose(NamedTuple):
    """What a plan was made for; with another of any of these it does not fit."""

    total: int
    num_seqs: int
    max_seq_len: int
    block_size: int
    num_buckets: int | None
    batch: str | None  # `fingerprint` of offsets and times; without a time bias a plan holds nothing of them

    @property
    def key(self) -> tuple:
        """What plans of one batch differ by."""
        return "bsa_plan", *self._replace(total=0, num_seqs=0)


class BlockPlan(NamedTuple):
    """See `bsa_plan`; without a time bias there is nothing in it.

    times  [4, at least T + MARGIN] fp32: the keys' high and low parts, the queries' high and low parts
    spans  [NB, 4] fp32: of each block's keys the earliest time (high, low) and the latest
    means  [slots, at least N / BS] int16: of tiles of queries and blocks' middle tokens the lowest bucket
    summaries  [slots, a CHUNK-th of that] int32: of CHUNK blocks together what `means_reach` gives behind it
    places  [at least T + MARGIN] fp32: of queries the time since their tile's earliest
    origins  [slots, 2] fp32: that earliest time
    key_places  as `places`, of keys the time since their block's earliest
    own  [NB, BS * BS] int16, see `own_places`: of each query and each key of the block it stands in the bucket
    """

    purpose: Purpose
    times: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    means: torch.Tensor | None = None
    summaries: torch.Tensor | None = None
    places: torch.Tensor | None = None
    origins: torch.Tensor | None = None
    key_places: torch.Tensor | None = None
    own: torch.Tensor | None = None


@triton.jit
def _split(seconds):
    low = seconds & 0xFFFFF
    return (seconds - low).to(tl.float32), low.to(tl.float32)


@triton.jit(
    do_not_specialize=["B", "pitch"],
    do_not_specialize_on_alignment=["offsets", "timestamps", "query_timestamps"],
)
def bsa_times_kernel(
    offsets, timestamps, query_timestamps, cells, times, spans, key_places, own, B, pitch,
    BS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One program: the tokens of a block, and the buckets between them, of ROWS queries at a time."""
    slot = tl.program_id(0)
    _b, start, length, j = locate(offsets, slot, B, BS)
    s = j * BS + tl.arange(0, BS)
    inside = s < length
    if j * BS < length:
        key_high, key_low = _split(tl.load(timestamps + start + s, inside, 0))
        tl.store(times + start + s, key_high, inside)
        tl.store(times + pitch + start + s, key_low, inside)
        found = span(key_high, key_low, inside, 0)
        tl.store(key_places + start + s, (key_high - found[0]) + (key_low - found[1]), inside)
        for i in tl.static_range(4):
            tl.store(spans + slot.to(tl.int64) * 4 + i, found[i])
        for i in tl.static_range(BS // ROWS):
            t = j * BS + i * ROWS + tl.arange(0, ROWS)
            live = t < length
            high, low = _split(tl.load(query_timestamps + start + t, live, 0))
            tl.store(times + 2 * pitch + start + t, high, live)
            tl.store(times + 3 * pitch + start + t, low, live)
            apart = (high[None, :] - key_high[:, None]) + (low[None, :] - key_low[:, None])
            place = own_places((i * ROWS + tl.arange(0, ROWS))[None, :], tl.arange(0, BS)[:, None], BS)
            bucket = find_bucket(apart, cells, ASM).to(own.dtype.element_ty)
            tl.store(own + slot.to(tl.int64) * (BS * BS) + place, bucket)  # also where no token is: tiles read it


def _times(seq_offsets, timestamps, query_timestamps, max_seq_len, block_size, num_buckets):
    times, spans, means, summaries, places, origins, key_places, own = found = _fake_times(
        seq_offsets, timestamps, query_timestamps, max_seq_len, block_size, num_buckets
    )
    # What no program writes.
    unwritten = times, spans, means, summaries, places, origins, key_places
    torch._foreach_zero_([x.view(torch.float32) for x in unwritten])
    if timestamps.shape[0] and spans.shape[0]:
        num_seqs, pitch, asm = seq_offsets.shape[0] - 1, times.shape[1], proven(seq_offsets.device)
        cells = bucket_cells(num_buckets, seq_offsets.device)
        run(
            bsa_times_kernel, spans.shape[0],
            seq_offsets, timestamps, query_timestamps, cells, times, spans, key_places, own, num_seqs, pitch,
            BS=block_size, ROWS=16, ASM=asm, num_warps=4,
        )  # fmt: skip
        run(
            bsa_means_kernel, means.shape[0],
            seq_offsets, times, cells, means, summaries, places, origins, num_seqs, pitch, means.shape[1],
            BS=block_size, TILE=max(block_size, LEAST_TILE.value), ASM=asm, num_warps=1,
        )  # fmt: skip
    return found


def _fake_times(seq_offsets, timestamps, query_timestamps, max_seq_len, block_size, num_buckets):
    tokens, num_seqs = timestamps.shape[0], seq_offsets.shape[0] - 1
    new = seq_offsets.new_empty
    # Rows stay multiples of 16 elements whatever T and N are: kernels are compiled anew where they do not. Of blocks a
    # tile may have 64.
    blocks = cdiv(torch.sym_min(max_seq_len, tokens) // block_size + 1, 64) * 64
    slots = tokens // max(block_size, LEAST_TILE.value) + num_seqs
    return [
        new(4, cdiv(tokens, 16) * 16 + MARGIN, dtype=torch.float32),
        new(tokens // block_size + num_seqs, 4, dtype=torch.float32),
        new(slots, blocks, dtype=torch.int16),
        new(slots, blocks // CHUNK.value, dtype=torch.int32),
        new(cdiv(tokens, 16) * 16 + MARGIN, dtype=torch.float32),
        new(slots, 2, dtype=torch.float32),
        new(cdiv(tokens, 16) * 16 + MARGIN, dtype=torch.float32),
        new(tokens // block_size + num_seqs, block_size**2, dtype=torch.int16),
    ]


_times_operator = register_preparation(
    "bsa_times",
    "Tensor seq_offsets, Tensor timestamps, Tensor query_timestamps, SymInt max_seq_len, int block_size, "
    "int num_buckets",
    launch=_times,
    fake=_fake_times,
)


def purpose_of(
    tokens: int, seq_offsets: torch.Tensor, max_seq_len: int, block_size: int, bias: RelativeBias
) -> Purpose:
    buckets = None if bias.time is None else bias.time.shape[0] - 1
    batch = None if buckets is None else fingerprint(seq_offsets, *bias[2:])
    return Purpose(tokens, seq_offsets.shape[0] - 1, max_seq_len, block_size, buckets, batch)


def make_plan(purpose: Purpose, seq_offsets: torch.Tensor, bias: RelativeBias) -> BlockPlan:
    """`bsa_plan` of checked arguments."""
    if purpose.num_buckets is None:
        return BlockPlan(purpose)
    sizes = purpose.max_seq_len, purpose.block_size, purpose.num_buckets
    return BlockPlan(purpose, *_times_operator(seq_offsets, *bias[2:], *sizes))
