"""Compute the catalogue loss in plain PyTorch: the specification.

Letters: T tokens, I items, E embedding size, K negatives.
"""

import math

import torch
from torch.nn import functional as F

from hstu_sparse.core.precision import widened, working_dtype

NORM_EPS = 1e-6


def catalogue_loss_reference(
    out: torch.Tensor,
    items: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    normalize: bool,
    negatives: torch.Tensor | None,
    log_q: torch.Tensor | None,
    label_smoothing: float,
) -> torch.Tensor:
    """Compute `hstu_sparse.catalogue_loss`. 16-bit inputs are converted to fp32."""
    dtype = working_dtype(out.dtype)
    out, items = widened(out, items)

    def ready(x):
        return F.normalize(x, dim=-1, eps=NORM_EPS) if normalize else x

    out, has_target = ready(out), targets >= 0
    rows = targets.clamp(min=0)
    if negatives is None:
        logits = out @ ready(items).T / temperature
        losses = F.cross_entropy(logits, rows.long(), label_smoothing=label_smoothing, reduction="none")
    else:
        positive = (out * ready(items[rows])).sum(-1) / temperature
        drawn = negatives.clamp(min=0)
        if negatives.dim() == 1:
            logits = out @ ready(items[drawn]).T / temperature
        else:
            logits = torch.einsum("te,tke->tk", out, ready(items[drawn])) / temperature
        if log_q is not None:
            logits = logits - (log_q[drawn].to(dtype) + math.log(max(1, negatives.shape[-1])))
        logits = logits.masked_fill((negatives == targets[:, None]) | (negatives < 0), float("-inf"))
        losses = torch.cat([positive[:, None], logits], 1).logsumexp(1) - positive
    return losses.masked_fill(~has_target, 0.0).sum() / has_target.sum().clamp(min=1)
