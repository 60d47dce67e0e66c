"""Multiply a constant sparse matrix with a dense one, with a gradient that needs neither sorting nor atomics.

The gradient of `embedding_bag` sorts the entries in each step, to find the entries of each row of the table: on a GPU
some twenty kernels. Here the entries are constant: both directions are sums over lists that are laid out once, in a
fixed order. Letters: R rows, C columns, S entries, E embedding size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

MOST = 32  # entries of a column that one sum adds sequentially


class SparseProduct(nn.Module):
    """Compute matrix [R, C] @ dense [C, E] -> [R, E] in fp32.

    rows, columns: [S] int64, the positions of the entries; weights: [S], the entries; shape: (R, C). The matrix is not
    part of the state dict.
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, shape: tuple[int, int]):
        super().__init__()
        # Rows are not split: a row has the same bits as when it is summed alone.
        self.forth = _Sums(rows, columns, weights, shape[0], most=max(1, len(rows)))
        self.back = _Sums(columns, rows, weights, shape[1], most=MOST)

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The matrix by rows: offsets [R+1], columns [S] and weights [S] in fp32."""
        return self.forth.level(0)

    def forward(self, dense: Tensor) -> Tensor:
        return _Product.apply(dense.float(), self.forth, self.back)


class _Sums(nn.Module):
    """Weighted sums of rows of a table: of pieces of at most `most` rows, then of the pieces' sums, until each is one.

    sums: [S], the index of the sum that an entry belongs to, of `count`; rows: [S], of the table; weights: [S].
    """

    def __init__(self, sums: np.ndarray, rows: np.ndarray, weights: np.ndarray, count: int, *, most: int):
        super().__init__()
        self.levels = 0
        order = np.argsort(sums, kind="stable")
        rows, weights = rows[order], weights[order]
        lengths = np.bincount(sums, minlength=count)
        while lengths.max(initial=0) > most:
            pieces = -(-lengths // most)
            sizes = np.full(pieces.sum(), most)
            last = np.cumsum(pieces)[pieces > 0] - 1
            sizes[last] = (lengths - most * (pieces - 1))[pieces > 0]
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
    def forward(ctx: Any, dense: Tensor, forth: _Sums, back: _Sums) -> Tensor:
        ctx.back = back
        return forth(dense)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient.contiguous()), None, None
