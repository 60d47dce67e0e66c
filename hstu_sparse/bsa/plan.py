"""What the block-sparse kernels need to know of a batch's times: computed once a batch, shared by its layers.

Letters: T tokens of the batch, B sequences, BS block size, NB slots of blocks (see hstu_sparse/tiles.py).

Seconds are kept as two fp32 numbers, a multiple of 2^20 and the rest. The difference of two times is then right to the
last bit of fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.launch import cdiv
from hstu_sparse.registration import register_preparation
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.tiles import locate

# Zeros behind the tokens, which tiles past a batch's end read.
MARGIN = 256


class Purpose(NamedTuple):
    """What a plan was made for; with another of any of these it does not fit."""

    total: int
    num_seqs: int
    block_size: int
    timed: bool


class BlockPlan(NamedTuple):
    """See `bsa_plan`; without a time bias there is nothing in it.

    times  [4, at least T + MARGIN] fp32: the keys' high and low parts, the queries' high and low parts
    spans  [NB, 4] fp32: of each block's keys the earliest time (high, low) and the latest
    """

    purpose: Purpose
    times: torch.Tensor | None = None
    spans: torch.Tensor | None = None


@triton.jit
def span(high, low, mask, AXIS: tl.constexpr):
    """(high, low, high, low) of the earliest and of the latest of some times; infinite if there are none."""
    first = tl.min(tl.where(mask, high, float("inf")), AXIS)
    last = tl.max(tl.where(mask, high, float("-inf")), AXIS)
    first_low = tl.where(mask & (high == tl.expand_dims(first, AXIS)), low, float("inf"))
    last_low = tl.where(mask & (high == tl.expand_dims(last, AXIS)), low, float("-inf"))
    return first, tl.min(first_low, AXIS), last, tl.max(last_low, AXIS)


@triton.jit
def _split(seconds):
    low = seconds & 0xFFFFF
    return (seconds - low).to(tl.float32), low.to(tl.float32)


@triton.jit(
    do_not_specialize=["B", "pitch"],
    do_not_specialize_on_alignment=["offsets", "timestamps", "query_timestamps"],
)
def bsa_times_kernel(offsets, timestamps, query_timestamps, times, spans, B, pitch, BS: tl.constexpr):
    """One program: the tokens of a block."""
    slot = tl.program_id(0)
    _b, start, length, j = locate(offsets, slot, B, BS)
    row = j * BS + tl.arange(0, BS)
    inside = row < length
    if j * BS < length:
        token = times + start + row
        high, low = _split(tl.load(timestamps + start + row, inside, 0))
        tl.store(token, high, inside)
        tl.store(token + pitch, low, inside)
        found = span(high, low, inside, 0)
        for i in tl.static_range(4):
            tl.store(spans + slot.to(tl.int64) * 4 + i, found[i])
        high, low = _split(tl.load(query_timestamps + start + row, inside, 0))
        tl.store(token + 2 * pitch, high, inside)
        tl.store(token + 3 * pitch, low, inside)


def _times(seq_offsets, timestamps, query_timestamps, block_size):
    times, spans = found = _fake_times(seq_offsets, timestamps, query_timestamps, block_size)
    times.zero_()
    if timestamps.shape[0] and spans.shape[0]:
        bsa_times_kernel[(spans.shape[0],)](
            seq_offsets, timestamps, query_timestamps, times, spans, seq_offsets.shape[0] - 1, times.shape[1],
            BS=block_size, num_warps=1,
        )  # fmt: skip
    return found


def _fake_times(seq_offsets, timestamps, query_timestamps, block_size):
    tokens = timestamps.shape[0]
    new, kind = seq_offsets.new_empty, torch.float32
    slots = tokens // block_size + seq_offsets.shape[0] - 1
    # Rows stay multiples of 16 bytes whatever T is: kernels are compiled anew where they do not.
    return [new(4, cdiv(tokens, 16) * 16 + MARGIN, dtype=kind), new(slots, 4, dtype=kind)]


_times_operator = register_preparation(
    "bsa_times",
    "Tensor seq_offsets, Tensor timestamps, Tensor query_timestamps, int block_size",
    launch=_times,
    fake=_fake_times,
)


def purpose_of(tokens: int, seq_offsets: torch.Tensor, block_size: int, bias: RelativeBias) -> Purpose:
    return Purpose(tokens, seq_offsets.shape[0] - 1, block_size, bias.time is not None)


def make_plan(purpose: Purpose, seq_offsets: torch.Tensor, bias: RelativeBias) -> BlockPlan:
    """`bsa_plan` of checked arguments."""
    if not purpose.timed:
        return BlockPlan(purpose)
    return BlockPlan(purpose, *_times_operator(seq_offsets, *bias[2:], purpose.block_size))
