"""Maintain an exponential moving average of a model's weights, with which a run is evaluated."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from training.optimizer import state_dtype


class WeightAverage:
    """Average the weights: average <- decay * average + (1 - decay) * weights after every step, from the initial
    weights on. Averages of 16-bit weights are fp32.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; with exponential weights
    as in Tarvainen and Valpola (arXiv 1703.01780).
    """

    def __init__(self, model: nn.Module, decay: float, others: Sequence[Tensor] = ()):
        """Start the averages at the current weights.

        others: weights that are not among the model's parameters, e.g. a rank's shard of a table.
        """
        self.model, self.decay = model, decay
        self.weights: list[Tensor] = [*model.parameters(), *others]
        self.averages = [weight.detach().to(state_dtype(weight), copy=True) for weight in self.weights]
        pairs = list(zip(self.averages, self.weights))
        self.same = [(average, weight) for average, weight in pairs if average.dtype == weight.dtype]
        self.wide = [(average, weight) for average, weight in pairs if average.dtype != weight.dtype]
        self._held: list[Tensor] = []  # the weights of `wide`, while the model has the averages

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step; captured graphs of a step include this."""
        if self.same:
            averages, weights = zip(*self.same)
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        decay = torch.tensor(self.decay).item()  # as fp32 has it, so that both factors add up to 1
        for average, weight in self.wide:  # lerp would need an fp32 copy of the weight
            average.mul_(decay).add_(weight, alpha=1 - decay)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Give the model the averages, in its dtypes, inside the block, and its weights back afterwards."""
        self._swap()
        self._held = [weight.detach().clone() for _, weight in self.wide]
        self._fill(average for average, _ in self.wide)
        try:
            yield
        finally:
            self._swap()
            self._fill(self._held)
            self._held = []

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
        """Return the weights of training by their names while the model holds the averages."""
        raw = {id(weight): average for average, weight in self.same}
        raw |= {id(weight): value for value, (_, weight) in zip(self._held, self.wide, strict=True)}
        return {name: raw[id(weight)] for name, weight in self.model.named_parameters()}

    def exact(self) -> dict[str, Tensor]:
        """Return, by their names, the averages that the model can hold only rounded."""
        wide = {id(weight): average for average, weight in self.wide}
        return {name: wide[id(weight)] for name, weight in self.model.named_parameters() if id(weight) in wide}
