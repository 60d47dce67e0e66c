"""Compute the means of blocks, the choice of blocks, and the inverse of that choice.

Letters: T tokens of the batch, B sequences, H heads, D query/key and V value head size, BS block size, S blocks chosen
per group, R tokens per group, NB block slots and NG group slots (see tiles/rows.py), M = H * NB lists of groups.

The inverse lists, for each block of keys, the groups that chose it. It is built on the device.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.bsa.bias import Side, pair_tile
from hstu_sparse.bsa.plan import entries_row
from hstu_sparse.core.launch import cdiv, next_power_of_2, run
from hstu_sparse.tiles.rows import head_slot_number, load_rows, locate

# Larger than any block index, so that it is sorted last. All ones, so that j ^ NO_BLOCK inverts the order of blocks.
NO_BLOCK = tl.constexpr(0x7FFFFFFF)
# Smaller than any packed sort key.
NO_KEY = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["B"])
def bsa_pool_fwd_kernel(
    k, v, offsets, kbar, kbar_low, vbar, strides, H, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the means of one block's keys and values. With SPLIT the mean key is stored as two 16-bit numbers.

    Attention is accurate with the mean key in 16 bits, but its rounding would decide close choices; the sum of the high
    and the low part is nearly fp32, and the tensor cores multiply them in two products.
    """
    slot, h = tl.program_id(0), tl.program_id(1)
    _b, start, length, j = locate(offsets, slot, B, BS)
    size = tl.minimum(length - j * BS, BS)
    if size <= 0:
        return
    rows = tl.arange(0, BS)
    live = rows < size
    first = start + j * BS
    keys = load_rows(k + first * strides.k_t + h * strides.k_h, rows, strides.k_t, live, D, BD)
    mean_k = tl.sum(keys.to(tl.float32), 0) / size
    values = load_rows(v + first * strides.v_t + h * strides.v_h, rows, strides.v_t, live, V, BV)
    mean_v = tl.sum(values.to(tl.float32), 0) / size
    d, e = tl.arange(0, BD), tl.arange(0, BV)
    row = slot.to(tl.int64) * H + h
    high = mean_k.to(kbar.dtype.element_ty)
    tl.store(kbar + row * D + d, high, mask=d < D)
    if SPLIT:
        tl.store(kbar_low + row * D + d, (mean_k - high.to(tl.float32)).to(kbar.dtype.element_ty), mask=d < D)
    tl.store(vbar + row * V + e, mean_v.to(vbar.dtype.element_ty), mask=e < V)


