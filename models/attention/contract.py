"""Define the interface of attention kinds: the module, its configuration and its auxiliary losses.

Letters: T tokens, E embedding size, H heads, Hkv key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.options import Options
from data.types import Dataset
from hstu_sparse.core.validation import choose_backend
from models.protocols import RunOptions

BACKEND = "model.attention.backend"


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer: H, D, V, E, the length of the longest sequence, and `model.block`.

    Examples:
        >>> LayerSizes(num_heads=2, attention_dim=16, linear_dim=16, embedding_dim=32, max_seq_len=50).block
        'hstu'
    """

    num_heads: int
    attention_dim: int
    linear_dim: int
    embedding_dim: int
    max_seq_len: int
    block: str = "hstu"


class AuxLoss(NamedTuple):
    """An auxiliary loss: `value` is logged, `weighted` is added to the training loss; both are 0-d.

    `value` is a mean over the batch's tokens without padding (`batch.real`) or, with `num_terms`, over that number of
    other terms. Losses of the same name are summed over layers.

    Examples:
        >>> loss = AuxLoss.of(torch.tensor(2.0), weight=0.5)
        >>> (loss + loss).value, loss.weighted
        (tensor(4.), tensor(1.))
    """

    value: Tensor
    weighted: Tensor
    num_terms: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor, weight: float, num_terms: Tensor | None = None) -> AuxLoss:
        """Return the loss with `weighted` = weight * value."""
        return cls(value, weight * value, num_terms)

    def __add__(self, other: AuxLoss) -> AuxLoss:  # type: ignore[override]  # not a tuple's concatenation
        return AuxLoss(self.value + other.value, self.weighted + other.weighted)


AuxLosses = dict[str, AuxLoss]  # by name


class Blocks(NamedTuple):
    """The blocks of bsa: tokens of a block, selected blocks of a token, neighbouring tokens that share a selection."""

    size: int
    chosen: int
    group: int


class PagedForm(NamedTuple):
    """The options of attention from new tokens to earlier ones, whose keys and values are in a paged cache.

    softmax              whether attention weights are the softmax of the scores; otherwise their SiLU
    scale, normalizer    with SiLU, the factor of the scores and the divisor of the sum
    position, time       the tables of a relative bias, or None
    window               the number of latest tokens, itself included, to which a token attends; 0 for all
    codes                the options of pages (`hstu_sparse.PageFormat`) that the run was trained for; None for any
    blocks               the blocks of bsa; None for other kinds

    Examples:
        >>> attention.paged().softmax, attention.paged().position is None  # of the kind softmax
        (True, True)
    """

    softmax: bool = False
    scale: float | None = None
    normalizer: int | None = None
    position: Tensor | None = None
    time: Tensor | None = None
    window: int = 0
    codes: dict[str, Any] | None = None
    blocks: Blocks | None = None


class AttentionKind(nn.Module):
    """Base of the attention modules: `__init__(config, sizes)`, `forward(x, q, k, v, batch)`.

    The module has no state that changes between calls.

    candidates, context  whether batches may have `num_targets` and `num_context`
    reads_input          whether `forward` reads x; if so, ranks that divide the heads exchange x

    A subclass that defines `forward` inherits neither these three nor `paged`.

    Examples:
        >>> class Mean(AttentionKind):  # averages the values of a sequence up to each token
        ...     def forward(self, x, q, k, v, batch):
        ...         parts = v.split(batch.seq_offsets.diff().tolist())
        ...         return torch.cat([part.cumsum(0) for part in parts]) / (batch.positions[:, None, None] + 1), {}
        >>> mean = Mean(Mean.Config(kind="my_package.my_module:Mean"), sizes)
        >>> torch.equal(mean(x, q, k, v, batch)[0][1], (v[0] + v[1]) / 2), mean.paged(), Mean.kv_heads(mean.config, 2)
        (True, None, 2)
    """

    candidates: ClassVar[bool] = False
    context: ClassVar[bool] = False
    reads_input: ClassVar[bool] = True

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        # Another `forward` may not support what the base class supports.
        for name in ("paged", "candidates", "context", "reads_input") if "forward" in vars(cls) else ():
            if name not in vars(cls):
                setattr(cls, name, getattr(AttentionKind, name))

    class Config(Options):
        """The kind's options. The checks raise ValueError with a message that begins with the name of an option."""

        # How parallel.context may divide attention over ranks: "ring", "heads", both or neither.
        context_by: ClassVar[tuple[str, ...]] = ()
        portable: ClassVar[bool] = False  # whether eval.py --export-model supports the kind

        kind: str
        """The attention kind: one of the table below, or the path of your class, `module:Class`."""

        def check_run(self, run: RunOptions) -> None:
            """Raise ValueError if these options do not fit other options of the run."""

        def check_heads(self, sizes: LayerSizes, ranks: int) -> None:
            """Raise ValueError unless `ranks` ranks can divide the heads (parallel.context_by=heads)."""
            if sizes.num_heads % ranks:
                raise ValueError(f"model.num_heads={sizes.num_heads} must be a multiple of parallel.context={ranks}")

        def for_model(self, sizes: LayerSizes) -> Self:
            """Return these options with `auto` resolved for a layer; called when a configuration is loaded."""
            return self

        def check_model(self, sizes: LayerSizes) -> None:
            """Raise ValueError if these options do not fit the layer's sizes; called after `for_model`."""

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            """Raise ValueError if the kind does not support the device; called before the model is built."""
            choose_backend(getattr(self, "backend", "auto"), torch.empty(0, device=device), BACKEND)

        def for_data(self, dataset: Dataset) -> Self:
            """Return these options with `auto` resolved for the data; the run is built and stored with them."""
            return self

        def check_data(self, dataset: Dataset) -> None:
            """Raise ValueError if these options do not fit the data; called after `for_data`."""

        def phase_ends(self) -> tuple[int, ...]:
            """Return the training steps, counted from 0, at which the module's behaviour changes.

            In training, `batch.phase` is the latest of these steps (over all layers) that has begun, or 0; outside of
            training it is greater than all steps. A module with a warm-up thus compares `batch.phase < warmup_steps`.
            """
            return ()

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__()
        self.config, self.sizes = config, sizes

    @classmethod
    def kv_heads(cls, config: Any, num_heads: int) -> int:
        """Return Hkv, the number of heads of k and v that the layer projects to."""
        return num_heads

    def paged(self) -> PagedForm | None:
        """Return the options of attention to a paged cache; None if the kind cannot be served.

        Raises:
            ValueError: an option's value cannot be served; the message begins with `has`: `has bits=3, ...`.
        """
        return None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        """Compute q [T, H, D], k [T, Hkv, D], v [T, Hkv, V] -> (output [T, H, V], auxiliary losses by name).

        x [T, E] is the layer's normalised input. If ranks divide the heads (`batch.heads` is their process group), q, k
        and v have all tokens and this rank's heads.
        """
        raise NotImplementedError
