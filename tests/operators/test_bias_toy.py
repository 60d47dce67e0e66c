"""A toy operator with a relative bias, forward and backward: the example of docs/bias.md, compared with its reference.

    o[t] = sum over s <= t of (q[t].k[s] + b(t, s)) v[s]

Letters: T tokens of the batch, B sequences, N max_seq_len, D head size. There is one head.
"""

import pytest
import torch

from hstu_sparse.bias import relative
from tests.support import budgets as testing

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from hstu_sparse.bias.gradients import TableSums, add_to_tables  # noqa: E402
from hstu_sparse.bias.scores import KernelBias, load_times, table_bias  # noqa: E402
from hstu_sparse.tiles.rows import load_rows, locate  # noqa: E402

BLOCK, D = 16, 16


def toy_reference(q, k, v, offsets, N, position, time, times, query_times):
    bias, parts = relative.RelativeBias(position, time), []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        t = torch.arange(end - begin)
        asking_times, key_times = query_times[begin:end, None], times[begin:end]
        scores = q[begin:end] @ k[begin:end].mT + relative.pair_bias(bias, t[:, None] - t, asking_times, key_times)
        parts.append(scores.tril() @ v[begin:end])
    return torch.cat(parts)


@triton.jit
def toy_tile(q, k, t, s, begin, live, inside, bias, D: tl.constexpr):
    """Return (scores with their bias, 0 where not seen; distance, seen and buckets for the backward pass)."""
    distance = t[:, None] - s[None, :]
    seen = (distance >= 0) & live[:, None] & inside[None, :]
    query_times = load_times(bias.query_times, begin + t, live)[:, None]
    key_times = load_times(bias.key_times, begin + s, inside)[None, :]
    added, bucket = table_bias(bias, distance, seen, query_times, key_times)
    query, key = load_rows(q, begin + t, D, live, D, D), load_rows(k, begin + s, D, inside, D, D)
    return tl.where(seen, tl.dot(query, tl.trans(key)) + added, 0.0), query, key, distance, seen, bucket


@triton.jit
def toy_fwd_kernel(q, k, v, out, offsets, bias, B, BLOCK: tl.constexpr, D: tl.constexpr):
    """One program: BLOCK queries."""
    _, begin, length, tile = locate(offsets, tl.program_id(0), B, BLOCK)
    t = tile * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for block in range(0, tile + 1):
        s = block * BLOCK + tl.arange(0, BLOCK)
        scores = toy_tile(q, k, t, s, begin, t < length, s < length, bias, D)[0]
        acc = tl.dot(scores, load_rows(v, begin + s, D, s < length, D, D), acc)
    tl.store(out + (begin + t)[:, None] * D + tl.arange(0, D)[None, :], acc, (t < length)[:, None])


@triton.jit
def toy_bwd_kernel(
    do, q, k, v, dq, dk, dv, tables, offsets, bias, B, BLOCK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """One program: dq of BLOCK queries, and what they add to all other gradients."""
    _, begin, length, tile = locate(offsets, tl.program_id(0), B, BLOCK)
    t = tile * BLOCK + tl.arange(0, BLOCK)
    dout = load_rows(do, begin + t, D, t < length, D, D)
    acc = tl.zeros([BLOCK, D], tl.float32)
    columns = tl.arange(0, D)[None, :]
    for block in range(0, tile + 1):
        s = block * BLOCK + tl.arange(0, BLOCK)
        scores, query, key, distance, seen, bucket = toy_tile(q, k, t, s, begin, t < length, s < length, bias, D)
        value = load_rows(v, begin + s, D, s < length, D, D)
        dscores = tl.where(seen, tl.dot(dout, tl.trans(value)), 0.0)
        acc = tl.dot(dscores, key, acc)
        rows = (begin + s)[:, None] * D + columns
        tl.atomic_add(dk + rows, tl.dot(tl.trans(dscores), query), (s < length)[:, None])
        tl.atomic_add(dv + rows, tl.dot(tl.trans(scores), dout), (s < length)[:, None])
        add_to_tables(tables, dscores, distance, seen, bucket)
    tl.store(dq + (begin + t)[:, None] * D + columns, acc, (t < length)[:, None])


class Toy(torch.autograd.Function):
    """Attention by the toy kernels."""

    @staticmethod
    def forward(ctx, q, k, v, offsets, N, position, time, times, query_times):
        bias = relative.RelativeBias(position, time, *((times, query_times) if time is not None else ()))
        ctx.rest, ctx.tables, ctx.N = (offsets, KernelBias.from_bias(bias), len(offsets) - 1), (position, time), N
        ctx.grid = (len(q) // BLOCK + len(offsets) - 1,)
        ctx.save_for_backward(q, k, v)
        out = torch.empty_like(v)
        toy_fwd_kernel[ctx.grid](q, k, v, out, *ctx.rest, BLOCK, D)
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        tables, N = ctx.tables, ctx.N

        def bound():  # of T * N pairs each adds at most the product of two rows' norms
            return q.shape[0] * N * do.norm(dim=-1).amax().double() * v.norm(dim=-1).amax()

        sums = TableSums(tables, (1, 1), True, bound)
        arguments = do.contiguous(), q, k, v, dq, dk, dv, sums.arguments
        toy_bwd_kernel[ctx.grid](*arguments, *ctx.rest, BLOCK, D)
        grads = iter(sums.gradients())
        return dq, dk, dv, None, None, *(None if table is None else next(grads) for table in tables), None, None


def inputs(case="lengths that divide nothing", tables=("position", "time")):
    lengths, N = testing.EDGE_CASES[case]
    times = testing.make_timestamps(lengths)
    x = {name: testing.make_jagged(lengths, (D,), seed=i) for i, name in enumerate("qkv")}
    position, time = (torch.randn(n) if name in tables else None for name, n in (("position", N), ("time", 30)))
    relative.check_bias(relative.RelativeBias(position, time, times, times + 90), N, sum(lengths), times.device)
    return x | dict(
        offsets=testing.make_offsets(lengths), N=N, position=position, time=time, times=times, query_times=times + 90
    )


@pytest.mark.parametrize("tables", [(), ("position",), ("time",)])
def test_tables(tables):
    testing.compare_with_reference(lambda **x: Toy.apply(*x.values()), toy_reference, inputs(tables=tables))


@pytest.mark.parametrize("case", ["an empty sequence in the middle", "length 1", "N far above every length"])
def test_edge_cases(case):
    testing.compare_with_reference(lambda **x: Toy.apply(*x.values()), toy_reference, inputs(case))


def test_sums_do_not_depend_on_their_order():
    """The sums are the same bits with the sequences in reverse order."""
    x = inputs()
    lengths = x["offsets"].diff().tolist()
    turned = {n: torch.cat(y.split(lengths)[::-1]) if n in ("q", "k", "v", "times", "query_times") else y
              for n, y in x.items()} | {"offsets": testing.make_offsets(lengths[::-1])}  # fmt: skip
    results = [
        testing.gradients(lambda **x: Toy.apply(*x.values()), y, torch.ones(len(x["v"]), D)) for y in (x, turned)
    ]
    assert all(torch.equal(*(y[f"grad of {table}"] for y in results)) for table in ("position", "time"))
