"""The gates' network in plain PyTorch: the specification. Letters: see api.py."""

import torch
from torch.nn import functional as F


def query_gates_reference(q, w1, b1, w2, b2) -> torch.Tensor:
    """sigmoid(w2 relu(w1 q + b1) + b2) in q's dtype: [G, T, H]."""
    w1, b1, w2, b2 = (x.to(q.dtype) for x in (w1, b1, w2, b2))
    gates = torch.sigmoid(F.linear(F.relu(F.linear(q, w1, b1)), w2, b2))
    return gates.movedim(-1, 0).contiguous()
