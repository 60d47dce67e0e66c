"""Define dense HSTU attention of a block of queries to a block of keys, with positions for both, in plain PyTorch.

Letters: T queries, S keys, B sequences, n and m the longest sequence of queries and of keys, H heads, D query/key and V
value head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.core.jagged import longest_sequence, masked_product, padded_index, sequence_ids
from hstu_sparse.core.precision import widened


class Block(NamedTuple):
    """The queries of a rank and the keys of a block. A query attends to keys of its sequence up to its position.

    q_offsets, k_offsets      [B+1]
    q_positions, k_positions  [T] and [S]
    bias                      query_timestamps is [T], timestamps is [S]
    """

    q_offsets: torch.Tensor
    k_offsets: torch.Tensor
    q_positions: torch.Tensor
    k_positions: torch.Tensor
    normalizer: float
    scale: float
    window_size: int
    bias: RelativeBias


def hstu_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the contribution of these keys to the output, [T, H, V] in `working_dtype`; differentiable.

    q: [T, H, D], k: [S, H, D], v: [S, H, V].
    """
    q_offsets, k_offsets, q_positions, k_positions, normalizer, scale, window_size, bias = block
    q, k, v = widened(q, k, v)
    if not q.shape[0] or not k.shape[0]:
        tables = sum(x.sum() for x in bias[:2] if x is not None)
        return v.new_zeros(q.shape[0], q.shape[1], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum() + tables)
    q_index, q_valid = padded_index(q_offsets, longest_sequence(q_offsets, q.shape[0]))
    k_index, k_valid = padded_index(k_offsets, longest_sequence(k_offsets, k.shape[0]))

    def pad(x, index):  # [T, ...] -> [B, n, ...]; entries past the end of a sequence are masked later
        return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])

    distance = pad(q_positions, q_index)[:, :, None] - pad(k_positions, k_index)[:, None, :]  # [B, n, m]
    visible = q_valid[:, :, None] & k_valid[:, None, :] & (distance >= 0)
    if window_size > 0:
        visible = visible & (distance < window_size)
    queries, keys, values = (pad(x, i).transpose(1, 2) for x, i in ((q, q_index), (k, k_index), (v, k_index)))
    scores = scale * (queries @ keys.transpose(-1, -2))  # [B, H, n, m]
    if bias.position is not None or bias.time is not None:
        query_times = key_times = None
        if bias.time is not None:
            query_times, key_times = (
                pad(bias.query_timestamps, q_index)[:, :, None],
                pad(bias.timestamps, k_index)[:, None, :],
            )
        scores = scores + pair_bias(bias, distance, query_times, key_times)[:, None]
    hidden = ~visible[:, None]
    out = masked_product(F.silu(scores).masked_fill(hidden, 0).to(v.dtype), values / normalizer, hidden)
    owner = sequence_ids(q_offsets, q.shape[0])
    row = torch.arange(q.shape[0], device=q.device) - q_offsets[:-1].long()[owner]
    return out.transpose(1, 2)[owner, row]
