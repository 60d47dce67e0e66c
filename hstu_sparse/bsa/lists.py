"""Invert the choice of blocks: for each block of keys the groups that chose it, built on the device.

Letters: T tokens of the batch, B sequences, H heads, BS block size, S blocks chosen per group, R tokens per group, NB
block slots and NG group slots (see tiles/rows.py), M = H * NB lists of groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hstu_sparse.bsa import blocks
from hstu_sparse.bsa.parameters import ListPointers
from hstu_sparse.core.launch import cdiv, next_power_of_2, run


@dataclass
class Lists:
    """The inverted choice: for each block the first tokens of the groups that chose it, in chunks of entries.

    With `turns` > 1 there is one set of M lists per slot of the choice; within one turn no group appears twice.
    """

    tokens: Tensor  # [entries] int32
    entries: Tensor | None  # [entries] int16, with a time bias: see `BlockPlan`
    start: Tensor  # [turns * M + 1] int32, first entry of each list
    chunk_start: Tensor  # [turns * M + 1], first chunk of each list
    part_start: Tensor  # [turns * M + 1], first partial result of each list with several chunks
    chunk_list: Tensor  # the list of each chunk, past the last chunk any
    chunk: int  # entries per chunk
    turns: int
    chunks_per_turn: int
    max_parts: int

    def pointers(self) -> ListPointers:
        return ListPointers(
            self.tokens, self.start, self.chunk_start, self.chunk_list, self.entries, self.part_start, self.chunk
        )  # fmt: skip


def invert(p, indices: Tensor, entries: Tensor | None, chunk_rows: int, *, by_slot: bool, stable: bool) -> Lists:
    """Build Lists; their sizes are upper bounds that the host knows.

    Args:
        p: the launcher's `Problem`.
        indices: [NG, H, S] int32, the chosen blocks.
        entries: [NG, H, S] int16 with a time bias, see `BlockPlan`.
        chunk_rows: tokens of a chunk.
        by_slot: build a set of lists for each slot of the choice except the group's own block.
        stable: order lists by token, the same in every run.
    """
    int32 = dict(dtype=torch.int32, device=indices.device)
    M = p.H * p.NB
    turns = p.S - 1 if by_slot else 1
    most = p.NG * p.H * max(p.S - 1, 0)  # upper bound of entries: the group's own block is in no list
    if stable:
        tokens, start, list_entries = _sorted_lists(p, indices, entries, by_slot)
        counts = start.diff()
    else:
        tokens = torch.empty(max(most, 1), **int32)
        counts = torch.zeros(M, **int32)
        list_entries = None if entries is None else torch.empty_like(tokens, dtype=torch.int16)
        ranks = torch.empty_like(indices)
        groups = 64
        grid, width = (p.slots(groups * p.R), p.H), max(2, next_power_of_2(p.S))
        shape = dict(BS=p.BS, R=p.R, BG=groups, P=width, num_warps=4)
        run(
            blocks.bsa_rank_kernel, grid, indices, p.offsets, ranks, counts,
            p.NB, p.blocks_together, p.H, p.B, p.S, **shape,
        )  # fmt: skip
    chunk = max(1, chunk_rows // p.R)
    # Entries, chunks of each list (at least one), and partial results, which only lists of several chunks have. Rows of
    # a multiple of 16 bytes, since Triton compiles a kernel again when a pointer's alignment changes.
    chunks = torch.clamp((counts + (chunk - 1)) // chunk, min=1)
    sums = torch.zeros(3, cdiv(turns * M + 1, 4) * 4, **int32)[:, : turns * M + 1]
    torch.cumsum(torch.stack([counts, chunks, chunks * (chunks > 1)]), 1, dtype=torch.int32, out=sums[:, 1:])
    start, chunk_start, part_start = sums
    if not stable:
        run(
            blocks.bsa_fill_kernel, grid, indices, p.offsets, ranks, start, tokens, entries, list_entries,
            p.NB, p.blocks_together, p.H, p.B, p.S, **shape,
        )  # fmt: skip
    limit = most // chunk + turns * M
    chunk_list = torch.searchsorted(chunk_start, torch.arange(limit, **int32), right=True, out_int32=True) - 1
    per_turn = limit if turns == 1 else p.NG * p.H // chunk + M
    # A list of n > chunk entries has at most n / chunk + 1 <= 2 n / chunk chunks.
    return Lists(
        tokens, list_entries, start, chunk_start, part_start, chunk_list, chunk, turns,
        per_turn, 2 * most // chunk + 1,
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
    turns = p.S - 1 if by_slot else 1
    block = (begin // p.BS + torch.arange(p.B, device=device))[sequence, None, None] + indices
    first = block // p.blocks_together * p.blocks_together  # `numbered`, tiles.py
    key = first * p.H + head * (p.NB - first).clamp(max=p.blocks_together) + block - first
    if by_slot:
        key += place * M
    past = (indices >= 0) & (indices < (group * p.R // p.BS)[:, None, None])
    key = torch.where(past, key, turns * M).int().flatten()
    key, order = key.sort(stable=True)
    tokens = (begin[sequence] + group * p.R).int()[order // (p.H * p.S)]
    start = torch.searchsorted(key, torch.arange(turns * M + 1, dtype=torch.int32, device=device), out_int32=True)
    return tokens, start, None if entries is None else entries.flatten()[order]
