"""Sum a function over chunks of rows, for rows whose intermediates together would not fit into memory."""

from collections.abc import Callable
from typing import Any

import torch

from hstu_sparse.core.registration import no_second_derivative

# Elements of the largest tensor of a chunk, which fits into a core's cache or a small part of a GPU's memory.
CHUNK = {"cpu": 2**21, "cuda": 2**26}


def chunk_size(x: torch.Tensor) -> int:
    """Return CHUNK for x's device."""
    return CHUNK["cuda" if x.is_cuda else "cpu"]


class ChunkedSum(torch.autograd.Function):
    """Sum function(*tensors) over chunks of `rows` rows of the first `rowwise` tensors; the others are passed whole.

    Gradients are computed in the forward pass, so that the intermediates of one chunk are in memory at a time; there is
    no second derivative. Tensors may be None; floating-point tensors have gradients.
    """

    @staticmethod
    def forward(ctx, function: Callable, rows: int, rowwise: int, *tensors):
        floating = [x is not None and x.is_floating_point() for x in tensors]
        shared = [x.detach().requires_grad_() if f else x for x, f in zip(tensors[rowwise:], floating[rowwise:])]
        gradients = [torch.empty_like(x) if f else None for x, f in zip(tensors[:rowwise], floating)]
        total = tensors[0].new_zeros(())
        with torch.enable_grad():
            for begin in range(0, len(tensors[0]), rows):
                part = slice(begin, begin + rows)
                chunk: Any = [None if x is None else x[part].detach() for x in tensors[:rowwise]]
                chunk = [x.requires_grad_() if f else x for x, f in zip(chunk, floating)]
                loss = function(*chunk, *shared)
                loss.backward()
                for gradient, x in zip(gradients, chunk):
                    if gradient is not None:
                        gradient[part] = x.grad
                total += loss.detach()
        gradients += [(torch.zeros_like(x) if x.grad is None else x.grad) if f else None
                      for x, f in zip(shared, floating[rowwise:])]  # fmt: skip
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @no_second_derivative("a sum over chunks of rows")
    def backward(ctx, grad):
        return None, None, None, *(None if x is None else x * grad for x in ctx.saved_tensors)
