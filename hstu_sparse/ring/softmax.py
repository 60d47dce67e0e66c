"""Softmax attention round a ring: the steps of both passes, in Triton or by the reference.

Letters: T tokens of this rank, H heads of queries, D query/key and V value head size.

The output and its log-sum-exp are merged block by block, and all sums are in fp32 (fp64 for fp64 inputs), over the
steps of the ring too: rounding to 16 bits after each step is what makes other rings drift.
"""

import torch

from hstu_sparse.launch import on_device
from hstu_sparse.ring.communication import Ring, backward_round
from hstu_sparse.ring.flash import reference
from hstu_sparse.ring.flash.problem import Options
from hstu_sparse.ring.plan import RingPlan


class RingSoftmax(torch.autograd.Function):
    """(out [T, H, V], lse [H, T]) of q [T, H, D], k [T, Hkv, D], v [T, Hkv, V]; lse has no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, ring: Ring, plan: RingPlan, options: Options, backend: str):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=wide, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device)
        if backend == "reference":
            out.zero_()
            lse.fill_(-torch.inf)
        with on_device(q.device):
            for step, (source, (key, value)) in enumerate(ring.blocks([k, v], plan.tokens)):
                if backend == "triton":
                    _launch(q, key, value, plan.layout(source), options).forward(out, lse, add=step > 0)
                else:
                    reference.forward_step(q, key, value, plan.layout(source), options, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = ring, plan, options, backend
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        if grad is None:
            return (None,) * 7
        q, k, v, out, lse = ctx.saved_tensors
        ring, plan, options, backend = ctx.rest
        dq = torch.empty(q.shape, dtype=lse.dtype, device=q.device)
        with on_device(q.device):
            if backend == "reference":
                dq.zero_()
                delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T

                def add_dq(source, block):
                    """Done with the other gradients."""

                def find_dkv(source, block, sums):
                    given = *block, plan.layout(source), options
                    found = reference.backward_step(grad, q, *given, lse, delta, dq)
                    return found if sums is None else [x + y for x, y in zip(found, sums, strict=True)]

            else:
                rows = _launch(q, k, v, plan.layout(ring.rank), options).rows(out, grad, lse)

                def add_dq(source, block):
                    launch = _launch(q, *block, plan.layout(source), options)
                    launch.dq(grad, rows, dq, add=source != ring.rank)

                def find_dkv(source, block, sums):
                    launch = _launch(q, *block, plan.layout(source), options)
                    dtype = block[0].dtype if source == ring.rank else lse.dtype
                    found = sums
                    if sums is None or source == ring.rank:
                        found = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in block]
                    launch.dkv(grad, rows, *found, sums=sums)
                    return found

            dk, dv = backward_round(ring, [k, v], plan.tokens, add_dq, find_dkv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _launch(*arguments):
    from hstu_sparse.ring.flash.launch import Launch

    return Launch(*arguments)
