"""Define the interface of attention kinds: the module, its configuration, its auxiliary losses.

The kinds themselves are in attention/. Letters: T tokens, E embedding size, H heads, Hkv key/value heads, D query/key
head size, V value head size.
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
    """The sizes of a layer that an attention kind may depend on: H, D, V, E, the longest sequence, and the block's
    kind.

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
    """An auxiliary loss: `value` is logged under its name, `weighted` is added to the training loss; both 0-d.

    It is the mean over the batch's real tokens (`batch.real`), never over padding, or over `num_terms` other things.
    Losses of one name are summed over layers.

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
        """Return the loss with its product with a weight."""
        return cls(value, weight * value, num_terms)

    def __add__(self, other: AuxLoss) -> AuxLoss:  # type: ignore[override]  # not a tuple's concatenation
        return AuxLoss(self.value + other.value, self.weighted + other.weighted)


class Blocks(NamedTuple):
    """The blocks of a kind that is served as bsa: their tokens, how many are chosen, the tokens that share a choice."""

    size: int
    chosen: int
    group: int


class PagedForm(NamedTuple):
    """The form in which new tokens attend to earlier ones, whose keys and values are in pages.

    softmax              whether the weights are a softmax of the scores, else their SiLU
    scale, normalizer    with SiLU the factor of the scores and the divisor of the sum
    position, time       tables of a relative bias, or None
    window               the number of latest tokens, itself included, that a token sees; 0 for all
    codes                the options of the pages (`hstu_sparse.PageFormat`) that the run was trained for; None for any
    blocks               None unless tokens attend to chosen blocks and to means of blocks, as in bsa

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

    The module stores nothing of one call for the next. candidates, context: whether batches may have
    `num_targets` and `num_context`; as `paged`, not inherited with another `forward`. reads_input: whether `forward`
    reads x, which costs an exchange where heads are divided over ranks.

    Examples:
        >>> class Mean(AttentionKind):  # averages the values of a sequence up to each token
        ...     def forward(self, x, q, k, v, batch):
        ...         parts = v.split(batch.seq_offsets.diff().tolist())
        ...         return torch.cat([part.cumsum(0) for part in parts]) / (batch.positions[:, None, None] + 1), {}
        >>> mean = Mean(Mean.Config(kind="my_package.mine:Mean"), sizes)
        >>> torch.equal(mean(x, q, k, v, batch)[0][1], (v[0] + v[1]) / 2), mean.paged(), Mean.kv_heads(mean.config, 2)
        (True, None, 2)
    """

    candidates: ClassVar[bool] = False
    context: ClassVar[bool] = False
    reads_input: ClassVar[bool] = True

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        # It computes something else than its base, whose form in pages would give other results.
        for name in ("paged", "candidates", "context", "reads_input") if "forward" in vars(cls) else ():
            if name not in vars(cls):
                setattr(cls, name, getattr(AttentionKind, name))

    class Config(Options):
        """The kind's options. The checks raise ValueError; its message begins with the option that it is about."""

        # How parallel.context may spread sequences over ranks: "ring", "heads", both or neither.
        context_by: ClassVar[tuple[str, ...]] = ()
        portable: ClassVar[bool] = False  # whether eval.py --export-model can write a model of the kind

        kind: str
        """The attention kind: one of the table below, or a class of your own as `module:Class`."""

        def check_run(self, run: RunOptions) -> None:
            """Raise ValueError, naming the option, if other options of the run do not fit."""

        def check_heads(self, sizes: LayerSizes, ranks: int) -> None:
            """Raise ValueError unless so many ranks can each have a part of the heads (parallel.context_by=heads)."""
            if sizes.num_heads % ranks:
                raise ValueError(f"model.num_heads={sizes.num_heads} must be a multiple of parallel.context={ranks}")

        def for_model(self, sizes: LayerSizes) -> Self:
            """Return these options with `auto` replaced according to the layer; called when a configuration is
            loaded.
            """
            return self

        def check_model(self, sizes: LayerSizes) -> None:
            """Raise ValueError if these options do not fit the layer's sizes; called after `for_model`."""

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            """Raise ValueError, naming the option, if the kind cannot run on the device; called before anything is
            built.
            """
            choose_backend(getattr(self, "backend", "auto"), torch.empty(0, device=device), BACKEND)

        def for_data(self, dataset: Dataset) -> Self:
            """Return these options with `auto` replaced according to the data; called when a run opens its data.

            The result is the configuration that the run is built and stored with.
            """
            return self

        def check_data(self, dataset: Dataset) -> None:
            """Raise ValueError if these options do not fit the data; called after `for_data`, before anything is
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

    def paged(self) -> PagedForm | None:
        """Return how the kind is served from pages; None if it cannot be. Not inherited with another `forward`.

        Raises:
            ValueError: an option's value cannot be served: `has window_size=3, which ...`.
        """
        return None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        """Compute q [T, H, D], k [T, Hkv, D], v [T, Hkv, V] -> (output [T, H, V], auxiliary losses by name).

        x [T, E] is the layer's input after its norm, from which a kind may compute more than q, k and v. Where
        `batch.heads` is a process group, q, k and v have this rank's part of the heads, of all tokens.
        """
        raise NotImplementedError
