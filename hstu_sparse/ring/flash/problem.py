"""What a call of the flash attention is about, beside q, k and v: where sequences lie, and the options.

Letters: B sequences, H heads, P pieces of a sequence.

A sequence may be in memory as P pieces, each a stretch of consecutive positions: one in most calls, two where a rank of
a ring holds an early and a late part. The pieces of a sequence lie one behind the other, with an entry of the offsets
for each; `starts` says at which position of the sequence each begins. Masks, ALiBi and dropout go by positions, so how
a sequence was cut changes nothing.

Source: Dao, FlashAttention-2 (arXiv 2307.08691); Press et al., ALiBi (arXiv 2108.12409); Salmon et al., Parallel Random
Numbers (Philox), SC 2011.
"""

from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """q_offsets, k_offsets: [B*P+1] integers; q_starts, k_starts: [B*P] integers, None for zeros."""

    q_offsets: torch.Tensor
    k_offsets: torch.Tensor
    q_starts: torch.Tensor | None = None
    k_starts: torch.Tensor | None = None
    pieces: int = 1


class Options(NamedTuple):
    """Query t sees key s if t - left <= s <= t + right, where a bound below 0 does not hold.

    scale     of the scores, above 0
    slopes    [H] or [B, H] fp32 or None: slope * |t - s| is taken from the scores (ALiBi)
    dropout   probability of zeroing a weight of the softmax; what is kept is divided by 1 - dropout
    seed      [1] int64, with dropout. The weight (b, h, t, s) is kept if word s % 4 of Philox-4x32-10 with this key and
              the counter (s // 4, t, b * H + h, 0), without its low 8 bits, is at least dropout * 2^24
    """

    scale: float
    left: int = -1
    right: int = -1
    slopes: torch.Tensor | None = None
    dropout: float = 0.0
    seed: torch.Tensor | None = None
