"""Read and write pages and RotateKV's codes in plain PyTorch, on any device: the specification of the kernels.

Letters: T tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size, S sink tokens, G
heads of a head group, C its channels, HG = H / G head groups, K channels of a key that pruning keeps.

A position of a sequence is in slot `position % page_size` of its page `position // page_size`. The first S positions of
a sequence are sinks: they are stored uncompressed in another tensor, and their slots stay unused.

Source: RotateKV (IJCAI 2025, arXiv 2501.16383), Mustafar (arXiv 2505.22913).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.cache.format import PageFormat, Side, plane_words, planes
from hstu_sparse.core.jagged import readable
from hstu_sparse.core.launch import cdiv
from hstu_sparse.core.precision import widened, working_dtype

FP16_MAX = 65504.0
MIN_SCALE = 2.0**-20  # 16 times the smallest fp16 number: rounding changes larger scales by at most 3%


class Codes(NamedTuple):
    """The codes of keys or of values of T tokens, not packed.

    codes        [T, HG, blocks * block] int64, 0 for pruned channels
    scale, zero  [T, HG, groups] fp16
    mask         the kept channels, bool in the shape of codes; None for all
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    mask: Tensor | None


def hadamard_reference(x: Tensor) -> Tensor:
    """Multiply x [..., n] by Sylvester's matrix times n ** -0.5; the result has the dtype of x."""
    shape, n, dtype = x.shape, x.shape[-1], x.dtype
    (x,) = widened(x)
    step = 1
    while step < n:
        pair = x.reshape(*shape[:-1], n // (2 * step), 2, step)
        x = torch.stack((pair[..., 0, :] + pair[..., 1, :], pair[..., 0, :] - pair[..., 1, :]), -2)
        step *= 2
    return (x.reshape(shape) * n**-0.5).to(dtype).contiguous()


def grouped(x: Tensor, head_group: int) -> Tensor:
    """Reshape [T, H, D] to [T, HG, D * G]."""
    return x.reshape(x.shape[0], x.shape[1] // head_group, head_group * x.shape[2])


def rotate(k: Tensor, head_group: int, channel_order: Tensor | None) -> Tensor:
    """Permute and transform keys [T, H, D] to [T, HG, C], in the `working_dtype`."""
    x = grouped(k, head_group).to(working_dtype(k.dtype))
    if channel_order is not None:
        x = x.gather(-1, channel_order.expand(x.shape))
    return hadamard_reference(x)


def rotate_back(x: Tensor, heads: int, channel_order: Tensor | None) -> Tensor:
    """Apply the inverse of `rotate`: [T, HG, C] -> [T, H, D]."""
    x = hadamard_reference(x)
    if channel_order is not None:
        x = torch.empty_like(x).scatter_(-1, channel_order.expand(x.shape), x)
    return x.reshape(x.shape[0], heads, x.shape[1] * x.shape[2] // heads)


def prune(x: Tensor, num_kept: int) -> Tensor | None:
    """Return a mask [T, HG, C] of the `num_kept` largest magnitudes of x; ties: the first. None if all are kept."""
    if num_kept == x.shape[-1]:
        return None
    order = x.abs().sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order[..., :num_kept], True)


def check_fits(name: str, least: Tensor, most: Tensor, levels: int, refuse_small: bool = True) -> None:
    """Raise ValueError if fp16 scales and zeros cannot represent groups of numbers from `least` to `most` [...].

    refuse_small: also raise if the largest magnitude of all groups needs a scale below MIN_SCALE. NaN is accepted, and
    restored as NaN.
    """
    if not readable(least) or not least.numel():
        return
    peak = float(torch.maximum(most, -least).max())
    if bool((least.abs() > FP16_MAX).any() | (most - least > FP16_MAX * levels).any()):
        raise ValueError(
            f"{name} must fit in fp16 scales and zeros, up to {FP16_MAX:g}, got {peak:g} (keys: after the rotation); "
            "scale it down"
        )
    if refuse_small and 0 < peak < MIN_SCALE * levels:
        raise ValueError(
            f"{name} must have magnitudes of at least {MIN_SCALE * levels:.1e} for fp16 scales of {levels + 1} levels, "
            f"got at most {peak:.1e}; scale it up, or use fewer bits"
        )


def quantise(
    x: Tensor, side: Side, bits: int, mask: Tensor | None, inset: float = 0.0, name: str | None = None,
    refuse_small: bool = True,
) -> Codes:  # fmt: skip
    """Quantise x [T, HG, C] with scales and zeros that are rounded to fp16 before codes are computed.

    Args:
        inset: the share of a group's range, at either end, that the codes do not cover.
        name: the name of x in errors of `check_fits`; without a name, large numbers are clamped, as in the kernels.
        refuse_small: see `check_fits`.

    NaN or infinity in a group makes the whole group NaN.
    """
    x = x.masked_fill(x.isinf(), torch.nan)
    padding = side.groups * side.group - side.channels
    x = F.pad(x, (0, padding)).unflatten(-1, (side.groups, side.group))
    included = torch.ones_like(x, dtype=torch.bool) if mask is None else F.pad(mask, (0, padding)).view(x.shape)
    if padding:
        included[..., -1, side.group - padding :] = False
    some = included.any(-1)
    least = x.masked_fill(~included, float("inf")).amin(-1).masked_fill(~some, 0)
    most = x.masked_fill(~included, float("-inf")).amax(-1).masked_fill(~some, 0)
    if inset > 0:
        margin = (most - least) * inset
        least, most = least + margin, most - margin
    levels = 2**bits - 1
    if name is not None:
        check_fits(name, least, most, levels, refuse_small)
    zero = least.clamp(-FP16_MAX, FP16_MAX).half()
    scale = ((most - least) / levels).clamp(max=FP16_MAX).half()
    inverse = torch.where(scale > 0, 1 / scale.to(x.dtype), 0)
    codes = ((x - zero.to(x.dtype)[..., None]) * inverse[..., None]).clamp(0, levels).round().long()
    codes = codes.masked_fill(~included, 0).flatten(-2)
    return Codes(codes, scale, zero, None if mask is None else included.flatten(-2))


def dequantise(encoded: Codes, side: Side, dtype: torch.dtype) -> Tensor:
    """Return [T, HG, C] in `dtype`: zero + scale * code for kept channels, 0 for pruned ones."""
    codes = encoded.codes.unflatten(-1, (side.groups, side.group)).to(dtype)
    x = (encoded.zero.to(dtype)[..., None] + encoded.scale.to(dtype)[..., None] * codes).flatten(-2)
    if encoded.mask is not None:
        x = x.masked_fill(~encoded.mask, 0)
    return x[..., : side.channels]


def encode(
    k: Tensor, v: Tensor, format: PageFormat, channel_order: Tensor | None, *, refuse_small: bool = True
) -> tuple[Codes, Codes]:
    """Quantise keys [T, H, D] and values [T, H, V]. refuse_small: see `check_fits`."""
    assert format.bits is not None
    rotated = rotate(k, format.head_group, channel_order)
    mask = prune(rotated, format.num_kept)
    keys = quantise(rotated, format.keys, format.bits, mask, format.inset, "k", refuse_small)
    values = grouped(v, format.head_group).to(working_dtype(v.dtype))
    return keys, quantise(values, format.values, format.bits, None, format.inset, "v", refuse_small)


def decode(
    keys: Codes, values: Codes, format: PageFormat, channel_order: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (k [T, H, D], v [T, H, V]) in `dtype`."""
    k = rotate_back(dequantise(keys, format.keys, working_dtype(dtype)), format.heads, channel_order)
    v = dequantise(values, format.values, working_dtype(dtype))
    return k.to(dtype), v.reshape(v.shape[0], format.heads, format.value_size).to(dtype)


def _words(x: Tensor) -> Tensor:
    """Convert int64 numbers below 2^32 to int32 with the same bits."""
    return torch.where(x >= 2**31, x - 2**32, x).int()


def pack(codes: Tensor, width: int, bits: int) -> Tensor:
    """Pack codes [..., blocks * width] into words [..., blocks, words] int32; format.py defines the order."""
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
    """Return the codes, int64, that `pack` packed."""
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


def pack_kept(codes: Tensor, mask: Tensor, count: int, bits: int) -> Tensor:
    """Pack the `count` codes in each row [..., C] where `mask` is True into words [..., words] int32."""
    order = (~mask).byte().sort(dim=-1, stable=True).indices[..., :count]
    codes = codes.gather(-1, order)
    parts, done = [], 0
    for plane in planes(bits):
        per = 32 // plane
        part = F.pad((codes >> done) & (2**plane - 1), (0, -count % per)).unflatten(-1, (-1, per))
        parts.append((part << plane * torch.arange(per, device=codes.device)).sum(-1))
        done += plane
    return _words(torch.cat(parts, -1))


def unpack_kept(words: Tensor, mask: Tensor, count: int, bits: int) -> Tensor:
    """Return the codes, int64, that `pack_kept` packed; 0 where `mask` is False."""
    rank = mask.long().cumsum(-1) - 1
    words, codes, start, done = words.long() & 0xFFFFFFFF, 0, 0, 0
    for plane in planes(bits):
        per = 32 // plane
        place = rank.clamp(min=0)
        word = words.gather(-1, start + place // per)
        codes = codes + ((word >> plane * (place % per) & (2**plane - 1)) << done)
        start, done = start + cdiv(count * plane, 32), done + plane
    return codes.masked_fill(~mask, 0)


def locate_tokens(format: PageFormat, pages: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return (page, slot) of positions of sequences, which broadcast. With sinks, `pages` begins with their column."""
    column = position // format.page_size + (format.sink_tokens > 0)
    return pages[sequence, column].long(), position % format.page_size


def padded_keys(k: Tensor, format: PageFormat) -> Tensor:
    """Pad k [T, H, D] with zeros to [T, H, format.coded_size]."""
    return F.pad(k, (0, format.coded_size - format.head_size)) if format.coded_size != format.head_size else k


def write(
    tensors: dict[str, Tensor], format: PageFormat, k: Tensor, v: Tensor, pages: Tensor, sequence: Tensor,
    position: Tensor, channel_order: Tensor | None = None,
) -> None:  # fmt: skip
    """Write keys [T, H, D] and values [T, H, V] to positions [T] of sequences [T]; drop tokens for pages below 0."""
    page, slot = locate_tokens(format, pages, sequence, position)
    owned = page >= 0
    if not bool(owned.all()):
        k, v, sequence, position, page, slot = (x[owned] for x in (k, v, sequence, position, page, slot))
    if format.bits is None:
        for name, x in (("k", k), ("v", v)):
            tensors[name][page, :, slot] = _rounded(name, x, format.dtype)
        return
    if format.sink_tokens:
        sinks = position < format.sink_tokens
        if bool(sinks.any()):
            row, at = pages[sequence[sinks], 0].long(), position[sinks]
            for name, x in (("k", k), ("v", v)):
                tensors[f"sink_{name}"][row, at] = _rounded(name, x[sinks], format.dtype)
            k, v, page, slot = (x[~sinks] for x in (k, v, page, slot))
    keys, values = encode(padded_keys(k, format), v, format, channel_order, refuse_small=False)
    write_codes(tensors, format, keys, values, page, slot)


def _rounded(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`; raise ValueError if a finite number would become infinite."""
    rounded = x.to(dtype)
    if dtype == torch.float16 and bool((rounded.isinf() & x.isfinite()).any()):
        raise ValueError(f"{name} must fit in float16 pages, up to 65504, got {float(x.abs().max()):g}")
    return rounded


def write_codes(tensors, format: PageFormat, keys: Codes, values: Codes, page, slot) -> None:
    """Pack the codes of T tokens into pages, token i into slot[i] of page[i]."""
    bits = format.bits
    assert bits is not None
    if format.sparse:
        mask = keys.mask if keys.mask is not None else torch.ones_like(keys.codes, dtype=torch.bool)
        tensors["k_codes"][page, :, slot] = pack_kept(keys.codes, mask, format.num_kept, bits)
        # Adding sets bits, since they are 0 before and each is set once.
        mark = torch.where(mask, torch.ones_like(slot)[:, None, None] << slot[:, None, None], 0)
        tensors["k_bitmap"].index_add_(0, page, mark)
    else:
        tensors["k_codes"][page, :, :, slot] = pack(keys.codes, format.keys.block, bits)
    tensors["v_codes"][page, :, :, slot] = pack(values.codes, format.values.block, bits)
    tensors["k_ranges"][page, :, :, slot] = torch.stack((keys.scale, keys.zero), -1)
    tensors["v_ranges"][page, :, :, slot] = torch.stack((values.scale, values.zero), -1)


def read_codes(tensors, format: PageFormat, page: Tensor, slot: Tensor) -> tuple[Codes, Codes]:
    """Return the codes of token i in slot[i] of page[i]."""
    bits, mask = format.bits, None
    assert bits is not None
    if format.sparse:
        mask = (tensors["k_bitmap"][page] >> slot[:, None, None] & 1).bool()
        codes = unpack_kept(tensors["k_codes"][page, :, slot], mask, format.num_kept, bits)
    else:
        codes = unpack(tensors["k_codes"][page, :, :, slot], format.keys.block, bits)
    keys = Codes(codes, *tensors["k_ranges"][page, :, :, slot].unbind(-1), mask)
    codes = unpack(tensors["v_codes"][page, :, :, slot], format.values.block, bits)
    return keys, Codes(codes, *tensors["v_ranges"][page, :, :, slot].unbind(-1), None)


def read(
    tensors: dict[str, Tensor], format: PageFormat, pages: Tensor, sequence: Tensor, position: Tensor,
    dtype: torch.dtype, channel_order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (keys [T, H, D], values [T, H, V]) in `dtype` at positions [T] of sequences [T]."""
    page, slot = locate_tokens(format, pages, sequence, position)
    if format.bits is None:
        return tensors["k"][page, :, slot].to(dtype), tensors["v"][page, :, slot].to(dtype)
    k, v = decode(*read_codes(tensors, format, page, slot), format, channel_order, dtype)
    k = k[..., : format.head_size]
    sinks = position < format.sink_tokens
    if not bool(sinks.any()):
        return k, v
    row, at = pages[sequence[sinks], 0].long(), position[sinks]
    return tuple(
        x.index_put((sinks.nonzero().squeeze(1),), tensors[name][row, at].to(dtype))
        for name, x in (("sink_k", k), ("sink_v", v))
    )


def page_columns(format: PageFormat, pages: Tensor, longest: int, num_pages: int) -> Tensor:
    """Return the columns of a page table for the first `longest` positions, with page numbers clamped to valid ones."""
    first = int(format.sink_tokens > 0)
    return pages[:, first : first + cdiv(longest, format.page_size)].long().clamp(0, num_pages - 1)


def read_padded(
    tensors: dict[str, Tensor], format: PageFormat, pages: Tensor, inside: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (keys [B, H, n, D], values [B, H, n, V]) in `dtype`, 0 where `inside` [B, n] is False."""
    if format.bits is None:
        columns, outside = page_columns(format, pages, inside.shape[1], len(tensors["k"])), ~inside[:, None, :, None]
        whole = (tensors[name][columns].transpose(1, 2).flatten(2, 3)[:, :, : inside.shape[1]] for name in ("k", "v"))
        k, v = (x.to(dtype).masked_fill(outside, 0) for x in whole)
        return k, v
    at = inside.nonzero(as_tuple=True)
    rows = read(tensors, format, pages, *at, dtype)
    k, v = (x.new_zeros(*inside.shape, *x.shape[1:]).index_put(at, x).transpose(1, 2) for x in rows)
    return k, v
