"""GateModel: the three gates with which block-sparse attention mixes its branches."""

from torch import Tensor, nn


class GateModel(nn.Module):
    """q [..., H, D] -> (g_cmp, g_slc, g_swa), each [..., H] in (0, 1); one small network shared by the heads.

    `in_features` is D.
    """

    def __init__(self, in_features: int, hidden_dim: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3), nn.Sigmoid()
        )

    def forward(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layers(q).unbind(-1)
