"""Launches of attention to a cache: which kernel, what it is compiled for, and how the history is cut up.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group, S sink tokens, R tokens of a tile, BQ queries of a program.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.launch import (
    INTERPRET,
    LaunchConfig,
    architecture,
    cdiv,
    configuration,
    multiprocessors,
    next_power_of_2,
    padded_head,
    precision,
    run,
)
from hstu_sparse.pages.launch import code_offset, words
from hstu_sparse.pages.layout import TILE, Layout, RotateKVOptions
from hstu_sparse.pages.merge import merge_parts_kernel
from hstu_sparse.rotatekv.angles import all_tables, rope_table
from hstu_sparse.rotatekv.attention import rotatekv_attention_fwd_kernel
from hstu_sparse.rotatekv.cache import PackedCache
from hstu_sparse.rotatekv.few import rotatekv_few_fwd_kernel
from hstu_sparse.rotatekv.launchers import current, inverse, packed_tensors, sizes
from hstu_sparse.rotatekv.many import rotatekv_many_fwd_kernel, rotatekv_queries_fwd_kernel
from hstu_sparse.rows import as_rows
from hstu_sparse.validation import check_kernel

# Queries of a sequence, on average: from the first on `many` is faster than `few`; from the second on the general
# kernel turns keys back, but for those of a `long_order`, and gives heads programs of their own.
MANY_QUERIES, GENERAL_MANY_QUERIES = 8, 32
# Queries and tokens that a program of `hopper` takes at once.
HOPPER_TILE = 128
KERNEL_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Plain(NamedTuple):
    """Keys [T, H, D] and values [T, H, V] that are not packed, of the sequences that seq_offsets [B+1] gives."""

    k: Tensor
    v: Tensor
    seq_offsets: Tensor


@functools.lru_cache(maxsize=64)
def whole_blocks(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether `few` and `many` take a cache: 2 or 4 bits of 16-bit numbers, unpruned, in whole blocks."""
    keys, values = layout.keys, layout.values
    return (
        dtype in (torch.float16, torch.bfloat16)
        and layout.options.bits in (2, 4)
        and not layout.sparse
        and keys.block == values.block == TILE
        and values.blocks * TILE == values.channels
        and values.blocks & (values.blocks - 1) == 0
    )


@functools.cache
def hopper_kernel():
    """The Gluon kernel, or None: Gluon is experimental, is taken only as it was tried, and has no interpreter."""
    if INTERPRET or not triton.__version__.startswith(("3.6.", "3.7.")):
        return None
    try:
        from hstu_sparse.rotatekv.hopper import rotatekv_hopper_fwd_kernel
    except (ImportError, AttributeError):
        return None
    return rotatekv_hopper_fwd_kernel


def ways(
    cache: PackedCache | Plain, dtype: torch.dtype, scale: float, rope: bool, plain_softmax: bool = False
) -> tuple[str, ...]:
    """The ways that take a call: see `attention`. plain_softmax: it is softmax without bias."""
    if not isinstance(cache, PackedCache):
        return ("keys",)
    layout = cache.layout
    found = ("keys",) if rope else ("queries", "keys")
    if not whole_blocks(layout, dtype):
        return found
    ordered = cache.channel_order is not None
    turned = not rope or layout.head_size % 128 == 0
    if max(layout.keys.channels, layout.values.channels) <= 256 and turned and not (rope and ordered):
        found += ("few",)
    heads = layout.head_size % TILE == 0 and layout.value_size % TILE == 0
    if heads and max(layout.head_size, layout.value_size) <= 128 and not ordered and scale > 0:
        found += ("many",)
        fits = layout.head_size == layout.value_size == 128 and layout.keys.group == layout.values.group == 64
        fits = fits and layout.options.bits == 2 and plain_softmax and not rope
        if fits and architecture(cache.device) == 90 and hopper_kernel() is not None:
            found += ("hopper",)
    return found


def long_order(cache: PackedCache | None) -> bool:
    """Whether keys that are turned back meet the matrices of an order of more than 128 channels (docs/rotatekv.md)."""
    return cache is not None and cache.channel_order is not None and cache.layout.keys.channels > 128


