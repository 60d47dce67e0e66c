"""What the launchers of this room share: metadata of the tokens, the bias as kernels take it, lists of pairs by key.

Letters: T tokens of the batch, B sequences, N entries of the position table, K chosen tokens per query.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.jagged import sequence_ids
from hstu_sparse.launch import INTERPRET, specialization, start
from hstu_sparse.time_buckets import device_cells

# Copies of a table's gradient that atomic additions are spread over. Of the time buckets a few get most pairs.
POSITION_COPIES, TIME_COPIES = 4, 64


class Bias(NamedTuple):
    """What every kernel's bias arguments are, in their order."""

    position: Tensor | None
    time: Tensor | None
    cells: Tensor | None
    timestamps: Tensor | None
    query_timestamps: Tensor | None
    positions: int


NO_BIAS = Bias(None, None, None, None, None, 0)


def kernel_bias(position, time, timestamps, query_timestamps) -> Bias:
    cells = None if time is None else device_cells(time.shape[0] - 1, time.device)
    return Bias(position, time, cells, timestamps, query_timestamps, 0 if position is None else position.shape[0])


def token_begins(seq_offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(first token of each token's sequence, the sequence) [T] int64."""
    sequence = sequence_ids(seq_offsets, total)
    return seq_offsets.long()[sequence], sequence


class TableGradients:
    """Where kernels add up the gradients of the bias tables, and what becomes of the sums.

    Sums by atomic additions in fp32 depend in their last bits on the order of additions. In deterministic mode the
    cells are integers, whose sums do not: multiples of 1 / unit, with the unit so small that 2^62 holds what all
    queries together can add to one cell. `most` bounds what one query can.
    """

    def __init__(self, bias: Bias, tokens: int, deterministic: bool, most):
        self.tables = bias.position, bias.time
        device = next((table.device for table in self.tables if table is not None), None)
        self.unit = None
        if device is not None and deterministic:
            most = most().float().clamp(min=1e-30)
            self.unit = torch.exp2(62 - math.ceil(math.log2(tokens + 1)) - most.log2().ceil()).clamp(max=2.0**100)
        dtype = torch.float32 if self.unit is None else torch.int64
        self.position, self.time = (
            None if table is None else torch.zeros(copies, table.shape[0], dtype=dtype, device=device)
            for table, copies in zip(self.tables, (POSITION_COPIES, TIME_COPIES))
        )
        self.buckets = 0 if bias.time is None else bias.time.shape[0]

    def finish(self) -> list[Tensor]:
        """The gradients of those tables that there are."""
        found = []
        for table, copies in zip(self.tables, (self.position, self.time)):
            if table is not None:
                total = copies.sum(0) if self.unit is None else copies.sum(0).double() / self.unit.double()
                found.append(total.to(table.dtype))
        return found


def pairs_by_key(indices: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """(pairs [T * K] int64, starts [T + 1] int64): of each key the pairs, as t * K + slot, that chose it.

    Those of key token i are pairs[starts[i]:starts[i+1]], in the order of t. Masked slots are in no list.
    """
    total = indices.shape[0]
    token = torch.arange(total, device=indices.device)
    visible = (indices >= 0) & (indices <= (token - begins)[:, None])
    key = torch.where(visible, begins[:, None] + indices, total).flatten()
    key, pairs = key.int().sort(stable=True)
    bounds = torch.arange(total + 1, dtype=torch.int32, device=indices.device)
    return pairs, torch.searchsorted(key, bounds)


def by_lists(deterministic: bool) -> bool:
    """Whether the gradients of keys come from lists in place of atomic additions: see docs/indexer.md."""
    return deterministic or _force_lists


# For the benchmark, which measures both.
_force_lists = False


def run(kernel, programs: int, arguments: tuple, constants: dict, **options) -> None:
    start(kernel, programs, arguments, constants, options, specialization(arguments))


class Launch(NamedTuple):
    """Chosen keys per step and Triton's options of one kernel."""

    BLOCK: int
    num_warps: int
    num_stages: int


def key_block(dtype: torch.dtype, width: int) -> int:
    """Chosen keys per step: as many as leave room in shared memory for a few tiles of `width` in all."""
    if INTERPRET:
        return 32
    bytes_of_row = dtype.itemsize * width
    return 64 if bytes_of_row <= 512 else 32 if bytes_of_row <= 1024 else 16
