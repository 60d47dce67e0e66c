"""Launch attention to a cache: the kernel's constants, and the division of the history.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, S sink tokens, R tokens of a tile, BQ queries of a program.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.cache.launch import code_offset, words
from hstu_sparse.cache.layout import TILE, Layout, RotateKVOptions
from hstu_sparse.cache.merge import merge_parts_kernel
from hstu_sparse.cache.rotatekv.angles import rope_table
from hstu_sparse.cache.rotatekv.attention import rotatekv_attention_fwd_kernel
from hstu_sparse.cache.rotatekv.cache import RotateKVCache
from hstu_sparse.cache.rotatekv.launchers import current, inverse, sizes
from hstu_sparse.core.launch import (
    cdiv,
    multiprocessors,
    next_power_of_2,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.rows import as_rows
from hstu_sparse.core.validation import check_kernel

# The average number of queries of a sequence from which keys are restored, except with a `long_order`, and heads have
# programs of their own.
MANY_QUERIES = 32


class Plain(NamedTuple):
    """Unpacked keys [T, H, D] and values [T, H, V], of the sequences with offsets seq_offsets [B+1]."""

    k: Tensor
    v: Tensor
    seq_offsets: Tensor


def ways(rope: bool, plain: bool) -> tuple[str, ...]:
    """Return the ways that support a call (see `attention`): with RoPE, and for plain keys, only those that restore
    keys.
    """
    return ("keys",) if rope or plain else ("queries", "keys")


def long_order(cache: RotateKVCache | None) -> bool:
    """Return whether restored keys are multiplied by the matrices of an order of over 128 channels."""
    return cache is not None and cache.channel_order is not None and cache.layout.keys.channels > 128


class Call(NamedTuple):
    """The arguments of every way of attention."""

    q: Tensor
    q_offsets: Tensor
    source: RotateKVCache | Plain
    max_seq_len: int
    softmax: bool
    scale: float
    normalizer: float
    bias: RelativeBias
    rope_base: float | None

    def slots(self, size: int) -> int:
        """Return the number of tiles of `size` queries, as `tiles.locate` counts them."""
        return self.q.shape[0] // size + self.q_offsets.shape[0] - 1

    @property
    def many(self) -> bool:
        return self.q.shape[0] >= MANY_QUERIES * (self.q_offsets.shape[0] - 1)

    def bias_arguments(self) -> tuple:
        timed = self.bias.time is not None
        return (
            self.bias.position,
            self.bias.time,
            device_cells(num_time_buckets(self.bias.time), self.q.device) if timed else None,
            self.bias.timestamps if timed else None,
            self.bias.query_timestamps if timed else None,
        )

    def constants(self) -> dict:
        return dict(
            SOFTMAX=self.softmax, ROPE=self.rope_base is not None, HAS_POSITION=self.bias.position is not None,
            HAS_TIME=self.bias.time is not None, FAST=self.q.dtype != torch.float32,
        )  # fmt: skip

    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the tables of `turn` for positions in a tile, and for tiles."""
        if self.rope_base is None:
            return None, None
        half, count = self.q.shape[2] // 2, next_power_of_2(self.max_seq_len // TILE + 2)
        return (
            rope_table(self.rope_base, half, 0, 1, TILE, self.q.device),
            rope_table(self.rope_base, half, 0, TILE, count, self.q.device),
        )


class Plan(NamedTuple):
    """A launch function, launch(call, part, part_lse, splits), and the preferred number of splits."""

    launch: Callable[[Call, Tensor, Tensor | None, int], None]
    splits: int


