"""Compute softmax attention in plain PyTorch, with every option of the kernels: their specification.

Letters: T, S tokens of queries and of keys, B sequences, P pieces of a sequence, n, m the longest sequence of queries
and of keys, H heads of queries, Hkv of keys and values, D query/key and V value head size.

A sequence is stored as P pieces of consecutive positions: one in most calls, two if a rank of a ring holds an early and
a late part. The pieces of a sequence are adjacent in memory. The offsets have an entry for each piece, and `starts` has
the positions at which the pieces begin. Masks, ALiBi and dropout depend only on positions, so that splitting a sequence
changes no result.

A ring processes one block of keys at a time: `forward_step` merges the attention to a block into an output and its
log-sum-exp, `backward_step` adds a block's part of the gradients.

Source: Dao, FlashAttention-2 (arXiv 2307.08691); Press et al., ALiBi (arXiv 2108.12409); Salmon et al., Parallel Random
Numbers (Philox), SC 2011.
"""

from typing import NamedTuple

import torch

from hstu_sparse.core.jagged import longest_sequence, masked_product, padded_index, sequence_ids
from hstu_sparse.core.mask import Mask, visible_pairs
from hstu_sparse.core.precision import widened


class Layout(NamedTuple):
    """The layout of sequences: q_offsets, k_offsets [B*P+1], q_starts, k_starts [B*P] integers or None for 0."""

    q_offsets: torch.Tensor
    k_offsets: torch.Tensor
    q_starts: torch.Tensor | None = None
    k_starts: torch.Tensor | None = None
    pieces: int = 1


class Options(NamedTuple):
    """Options: query t sees key s if t - left <= s <= t + right, where a bound below 0 does not apply.

    scale     factor of the scores, above 0
    slopes    [H] or [B, H] fp32 or None: slope * |t - s| is subtracted from the scores (ALiBi)
    dropout   probability of zeroing a weight of the softmax; other weights are divided by 1 - dropout
    mask      further options for causal self-attention, with a window of left + 1; read only if one is set. Then the
              difference of positions, or 0 where it is negative, replaces |t - s|
    seed      [1] int64, with dropout. The weight (b, h, t, s) is kept if word s % 4 of Philox-4x32-10 with this key and
              the counter (s // 4, t, b * H + h, 0), shifted right by 8 bits, is at least dropout * 2^24
    """

    scale: float
    left: int = -1
    right: int = -1
    slopes: torch.Tensor | None = None
    dropout: float = 0.0
    seed: torch.Tensor | None = None
    mask: Mask = Mask()


def empty_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate (output [T, H, V], log-sum-exp [H, T] fp32) for kernels."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def flash_attention_reference(q, k, v, layout: Layout, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (output [T, H, V], log-sum-exp of the scores [H, T]); a query that sees no key has zeros and -inf."""
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if not q.shape[0]:
        # The sum keeps every input in the graph, so that its gradient is zeros and not None.
        nothing = 0 * (q.sum() + k.sum() + v.sum())
        return (q.new_zeros(0, q.shape[1], v.shape[2]) + nothing).to(dtype), q.new_zeros(q.shape[1], 0)
    block = _Block(q, k, v, layout, options)
    scores = block.scores()
    peak = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (total.detach().log() + peak)[..., 0]
    weights = weights / total.masked_fill(total == 0, 1.0)
    if block.dropout is not None:
        weights = weights * block.dropout
    out = block.to_tokens(masked_product(weights, block.v, scores.isneginf()))
    return out.to(dtype), block.rows_to_tokens(lse)


