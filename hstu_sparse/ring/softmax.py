"""Compute softmax attention round a ring: the steps of both passes, in Triton or the reference (CuTe: softmax_cute.py).

Letters: T tokens of this rank, H heads of queries, Hkv of keys and values, D query/key and V value head size.

The output and its log-sum-exp are merged block by block, and all sums are in fp32 (fp64 for fp64 inputs), over the
steps of the ring too: rounding to 16 bits after each step makes other rings drift. The last step's kernels round the
results.

A ring needs several times the memory of its results for blocks in transfer, their gradients and sums. Therefore only
some heads of long sequences go round at a time: as many as keep the device busy.
"""

import torch

from hstu_sparse.core.launch import cdiv, on_device
from hstu_sparse.core.precision import without_autocast, working_dtype
from hstu_sparse.core.registration import once_only
from hstu_sparse.flash import reference
from hstu_sparse.flash.problem import Options
from hstu_sparse.ring import softmax_cute
from hstu_sparse.ring.communication import Ring, backward_round
from hstu_sparse.ring.plan import RingPlan

# Tiles of 128 tokens, over the heads that go round together: about four times what a large device processes at once.
TILES = 1024


def head_groups(heads: int, kv_heads: int, plan: RingPlan, options: Options) -> list[tuple[slice, slice, Options]]:
    """Return (heads of queries, heads of keys, their options) that go round together; the same on every rank.

    With dropout all heads do, since the dropped weights depend on the number of the head.
    """
    heads_together = kv_heads if options.dropout else cdiv(TILES, max(1, max(plan.tokens) // 128))
    count, group = cdiv(kv_heads, heads_together), heads // kv_heads
    if count == 1:
        return [(slice(0, heads), slice(0, kv_heads), options)]
    groups = []
    for i in range(count):
        keys = slice(i * kv_heads // count, (i + 1) * kv_heads // count)
        queries = slice(keys.start * group, keys.stop * group)
        slopes = options.slopes
        if slopes is not None:
            slopes = slopes[..., queries].contiguous()
        groups.append((queries, keys, options._replace(slopes=slopes)))
    return groups


class RingSoftmax(torch.autograd.Function):
    """Compute (out [T, H, V], lse [H, T]) of q [T, H, D], k [T, Hkv, D], v [T, Hkv, V]; lse has no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, ring: Ring, plan: RingPlan, options: Options, backend: str):
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=working_dtype(q.dtype), device=q.device)
        forward = _forward[backend]
        with on_device(q.device):
            for queries, keys, some in head_groups(q.shape[1], k.shape[1], plan, options):
                forward(q[:, queries], [k[:, keys], v[:, keys]], ring, plan, some, out[:, queries], lse[queries])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = ring, plan, options, backend
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_only("ring_flash_attention")
    @without_autocast
    def backward(ctx, grad, _):
        if grad is None:
            return (None,) * 7
        q, k, v, out, lse = ctx.saved_tensors
        ring, plan, options, backend = ctx.rest
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        backward = _backward[backend]
        with on_device(q.device):
            for queries, keys, some in head_groups(q.shape[1], k.shape[1], plan, options):
                backward(
                    grad[:, queries], q[:, queries], [k[:, keys], v[:, keys]], ring, plan, some, out[:, queries],
                    lse[queries], dq[:, queries], [dk[:, keys], dv[:, keys]],
                )  # fmt: skip
        return dq, dk, dv, None, None, None, None


# Each of these functions processes some heads, and writes out and lse, or dq and the list dkv of dk and dv.


def _forward_triton(q, block, ring: Ring, plan: RingPlan, options: Options, out, lse) -> None:
    from hstu_sparse.flash.launch import Launch

    sums = torch.empty(out.shape, dtype=lse.dtype, device=out.device)
    for step, (source, (k, v)) in enumerate(ring.blocks(block, plan.tokens)):
        launch = Launch(q, k, v, plan.layout(source), options)
        launch.forward(out if step == ring.world - 1 else sums, lse, before=sums if step else None)


def _backward_triton(grad, q, block, ring: Ring, plan: RingPlan, options: Options, out, lse, dq, dkv) -> None:
    from hstu_sparse.flash.launch import Launch

    sums = torch.empty(dq.shape, dtype=lse.dtype, device=dq.device)
    local_launch = launch = Launch(q, *block, plan.layout(ring.rank), options)
    rows = local_launch.rows(out, grad, lse)

    def add_dq(source, key_value):
        last = source == (ring.rank + 1) % ring.world
        launch.dq(grad, rows, dq if last else sums, before=None if source == ring.rank else sums)

    def find_dkv(source, key_value, earlier):
        nonlocal launch  # used next for the block's dq
        target = earlier
        if source == ring.rank:
            launch, target = local_launch, dkv
        else:
            launch = Launch(q, *key_value, plan.layout(source), options)
            if earlier is None:
                target = [torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in key_value]
        launch.dkv(grad, rows, *target, sums=earlier)
        return target

    backward_round(ring, block, plan.tokens, add_dq, find_dkv)


def _forward_reference(q, block, ring: Ring, plan: RingPlan, options: Options, out, lse) -> None:
    sums = torch.zeros(out.shape, dtype=lse.dtype, device=out.device)
    lse.fill_(-torch.inf)
    for source, (k, v) in ring.blocks(block, plan.tokens):
        reference.forward_step(q, k, v, plan.layout(source), options, sums, lse)
    out.copy_(sums)


def _backward_reference(grad, q, block, ring: Ring, plan: RingPlan, options: Options, out, lse, dq, dkv) -> None:
    sums = torch.zeros(dq.shape, dtype=lse.dtype, device=dq.device)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T

    def add_dq(source, key_value):
        """Do nothing: dq is computed with the other gradients."""

    def find_dkv(source, key_value, earlier):
        more = reference.backward_step(grad, q, *key_value, plan.layout(source), options, lse, delta, sums)
        return more if earlier is None else [x + y for x, y in zip(more, earlier, strict=True)]

    for target, x in zip(dkv, backward_round(ring, block, plan.tokens, add_dq, find_dkv), strict=True):
        target.copy_(x)
    dq.copy_(sums)


_forward = {"triton": _forward_triton, "reference": _forward_reference, "cute": softmax_cute.forward}
_backward = {"triton": _backward_triton, "reference": _backward_reference, "cute": softmax_cute.backward}
