"""Define base classes of attention kinds: relative biases, the normaliser of SiLU attention, shared key heads.

Letters: N normaliser, H heads, Hkv key/value heads.
"""

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from data.batch import Batch
from data.options import auto_or, chosen
from data.types import Dataset
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.launch import padded_head
from hstu_sparse.flash.cute import check_available
from models.attention.contract import BACKEND, AttentionKind, LayerSizes, PagedForm
from models.protocols import RunOptions

FEW_CHANNELS = 64  # the least channels of all `few_kv_heads` together, if possible
MANY_CHANNELS = 256  # the most padded channels of all `many_kv_heads` together

EXTRA_POSITIONS = 11  # the published HSTU adds it to max_seq_len in its normaliser and bias tables


def check_16_bits(backend: str, run: RunOptions) -> None:
    """Raise ValueError unless the run computes in 16 bits, as the backend requires."""
    if run.train.autocast != "bf16":
        raise ValueError(f"{BACKEND}={backend} computes in 16 bits: set train.autocast to bf16, or use backend=triton")


def new_table(size: int) -> nn.Parameter:
    """Return a new bias table of `size` entries."""
    return nn.Parameter(nn.init.normal_(torch.empty(size), std=0.02))


def relative_bias(position: Tensor | None, time: Tensor | None, batch: Batch) -> RelativeBias | None:
    """Return the bias by these tables and the batch's times; None without tables."""
    if position is None and time is None:
        return None
    return RelativeBias(position, time, batch.timestamps, batch.query_timestamps)


def _switch(value):
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError(f"expected true, false or auto, got {value!r}")


# A bias by time: `auto` is true if the data have times and false otherwise. A model that is built without a data set
# has the bias, since its batches carry times.
TimeBias = Annotated[bool | Literal["auto"], BeforeValidator(_switch)]


# A number of at least 1 (or 2), or `auto`, which a kind's `for_model` replaces by a number.
AutoCount = Annotated[int | Literal["auto"], BeforeValidator(auto_or(1))]
AutoRate = Annotated[int | Literal["auto"], BeforeValidator(auto_or(2))]


class BiasedAttention(AttentionKind):
    """Kinds that add a relative bias by position and time to their scores; all heads share its tables."""

    class Config(AttentionKind.Config):
        position_bias: bool = True
        """Whether a learned bias by the distance in positions is added to the scores."""
        time_bias: TimeBias = "auto"
        """Whether a learned bias by the distance in time is added; `auto`: if the data have times."""
        num_time_buckets: int = Field(128, ge=1, le=10_000)
        """The number of buckets of distances in time; their widths grow exponentially."""

        def for_data(self, dataset: Dataset) -> Self:
            names = [name for name in self.time_options() if getattr(self, name) == "auto"]
            return self.model_copy(update=dict.fromkeys(names, dataset.has_timestamps))

        def check_data(self, dataset: Dataset) -> None:
            for name in self.time_options():
                if getattr(self, name) and not dataset.has_timestamps:
                    raise ValueError(f"{name}: {dataset.name} has no timestamps, set it to auto or false")

        def time_options(self) -> tuple[str, ...]:
            """Return the options of type TimeBias."""
            return ("time_bias",)

    def __init__(self, config: Config, sizes: LayerSizes, positions: int):
        super().__init__(config, sizes)
        self.position_bias = new_table(positions) if config.position_bias else None
        self.time_bias = new_table(config.num_time_buckets + 1) if config.time_bias else None

    def bias(self, batch: Batch) -> RelativeBias | None:
        return relative_bias(self.position_bias, self.time_bias, batch)

    def biased_form(self, **others: Any) -> PagedForm:
        """Return a `PagedForm` with the bias tables."""
        return PagedForm(position=self.position_bias, time=self.time_bias, **others)


