"""Training losses over all positions: how well out[t] finds the item after token t among others.

The logit of an item is its cosine with the output over the temperature. Letters: T tokens, E embedding size,
I items, K negatives for each position.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.config import LossConfig

NORM_EPS = 1e-6
# Logits that one chunk of full cross-entropy may hold: 2 ** 27 floats, half a GiB.
CHUNK = 2**27


def training_loss(config: LossConfig, out: Tensor, item_weight: Tensor, targets: Tensor) -> Tensor:
    """Mean loss over the positions.

    out: [T, E], L2-normalised. item_weight: [I, E]. targets: [T] int64. Negatives come from torch's global
    generator: uniform over the catalogue, or, for `in_batch`, over the targets of the batch, so that an item is
    drawn as often as it is popular there. A negative equal to the positive does not count.
    """
    if config.kind == "cross_entropy":
        return _cross_entropy(config, out, item_weight, targets)
    shape = (len(targets), config.num_negatives)
    if config.kind == "in_batch":
        negatives = targets[torch.randint(len(targets), shape, device=targets.device)]
    else:
        negatives = torch.randint(len(item_weight), shape, device=targets.device)
    logits = sampled_logits(out, item_weight, torch.cat([targets[:, None], negatives], 1)) / config.temperature
    same = F.pad(negatives == targets[:, None], (1, 0))
    if config.kind == "bce":
        positive = F.softplus(-logits[:, 0])
        negative = F.softplus(logits[:, 1:]).masked_fill(same[:, 1:], 0)
        return positive.mean() + negative.sum() / (~same[:, 1:]).sum().clamp(min=1)
    logits = logits.masked_fill(same, float("-inf"))
    return (logits.logsumexp(1) - logits[:, 0]).mean()


def sampled_logits(out: Tensor, item_weight: Tensor, ids: Tensor) -> Tensor:
    """Cosines of out [T, E] (normalised) with the items ids [T, K]: [T, K]."""
    # One product with the whole catalogue moves T * I logits, gathered rows move T * K * E numbers, and their
    # gradients meet in scattered additions: the product wins while the catalogue is small.
    if len(item_weight) <= ids.shape[1] * out.shape[1]:
        return (out @ F.normalize(item_weight, dim=-1, eps=NORM_EPS).T).gather(1, ids)
    rows = F.normalize(F.embedding(ids, item_weight), dim=-1, eps=NORM_EPS)
    return torch.einsum("te,tke->tk", out, rows)


def _cross_entropy(config: LossConfig, out: Tensor, item_weight: Tensor, targets: Tensor) -> Tensor:
    items = F.normalize(item_weight, dim=-1, eps=NORM_EPS)

    def chunk_loss(out, targets, items):
        return F.cross_entropy(out @ items.T / config.temperature, targets, reduction="sum")

    rows = max(1, CHUNK // len(item_weight))
    total = out.new_zeros(())
    for part, ids in zip(out.split(rows), targets.split(rows)):
        # Recomputed in the backward, so that only one chunk's logits ever exist.
        total = total + checkpoint(chunk_loss, part, ids, items, use_reentrant=False)
    return total / len(targets)
