"""The kind `bsa`."""

import functools
import logging
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

import hstu_sparse
from data.batch import Batch
from models.attention.contract import AuxLoss, Blocks, LayerSizes, PagedForm
from models.attention.shared import HSTUAttention
from models.gate import GateModel

# selection_group -> the length from which bsa's forward and backward together take less time than dense's, measured
# on an H200 (docs/bsa.md: bf16, 4 heads of 128, blocks of 64, 16 chosen), without biases and with both.
CROSSOVER = {1: 7457, 2: 6900, 16: 6481, 64: 2710}
BIASED_CROSSOVER = {1: 11048, 2: 9908, 16: 9478, 64: 2901}


log = logging.getLogger(__name__)


@functools.cache  # once for a run, not for each of its layers
def warn_if_too_short(max_seq_len: int, selection_group: int, biased: bool) -> None:
    """Warn when no sequence of a run is long enough for block sparsity to be faster.

    biased: whether there is a bias by position, by time or both.
    """
    table = BIASED_CROSSOVER if biased else CROSSOVER
    group = max(size for size in table if size <= selection_group)
    if max_seq_len < table[group]:
        measured = ""
        if torch.cuda.is_available():  # the figures are a GPU's
            biases = "both" if biased else "no"
            measured = f" (about {table[group]:,} on an H200, selection_group={group}, {biases} biases)"
        log.warning(
            "bsa is for long sequences%s: at max_seq_len=%d dense attention is faster, see docs/bsa.md",
            measured,
            max_seq_len,
        )


class BlockSparseAttention(HSTUAttention):
    """Compression, block selection and a sliding window, mixed by a gate that is computed from the queries.

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
        """The number of latest tokens of the sliding-window branch; 0 leaves that branch out."""
        selection_group: int = Field(1, ge=1)
        """The number of neighbouring tokens that share one selection; it divides block_size."""
        gate_hidden_dim: int = Field(32, ge=1)
        """The hidden size of the network that weighs the branches."""

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

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        c, bias = self.config, self.bias(batch)
        lengths = batch.seq_offsets, self.sizes.max_seq_len
        options: dict[str, Any] = dict(bias=bias, backend=c.backend, block_size=c.block_size)
        options["plan"] = hstu_sparse.bsa_plan(q, *lengths, once=batch.once, **options)
        out = hstu_sparse.bsa_attention(
            q,
            k,
            v,
            *lengths,
            self.gate(q),
            block_counts=c.block_counts,
            window_size=c.window_size,
            selection_group=c.selection_group,
            scale=c.scale,
            normalizer=self.normalizer,
            **options,
        )
        return cast(Tensor, out), {}
