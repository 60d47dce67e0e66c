"""Launch the kernels that write pages, restore keys and values from codes, and quantise in a round trip.

Letters: T tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size, R tokens of a
tile.

This module imports triton; other modules import this module only when they launch a kernel.
"""

import functools
import typing

import torch
from torch import Tensor

from hstu_sparse.cache.codec import Form, Pages
from hstu_sparse.cache.decode import rotatekv_decompress_kernel, rotatekv_round_trip_kernel
from hstu_sparse.cache.encode import write_codes_kernel, write_pages_kernel, write_timestamps_kernel
from hstu_sparse.cache.format import TILE, PageFormat
from hstu_sparse.core.launch import LaunchConfig, configuration, on_device, padded_head, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import check_kernel
from hstu_sparse.tiles.rows import Rows, as_rows

# The maximum number of bits of codes that `codec.unpack_float_fields` can put into the mantissa of a 16-bit type.
LOW_BITS = {torch.bfloat16: 4, torch.float16: 8}


def code_offset(format: PageFormat, dtype: torch.dtype) -> int:
    """Return the number that unpacking adds to a code; see `codec.unpack_float_fields`."""
    if format.bits is None or format.sparse or format.bits > LOW_BITS.get(dtype, 0):
        return 0
    return 4 + 4 * 2 if format.bits == 3 else 2**format.bits


@functools.lru_cache(maxsize=64)
def kernel_form(format: PageFormat) -> Form:
    """Return the constants of the kernels for a format."""
    sizes: dict[str, typing.Any] = dict(H=format.heads, D=format.head_size, V=format.value_size)
    sizes |= dict(CODED=format.coded_size, PAGE=format.page_size, SINKS=format.sink_tokens > 0, SPARSE=format.sparse)
    if format.bits is None:
        sizes |= dict(K_BLOCK=padded_head(format.head_size), V_BLOCK=padded_head(format.value_size))
        sizes |= dict(BITS=0, KEPT=0, K_BLOCKS=1, K_WORDS=0, K_GROUPS=1, V_BLOCKS=1, V_WORDS=0, V_GROUPS=1)
        return Form(**sizes, G=1)
    for name, side in (("K", format.keys), ("V", format.values)):
        sizes |= {f"{name}_BLOCK": side.block, f"{name}_BLOCKS": side.blocks, f"{name}_GROUPS": side.groups}
    (*_, words), _ = format.shapes(0)["k_codes"]
    sizes |= dict(BITS=format.bits, KEPT=format.num_kept, K_WORDS=words, V_WORDS=format.values.words)
    return Form(**sizes, G=format.head_group)


