"""An exponential moving average of a model's weights, by which a run is judged in place of the last ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights after every step, beginning at the first weights.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; with exponential weights
    as in Tarvainen and Valpola (arXiv 1703.01780).
    """

    def __init__(self, model: nn.Module, decay: float, others: Sequence[Tensor] = ()):
        """others: weights that are none of the model's parameters, a rank's shard of a table say."""
        self.model, self.decay = model, decay
        self.weights: list[Tensor] = [*model.parameters(), *others]
        self.averages = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        """Once a step; part of a captured graph like the step itself."""
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.decay)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Inside, the model has the averages; the weights are back afterwards."""
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
        """The model's weights become the averages."""
        torch._foreach_copy_(self.averages, self.weights)

    def raw(self) -> dict[str, Tensor]:
        """The weights that training goes on with, by their names, when the model holds the averages."""
        return dict(zip((name for name, _ in self.model.named_parameters()), self.averages, strict=True))
