"""Compute block-sparse HSTU attention in plain PyTorch: the specification that the kernels are tested against.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per query group (block_counts), r tokens per group (selection_group), W window. Here also L: the
longest sequence rounded up to whole blocks, or, if a block exceeds it and MAX_BLOCK, the greater of these two rounded
up to whole groups. It has M blocks and G = L / r groups.

Everything is dense over the padded [B, H, L, L] scores, so that each rule is one mask; memory grows with L^2.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.core.jagged import longest_sequence, masked_product
from hstu_sparse.core.precision import widened

MAX_BLOCK = 128


def bsa_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    gates: tuple[Tensor, Tensor, Tensor | None],
    block_size: int,
    block_counts: int,
    window_size: int,
    selection_group: int,
    scale: float,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    block_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output [T, H, V], block indices [T, H, S] int32) of `bsa_attention`; indices have no gradient.

    bias: the result of `check_bias`, or None.
    block_indices: replaces the choice, so that rounding cannot change it where two dtypes are compared.
    """
    bias = RelativeBias() if bias is None else bias
    normalizer = max_seq_len if normalizer is None else normalizer
    (tokens, heads, _), dtype = q.shape, q.dtype
    q, k, v = widened(q, k, v)
    gates = [None if g is None else g.to(q.dtype) for g in gates]
    if tokens == 0:
        # Nothing to compute, but the result must depend on every input.
        out = v * sum((x.sum(-1) for x in (q, k)), sum(g for g in gates if g is not None)).unsqueeze(-1)
        for table in bias[:2]:
            out = out if table is None else out + table.sum().to(out.dtype)
        return out.to(dtype), torch.full((0, heads, block_counts), -1, dtype=torch.int32, device=q.device)

    lengths = seq_offsets.diff().long()
    batch, longest = len(lengths), longest_sequence(seq_offsets, min(max_seq_len, tokens))
    blocks = -(-longest // block_size)
    width, limit = block_size, max(longest, MAX_BLOCK)
    if width > limit:  # one block, longer than every sequence: pad it to whole groups only
        selection_group = min(selection_group, limit)
        width = -(-limit // selection_group) * selection_group
    padded_len = blocks * width
    sequence = torch.arange(batch, device=q.device).repeat_interleave(lengths, output_size=tokens)
    row = sequence * padded_len + torch.arange(tokens, device=q.device) - seq_offsets.long()[sequence]

    def pad(x: Tensor) -> Tensor:  # [T, H, X] -> [B, H, L, X], zeros after each sequence
        padded = x.new_zeros(batch * padded_len, *x.shape[1:]).index_copy(0, row, x)
        return padded.unflatten(0, (batch, padded_len)).transpose(1, 2)

    def unpad(x: Tensor) -> Tensor:  # [B, H, L, X] -> [T, H, X]
        return x.transpose(1, 2).flatten(0, 1).index_select(0, row)

    q, k, v = pad(q), pad(k), pad(v)
    g_cmp, g_slc, g_swa = (None if g is None else pad(g.unsqueeze(-1)) for g in gates)

    # Means over a block's tokens; the padding adds nothing to the sums. [B, H, M, D] and [B, H, M, V]
    first = torch.arange(blocks, device=q.device) * block_size
    size = (lengths[:, None] - first).clamp(1, block_size)[:, None, :, None].to(q.dtype)
    kbar = k.unflatten(2, (blocks, width)).sum(3) / size
    vbar = v.unflatten(2, (blocks, width)).sum(3) / size

    t = torch.arange(padded_len, device=q.device)
    query_times = key_times = None
    if bias.time is not None:
        query_times, key_times = (x.new_zeros(batch * padded_len).index_copy(0, row, x) for x in bias[3:1:-1])
        query_times, key_times = query_times.view(batch, padded_len, 1), key_times.view(batch, 1, padded_len)

    def bias_at(places: Tensor) -> Tensor | float:
        """Return b of all queries and of keys at the `places` [X] of their sequence: [L, X], [B, 1, L, X], or 0."""
        places = places.clamp(max=padded_len - 1)  # a block beyond every sequence is never complete
        distance = (t[:, None] - places).clamp(max=max_seq_len - 1)  # greater only past a sequence's end
        biases = pair_bias(bias, distance, query_times, None if key_times is None else key_times[..., places])
        return biases.unsqueeze(1) if key_times is not None else biases

    # Compression: the complete past blocks, each with the weight of its BS tokens.
    complete = first + block_size <= t[:, None] + 1  # [L, M]
    added = bias_at(first + block_size // 2)
    weights = F.silu(scale * (q @ kbar.mT) + added).to(q.dtype).masked_fill(~complete, 0)
    out = g_cmp * masked_product(weights, vbar, ~complete) * (block_size / normalizer)

    if block_indices is None:
        if isinstance(added, Tensor):
            added = added[..., ::selection_group, :]
        chosen = choose_blocks(q, kbar, added, block_size, block_counts, selection_group, scale)  # [B, H, G, M]
        block_indices = unpad(_ascending(chosen, block_counts).repeat_interleave(selection_group, 2))
        chosen = chosen.repeat_interleave(selection_group, 2)
    else:
        # Padding and the -1 of an unused slot are scattered into an extra block, which is dropped.
        places = pad(block_indices.long() + 1) - 1
        chosen = q.new_zeros(*q.shape[:3], blocks + 1, dtype=torch.bool)
        chosen = chosen.scatter(-1, places.where(places >= 0, blocks), True)[..., :blocks]

    # Selection and window share the token scores.
    weights = F.silu(scale * (q @ k.mT) + bias_at(t)).to(q.dtype)
    after = t > t[:, None]
    hidden = after | ~chosen.repeat_interleave(width, 3)
    out = out + g_slc * masked_product(weights.masked_fill(hidden, 0), v, hidden) / normalizer
    if window_size > 0:
        hidden = after | (t[:, None] - t >= window_size)
        out = out + g_swa * masked_product(weights.masked_fill(hidden, 0), v, hidden) / normalizer

    return unpad(out).to(dtype), block_indices


@torch.no_grad()
def choose_blocks(
    q: Tensor, kbar: Tensor, added: Tensor | float, block_size: int, block_counts: int, group: int, scale: float
) -> Tensor:
    """Return chosen [B, H, G, M], bool, from padded q [B, H, L, D], kbar [B, H, M, D] and the bias of each score.

    A group chooses the block of its first token, and of the complete past blocks the S - 1 best. q and kbar are at
    least fp32: rounding the scores to 16 bits would change the choice.
    """
    scores = F.silu(scale * (q[:, :, ::group] @ kbar.mT) + added)
    blocks = torch.arange(kbar.shape[2], device=q.device)
    group_block = torch.arange(scores.shape[2], device=q.device)[:, None] * group // block_size
    # The complete blocks are those before the group's own block.
    scores = scores.masked_fill(blocks >= group_block, -torch.inf)
    # A stable sort preserves the order of blocks with equal scores.
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    is_complete = torch.isfinite(best[..., : block_counts - 1])
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., : block_counts - 1], is_complete)
    return chosen | (blocks == group_block)


def _ascending(chosen: Tensor, block_counts: int) -> Tensor:
    """Convert the mask of chosen blocks [..., M] to ascending indices [..., S], padded with -1."""
    blocks = chosen.shape[-1]
    indices = torch.where(chosen, torch.arange(blocks, device=chosen.device), blocks).sort(-1).values
    indices = F.pad(indices, (0, max(block_counts - blocks, 0)), value=blocks)[..., :block_counts]
    return indices.masked_fill(indices == blocks, -1).int()