def forward_step(q, k, v, layout: Layout, options: Options, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the attention to these keys into out [T, H, V] and lse [H, T], in place; both in at least fp32."""
    more, more_lse = flash_attention_reference(q.to(out.dtype), k.to(out.dtype), v.to(out.dtype), layout, options)
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total.isneginf(), 0.0)
    out.mul_((lse - safe).exp().T[..., None]).add_(more * (more_lse - safe).exp().T[..., None])
    lse.copy_(total)


def backward_step(grad, q, k, v, layout: Layout, options: Options, lse, delta, dq) -> tuple[torch.Tensor, torch.Tensor]:
    """Add these keys' part to dq [T, H, D] in place and return (dk, dv), all of dq's dtype.

    lse [H, T]: over all keys. delta [H, T]: the sum over V of output times its gradient.
    """
    block = _Block(*(x.to(dq.dtype) for x in (q, k, v)), layout, options)
    lse, delta = block.rows_to_padded(lse), block.rows_to_padded(delta)
    weights = (block.scores() - lse.masked_fill(lse.isneginf(), torch.inf)[..., None]).exp()
    grad = block.queries_to_padded(grad.to(dq.dtype))
    slope = grad @ block.v.transpose(-1, -2)
    dropped_weights = weights
    if block.dropout is not None:
        dropped_weights, slope = weights * block.dropout, slope * block.dropout
    slope = options.scale * weights * (slope - delta[..., None])
    dq += block.to_tokens(slope @ block.k)
    return block.keys_to_tokens(slope.transpose(-1, -2) @ block.q), block.keys_to_tokens(
        dropped_weights.transpose(-1, -2) @ grad
    )


class _Block:
    """The padded queries and keys of each sequence; query heads that share keys are stacked.

    q: [B, Hkv, G*n, D], k: [B, Hkv, m, D], v: [B, Hkv, m, V] with G = H / Hkv; dropout: [B, Hkv, G*n, m] or None.
    """

    def __init__(self, q, k, v, layout: Layout, options: Options):
        self.layout, self.options = layout, options
        self.group = q.shape[1] // k.shape[1]
        self.tokens, self.key_tokens = q.shape[0], k.shape[0]
        q_offsets, k_offsets = layout.q_offsets[:: layout.pieces].long(), layout.k_offsets[:: layout.pieces].long()
        self.batch = q_offsets.shape[0] - 1
        self.q_index, self.q_valid = padded_index(q_offsets, longest_sequence(q_offsets, q.shape[0]))
        self.k_index, self.k_valid = padded_index(k_offsets, longest_sequence(k_offsets, k.shape[0]))
        self.q_owner, self.k_owner = sequence_ids(q_offsets, q.shape[0]), sequence_ids(k_offsets, k.shape[0])
        self.q_row = torch.arange(q.shape[0], device=q.device) - q_offsets[:-1][self.q_owner]
        self.k_row = torch.arange(k.shape[0], device=k.device) - k_offsets[:-1][self.k_owner]
        self.t = self._padded(positions(layout.q_offsets, layout.q_starts, q.shape[0]), self.q_index, self.q_valid)
        self.s = self._padded(positions(layout.k_offsets, layout.k_starts, k.shape[0]), self.k_index, self.k_valid)
        self.q = self.queries_to_padded(q)
        self.k, self.v = (self._padded(x, self.k_index, self.k_valid).transpose(1, 2) for x in (k, v))
        self.dropout = self._dropout(q.shape[1]) if options.dropout else None

    def scores(self) -> torch.Tensor:
        """Return [B, Hkv, G*n, m], -inf where a query does not see a key."""
        o = self.options
        scores = self._by_head(o.scale * (self.q @ self.k.transpose(-1, -2)))  # [B, H, n, m]
        distance = self.t[:, :, None] - self.s[:, None, :]
        seen = self.q_valid[:, :, None] & self.k_valid[:, None, :]
        if o.mask.first_option is not None:
            lengths = self.layout.q_offsets.diff().long()
            distance, visible = visible_pairs(o.mask, torch.arange(self.t.shape[1], device=self.t.device), lengths)
            distance, seen = distance.clamp(min=0), seen & visible
        else:
            if o.left >= 0:
                seen = seen & (distance <= o.left)
            if o.right >= 0:
                seen = seen & (-distance <= o.right)
        if o.slopes is not None:
            slopes = o.slopes.to(scores.dtype).expand(self.batch, -1)
            scores = scores - slopes[:, :, None, None] * distance.abs()[..., None, :, :]
        return self._by_group(scores.masked_fill(~seen[:, None], -torch.inf))

    def _dropout(self, heads: int) -> torch.Tensor:
        """Return 1 / (1 - dropout) for weights that are not dropped, else 0."""
        seed, s = self.options.seed.view(()), self.s[:, None, None, :]
        pair = torch.arange(self.batch * heads, device=s.device).view(self.batch, heads, 1, 1)
        words = philox(seed, s // 4, self.t[:, None, :, None], pair, torch.zeros_like(pair))
        words = torch.stack(torch.broadcast_tensors(*words, s % 4)[:4], -1)
        word = words.gather(-1, (s % 4).expand(words.shape[:-1])[..., None])[..., 0]
        not_dropped = (word >> 8) >= self.options.dropout * 2**24
        return self._by_group(not_dropped.to(self.q.dtype) / (1.0 - self.options.dropout))

    def _by_head(self, x):  # [B, Hkv, G*n, X] -> [B, H, n, X]
        return x.reshape(self.batch, x.shape[1] * self.group, x.shape[2] // self.group, x.shape[3])

    def _by_group(self, x):  # [B, H, n, X] -> [B, Hkv, G*n, X]
        return x.reshape(self.batch, x.shape[1] // self.group, self.group * x.shape[2], x.shape[3])

    def _padded(self, x, index, valid):  # [T, ...] -> [B, n, ...], zeros after the sequences
        if not x.shape[0]:
            return x.new_zeros(*index.shape, *x.shape[1:])
        x = x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
        return x.masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)

    def queries_to_padded(self, x):  # [T, H, X] -> [B, Hkv, G*n, X]
        return self._by_group(self._padded(x, self.q_index, self.q_valid).transpose(1, 2))

    def rows_to_padded(self, x):  # [H, T] -> [B, Hkv, G*n]
        return self.queries_to_padded(x.T[..., None])[..., 0]

    def to_tokens(self, x):  # [B, Hkv, G*n, X] -> [T, H, X]
        return self._by_head(x).transpose(1, 2)[self.q_owner, self.q_row]

    def rows_to_tokens(self, x):  # [B, Hkv, G*n] -> [H, T]
        return self.to_tokens(x[..., None])[..., 0].T.contiguous()

    def keys_to_tokens(self, x):  # [B, Hkv, m, X] -> [S, Hkv, X]
        return x.transpose(1, 2)[self.k_owner, self.k_row]


def positions(offsets: torch.Tensor, starts: torch.Tensor | None, total: int) -> torch.Tensor:
    """Return [T] int64: each token's position in its sequence, for pieces that begin at `starts`."""
    piece = sequence_ids(offsets, total)
    begin = offsets[:-1].long() if starts is None else offsets[:-1].long() - starts.long()
    return torch.arange(total, device=offsets.device) - begin[piece]


def philox(seed: torch.Tensor | int, *counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox-4x32-10 (int64 tensors below 2^32), as Triton's tl.philox returns them.

    counter: four tensors of whole numbers that broadcast; only their low 32 bits are used.
    """
    mask, half = 2**32 - 1, 2**16 - 1

    def product(a: int, x):  # the high and the low word of a * x, without exceeding 2^63
        low = (a & half) * x
        high = (a >> 16) * x + (low >> 16)
        return high >> 16, ((high & half) << 16) | (low & half)

    c0, c1, c2, c3 = (x.long() & mask for x in counter)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = product(0xD2511F53, c0), product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
