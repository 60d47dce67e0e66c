"""The kind `bsa`."""

import functools
import logging
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.contract import AuxLosses, Blocks, LayerSizes, PagedForm
from models.attention.shared import HSTUAttention
from models.gate import GateModel

# selection_group -> the sequence length from which forward plus backward of bsa is faster than that of dense, without
# biases and with both biases (docs/bsa.md: H200, bf16, 4 heads of 128, blocks of 64, 16 selected).
CROSSOVER = {1: 7457, 2: 6900, 16: 6481, 64: 2710}
BIASED_CROSSOVER = {1: 11048, 2: 9908, 16: 9478, 64: 2901}

log = logging.getLogger(__name__)


@functools.cache  # one warning for all layers
def warn_if_too_short(max_seq_len: int, selection_group: int, biased: bool) -> None:
    """Warn if dense attention is faster at `max_seq_len`. biased: whether there is a position bias or a time bias."""
    table = BIASED_CROSSOVER if biased else CROSSOVER
    group = max(size for size in table if size <= selection_group)
    if max_seq_len < table[group]:
        measured = ""
        if torch.cuda.is_available():  # measured on a GPU
            biases = "both" if biased else "no"
            measured = f" (about {table[group]:,} on an H200, selection_group={group}, {biases} biases)"
        log.warning(
            "bsa is for long sequences%s: at max_seq_len=%d dense attention is faster, see docs/bsa.md",
            measured,
            max_seq_len,
        )


class BlockSparseAttention(HSTUAttention):
    """Mix attention to means of blocks, to selected blocks and to a sliding window by gates computed from queries.

    Examples:
        >>> config = BlockSparseAttention.Config(kind="bsa", block_size=2, block_counts=1, window_size=2)
        >>> attention = BlockSparseAttention(config, sizes)
        >>> attention(x, q, k, v, batch)[0].shape
        torch.Size([3, 2, 8])
    """

    class Config(HSTUAttention.Config):
        context_by: ClassVar[tuple[str, ...]] = ("heads",)

        kind: Literal["bsa"]
        """The attention kind."""
        block_size: int = Field(32, ge=1)
        """The number of tokens of a block."""
        block_counts: int = Field(4, ge=1)
        """The number of blocks that a token selects."""
        window_size: int = Field(0, ge=0)
        """The number of latest tokens that the sliding-window branch attends to; 0 disables this branch."""
        selection_group: int = Field(1, ge=1)
        """The number of neighbouring tokens that share a selection; it must divide block_size."""
        gate_hidden_dim: int = Field(32, ge=1)
        """The hidden size of the network that computes the weights of the branches."""

        def check_model(self, sizes: LayerSizes) -> None:
            super().check_model(sizes)
            if self.block_size % self.selection_group:
                raise ValueError(f"selection_group={self.selection_group} does not divide block_size={self.block_size}")

    config: Config
    reads_input = False

    def __init__(self, config: Config, sizes: LayerSizes):
        super().__init__(config, sizes)
        self.gate = GateModel(sizes.attention_dim, config.gate_hidden_dim)
        warn_if_too_short(sizes.max_seq_len, config.selection_group, config.position_bias or bool(config.time_bias))

    def paged(self) -> PagedForm:
        c = self.config
        return self.biased_form(blocks=Blocks(c.block_size, c.block_counts, c.selection_group))

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
        c, bias = self.config, self.bias(batch)
        lengths = batch.seq_offsets, self.sizes.max_seq_len
        options: dict[str, Any] = dict(bias=bias, backend=c.backend, block_size=c.block_size)
        options["plan"] = hstu_sparse.bsa_plan(q, *lengths, once=batch.once, **options)
        options |= dict(block_counts=c.block_counts, window_size=c.window_size, selection_group=c.selection_group)
        options |= dict(scale=c.scale, normalizer=self.normalizer)
        return cast(Tensor, hstu_sparse.bsa_attention(q, k, v, *lengths, self.gate(q), **options)), {}
