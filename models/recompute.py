"""Recompute a layer's intermediates in the backward pass instead of saving them.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from data.batch import Batch
from models.attention.contract import AuxLosses

# The operators that draw random numbers in a layer on a GPU: seeds of kernels, and torch's dropout.
_aten = torch.ops.aten
DRAWS = [_aten.randint.default, _aten.randint.low, _aten.native_dropout.default]
_saved_draws = functools.partial(create_selective_checkpoint_contexts, DRAWS)


def recomputed(layer: nn.Module, x: Tensor, batch: Batch) -> tuple[Tensor, AuxLosses]:
    """Return layer(x, batch) and save only x; the backward pass computes the layer again, with the same bits.

    On a CPU it restores the state of the random number generator. On a GPU the random numbers are saved instead, since
    that state cannot be read during the capture of a CUDA graph.
    """
    options: dict[str, Any] = {"preserve_rng_state": True}
    if x.is_cuda:
        options = {"preserve_rng_state": False, "context_fn": _saved_draws}
    return checkpoint(layer, x, batch, use_reentrant=False, **options)
