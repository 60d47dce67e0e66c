"""Attention by heads: a rank's part of a batch, computed by the exchange of tokens for heads.

Letters: N tokens of the batch, H heads, D channels, W ranks.
"""

import torch
import torch.distributed as dist

from hstu_sparse import flash_attention, heads_to_tokens, indexer_loss, tokens_to_heads
from tests.random.cases import indexer
from tests.support.budgets import make_jagged, make_offsets

LENGTHS = [9, 0, 14, 1, 3]
HEADS = 12  # which 2, 3 and 4 ranks divide
CASES = {"fp64": torch.float64, "bf16": torch.bfloat16, "fewer tokens than ranks": torch.float64}


def inputs(case: str, longer: int = 1, size: int = 8):
    """Return whole q, k, v [N, heads, D], the output's gradient, offsets."""
    lengths = [0, 1] if case.startswith("fewer") else [longer * n for n in LENGTHS]
    tensors = [make_jagged(lengths, (HEADS, size), dtype=CASES[case], seed=seed) for seed in range(4)]
    return tensors, make_offsets(lengths)


def tokens_of_ranks(count: int, world: int) -> list[int]:
    return [(rank + 1) * count // world - rank * count // world for rank in range(world)]


def expected(case: str, device: str = "cpu", **sizes) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of all tokens, computed by one process."""
    (*leaves, grad), offsets = inputs(case, **sizes)
    *leaves, grad, offsets = (x.to(device) for x in (*leaves, grad, offsets))
    leaves = [x.requires_grad_() for x in leaves]
    out = flash_attention(*leaves, offsets, causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def rank_results(rank: int, world: int, case: str, device: str = "cpu", **sizes) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of a rank's tokens."""
    (*leaves, grad), offsets = inputs(case, **sizes)
    tokens = tokens_of_ranks(len(grad), world)
    *leaves, grad = (x.to(device).split(tokens)[rank] for x in (*leaves, grad))
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = by_heads(*leaves, offsets.to(device), tokens)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_heads(q, k, v, offsets, tokens):
    return heads_to_tokens(flash_attention(*tokens_to_heads(q, k, v, tokens=tokens), offsets, causal=True), tokens)


def losses_of(world: int) -> list[tuple[str, int, int]]:
    """Return backend, selection group and chosen tokens of cases of the index loss; the interpreter is slow."""
    backends = ("reference", "triton") if world == 2 else ("reference",)
    return [(backend, group, top_k) for backend in backends for group, top_k in ((1, 4), (3, 70))]


def index_loss(part: slice, backend: str, selection_group: int, top_k: int, **options) -> list[torch.Tensor]:
    """Return the index loss of some of the heads, and the gradient of the scores."""
    lengths, generator = (5, 0, 8), torch.Generator().manual_seed(7)
    q, k = (make_jagged(lengths, (HEADS, 8), seed=seed)[:, part] for seed in range(2))
    indices = indexer.group_indices(lengths, top_k, selection_group, generator)
    scores = torch.randn(indices.shape, generator=generator).requires_grad_()
    valid = torch.rand(13, generator=generator) < 0.7
    options |= dict(selection_group=selection_group, valid=valid, backend=backend)
    loss = indexer_loss(q, k, scores, indices, make_offsets(lengths), **options)
    return [loss.detach(), *torch.autograd.grad(loss, scores)]


def index_losses(rank: int, world: int) -> dict:
    """Return `index_loss` of all cases over the ranks."""
    part = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    return {case: index_loss(part, *case, group=dist.group.WORLD) for case in losses_of(world)}


def second_derivative(rank: int, world: int) -> bool:
    """Return whether the exchange passes torch's check of second derivatives, where all ranks take part in it."""
    x = torch.arange(12.0, dtype=torch.float64).view(1, 12, 1).requires_grad_()
    (y,) = tokens_to_heads(x)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    return torch.equal(second, 6 * x)


def wrong_calls(rank: int, world: int) -> list[str]:
    """Return the errors of calls that no rank can make."""
    x = torch.zeros(2, 12, 4)
    calls = [
        lambda: tokens_to_heads(),
        lambda: tokens_to_heads(x, x.double()),
        lambda: tokens_to_heads(x, x[:1]),
        lambda: tokens_to_heads(x, tokens=[2]),
        lambda: tokens_to_heads(x, tokens=[3] * world),
        lambda: tokens_to_heads(x[:, :7]),
        lambda: heads_to_tokens(x, tokens=[2] * world),
        lambda: tokens_to_heads(x[..., : 3 if rank else 2]),  # shapes of earlier calls are known to agree
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("nothing")
        except ValueError as error:
            messages.append(str(error))
    return messages


def all_results(rank: int, world: int) -> dict:
    results = {case: rank_results(rank, world, case) for case in CASES}
    results["index losses"] = index_losses(rank, world)
    return results | {"twice": second_derivative(rank, world), "errors": wrong_calls(rank, world)}