class Call(NamedTuple):
    """What every way of attention is given."""

    q: Tensor
    q_offsets: Tensor
    source: PackedCache | Plain
    max_seq_len: int
    softmax: bool
    scale: float
    normalizer: float
    bias: RelativeBias
    rope_base: float | None

    def slots(self, size: int) -> int:
        """Tiles of `size` queries, as `tiles.locate` finds them."""
        return self.q.shape[0] // size + self.q_offsets.shape[0] - 1

    @property
    def many(self) -> bool:
        return self.q.shape[0] >= GENERAL_MANY_QUERIES * (self.q_offsets.shape[0] - 1)

    @property
    def biased(self) -> bool:
        return self.bias.position is not None or self.bias.time is not None

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

    def angles(self, first: int = 0) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Tables for `turn` of positions in a tile, and of tiles from 0 and from `first` on."""
        if self.rope_base is None:
            return None, None, None
        half, count = self.q.shape[2] // 2, next_power_of_2(self.max_seq_len // TILE + 2)
        return (
            rope_table(self.rope_base, half, 0, 1, TILE, self.q.device),
            rope_table(self.rope_base, half, 0, TILE, count, self.q.device),
            rope_table(self.rope_base, half, first, TILE, count, self.q.device),
        )

    def all_angles(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Tables for `turn`, and `angle_table`."""
        if self.rope_base is None:
            return None, None, None
        count = next_power_of_2(self.max_seq_len // TILE + 2)
        return all_tables(self.rope_base, self.q.shape[2] // 2, count, False, self.q.device)


class Plan(NamedTuple):
    """A way's launch(call, part, part_lse, splits) and the splits that it would like."""

    launch: Callable[[Call, Tensor, Tensor | None, int], None]
    splits: int


class FewPlan(NamedTuple):
    """What `few` needs beside a call's tensors."""

    constants: tuple[dict, dict]  # without and with a log-sum-exp
    programs: int  # of each part of a history
    splits: int
    numbers: tuple[float, float]  # scale of the transform, 1 / N
    angles: tuple[Tensor | None, Tensor | None, Tensor | None]


@functools.lru_cache(maxsize=64)
def few_plan(
    layout: Layout, ordered: bool, dtype: torch.dtype, device: torch.device, queries: int, sequences: int,
    max_seq_len: int, normalizer: float, softmax: bool, rope_base: float | None, position: bool, time: bool,
) -> FewPlan:  # fmt: skip
    pairs = max(layout.values.groups, layout.options.head_group)
    block_q = 8 // pairs
    single = queries <= sequences
    constants = sizes(layout, ordered, dtype) | dict(
        SOFTMAX=softmax, ROPE=rope_base is not None, HAS_POSITION=position, HAS_TIME=time, FAST=dtype != torch.float32,
        PAIRS=pairs, BQ=block_q, SINGLE=single,
    )  # fmt: skip
    for name in ("KEPT", "KEPT_WORDS", "SPARSE", "R", "K_BLOCK", "V_BLOCK"):
        constants.pop(name)
    pages, room = cdiv(max_seq_len, layout.page), 8 * multiprocessors(device)
    if single:
        programs = queries * layout.head_groups
        splits = best_splits(programs, room, pages, 16, 6)
    else:
        programs = (queries // block_q + sequences) * layout.head_groups
        filled = sequences * cdiv(queries, sequences * block_q) * layout.head_groups
        # Two rounds of programs, with RoPE one and a half, are measured best where some programs have no queries.
        splits = max(1, min(room * (4 if rope_base is None else 3) // (2 * filled), pages // 16))
    angles = None, None, None
    if rope_base is not None:
        angles = all_tables(rope_base, layout.head_size // 2, next_power_of_2(max_seq_len // TILE + 2), True, device)
    constants = tuple(constants | dict(LSE=lse) for lse in (False, True))
    return FewPlan(constants, programs, splits, (layout.keys.channels**-0.5, 1.0 / normalizer), angles)


def best_splits(programs: int, room: int, steps: int, least: int, extra: int) -> int:
    """Into how many parts histories of so many steps are cut, so that `programs` for each of them take least time.

    They run in rounds of `room` programs, each of which takes as long besides its steps, `least` of them or more, as
    with `extra` ones.
    """
    most, fit = max(1, steps // least), room // programs
    if fit >= 8:
        return min(fit, most)
    time = lambda splits: cdiv(programs * splits, room) * (cdiv(steps, splits) + extra)
    return min(range(1, min(most, 16) + 1), key=time)


FEW_CONFIG = LaunchConfig(num_warps=1, num_stages=1)


def few(call: Call) -> Plan:
    """A warp for a few queries of a head group."""
    q, cache, bias = call.q, call.source, call.bias
    sink_tokens, sequences = cache.layout.options.sink_tokens, max(1, call.q_offsets.shape[0] - 1)
    plan = few_plan(
        cache.layout, cache.channel_order is not None, q.dtype, q.device, q.shape[0], sequences, call.max_seq_len,
        call.normalizer, call.softmax, call.rope_base, bias.position is not None, bias.time is not None,
    )  # fmt: skip

    def launch(call, part, part_lse, splits):
        q = call.q
        run(
            rotatekv_few_fwd_kernel, plan.programs * splits, q, q.stride(0), q.stride(1), call.q_offsets,
            *packed_tensors(call.source), *call.bias_arguments(), *plan.angles, part, part_lse, sequences, sink_tokens,
            q.shape[0], splits, call.scale, *plan.numbers, 1, **plan.constants[part_lse is not None],
            **FEW_CONFIG,
        )  # fmt: skip

    return Plan(launch, plan.splits)


@functools.lru_cache(maxsize=64)
def many_constants(layout: Layout, dtype: torch.dtype, call: tuple, lse: bool) -> tuple[dict, dict]:
    """Constants of `many`'s two kernels; call: items of `Call.constants`."""
    found = sizes(layout, False, dtype) | dict(call)
    for name in ("KEPT", "KEPT_WORDS", "SPARSE", "K_BLOCK", "V_BLOCK", "HAS_ORDER", "R"):
        found.pop(name)
    queries = dict(H=layout.heads, D=layout.head_size, ROPE=found["ROPE"], BQ=64)
    return queries, found | dict(DTYPE=tl.float16 if found["SOFTMAX"] else KERNEL_TYPES[dtype], LSE=lse)


@configuration
def many_config(block_q: int, bits: int, rope: bool, biased: bool, arch: int) -> LaunchConfig:
    """The configuration of the second of `many`'s kernels: BQ queries, R tokens of a tile."""
    # Measured on Hopper: 128 queries have a processor to themselves, with all registers, and take 128 tokens at once;
    # of 64 queries four programs share one. With RoPE copies are in flight two tiles ahead, but for bias: copies of the
    # entries of its tables would take too much shared memory.
    alone = arch == 90 and block_q == 128
    ahead, copies = alone and not rope, alone and rope and not biased
    registers = 128 if arch == 90 and block_q == 64 and not rope and bits == 2 else None
    return LaunchConfig(
        block_q // 16, 1, registers, BQ=block_q, R=128 if ahead else 64, AHEAD=ahead, STAGES=3 if copies else 1
    )


def many(call: Call) -> Plan:
    """A program for many queries of a head."""
    layout, queries, heads, device = call.source.layout, *call.q.shape[:2], call.q.device
    sequences = call.q_offsets.shape[0] - 1
    block_q = 128 if queries > 64 * sequences else 64
    programs = call.slots(block_q) * heads

    def launch(call, part, part_lse, splits):
        q, packed = call.q, packed_tensors(call.source)
        preparing, given = many_constants(layout, q.dtype, tuple(call.constants().items()), part_lse is not None)
        config = many_config(block_q, layout.options.bits, given["ROPE"], call.biased, architecture(device))
        near, far, table = call.all_angles()
        # Keys that are turned back keep about their size, by a power of two.
        scale = 2.0 ** -(layout.keys.channels.bit_length() // 2)
        factor = call.scale * layout.keys.channels**-0.5 * (math.log2(math.e) if call.softmax else 1.0)
        factor /= 1.0 if near is None else scale
        prepared = torch.empty(q.shape, dtype=torch.float16, device=q.device)
        factors = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        run(
            rotatekv_queries_fwd_kernel, call.slots(64) * heads, q, q.stride(0), q.stride(1), call.q_offsets,
            call.source.seq_offsets, near, far, prepared, factors, sequences, factor, **preparing, num_warps=4,
        )  # fmt: skip
        run(
            rotatekv_many_fwd_kernel, programs * splits, prepared, factors, call.q_offsets, *packed[:3], *packed[4:],
            *call.bias_arguments(), None if table is None else table.view(torch.float16), part, part_lse, sequences,
            layout.options.sink_tokens, q.shape[0], splits, scale, 1.0 / call.normalizer, **given, **config,
        )  # fmt: skip

    wanted = cdiv(2 * multiprocessors(device), programs)
    return Plan(launch, max(1, min(wanted, call.max_seq_len // 512)))


def hopper(call: Call) -> Plan:
    """As `many`, some warps unpacking while others multiply."""
    layout, queries, sequences = call.source.layout, call.q.shape[0], call.q_offsets.shape[0] - 1
    constants = tuple(
        dict(HG=layout.head_groups, G=layout.options.head_group, LSE=lse, STAGES=3) for lse in (False, True)
    )
    programs = (queries // HOPPER_TILE + sequences) * layout.heads
    sink_tokens, scale = layout.options.sink_tokens, call.scale * layout.keys.channels**-0.5 * math.log2(math.e)

    def launch(call, part, part_lse, splits):
        q, packed = call.q, packed_tensors(call.source)
        run(
            hopper_kernel(), programs * splits, q, q.stride(0), q.stride(1), call.q_offsets, *packed[:3], *packed[4:],
            part, part_lse, sequences, sink_tokens, queries, splits, scale, **constants[part_lse is not None],
            num_warps=4,
        )  # fmt: skip

    filled = sequences * cdiv(queries, sequences * HOPPER_TILE) * layout.heads
    # A program takes a processor, and about as long besides its tiles as with three of them.
    tiles = cdiv(call.max_seq_len, HOPPER_TILE)
    return Plan(launch, best_splits(filled, multiprocessors(call.q.device), tiles, 4, 3))


def general(call: Call, keys_back: bool, sinks_only: bool = False) -> Plan:
    """The kernel that takes everything: whole caches, plain keys and values, or the sinks of a cache alone."""
    q, source = call.q, call.source
    heads, head_size = q.shape[1:]
    cache = source if isinstance(source, PackedCache) else None
    rope = call.rope_base is not None
    if cache is None:
        # The sizes of packed keys go unused; no head is too odd for them.
        layout = Layout(RotateKVOptions(head_group=1), heads, 64, source.v.shape[2])
        constants = sizes(layout, False, q.dtype) | dict(D=head_size)
        plain_k, plain_v = as_rows(source.k, source.v, align=False)
    else:
        layout = cache.layout
        constants = sizes(layout, cache.channel_order is not None, cache.dtype)
        plain_k, plain_v = cache.sink_k.flatten(0, 1), cache.sink_v.flatten(0, 1)
    if keys_back and long_order(cache):
        # The matrices of an order are made anew in each tile. From 64 tokens on, products with them and with weights
        # are warp groups', and ptxas takes one's descriptor for the other's (docs/rotatekv.md, a caution).
        constants["R"] = min(constants["R"], 32)
    group, sinks = layout.options.head_group, 0 if cache is None else layout.options.sink_tokens
    # Keys that are turned back take many registers: with more channels than these a program does one head's.
    of_program = 1 if call.many or (keys_back and group * head_size > 256) else group
    block_q = 64 if call.many else 16 // of_program
    whole_heads = layout.value_size % constants["V_BLOCK"] == 0 and of_program == 1
    values_out = layout.value_size // constants["V_BLOCK"] if whole_heads else constants["V_BLOCKS"]
    width = min(constants["K_BLOCK"], head_size // 2 if rope else head_size)
    packed_part = cache is not None and not sinks_only
    slots = call.slots(block_q)
    tiles = cdiv(call.max_seq_len, constants["R"])
    # Pruned codes are gathered word by word: copies of them in flight take more shared memory than there is.
    stages = 1 if constants["SPARSE"] else 2

    def launch(call, part, part_lse, splits):
        packed = {} if cache is None else cache.packed
        order = None if cache is None else cache.channel_order
        run(
            rotatekv_attention_fwd_kernel, (slots, heads // of_program, splits),
            q, q.stride(0), q.stride(1), call.q_offsets, source.seq_offsets.contiguous(),
            None if cache is None else cache.page_offsets, None if cache is None else cache.page_table, order,
            inverse(order), packed.get("k_codes"), words(packed.get("k_ranges")),
            packed.get("k_bitmap"), packed.get("v_codes"), words(packed.get("v_ranges")),
            plain_k, plain_k.stride(0), plain_k.stride(1), plain_v, plain_v.stride(0), plain_v.stride(1),
            *call.bias_arguments(), *call.angles(sinks), part, part_lse, call.q_offsets.shape[0] - 1, sinks,
            q.shape[0], splits, call.scale, layout.keys.channels**-0.5, 1.0 / call.normalizer,
            **constants, **call.constants(), OFFSET=code_offset(layout.options.bits, q.dtype, layout.sparse),
            PACKED=packed_part, PLAIN=cache is None or sinks > 0, SINKS=cache is not None, KEYS_BACK=keys_back,
            SCALED_WEIGHTS=packed_part and not call.many, HEADS=of_program, BQ=block_q, OW=width, PAD=max(16, width),
            P_PAD=padded_head(head_size // 2 if rope else head_size), OUT_V=values_out,
            PRECISION=precision(q.dtype), LSE=part_lse is not None, num_warps=4, num_stages=stages,
        )  # fmt: skip

    # Enough programs for several on each processor, none with less than 8 tiles.
    wanted = cdiv(12 * multiprocessors(q.device), slots * heads // of_program)
    return Plan(launch, max(1, min(wanted, tiles // 8)))


PLANS = {"few": few, "many": many, "hopper": hopper}


@current
def attention(
    q: Tensor,
    q_offsets: Tensor,
    source: PackedCache | Plain,
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
    """(out [Tq, H, V], log-sum-exp [Tq, H] or None) of queries against a cache or plain keys and values.

    way: "few", "many" and "hopper" for the kernels of those files, "queries" and "keys" for that of attention.py, which
    takes everything, with queries or keys rotated; only one of `ways`. splits: the parts into which a history is cut.
    By default what is faster.
    """
    cache = source if isinstance(source, PackedCache) else None
    value_size = source.v.shape[2] if cache is None else cache.layout.value_size
    check_kernel("rotatekv_attention", q, {"D": q.shape[2], "V": value_size})
    (q,) = as_rows(q, align=False)
    queries, heads, _ = q.shape
    if queries == 0:
        return q.new_empty(0, heads, value_size), q.new_empty(0, heads, dtype=torch.float32) if return_lse else None
    bias = RelativeBias(*(None if x is None else x.contiguous() for x in bias))
    call = Call(q, q_offsets.contiguous(), source, max_seq_len, softmax, float(scale), normalizer, bias, rope_base)
    if way is None:
        sequences = q_offsets.shape[0] - 1
        wanted = ("few", "queries", "keys")
        if queries >= MANY_QUERIES * sequences:
            wanted = ("many", "queries", "keys")
        if queries >= GENERAL_MANY_QUERIES * sequences and not long_order(cache):
            wanted = ("many", "keys")
        if 2 * queries > HOPPER_TILE * sequences:
            wanted = ("hopper", *wanted)
        able = ways(source, q.dtype, scale, rope_base is not None, softmax and not call.biased)
        way = next(x for x in wanted if x in able)
    plan = PLANS[way](call) if way in PLANS else general(call, way == "keys")
    splits = splits or plan.splits
    # Only the general kernel reads sinks: a part of their own for the others.
    sinks = cache is not None and cache.layout.options.sink_tokens > 0 and way in PLANS
    return _run_parts(call, plan, splits, sinks, return_lse)


def _run_parts(call: Call, plan: Plan, splits: int, sinks: bool, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """What `attention` returns; sinks: of the cache, a part of their own."""
    q, source, softmax = call.q, call.source, call.softmax
    queries, heads, _ = q.shape
    value_size = source.layout.value_size if isinstance(source, PackedCache) else source.v.shape[2]
    parts = splits + sinks
    part = q.new_empty(
        (parts, queries, heads, value_size)[parts == 1 :], dtype=q.dtype if parts == 1 else torch.float32
    )
    part_lse = None
    if return_lse or (softmax and parts > 1):
        part_lse = q.new_empty((parts, queries, heads)[parts == 1 :], dtype=torch.float32)
    plan.launch(call, part, part_lse, splits)
    out, lse = part, part_lse
    if sinks:
        last = None if part_lse is None else part_lse[splits]
        general(call, keys_back=True, sinks_only=True).launch(call, part[splits], last, 1)
    if parts > 1:
        out = q.new_empty(queries, heads, value_size)
        lse = q.new_empty(queries, heads, dtype=torch.float32) if return_lse else None
        run(
            merge_parts_kernel, cdiv(queries * heads, 16), part, part_lse, out, lse, queries * heads,
            parts, V=value_size, PAD=next_power_of_2(value_size), ROWS=16, SOFTMAX=softmax, LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return out, lse
