"""Launch the kernels that write pages, and compute the constants of all kernels on codes. Imported only when needed.

Letters: T new tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size.
"""

import functools

import torch
from torch import Tensor

from hstu_sparse.cache.encode import write_codes_kernel
from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.layout import TILE, Layout
from hstu_sparse.cache.write import write_pages_kernel, write_timestamps_kernel
from hstu_sparse.core.launch import LaunchConfig, configuration, on_device, padded_head, run
from hstu_sparse.core.rows import as_rows
from hstu_sparse.core.validation import check_kernel
from hstu_sparse.tiles.rows import Rows

# The bits of the widest codes that unpacking can leave in the mantissa of a 16-bit type.
LOW_BITS = {torch.bfloat16: 4, torch.float16: 8}


def code_offset(bits: int, dtype: torch.dtype, sparse: bool = False) -> int:
    """Return the number that unpacking adds to a code, which it reads as the mantissa of a number (see `codec`)."""
    if sparse or bits > LOW_BITS.get(dtype, 0):
        return 0
    return 4 + 4 * 2 if bits == 3 else 2**bits


def words(x: Tensor | None) -> Tensor | None:
    """Return scales and zeros as the kernels take them: an int32 for both."""
    return None if x is None else x.view(torch.int32)


def tile_tokens(layout: Layout, dtype: torch.dtype) -> int:
    """Return the number of tokens of a tile: fewer for more or wider channels, since a program holds all."""
    most = TILE // 2 if dtype == torch.float32 else TILE
    return max(16, min(most, TILE * 256 // layout.keys.channels))


@configuration
def codes_config(layout: Layout, dtype: torch.dtype) -> LaunchConfig:
    """Return the configuration for writing codes: R tokens of a program, few without pruning."""
    tokens, warps = (TILE, 4) if layout.sparse else (16, 2)
    return LaunchConfig(warps, R=min(tokens, tile_tokens(layout, dtype)))


def sizes(layout: Layout, ordered: bool, dtype: torch.dtype) -> dict:
    """Return the constants that all kernels on a cache share; ordered: it has a channel order."""
    return dict(_sizes(layout, ordered, dtype))


@functools.lru_cache(maxsize=64)
def _sizes(layout: Layout, ordered: bool, dtype: torch.dtype) -> dict:
    keys, values = layout.keys, layout.values
    return dict(
        HG=layout.head_groups, G=layout.options.head_group, D=layout.head_size, V=layout.value_size, PAGE=layout.page,
        BITS=layout.options.bits, K_BLOCK=keys.block, K_BLOCKS=keys.blocks, K_WORDS=keys.words, K_GROUPS=keys.groups,
        KEPT=layout.num_kept, KEPT_WORDS=layout.shapes(0)["k_codes"][-1] if layout.sparse else 0, V_BLOCK=values.block,
        V_BLOCKS=values.blocks, V_WORDS=values.words, V_GROUPS=values.groups, SPARSE=layout.sparse,
        HAS_ORDER=ordered, R=tile_tokens(layout, dtype),
    )  # fmt: skip


def write_pages(
    tensors: dict[str, Tensor], format: PageFormat, k: Tensor, v: Tensor, offsets: Tensor, pages: Tensor,
    lengths: Tensor, channel_order: Tensor | None = None,
) -> None:  # fmt: skip
    """Write keys [T, H, D] and values [T, H, V] of one layer, see `PagePool.write`.

    channel_order: of codes, see `rotatekv_compress`.
    """
    check_kernel("PagePool.write", k, {"D": format.head_size, "V": format.value_size})
    check_kernel("PagePool.write", tensors.get("k", tensors.get("sink_k", k)), {})
    if len(k) == 0:
        return
    k, v = as_rows(k, v, align=False)
    batch, layout = offsets.shape[0] - 1, format.layout
    inputs = Rows.of(k), Rows.of(v), offsets.contiguous(), lengths.contiguous(), pages.contiguous()
    with on_device(k.device):
        if layout is None:
            rows = 16
            run(
                write_pages_kernel, (len(k) // rows + batch, format.heads), *inputs, tensors["k"], tensors["v"], batch,
                pages.shape[1], H=format.heads, D=format.head_size, V=format.value_size,
                PAD_D=padded_head(format.head_size), PAD_V=padded_head(format.value_size), PAGE=format.page_size,
                R=rows, num_warps=4,
            )  # fmt: skip
            return
        config = codes_config(layout, k.dtype)
        run(
            write_codes_kernel, (len(k) // config.R + batch, layout.head_groups), *inputs, channel_order,
            tensors.get("sink_k"), tensors.get("sink_v"), tensors["k_codes"], words(tensors["k_ranges"]),
            tensors.get("k_bitmap"), tensors["v_codes"], words(tensors["v_ranges"]), batch, pages.shape[1],
            format.sink_tokens, layout.keys.channels**-0.5,
            **sizes(layout, channel_order is not None, k.dtype) | dict(config), REAL=format.head_size,
            INSET=layout.options.inset, SINKS=format.sink_tokens > 0,
            # A fused multiply-add would round scaling and shifting differently from the reference.
            enable_fp_fusion=False,
        )  # fmt: skip


def write_timestamps(
    timestamps: Tensor, format: PageFormat, new_times: Tensor, offsets: Tensor, pages: Tensor, lengths: Tensor
) -> None:
    """Write seconds [T], see `PagePool.write_timestamps`."""
    if len(new_times) == 0:
        return
    batch, rows = offsets.shape[0] - 1, 128
    with on_device(new_times.device):
        run(
            write_timestamps_kernel, len(new_times) // rows + batch, new_times.contiguous(), offsets.contiguous(),
            lengths.contiguous(), pages.contiguous(), timestamps, batch, pages.shape[1],
            SINKS=format.sink_tokens > 0, PAGE=format.page_size, R=rows, num_warps=4,
        )  # fmt: skip
