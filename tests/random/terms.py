"""Compute the sizes of the terms that attention sums: if terms cancel, the sum does not show its possible error."""

from collections.abc import Callable, Iterable
from unittest import mock

import torch

from hstu_sparse.bias import relative
from tests.support.budgets import gradients

TABLES = ("grad of position", "grad of time")
# With at most this many tokens, errors in fp32 are relative to the sums of absolute terms, since nearly all terms may
# cancel. In 16 bits this is not needed: rounding the result makes a greater error.
FEW_TOKENS = 8

# reference(heads, **inputs) -> the output of the heads in the slice `heads`, from inputs that have only these heads.
Reference = Callable[..., torch.Tensor]


def sizes_of_terms(
    reference: Reference, inputs: dict, grad: torch.Tensor, by_head: Iterable[str], few: bool
) -> dict[str, torch.Tensor]:
    """Return by name the size of the terms that cancel in the output and in each gradient, for `assert_within_budget`.

    For the gradients of the tables `position` and `time`, which are sums over pairs, the size is the root of the sum of
    the squared terms. With `few` and at most FEW_TOKENS tokens, all sizes are the results for the inputs' absolute
    values, with which no terms cancel.

    inputs: in fp64; by_head: the names of those that are [T, H, ...]; grad: the output's gradient, [T, H, V].
    """
    if few and grad.shape[0] <= FEW_TOKENS:
        sizes = {n: x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
        return gradients(lambda **x: reference(slice(None), **x), sizes, grad.abs())
    return {name: x.sqrt() for name, x in _squares_of_terms(reference, inputs, grad, by_head).items()}


def sizes_under_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, scale: float
) -> dict[str, torch.Tensor]:
    """Return the size of the terms that cancel in dq [T, H, D] and dk [S, Hkv, D]; nothing above FEW_TOKENS queries.

    They sum p (do.v - do.o) times a key or a query. The size of do.v is bounded by that of |do| and the greatest |v| of
    each channel, v [S, Hkv, V]: the sum of their products, or in 16 bits, where the roundings of o decide, the root of
    the sum of their squares. The size of a key is bounded by the greatest |k| of each channel.
    """
    if not 0 < q.shape[0] <= FEW_TOKENS or not k.shape[0]:
        return {}
    order = 1 if q.dtype == torch.float32 else 2
    groups = k.shape[1], q.shape[1] // k.shape[1]
    q, grad = (x.double().abs().unflatten(1, groups) for x in (q, grad))
    key, value = (x.double().abs().amax(0)[:, None] for x in (k, v))
    slope = abs(scale) * (grad * value).norm(order, -1, keepdim=True)  # [T, Hkv, G, 1]
    return {"grad of q": (slope * key).flatten(1, 2), "grad of k": (slope * q).sum((0, 2)).expand(k.shape)}


def _squares_of_terms(
    reference: Reference, inputs: dict, grad: torch.Tensor, by_head: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the gradients of the tables `position` and `time` among the inputs (fp64), with every term squared.

    SiLU is replaced by the identity, so that the gradients of scores are dP. Each head is computed separately, since
    heads share the tables. Arguments: see `sizes_of_terms`.
    """
    squares = _Squares.apply
    with (
        mock.patch.object(torch.nn.functional, "silu", lambda scores: scores),
        mock.patch.object(relative, "look_up", lambda table, index: squares(table, index)),
    ):
        squares_by_head = []
        for h in range(grad.shape[1]):
            head = slice(h, h + 1)
            head_inputs = inputs | {name: inputs[name][:, head] for name in by_head}
            squares_by_head.append(gradients(lambda head=head, **x: reference(head, **x), head_inputs, grad[:, head]))
    return {name: sum(head[name] for head in squares_by_head) for name in TABLES if name in squares_by_head[0]}


class _Squares(torch.autograd.Function):
    """Return table[index]; its gradient sums the squares of the incoming one."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.size = table.shape[0]
        return table[index.long()]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return torch.bincount(index.flatten(), weights=grad.flatten().square(), minlength=ctx.size), None
