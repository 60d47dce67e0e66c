"""Define what the launchers of this folder share: the kernels' bias, sums of gradients, blocks of keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from hstu_sparse.bias.gradients import Sums, TableSums
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import KernelBias
from hstu_sparse.core.launch import INTERPRET
from hstu_sparse.indexer.attention import POSITION_COPIES, TIME_COPIES

# The arguments of operators for a RelativeBias.
BIAS = "Tensor? position, Tensor? time, Tensor? timestamps, Tensor? query_timestamps"


def kernel_bias(bias: RelativeBias) -> KernelBias:
    """Return the bias for the kernels, with tables in fp32."""
    position, time = (None if table is None else table.float() for table in bias[:2])
    return KernelBias.of(bias._replace(position=position, time=time))


def table_sums(bias: RelativeBias, rows: int, bound: Callable[[], Tensor]) -> TableSums:
    """Allocate the tables' gradients. bound: returns a bound of what a row adds to all entries together."""
    deterministic, copies = torch.are_deterministic_algorithms_enabled(), (POSITION_COPIES.value, TIME_COPIES.value)
    return TableSums(bias[:2], copies, deterministic, lambda: (rows + 1.0) * bound().double())


def key_sums(x: Tensor, rows: int, bound: Callable[[], Tensor]) -> Sums:
    """Allocate the gradient of keys. bound: returns a bound of what a row adds to one number of all keys together."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Sums.zeros(x, (rows + 1.0) * bound().double() if deterministic else None)


def key_block(dtype: torch.dtype, width: int) -> int:
    """Return the number of chosen keys per step, so that a few tiles of `width` in all fit into shared memory."""
    if INTERPRET:
        return 32
    bytes_of_row = dtype.itemsize * width
    return 64 if bytes_of_row <= 512 else 32 if bytes_of_row <= 1024 else 16


def by_heads(x: Tensor) -> Tensor:
    """Return keys or values as [T, Hkv, size] also if they have one head, [T, size]."""
    return x[:, None] if x.dim() == 2 else x
