"""Compute `hstu_sparse.bsa_attention` for new tokens that attend to pages, in plain PyTorch.

The means of complete blocks are those of the decoded keys and values; their sums are stored with the pages
(block_sums.py). If each user has one new token, the token reads only these sums, its chosen blocks and its window.

All tokens of a selection group attend to the blocks that its first token chose, at that token's query time. While a
selection group is incomplete (open), its choice is stored with the pages (`PagedPass.choices`), since it cannot be
computed from them: they do not contain queries.

Letters: T new tokens, B users, Q the most new tokens of a user, L the most keys of a user, H heads, D query/key and
V value head size, M blocks, S blocks chosen.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.core.jagged import jagged_to_padded, offsets_from_lengths, padded_to_jagged
from models.attention.bsa import BlockSparseAttention
from serving.block_sums import Stored
from serving.paged_group import PagedGroup, PagedPass

MOST_SCORES = 2**25  # scores of queries and keys in memory at a time


def paged_block_sparse(
    inner: BlockSparseAttention,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: RelativeBias | None,
    served: PagedPass,
    group: PagedGroup,
) -> Tensor:
    """Return the attention outputs [T, H, V] of a group's tokens, whose keys and values are already in the pages.

    q, k: [T, H, D]; v: [T, H, V]; bias: the tables, with the group's times. Stores the choice of each user's open
    selection group in `served.choices`, and the sums of the blocks that the tokens complete in `served.sums`.
    """
    c, dtype = inner.config, q.dtype
    gates = inner.gate(q)
    counts = group.offsets.diff()
    total = group.lengths if group.candidates else group.lengths + counts
    most, longest = int(counts.max()), max(1, int(total.max()))
    blocks = -(-longest // c.block_size)
    longest = blocks * c.block_size
    one, block_sums = most == 1, served.sums
    assert block_sums is not None
    if not group.candidates:
        block_sums.write(layer, group.pages, group.lengths, counts)

    def padded(x: Tensor, offsets: Tensor, size: int) -> Tensor:  # [.., H, X] -> fp32 [B, H, size, X]
        x = jagged_to_padded(x.float().flatten(1), offsets, size).unflatten(-1, x.shape[1:])
        return x.transpose(1, 2)

    stored = Stored(served.pool, layer, group.pages)
    keys: tuple[Tensor, ...] = ()
    if not one:
        key_offsets = offsets_from_lengths(total)
        keys = tuple(padded(x, key_offsets, longest) for x in served.pool.read(layer, group.pages, total))
    sums = block_sums.read(layer, group.pages, total, blocks)
    begun = block_sums.begun(layer, group.pages, group.lengths) if group.candidates else ()
    q, k, v = (padded(x, group.offsets, most) for x in (q, k, v))
    gates = [padded(g[..., None], group.offsets, most) for g in gates]
    # Positions [B, Q]. Bias tables end at max_seq_len: padding has the position of the user's last new token.
    lengths = group.lengths.long()[:, None]
    places = torch.minimum(lengths + torch.arange(most, device=q.device), lengths + counts.clamp(min=1)[:, None] - 1)
    if group.candidates:
        places = lengths.expand(-1, most)
    times = None
    if bias is not None and bias.time is not None:

        def padded_times(x: Tensor, offsets: Tensor, size: int) -> Tensor:  # [..] -> [B, size]
            return jagged_to_padded(x[:, None], offsets, size)[..., 0]

        times = (
            None if one else padded_times(served.pool.read_timestamps(group.pages, total), key_offsets, longest),
            *(
                x[:, None].expand(-1, most) if group.candidates else padded_times(x, group.offsets, most)
                for x in (group.query_times, group.times)
            ),
        )
    choice = served.choices.get(layer)
    if choice is None:
        choice = torch.full((len(counts), q.shape[1], c.block_counts), -1, dtype=torch.int32, device=q.device)
    attention = _Tokens(
        inner, bias or RelativeBias(), group.candidates, stored, longest, keys, sums, begun, times, counts
    )
    width = max(1, MOST_SCORES // (len(counts) * q.shape[1] * longest))
    outputs = []
    for begin in range(0, most, width):
        rows = slice(begin, begin + width)
        out, choice = attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], [g[:, :, rows] for g in gates],
                                places[:, rows], begin, choice)  # fmt: skip
        outputs.append(out)
    served.choices[layer] = choice
    out = torch.cat(outputs, 2).transpose(1, 2)
    return (
        padded_to_jagged(out.flatten(2), group.offsets, int(group.offsets[-1])).unflatten(-1, out.shape[2:]).to(dtype)
    )


class _Tokens:
    """The keys, values and sums that the new tokens of a group attend to.

    stored   the pages
    longest  L
    keys     (keys [B, H, L, D], values [B, H, L, V]); empty if each user has one new token, which reads the pages
    sums     sums of complete blocks, [B, H, M, D] and [.., V]
    begun    candidates only: the sums of the earlier tokens of the candidates' block, [B, H, 1, D] and [.., V]
    times    (times of keys [B, L] or None without keys, query times [B, Q], times of the new tokens [B, Q]), or None
    counts   [B] the number of new tokens
    """

    def __init__(self, inner, bias, candidates, stored, longest, keys, sums, begun, times, counts):
        self.inner, self.bias, self.candidates, self.times, self.counts = inner, bias, candidates, times, counts
        self.stored, self.longest, self.keys, self.sums, self.begun = stored, longest, keys, sums, begun

    def __call__(self, q, k, v, gates, places, begin, choice) -> tuple[Tensor, Tensor]:
        """Return (outputs [B, H, Q, V] of queries from `begin` on at positions `places`, the choice after these)."""
        c, device = self.inner.config, q.device
        size, scale, normalizer = c.block_size, c.scale, self.inner.normalizer
        rows = slice(begin, begin + q.shape[2])
        blocks = torch.arange(self.sums[0].shape[2], device=device)
        query_times = None if self.times is None else self.times[1][:, rows]

        def added(distance: Tensor, seen: Tensor | None):  # [B, 1, Q, X] or 0
            seen_times = None if seen is None else seen
            b = pair_bias(self.bias, distance, None if query_times is None else query_times[..., None], seen_times)
            return b[:, None] if isinstance(b, Tensor) else b

        middle = (blocks * size + size // 2).clamp(max=self.longest - 1)
        middles = None if self.times is None else self.stored.times(middle.expand(len(q), -1))[:, None]
        block_scores = scale * (q @ (self.sums[0] / size).mT)
        block_scores = block_scores + added(places[..., None] - middle, middles)
        block_weights = F.silu(block_scores)  # [B, H, Q, M]

        # Choose for each query as if it were the first of its selection group, then take the choice of the first query.
        group, current = c.selection_group, places // size
        fitting = block_weights.masked_fill((blocks >= current[..., None])[:, None], -torch.inf)
        best, order = fitting.sort(dim=-1, descending=True, stable=True)
        chosen = order[..., : c.block_counts - 1].masked_fill(~best[..., : c.block_counts - 1].isfinite(), -1).int()
        chosen = F.pad(chosen, (0, c.block_counts - 1 - chosen.shape[-1]), value=-1)
        chosen = torch.cat([current[:, None, :, None].expand(*chosen.shape[:3], 1).int(), chosen], -1)  # [B, H, Q, S]
        query_index = torch.arange(q.shape[2], device=device)
        first = query_index - (0 if self.candidates else 1) * (places % group)
        before = first < 0 if not self.candidates else places % group > 0
        source = first.clamp(min=0)[:, None, :, None].expand_as(chosen)
        chosen = torch.where(before[:, None, :, None], choice[:, :, None], chosen.gather(2, source))

        selected, near = (self._from_pages if not self.keys else self._from_keys)(q, places, rows, chosen)
        token_times = None if self.times is None else self.times[2][:, rows, None]
        self_term = F.silu(scale * (q * k).sum(-1, keepdim=True) + added(places[..., None] * 0, token_times)) * v
        out = gates[1] * (selected + self_term)
        if c.window_size:
            out = out + gates[2] * (near + self_term)
        seen = places + (0 if self.candidates else 1)
        complete = (blocks + 1) * size <= seen[..., None]
        compressed = block_weights.masked_fill(~complete[:, None], 0) @ (self.sums[1] / size)
        if self.candidates:
            compressed = compressed + self._completed(q, k, v, places, query_times, token_times)
        out = (out + gates[0] * compressed * size) / normalizer
        return out, self._open_choice(chosen, places, begin, choice)

    def _from_keys(self, q, places, rows, chosen) -> tuple[Tensor, Tensor | None]:
        """Return the outputs over the chosen blocks and over the window, [B, H, Q, V] each, from all keys.

        chosen: [B, H, Q, S].
        """
        c, (keys, values) = self.inner.config, self.keys
        blocks, tokens = self.sums[0].shape[2], torch.arange(self.longest, device=q.device)
        slots = torch.where(chosen < 0, blocks, chosen).long().clamp(max=blocks)
        visible = q.new_zeros(*q.shape[:3], blocks + 1, dtype=torch.bool).scatter(-1, slots, True)[..., :-1]
        distance = (places[..., None] - tokens)[:, None]  # [B, 1, Q, L]
        query_times = seen = None
        if self.times is not None:
            query_times, seen = self.times[1][:, None, rows, None], self.times[0][:, None, None]
        weights = F.silu(c.scale * (q @ keys.mT) + pair_bias(self.bias, distance, query_times, seen))
        near, past = None, distance > 0
        selected = weights.masked_fill(~(past & visible.repeat_interleave(c.block_size, 3)), 0) @ values
        if c.window_size:
            near = weights.masked_fill(~(past & (distance < c.window_size)), 0) @ values
        return selected, near

    def _from_pages(self, q, places, rows, chosen) -> tuple[Tensor, Tensor | None]:
        """Return the result of `_from_keys` for one query of each user; read only the keys that it attends to."""
        c, query_times = self.inner.config, None if self.times is None else self.times[1][:, None, rows, None]

        def attend(position: Tensor, hidden: Tensor) -> Tensor:  # [B, H or 1, K] -> [B, H, 1, V]
            keys, values = self.stored.read(position)
            seen = None if self.times is None else self.stored.times(position)[:, :, None]
            bias = pair_bias(self.bias, places[:, None, :, None] - position[:, :, None], query_times, seen)
            weights = F.silu(c.scale * (q @ keys.mT) + bias)
            return weights.masked_fill(hidden[:, :, None], 0) @ values

        chosen = chosen[:, :, 0].long()  # [B, H, S]
        position = (chosen[..., None] * c.block_size + torch.arange(c.block_size, device=q.device)).flatten(2)
        absent = (chosen < 0).repeat_interleave(c.block_size, 2) | (position >= places[:, None])
        selected, near = attend(position.clamp(min=0), absent), None
        if c.window_size:
            position = places[:, None] - torch.arange(1, c.window_size, device=q.device)
            near = attend(position.clamp(min=0), position < 0)
        return selected, near

    def _completed(self, q, k, v, places, query_times, token_times) -> Tensor | float:
        """Return what the block that a candidate completes adds to the candidate's output, [B, H, Q, V]."""
        size = self.inner.config.block_size
        completes = (places + 1) % size == 0  # [B, Q], the same for all candidates of a user
        kbar, vbar = ((x + y) / size for x, y in zip(self.begun, (k, v)))
        distance = size - 1 - size // 2
        seen = None
        if self.times is not None:
            seen = token_times if distance == 0 else self.stored.times((places - distance).clamp(min=0))[..., None]
        b = pair_bias(
            self.bias,
            torch.full_like(places, distance)[..., None],
            None if query_times is None else query_times[..., None],
            seen,
        )
        b = b[:, None] if isinstance(b, Tensor) else b
        weights = F.silu(self.inner.config.scale * (q * kbar).sum(-1, keepdim=True) + b)
        return (weights * vbar).masked_fill(~completes[:, None, :, None], 0)

    def _open_choice(self, chosen: Tensor, places: Tensor, begin: int, choice: Tensor) -> Tensor:
        """Return the choice [B, H, S] of the selection group open after the last query; candidates do not change it."""
        if self.candidates:
            return choice
        last = (self.counts - 1 - begin).clamp(max=chosen.shape[2] - 1)  # negative: none of these queries is the user's
        index = last.clamp(min=0)
        last_choice = chosen.gather(2, index[:, None, None, None].expand(-1, chosen.shape[1], 1, chosen.shape[3]))[
            :, :, 0
        ]
        closed = (places.gather(1, index[:, None])[:, 0] + 1) % self.inner.config.selection_group == 0
        last_choice = last_choice.masked_fill(closed[:, None, None], -1)
        return torch.where((last >= 0)[:, None, None], last_choice, choice)
