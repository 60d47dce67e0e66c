"""Define GateModel, which computes the gates of the branches of block-sparse attention."""

from typing import cast

from torch import Tensor, nn

import hstu_sparse
from hstu_sparse.layer.query_gates import takes_kernel


class GateModel(nn.Module):
    """Compute q [..., H, D] -> (compression, selection, window), each [..., H] in (0, 1), by one network for all heads.

    in_features: D. On a GPU the network is one kernel, `hstu_sparse.query_gates`, if that supports the sizes.
    """

    def __init__(self, in_features: int, hidden_dim: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3), nn.Sigmoid()
        )

    def forward(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, _, last, _ = (cast(nn.Linear, layer) for layer in self.layers)
        if q.is_cuda and q.dim() == 3 and takes_kernel(first.in_features, first.out_features, q.dtype):
            gates = hstu_sparse.query_gates(q, first.weight, first.bias, last.weight, last.bias)
        else:
            gates = self.layers(q).movedim(-1, 0)
        compression, selection, window = gates.unbind(0)
        return compression, selection, window
