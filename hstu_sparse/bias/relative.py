"""Define the relative bias by position and time: `RelativeBias`, its checks and `pair_bias` in plain PyTorch.

Every operator that scores pairs of tokens takes a `bias`. The score of query t and key s of a sequence gets the term

    b(t, s) = position[t - s] + time[bucket(query_timestamps[t] - timestamps[s])]
    bucket(x) = min(floor(ln(max(|x|, 1)) / 0.301), num_buckets)

A block of tokens a .. e-1 that is scored as one key has the position of its middle token, a + (e - a) // 2.

Letters: T tokens of the batch, Tq queries if they are not these tokens, N max_seq_len.

Source: Zhai et al., Actions Speak Louder than Words, ICML 2024, section 3.2 (arXiv 2402.17152) and its public code.
"""

import functools
import math
import struct
import typing
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hstu_sparse.core.jagged import check_storage, concrete
from hstu_sparse.core.registration import cached_constant

# The width of a time bucket in the natural logarithm of seconds.
BUCKET_WIDTH = 0.301


class RelativeBias(NamedTuple):
    """The bias tables, which all heads share, and the timestamps for the time bias.

    `query_timestamps` differs from `timestamps` if queries know the time of the event that they predict.

    Attributes:
        position: [N or more] floating point, indexed by distance in tokens; differentiable; None for no position bias.
        time: [num_buckets + 1] floating point, indexed by time bucket; differentiable; None for no time bias.
        timestamps: [T] int64, the times of the keys in seconds; required by `time`.
        query_timestamps: [T] int64, the times of the queries in seconds; `timestamps` by default.

    Examples:
        >>> position, time = torch.zeros(50), torch.zeros(129)  # distances 0 to 49 tokens, time buckets 0 to 128
        >>> bias = hstu_sparse.RelativeBias(position, time, timestamps=torch.tensor([0, 60, 3600]))
        >>> x = torch.randn(3, 2, 16)
        >>> hstu_sparse.hstu_attention(x, x, x, torch.tensor([0, 3]), max_seq_len=50, bias=bias).shape
        torch.Size([3, 2, 16])
    """

    position: Tensor | None = None
    time: Tensor | None = None
    timestamps: Tensor | None = None
    query_timestamps: Tensor | None = None


# The torch.library schema of a RelativeBias.
BIAS = "Tensor? position, Tensor? time, Tensor? timestamps, Tensor? query_timestamps"
_Arguments = TypeVar("_Arguments")


def unflatten_arguments(kind: type[_Arguments], flat: tuple, **bundles: type) -> _Arguments:
    """Return the named tuple `kind` for the arguments of an operator that torch.library passes one by one.

    Its member `bias` is a RelativeBias. bundles: name -> type of the members before `bias` that are named tuples.
    """
    named: Any = kind
    for name, bundle in (*bundles.items(), ("bias", RelativeBias)):
        at, members = named._fields.index(name), len(typing.cast(Any, bundle)._fields)
        flat = *flat[:at], bundle(*flat[at : at + members]), *flat[at + members :]
    return named(*flat)