@triton.jit(do_not_specialize=["B"])
def bsa_choose_fwd_kernel(
    q, kbar, kbar_low, offsets, chosen, bias, plan_entries, blocks, strides, call, B,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
    P: tl.constexpr, SPLIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Choose the blocks of BG groups: scores of BC blocks at a time, merged into a running list of the P best.

    The high half of a sort key is the fp32 score, as an int32 of the same order, the low half the inverted block index:
    ties go to the smaller block. P is S rounded up to a power of two.

    chosen: the output. plan_entries: [slots, blocks], see `BlockPlan`.
    """
    scale, H, S = call.scale, call.H, call.S
    tile, h = tl.program_id(0), tl.program_id(1)
    b, start, length, i = locate(offsets, tile, B, BG * R)
    if i * BG * R >= length:
        return
    group = i * BG + tl.arange(0, BG)
    first = group * R
    live = first < length
    group_block = first // BS
    base = start // BS + b
    queries = load_rows(q + start * strides.q_t + h * strides.q_h, first, strides.q_t, live, D, BD)

    best = tl.full([BG, P], NO_KEY, tl.int64)
    candidates = tl.minimum((i * BG + BG - 1) * R, length - 1) // BS
    if S > 1:
        for c in range(0, candidates, BC):
            j = c + tl.arange(0, BC)
            mean_keys = load_rows(kbar + (base * H + h) * D, j, H * D, j < candidates, D, BD)
            score = tl.dot(queries, tl.trans(mean_keys), input_precision="ieee")
            if SPLIT:
                mean_keys = load_rows(kbar_low + (base * H + h) * D, j, H * D, j < candidates, D, BD)
                score = tl.dot(queries, tl.trans(mean_keys), score)
            # Unused groups and blocks get indices at which the tables have entries.
            middle = c * BS + BS // 2
            means = Side(start + middle, middle, tl.where(j < candidates, (j - c) * BS, 0).to(tl.int64))
            biases, _ = pair_tile(bias, Side(start, 0, tl.where(live, first, 0).to(tl.int64)), means, 0, ASM)
            score = 2.0 * (score * (0.5 * scale) + biases)
            score = score / (1.0 + tl.exp(-score))
            score = tl.where(score == 0.0, 0.0, score)  # -0 and 0 must tie
            bits = score.to(tl.int32, bitcast=True)
            bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            key = (bits.to(tl.int64) << 32) | (j ^ NO_BLOCK)[None, :].to(tl.int64)
            key = tl.where(j[None, :] < group_block[:, None], key, NO_KEY)
            # Both lists descend. With one of them reversed, the elementwise maxima are the P best, in bitonic order.
            best = tl.maximum(best, tl.flip(tl.topk(key, P), 1))
            best = tl.bitonic_merge(best, descending=True)

    p = tl.arange(0, P)[None, :]
    count = tl.minimum(group_block, S - 1)[:, None]
    j = tl.where(p < count, (best & NO_BLOCK).to(tl.int32) ^ NO_BLOCK, NO_BLOCK)
    j = tl.sort(j, descending=False)
    j = tl.where(p < count, j, tl.where(p == count, group_block[:, None], -1))
    row = (start // R + b + group).to(tl.int64)
    place = (row[:, None] * H + h) * S + p
    inside = live[:, None] & (p < S)
    tl.store(chosen.indices + place, j, mask=inside)
    if chosen.entries is not None:
        plan_row = entries_row(start, b, first, BS)[:, None] * blocks
        entries = tl.load(plan_entries + plan_row + j, inside & (j >= 0), 0)
        tl.store(chosen.entries + place, entries, mask=inside)


@triton.jit
def past_choices(
    indices, offsets, NB, together, H, B, S, BS: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Return the past blocks that the program's BG groups chose for one head, without their own blocks, [BG, P] each.

    Returns (indices into [NG, H, S], lists of the chosen blocks, mask of valid ones, first tokens of the groups
    [BG, 1]). P is S rounded up to a power of two.
    """
    tile, h = tl.program_id(0), tl.program_id(1)
    b, start, length, i = locate(offsets, tile, B, BG * R)
    group = i * BG + tl.arange(0, BG)
    p = tl.arange(0, P)[None, :]
    group_block = group[:, None] * R // BS
    place = ((start // R + b + group)[:, None] * H + h) * S + p
    past = (group[:, None] * R < length) & (p < S - 1) & (p < group_block)
    j = tl.load(indices + place, mask=past, other=0)
    block_list = head_slot_number(h, start // BS + b + j, NB, H, together)
    return place, block_list, past, (start + group[:, None] * R).to(tl.int32)


@triton.jit(do_not_specialize=["B", "NB", "together"])
def bsa_rank_kernel(
    indices, offsets, ranks, counts, NB, together, H, B, S,
    BS: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Count how often each block is chosen by groups outside of it; the counter's old value is the choice's rank."""
    place, block_list, past, _ = past_choices(indices, offsets, NB, together, H, B, S, BS, R, BG, P)
    rank = tl.atomic_add(counts + block_list, 1, mask=past, sem="relaxed")
    tl.store(ranks + place, rank, mask=past)


@triton.jit(do_not_specialize=["B", "NB", "together"])
def bsa_fill_kernel(
    indices, offsets, ranks, list_start, lists, entries, list_entries, NB, together, H, B, S,
    BS: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write each group's first token, and with a time bias its entries, to the lists of the blocks that it chose."""
    place, block_list, past, token = past_choices(indices, offsets, NB, together, H, B, S, BS, R, BG, P)
    target = tl.load(list_start + block_list, mask=past, other=0) + tl.load(ranks + place, mask=past, other=0)
    tl.store(lists + target, tl.broadcast_to(token, target.shape), mask=past)
    if entries is not None:
        tl.store(list_entries + target, tl.load(entries + place, mask=past, other=0), mask=past)


class ListPointers(NamedTuple):
    """The pointers of `Lists` that kernels read, and the number of entries of a chunk."""

    tokens: object
    start: object
    chunk_start: object
    chunk_list: object
    entries: object
    part_start: object
    chunk: object


@dataclass
class Lists:
    """The inverted choice: for each block the first tokens of the groups that chose it, in chunks of entries.

    With `rounds` > 1 there is a set of M lists for each slot of the choice, so that no group appears twice in a round.
    """

    tokens: Tensor  # [entries] int32
    entries: Tensor | None  # [entries] int16, with a time bias: see `BlockPlan`
    start: Tensor  # [rounds * M + 1] int32, first entry of each list
    chunk_start: Tensor  # [rounds * M + 1], first chunk of each list
    part_start: Tensor  # [rounds * M + 1], first partial result of each list with several chunks
    chunk_list: Tensor  # the list of each chunk; arbitrary past the last chunk
    chunk: int  # entries per chunk
    rounds: int
    chunks_per_round: int
    max_parts: int

    def pointers(self) -> ListPointers:
        return ListPointers(
            self.tokens, self.start, self.chunk_start, self.chunk_list, self.entries, self.part_start, self.chunk
        )  # fmt: skip


def invert(p, chosen: tuple[Tensor, Tensor | None], chunk_rows: int, *, by_slot: bool, stable: bool) -> Lists:
    """Build Lists; their sizes are upper bounds that the host knows.

    Args:
        p: the launcher's `Problem`.
        chosen: the launcher's `Chosen`.
        chunk_rows: tokens of a chunk.
        by_slot: build a set of lists for each slot of the choice except the group's own block.
        stable: order lists by token, the same in every run.
    """
    indices, entries = chosen
    int32 = dict(dtype=torch.int32, device=indices.device)
    M = p.H * p.NB
    rounds = p.S - 1 if by_slot else 1
    max_entries = p.NG * p.H * max(p.S - 1, 0)  # the group's own block is in no list
    if stable:
        tokens, start, list_entries = _sorted_lists(p, indices, entries, by_slot)
        counts = start.diff()
    else:
        tokens = torch.empty(max(max_entries, 1), **int32)
        counts = torch.zeros(M, **int32)
        list_entries = None if entries is None else torch.empty_like(tokens, dtype=torch.int16)
        ranks = torch.empty_like(indices)
        groups = 64
        grid, width = (p.slots(groups * p.R), p.H), max(2, next_power_of_2(p.S))
        shape = dict(BS=p.BS, R=p.R, BG=groups, P=width, num_warps=4)
        run(
            bsa_rank_kernel, grid, indices, p.offsets, ranks, counts,
            p.NB, p.blocks_together, p.H, p.B, p.S, **shape,
        )  # fmt: skip
    chunk = max(1, chunk_rows // p.R)
    # For each list the entries, the chunks (at least one), and the partial results, which only lists of several chunks
    # have. Rows are multiples of 16 bytes, since Triton recompiles a kernel when a pointer's alignment changes.
    chunks = torch.clamp((counts + (chunk - 1)) // chunk, min=1)
    sums = torch.zeros(3, cdiv(rounds * M + 1, 4) * 4, **int32)[:, : rounds * M + 1]
    torch.cumsum(torch.stack([counts, chunks, chunks * (chunks > 1)]), 1, dtype=torch.int32, out=sums[:, 1:])
    start, chunk_start, part_start = sums
    if not stable:
        run(
            bsa_fill_kernel, grid, indices, p.offsets, ranks, start, tokens, entries, list_entries,
            p.NB, p.blocks_together, p.H, p.B, p.S, **shape,
        )  # fmt: skip
    limit = max_entries // chunk + rounds * M
    chunk_list = torch.searchsorted(chunk_start, torch.arange(limit, **int32), right=True, out_int32=True) - 1
    per_round = limit if rounds == 1 else p.NG * p.H // chunk + M
    # A list of n > chunk entries has at most n / chunk + 1 <= 2 n / chunk chunks.
    return Lists(
        tokens, list_entries, start, chunk_start, part_start, chunk_list, chunk, rounds,
        per_round, 2 * max_entries // chunk + 1,
    )  # fmt: skip


def _sorted_lists(p, indices: Tensor, entries: Tensor | None, by_slot: bool):
    """Return the lists ordered by token, from a stable sort over all choices."""
    device, M = indices.device, p.H * p.NB
    begin = p.offsets[:-1].long()
    first_slot = begin // p.R + torch.arange(p.B, device=device)
    slot = torch.arange(p.NG, device=device)
    sequence = torch.searchsorted(first_slot, slot, right=True) - 1
    group = slot - first_slot[sequence]
    head, place = torch.arange(p.H, device=device)[:, None], torch.arange(p.S, device=device)
    rounds = p.S - 1 if by_slot else 1
    block = (begin // p.BS + torch.arange(p.B, device=device))[sequence, None, None] + indices
    first = block // p.blocks_together * p.blocks_together  # `head_slot_number`, tiles/rows.py
    key = first * p.H + head * (p.NB - first).clamp(max=p.blocks_together) + block - first
    if by_slot:
        key += place * M
    past = (indices >= 0) & (indices < (group * p.R // p.BS)[:, None, None])
    key = torch.where(past, key, rounds * M).int().flatten()
    key, order = key.sort(stable=True)
    tokens = (begin[sequence] + group * p.R).int()[order // (p.H * p.S)]
    start = torch.searchsorted(key, torch.arange(rounds * M + 1, dtype=torch.int32, device=device), out_int32=True)
    return tokens, start, None if entries is None else entries.flatten()[order]
