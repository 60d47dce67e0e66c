"""Imitate FlashAttention-4's calls in plain PyTorch and in any dtype, for machines without a GPU.

They replace `cute.forward` and `cute.backward` in a ring over gloo, whose calls together must give the attention of
whole sequences. Rows that are not part of a call are left unchanged, as by FlashAttention-4.
"""

import torch

from hstu_sparse.flash import cute
from hstu_sparse.flash.api import check_options
from hstu_sparse.ring import softmax
from hstu_sparse.ring.communication import Ring
from hstu_sparse.ring.plan import cut_sequences, whole_plan
from tests.operators import ring_cases


def _blocks(q, k, part, scale):
    """Yield (rows of queries, rows of keys, scores [H, n, m] with -inf where a query does not see) of each sequence."""
    for b in range(len(part.q.begins) - 1):
        rows = []
        for begins, lengths in (part.q, part.k):
            begin, end = begins[b : b + 2].tolist()
            end = end if lengths is None else begin + int(lengths[b])
            rows.append(torch.arange(begin, end, device=q.device))
        queries, keys = rows
        j, i = (torch.arange(len(x), device=q.device) for x in (keys, queries))
        distance = j - i[:, None] - (len(keys) - len(queries))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if part.left is not None:
            hidden |= distance < -part.left
        if part.right is not None:
            hidden |= distance > part.right
        key = k[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = scale * torch.einsum("nhd,mhd->hnm", q[queries], key)
        yield queries, keys, scores.masked_fill(hidden, -torch.inf)


def forward(q, k, v, part, scale, out, lse):
    for queries, keys, scores in _blocks(q, k, part, scale):
        value = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        row_lse = scores.logsumexp(-1)
        weights = (scores - row_lse.masked_fill(row_lse.isneginf(), 0)[..., None]).exp()
        out[queries] = torch.einsum("hnm,mhd->nhd", weights, value).to(out)
        lse[:, queries] = row_lse.to(lse)


def backward(grad, q, k, v, out, lse, part, scale, gradients):
    dq, dk, dv = gradients
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    for queries, keys, scores in _blocks(q, k, part, scale):
        key, value = (x[keys].repeat_interleave(shared, 1) for x in (k, v))
        row_lse = lse[:, queries]
        weights = (scores - row_lse.masked_fill(row_lse.isneginf(), 0)[..., None]).exp()
        slope = torch.einsum("nhd,mhd->hnm", grad[queries], value) - (grad * out).sum(-1)[queries].T[..., None]
        slope = scale * weights * slope
        dq[queries] = torch.einsum("hnm,mhd->nhd", slope, key).to(dq)
        for target, x, y in ((dk, slope, q), (dv, weights, grad)):
            product = torch.einsum("hnm,nhd->mhd", x, y[queries])
            target[keys] = product.unflatten(1, (heads, shared)).sum(2).to(target)


def all_results(rank: int, world: int, cases, single_heads: bool = False) -> dict:
    """Return {(form, option): out, lse, dq, dk, dv} of this rank's tokens; run in a process of a group."""
    cute.forward, cute.backward = forward, backward
    if single_heads:
        softmax.TILES = 1
    results = {}
    for form, option in cases:
        tensors, grad, offsets, keywords = ring_cases.inputs(form, option, world)
        index, _ = cut_sequences(offsets, rank, world, zigzag="zigzag" in form)
        leaves = [x[index].requires_grad_() for x in tensors]
        options = check_options(
            leaves[0], len(offsets) - 1, keywords.get("softmax_scale"), keywords.get("causal", False),
            keywords.get("window_size", (-1, -1)), None, 0.0, None,
        )  # fmt: skip
        plan = whole_plan(offsets, rank, world, zigzag="zigzag" in form)
        out, lse = softmax.RingSoftmax.apply(*leaves, Ring(), plan, options, "cute")
        results[form, option] = [out.detach(), lse, *torch.autograd.grad(out, leaves, grad[index])]
    return results


def check_parts(form: str, option: str, device: str) -> None:
    """Assert that the calls of a ring of two, one after another in one process, give the attention of whole sequences.

    The calls are FlashAttention-4's, in bf16. Other tests cover the ring's sums and transfers.
    """
    world, names = 2, ("out", "dq", "dk", "dv")
    sizes = dict(size=64, longer=24, dtype=torch.bfloat16)
    exact = ring_cases.expected(form, option, world, exact=device, **sizes)
    whole_out, whole_lse, *_ = exact
    tensors, grad, offsets, keywords = ring_cases.inputs(form, option, world, **sizes)
    *tensors, grad = (x.to(device) for x in (*tensors, grad))
    options = check_options(
        tensors[0], len(offsets) - 1, None, keywords.get("causal", False), keywords.get("window_size", (-1, -1)),
        None, 0.0, None,
    )  # fmt: skip
    places = [cut_sequences(offsets, rank, world, zigzag="zigzag" in form)[0].to(device) for rank in range(world)]
    sums = [torch.zeros(x.shape, device=device) for x in (tensors[0], *tensors)]
    for rank, local in enumerate(places):
        plan = whole_plan(offsets.to(device), rank, world, zigzag="zigzag" in form)
        q, out, dout = tensors[0][local], whole_out[local].to(torch.bfloat16), grad[local]
        lse = whole_lse[:, local].float().contiguous()
        for source, other in enumerate(places):
            k, v = (x[other] for x in tensors[1:])
            for part in softmax.step_parts(plan, source, options):
                more, more_lse = torch.zeros_like(q), torch.full_like(lse, -torch.inf)
                cute.forward(q, k, v, part, options.scale, more, more_lse)
                share = (more_lse - lse.masked_fill(lse.isneginf(), 0)).exp().T[..., None]
                sums[0][local] += more * share
                sums_of_part = [torch.zeros_like(x) for x in (q, k, v)]
                cute.backward(dout, q, k, v, out, lse, part, options.scale, sums_of_part)
                for total, place, x in zip(sums[1:], (local, other, other), sums_of_part, strict=True):
                    total[place] += x
    for name, total, right in zip(names, sums, (whole_out, *exact[2:]), strict=True):
        error = ((total - right).norm() / right.norm()).item()
        assert error < 1e-2, f"{name}: {error:.2e}"
