"""Define what the launchers of this folder share: metadata of the tokens, the kernels' bias, lists of pairs by key.

Letters: T tokens of the batch, B sequences, N entries of the position table, K chosen tokens per query.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.gradients import TableSums
from hstu_sparse.core.launch import INTERPRET, configuration

# Copies of a table's gradient that atomic additions are spread over. Most pairs fall into few time buckets.
POSITION_COPIES, TIME_COPIES = 4, 64


class Bias(NamedTuple):
    """The bias arguments of every kernel, in their order."""

    position: Tensor | None
    time: Tensor | None
    cells: Tensor | None
    timestamps: Tensor | None
    query_timestamps: Tensor | None
    positions: int


NO_BIAS = Bias(None, None, None, None, None, 0)


def kernel_bias(position, time, timestamps, query_timestamps) -> Bias:
    """Convert the tables to fp32 for the kernels."""
    cells = None if time is None else device_cells(num_time_buckets(time), time.device)
    position, time = (None if table is None else table.float() for table in (position, time))
    return Bias(position, time, cells, timestamps, query_timestamps, 0 if position is None else position.shape[0])


def table_sums(position, time, tokens: int, deterministic: bool, most) -> TableSums:
    """Allocate the tables' gradients; most: returns a bound of what one query adds to a cell."""
    copies = POSITION_COPIES, TIME_COPIES
    return TableSums((position, time), copies, deterministic, lambda: (tokens + 1.0) * most().double())


def pairs_by_key(indices: Tensor, rows: Tensor, total: int, group: int, *, local: bool) -> tuple[Tensor, Tensor, int]:
    """Return (pairs int64, starts [T + 1] int64, slots of a row): the pairs, as row * slots + slot, that chose each
    key.

    Those of key token i are pairs[starts[i]:starts[i+1]], ordered by row. Masked slots are in no list. local: the
    tokens of a group follow the slots of its choice.
    """
    if group == 1:
        begins, last = rows, torch.arange(total, device=indices.device) - rows
    else:
        begins, first, size = rows
        last = first - begins - 1
    visible = (indices >= 0) & (indices <= last[:, None])
    key = torch.where(visible, begins[:, None] + indices, total)
    if local:
        place = torch.arange(group, device=indices.device)
        key = torch.cat([key, torch.where(place < size[:, None], first[:, None] + place, total)], 1)
    slots, key = key.shape[1], key.flatten()
    key, pairs = key.int().sort(stable=True)
    bounds = torch.arange(total + 1, dtype=torch.int32, device=indices.device)
    return pairs, torch.searchsorted(key, bounds), slots


@configuration
def by_lists(deterministic: bool) -> bool:
    """Return whether the gradients of keys come from lists instead of atomic additions: see docs/indexer.md."""
    return deterministic


def key_block(dtype: torch.dtype, width: int) -> int:
    """Return the number of chosen keys per step, so that a few tiles of `width` in all fit into shared memory."""
    if INTERPRET:
        return 32
    bytes_of_row = dtype.itemsize * width
    return 64 if bytes_of_row <= 512 else 32 if bytes_of_row <= 1024 else 16


def key_layout(x: Tensor) -> tuple[int, tuple[int, int]]:
    """Return (the number of key heads, the strides of a token and of a key head) of x [T, size] or [T, Hkv, size]."""
    return (1, (x.stride(0), 0)) if x.dim() == 2 else (x.shape[1], x.stride()[:2])