def general(call: Call, keys_back: bool) -> Plan:
    """Return the plan of the kernel on a cache, or on plain keys and values."""
    q, source = call.q, call.source
    heads, head_size = q.shape[1:]
    cache = source if isinstance(source, RotateKVCache) else None
    rope = call.rope_base is not None
    if cache is None:
        # The sizes of packed keys are not used, so that any head size is valid.
        layout = Layout(RotateKVOptions(head_group=1), heads, 64, source.v.shape[2])
        constants = sizes(layout, False, q.dtype) | dict(D=head_size)
        plain_k, plain_v = as_rows(source.k, source.v, align=False)
    else:
        layout = cache.layout
        constants = sizes(layout, cache.channel_order is not None, cache.dtype)
        plain_k, plain_v = (cache.tensors.get(name) for name in ("sink_k", "sink_v"))
        plain_k, plain_v = (q.new_empty(0, heads, 1) if x is None else x.flatten(0, 1) for x in (plain_k, plain_v))
    if keys_back and long_order(cache):
        # The matrices of an order are rebuilt in each tile. From 64 tokens on, products with them and with weights are
        # warp-group products, and ptxas confuses their descriptors (docs/notes/2026-11-23-rotatekv.md).
        constants["R"] = min(constants["R"], 32)
    group, sinks = layout.options.head_group, 0 if cache is None else layout.options.sink_tokens
    # Restored keys take many registers: with more channels than these a program processes one head's.
    of_program = 1 if call.many or (keys_back and group * head_size > 256) else group
    block_q = 64 if call.many else 16 // of_program
    whole_heads = layout.value_size % constants["V_BLOCK"] == 0 and of_program == 1
    values_out = layout.value_size // constants["V_BLOCK"] if whole_heads else constants["V_BLOCKS"]
    width = min(constants["K_BLOCK"], head_size // 2 if rope else head_size)
    slots = call.slots(block_q)
    tiles = cdiv(call.max_seq_len, constants["R"])
    # Pruned codes are gathered word by word: prefetched copies would take more shared memory than there is.
    stages = 1 if constants["SPARSE"] else 2

    def launch(call, part, part_lse, splits):
        packed = {} if cache is None else cache.tensors
        order = None if cache is None else cache.channel_order
        run(
            rotatekv_attention_fwd_kernel, (slots, heads // of_program, splits),
            q, q.stride(0), q.stride(1), call.q_offsets, source.seq_offsets.contiguous(),
            None if cache is None else cache.pages, order, inverse(order), packed.get("k_codes"),
            words(packed.get("k_ranges")), packed.get("k_bitmap"), packed.get("v_codes"), words(packed.get("v_ranges")),
            plain_k, plain_k.stride(0), plain_k.stride(1), plain_v, plain_v.stride(0), plain_v.stride(1),
            *call.bias_arguments(), *call.angles(), part, part_lse, call.q_offsets.shape[0] - 1,
            0 if cache is None else cache.pages.shape[1], sinks,
            q.shape[0], splits, call.scale, layout.keys.channels**-0.5, 1.0 / call.normalizer,
            **constants, **call.constants(), OFFSET=code_offset(layout.options.bits, q.dtype, layout.sparse),
            PACKED=cache is not None, PLAIN=cache is None or sinks > 0, SINKS=sinks > 0, KEYS_BACK=keys_back,
            SCALED_WEIGHTS=cache is not None and not call.many, HEADS=of_program, BQ=block_q, OW=width,
            PAD=max(16, width), P_PAD=padded_head(head_size // 2 if rope else head_size), OUT_V=values_out,
            PRECISION=precision(q.dtype), LSE=part_lse is not None, num_warps=4, num_stages=stages,
        )  # fmt: skip

    # Enough programs for several on each processor, none with fewer than 8 tiles.
    target_splits = cdiv(12 * multiprocessors(q.device), slots * heads // of_program)
    return Plan(launch, max(1, min(target_splits, tiles // 8)))


@current
def attention(
    q: Tensor,
    q_offsets: Tensor,
    source: RotateKVCache | Plain,
    max_seq_len: int,
    *,
    softmax: bool,
    scale: float,
    normalizer: float,
    bias: RelativeBias,
    rope_base: float | None,
    return_lse: bool,
    way: str | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Tq, H, V], log-sum-exp [Tq, H] or None) of queries against a cache or plain keys and values.

    way: "queries" or "keys", the side that is rotated; only one of `ways`. splits: the number of parts of a history. By
    default the faster choice.
    """
    cache = source if isinstance(source, RotateKVCache) else None
    value_size = source.v.shape[2] if cache is None else cache.layout.value_size
    check_kernel("rotatekv_attention", q, {"D": q.shape[2], "V": value_size})
    (q,) = as_rows(q, align=False)
    queries, heads, _ = q.shape
    if queries == 0:
        return q.new_empty(0, heads, value_size), q.new_empty(0, heads, dtype=torch.float32) if return_lse else None
    bias = RelativeBias(*(None if x is None else x.contiguous() for x in bias))
    call = Call(q, q_offsets.contiguous(), source, max_seq_len, softmax, float(scale), normalizer, bias, rope_base)
    if way is None:
        turned = call.many and not long_order(cache)
        way = "keys" if turned else ways(rope_base is not None, cache is None)[0]
    plan = general(call, way == "keys")
    parts = splits or plan.splits
    part = q.new_empty(
        (parts, queries, heads, value_size)[parts == 1 :], dtype=q.dtype if parts == 1 else torch.float32
    )
    part_lse = None
    if return_lse or (softmax and parts > 1):
        part_lse = q.new_empty((parts, queries, heads)[parts == 1 :], dtype=torch.float32)
    plan.launch(call, part, part_lse, parts)
    out, lse = part, part_lse
    if parts > 1:
        out = q.new_empty(queries, heads, value_size)
        lse = q.new_empty(queries, heads, dtype=torch.float32) if return_lse else None
        run(
            merge_parts_kernel, cdiv(queries * heads, 16), part, part_lse, out, lse, queries * heads,
            parts, V=value_size, PAD=next_power_of_2(value_size), ROWS=16, SOFTMAX=softmax, LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return out, lse
