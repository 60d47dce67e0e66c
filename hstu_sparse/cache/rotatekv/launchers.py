"""Launch the kernels of unpacking and of the round trip; imported only when needed.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, S sink tokens, R tokens of a tile.
"""

import functools

import torch
from torch import Tensor

from hstu_sparse.cache.launch import code_offset, sizes, tile_tokens, words
from hstu_sparse.cache.layout import Layout, RotateKVOptions
from hstu_sparse.cache.rotatekv.cache import RotateKVCache
from hstu_sparse.cache.rotatekv.decode import rotatekv_decompress_kernel, rotatekv_round_trip_kernel
from hstu_sparse.core.launch import on_device, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.core.validation import check_kernel


def current(launch):
    """Decorate `launch(cache or tensor, ...)` to run with its device as the current one, as Triton requires."""

    @functools.wraps(launch)
    def launch_on_device(x, *arguments, **options):
        with on_device(x.device):
            return launch(x, *arguments, **options)

    return launch_on_device


def inverse(order: Tensor | None) -> Tensor | None:
    """Return the index of each channel among the permuted ones, int32."""
    return None if order is None else order.argsort(-1).int()


def _round_trip(k, v, seq_offsets, channel_order, bits, head_group, quant_group, sparsity, sink_tokens, clip):
    options = RotateKVOptions(bits, head_group, quant_group, sparsity, sink_tokens, clip)
    layout = Layout(options, k.shape[1], k.shape[2], v.shape[2])
    check_kernel("rotatekv_round_trip", k, {"D": layout.head_size, "V": layout.value_size})
    outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v)]
    k, v = as_rows(k, v, align=False)
    tokens = tile_tokens(layout, k.dtype)
    constants = sizes(layout, channel_order is not None, k.dtype) | dict(R=tokens, num_warps=4)
    for name in ("PAGE", "K_WORDS", "V_WORDS", "KEPT_WORDS"):
        constants.pop(name)
    batch = seq_offsets.shape[0] - 1
    if k.shape[0]:
        run(
            rotatekv_round_trip_kernel, (k.shape[0] // tokens + batch, layout.head_groups),
            k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), seq_offsets, channel_order,
            inverse(channel_order), *outputs, batch, sink_tokens, layout.keys.channels**-0.5, **constants,
            INSET=options.inset, enable_fp_fusion=False,
        )  # fmt: skip
    return tuple(outputs)


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
def decompress(cache: RotateKVCache, tokens: int) -> tuple[Tensor, Tensor]:
    """Return (k [T, H, D], v [T, H, V]) of the cache's dtype; tokens: T."""
    layout = cache.layout
    k = torch.empty(tokens, layout.heads, layout.head_size, dtype=cache.dtype, device=cache.device)
    v = torch.empty(tokens, layout.heads, layout.value_size, dtype=cache.dtype, device=cache.device)
    check_kernel("rotatekv_decompress", k, {"V": layout.value_size})
    if tokens == 0:
        return k, v
    constants = sizes(layout, cache.channel_order is not None, cache.dtype)
    packed, sinks = cache.tensors, layout.options.sink_tokens
    out = min(4, layout.keys.blocks)
    grid = (tokens // constants["R"] + cache.num_sequences, layout.head_groups, layout.keys.blocks // out)
    run(
        rotatekv_decompress_kernel, grid,
        cache.seq_offsets, cache.pages, inverse(cache.channel_order),
        packed["k_codes"], words(packed["k_ranges"]), packed.get("k_bitmap"), packed["v_codes"],
        words(packed["v_ranges"]), packed.get("sink_k"), packed.get("sink_v"), k, v, cache.num_sequences,
        cache.pages.shape[1], sinks,
        layout.keys.channels**-0.5, **constants, SINKS=sinks > 0,
        OFFSET=code_offset(layout.options.bits, cache.dtype, layout.sparse), OUT=out, num_warps=4,
    )  # fmt: skip
    return k, v
