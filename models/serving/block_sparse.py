"""Block-sparse attention of new tokens on top of pages, in plain PyTorch: the sums of `hstu_sparse.bsa_attention`.

The mean keys and values of complete blocks are those of what the pages give back. A group of tokens attends to the
blocks that its first token chose, at that token's query time: the choice of the group that is still open is kept beside
the pages (`Pass.choices`), since no page says what the query was.

Letters: T new tokens, B users, Q new tokens of a user (the most of all), L tokens of a user that are keys (the most),
H heads, D query/key and V value head size, BS block size, M blocks, S blocks chosen, r tokens of a group.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.jagged import jagged_to_padded, offsets_from_lengths, padded_to_jagged
from models.attention.bsa import BlockSparseAttention
from models.serving.parts import Part, Pass

MOST_SCORES = 2**25  # of queries and keys that are held at a time


def paged_block_sparse(
    inner: BlockSparseAttention,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: RelativeBias | None,
    served: Pass,
    part: Part,
) -> Tensor:
    """The attention [T, H, V] of a part's tokens, q and k [T, H, D], v [T, H, V], whose keys are written already.

    bias: its tables, with the times of the part. The open group's choice is read from and left in `served.choices`.
    """
    c, dtype = inner.config, q.dtype
    gates = inner.gate(q)
    counts = part.offsets.diff()
    total = part.lengths if part.candidates else part.lengths + counts
    most, longest = int(counts.max()), max(1, int(total.max()))
    blocks = -(-longest // c.block_size)
    longest = blocks * c.block_size
    key_offsets = offsets_from_lengths(total)

    def padded(x: Tensor, offsets: Tensor, size: int) -> Tensor:  # [.., H, X] -> [B, H, size, X] in fp32
        x = jagged_to_padded(x.float().flatten(1), offsets, size).unflatten(-1, x.shape[1:])
        return x.transpose(1, 2)

    keys, values = (padded(x, key_offsets, longest) for x in served.pool.read(layer, part.pages, total))
    sums = [x.unflatten(2, (blocks, c.block_size)).sum(3) for x in (keys, values)]
    q, k, v = (padded(x, part.offsets, most) for x in (q, k, v))
    gates = [padded(g[..., None], part.offsets, most) for g in gates]
    # Padding behind a user's last new token has its place: a place beyond N is in no table. [B, Q]
    lengths = part.lengths.long()[:, None]
    places = torch.minimum(lengths + torch.arange(most, device=q.device), lengths + counts.clamp(min=1)[:, None] - 1)
    if part.candidates:
        places = lengths.expand(-1, most)
    times = None
    if bias is not None and bias.time is not None:

        def of_tokens(x: Tensor, offsets: Tensor, size: int) -> Tensor:  # [..] -> [B, size]
            return jagged_to_padded(x[:, None], offsets, size)[..., 0]

        times = (
            of_tokens(served.pool.read_timestamps(part.pages, total), key_offsets, longest),
            *(
                x[:, None].expand(-1, most) if part.candidates else of_tokens(x, part.offsets, most)
                for x in (part.query_times, part.times)
            ),
        )
    choice = served.choices.get(layer)
    if choice is None:
        choice = torch.full((len(counts), q.shape[1], c.block_counts), -1, dtype=torch.int32, device=q.device)
    attention = _Tokens(inner, bias or RelativeBias(), part.candidates, keys, values, sums, times, counts)
    width = max(1, MOST_SCORES // (len(counts) * q.shape[1] * longest))
    found = []
    for begin in range(0, most, width):
        rows = slice(begin, begin + width)
        out, choice = attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], [g[:, :, rows] for g in gates],
                                places[:, rows], begin, choice)  # fmt: skip
        found.append(out)
    served.choices[layer] = choice
    out = torch.cat(found, 2).transpose(1, 2)
    return padded_to_jagged(out.flatten(2), part.offsets, int(part.offsets[-1])).unflatten(-1, out.shape[2:]).to(dtype)


class _Tokens:
    """What the new tokens of a part attend to: keys [B, H, L, D], values [B, H, L, V], sums of blocks [B, H, M, ..].

    times: (of keys [B, L], of queries [B, Q], of the queries' own tokens [B, Q]), or None. counts: [B] new tokens.
    """

    def __init__(self, inner, bias, candidates, keys, values, sums, times, counts):
        self.inner, self.bias, self.candidates, self.times, self.counts = inner, bias, candidates, times, counts
        self.keys, self.values, self.sums = keys, values, sums

    def __call__(self, q, k, v, gates, places, begin, choice) -> tuple[Tensor, Tensor]:
        """(outputs [B, H, Q, V], the choice behind them) of the queries from number `begin` on, at `places` [B, Q]."""
        c, device = self.inner.config, q.device
        size, scale, normalizer = c.block_size, c.scale, self.inner.normalizer
        rows = slice(begin, begin + q.shape[2])
        blocks = torch.arange(self.sums[0].shape[2], device=device)
        tokens = torch.arange(self.keys.shape[2], device=device)
        asked = None if self.times is None else self.times[1][:, rows]

        def added(distance: Tensor, seen: Tensor | None):  # [B, 1, Q, X] or 0
            seen_times = None if seen is None else seen
            b = pair_bias(self.bias, distance, None if asked is None else asked[..., None], seen_times)
            return b[:, None] if isinstance(b, Tensor) else b

        middle = (blocks * size + size // 2).clamp(max=self.keys.shape[2] - 1)
        stored = None if self.times is None else self.times[0][:, None, :]
        block_scores = scale * (q @ (self.sums[0] / size).mT)
        block_scores = block_scores + added(places[..., None] - middle, None if stored is None else stored[..., middle])
        block_weights = F.silu(block_scores)  # [B, H, Q, M]

        # The choice of every query as if it were its group's first, then each group's first one's.
        group, current = c.selection_group, places // size
        fitting = block_weights.masked_fill((blocks >= current[..., None])[:, None], -torch.inf)
        best, order = fitting.sort(dim=-1, descending=True, stable=True)
        chosen = order[..., : c.block_counts - 1].masked_fill(~best[..., : c.block_counts - 1].isfinite(), -1).int()
        chosen = F.pad(chosen, (0, c.block_counts - 1 - chosen.shape[-1]), value=-1)
        chosen = torch.cat([current[:, None, :, None].expand(*chosen.shape[:3], 1).int(), chosen], -1)  # [B, H, Q, S]
        here = torch.arange(q.shape[2], device=device)
        first = here - (0 if self.candidates else 1) * (places % group)
        before = first < 0 if not self.candidates else places % group > 0
        taken = first.clamp(min=0)[:, None, :, None].expand_as(chosen)
        chosen = torch.where(before[:, None, :, None], choice[:, :, None], chosen.gather(2, taken))

        slots = torch.where(chosen < 0, len(blocks), chosen).long().clamp(max=len(blocks))
        visible = q.new_zeros(*q.shape[:3], len(blocks) + 1, dtype=torch.bool).scatter(-1, slots, True)[..., :-1]

        weights = F.silu(scale * (q @ self.keys.mT) + added(places[..., None] - tokens, stored))
        past = tokens < places[..., None]  # [B, Q, L]
        selected = weights.masked_fill(~(past[:, None] & visible.repeat_interleave(size, 3)), 0) @ self.values
        mine = None if self.times is None else self.times[2][:, rows, None]
        own = F.silu(scale * (q * k).sum(-1, keepdim=True) + added(places[..., None] * 0, mine)) * v
        out = gates[1] * (selected + own)
        if c.window_size:
            near = past & (places[..., None] - tokens < c.window_size)
            out = out + gates[2] * (weights.masked_fill(~near[:, None], 0) @ self.values + own)
        seen = places + (0 if self.candidates else 1)
        complete = (blocks + 1) * size <= seen[..., None]
        compressed = block_weights.masked_fill(~complete[:, None], 0) @ (self.sums[1] / size)
        if self.candidates:
            compressed = compressed + self._completed(q, k, v, places, asked, mine)
        out = (out + gates[0] * compressed * size) / normalizer
        return out, self._behind(chosen, places, begin, choice)

    def _completed(self, q, k, v, places, asked, mine) -> Tensor | float:
        """What a block gives to candidates that complete it by themselves: [B, H, Q, V]."""
        size = self.inner.config.block_size
        completes = (places + 1) % size == 0  # [B, Q], the same for all candidates of a user
        block = (places[:, 0] // size).clamp(max=self.sums[0].shape[2] - 1)
        known = self.keys.shape[2] > places[:, 0]  # else the block has no token but the candidate
        before = []
        for x in self.sums:
            x = x.gather(2, block[:, None, None, None].expand(-1, x.shape[1], 1, x.shape[3]))
            before.append(torch.where(known[:, None, None, None], x, 0))
        kbar, vbar = ((x + y.expand_as(y)) / size for x, y in zip(before, (k, v)))
        distance = size - 1 - size // 2
        seen = None
        if self.times is not None:
            middle = (places - distance).clamp(0, self.keys.shape[2] - 1)
            seen = mine if distance == 0 else self.times[0].gather(1, middle)[..., None]
        b = pair_bias(
            self.bias, torch.full_like(places, distance)[..., None], None if asked is None else asked[..., None], seen
        )
        b = b[:, None] if isinstance(b, Tensor) else b
        weights = F.silu(self.inner.config.scale * (q * kbar).sum(-1, keepdim=True) + b)
        return (weights * vbar).masked_fill(~completes[:, None, :, None], 0)

    def _behind(self, chosen: Tensor, places: Tensor, begin: int, choice: Tensor) -> Tensor:
        """The choice [B, H, S] of the group that is open behind the last of these queries; unchanged by candidates."""
        if self.candidates:
            return choice
        last = (self.counts - 1 - begin).clamp(max=chosen.shape[2] - 1)  # below 0: none of these is the user's
        index = last.clamp(min=0)
        found = chosen.gather(2, index[:, None, None, None].expand(-1, chosen.shape[1], 1, chosen.shape[3]))[:, :, 0]
        closed = (places.gather(1, index[:, None])[:, 0] + 1) % self.inner.config.selection_group == 0
        found = found.masked_fill(closed[:, None, None], -1)
        return torch.where((last >= 0)[:, None, None], found, choice)
