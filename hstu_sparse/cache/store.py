"""Read and write pages in plain PyTorch: the specification of the kernels that write and read them.

Letters: T tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size, S sink tokens.

A position of a sequence is in slot `position % page_size` of its page `position // page_size`. With codes the first S
positions of a sequence are stored uncompressed, in its row of sinks; their slots in the pages stay unused.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.cache import packing
from hstu_sparse.cache.format import PageFormat


def place(format: PageFormat, pages: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return (page, slot) of positions of sequences, which broadcast; with sinks, their row is column 0 of `pages`."""
    column = position // format.page_size + (format.sink_tokens > 0)
    return pages[sequence, column].long(), position % format.page_size


def padded_keys(k: Tensor, format: PageFormat) -> Tensor:
    """Return k [T, H, D] with the zeros that the Hadamard transform needs."""
    return F.pad(k, (0, format.coded_size - format.head_size)) if format.coded_size != format.head_size else k


def write(
    tensors: dict[str, Tensor], format: PageFormat, k: Tensor, v: Tensor, pages: Tensor, sequence: Tensor,
    position: Tensor, channel_order: Tensor | None = None,
) -> None:  # fmt: skip
    """Write keys [T, H, D] and values [T, H, V] to positions [T] of sequences [T], and change nothing else.

    Tokens for a page below 0 are dropped.
    """
    page, slot = place(format, pages, sequence, position)
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
    keys, values = packing.encode(padded_keys(k, format), v, format, channel_order, refuse_small=False)
    write_codes(tensors, format, keys, values, page, slot)


def _rounded(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype; ValueError if a finite number would become infinite."""
    rounded = x.to(dtype)
    if dtype == torch.float16 and bool((rounded.isinf() & x.isfinite()).any()):
        raise ValueError(f"{name} must fit in float16 pages, up to 65504, got {float(x.abs().max()):g}")
    return rounded


def write_codes(tensors, format: PageFormat, keys: packing.Codes, values: packing.Codes, page, slot) -> None:
    """Pack T tokens into pages, token i into slot[i] of page[i]."""
    bits = format.bits
    assert bits is not None
    if format.sparse:
        mask = keys.mask if keys.mask is not None else torch.ones_like(keys.codes, dtype=torch.bool)
        tensors["k_codes"][page, :, slot] = packing.pack_kept(keys.codes, mask, format.num_kept, bits)
        # Each bit is set once, in a page that held zeros, so that adding sets it.
        mark = torch.where(mask, torch.ones_like(slot)[:, None, None] << slot[:, None, None], 0)
        tensors["k_bitmap"].index_add_(0, page, mark)
    else:
        tensors["k_codes"][page, :, :, slot] = packing.pack(keys.codes, format.keys.block, bits)
    tensors["v_codes"][page, :, :, slot] = packing.pack(values.codes, format.values.block, bits)
    tensors["k_ranges"][page, :, :, slot] = torch.stack((keys.scale, keys.zero), -1)
    tensors["v_ranges"][page, :, :, slot] = torch.stack((values.scale, values.zero), -1)


def read_codes(tensors, format: PageFormat, page: Tensor, slot: Tensor) -> tuple[packing.Codes, packing.Codes]:
    """Return the codes of token i in slot[i] of page[i]."""
    bits, mask = format.bits, None
    assert bits is not None
    if format.sparse:
        mask = (tensors["k_bitmap"][page] >> slot[:, None, None] & 1).bool()
        codes = packing.unpack_kept(tensors["k_codes"][page, :, slot], mask, format.num_kept, bits)
    else:
        codes = packing.unpack(tensors["k_codes"][page, :, :, slot], format.keys.block, bits)
    keys = packing.Codes(codes, *tensors["k_ranges"][page, :, :, slot].unbind(-1), mask)
    codes = packing.unpack(tensors["v_codes"][page, :, :, slot], format.values.block, bits)
    return keys, packing.Codes(codes, *tensors["v_ranges"][page, :, :, slot].unbind(-1), None)


def read(
    tensors: dict[str, Tensor], format: PageFormat, pages: Tensor, sequence: Tensor, position: Tensor,
    dtype: torch.dtype, channel_order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (keys [T, H, D], values [T, H, V]) of `dtype` at positions [T] of sequences [T]."""
    page, slot = place(format, pages, sequence, position)
    if format.bits is None:
        return tensors["k"][page, :, slot].to(dtype), tensors["v"][page, :, slot].to(dtype)
    k, v = packing.decode(*read_codes(tensors, format, page, slot), format, channel_order, dtype)
    k = k[..., : format.head_size]
    sinks = position < format.sink_tokens
    if not bool(sinks.any()):
        return k, v
    row, at = pages[sequence[sinks], 0].long(), position[sinks]
    return tuple(
        x.index_put((sinks.nonzero().squeeze(1),), tensors[name][row, at].to(dtype))
        for name, x in (("sink_k", k), ("sink_v", v))
    )
