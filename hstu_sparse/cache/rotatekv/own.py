"""Compute a token's contribution to its own output beyond that of its codes, forward and backward, and codes'
gradients.

In `rotatekv_self_attention` dense attention reads every key and value from codes. A token sees itself exactly, so the
term

    self_term[t] = (1/N) (SiLU(scale * q[t].k[t] + b) * v[t]  -  SiLU(scale * q[t].k'[t] + b) * v'[t])

with k', v' from the codes and b the bias of a pair of one token, is added to that. Both kernels pass once over their
tensors. The backward kernel also adds the gradients of dense attention for q, k' and v', so that autograd adds nothing:
the gradients of k' and v' belong to k and v, straight through the codes.

Letters: T tokens, H heads, D query/key and V value head size, N normalizer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.buckets import MAX_BUCKETS, device_cells, num_time_buckets
from hstu_sparse.bias.scores import pair_bias
from hstu_sparse.core.launch import cdiv, multiprocessors, padded_head, run
from hstu_sparse.core.registration import once_only, register_preparation
from hstu_sparse.core.rows import as_rows
from hstu_sparse.tiles.rows import Rows, load_head, load_rows, silu, silu_and_grad, store_rows

# Tokens of a tile; programs of the backward kernel per multiprocessor; columns of a program's sums for the tables.
_TOKENS, _RESIDENT, _SUMS = 16, 8, 256
_POSITION = tl.constexpr(_SUMS - 1)  # the column of the position table's first entry: no bucket reaches it
assert _POSITION.value > MAX_BUCKETS


class TokenBias(NamedTuple):
    """The bias of a token with itself: tables and cells as in `pair_bias`, times [T], entries of the position table."""

    position: object
    time: object
    cells: object
    timestamps: object
    query_timestamps: object
    positions: object


@triton.jit
def token_bias(token, mask, bias):
    """Return (biases of the pairs of a token with itself, their time buckets), [tokens]."""
    query_times = 0
    key_times = 0
    if bias.time is not None:
        query_times = tl.load(bias.query_timestamps + token, mask, 0)
        key_times = tl.load(bias.timestamps + token, mask, 0)
    distance = tl.zeros_like(token)
    return pair_bias(distance, mask, query_times, key_times, bias.position, bias.time, bias.cells, bias.positions)


@triton.jit(do_not_specialize=["T"])
def rotatekv_own_fwd_kernel(
    q, k, v, coded_k, coded_v, self_term, bias, scale, inverse, T,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute R tokens of `self_term`; inverse: 1/N. q, k and v are `Rows`, bias is a `TokenBias`."""
    token = tl.program_id(0) * R + tl.arange(0, R)
    mask = token < T
    biases, _ = token_bias(token, mask, bias)
    for h in range(H):
        query = load_head(q, h, token, mask, D, PAD_D).to(tl.float32) * scale
        key = load_head(k, h, token, mask, D, PAD_D).to(tl.float32)
        coded_key = load_rows(coded_k + h * D, token, H * D, mask, D, PAD_D).to(tl.float32)
        value = load_head(v, h, token, mask, V, PAD_V).to(tl.float32)
        coded_value = load_rows(coded_v + h * V, token, H * V, mask, V, PAD_V).to(tl.float32)
        weight = silu(tl.sum(query * key, 1) + biases, False) * inverse
        coded_weight = silu(tl.sum(query * coded_key, 1) + biases, False) * inverse
        result = weight[:, None] * value - coded_weight[:, None] * coded_value
        store_rows(self_term + h * V, token, H * V, mask, result, V, PAD_V)