def check_bias(
    bias: RelativeBias | None,
    positions: int,
    tokens: int,
    device: torch.device,
    *,
    query_tokens: int | None = None,
) -> RelativeBias:
    """Validate the metadata of an operator's `bias` and fill in defaults.

    Args:
        positions: the least size of the position table, N for most operators.
        tokens: T, the number of keys.
        device: the device of q, on which all tensors must be.
        query_tokens: Tq, the number of queries, if they are not the tokens of the keys; query_timestamps is then
            required.

    Returns:
        A RelativeBias, never None. It has both timestamps if it has a time table, otherwise neither.

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    if bias is None:
        return RelativeBias()
    if not isinstance(bias, RelativeBias):
        raise TypeError(f"bias must be a RelativeBias, got {type(bias).__name__}")
    for name, table in (("bias.position", bias.position), ("bias.time", bias.time)):
        if table is not None:
            _check_vector(name, table, device)
            if not table.is_floating_point():
                raise TypeError(f"{name} must be floating point, got {table.dtype}")
    if bias.position is not None:
        entries = bias.position.shape[0]
        if entries < positions:
            raise ValueError(f"bias.position must be [at least {positions}], got [{entries}]")
    if bias.time is not None:
        if bias.time.shape[0] < 1:
            raise ValueError("bias.time must be [num_buckets + 1], got an empty table")
        if bias.timestamps is None:
            raise ValueError(f"bias.time needs bias.timestamps [T={tokens}], got None")
        if bias.query_timestamps is None and query_tokens is not None:
            raise ValueError(f"bias.time needs bias.query_timestamps [Tq={query_tokens}], got None")
    queries = ("T", tokens) if query_tokens is None else ("Tq", query_tokens)
    for name, x, (letter, size) in (
        ("bias.timestamps", bias.timestamps, ("T", tokens)),
        ("bias.query_timestamps", bias.query_timestamps, queries),
    ):
        if x is not None:
            _check_vector(name, x, device)
            if x.dtype != torch.int64:
                raise TypeError(f"{name} must be int64 (seconds), got {x.dtype}")
            if x.shape[0] != size:
                raise ValueError(f"{name} must be [{letter}={size}], got [{x.shape[0]}]")
    if bias.time is None:
        return RelativeBias(bias.position)
    if bias.query_timestamps is None:
        return bias._replace(query_timestamps=bias.timestamps)
    return bias


def _check_vector(name: str, x: Tensor, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(x).__name__}")
    check_storage(name, x)
    if x.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}")


@functools.lru_cache(maxsize=64)
def bucket_edges(num_buckets: int) -> list[float]:
    """Return the lower edges of buckets 1 to num_buckets, rounded up to fp32 so that `x >= edge` is exact in fp32."""
    edges = []
    for k in range(1, num_buckets + 1):
        exponent = BUCKET_WIDTH * k
        exact = math.exp(exponent) if exponent < 88 else math.inf
        bits = struct.pack("f", exact)
        if struct.unpack("f", bits)[0] < exact:
            bits = struct.pack("I", struct.unpack("I", bits)[0] + 1)
        edges.append(struct.unpack("f", bits)[0])
    return edges


def time_bucket(difference: Tensor, num_buckets: int) -> Tensor:
    """Return min(floor(ln(max(|x|, 1)) / 0.301), num_buckets) for int64 x of any shape, as int32.

    A binary search in the bucket edges replaces the logarithm, whose rounding differs between machines. |x| is rounded
    to fp32, which is exact below 2^24.
    """
    edges = _edges_on(num_buckets, difference.device)
    return torch.bucketize(difference.abs().float(), edges, right=True, out_int32=True)


@cached_constant
def _edges_on(num_buckets: int, device: torch.device) -> Tensor:
    """Return `bucket_edges` on a device. Cached, since a captured CUDA graph may not copy from the host."""
    return torch.tensor(bucket_edges(num_buckets), dtype=torch.float32, device=device)


def pair_bias(
    bias: RelativeBias, distance: Tensor, query_times: Tensor | None = None, key_times: Tensor | None = None
) -> Tensor | float:
    """Return the biases b of pairs for the references: on any device, in any float dtype, differentiable in the tables.

    Args:
        bias: the result of `check_bias`; only its tables are read.
        distance: the position of the query minus that of the key, integers of any shape. A distance below 0, which
            the caller masks, reads entry 0.
        query_times, key_times: int64 seconds, required with a time table; they broadcast with each other, and their
            difference with `distance`.

    Returns:
        The biases in the broadcast shape; 0.0 without tables.
    """
    bias_sum: Tensor | float = 0.0
    if bias.position is not None:
        bias_sum = look_up(bias.position, distance.clamp(min=0))
    if bias.time is not None:
        assert query_times is not None and key_times is not None
        bias_sum = bias_sum + look_up(bias.time, time_bucket(query_times - key_times, bias.time.shape[0] - 1))
    return bias_sum


class _LookUp(torch.autograd.Function):
    """Look up table[index]. The gradient is a weighted bincount, on a CPU many times as fast as index_select's."""

    @staticmethod
    def forward(table, index):
        return table.index_select(0, index.flatten()).view(index.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, index = inputs
        ctx.save_for_backward(index)
        ctx.size, ctx.dtype = table.shape[0], table.dtype

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, *ctx.saved_tensors, ctx.size, ctx.dtype), None


class _Sum(torch.autograd.Function):
    """Sum the values [...] of each index, the gradient of `_LookUp`. The gradient of the sum is a look-up."""

    @staticmethod
    def forward(values, index, size, dtype):
        index, wide = index.flatten(), values.flatten().double()  # fp64: a bucket may sum millions of terms
        if concrete(index):
            return torch.bincount(index, weights=wide, minlength=size).to(dtype)
        return wide.new_zeros(size).index_add(0, index, wide).to(dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return _LookUp.apply(grad.to(ctx.dtype), index), None, None, None


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index] for a table of one dimension and an index of any shape; the gradient is deterministic.

    On CUDA the gradient is that of `embedding`, which sorts: bincount adds in any order and waits for the device.
    """
    if table.is_cuda:
        return torch.nn.functional.embedding(index, table[:, None]).squeeze(-1)
    if not torch.is_grad_enabled():  # the Function takes longer than the look-up
        return _LookUp.forward(table, index)
    return _LookUp.apply(table, index)
