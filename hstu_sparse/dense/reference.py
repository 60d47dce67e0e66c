"""Define dense HSTU attention in plain PyTorch: the kernels' specification, and the CPU backend.

Letters: T tokens of the batch, B sequences, n the longest sequence of a group, H heads, D query/key
head size, V value head size.

Source: Zhai et al., Actions Speak Louder than Words, ICML 2024 (arXiv 2402.17152).
"""

import itertools

import torch
import torch.nn.functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.core.jagged import check_storage, masked_product
from hstu_sparse.core.mask import Mask, context_times, visible_pairs
from hstu_sparse.core.precision import widened


def hstu_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    scale: float,
    normalizer: float,
    mask: Mask,
    bias: RelativeBias,
) -> torch.Tensor:
    """Compute `hstu_sparse.hstu_attention`; any device, any float dtype, differentiable.

    mask, bias: as `check_mask` and `check_bias` returned them.
    """
    total, dtype = q.shape[0], q.dtype
    q, k, v = widened(q, k, v)
    batch = seq_offsets.shape[0] - 1
    if batch == 0 or total == 0:
        # Nothing to attend to; the sum keeps every input in the graph, so that its gradient is zeros and not None.
        tables = sum(x.sum() for x in bias[:2] if x is not None)
        return (v * (q.sum() + k.sum() + tables)).to(dtype)
    bias = context_times(bias, mask.num_context, seq_offsets)
    if batch == 1:  # without reading values, which torch.export does not have
        length = seq_offsets.diff().long()[0]
        return _attend(q, k, v, None, length, scale, normalizer, mask.for_sequences(0), bias).to(dtype)
    check_storage("seq_offsets", seq_offsets, values=True)
    groups, tokens = _groups(seq_offsets.tolist())
    parts = []
    for members in groups:
        chosen = torch.tensor(members, device=q.device)
        parts.append(
            _attend(
                q, k, v, seq_offsets[:-1][chosen].long(), seq_offsets.diff()[chosen].long(), scale, normalizer,
                mask.for_sequences(chosen), bias,
            )
        )  # fmt: skip
    return torch.cat(parts).index_select(0, torch.tensor(tokens, device=q.device).argsort()).to(dtype)


def _groups(offsets: list[int]) -> tuple[list[list[int]], list[int]]:
    """Return (groups of sequences of similar lengths, to limit padding; the indices of their tokens, in order)."""
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    groups: list[list[int]] = []
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        if lengths[b] == 0:
            continue
        if not groups or 1.3 * lengths[b] + 8 < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(b)
    return groups, [t for group in groups for b in group for t in range(offsets[b], offsets[b + 1])]


def _attend(q, k, v, begins, lengths, scale, normalizer, mask, bias):
    """Pad the sequences at `begins` with these `lengths` to the longest, and return their outputs without padding.

    begins: None for a batch of one sequence, whose length [] and the mask's numbers [] have no dimension.
    """
    one = begins is None
    longest = q.shape[0] if one else int(lengths.max())
    step = torch.arange(longest, device=q.device)
    inside = step < lengths[..., None]  # [B, n]
    index = None if one else (begins[:, None] + step).masked_fill(~inside, 0).flatten()

    def padded(x):  # [T, ...] -> [B, n, ...], of one sequence [n, ...]
        return x if one else x.index_select(0, index).view(-1, longest, *x.shape[1:])

    def pad(x):  # [T, H, X] -> [B, H, n, X]
        return padded(x).transpose(-3, -2)

    distance, visible = visible_pairs(mask, step, lengths)  # [n, n] or [B, n, n]
    # Padding needs no further mask: no real query sees padded keys, and padded queries are dropped.
    hidden = ~visible if visible.dim() == 2 else ~visible[:, None]

    product = torch.bmm if one else torch.matmul  # with matmul, torch.export excludes sequences of one token
    scores = product(pad(q * scale), pad(k).transpose(-2, -1))  # [B, H, n, n]
    if bias.position is not None or bias.time is not None:
        query_times = key_times = None
        if bias.time is not None:
            query_times = padded(bias.query_timestamps)[..., :, None]
            key_times = padded(bias.timestamps)[..., None, :]
        pair_biases = pair_bias(bias, distance, query_times, key_times)  # [n, n] or [B, n, n]
        scores = scores + (pair_biases if pair_biases.dim() == 2 else pair_biases[:, None])
    weights = F.silu(scores).masked_fill(hidden, 0).to(v.dtype)
    out = masked_product(weights, pad(v / normalizer), hidden)  # [B, H, n, V]
    if one:
        return torch.stack(out.unbind(), 1)  # contiguous, without reading strides that depend on n
    return out.transpose(1, 2).flatten(0, 1).index_select(0, inside.flatten().nonzero()[:, 0])
