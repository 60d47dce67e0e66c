"""Launch the kernel of paged attention for a RotateKV cache, or for uncompressed keys and values.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size.
"""

import math

import torch
from torch import Tensor

from hstu_sparse.cache.codec import Pages
from hstu_sparse.cache.format import TILE, PageFormat
from hstu_sparse.cache.launch import inverse, write_timestamps
from hstu_sparse.cache.paged.kernel import History
from hstu_sparse.cache.paged.launch import attend
from hstu_sparse.cache.paged.reference import Queries, Scoring
from hstu_sparse.cache.rotatekv.cache import RotateKVCache
from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.core.launch import next_power_of_2, on_device
from hstu_sparse.core.registration import cached_constant
from hstu_sparse.core.validation import check_kernel
from hstu_sparse.layer.rotary import rotated


@cached_constant
def frequencies(base: float, half: int, device: torch.device) -> Tensor:
    """Return the frequencies of RoPE for each pair of channels, [half] fp64: rotations per position."""
    return base ** (-torch.arange(half, dtype=torch.float64, device=device) / half) / (2 * math.pi)


@cached_constant
def angles(base: float, half: int, step: int, count: int, device: torch.device) -> Tensor:
    """Return cos and sin of the angles of RoPE at positions 0, step, ...: [count, 2, half] fp32."""
    position = step * torch.arange(count, dtype=torch.float64, device="cpu")
    angle = position[:, None] * frequencies(base, half, torch.device("cpu")) * (2 * math.pi)
    return torch.stack((angle.cos(), angle.sin()), 1).float().to(device)


def attend_to_cache(
    q: Tensor, q_offsets: Tensor, cache: RotateKVCache, max_seq_len: int, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Tq, H, V], log-sum-exp [Tq, H] or None) of queries at the position after their cached sequence."""
    format, lengths, tensors = cache.format, cache.seq_offsets.diff(), dict(cache.tensors)
    check_kernel("rotatekv_attention", q, {"D": format.head_size, "V": format.value_size})
    timestamps, near, far, rope_base = None, None, None, scoring.rope_base
    if scoring.bias.time is not None and scoring.bias.timestamps is not None:
        timestamps = torch.empty(cache.pool.num_pages, format.page_size, dtype=torch.int64, device=q.device)
        new = scoring.bias.timestamps, cache.seq_offsets, cache.pages, torch.zeros_like(lengths)
        write_timestamps(timestamps, format, *new)
    if rope_base is not None:
        half = format.head_size // 2
        q = _apply_rope(q, q_offsets, rope_base, lengths[sequence_ids(q_offsets, len(q))])
        near = angles(rope_base, half, 1, TILE, q.device)
        far = angles(rope_base, half, TILE, next_power_of_2(max_seq_len // TILE + 2), q.device)
        if format.sink_tokens:
            sinks = tensors["sink_k"]
            offsets = format.sink_tokens * torch.arange(len(sinks) + 1, device=q.device)
            tensors["sink_k"] = _apply_rope(sinks.flatten(0, 1), offsets, rope_base).view(sinks.shape)
    order = inverse(cache.channel_order)
    history = History(Pages.from_tensors(tensors), cache.pages, None, timestamps, order, near, far)
    queries = Queries(q, None, None, q_offsets.contiguous(), lengths, True)
    return attend(queries, history, format, cache.pages.shape[1] * format.page_size, scoring)


def attend_to_rows(
    q: Tensor, q_offsets: Tensor, rows: tuple[Tensor, Tensor, Tensor], max_seq_len: int, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """Return the results of `attend_to_cache` for rows: uncompressed (k [T, H, D], v [T, H, V], offsets [B+1])."""
    (k, v, seq_offsets), lengths = rows, rows[2].diff()
    format = PageFormat(k.shape[1], k.shape[2], v.shape[2], k.dtype)
    check_kernel("unpacked_attention", q, {"D": format.head_size, "V": format.value_size})
    if scoring.rope_base is not None:
        q = _apply_rope(q, q_offsets, scoring.rope_base, lengths[sequence_ids(q_offsets, len(q))])
        k = _apply_rope(k, seq_offsets, scoring.rope_base)
    pages = Pages(k.contiguous(), v.contiguous())
    timestamps = scoring.bias.timestamps
    timestamps = None if timestamps is None else timestamps.contiguous()
    history = History(pages, None, seq_offsets.contiguous(), timestamps)
    return attend(Queries(q, None, None, q_offsets.contiguous(), lengths, True), history, format, max_seq_len, scoring)


def _apply_rope(x: Tensor, seq_offsets: Tensor, base: float, positions: Tensor | None = None) -> Tensor:
    """Apply RoPE to x [T, H, D] at `positions`, by default from 0 on in each sequence."""
    half = x.shape[2] // 2
    with on_device(x.device):
        return rotated(x, seq_offsets.contiguous(), frequencies(base, half, x.device), half, positions=positions)
