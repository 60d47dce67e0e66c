"""Compute a model's input embedding in plain PyTorch: the specification. Letters: see api.py."""

import functools

import torch
from torch.nn import functional as F

from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.core.precision import widened


def embed_inputs_reference(rows, position, seq_offsets, *, scale, more, dropout) -> torch.Tensor:
    """Compute dropout(rows * scale + position[place in the sequence] + more); torch's own generator draws the mask."""
    tokens = torch.arange(rows.shape[0], device=rows.device)
    places = tokens - seq_offsets[sequence_ids(seq_offsets, rows.shape[0])]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (rows, position, more) if x is not None))
    rows, position, more = widened(rows, position, more)
    x = rows * scale + position.index_select(0, places)
    if more is not None:
        x = x + more
    return (F.dropout(x, dropout) if dropout else x).to(dtype).contiguous()
