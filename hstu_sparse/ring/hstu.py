"""Define dense HSTU attention around a ring of ranks: `ring_hstu_attention`, its validation and its steps.

Letters: T tokens of this rank, B sequences, N max_seq_len, H heads, D query/key and V value head size.

The output is the sum of the outputs of the blocks, in fp32, since SiLU has no normaliser that depends on all keys.
"""

from typing import NamedTuple

import torch

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.core import validation
from hstu_sparse.core.jagged import check_storage, readable
from hstu_sparse.core.launch import on_device
from hstu_sparse.core.precision import widened, without_autocast, working_dtype
from hstu_sparse.core.registration import no_second_derivative
from hstu_sparse.core.validation import INTEGER, check_int, check_kernel, check_qkv, check_tensor, choose_backend
from hstu_sparse.ring.communication import Ring, ring_backward
from hstu_sparse.ring.hstu_reference import Block, hstu_block
from hstu_sparse.ring.plan import RingPlan, check_plan, check_plan_fits, ring_plan


@without_autocast
def ring_hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    max_seq_len: int,
    *,
    seq_offsets: torch.Tensor | None = None,
    scale: float | None = None,
    normalizer: float | None = None,
    window_size: int = 0,
    bias: RelativeBias | None = None,
    group=None,
    plan: RingPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute hstu_attention of sequences whose tokens are distributed over the ranks of a group, in any order.

        o[t] = (1/N) * sum over s with position[s] <= position[t] of SiLU(scale * q[t].k[s] + b(t, s)) * v[s]

    where s are the tokens of t's sequence on all ranks. `window_size` W > 0 also requires position[t] - position[s] <
    W.

    Args:
        q, k: [T, H, D], the tokens of this rank, fp16, bf16 or fp32 (the reference also fp64).
        v: [T, H, V], dtype of q.
        positions: [T] int32 or int64, the positions of the tokens in their whole sequences, from 0 to N - 1.
            For speed, store neighbours next to each other: tiles in which no query attends to a key are skipped.
        max_seq_len: N, at least the length of the longest whole sequence.
        seq_offsets: [B+1] integers, from 0 to T: this rank's parts of B sequences; one sequence by default.
        scale: factor of the scores, D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N; `max_seq_len` by default.
        window_size: W, 0 for no window.
        bias: see `RelativeBias`; its timestamps [T] are those of this rank's tokens. The tables are equal on all ranks.
            Their gradients are the contribution of this rank, to be summed over the ranks.
        group: a torch.distributed process group, by default all processes; without torch.distributed one process.
        plan: `ring_plan` of seq_offsets, for many calls. Without a plan, each call exchanges the offsets of the ranks,
            which waits for the device.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, H, V], dtype of q. Gradients flow to q, k, v and both tables.

    Examples:
        >>> q, k, v = torch.randn(3, 6, 2, 16)  # without torch.distributed: a ring of one process
        >>> out = hstu_sparse.ring_hstu_attention(q, k, v, torch.arange(6), max_seq_len=6)
        >>> torch.allclose(out, hstu_sparse.hstu_attention(q, k, v, torch.tensor([0, 6]), max_seq_len=6), atol=1e-6)
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value; on every rank if ranks disagree.
        RuntimeError: a rank does not respond; the message names it, or both neighbours of this rank.

    Source: Zhai et al., ICML 2024, section 3.2 (arXiv 2402.17152); Liu et al., Ring Attention (arXiv 2310.01889).
    """
    name = "ring_hstu_attention"
    if seq_offsets is None:
        tokens = q.shape[0] if isinstance(q, torch.Tensor) and q.dim() else 0
        seq_offsets = torch.arange(2, device=getattr(positions, "device", None)) * tokens
    sizes = check_qkv(q, k, v, seq_offsets, max_seq_len)
    check_tensor("positions", positions, "T", sizes, dtype=INTEGER, device=q.device)
    if readable(positions) and ((positions < 0) | (positions >= max_seq_len)).any():
        extremes = positions.aminmax()
        raise ValueError(f"positions must be from 0 to N-1={max_seq_len - 1}, got {extremes.min} to {extremes.max}")
    check_int("window_size", window_size, 0)
    check_plan(plan)
    scale, normalizer = validation.check_factors(scale, normalizer, sizes["D"], max_seq_len)
    bias = check_bias(bias, max_seq_len, q.shape[0], q.device)
    backend = choose_backend(backend, q, name)
    if backend == "triton":
        check_kernel(name, q, {"D": sizes["D"], "V": sizes["V"]})
    ring = Ring(group)
    shapes = {"q": [*q.shape[1:]], "v": [*v.shape[1:]], "dtype": str(q.dtype), "backend": backend}
    tables = [None if x is None else len(x) for x in bias[:2]]
    ring.check_agreement(name, {**shapes, "options": [max_seq_len, scale, normalizer, window_size], "bias": tables})
    if plan is None:
        check_storage("seq_offsets", seq_offsets, values=True)
        plan = ring_plan(seq_offsets, group=group)
    elif plan.tokens[plan.rank] != q.shape[0]:
        raise ValueError(f"plan is for T={plan.tokens[plan.rank]}, got T={q.shape[0]}")
    else:
        check_plan_fits(plan, seq_offsets, ring)
    call = Call(ring, plan, normalizer, scale, window_size, backend)
    return RingHSTU.apply(q, k, v, *bias, positions, call)


class Call(NamedTuple):
    """The arguments of a call that are not tensors."""

    ring: Ring
    plan: RingPlan
    normalizer: float
    scale: float
    window_size: int
    backend: str

    def block(self, source: int, bias: RelativeBias, q_positions, k_positions, k_times=None) -> Block:
        """Return the block of the keys of rank `source`, with their positions and, for a time bias, their times."""
        offsets = self.plan.sequences[self.plan.rank], self.plan.sequences[source]
        bias = bias._replace(timestamps=k_times)
        return Block(*offsets, q_positions, k_positions, self.normalizer, self.scale, self.window_size, bias)


class RingHSTU(torch.autograd.Function):
    """Compute HSTU attention around a ring, with gradients of q, k, v and both tables.

    This is not an `Operator`, since results depend on other processes, not only on tensors.
    """

    @staticmethod
    def forward(ctx, q, k, v, position, time, timestamps, query_timestamps, positions, call: Call):
        out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=working_dtype(q.dtype), device=q.device)
        bias = RelativeBias(position, time, timestamps, query_timestamps)
        ctx.save_for_backward(q, k, v, *bias, positions)
        ctx.call = call
        for source, (key, value, *rest) in call.ring.blocks(_payload(k, v, positions, timestamps), call.plan.tokens):
            block = call.block(source, bias, positions, *rest)
            if call.backend == "triton":
                from hstu_sparse.ring.hstu_kernels import block_forward

                with on_device(q.device):
                    block_forward(q, key, value, block, out)
            else:
                out += hstu_block(q, key, value, block)
        return out.to(q.dtype)

    @staticmethod
    @no_second_derivative("ring_hstu_attention")
    @without_autocast
    def backward(ctx, grad):
        q, k, v, *bias, positions = ctx.saved_tensors
        call, bias = ctx.call, RelativeBias(*bias)
        wide = working_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        # The gradients of the tables are summed in fp32, or in fp64 for fp64 tables.
        tables = bias[:2]
        sums = [None if x is None else torch.zeros_like(x, dtype=working_dtype(x.dtype)) for x in tables]

        if call.backend == "triton":
            from hstu_sparse.ring.hstu_kernels import block_dkv, block_dq

            def add_dq(source, tensors):
                key, value, *rest = tensors
                block_dq(grad, q, key, value, call.block(source, bias, positions, *rest), dq, *sums)

            def compute_dkv(source, tensors, dkv):
                key, value, *rest = tensors
                if dkv is None:
                    dkv = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (key, value)]
                block_dkv(grad, q, key, value, call.block(source, bias, positions, *rest), *dkv)
                return dkv

        else:

            def add_dq(source, tensors):
                """Do nothing: dq is computed with the other gradients."""

            def compute_dkv(source, tensors, dkv):
                key, value, *rest = tensors
                with torch.enable_grad():
                    leaves = [x.detach().to(wide).requires_grad_() for x in (q, key, value)]
                    copies = [None if x is None else x.detach().requires_grad_() for x in widened(*tables)]
                    wide_bias = bias._replace(position=copies[0], time=copies[1])
                    out = hstu_block(*leaves, call.block(source, wide_bias, positions, *rest))
                    inputs = [*leaves, *(x for x in copies if x is not None)]
                    more, dk, dv, *parts = torch.autograd.grad(out, inputs, grad.to(out.dtype))
                dq.add_(more)
                for total, part in zip((x for x in sums if x is not None), parts, strict=True):
                    total += part
                return [dk, dv] if dkv is None else [dk + dkv[0], dv + dkv[1]]

        with on_device(q.device):
            payload = _payload(k, v, positions, bias.timestamps)
            dk, dv = ring_backward(call.ring, payload, call.plan.tokens, add_dq, compute_dkv)
        tables = (None if x is None else total.to(x.dtype) for total, x in zip(sums, tables))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *tables, None, None, None, None


def _payload(k, v, positions, timestamps) -> list[torch.Tensor]:
    """Return the tensors that are sent around the ring."""
    return [k, v, positions] if timestamps is None else [k, v, positions, timestamps]
