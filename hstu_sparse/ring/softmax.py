"""Compute softmax attention around a ring, forward and backward, by Triton, FlashAttention-4 or the reference.

Letters: B sequences, P pieces of a sequence on a rank, T tokens of this rank, H heads of queries, Hkv of keys and
values, D query/key and V value head size.

After each step of the ring, the output and its log-sum-exp are merged with the earlier ones. All sums are in fp32 (fp64
for fp64 inputs); the last step rounds the results. Rounding after each step would add errors.

Blocks in transfer, their gradients and sums take several times the memory of the results. Long sequences are therefore
computed in groups of heads, each large enough to keep the device busy.

FlashAttention-4 aligns the last query of a sequence with its last key. A step of the ring consists of calls of that
form:
- Without a window one call is enough: a query attends to all keys of another rank's piece or to none, and the keys of
  its rank have the positions of the queries.
- With a window there is a call for each pair of pieces, with a shift between queries and keys. FlashAttention-4 takes
  one shift for all sequences, which therefore must have the same length.
FlashAttention-4 rounds the results of each call to the dtype of the inputs; sums over calls are in fp32.
"""

import torch

from hstu_sparse.core.launch import cdiv, on_device
from hstu_sparse.core.precision import without_autocast, working_dtype
from hstu_sparse.core.registration import no_second_derivative
from hstu_sparse.flash import cute, reference
from hstu_sparse.flash.cute import CuteCall, RowRanges, bound
from hstu_sparse.flash.reference import Options
from hstu_sparse.ring.communication import Ring, Transfer, ring_backward
from hstu_sparse.ring.plan import RingPlan


def check_plan_for_cute(op: str, plan: RingPlan, options: Options) -> None:
    """Raise ValueError, on every rank, if FlashAttention-4 does not support the plan."""
    if _has_window(options) and plan.piece_ranges is None:
        raise ValueError(
            f"{op}: backend='cute' takes a window only if all sequences have the same length; use backend='triton'"
        )


def _has_window(options: Options) -> bool:
    return options.left >= 0 or options.right > 0


def _rows(plan: RingPlan, rank: int, piece: int | None = None) -> RowRanges:
    """Return the rows of each sequence on a rank, of all pieces or of one."""
    if piece is None or plan.pieces == 1:
        return RowRanges(plan.sequences[rank])
    return RowRanges(plan.begins[rank, piece], plan.lengths[rank, piece])


def step_parts(plan: RingPlan, source: int, options: Options) -> list[CuteCall]:
    """Return the calls that compute the attention of this rank's queries to the keys of rank `source`."""
    rank = plan.rank
    if not _has_window(options):
        if source == rank or options.right < 0:
            return [CuteCall(_rows(plan, rank), _rows(plan, source), right=bound(options.right))]
        if source < rank:
            return [CuteCall(_rows(plan, rank), _rows(plan, source, 0))]
        return [CuteCall(_rows(plan, rank, 1), _rows(plan, source))] if plan.pieces == 2 else []
    parts = []
    for i, (q_start, num_queries) in enumerate(plan.piece_ranges[rank]):
        for j, (k_start, num_keys) in enumerate(plan.piece_ranges[source]):
            if not num_queries or not num_keys:
                continue
            # In FlashAttention-4 the distance from a query to a key exceeds that of their positions by `shift`.
            shift = q_start - k_start - (num_keys - num_queries)
            left = None if options.left < 0 else options.left - shift
            right = None if options.right < 0 else options.right + shift
            if (right is not None and right <= -num_keys) or (left is not None and left <= -num_queries):
                continue  # no query attends to a key
            left = None if left is not None and left >= num_keys - 1 else left
            right = None if right is not None and right >= num_queries - 1 else right
            parts.append(CuteCall(_rows(plan, rank, i), _rows(plan, source, j), left, right))
    return parts


def _forward_cute(q, block, ring: Ring, plan: RingPlan, options: Options, out, lse) -> None:
    """Write out [T, H, V] and lse [H, T]. block: k and v of this rank."""
    from hstu_sparse.flash.merge import merge

    steps = [step_parts(plan, (ring.rank - i) % ring.world, options) for i in range(ring.world)]
    remaining, sums = sum(map(len, steps)), None
    if remaining < 2:
        out.zero_()  # a single call might leave rows unwritten; the merge of calls writes all
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
    """Write dq [T, H, D] and dkv, the list of dk and dv [T, Hkv, ...].

    Each rank adds its gradients of a block to the sums that it receives, and sends the sums to the next rank. The
    sums are fp32, except after a single call, whose results have the dtype of the inputs.
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


def _buffer(x: torch.Tensor, rows: RowRanges) -> torch.Tensor:
    """Return a tensor for the gradient of x: zeros if a call with these rows does not write all."""
    make = torch.empty if rows.lengths is None else torch.zeros
    return make(x.shape, dtype=x.dtype, device=x.device)


# The number of tiles of 128 tokens in a group of heads, about four times what a large GPU processes at once.
TILES = 1024


def head_groups(heads: int, kv_heads: int, plan: RingPlan, options: Options) -> list[tuple[slice, slice, Options]]:
    """Return (heads of queries, heads of keys, options) of each group of heads; equal on every rank.

    With dropout there is one group, since the dropped weights depend on the index of the head.
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
    """Compute (out [T, H, V], lse [H, T]) from q [T, H, D], k [T, Hkv, D], v [T, Hkv, V]; lse has no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, ring: Ring, plan: RingPlan, options: Options, backend: str):
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=working_dtype(q.dtype), device=q.device)
        forward = _forward[backend]
        with on_device(q.device):
            for queries, keys, head_options in head_groups(q.shape[1], k.shape[1], plan, options):
                forward(
                    q[:, queries], [k[:, keys], v[:, keys]], ring, plan, head_options, out[:, queries], lse[queries]
                )
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
            for queries, keys, head_options in head_groups(q.shape[1], k.shape[1], plan, options):
                backward(
                    grad[:, queries], q[:, queries], [k[:, keys], v[:, keys]], ring, plan, head_options,
                    out[:, queries], lse[queries], dq[:, queries], [dk[:, keys], dv[:, keys]],
                )  # fmt: skip
        return dq, dk, dv, None, None, None, None


# The following functions compute a group of heads. They write out and lse, or dq and dkv, the list of dk and dv.


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

    def compute_dkv(source, key_value, earlier):
        nonlocal launch  # add_dq uses it next
        target = earlier
        if source == ring.rank:
            launch, target = local_launch, dkv
        else:
            launch = Launch(q, *key_value, plan.layout(source), options)
            if earlier is None:
                target = [torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in key_value]
        launch.dkv(grad, rows, *target, sums=earlier)
        return target

    ring_backward(ring, block, plan.tokens, add_dq, compute_dkv)


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

    def compute_dkv(source, key_value, earlier):
        more = reference.backward_step(grad, q, *key_value, plan.layout(source), options, lse, delta, sums)
        return more if earlier is None else [x + y for x, y in zip(more, earlier, strict=True)]

    for target, x in zip(dkv, ring_backward(ring, block, plan.tokens, add_dq, compute_dkv), strict=True):
        target.copy_(x)
    dq.copy_(sums)


_forward = {"triton": _forward_triton, "reference": _forward_reference, "cute": _forward_cute}
_backward = {"triton": _backward_triton, "reference": _backward_reference, "cute": _backward_cute}
