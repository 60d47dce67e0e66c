"""Launch paged attention: choose the kernel's constants, and divide pages among programs.

Letters: Tq new tokens, B sequences, P columns of the page table, H heads, D query/key and V value head size, G heads of
a head group.
"""

import functools

import torch
from torch import Tensor

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.launch import code_offset, words
from hstu_sparse.cache.merge import merge_parts_kernel
from hstu_sparse.cache.paged.bias import candidate_bias_kernel
from hstu_sparse.cache.paged.kernel import paged_attention_fwd_kernel
from hstu_sparse.cache.pool import PagePool
from hstu_sparse.core.launch import (
    LaunchConfig,
    cdiv,
    configuration,
    multiprocessors,
    next_power_of_2,
    on_device,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.rows import as_rows
from hstu_sparse.core.validation import check_kernel

BIAS_BLOCK = 256  # positions of a program of `candidate_bias_kernel`
FEW, SOME = 8, 48  # new tokens of a sequence on average, from which on programs take 64 of them, and 128


@configuration
def tile(dtype: torch.dtype, width: int, coded: bool, queries: int, candidates: bool) -> LaunchConfig:
    """Return (BQ new tokens and R positions of a program, the number of programs that a processor of an H200 runs at
    once).

    Args:
        width: the greater head size, padded.
        coded: pages hold codes.
        queries: new tokens of a sequence on average.
        candidates: their bias comes from `candidate_bias`, so that there are registers for more positions.
    """
    if queries < FEW:
        big = width > 128 or dtype == torch.float32
        few = LaunchConfig(BQ=16, R=32 if big else 64, num_warps=4, num_stages=2, programs=3 if coded else 6)
        return few.replace(maxnreg=168) if coded and not big else few  # with more registers only two programs fit
    if dtype == torch.float32:
        return LaunchConfig(BQ=32, R=32, num_warps=4, num_stages=1, programs=4)
    if width > 128:
        return LaunchConfig(BQ=64, R=32, num_warps=8, num_stages=2, programs=4)
    if candidates and not coded:
        return LaunchConfig(BQ=64, R=128 if width <= 64 else 64, num_warps=4, num_stages=3, programs=2)
    if coded and width > 64:
        return LaunchConfig(BQ=64, R=64, num_warps=8, num_stages=2, programs=2)
    if queries < SOME or coded:
        return LaunchConfig(BQ=64, R=64, num_warps=4, num_stages=2, programs=4)
    return LaunchConfig(BQ=128, R=64, num_warps=8, num_stages=2, programs=4)


@functools.lru_cache(maxsize=64)
def sizes(format: PageFormat, dtype: torch.dtype, few: bool) -> dict:
    """Return the kernel's constants that follow from the pages; few: a program takes all heads of a group."""
    heads, D, V, layout = format.heads, format.head_size, format.value_size, format.layout
    common = dict(H=heads, D=D, V=V, PAD_D=padded_head(D), PAGE=format.page_size, SINKS=format.sink_tokens > 0)
    if layout is None:
        none = dict(G=1, BITS=0, OFFSET=0, CODED=D, K_WORDS=0, K_GROUPS=1, V_WORDS=0, V_GROUPS=1, SCALED=False, HEADS=1)
        return common | none | dict(K_BLOCK=padded_head(D), K_BLOCKS=1, V_BLOCK=padded_head(V), V_BLOCKS=1, OUT_V=1)
    keys, values, group = layout.keys, layout.values, format.head_group
    whole = V % values.block == 0
    blocks = V // values.block if whole else min(values.blocks, (V - 1) // values.block + 2)
    return common | dict(
        G=group, BITS=format.bits, OFFSET=code_offset(format.bits, dtype), CODED=format.coded_size, K_BLOCK=keys.block,
        K_BLOCKS=keys.blocks, K_WORDS=keys.words, K_GROUPS=keys.groups, V_BLOCK=values.block, V_BLOCKS=values.blocks,
        V_WORDS=values.words, V_GROUPS=values.groups, OUT_V=values.blocks if few else blocks, SCALED=few,
        HEADS=group if few else 1,
    )  # fmt: skip


@configuration
def splits_of(programs: int, tiles: int, at_once: int, device: torch.device) -> int:
    """Return the number of parts that pages are divided into, so that all processors have work of at least four tiles
    each.

    at_once: programs of a processor; further ones would wait for these to end.
    """
    return max(1, min(at_once * multiprocessors(device) // max(1, programs), tiles // 4))


def candidate_bias(pool: PagePool, pages: Tensor, lengths: Tensor, bias: RelativeBias, cells: Tensor | None) -> Tensor:
    """Return the bias of each sequence's candidates, fp32, [B, tokens that `pages` has room for, and one]."""
    format, batch = pool.format, len(lengths)
    room = pages.shape[1] * format.page_size + 1
    bias_values = pages.new_empty(batch, room, dtype=torch.float32)
    run(
        candidate_bias_kernel, (batch, cdiv(room, BIAS_BLOCK)), bias_values, pages, lengths,
        None if bias.time is None else pool.timestamps, bias.position, bias.time, cells, bias.timestamps,
        bias.query_timestamps, pages.shape[1], 0 if bias.position is None else len(bias.position),
        PAGE=format.page_size, SINKS=format.sink_tokens > 0, BLOCK=BIAS_BLOCK, num_warps=4,
    )  # fmt: skip
    return bias_values


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, pool: PagePool, pages: Tensor, lengths: Tensor, *,
    layer: int, candidates: bool, activation: str, scale: float, normalizer: float, bias: RelativeBias,
) -> Tensor:  # fmt: skip
    """Compute `hstu_sparse.paged_attention`, [Tq, H, V], for checked and complete arguments."""
    format, tensors = pool.format, pool.tensors[layer]
    tokens, heads, V = v.shape
    check_kernel("paged_attention", q, {"D": format.head_size, "V": V})
    if format.dtype == torch.float64:
        check_kernel("paged_attention", tensors.get("k", tensors.get("sink_k", q)), {})
    out = q.new_empty(tokens, heads, V)
    if tokens == 0:
        return out
    q, k, v = as_rows(q, k, v, align=False)
    batch, softmax = q_offsets.shape[0] - 1, activation == "softmax"
    width = max(padded_head(format.head_size), padded_head(V))
    config = tile(q.dtype, width, format.layout is not None, cdiv(tokens, max(1, batch)), candidates)
    few = config.BQ == 16
    constants = sizes(format, q.dtype, few)
    group, together = constants["G"], constants["HEADS"]
    config = config.replace(BQ=max(16 // together, config.BQ // together))
    slots, programs = tokens // config.BQ + batch, heads // together
    filled = min(slots, batch * cdiv(tokens, batch * config.BQ))
    splits = splits_of(filled * programs, cdiv(pages.shape[1] * format.page_size, config.R), config.programs, q.device)
    part, lse = out, None
    if splits > 1:
        part = q.new_empty(splits, tokens, heads, V, dtype=torch.float32)
        lse = q.new_empty(splits, tokens, heads, dtype=torch.float32) if softmax else None
    coded = format.layout is not None
    pages, lengths = pages.contiguous(), lengths.contiguous()
    bias = RelativeBias(*(x if x is None else x.contiguous() for x in bias))
    cells = device_cells(num_time_buckets(bias.time), q.device) if bias.time is not None else None
    rotation = (format.coded_size * group) ** -0.5 if coded else 1.0
    with on_device(q.device):
        by_position = None
        if candidates and (bias.position is not None or bias.time is not None):
            by_position = candidate_bias(pool, pages, lengths, bias, cells)
        if candidates:
            bias, cells = RelativeBias(), None
        run(
            paged_attention_fwd_kernel, (slots, programs, splits), q, *q.stride()[:2], k, *k.stride()[:2], v,
            *v.stride()[:2], q_offsets.contiguous(), pages, lengths, tensors["k_codes" if coded else "k"],
            words(tensors.get("k_ranges")), tensors["v_codes" if coded else "v"], words(tensors.get("v_ranges")),
            tensors.get("sink_k"), tensors.get("sink_v"), None if bias.time is None else pool.timestamps,
            bias.position, bias.time, cells, bias.timestamps, bias.query_timestamps, by_position, part, lse, batch,
            pages.shape[1], format.sink_tokens, tokens, 0 if bias.position is None else bias.position.shape[0], splits,
            scale, rotation, 1.0 / normalizer, **constants, **config, CANDIDATES=candidates, SOFTMAX=softmax,
            FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype), LSE=lse is not None,
        )  # fmt: skip
        if splits > 1:
            run(
                merge_parts_kernel, cdiv(tokens * heads, 16), part, lse, out, None, tokens * heads, splits, V=V,
                PAD=next_power_of_2(V), ROWS=16, SOFTMAX=softmax, LSE=False, num_warps=4,
            )  # fmt: skip
    return out
