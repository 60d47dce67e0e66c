"""Project fixed vectors of items into the embedding space by a trained matrix.

Letters: I items, n vectors, W the size of a vector, R rows, E embedding size, C size of a correction.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data.features.features import Feature
from hstu_sparse.core.precision import without_autocast

AT_ONCE, AT_ONCE_ON_A_CPU = 2**26, 2**20  # elements of vectors that are converted to fp32 at a time


class ItemVectors(nn.Module):
    """The part of items' representations that is computed from vectors: their products with a trained matrix.

    With a correction, the product of C trained numbers of each item, initially zeros, and another matrix is added. An
    item without a vector has the product zero.

    table  [n, W] float16, on a CPU a memory-mapped file of the prepared data or the run; not in checkpoints
    rows   [I] int64, the row of each item in `table`, -1 for none
    """

    table: Tensor
    rows: Tensor

    def __init__(self, feature: Feature, embedding_dim: int, correction: int = 0):
        super().__init__()
        has_vector = np.diff(feature.offsets) > 0
        rows = np.full(len(has_vector), -1, np.int64)
        rows[has_vector] = feature.codes
        self.register_buffer("table", torch.from_numpy(feature.values), persistent=False)
        self.register_buffer("rows", torch.from_numpy(rows), persistent=False)
        self.weight = nn.Parameter(_drawn(self.width, embedding_dim))
        self.correction = self.correction_weight = None
        if correction:
            self.correction = nn.Parameter(torch.zeros(len(rows), correction))
            self.correction_weight = nn.Parameter(_drawn(correction, embedding_dim))

    @property
    def width(self) -> int:
        return self.table.shape[1]

    def forward(self, items: Tensor | None = None) -> Tensor:
        """Return [R, E] fp32 for the items [R] int64; None: [I, E] for all items."""
        rows = self.rows if items is None else self.rows[items]
        projected = _Projection.apply(self.weight, self.table, rows)
        if self.correction is None or self.correction_weight is None:
            return projected
        return projected + self._corrected(self.correction if items is None else F.embedding(items, self.correction))

    @without_autocast
    def _corrected(self, corrections: Tensor) -> Tensor:
        assert self.correction_weight is not None
        return corrections @ self.correction_weight

    def project(self, vectors: Tensor) -> Tensor:
        """Return [R, E] fp32 for items that are not in the catalogue; vectors: [R, W]."""
        rows = torch.arange(len(vectors), device=vectors.device)
        return _Projection.apply(self.weight, vectors, rows)


def _drawn(rows: int, columns: int) -> Tensor:
    """Draw a matrix whose products with vectors of length one have the standard deviation of other features' rows."""
    return nn.init.trunc_normal_(torch.empty(rows, columns), std=0.02, a=-0.04, b=0.04)


class _Projection(torch.autograd.Function):
    """Compute table[rows] [R, W] @ weight [W, E] in fp32 without an fp32 copy of the table; zeros for rows of -1."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, weight: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(table, rows)
        out = weight.new_empty(len(rows), weight.shape[1])
        for first, vectors in _parts(table, rows):
            torch.mm(vectors, weight, out=out[first : first + len(vectors)])
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        table, rows = ctx.saved_tensors
        total = gradient.new_zeros(table.shape[1], gradient.shape[1])
        for first, vectors in _parts(table, rows):
            total.addmm_(vectors.T, gradient[first : first + len(vectors)])
        return total, None, None


def _parts(table: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (the index of the first row, the vectors [m, W] in fp32) of chunks of rows."""
    size = max(1, (AT_ONCE_ON_A_CPU if table.device.type == "cpu" else AT_ONCE) // table.shape[1])
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        vectors = table.index_select(0, part.clamp(min=0)).float()
        yield first, vectors.masked_fill_(part[:, None] < 0, 0)
