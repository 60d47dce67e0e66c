"""The kind `softmax`. Letters: T tokens, B sequences, H heads, V value head size."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from hstu_sparse.bias.relative import pair_bias
from hstu_sparse.core.jagged import jagged_to_padded, padded_to_jagged
from hstu_sparse.core.mask import Mask, visible_pairs
from models.attention.contract import BACKEND, AuxLosses, LayerSizes, PagedForm
from models.attention.shared import BiasedAttention, FlashAttention, TimeBias
from models.protocols import RunOptions


class SoftmaxAttention(FlashAttention, BiasedAttention):
    """Causal softmax attention as in the transformer (arXiv 1706.03762), with dropout on the attention weights.

    Examples:
        >>> config = SoftmaxAttention.Config(kind="softmax", position_bias=True)
        >>> attention = SoftmaxAttention(config, sizes)
        >>> attention(x, q, k, v, batch)[0].shape
        torch.Size([3, 2, 8])
    """

    class Config(FlashAttention.Config, BiasedAttention.Config):
        portable: ClassVar[bool] = True
        context_by: ClassVar[tuple[str, ...]] = ("heads",)

        kind: Literal["softmax"]
        """The attention kind."""
        position_bias: bool = False
        """Whether a learned bias by the distance in positions is added to the scores."""
        time_bias: TimeBias = False
        """Whether a learned bias by the distance in time is added; `auto`: if the data have times."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if self.backend != "auto" and (self.position_bias or self.time_bias):
                raise ValueError(f"backend={self.backend} takes no position_bias or time_bias: leave backend out")

        def check_run(self, run: RunOptions) -> None:
            super().check_run(run)
            if self.backend == "cute" and run.data.features and run.data.features.user_tokens:
                raise ValueError(f"{BACKEND}=cute takes no data.features.users.as=tokens: use triton, or as=sum")

    config: Config

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config, sizes, positions=sizes.max_seq_len)

    context = True
    reads_input = False

    def paged(self) -> PagedForm:
        return self.biased_form(softmax=True)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        backend = self.config.backend
        if (q.is_cuda or backend != "auto") and self.bias(batch) is None:
            options: dict[str, Any] = dict(dropout=self.config.dropout if self.training else 0.0, backend=backend)
            options |= dict(causal=True, num_context=batch.context_counts)
            return cast(Tensor, hstu_sparse.flash_attention(q, k, v, batch.seq_offsets, **options)), {}
        return self.padded(q, k, v, batch), {}

    def padded(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Compute attention [T, H, V] with F.scaled_dot_product_attention on padded sequences."""
        longest, one = batch.longest(self.sizes.max_seq_len), batch.num_sequences == 1 and not q.is_cuda

        def pad(y: Tensor) -> Tensor:  # [T, ...] -> [B, longest, ...]
            if one:
                return y[None]
            if y.dim() == 1:
                return jagged_to_padded(y, batch.seq_offsets, longest)
            return jagged_to_padded(y.flatten(1), batch.seq_offsets, longest).unflatten(-1, y.shape[1:])

        # Padding is at the end of sequences, so the causal mask hides it.
        mask = self.mask(batch, longest, q, pad)
        out = F.scaled_dot_product_attention(
            pad(q).transpose(1, 2),
            pad(k).transpose(1, 2),
            pad(v).transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        if one:
            return out[0].transpose(0, 1)
        out = padded_to_jagged(out.transpose(1, 2).flatten(2), batch.seq_offsets, q.shape[0])
        return out.unflatten(-1, (q.shape[1], v.shape[2]))

    def mask(self, batch: Batch, longest: int, q: Tensor, pad: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return the bias plus -inf for masked keys, [B or 1, 1, longest, longest]; None if a causal mask is enough.

        pad: [T] -> [B, longest].
        """
        bias = self.bias(batch)
        if bias is None and not batch.num_context:
            return None
        place = torch.arange(longest, device=q.device)
        mask = Mask(num_context=batch.context_counts)
        distance, visible = visible_pairs(mask, place, batch.seq_offsets.diff())
        if bias is None:
            added = torch.zeros((), device=q.device).expand(visible.shape)
            return added.masked_fill(~visible, float("-inf")).to(q.dtype)[:, None]
        query_times = key_times = None
        if bias.time is not None:
            queries, keys = (cast(Tensor, y) for y in (bias.query_timestamps, bias.timestamps))
            query_times, key_times = pad(queries)[:, :, None], pad(keys)[:, None, :]
        added = cast(Tensor, pair_bias(bias, distance, query_times, key_times))
        added, visible = (x[:, None] if x.dim() == 3 else x[None, None] for x in (added, visible))
        return added.to(q.dtype).masked_fill(~visible, float("-inf"))