class HSTUAttention(BiasedAttention):
    """Base of SiLU attention: a position table of max_seq_len + 11 entries, and `normalizer`."""

    class Config(BiasedAttention.Config):
        scale: float = 1.0
        """The factor of the products of queries and keys."""
        normalizer: int | None = Field(None, ge=1)
        """The divisor of the sum over tokens; if absent, max_seq_len + 11, as published. With a max_seq_len in the
        thousands, a smaller divisor keeps the first tokens' outputs above the epsilon of the norm after attention."""
        backend: Literal["auto", "triton", "reference"] = "auto"
        """The implementation. `auto`: Triton kernels for CUDA tensors, the reference for CPU tensors."""

    config: Config

    def __init__(self, config: Config, sizes: LayerSizes):
        positions = sizes.max_seq_len + EXTRA_POSITIONS
        super().__init__(config, sizes, positions=positions)
        self.normalizer = config.normalizer or positions

    def biased_form(self, **others: Any) -> PagedForm:
        return super().biased_form(scale=self.config.scale, normalizer=self.normalizer, **others)


class SharedKeys(AttentionKind):
    """Base of grouped-query attention: several query heads may share a key and value head (arXiv 2305.13245)."""

    class Config(AttentionKind.Config):
        num_kv_heads: int | None = Field(None, ge=1)
        """The number of key and value heads; if absent, the number of query heads."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if self.num_kv_heads and sizes.num_heads % self.num_kv_heads:
                raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide model.num_heads={sizes.num_heads}")

        def check_heads(self, sizes: LayerSizes, ranks: int) -> None:
            super().check_heads(sizes, ranks)
            if self.num_kv_heads and self.num_kv_heads % ranks:
                raise ValueError(
                    f"model.attention.num_kv_heads={self.num_kv_heads} must be a multiple of parallel.context={ranks}"
                )

    @classmethod
    def kv_heads(cls, config: Any, num_heads: int) -> int:
        return config.num_kv_heads or num_heads


class FlashAttention(SharedKeys):
    """Base of softmax attention that `hstu_sparse.flash_attention` computes."""

    class Config(SharedKeys.Config):
        dropout: float = Field(0.0, ge=0, lt=1)
        """The dropout of the attention weights."""
        backend: Literal["auto", "triton", "reference", "cute"] = "auto"
        """The implementation; `cute` is FlashAttention-4, which needs the extra `cute`."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if self.backend == "cute" and self.dropout:
                raise ValueError("backend=cute has no dropout: set attention's dropout to 0, or use backend=triton")

        def check_device(self, run: RunOptions, device: torch.device) -> None:
            if self.backend != "cute":
                super().check_device(run, device)
                return
            check_available(BACKEND, device)
            check_16_bits("cute", run)


class FewKeys(SharedKeys):
    """Base of kinds that gather keys and values, and so are faster with fewer key and value heads."""

    class Config(SharedKeys.Config):
        num_kv_heads: AutoCount | None = "auto"  # type: ignore[assignment]  # a number or auto
        """The number of key and value heads; null: the number of query heads; `auto`: fewer if that would be slow."""
        backend: Literal["auto", "triton", "reference"] = "auto"
        """The implementation. `auto`: Triton kernels for CUDA tensors, the reference for CPU tensors."""

        def default_kv_heads(self, sizes: LayerSizes) -> int:
            """Return the value of num_kv_heads for `auto`."""
            raise NotImplementedError

        def for_model(self, sizes: LayerSizes) -> Self:
            heads = self.default_kv_heads(sizes) if self.num_kv_heads == "auto" else self.num_kv_heads
            return super().for_model(sizes).model_copy(update={"num_kv_heads": heads})

    @classmethod
    def kv_heads(cls, config: Any, num_heads: int) -> int:
        return num_heads if config.num_kv_heads is None else chosen(config.num_kv_heads)


def padded_channels(sizes: LayerSizes) -> int:
    """Return the number of channels of a key head, padded as in a kernel's tile."""
    return padded_head(max(sizes.attention_dim, sizes.linear_dim))


def many_kv_heads(sizes: LayerSizes) -> int:
    """Return the greatest number of key heads with at most MANY_CHANNELS padded channels in total, at least one."""
    heads = [n for n in range(1, sizes.num_heads + 1) if sizes.num_heads % n == 0]
    return max((n for n in heads if n * padded_channels(sizes) <= MANY_CHANNELS), default=1)


def few_kv_heads(sizes: LayerSizes) -> int:
    """Return the least number of key heads with FEW_CHANNELS channels in total; `many_kv_heads` if there is none."""
    most, size = many_kv_heads(sizes), min(sizes.attention_dim, sizes.linear_dim)
    heads = (n for n in range(1, most + 1) if sizes.num_heads % n == 0)
    return next((n for n in heads if n * size >= FEW_CHANNELS), most)
