"""What the gradients of bias tables sum, for checks: where terms cancel, the sum says little of what it may lose."""

from collections.abc import Callable, Iterable
from unittest import mock

import torch

from hstu_sparse import relative_bias
from hstu_sparse.testing import gradients

TABLES = ("grad of position", "grad of time")


def sizes_of_terms(
    reference: Callable[..., torch.Tensor], inputs: dict, grad: torch.Tensor, by_head: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The gradients of the tables `position` and `time` among the inputs (fp64), with every term squared.

    Of a reference made linear, so that the scores' gradients are dP, and head by head, since heads share their bias:
    reference(h, **inputs) gets head h alone of the inputs `by_head` and of `grad` [T, H, V].
    """
    squares = _Squares.apply
    with (
        mock.patch.object(torch.nn.functional, "silu", lambda scores: scores),
        mock.patch.object(relative_bias, "look_up", lambda table, index: squares(table, index)),
    ):
        heads = []
        for h in range(grad.shape[1]):
            own = inputs | {name: inputs[name][:, h : h + 1] for name in by_head}
            heads.append(gradients(lambda h=h, **x: reference(h, **x), own, grad[:, h : h + 1]))
    return {name: sum(head[name] for head in heads) for name in TABLES if name in heads[0]}


class _Squares(torch.autograd.Function):
    """table[index] whose gradient sums the squares of what comes."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.size = table.shape[0]
        return table[index.long()]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return torch.bincount(index.flatten(), weights=grad.flatten().square(), minlength=ctx.size), None