def tile_tokens(format: PageFormat, dtype: torch.dtype) -> int:
    """Return the number of tokens of a tile; a program has all channels of its tokens in registers."""
    most = TILE // 2 if dtype == torch.float32 else TILE
    return max(16, min(most, TILE * 256 // format.keys.channels))


@configuration
def codes_config(format: PageFormat, dtype: torch.dtype) -> LaunchConfig:
    """Return the configuration for writing codes, with R tokens for each program."""
    tokens, warps = (TILE, 4) if format.sparse else (16, 2)
    return LaunchConfig(warps, R=min(tokens, tile_tokens(format, dtype)))


def inverse(order: Tensor | None) -> Tensor | None:
    """Return the inverse permutation of each row, int32."""
    return None if order is None else order.argsort(-1).int()


def write_pages(
    tensors: dict[str, Tensor],
    format: PageFormat,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    pages: Tensor,
    lengths: Tensor,
    channel_order: Tensor | None = None,
) -> None:
    """Write keys [T, H, D] and values [T, H, V] of one layer; see `PagePool.write`.

    channel_order: see `rotatekv_compress`.
    """
    check_kernel("PagePool.write", k, {"D": format.head_size, "V": format.value_size})
    check_kernel("PagePool.write", tensors.get("k", tensors.get("sink_k", k)), {})
    if len(k) == 0:
        return
    batch, form, target = offsets.shape[0] - 1, kernel_form(format), Pages.from_tensors(tensors)
    inputs = *map(Rows.of, as_rows(k, v, align=False)), offsets.contiguous(), lengths.contiguous(), pages.contiguous()
    with on_device(k.device):
        if format.bits is None:
            rows = 16
            run(
                write_pages_kernel, (len(k) // rows + batch, format.heads), *inputs, target, batch, pages.shape[1],
                FORM=form, PAD_D=form.K_BLOCK, PAD_V=form.V_BLOCK, R=rows, num_warps=4,
            )  # fmt: skip
            return
        config = codes_config(format, k.dtype)
        # With a fused multiply-add, codes would be rounded differently from the reference.
        run(
            write_codes_kernel, (len(k) // config.R + batch, format.head_groups), *inputs, channel_order, target, batch,
            pages.shape[1], format.sink_tokens, format.keys.channels**-0.5, FORM=form, INSET=format.inset,
            **config, enable_fp_fusion=False,
        )  # fmt: skip


def write_timestamps(
    timestamps: Tensor, format: PageFormat, new_times: Tensor, offsets: Tensor, pages: Tensor, lengths: Tensor
) -> None:
    """Write timestamps [T] in seconds; see `PagePool.write_timestamps`."""
    if len(new_times) == 0:
        return
    batch, rows = offsets.shape[0] - 1, 128
    with on_device(new_times.device):
        run(
            write_timestamps_kernel, len(new_times) // rows + batch, new_times.contiguous(), offsets.contiguous(),
            lengths.contiguous(), pages.contiguous(), timestamps, batch, pages.shape[1],
            SINKS=format.sink_tokens > 0, PAGE=format.page_size, R=rows, num_warps=4,
        )  # fmt: skip


def decompress(cache) -> tuple[Tensor, Tensor]:
    """Return (k [T, H, D], v [T, H, V]) of a `RotateKVCache`, in its dtype."""
    format, tokens = cache.format, sum(cache.lengths)
    k, v = (
        torch.empty(tokens, format.heads, size, dtype=format.dtype, device=cache.device)
        for size in (format.head_size, format.value_size)
    )
    check_kernel("rotatekv_decompress", k, {"V": format.value_size})
    if tokens == 0:
        return k, v
    rows, out = tile_tokens(format, format.dtype), min(4, format.keys.blocks)
    with on_device(k.device):
        run(
            rotatekv_decompress_kernel,
            (tokens // rows + cache.num_sequences, format.head_groups, format.keys.blocks // out),
            cache.seq_offsets, cache.pages, inverse(cache.channel_order), Pages.from_tensors(cache.tensors), k, v,
            cache.num_sequences, cache.pages.shape[1], format.sink_tokens, format.keys.channels**-0.5,
            FORM=kernel_form(format), OFFSET=code_offset(format, format.dtype), OUT=out, R=rows, num_warps=4,
        )  # fmt: skip
    return k, v


def _round_trip(k, v, seq_offsets, channel_order, bits, head_group, quant_group, sparsity, sink_tokens, clip):
    heads, head_size = k.shape[1:]
    codes = bits, head_group, quant_group, sparsity, sink_tokens, clip
    format = PageFormat(heads, head_size, v.shape[2], k.dtype, *codes)
    check_kernel("rotatekv_round_trip", k, {"D": format.head_size, "V": format.value_size})
    outputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    rows, batch = tile_tokens(format, k.dtype), seq_offsets.shape[0] - 1
    if k.shape[0]:
        run(
            rotatekv_round_trip_kernel, (k.shape[0] // rows + batch, format.head_groups),
            *map(Rows.of, as_rows(k, v, align=False)), seq_offsets, channel_order, inverse(channel_order), *outputs,
            batch, sink_tokens, format.keys.channels**-0.5, FORM=kernel_form(format), INSET=format.inset, R=rows,
            enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return outputs


def _straight_through(dk, dv, k, v, *_):
    return [torch.zeros_like(x) if grad is None else grad.contiguous() for x, grad in ((k, dk), (v, dv))]


def _fake(k, v, *_):
    return k.new_empty(k.shape), v.new_empty(v.shape)


_SCHEMA = (
    "Tensor k, Tensor v, Tensor seq_offsets, Tensor? channel_order, int bits, int head_group, int quant_group, "
    "float sparsity, int sink_tokens, float clip"
)
round_trip_operator = Operator(
    "rotatekv_round_trip", _SCHEMA, _round_trip, _straight_through, _fake, "k v", outputs=2, graded=2
)
