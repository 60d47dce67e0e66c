"""Maintain an exponential moving average of a model's weights, with which a run is evaluated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Average the weights: average <- decay * average + (1 - decay) * weights after every step, from the initial
    weights on.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; with exponential weights
    as in Tarvainen and Valpola (arXiv 1703.01780).
    """

    def __init__(self, model: nn.Module, decay: float, others: Sequence[Tensor] = ()):
        """Start the averages at the current weights.

        others: weights that are not among the model's parameters, e.g. a rank's shard of a table.
        """
        self.model, self.decay = model, decay
        self.weights: list[Tensor] = [*model.parameters(), *others]
        self.averages = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step; captured graphs of a step include this."""
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.decay)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Give the model the averages inside the block, and its weights back afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        weights = [weight.clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, self.averages)
        torch._foreach_copy_(self.averages, weights)

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Set the averages to the model's weights."""
        torch._foreach_copy_(self.averages, self.weights)

    def raw(self) -> dict[str, Tensor]:
        """Return the weights of training by their names while the model holds the averages."""
        return dict(zip((name for name, _ in self.model.named_parameters()), self.averages, strict=True))
