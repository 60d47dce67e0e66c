"""Define the interface of attention kinds: the module, its configuration, its auxiliary losses.

The kinds themselves are in attention/. Letters: T tokens, E embedding size, H heads, Hkv key/value heads, D query/key
head size, V value head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from data.batch import Batch
from data.options import Options
from data.types import Dataset
from models.protocols import RunOptions


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer that an attention kind may depend on: H, D, V, E, the longest sequence, and the block's
    kind.
    """

    num_heads: int
    attention_dim: int
    linear_dim: int
    embedding_dim: int
    max_seq_len: int
    block: str = "hstu"


class AuxLoss(NamedTuple):
    """An auxiliary loss: `value` is logged under its name, `weighted` is added to the training loss; both 0-d.

    It is the mean over the batch's real tokens (`batch.real`), never over padding, or over `num_terms` other things.
    Losses of one name are summed over layers.
    """

    value: Tensor
    weighted: Tensor
    num_terms: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, weight: float, num_terms: Tensor | None = None) -> AuxLoss:
        return cls(value, weight * value, num_terms)

    def __add__(self, other: AuxLoss) -> AuxLoss:  # type: ignore[override]  # not a tuple's concatenation
        return AuxLoss(self.value + other.value, self.weighted + other.weighted)


class AttentionKind(nn.Module):
    """Base of the attention modules: `__init__(config, sizes)`, `forward(x, q, k, v, batch)`.

    The module stores nothing of one call for the next.
    """

    class Config(Options):
        """The kind's options. The checks raise ValueError; its message begins with the option that it is about."""

        across_ranks: ClassVar[bool] = False  # whether tokens see those of other processes, with parallel.context

        kind: str
        """The attention kind: one of the table below, or a class of your own as `module:Class`."""

        def check_run(self, run: RunOptions) -> None:
            if run.parallel.context > 1 and not self.across_ranks:
                raise ValueError("parallel.context: only model.attention.kind=ring sees tokens of other processes")

        def for_model(self, sizes: LayerSizes) -> Self:
            """Return these options with `auto` replaced according to the layer; called when a configuration is
            loaded.
            """
            return self

        def check_model(self, sizes: LayerSizes) -> None:
            """Raise ValueError if these options do not fit the layer's sizes; called after `for_model`."""

        def for_data(self, dataset: Dataset) -> Self:
            """Return these options with `auto` replaced according to the data; called when a run opens its data.

            The result is the configuration that the run is built and stored with.
            """
            return self

        def check_data(self, dataset: Dataset) -> None:
            """Raise ValueError if the data lack what these options need; called after `for_data`, before anything is
            built.
            """

        def phase_ends(self) -> tuple[int, ...]:
            """Return the training steps (counted from 0) at which the module's behaviour changes.

            `batch.phase` is the greatest of them, over all layers, that has been reached, 0 before the first and
            greater than all outside of training; so `batch.phase < warmup_steps` tells a module that it is in its
            warm-up.
            """
            return ()

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__()
        self.config, self.sizes = config, sizes

    @classmethod
    def kv_heads(cls, config: Any, num_heads: int) -> int:
        """Return Hkv, the number of heads of k and v, which the layer's projection then produces."""
        return num_heads

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        """Compute q [T, H, D], k [T, Hkv, D], v [T, Hkv, V] -> (output [T, H, V], auxiliary losses by name).

        x [T, E] is the layer's input after its norm, from which a kind may compute more than q, k and v.
        """
        raise NotImplementedError
