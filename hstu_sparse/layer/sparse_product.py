"""Multiply a constant sparse matrix by a dense one; the gradient needs no sorting and no atomic additions.

The gradient of `embedding_bag` sorts the entries in each step, by about twenty kernels on a GPU. The entries here are
constant: they are sorted once by rows, for forward, and once by columns, for backward.

Letters: R rows, C columns, S entries, E embedding size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

MAX_PIECE = 32  # entries of a column that are summed sequentially


class SparseProduct(nn.Module):
    """Compute matrix [R, C] @ dense [C, E] -> [R, E] in fp32. The matrix is not part of the state dict.

    rows, columns: [S] int64, the indices of the entries. weights: [S], their values. shape: (R, C).
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, shape: tuple[int, int]):
        super().__init__()
        # Rows are not divided into pieces, so that the result of a row does not depend on other rows.
        self.by_rows = _Sums(rows, columns, weights, shape[0], max_piece=max(1, len(rows)))
        self.by_columns = _Sums(columns, rows, weights, shape[1], max_piece=MAX_PIECE)

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The matrix in CSR format: offsets [R+1], columns [S], weights [S] in fp32."""
        return self.by_rows.level(0)

    def forward(self, dense: Tensor) -> Tensor:
        return _Product.apply(dense.float(), self.by_rows, self.by_columns)


class _Sums(nn.Module):
    """Compute `count` weighted sums of rows of a table: first of pieces of at most max_piece rows, then of the pieces.

    sums: [S], the index of each entry's sum. rows: [S], the index of its row in the table. weights: [S].
    """

    def __init__(self, sums: np.ndarray, rows: np.ndarray, weights: np.ndarray, count: int, *, max_piece: int):
        super().__init__()
        self.levels = 0
        order = np.argsort(sums, kind="stable")
        rows, weights = rows[order], weights[order]
        lengths = np.bincount(sums, minlength=count)
        while lengths.max(initial=0) > max_piece:
            pieces = -(-lengths // max_piece)
            sizes = np.full(pieces.sum(), max_piece)
            last = np.cumsum(pieces)[pieces > 0] - 1
            sizes[last] = (lengths - max_piece * (pieces - 1))[pieces > 0]
            self._add(sizes, rows, weights)
            lengths, rows, weights = pieces, np.arange(len(sizes)), np.ones(len(sizes))
        self._add(lengths, rows, weights)

    def _add(self, lengths: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> None:
        offsets = np.append(0, np.cumsum(lengths))
        level = {"offsets": offsets.astype(np.int64), "rows": rows.astype(np.int64), "weights": weights.astype("f4")}
        for name, value in level.items():
            self.register_buffer(f"{name}_{self.levels}", torch.from_numpy(value), persistent=False)
        self.levels += 1

    def level(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        offsets, rows, weights = (getattr(self, f"{name}_{number}") for name in ("offsets", "rows", "weights"))
        return offsets, rows, weights

    def forward(self, table: Tensor) -> Tensor:
        for number in range(self.levels):
            offsets, rows, weights = self.level(number)
            table = F.embedding_bag(
                rows, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
            )
        return table


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, by_rows: _Sums, by_columns: _Sums) -> Tensor:
        ctx.by_columns = by_columns
        return by_rows(dense)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.by_columns(gradient.contiguous()), None, None
