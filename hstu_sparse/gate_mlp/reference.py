"""Compute the gates' network in plain PyTorch: the specification. Letters: see api.py."""

import torch
from torch.nn import functional as F

from hstu_sparse.core.precision import widened


def query_gates_reference(q, w1, b1, w2, b2) -> torch.Tensor:
    """Compute sigmoid(w2 relu(w1 q + b1) + b2) in q's dtype: [G, T, H]."""
    wide, *network = widened(q, *(x.to(q.dtype) for x in (w1, b1, w2, b2)))
    w1, b1, w2, b2 = network
    gates = torch.sigmoid(F.linear(F.relu(F.linear(wide, w1, b1)), w2, b2))
    return gates.to(q.dtype).movedim(-1, 0).contiguous()
