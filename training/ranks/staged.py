"""Train on rows of a sharded table with CUDA graphs: rows are looked up, and the weights updated, outside of the graph.

Letters: T tokens of a rank, R rows, E embedding size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from data.batch import Batch
from models.losses import Negatives
from training.graph import GraphedStep, Losses, padded_tokens
from training.ranks.losses import Prepared, Rows


class Staged:
    """Buffers at fixed addresses for what `prepare` returns, which captured steps read.

    buffers    by name; those that depend on R have the greatest size so far
    gradients  those of the weights, by the index of the weight
    replaced   whether the last `stage` replaced a buffer by a larger one, so that earlier graphs are of no use
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.replaced = False

    def stage(self, prepared: Prepared) -> Prepared:
        """Copy a step's tensors into the buffers, padded to the T of the padded batch; return the buffers.

        The rows get a gradient of zeros, to which a backward pass adds.
        """
        (share, rows), self.replaced = prepared, False
        assert rows is not None and share.count is not None
        tokens, drawn = padded_tokens(len(rows.inverse)), share.drawn
        count = max(padded_tokens(len(rows.ids)), len(self.buffers.get("ids", ())))
        values = self._held("values", rows.values.detach(), count).detach().requires_grad_()
        values.grad = self._held("gradient", rows.values.detach()[:0], count)
        rows = Rows(values, self._held("ids", rows.ids, count), self._held("inverse", rows.inverse, tokens))
        if drawn is not None:
            per_token = drawn.ids.dim() == 2 and not drawn.in_blocks(len(share.targets))
            ids = self._held("negatives", drawn.ids, tokens if per_token else len(drawn.ids))
            log_q = None if drawn.log_q is None else self._held("log_q", drawn.log_q, count)
            block = None if drawn.block is None else self._held("block", drawn.block, tokens)
            drawn = Negatives(ids, log_q, block)
        share = share._replace(
            targets=self._held("targets", share.targets, tokens, padding=-1),
            drawn=drawn,
            count=self._held("count", share.count[None], 1)[0],
        )
        return Prepared(share, rows)

    def keep(self, weights: list[Tensor]) -> list[Tensor | None]:
        """Copy the gradients of weights into buffers, so that they do not take memory for each graph."""
        gradients = {number: p.grad for number, p in enumerate(weights) if p.grad is not None}
        for number, gradient in gradients.items():
            if number not in self.gradients:
                self.gradients[number] = torch.empty_like(gradient)
        buffers = {number: self.gradients[number] for number in gradients}
        torch._foreach_copy_(list(buffers.values()), list(gradients.values()))
        return [buffers.get(number) for number in range(len(weights))]

    def _held(self, name: str, x: Tensor, length: int, padding: int = 0) -> Tensor:
        """Return x, followed by `padding`, in a buffer, [length, ...]."""
        buffer = self.buffers.get(name)
        if buffer is None or len(buffer) < length:
            buffer = self.buffers[name] = x.new_empty((length, *x.shape[1:]))
            self.replaced = True
        buffer[: len(x)].copy_(x)
        buffer[len(x) : length].fill_(padding)
        return buffer[:length]


class StagedStep:
    """A training step whose forward and backward pass are captured.

    prepare: returns the rows and the share of a batch. gradients: computes the losses and gradients of a padded batch.
    update: changes the weights, and adds its measurements to the losses. sizes: those of `GraphedStep`.
    """

    def __init__(
        self,
        prepare: Callable[[Batch], Prepared],
        gradients: Callable[[Batch, Prepared], Losses],
        update: Callable[[Losses], Losses],
        weights: list[Tensor],
        **sizes: int,
    ):
        self.prepare, self.gradients, self.update, self.weights = prepare, gradients, update, weights
        self.staged = Staged()
        self.graphs = GraphedStep(self._captured, **sizes)

    def _captured(self, batch: Batch) -> tuple[Losses, list[Tensor | None]]:
        return self.gradients(batch, self.inputs), self.staged.keep(self.weights)

    def __call__(self, batch: Batch) -> Losses:
        prepared = self.prepare(batch)
        assert prepared.rows is not None
        self.inputs = self.staged.stage(prepared)
        if self.staged.replaced:
            self.graphs.forget()
        losses, gradients = self.graphs(batch)
        for p, gradient in zip(self.weights, gradients, strict=True):
            p.grad = gradient
        values = prepared.rows.values
        values.backward(self.staged.buffers["gradient"][: len(values)])
        return self.update(losses)
