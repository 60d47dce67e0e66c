"""What the launchers of this room share: metadata of the tokens, the bias as kernels take it, lists of pairs by key.

Letters: T tokens of the batch, B sequences, N entries of the position table, K chosen tokens per query.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.gradients import TableSums
from hstu_sparse.jagged import sequence_ids
from hstu_sparse.launch import INTERPRET, configuration

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
    cells = None if time is None else device_cells(num_time_buckets(time), time.device)
    return Bias(position, time, cells, timestamps, query_timestamps, 0 if position is None else position.shape[0])


def token_begins(seq_offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(first token of each token's sequence, the sequence) [T] int64."""
    sequence = sequence_ids(seq_offsets, total)
    return seq_offsets.long()[sequence], sequence


def table_sums(bias: Bias, tokens: int, deterministic: bool, most) -> TableSums:
    """Memory for the tables' gradients; most: gives a bound of what one query adds to a cell."""
    copies = POSITION_COPIES, TIME_COPIES
    return TableSums((bias.position, bias.time), copies, deterministic, lambda: (tokens + 1.0) * most().double())


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


@configuration
def by_lists(deterministic: bool) -> bool:
    """Whether the gradients of keys come from lists in place of atomic additions: see docs/indexer.md."""
    return deterministic


def key_block(dtype: torch.dtype, width: int) -> int:
    """Chosen keys per step: as many as leave room in shared memory for a few tiles of `width` in all."""
    if INTERPRET:
        return 32
    bytes_of_row = dtype.itemsize * width
    return 64 if bytes_of_row <= 512 else 32 if bytes_of_row <= 1024 else 16
