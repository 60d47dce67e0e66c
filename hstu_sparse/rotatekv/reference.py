"""RotateKV in plain PyTorch: the specification. Any device, any float dtype, vectorised.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, C its channels, HG = H / G head groups, K channels of a key that pruning keeps.

Source: RotateKV (IJCAI 2025, arXiv 2501.16383), Mustafar (arXiv 2505.22913).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.jagged import jagged_to_padded, padded_index, padded_to_jagged, readable
from hstu_sparse.launch import cdiv
from hstu_sparse.precision import widened, working_dtype
from hstu_sparse.rotatekv.layout import Layout, Side, plane_words, planes

FP16_MOST = 65504.0
LEAST = 2.0**-20  # of a scale: 16 of fp16's smallest steps, so that rounding costs it 3% at most


class Codes(NamedTuple):
    """One side (keys or values) of T tokens, quantised and not yet packed.

    codes [T, HG, blocks * block] int64, 0 where nothing is kept; scale, zero [T, HG, groups] fp16; kept: bool like
    codes, or None where all are.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    kept: Tensor | None


def hadamard_reference(x: Tensor) -> Tensor:
    """[..., n] -> [..., n], Sylvester's matrix times n ** -0.5, in x's dtype."""
    shape, n, dtype = x.shape, x.shape[-1], x.dtype
    (x,) = widened(x)
    step = 1
    while step < n:
        pair = x.reshape(*shape[:-1], n // (2 * step), 2, step)
        x = torch.stack((pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :]), -2)
        step *= 2
    return (x.reshape(shape) * n**-0.5).to(dtype).contiguous()


