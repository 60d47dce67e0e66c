"""Compute softmax attention round a ring: the steps of both passes, in Triton, FlashAttention-4 or the reference.

Letters: B sequences, P pieces of a sequence on a rank, T tokens of this rank, H heads of queries, Hkv of keys and
values, D query/key and V value head size.

The output and its log-sum-exp are merged block by block, and all sums are in fp32 (fp64 for fp64 inputs), over the
steps of the ring too: rounding to 16 bits after each step makes other rings drift. The last step's kernels round the
results.

A ring needs several times the memory of its results for blocks in transfer, their gradients and sums. Therefore only
some heads of long sequences go round at a time: as many as keep the device busy.

FlashAttention-4 treats a sequence as one range of queries and one of keys whose last rows have the same position. A
step of a ring is made of such calls. Without a window one is enough: of another rank's block a query sees all keys of a
piece or none, and its own rank's block has the positions of the queries. With a window each pair of pieces has its own
shift, one number for all sequences, which therefore must have one length. It returns a call's output in the inputs'
dtype: outputs, dq, and dk and dv in transfer are rounded to that once for each block, and added in fp32.
"""

import torch

from hstu_sparse.core.launch import cdiv, on_device
from hstu_sparse.core.precision import without_autocast, working_dtype
from hstu_sparse.core.registration import no_second_derivative
from hstu_sparse.flash import cute, reference
from hstu_sparse.flash.cute import Part, Rows, bound
from hstu_sparse.flash.reference import Options
from hstu_sparse.ring.communication import Ring, Transfer, backward_round
from hstu_sparse.ring.plan import RingPlan


def check_plan_for_cute(op: str, plan: RingPlan, options: Options) -> None:
    """Raise ValueError if FlashAttention-4 does not support the plan; the same on every rank."""
    if _has_window(options) and plan.stretches is None:
        raise ValueError(
            f"{op}: backend='cute' takes a window only where all sequences have one length; use backend='triton'"
        )


def _has_window(options: Options) -> bool:
    return options.left >= 0 or options.right > 0


def _rows(plan: RingPlan, rank: int, piece: int | None = None) -> Rows:
    """Return all rows that a rank has of each sequence, or those of one piece."""
    if piece is None or plan.pieces == 1:
        return Rows(plan.sequences[rank])
    return Rows(plan.begins[rank, piece], plan.lengths[rank, piece])


def step_parts(plan: RingPlan, source: int, options: Options) -> list[Part]:
    """Return the calls that compute the attention of this rank's queries to the keys of rank `source`."""
    rank = plan.rank
    if not _has_window(options):
        if source == rank or options.right < 0:
            return [Part(_rows(plan, rank), _rows(plan, source), right=bound(options.right))]
        if source < rank:
            return [Part(_rows(plan, rank), _rows(plan, source, 0))]
        return [Part(_rows(plan, rank, 1), _rows(plan, source))] if plan.pieces == 2 else []
    parts = []
    for i, (q_start, num_queries) in enumerate(plan.stretches[rank]):
        for j, (k_start, num_keys) in enumerate(plan.stretches[source]):
            if not num_queries or not num_keys:
                continue
            # FlashAttention-4 counts the distance between row j of the keys and row i of the queries as j - i - shift.
            shift = q_start - k_start - (num_keys - num_queries)
            left = None if options.left < 0 else options.left - shift
            right = None if options.right < 0 else options.right + shift
            if (right is not None and right <= -num_keys) or (left is not None and left <= -num_queries):
                continue  # no query sees a key
            left = None if left is not None and left >= num_keys - 1 else left
            right = None if right is not None and right >= num_queries - 1 else right
            parts.append(Part(_rows(plan, rank, i), _rows(plan, source, j), left, right))
    return parts


def _forward_cute(q, block, ring: Ring, plan: RingPlan, options: Options, out, lse) -> None:
    """Write out [T, H, V] and lse [H, T]; block: this rank's k and v."""
    from hstu_sparse.flash.merge import merge

    steps = [step_parts(plan, (ring.rank - i) % ring.world, options) for i in range(ring.world)]
    remaining, sums = sum(map(len, steps)), None
    if remaining < 2:
        out.zero_()  # for rows that no call writes; with more calls the merge writes all
    lse.fill_(-torch.inf)
    for parts, (_, (k, v)) in zip(steps, ring.blocks(block, plan.tokens), strict=True):
        for part in parts:
            remaining -= 1
            if sums is None:
                sums = torch.empty(out.shape, dtype=q.dtype, device=q.device) if remaining else out
                cute.forward(q, k, v, part, options.scale, sums, lse)
                continue
            more, more_lse = torch.empty(out.shape, dtype=q.dtype, device=q.device), torch.full_like(lse, -torch.inf)
            cute.forward(q, k, v, part, options.scale, more, more_lse)
            target = out
            if remaining:
                target = sums if sums.dtype == lse.dtype else torch.empty(out.shape, dtype=lse.dtype, device=q.device)
            merge(sums, lse, more, more_lse, target)
            sums = target


def _backward_cute(grad, q, block, ring: Ring, plan: RingPlan, options: Options, out, lse, dq, dkv) -> None:
    """Write dq [T, H, D] and the list dkv of dk and dv [T, Hkv, ...].

    A block's gradients are computed in one call. They are added to those that arrived with the block and sent on, in
    the inputs' dtype from the first rank and in fp32 (as with a window, which needs several calls) from the others.
    """
    steps = [step_parts(plan, (ring.rank - i) % ring.world, options) for i in range(ring.world)]
    remaining, sums, local_gradients, pending = sum(map(len, steps)), None, None, None
    if not remaining:
        dq.zero_()
    for parts, (source, (k, v)) in zip(steps, ring.blocks(block, plan.tokens), strict=True):
        gradients = None
        for part in parts:
            remaining -= 1
            more_dq, *more = (_buffer(x, rows) for x, rows in ((q, part.q), (k, part.k), (v, part.k)))
            cute.backward(grad, q, k, v, out, lse, part, options.scale, [more_dq, *more])
            if sums is None:
                sums = more_dq
                if not remaining:
                    dq.copy_(sums)
            elif remaining:
                sums = sums.float().add_(more_dq)
            else:
                torch.add(sums, more_dq, out=dq)
            if _has_window(options):
                more = [x.float() for x in more]
            gradients = more if gradients is None else [x.add_(y) for x, y in zip(gradients, more, strict=True)]
        if gradients is None:
            dtype = lse.dtype if _has_window(options) else q.dtype
            gradients = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v)]
        if source == ring.rank:
            local_gradients = gradients
            continue
        if pending is not None:
            gradients = [x.float().add_(y) for x, y in zip(pending.wait(), gradients, strict=True)]
        size = plan.tokens[(source - 1) % ring.world]
        pending = Transfer(ring, gradients, [(size, *x.shape[1:]) for x in gradients]).post()
    for target, x, y in zip(dkv, pending.wait(), local_gradients, strict=True):
        torch.add(x, y, out=target)


def _buffer(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a tensor for a call's gradient of x: zeros if the call does not write all rows."""
    make = torch.empty if rows.lengths is None else torch.zeros
    return make(x.shape, dtype=x.dtype, device=x.device)


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
    @no_second_derivative("ring_flash_attention")
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


_forward = {"triton": _forward_triton, "reference": _forward_reference, "cute": _forward_cute}
_backward = {"triton": _backward_triton, "reference": _backward_reference, "cute": _backward_cute}
