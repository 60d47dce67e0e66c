"""Launches of the RotateKV kernels: what each is compiled for, and how work is cut up. Imported only when it is needed.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, S sink tokens, R tokens of a tile.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.launch import cdiv, next_power_of_2, padded_head, precision
from hstu_sparse.registration import Operator
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.rotatekv.attention import rotatekv_attention_fwd_kernel, rotatekv_attention_merge_kernel
from hstu_sparse.rotatekv.cache import RotateKVCache
from hstu_sparse.rotatekv.decode import rotatekv_decompress_kernel, rotatekv_round_trip_kernel
from hstu_sparse.rotatekv.encode import rotatekv_compress_kernel
from hstu_sparse.rotatekv.few import rotatekv_few_fwd_kernel
from hstu_sparse.rotatekv.many import rotatekv_many_fwd_kernel
from hstu_sparse.rotatekv.layout import TILE, Layout, RotateKVOptions
from hstu_sparse.time_buckets import device_cells
from hstu_sparse.validation import check_kernel

LOW_BITS = {torch.bfloat16: 4, torch.float16: 8}  # what a 16-bit type's mantissa holds beside its first bit
MANY_QUERIES = 32  # of a sequence, on average: from there on keys are turned back, and heads have programs of their own


def code_offset(bits: int, dtype: torch.dtype, sparse: bool = False) -> int:
    """What unpacking leaves on top of a code: it is the mantissa of 2 ** plane, of each plane (see `codec`)."""
    if sparse or bits > LOW_BITS.get(dtype, 0):
        return 0
    return 4 + 4 * 2 if bits == 3 else 2**bits


def tile_tokens(layout: Layout, dtype: torch.dtype) -> int:
    """Tokens of a tile: fewer with many channels, or long ones, which a program holds all at once."""
    most = TILE // 2 if dtype == torch.float32 else TILE
    return max(16, min(most, TILE * 256 // layout.keys.channels))


def sizes(layout: Layout, order: Tensor | None, dtype: torch.dtype) -> dict:
    """The constants that all kernels on a cache have in common."""
    keys, values = layout.keys, layout.values
    return dict(
        HG=layout.head_groups, G=layout.options.head_group, D=layout.head_size, V=layout.value_size, PAGE=layout.page,
        BITS=layout.options.bits, K_BLOCK=keys.block, K_BLOCKS=keys.blocks, K_WORDS=keys.words, K_GROUPS=keys.groups,
        KEPT=layout.kept, KEPT_WORDS=layout.shapes(0)["k_codes"][-1] if layout.sparse else 0, V_BLOCK=values.block,
        V_BLOCKS=values.blocks, V_WORDS=values.words, V_GROUPS=values.groups, SPARSE=layout.sparse,
        HAS_ORDER=order is not None, R=tile_tokens(layout, dtype),
    )  # fmt: skip


def rows(x: Tensor) -> Tensor:
    """x with adjacent channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device(launch):
    """`launch(cache or tensor, ...)` with its device the current one, as Triton wants it."""

    @functools.wraps(launch)
    def run(x, *arguments, **options):
        if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return launch(x, *arguments, **options)
        return launch(x, *arguments, **options)

    return run


def inverse(order: Tensor | None) -> Tensor | None:
    """Where each channel stands among the permuted ones, int32."""
    return None if order is None else order.argsort(-1).int()


def check_compress(k: Tensor, layout: Layout) -> None:
    check_kernel("rotatekv_compress", k, {"D": layout.head_size, "V": layout.value_size})


@on_device
def compress(cache: RotateKVCache, k: Tensor, v: Tensor, new_offsets: Tensor, old_offsets: Tensor, R=None, num_warps=4, **more) -> None:
    """Packs new tokens into a cache that has grown for them (`RotateKVCache.grow`)."""
    layout = cache.layout
    k, v = rows(k), rows(v)
    constants = sizes(layout, cache.channel_order, cache.dtype)
    if R:
        constants["R"] = R
    slots = k.shape[0] // constants["R"] + cache.num_sequences
    if k.shape[0] == 0:
        return
    packed = cache.packed
    rotatekv_compress_kernel[(slots, layout.head_groups)](
        k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), new_offsets.contiguous(), old_offsets,
        cache.page_offsets, cache.page_table, cache.channel_order, cache.sink_k, cache.sink_v,
        packed["k_codes"], packed["k_scales"], packed["k_zeros"], packed.get("k_bitmap"), packed["v_codes"],
        packed["v_scales"], packed["v_zeros"], cache.num_sequences, layout.options.sink_tokens,
        layout.keys.channels**-0.5, **constants, SINKS=layout.options.sink_tokens > 0,
        # Fused into a product and a sum, scaling and shifting would round otherwise than the reference does.
        enable_fp_fusion=False, num_warps=num_warps, **more,
    )  # fmt: skip


