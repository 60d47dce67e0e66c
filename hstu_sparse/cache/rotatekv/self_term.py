"""Correct the attention of each token to itself in `rotatekv_self_attention`: kernels and operator.

Dense attention to quantised keys k' and values v' also quantises each token's key and value for itself. The term

    self_term[t] = (1/N) (SiLU(scale * q[t].k[t] + b) * v[t]  -  SiLU(scale * q[t].k'[t] + b) * v'[t])

replaces that by exact attention; b is the bias of a token with itself. The gradient of k' is added to that of k, and
the gradient of v' to that of v, as if there were no quantisation. Both kernels read each tensor once.

Letters: T tokens, H heads, D query/key and V value head size, N normalizer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.bias.buckets import MAX_BUCKETS
from hstu_sparse.bias.relative import BIAS, RelativeBias, unflatten_arguments
from hstu_sparse.bias.scores import KernelBias, load_times, table_bias
from hstu_sparse.core.launch import cdiv, multiprocessors, padded_head, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.tiles.rows import Rows, as_rows, load_head, load_rows, silu, silu_and_grad, store_rows

# Tokens of a tile, programs of the backward kernel per multiprocessor, columns of a program's sums for the tables.
_TOKENS, _PROGRAMS, _SUMS = 16, 8, 256
_POSITION = tl.constexpr(_SUMS - 1)  # the column for entry 0 of the position table, after those of the buckets
assert _POSITION.value > MAX_BUCKETS


@triton.jit
def self_bias(token, mask, bias):
    """Return (biases of each token with itself, their time buckets), [tokens]."""
    query_times = load_times(bias.query_times, token, mask)
    key_times = load_times(bias.key_times, token, mask)
    return table_bias(bias, tl.zeros_like(token), mask, query_times, key_times)


@triton.jit(do_not_specialize=["T"])
def rotatekv_self_term_fwd_kernel(
    q, k, v, coded_k, coded_v, self_term, bias, scale, inverse, T,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute `self_term` for R tokens. q, k, v: `Rows`; bias: `KernelBias`; inverse: 1/N."""
    token = tl.program_id(0) * R + tl.arange(0, R)
    mask = token < T
    pair_biases, _ = self_bias(token, mask, bias)
    for h in range(H):
        query = load_head(q, h, token, mask, D, PAD_D).to(tl.float32) * scale
        key = load_head(k, h, token, mask, D, PAD_D).to(tl.float32)
        coded_key = load_rows(coded_k + h * D, token, H * D, mask, D, PAD_D).to(tl.float32)
        value = load_head(v, h, token, mask, V, PAD_V).to(tl.float32)
        coded_value = load_rows(coded_v + h * V, token, H * V, mask, V, PAD_V).to(tl.float32)
        weight = silu(tl.sum(query * key, 1) + pair_biases, False) * inverse
        coded_weight = silu(tl.sum(query * coded_key, 1) + pair_biases, False) * inverse
        result = weight[:, None] * value - coded_weight[:, None] * coded_value
        store_rows(self_term + h * V, token, H * V, mask, result, V, PAD_V)