@triton.jit(do_not_specialize=["T"])
def rotatekv_own_bwd_kernel(
    q, k, v, coded_k, coded_v, dq, dk, dv, down, q_out, k_out, v_out, bias, sums, scale, inverse, T,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, R: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv (of q and the codes) plus the gradients by `self_term`, of every num_programs-th tile of R
    tokens.

    sums [programs, SUMS]: each program's sums for the time table's buckets, and at _POSITION for the position table.
    """
    column = tl.arange(0, SUMS)[None, :]
    total = tl.zeros([SUMS], tl.float32)
    for first in range(tl.program_id(0) * R, T, tl.num_programs(0) * R):
        token = first + tl.arange(0, R)
        mask = token < T
        biases, bucket = token_bias(token, mask, bias)
        dbias = tl.zeros([R], tl.float32)
        for h in range(H):
            query = load_head(q, h, token, mask, D, PAD_D).to(tl.float32)
            key = load_head(k, h, token, mask, D, PAD_D).to(tl.float32)
            coded_key = load_rows(coded_k + h * D, token, H * D, mask, D, PAD_D).to(tl.float32)
            value = load_head(v, h, token, mask, V, PAD_V).to(tl.float32)
            coded_value = load_rows(coded_v + h * V, token, H * V, mask, V, PAD_V).to(tl.float32)
            upstream = load_head(down, h, token, mask, V, PAD_V).to(tl.float32) * inverse
            weight, slope = silu_and_grad(tl.sum(query * key, 1) * scale + biases, False)
            coded_weight, coded_slope = silu_and_grad(tl.sum(query * coded_key, 1) * scale + biases, False)
            ds = slope * tl.sum(upstream * value, 1)
            coded_ds = -coded_slope * tl.sum(upstream * coded_value, 1)
            dbias += ds + coded_ds
            ds *= scale
            coded_ds *= scale
            grad = load_head(dq, h, token, mask, D, PAD_D).to(tl.float32)
            grad += ds[:, None] * key + coded_ds[:, None] * coded_key
            store_rows(q_out + h * D, token, H * D, mask, grad, D, PAD_D)
            grad = load_head(dk, h, token, mask, D, PAD_D).to(tl.float32)
            store_rows(k_out + h * D, token, H * D, mask, grad + (ds + coded_ds)[:, None] * query, D, PAD_D)
            grad = load_head(dv, h, token, mask, V, PAD_V).to(tl.float32)
            store_rows(v_out + h * V, token, H * V, mask, grad + (weight - coded_weight)[:, None] * upstream, V, PAD_V)
        if bias.time is not None:
            total += tl.sum(tl.where(bucket[:, None] == column, dbias[:, None], 0.0), 0)
        if bias.position is not None:
            total += tl.sum(tl.where(column == _POSITION, dbias[:, None], 0.0), 0)
    if sums is not None:
        tl.store(sums + tl.program_id(0) * SUMS + tl.arange(0, SUMS), total)


def _bias(position, time, timestamps, query_timestamps) -> TokenBias:
    cells = None if time is None else device_cells(num_time_buckets(time), time.device)
    positions = 0 if position is None else position.shape[0]
    return TokenBias(position, time, cells, timestamps, query_timestamps, positions)


def _constants(q, v) -> dict:
    d, size = q.shape[2], v.shape[2]
    return dict(H=q.shape[1], D=d, V=size, PAD_D=padded_head(d), PAD_V=padded_head(size), R=_TOKENS, num_warps=4)


def _own(q, k, v, coded_k, coded_v, position, time, timestamps, query_timestamps, scale, normalizer):
    self_term = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if self_term.numel():
        q, k, v = as_rows(q, k, v, align=False)
        run(
            rotatekv_own_fwd_kernel, cdiv(q.shape[0], _TOKENS), *map(Rows.of, (q, k, v)), coded_k, coded_v, self_term,
            _bias(position, time, timestamps, query_timestamps), scale, 1.0 / normalizer, q.shape[0],
            **_constants(q, v),
        )  # fmt: skip
    return [self_term]


def _gradients(
    dq, dk, dv, down, q, k, v, coded_k, coded_v, position, time, timestamps, query_timestamps, scale, normalizer
):
    outputs = _fake_gradients(dq, dk, dv, down, q, k, v, coded_k, coded_v, position, time)
    tokens = q.shape[0]
    programs = min(_RESIDENT * multiprocessors(q.device), cdiv(tokens, _TOKENS))
    tables = outputs[3:]
    sums = torch.zeros(programs, _SUMS, dtype=torch.float32, device=q.device) if tables else None
    if q.numel():
        rows, grads = (map(Rows.of, as_rows(*x, align=False)) for x in ((q, k, v), (dq, dk, dv, down)))
        run(
            rotatekv_own_bwd_kernel, programs, *rows, coded_k, coded_v, *grads, *outputs[:3],
            _bias(position, time, timestamps, query_timestamps), sums, scale, 1.0 / normalizer, tokens,
            **_constants(q, v), SUMS=_SUMS,
        )  # fmt: skip
    if tables:
        total = sums.sum(0)
        for grad in tables:
            grad.zero_()
        if position is not None:
            tables[0][:1] = total[_POSITION.value :]
        if time is not None:
            used = min(time.shape[0], MAX_BUCKETS + 1)
            tables[-1][:used] = total[:used]
    return outputs


def _fake_gradients(dq, dk, dv, down, q, k, v, coded_k, coded_v, position, time, *others):
    outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    return outputs + [torch.empty_like(table) for table in (position, time) if table is not None]


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor coded_k, Tensor coded_v, Tensor? position, Tensor? time, Tensor? timestamps, "
    "Tensor? query_timestamps, float scale, float normalizer"
)
own_operator = register_preparation(
    "rotatekv_own", _ARGUMENTS, launch=_own, fake=lambda q, k, v, *_: [v.new_empty(v.shape)]
)
gradients_operator = register_preparation(
    "rotatekv_own_gradients",
    f"Tensor dq, Tensor dk, Tensor dv, Tensor down, {_ARGUMENTS}",
    launch=_gradients,
    fake=_fake_gradients,
)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        ctx.save_for_backward(*arguments[:9])
        ctx.factors = arguments[9:]
        return arguments[0], arguments[3], arguments[4], own_operator(*arguments)[0]

    @staticmethod
    @once_only("rotatekv_self_attention in Triton")
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        dq, dk, dv, *tables = gradients_operator(*grads, *saved, *ctx.factors)
        tables = iter(tables)
        table_gradients = (None if table is None else next(tables) for table in saved[5:7])
        return dq, dk, dv, None, None, *table_gradients, None, None, None, None


def own_token_triton(q, k, v, coded_k, coded_v, bias, scale, normalizer):
    """Compute `reference.own_token` for checked arguments, on CUDA or interpreted."""
    return _Own.apply(q, k, v, coded_k, coded_v, *bias, scale, normalizer)