def _round_trip(k, v, seq_offsets, channel_order, bits, head_group, quant_group, sparsity, sink_tokens):
    options = RotateKVOptions(bits, head_group, quant_group, sparsity, sink_tokens)
    layout = Layout(options, k.shape[1], k.shape[2], v.shape[2])
    check_kernel("rotatekv_round_trip", k, {"D": layout.head_size, "V": layout.value_size})
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v)]
    k, v = rows(k), rows(v)
    constants = sizes(layout, channel_order, k.dtype)
    for name in ("PAGE", "K_WORDS", "V_WORDS", "KEPT_WORDS"):
        constants.pop(name)
    batch = seq_offsets.shape[0] - 1
    if k.shape[0]:
        rotatekv_round_trip_kernel[(k.shape[0] // constants["R"] + batch, layout.head_groups)](
            k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), seq_offsets, channel_order,
            inverse(channel_order), *found, batch, sink_tokens, layout.keys.channels**-0.5, **constants,
            enable_fp_fusion=False, num_warps=4,
        )  # fmt: skip
    return tuple(found)


round_trip_operator = Operator(
    "rotatekv_round_trip",
    "Tensor k, Tensor v, Tensor seq_offsets, Tensor? channel_order, int bits, int head_group, int quant_group, "
    "float sparsity, int sink_tokens",
    forward=_round_trip,
    backward=lambda *_: [],
    fake=lambda k, v, *_: (k.new_empty(k.shape), v.new_empty(v.shape)),
    differentiable=(),
    outputs=2,
)


