"""Training losses over all positions: how well out[t] finds the item after token t among others.

The logit of an item is its cosine with the output over the temperature. Letters: T tokens, E embedding size,
I items, K negatives for each position.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import LossConfig
from models.contract import AuxLoss
from models.heads import mol_loss

NORM_EPS = 1e-6
# Numbers that the largest tensor of one chunk may hold: what stays in a core's cache, or a small part of a GPU.
CHUNK = {"cpu": 2**21, "cuda": 2**26}


def head_loss(model: nn.Module, config: LossConfig, out: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, AuxLoss]]:
    """(training loss, auxiliary losses) of a model's outputs [T, E] by its own head; targets as `training_loss`."""
    if model.head is None:
        return training_loss(config, out, model.item_weight, targets), {}
    negatives = drawn_negatives(config, len(model.item_weight), targets)
    return mol_loss(model.head, out, model.item_weight, targets, negatives)


def drawn_negatives(config: LossConfig, num_items: int, targets: Tensor) -> Tensor | None:
    """[T, K] as the loss wants them, from torch's global generator; None where the whole catalogue competes."""
    if config.kind == "cross_entropy":
        return None
    shape = (len(targets), config.num_negatives)
    if config.kind == "in_batch":
        count = (targets >= 0).sum().clamp(min=1)
        return targets[torch.randint(2**62, shape, device=targets.device) % count]
    return torch.randint(num_items, shape, device=targets.device)


def training_loss(config: LossConfig, out: Tensor, item_weight: Tensor, targets: Tensor) -> Tensor:
    """Mean loss over the positions, with gradients for `out` and `item_weight` (once: no second derivative).

    out: [T, E] fp32, L2-normalised. item_weight: [I, E]. targets: [T] int64; positions of padding, with target -1, come
    last and do not count. Negatives come from torch's global
    generator: uniform over the catalogue, or, for `in_batch`, over the targets of the batch, so that an item is
    drawn as often as it is popular there. A negative equal to the positive does not count.
    """
    count = (targets >= 0).sum().clamp(min=1)
    negatives = drawn_negatives(config, len(item_weight), targets)
    whole = negatives is None or takes_whole_catalogue(config, out, item_weight)
    items = F.normalize(item_weight, dim=-1, eps=NORM_EPS) if whole else item_weight
    width = len(item_weight) if whole else (config.num_negatives + 1) * out.shape[1]
    # Every chunk of gathered rows has a gradient as large as the table: larger chunks, then.
    rows = max(1, CHUNK[out.device.type] * (1 if whole else 2) // width)
    return _Chunked.apply(config, whole, rows, out, items, targets, negatives) / count


def takes_whole_catalogue(config: LossConfig, out: Tensor, item_weight: Tensor) -> bool:
    """Whether sampled logits come out of one product with all items.

    That product moves T * I logits; gathered rows move T * K * E numbers, and their gradients meet in scattered
    additions: the product wins while the catalogue is small.
    """
    return len(item_weight) <= config.num_negatives * out.shape[1]


class _Chunked(torch.autograd.Function):
    """Sum of `_chunk_loss` over chunks of rows, the gradients taken on the way: no chunk's logits outlive it."""

    @staticmethod
    def forward(ctx, config, whole, rows, out, items, targets, negatives):
        total = out.new_zeros(())
        out_grad = torch.empty_like(out)
        with torch.enable_grad():
            items = items.detach().requires_grad_()
            for begin in range(0, len(out), rows):
                part = slice(begin, begin + rows)
                leaf = out[part].detach().requires_grad_()
                drawn = None if negatives is None else negatives[part]
                loss = _chunk_loss(config, whole, leaf, items, targets[part], drawn)
                loss.backward()  # items.grad gathers the sum over the chunks
                out_grad[part] = leaf.grad
                total += loss.detach()
        ctx.save_for_backward(out_grad, torch.zeros_like(items) if items.grad is None else items.grad)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        out_grad, items_grad = ctx.saved_tensors
        return None, None, None, out_grad * grad, items_grad * grad, None, None


def _chunk_loss(config, whole: bool, out: Tensor, items: Tensor, targets: Tensor, negatives: Tensor | None) -> Tensor:
    """Sum of the losses of a chunk of positions; `items` is normalised if `whole`, else the raw table."""
    if negatives is None:
        return F.cross_entropy(out @ items.T / config.temperature, targets, ignore_index=-1, reduction="sum")
    ids = torch.cat([targets.clamp(min=0)[:, None], negatives], 1)
    if whole:
        logits = (out @ items.T).gather(1, ids) / config.temperature
    else:
        rows = F.normalize(F.embedding(ids, items), dim=-1, eps=NORM_EPS)
        logits = torch.einsum("te,tke->tk", out, rows) / config.temperature
    same = F.pad(negatives == targets[:, None], (1, 0))
    if config.kind == "bce":
        # The positive against the mean of its negatives, so that their number does not shift the balance.
        fitting = (~same[:, 1:]).sum(1).clamp(min=1)
        negative = F.softplus(logits[:, 1:]).masked_fill(same[:, 1:], 0).sum(1) / fitting
        losses = F.softplus(-logits[:, 0]) + negative
    else:
        logits = logits.masked_fill(same, float("-inf"))
        losses = logits.logsumexp(1) - logits[:, 0]
    return losses.masked_fill(targets < 0, 0).sum()
