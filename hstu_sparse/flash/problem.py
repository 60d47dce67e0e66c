"""Define the arguments of flash attention beside q, k and v: the places of sequences, and the options.

Letters: B sequences, H heads, P pieces of a sequence.

A sequence may be in memory as P pieces, each with consecutive positions: one in most calls, two if a rank of a ring
holds an early and a late part. The pieces of a sequence are adjacent in memory, with an entry of the offsets for each;
`starts` has the position in the sequence at which each begins. Masks, ALiBi and dropout depend on positions, so that
the division of a sequence changes nothing.

Source: Dao, FlashAttention-2 (arXiv 2307.08691); Press et al., ALiBi (arXiv 2108.12409); Salmon et al., Parallel Random
Numbers (Philox), SC 2011.
"""

from typing import NamedTuple

import torch


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
    seed      [1] int64, with dropout. The weight (b, h, t, s) is not dropped if word s % 4 of Philox-4x32-10 with this
              key and the counter (s // 4, t, b * H + h, 0), without its low 8 bits, is at least dropout * 2^24
    """

    scale: float
    left: int = -1
    right: int = -1
    slopes: torch.Tensor | None = None
    dropout: float = 0.0
    seed: torch.Tensor | None = None
