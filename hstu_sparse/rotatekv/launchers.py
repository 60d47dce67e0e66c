"""Launches of the kernels that pack and unpack: what each is compiled for. Imported only when it is needed.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, S sink tokens, R tokens of a tile.
"""

import functools

import torch
from torch import Tensor

from hstu_sparse.launch import LaunchConfig, configuration, on_device, run
from hstu_sparse.pages.encode import rotatekv_compress_kernel
from hstu_sparse.pages.launch import code_offset, words
from hstu_sparse.pages.layout import TILE, Layout, RotateKVOptions
from hstu_sparse.registration import Operator
from hstu_sparse.rotatekv.cache import PackedCache
from hstu_sparse.rotatekv.decode import rotatekv_decompress_kernel, rotatekv_round_trip_kernel
from hstu_sparse.rows import as_rows
from hstu_sparse.validation import check_kernel


def tile_tokens(layout: Layout, dtype: torch.dtype) -> int:
    """Tokens of a tile: fewer with many channels, or long ones, which a program holds all at once."""
    most = TILE // 2 if dtype == torch.float32 else TILE
    return max(16, min(most, TILE * 256 // layout.keys.channels))


@configuration
def compress_config(layout: Layout, dtype: torch.dtype) -> LaunchConfig:
    """The configuration of compression: R tokens of a program, few without pruning."""
    tokens, warps = (TILE, 4) if layout.sparse else (16, 2)
    return LaunchConfig(warps, R=min(tokens, tile_tokens(layout, dtype)))


def sizes(layout: Layout, ordered: bool, dtype: torch.dtype) -> dict:
    """The constants that all kernels on a cache have in common; ordered: it has a channel order."""
    return dict(_sizes(layout, ordered, dtype))


@functools.lru_cache(maxsize=64)
def _sizes(layout: Layout, ordered: bool, dtype: torch.dtype) -> dict:
    keys, values = layout.keys, layout.values
    return dict(
        HG=layout.head_groups, G=layout.options.head_group, D=layout.head_size, V=layout.value_size, PAGE=layout.page,
        BITS=layout.options.bits, K_BLOCK=keys.block, K_BLOCKS=keys.blocks, K_WORDS=keys.words, K_GROUPS=keys.groups,
        KEPT=layout.kept, KEPT_WORDS=layout.shapes(0)["k_codes"][-1] if layout.sparse else 0, V_BLOCK=values.block,
        V_BLOCKS=values.blocks, V_WORDS=values.words, V_GROUPS=values.groups, SPARSE=layout.sparse,
        HAS_ORDER=ordered, R=tile_tokens(layout, dtype),
    )  # fmt: skip


def packed_tensors(cache: PackedCache) -> tuple[Tensor | None, ...]:
    """What a cache without bitmaps consists of, in the order in which kernels take it."""
    packed = cache.packed
    return (
        cache.seq_offsets, cache.page_offsets, cache.page_table, cache.channel_order, packed["k_codes"],
        words(packed["k_ranges"]), packed["v_codes"], words(packed["v_ranges"]),
    )  # fmt: skip


def current(launch):
    """`launch(cache or tensor, ...)` with its device the current one, as Triton wants it."""

    @functools.wraps(launch)
    def there(x, *arguments, **options):
        with on_device(x.device):
            return launch(x, *arguments, **options)

    return there


def inverse(order: Tensor | None) -> Tensor | None:
    """Where each channel stands among the permuted ones, int32."""
    return None if order is None else order.argsort(-1).int()


def check_compress(k: Tensor, layout: Layout) -> None:
    check_kernel("rotatekv_compress", k, {"D": layout.head_size, "V": layout.value_size})


@current
def compress(cache: PackedCache, k: Tensor, v: Tensor, new_offsets: Tensor, old_offsets: Tensor) -> None:
    """Packs new tokens into a cache that has grown for them (`PackedCache.grow`)."""
    layout = cache.layout
    k, v = as_rows(k, v, align=False)
    constants = sizes(layout, cache.channel_order is not None, cache.dtype)
    config = compress_config(layout, cache.dtype)
    slots = k.shape[0] // config.R + cache.num_sequences
    if k.shape[0] == 0:
        return
    packed = cache.packed
    run(
        rotatekv_compress_kernel, (slots, layout.head_groups),
        k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), new_offsets.contiguous(), old_offsets,
        cache.page_offsets, cache.page_table, cache.channel_order, cache.sink_k, cache.sink_v,
        packed["k_codes"], words(packed["k_ranges"]), packed.get("k_bitmap"), packed["v_codes"],
        words(packed["v_ranges"]), cache.num_sequences, layout.options.sink_tokens,
        layout.keys.channels**-0.5, **constants | dict(config), INSET=layout.options.inset,
        SINKS=layout.options.sink_tokens > 0,
        # Fused into a product and a sum, scaling and shifting would round otherwise than the reference does.
        enable_fp_fusion=False,
    )  # fmt: skip


def _round_trip(k, v, seq_offsets, channel_order, bits, head_group, quant_group, sparsity, sink_tokens, clip):
    options = RotateKVOptions(bits, head_group, quant_group, sparsity, sink_tokens, clip)
    layout = Layout(options, k.shape[1], k.shape[2], v.shape[2])
    check_kernel("rotatekv_round_trip", k, {"D": layout.head_size, "V": layout.value_size})
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v)]
    k, v = as_rows(k, v, align=False)
    constants = sizes(layout, channel_order is not None, k.dtype)
    for name in ("PAGE", "K_WORDS", "V_WORDS", "KEPT_WORDS"):
        constants.pop(name)
    batch = seq_offsets.shape[0] - 1
    if k.shape[0]:
        run(
            rotatekv_round_trip_kernel, (k.shape[0] // constants["R"] + batch, layout.head_groups),
            k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), seq_offsets, channel_order,
            inverse(channel_order), *found, batch, sink_tokens, layout.keys.channels**-0.5, **constants,
            INSET=options.inset, enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return tuple(found)


round_trip_operator = Operator(
    "rotatekv_round_trip",
    "Tensor k, Tensor v, Tensor seq_offsets, Tensor? channel_order, int bits, int head_group, int quant_group, "
    "float sparsity, int sink_tokens, float clip",
    forward=_round_trip,
    backward=lambda *_: [],
    fake=lambda k, v, *_: (k.new_empty(k.shape), v.new_empty(v.shape)),
    differentiable=(),
    outputs=2,
)


@current
def decompress(cache: PackedCache, tokens: int) -> tuple[Tensor, Tensor]:
    """(k [T, H, D], v [T, H, V]) of the cache's dtype; tokens: T."""
    layout = cache.layout
    k = torch.empty(tokens, layout.heads, layout.head_size, dtype=cache.dtype, device=cache.device)
    v = torch.empty(tokens, layout.heads, layout.value_size, dtype=cache.dtype, device=cache.device)
    check_kernel("rotatekv_decompress", k, {"V": layout.value_size})
    if tokens == 0:
        return k, v
    constants = sizes(layout, cache.channel_order is not None, cache.dtype)
    packed, sinks = cache.packed, layout.options.sink_tokens
    out = min(4, layout.keys.blocks)
    grid = (tokens // constants["R"] + cache.num_sequences, layout.head_groups, layout.keys.blocks // out)
    run(
        rotatekv_decompress_kernel, grid,
        cache.seq_offsets, cache.page_offsets, cache.page_table, inverse(cache.channel_order),
        packed["k_codes"], words(packed["k_ranges"]), packed.get("k_bitmap"), packed["v_codes"],
        words(packed["v_ranges"]), cache.sink_k, cache.sink_v, k, v, cache.num_sequences, sinks,
        layout.keys.channels**-0.5, **constants, SINKS=sinks > 0,
        OFFSET=code_offset(layout.options.bits, cache.dtype, layout.sparse), OUT=out, num_warps=4,
    )  # fmt: skip
    return k, v