@on_device
def decompress(cache: RotateKVCache, tokens: int) -> tuple[Tensor, Tensor]:
    """(k [T, H, D], v [T, H, V]) of the cache's dtype; tokens: T."""
    layout = cache.layout
    k = torch.empty(tokens, layout.heads, layout.head_size, dtype=cache.dtype, device=cache.device)
    v = torch.empty(tokens, layout.heads, layout.value_size, dtype=cache.dtype, device=cache.device)
    check_kernel("rotatekv_decompress", k, {"V": layout.value_size})
    if tokens == 0:
        return k, v
    constants = sizes(layout, cache.channel_order, cache.dtype)
    packed, sinks = cache.packed, layout.options.sink_tokens
    out = min(4, layout.keys.blocks)
    grid = (tokens // constants["R"] + cache.num_sequences, layout.head_groups, layout.keys.blocks // out)
    rotatekv_decompress_kernel[grid](
        cache.seq_offsets, cache.page_offsets, cache.page_table, inverse(cache.channel_order),
        packed["k_codes"], packed["k_scales"], packed["k_zeros"], packed.get("k_bitmap"), packed["v_codes"],
        packed["v_scales"], packed["v_zeros"], cache.sink_k, cache.sink_v, k, v, cache.num_sequences, sinks,
        layout.keys.channels**-0.5, **constants, SINKS=sinks > 0,
        OFFSET=code_offset(layout.options.bits, cache.dtype, layout.sparse), OUT=out, num_warps=4,
    )  # fmt: skip
    return k, v


@functools.lru_cache(maxsize=16)
def rope_table(base: float, half: int, first: int, step: int, count: int, device: torch.device) -> Tensor:
    """[count, 2, half] fp32: cos and sin of the angles of positions first, first + step, ..."""
    position = first + step * torch.arange(count, dtype=torch.float64)
    angle = position[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    return torch.stack((angle.cos(), angle.sin()), 1).float().to(device)


@functools.lru_cache(maxsize=16)
def angle_table(base: float, half: int, count: int, device: torch.device) -> Tensor:
    """`rope_table` of positions 0, 1, .. in fp16, as int32 pairs: [count, 2, half / 2]."""
    return rope_table(base, half, 0, 1, count, device).half().view(torch.int32)


class Plain(NamedTuple):
    """Keys [T, H, D] and values [T, H, V] that are not packed, of the sequences that seq_offsets [B+1] gives."""

    k: Tensor
    v: Tensor
    seq_offsets: Tensor


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_many(
    q, q_offsets, cache, max_seq_len, out, lse, softmax, alpha, bias, rope_base, splits, BQ=128, R=64, prefetch=False,
    lazy=True, maxnreg=None, num_warps=8,
):
    layout = cache.layout
    constants = sizes(layout, cache.channel_order, cache.dtype)
    for name in ("KEPT", "KEPT_WORDS", "SPARSE", "R", "K_BLOCK", "V_BLOCK", "HAS_ORDER"):
        constants.pop(name)
    queries, sequences, heads, value_size = q.shape[0], q_offsets.shape[0] - 1, q.shape[1], layout.value_size
    slots = queries // BQ + sequences
    tiles = cdiv(max_seq_len, R)
    if splits is None:
        splits = max(1, min(cdiv(2 * processors(q.device), slots * heads), tiles // 8))
    timed = bias.time is not None
    rope = (None, None, None)
    if rope_base is not None:
        half, count = q.shape[2] // 2, next_power_of_2(max_seq_len // TILE + 2)
        rope = (
            rope_table(rope_base, half, 0, 1, TILE, q.device),
            rope_table(rope_base, half, 0, TILE, count, q.device),
            angle_table(rope_base, half, count * TILE, q.device).view(torch.float16),
        )
    part, part_lse = out, lse
    if splits > 1:
        part = out.new_empty(splits, queries, heads, value_size, dtype=torch.float32)
        part_lse = part.new_empty(splits, queries, heads) if softmax else None
    packed = cache.packed
    options = dict(maxnreg=maxnreg) if maxnreg else {}
    rotatekv_many_fwd_kernel[(slots, heads, splits)](
        q, q.stride(0), q.stride(1), q_offsets.contiguous(), cache.seq_offsets, cache.page_offsets, cache.page_table,
        packed["k_codes"], packed["k_scales"], packed["k_zeros"], packed["v_codes"], packed["v_scales"],
        packed["v_zeros"],
        bias.position, bias.time, device_cells(bias.time.shape[0] - 1, q.device) if timed else None,
        bias.timestamps if timed else None, bias.query_timestamps if timed else None, *rope,
        part, part_lse, sequences, layout.options.sink_tokens, queries, splits, alpha, layout.keys.channels**-0.5,
        1.0 / max_seq_len, 1, **constants, R=R, SOFTMAX=softmax, ROPE=rope_base is not None,
        HAS_POSITION=bias.position is not None, HAS_TIME=timed, BQ=BQ, FAST=q.dtype != torch.float32,
        LSE=part_lse is not None, PREFETCH=prefetch, LAZY=lazy, num_warps=num_warps, num_stages=1, **options,
    )  # fmt: skip
    if splits > 1:
        total, rows_of = queries * heads, 16
        rotatekv_attention_merge_kernel[(cdiv(total, rows_of),)](
            part, part_lse, out, lse, total, splits, V=value_size, PAD=next_power_of_2(value_size), ROWS=rows_of,
            SOFTMAX=softmax, LSE=lse is not None, num_warps=4,
        )  # fmt: skip
    return out, lse


def launch_few(
    q, q_offsets, cache, max_seq_len, out, lse, softmax, alpha, bias, rope_base, splits, R=16, prefetch=False, lazy=True, maxnreg=168,
    num_warps=1,
):
    layout = cache.layout
    constants = sizes(layout, cache.channel_order, cache.dtype)
    for name in ("KEPT", "KEPT_WORDS", "SPARSE", "R", "K_BLOCK", "V_BLOCK"):
        constants.pop(name)
    group, groups = layout.options.head_group, layout.values.groups
    pairs = max(groups, group)
    block_q = max(1, 8 // pairs)
    queries, sequences, heads, value_size = q.shape[0], q_offsets.shape[0] - 1, q.shape[1], layout.value_size
    slots = queries // block_q + sequences
    tiles = cdiv(max_seq_len, R)
    if splits is None:
        splits = max(1, min(cdiv(8 * processors(q.device), slots * layout.head_groups), tiles // 8))
    timed = bias.time is not None
    rope = (None, None, None)
    if rope_base is not None:
        half, count = q.shape[2] // 2, next_power_of_2(max_seq_len // TILE + 2)
        rope = (
            rope_table(rope_base, half, 0, 1, TILE, q.device),
            rope_table(rope_base, half, 0, TILE, count, q.device),
            angle_table(rope_base, half, count * TILE, q.device),
        )
    part, part_lse = out, lse
    if splits > 1:
        part = out.new_empty(splits, queries, heads, value_size, dtype=torch.float32)
        part_lse = part.new_empty(splits, queries, heads) if softmax else None
    packed = cache.packed
    options = dict(maxnreg=maxnreg) if maxnreg else {}
    rotatekv_few_fwd_kernel[(slots, layout.head_groups, splits)](
        q, q.stride(0), q.stride(1), q_offsets.contiguous(), cache.seq_offsets, cache.page_offsets, cache.page_table,
        cache.channel_order, packed["k_codes"], packed["k_scales"], packed["k_zeros"],
        packed["v_codes"], packed["v_scales"], packed["v_zeros"],
        bias.position, bias.time, device_cells(bias.time.shape[0] - 1, q.device) if timed else None,
        bias.timestamps if timed else None, bias.query_timestamps if timed else None, *rope,
        part, part_lse, sequences, layout.options.sink_tokens, queries, splits, alpha, layout.keys.channels**-0.5,
        1.0 / max_seq_len, 1, **constants, R=R, SOFTMAX=softmax, ROPE=rope_base is not None, HAS_POSITION=bias.position is not None, HAS_TIME=timed,
        PAIRS=pairs, BQ=block_q, FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype), LSE=part_lse is not None,
        PREFETCH=prefetch, LAZY=lazy, num_warps=num_warps, num_stages=1, **options,
    )  # fmt: skip
    if splits > 1:
        total, rows_of = queries * heads, 16
        rotatekv_attention_merge_kernel[(cdiv(total, rows_of),)](
            part, part_lse, out, lse, total, splits, V=value_size, PAD=next_power_of_2(value_size), ROWS=rows_of,
            SOFTMAX=softmax, LSE=lse is not None, num_warps=4,
        )  # fmt: skip
    return out, lse


@on_device
def attention(
    q: Tensor,
    q_offsets: Tensor,
    source: RotateKVCache | Plain,
    max_seq_len: int,
    *,
    softmax: bool,
    alpha: float,
    bias: RelativeBias,
    rope_base: float | None,
    return_lse: bool,
    rotate: str | None = None,
    splits: int | None = None,
    few: dict | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out [Tq, H, V], log-sum-exp [Tq, H] or None) of queries against a cache or plain keys and values.

    rotate: "queries" or "keys", the choice of `rotatekv_attention_fwd_kernel`; splits: the parts into which a history
    is cut. By default what is faster.
    """
    cache = source if isinstance(source, RotateKVCache) else None
    heads, head_size = q.shape[1:]
    if cache is None:
        # The sizes of packed keys go unused; no head is too odd for them.
        value_size = source.v.shape[2]
        layout = Layout(RotateKVOptions(head_group=1), heads, 64, value_size)
        constants = sizes(layout, None, q.dtype) | dict(D=head_size)
        plain_k, plain_v = rows(source.k), rows(source.v)
        sinks = 0
    else:
        layout, value_size = cache.layout, cache.layout.value_size
        constants = sizes(layout, cache.channel_order, cache.dtype)
        sinks = layout.options.sink_tokens
        plain_k, plain_v = cache.sink_k.flatten(0, 1), cache.sink_v.flatten(0, 1)
    check_kernel("rotatekv_attention", q, {"D": head_size, "V": value_size})
    q = rows(q)
    queries, sequences = q.shape[0], q_offsets.shape[0] - 1
    out = torch.empty(queries, heads, value_size, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device) if return_lse else None
    if queries == 0:
        return out, lse

    if few is not None and "BQ" in few:
        return launch_many(q, q_offsets, cache, max_seq_len, out, lse, softmax, alpha, bias, rope_base, splits, **few)
    if few is not None:
        return launch_few(q, q_offsets, cache, max_seq_len, out, lse, softmax, alpha, bias, rope_base, splits, **few)
    group = layout.options.head_group
    many = queries >= MANY_QUERIES * sequences
    keys_back = rope_base is not None or (many if rotate is None else rotate == "keys")
    # Keys that are turned back take many registers: with more channels than these a program does one head's.
    of_program = 1 if many or (keys_back and group * head_size > 256) else group
    block_q = 64 if many else 16 // of_program
    whole_heads = value_size % constants["V_BLOCK"] == 0 and of_program == 1
    values_out = value_size // constants["V_BLOCK"] if whole_heads else constants["V_BLOCKS"]
    width = min(constants["K_BLOCK"], head_size // 2 if rope_base is not None else head_size)
    slots = queries // block_q + sequences
    tiles = cdiv(max_seq_len, constants["R"])
    if splits is None:
        # Enough programs for several on each processor, none with less than 8 tiles.
        wanted = cdiv(12 * processors(q.device), slots * heads // of_program)
        splits = max(1, min(wanted, tiles // 8))
    rope = (None, None, None)
    if rope_base is not None:
        count = next_power_of_2(max_seq_len // TILE + 2)
        rope = (
            rope_table(rope_base, head_size // 2, 0, 1, TILE, q.device),
            rope_table(rope_base, head_size // 2, 0, TILE, count, q.device),
            rope_table(rope_base, head_size // 2, sinks, TILE, count, q.device),
        )
    packed = {} if cache is None else cache.packed
    bias = RelativeBias(*(None if x is None else x.contiguous() for x in bias))
    timed = bias.time is not None
    part, part_lse = out, lse
    if splits > 1:
        part = out.new_empty(splits, queries, heads, value_size, dtype=torch.float32)
        part_lse = part.new_empty(splits, queries, heads) if softmax else None
    rotatekv_attention_fwd_kernel[(slots, heads // of_program, splits)](
        q, q.stride(0), q.stride(1), q_offsets.contiguous(), source.seq_offsets.contiguous(),
        None if cache is None else cache.page_offsets, None if cache is None else cache.page_table,
        None if cache is None else cache.channel_order, None if cache is None else inverse(cache.channel_order),
        packed.get("k_codes"), packed.get("k_scales"), packed.get("k_zeros"), packed.get("k_bitmap"),
        packed.get("v_codes"), packed.get("v_scales"), packed.get("v_zeros"),
        plain_k, plain_k.stride(0), plain_k.stride(1), plain_v, plain_v.stride(0), plain_v.stride(1),
        bias.position, bias.time, device_cells(bias.time.shape[0] - 1, q.device) if timed else None,
        bias.timestamps if timed else None, bias.query_timestamps if timed else None, *rope,
        part, part_lse, sequences, sinks, queries, splits, alpha, layout.keys.channels**-0.5, 1.0 / max_seq_len,
        **constants, OFFSET=code_offset(layout.options.bits, q.dtype, layout.sparse), PACKED=cache is not None,
        PLAIN=cache is None or sinks > 0, SOFTMAX=softmax, ROPE=rope_base is not None,
        HAS_POSITION=bias.position is not None, HAS_TIME=timed, KEYS_BACK=keys_back,
        SCALED_WEIGHTS=cache is not None and not many, HEADS=of_program, BQ=block_q, OW=width, PAD=max(16, width),
        P_PAD=padded_head(head_size if rope_base is None else head_size // 2), OUT_V=values_out,
        FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype), LSE=part_lse is not None, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    if splits > 1:
        total, rows_of = queries * heads, 16
        rotatekv_attention_merge_kernel[(cdiv(total, rows_of),)](
            part, part_lse, out, lse, total, splits, V=value_size, PAD=next_power_of_2(value_size), ROWS=rows_of,
            SOFTMAX=softmax, LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return out, lse