def grouped(x: Tensor, head_group: int) -> Tensor:
    """[T, H, D] -> [T, HG, D * G]."""
    return x.reshape(x.shape[0], x.shape[1] // head_group, head_group * x.shape[2])


def rotate(k: Tensor, head_group: int, channel_order: Tensor | None) -> Tensor:
    """Keys [T, H, D] -> [T, HG, C], permuted and transformed, in `working_dtype` of theirs."""
    x = grouped(k, head_group).to(working_dtype(k.dtype))
    if channel_order is not None:
        x = x.gather(-1, channel_order.expand(x.shape))
    return hadamard_reference(x)


def rotate_back(x: Tensor, heads: int, channel_order: Tensor | None) -> Tensor:
    """The inverse of `rotate`: [T, HG, C] -> [T, H, D]."""
    x = hadamard_reference(x)
    if channel_order is not None:
        x = torch.empty_like(x).scatter_(-1, channel_order.expand(x.shape), x)
    return x.reshape(x.shape[0], heads, x.shape[1] * x.shape[2] // heads)


def prune(x: Tensor, kept: int) -> Tensor | None:
    """bool like x [T, HG, C]: the `kept` greatest magnitudes, ties to the smaller channel; None if that is all."""
    if kept == x.shape[-1]:
        return None
    order = x.abs().sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order[..., :kept], True)


def check_fits(name: str, least: Tensor, most: Tensor, levels: int) -> None:
    """ValueError where numbers between `least` and `most` [...] of their groups need scales or zeros beyond fp16's.

    Too large: a zero or scale is beyond fp16. Too small: the greatest number of all needs a scale of less than LEAST,
    which fp16 rounds to a few bits or to 0. NaN fits: it comes back as NaN.
    """
    if not readable(least) or not least.numel():
        return
    peak = float(torch.maximum(most, -least).max())
    if bool((least.abs() > FP16_MOST).any() | (most - least > FP16_MOST * levels).any()):
        raise ValueError(
            f"{name} must fit in fp16 scales and zeros, up to {FP16_MOST:g}, got {peak:g} (of keys after "
            "their rotation): scale it down first"
        )
    if 0 < peak < LEAST * levels:
        raise ValueError(
            f"{name} must reach {LEAST * levels:.1e}, below which fp16 scales of {levels + 1} levels lose it, got "
            f"at most {peak:.1e}: scale it up first, or take fewer bits"
        )


def quantise(
    x: Tensor, side: Side, bits: int, kept: Tensor | None, inset: float = 0.0, name: str | None = None
) -> Codes:
    """x [T, HG, C] in codes; scale and zero are rounded to fp16 first and the codes are of the rounded ones.

    inset: share of a group's range that the codes leave out at either end. name: of x in an error where it does not fit
    (see `check_fits`); absent, what does not is clamped, as the kernels do. A group with an infinity is NaN, as one
    with NaN is.
    """
    x = x.masked_fill(x.isinf(), torch.nan)
    padding = side.groups * side.group - side.channels
    x = F.pad(x, (0, padding)).unflatten(-1, (side.groups, side.group))
    taken = torch.ones_like(x, dtype=torch.bool) if kept is None else F.pad(kept, (0, padding)).view(x.shape)
    if padding:
        taken[..., -1, side.group - padding :] = False
    some = taken.any(-1)
    least = x.masked_fill(~taken, float("inf")).amin(-1).masked_fill(~some, 0)
    most = x.masked_fill(~taken, float("-inf")).amax(-1).masked_fill(~some, 0)
    if inset > 0:
        margin = (most - least) * inset
        least, most = least + margin, most - margin
    levels = 2**bits - 1
    if name is not None:
        check_fits(name, least, most, levels)
    zero = least.clamp(-FP16_MOST, FP16_MOST).half()
    scale = ((most - least) / levels).clamp(max=FP16_MOST).half()
    inverse = torch.where(scale > 0, 1 / scale.to(x.dtype), 0)
    codes = ((x - zero.to(x.dtype)[..., None]) * inverse[..., None]).clamp(0, levels).round().long()
    codes = codes.masked_fill(~taken, 0).flatten(-2)
    return Codes(codes, scale, zero, None if kept is None else taken.flatten(-2))


def dequantise(found: Codes, side: Side, dtype: torch.dtype) -> Tensor:
    """[T, HG, C] of `dtype`: zero + scale * code where something is kept, else 0."""
    codes = found.codes.unflatten(-1, (side.groups, side.group)).to(dtype)
    x = (found.zero.to(dtype)[..., None] + found.scale.to(dtype)[..., None] * codes).flatten(-2)
    if found.kept is not None:
        x = x.masked_fill(~found.kept, 0)
    return x[..., : side.channels]


def encode(k: Tensor, v: Tensor, layout: Layout, channel_order: Tensor | None) -> tuple[Codes, Codes]:
    """Keys and values [T, H, ...] in codes."""
    options = layout.options
    rotated = rotate(k, options.head_group, channel_order)
    keys = quantise(rotated, layout.keys, options.bits, prune(rotated, layout.kept), options.inset, "k")
    values = grouped(v, options.head_group).to(working_dtype(v.dtype))
    values = quantise(values, layout.values, options.bits, None, options.inset, "v")
    return keys, values


def decode(keys: Codes, values: Codes, layout: Layout, channel_order: Tensor | None, dtype: torch.dtype):
    """(k [T, H, D], v [T, H, V]) of `dtype`."""
    k = rotate_back(dequantise(keys, layout.keys, working_dtype(dtype)), layout.heads, channel_order)
    v = dequantise(values, layout.values, working_dtype(dtype))
    return k.to(dtype), v.reshape(v.shape[0], layout.heads, layout.value_size).to(dtype)


def _words(x: Tensor) -> Tensor:
    """int64 below 2^32 -> int32 with the same bits."""
    return torch.where(x >= 2**31, x - 2**32, x).int()


def pack(codes: Tensor, width: int, bits: int) -> Tensor:
    """Codes [..., blocks * width] -> words [..., blocks, words] int32, in the order that `layout` states."""
    codes = codes.unflatten(-1, (-1, width))
    parts, done = [], 0
    for plane in planes(bits):
        words = plane_words(width, plane)
        chunk = min(4, words)
        fields = codes.unflatten(-1, (words // chunk, width // (2 * words), chunk, 2))
        fields = (fields >> done) & (2**plane - 1)
        place = plane * torch.arange(fields.shape[-3], device=codes.device)[:, None, None]
        place = place + 16 * torch.arange(2, device=codes.device)
        parts.append((fields << place).sum((-3, -1)).flatten(-2))
        done += plane
    return _words(torch.cat(parts, -1))


def unpack(words: Tensor, width: int, bits: int) -> Tensor:
    """The inverse of `pack`: int64 codes."""
    words, codes, start, done = words.long() & 0xFFFFFFFF, 0, 0, 0
    for plane in planes(bits):
        count = plane_words(width, plane)
        chunk = min(4, count)
        part = words[..., start : start + count].unflatten(-1, (count // chunk, 1, chunk, 1))
        place = plane * torch.arange(width // (2 * count), device=words.device)[:, None, None]
        place = place + 16 * torch.arange(2, device=words.device)
        codes = codes + (((part >> place & (2**plane - 1)) << done).flatten(-4))
        start, done = start + count, done + plane
    return codes.flatten(-2)


def pack_kept(codes: Tensor, kept: Tensor, count: int, bits: int) -> Tensor:
    """Codes [..., C] of which `kept` marks `count` each -> words [..., words] int32."""
    order = (~kept).byte().sort(dim=-1, stable=True).indices[..., :count]
    codes = codes.gather(-1, order)
    parts, done = [], 0
    for plane in planes(bits):
        per = 32 // plane
        part = F.pad((codes >> done) & (2**plane - 1), (0, -count % per)).unflatten(-1, (-1, per))
        parts.append((part << plane * torch.arange(per, device=codes.device)).sum(-1))
        done += plane
    return _words(torch.cat(parts, -1))


def unpack_kept(words: Tensor, kept: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `pack_kept`: int64 codes, 0 where nothing is kept."""
    rank = kept.long().cumsum(-1) - 1
    words, codes, start, done = words.long() & 0xFFFFFFFF, 0, 0, 0
    for plane in planes(bits):
        per = 32 // plane
        place = rank.clamp(min=0)
        word = words.gather(-1, start + place // per)
        codes = codes + ((word >> plane * (place % per) & (2**plane - 1)) << done)
        start, done = start + cdiv(count * plane, 32), done + plane
    return codes.masked_fill(~kept, 0)


def write(cache, keys: Codes, values: Codes, page: Tensor, slot: Tensor) -> None:
    """Packs T tokens into the cache's pages, token i into slot[i] of page[i]; nothing else is touched."""
    layout = cache.layout
    bits = layout.options.bits
    if layout.sparse:
        kept = keys.kept if keys.kept is not None else torch.ones_like(keys.codes, dtype=torch.bool)
        cache.k_codes[page, :, slot] = pack_kept(keys.codes, kept, layout.kept, bits)
        # Each bit is set once, so that adding sets it.
        mark = torch.where(kept, torch.ones_like(slot)[:, None, None] << slot[:, None, None], 0)
        cache.k_bitmap.index_add_(0, page, mark)
    else:
        cache.k_codes[page, :, :, slot] = pack(keys.codes, layout.keys.block, bits)
    cache.v_codes[page, :, :, slot] = pack(values.codes, layout.values.block, bits)
    cache.k_ranges[page, :, :, slot] = torch.stack((keys.scale, keys.zero), -1)
    cache.v_ranges[page, :, :, slot] = torch.stack((values.scale, values.zero), -1)


def read(cache, page: Tensor, slot: Tensor) -> tuple[Codes, Codes]:
    """The codes of token i in slot[i] of page[i]."""
    layout = cache.layout
    bits, kept = layout.options.bits, None
    if layout.sparse:
        kept = (cache.k_bitmap[page] >> slot[:, None, None] & 1).bool()
        codes = unpack_kept(cache.k_codes[page, :, slot], kept, layout.kept, bits)
    else:
        codes = unpack(cache.k_codes[page, :, :, slot], layout.keys.block, bits)
    keys = Codes(codes, *cache.k_ranges[page, :, :, slot].unbind(-1), kept)
    codes = unpack(cache.v_codes[page, :, :, slot], layout.values.block, bits)
    return keys, Codes(codes, *cache.v_ranges[page, :, :, slot].unbind(-1), None)


def decompress_reference(cache, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(k [T, H, D], v [T, H, V]) of a cache, in its own dtype or the one given."""
    dtype = dtype or cache.dtype
    sequence, position = cache.tokens()
    packed = position >= cache.options.sink_tokens
    keys, values = read(cache, *cache.place(sequence[packed], position[packed]))
    found = decode(keys, values, cache.layout, cache.channel_order, dtype)
    if cache.options.sink_tokens == 0:
        return found
    result = []
    for x, sinks in zip(found, (cache.sink_k, cache.sink_v)):
        whole = x.new_empty(len(position), *x.shape[1:])
        whole[packed] = x
        whole[~packed] = sinks[sequence[~packed], position[~packed]].to(dtype)
        result.append(whole)
    return tuple(result)


def round_trip_reference(k: Tensor, v: Tensor, sinks: Tensor, layout: Layout, channel_order: Tensor | None):
    """decompress(compress(k, v)) without a cache; tokens that `sinks` [T] bool marks come back as they are."""
    packed = (x.masked_fill(sinks[:, None, None], 0) for x in (k, v))  # sinks need not fit
    found = decode(*encode(*packed, layout, channel_order), layout, channel_order, k.dtype)
    return tuple(torch.where(sinks[:, None, None], x, y) for x, y in zip((k, v), found))


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """x [T, H, D] turned by its position [T]: half-split pairs, pair i by position * base ** (-2 i / D)."""
    half = x.shape[-1] // 2
    step = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[:, None, None] * step
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention_reference(
    q: Tensor,
    q_offsets: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    *,
    activation: str,
    scale: float,
    normalizer: float = 1.0,
    bias: RelativeBias,
    rope_base: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Queries [Tq, H, D] against all keys and values of their sequence: (out [Tq, H, V], log-sum-exp [Tq, H] or None).

    A sequence without keys gives 0, and the log-sum-exp -inf. normalizer: for silu.
    """
    lengths = seq_offsets.diff()
    asked = int(q_offsets.diff().max()) if len(lengths) else 0
    cached = int(lengths.max()) if len(lengths) else 0
    if asked == 0:
        return q.new_zeros(0, q.shape[1], v.shape[2]), q.new_zeros(0, q.shape[1])
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if rope_base is not None:
        begins = seq_offsets[:-1].repeat_interleave(lengths)
        k = rope(k, torch.arange(k.shape[0], device=k.device) - begins, rope_base)
        q = rope(q, lengths.repeat_interleave(q_offsets.diff()), rope_base)
    keys, values = (jagged_to_padded(x, seq_offsets, cached).transpose(1, 2) for x in (k, v))  # [B, H, n, ...]
    queries = jagged_to_padded(q * scale, q_offsets, asked).transpose(1, 2)
    scores = queries @ keys.transpose(2, 3)
    index, inside = padded_index(seq_offsets, cached)
    if bias.position is not None or bias.time is not None:
        distance = (lengths[:, None] - torch.arange(cached, device=q.device))[:, None]  # [B, 1, n]
        times = ()
        if bias.time is not None:
            query_index, _ = padded_index(q_offsets, asked)
            seen = bias.timestamps[index] if len(bias.timestamps) else torch.zeros_like(index)
            times = bias.query_timestamps[query_index][:, :, None], seen[:, None]
        scores = scores + pair_bias(bias, distance, *times)[:, None]
    hidden = ~inside[:, None, None]
    lse = None
    if activation == "silu":
        weights = F.silu(scores).masked_fill(hidden, 0)
        values = values / normalizer
    else:
        scores = scores.masked_fill(hidden, float("-inf"))
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0)[..., None])
        lse = padded_to_jagged(lse.transpose(1, 2), q_offsets, q.shape[0])
    out = (weights.to(v.dtype) @ values).transpose(1, 2)
    return padded_to_jagged(out, q_offsets, q.shape[0]).to(dtype), lse