@triton.jit(do_not_specialize=["T"])
def rotatekv_self_term_bwd_kernel(
    q, k, v, coded_k, coded_v, grad, dq, dk, dv, bias, sums, scale, inverse, T,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, R: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and v for every num_programs-th tile of R tokens.

    sums: [programs, SUMS], the gradients of the time table's buckets, and in column _POSITION of the position table.
    """
    column = tl.arange(0, SUMS)[None, :]
    total = tl.zeros([SUMS], tl.float32)
    for first in range(tl.program_id(0) * R, T, tl.num_programs(0) * R):
        token = first + tl.arange(0, R)
        mask = token < T
        pair_biases, bucket = self_bias(token, mask, bias)
        dbias = tl.zeros([R], tl.float32)
        for h in range(H):
            query = load_head(q, h, token, mask, D, PAD_D).to(tl.float32)
            key = load_head(k, h, token, mask, D, PAD_D).to(tl.float32)
            coded_key = load_rows(coded_k + h * D, token, H * D, mask, D, PAD_D).to(tl.float32)
            value = load_head(v, h, token, mask, V, PAD_V).to(tl.float32)
            coded_value = load_rows(coded_v + h * V, token, H * V, mask, V, PAD_V).to(tl.float32)
            upstream = load_head(grad, h, token, mask, V, PAD_V).to(tl.float32) * inverse
            weight, slope = silu_and_grad(tl.sum(query * key, 1) * scale + pair_biases, False)
            coded_weight, coded_slope = silu_and_grad(tl.sum(query * coded_key, 1) * scale + pair_biases, False)
            ds = slope * tl.sum(upstream * value, 1)
            coded_ds = -coded_slope * tl.sum(upstream * coded_value, 1)
            dbias += ds + coded_ds
            ds *= scale
            coded_ds *= scale
            query_grad = ds[:, None] * key + coded_ds[:, None] * coded_key
            store_rows(dq + h * D, token, H * D, mask, query_grad, D, PAD_D)
            store_rows(dk + h * D, token, H * D, mask, (ds + coded_ds)[:, None] * query, D, PAD_D)
            store_rows(dv + h * V, token, H * V, mask, (weight - coded_weight)[:, None] * upstream, V, PAD_V)
        if bias.time is not None:
            total += tl.sum(tl.where(bucket[:, None] == column, dbias[:, None], 0.0), 0)
        if bias.position is not None:
            total += tl.sum(tl.where(column == _POSITION, dbias[:, None], 0.0), 0)
    if sums is not None:
        tl.store(sums + tl.program_id(0) * SUMS + tl.arange(0, SUMS), total)


class Arguments(NamedTuple):
    """The arguments of the operator, see `reference.self_term`."""

    q: Tensor
    k: Tensor
    v: Tensor
    coded_k: Tensor
    coded_v: Tensor
    bias: RelativeBias
    scale: float
    normalizer: float

    @property
    def inputs(self) -> tuple:
        """The tensors among the arguments of the kernels."""
        return *map(Rows.of, as_rows(self.q, self.k, self.v, align=False)), self.coded_k, self.coded_v

    @property
    def constants(self) -> dict[str, int]:
        (_, heads, d), size = self.q.shape, self.v.shape[2]
        return dict(H=heads, D=d, V=size, PAD_D=padded_head(d), PAD_V=padded_head(size), R=_TOKENS, num_warps=4)


def _forward(*arguments):
    a = unflatten_arguments(Arguments, arguments)
    self_term = torch.empty(a.v.shape, dtype=a.v.dtype, device=a.v.device)
    tokens = len(a.q)
    if self_term.numel():
        run(
            rotatekv_self_term_fwd_kernel, cdiv(tokens, _TOKENS), *a.inputs, self_term, KernelBias.from_bias(a.bias),
            a.scale, 1.0 / a.normalizer, tokens, **a.constants,
        )  # fmt: skip
    return self_term


def _backward(grad, *arguments):
    a = unflatten_arguments(Arguments, arguments)
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a.q, a.k, a.v)]
    tables = [torch.zeros_like(table) for table in a.bias[:2] if table is not None]
    tokens, device = len(a.q), a.q.device
    programs = min(_PROGRAMS * multiprocessors(device), cdiv(tokens, _TOKENS))
    sums = torch.zeros(programs, _SUMS, dtype=torch.float32, device=device) if tables else None
    if a.q.numel():
        (grad,) = as_rows(grad, align=False)
        run(
            rotatekv_self_term_bwd_kernel, programs, *a.inputs, Rows.of(grad), *gradients,
            KernelBias.from_bias(a.bias), sums, a.scale, 1.0 / a.normalizer, tokens, **a.constants, SUMS=_SUMS,
        )  # fmt: skip
    if sums is not None:
        total = sums.sum(0)
        if a.bias.position is not None:
            tables[0][:1] = total[_POSITION.value :]
        if a.bias.time is not None:
            used = min(a.bias.time.shape[0], MAX_BUCKETS + 1)
            tables[-1][:used] = total[:used]
    return gradients + tables


_SCHEMA = f"Tensor q, Tensor k, Tensor v, Tensor coded_k, Tensor coded_v, {BIAS}, float scale, float normalizer"
self_term_operator = Operator(
    "rotatekv_self_term", _SCHEMA, _forward, _backward, lambda q, k, v, *_: v.new_empty(v.shape), "q k v position time"
)
