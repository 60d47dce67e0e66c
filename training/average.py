"""Maintain an exponential moving average of a model's weights, which is evaluated instead of the weights."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from training.optimizer import state_dtype


class WeightAverage:
    """Compute an exponential moving average of the weights, in fp32 for 16-bit weights.

    It starts at the initial weights; after every step average <- decay * average + (1 - decay) * weights.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; with exponential weights
    as in Tarvainen and Valpola (arXiv 1703.01780).
    """

    def __init__(self, model: nn.Module, decay: float, others: Sequence[Tensor] = ()):
        """Start the averages at the current weights.

        others: weights that are not parameters of the model, e.g. a rank's shard of a table.
        """
        self.model, self.decay = model, decay
        self.weights: list[Tensor] = [*model.parameters(), *others]
        self.averages = [weight.detach().to(state_dtype(weight), copy=True) for weight in self.weights]
        pairs = list(zip(self.averages, self.weights))
        self.same = [(average, weight) for average, weight in pairs if average.dtype == weight.dtype]
        self.wide = [(average, weight) for average, weight in pairs if average.dtype != weight.dtype]
        self._weights: list[Tensor] = []  # the weights of `wide` while the model has the averages

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step; can be captured in a CUDA graph."""
        if self.same:
            averages, weights = zip(*self.same)
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        decay = torch.tensor(self.decay).item()  # rounded to fp32, so that both factors add up to 1
        for average, weight in self.wide:  # lerp would need an fp32 copy of the weight
            average.mul_(decay).add_(weight, alpha=1 - decay)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Replace the model's weights by the averages, in its dtypes, within the block."""
        self._swap()
        self._weights = [weight.detach().clone() for _, weight in self.wide]
        self._fill(average for average, _ in self.wide)
        try:
            yield
        finally:
            self._swap()
            self._fill(self._weights)
            self._weights = []

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self.same:
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    @torch.no_grad()
    def _fill(self, values: Iterable[Tensor]) -> None:
        for value, (_, weight) in zip(values, self.wide):
            weight.copy_(value)

    @torch.no_grad()
    def take_from_model(self) -> None:
        """Set the averages to the model's weights."""
        torch._foreach_copy_(self.averages, self.weights)

    def raw(self) -> dict[str, Tensor]:
        """Return the weights of training by name, inside `in_the_model`."""
        raw = {id(weight): average for average, weight in self.same}
        raw |= {id(weight): value for value, (_, weight) in zip(self._weights, self.wide, strict=True)}
        return {name: raw[id(weight)] for name, weight in self.model.named_parameters()}

    def exact(self) -> dict[str, Tensor]:
        """Return the fp32 averages of 16-bit weights by name."""
        wide = {id(weight): average for average, weight in self.wide}
        return {name: wide[id(weight)] for name, weight in self.model.named_parameters() if id(weight) in wide}
