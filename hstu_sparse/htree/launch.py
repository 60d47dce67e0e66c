"""Launch the kernels of hierarchical tree attention; register them as torch.ops.hstu_sparse.htree_fwd and _bwd.

Letters: T tokens of the batch, B sequences, N max_seq_len, Hq query heads, Hkv key/value heads, G query heads of each,
D query/key and V value head size, R tokens of a group (selection_group), r compression_rate, M = r * top_k the most
candidates a layer has.

Memory beyond inputs and outputs. Forward: the tree, which holds a copy of k and v and 1 / (r - 1) of them in means, lse
[T, Hq] fp32, the table of choices, 4 * top_k + M / 8 bytes for each group, key/value head and layer above the tokens,
and a workspace for the concurrent programs that choose. Backward: the tree again, and gradients of all its nodes in
fp32, or int64 in deterministic mode. q, k, v, the output and lse are saved for the backward pass, and a table of up to
TABLE_BYTES. If the table is larger, the groups are processed in parts: each part chooses and attends before the next
one, and chooses again in the backward pass.
"""

import itertools
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.gradients import fixed_point_unit
from hstu_sparse.core import launch
from hstu_sparse.core.launch import LaunchConfig, cdiv, configuration, next_power_of_2, padded_head, precision, run
from hstu_sparse.core.registration import Operator, cached_constant
from hstu_sparse.core.validation import check_kernel
from hstu_sparse.htree.attend import htree_attend_bwd_kernel, htree_attend_fwd_kernel
from hstu_sparse.htree.choice import NodeGradients, Nodes, htree_choose_fwd_kernel
from hstu_sparse.htree.pooling import htree_pool_fwd_kernel, htree_push_bwd_kernel, htree_rotate_fwd_kernel
from hstu_sparse.htree.reference import depth, rope_tables, tree_layers
from hstu_sparse.tiles.rows import Rows, as_rows

# Positions within a layer occupy the low bits of a sort key; the bits that are left for the importance must distinguish
# candidates.
MAX_CANDIDATES = 65536
MAX_GROUP = 64
MAX_HEAD = 256
# Candidates of a tile in the kernel that chooses.
TILE = 16
TABLE_BYTES = 2**25
# Dtypes for which a query is rotated from tile to tile by a fixed step: the error grows to 2.5e-4 in 4,096 steps.
STEPPED = (torch.float16, torch.bfloat16)


@configuration
def choice_config(half: int, group: int, item: int) -> LaunchConfig:
    """Return the configuration of the kernel that chooses, whose tiles are BN candidates.

    Args:
        half: padded size of half a query/key head.
        group: query heads of a key/value head, padded.
        item: bytes of an element.
    """
    load = _register_load(2 * half, group, item)
    warps = min(8, max(1, load))
    if load <= 1 and item == 2:  # Triton 3.6 spills 200 bytes with 128 registers
        return LaunchConfig(warps, 3, 168, programs=12, BN=TILE)
    return LaunchConfig(warps, _stages(load), programs=max(1, 8 // warps), BN=TILE)


def _register_load(width: int, rows: int, item: int) -> int:
    """Return the registers for a tile's operands and rows, in units of a warp's capacity."""
    return width * rows * item // (64 * 16 * 2)


def _stages(load: int) -> int:
    """Return pipeline stages of small tiles.

    With three stages the next tiles are loaded while one is processed. With one stage the latencies of loads add up,
    since barriers separate them; the largest heads leave no room for more.
    """
    return 3 if load <= 1 else 2 if load <= 8 else 1


@configuration
def attend_config(kernel: str, half: int, value: int, rows: int, by_tile: bool, item: int, arch: int) -> LaunchConfig:
    """Return the configuration of a kernel that attends, with tiles of BM rows and BN candidates.

    Args:
        kernel: "fwd" or "bwd".
        half, value: padded sizes of half a query/key head and of a value head.
        rows: rows of a group, R * G.
        by_tile: whether rows are rotated for each tile of TILE candidates (see attend.py).
        item: bytes of an element.
        arch: compute capability as one number.
    """
    width = max(2 * half, value) * item  # bytes of a padded row
    most = 64 if item == 2 and width <= 256 else 16
    BM = min(most, max(16, next_power_of_2(rows)))
    if by_tile:
        load = _register_load(max(2 * half, value), BM, item)
        registers = 128 if load <= 1 and item == 2 and kernel == "fwd" else None
        return LaunchConfig(min(8, max(1, load)), _stages(load), registers, BM=BM, BN=TILE)
    if width > 128:
        return LaunchConfig(8 if kernel == "bwd" else 4, 1, BM=BM, BN=32 if width <= 512 else 16)
    if kernel == "fwd":
        # Registers for three programs of 4 warps on a multiprocessor.
        return LaunchConfig(4, 2, 168, BM=BM, BN=32) if BM == 64 else LaunchConfig(1, 2, BM=BM, BN=32)
    if BM == 64 and arch in (90, 100):  # on other GPUs products read operands from registers, which spill
        return LaunchConfig(4, 1, BM=BM, BN=64)
    return LaunchConfig(2 if BM == 16 else 4, 2, BM=BM, BN=32)


@cached_constant
def tables(rows: int, head_size: int, padded: int, rope_base: float, device: torch.device) -> list[Tensor]:
    """Return cos and sin [rows, padded] fp32. Padding rotates by 0, so that zeros stay zeros."""
    half = padded - head_size // 2
    return [F.pad(x.float(), (0, half)) for x in rope_tables(rows, head_size, rope_base, device)]


def candidate_capacity(most: int) -> int:
    """Return the capacity for candidates of a layer: `most` rounded up to a power of two, at least four tiles."""
    return max(4 * TILE, next_power_of_2(most))


class Options(NamedTuple):
    """The options of a call, in the order of the operator's schema."""

    max_seq_len: int
    rate: int
    top_k: int
    group: int
    scale: float
    rope_base: float


def table_sizes(tokens: int, batch: int, heads: int, o: Options) -> tuple[int, int, int]:
    """Return (rows of the table for each slot, slots in the table at a time, width of a row)."""
    width = o.top_k + candidate_capacity(o.rate * o.top_k) // 32
    rows, slots = heads * depth(o.max_seq_len, o.rate, o.rate * o.top_k), tokens // o.group + batch
    size = rows * width * 4
    return rows, slots if slots * size <= TABLE_BYTES else max(1, TABLE_BYTES // size), width


class Problem:
    """The values that the forward and backward launches derive from a call's shapes and options."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor, o: Options):
        self.T, heads, self.D = q.shape
        self.H, self.V = k.shape[1], v.shape[2]
        self.G, self.R = heads // self.H, o.group
        self.B = seq_offsets.shape[0] - 1
        self.rate, self.top_k = o.rate, o.top_k
        # The number of children after which the rotations of stored keys repeat.
        self.period = TILE if o.rate % TILE == 0 else o.rate
        most = o.rate * o.top_k
        self.top = depth(o.max_seq_len, o.rate, most)
        self.layers = list(tree_layers(self.top, self.T, self.B, o.rate))
        self.rows = sum(layer.slots for layer in self.layers)
        self.offsets, self.scale, self.device = seq_offsets, o.scale, q.device
        self.slots = self.T // o.group + self.B
        self.table_rows, self.slots_at_once, self.width = table_sizes(self.T, self.B, self.H, o)
        self.BH, self.BV, self.item = padded_head(self.D // 2), padded_head(self.V), q.dtype.itemsize
        # The last tiles of candidates may reach past the greatest number of candidates.
        self.cos, self.sin = tables(most + 4 * TILE, self.D, self.BH, o.rope_base, q.device)
        self.stepped = q.dtype in STEPPED and self.BH <= 32
        self.constants = dict(
            H=self.H, G=self.G, R=o.group, HALF=self.D // 2, BH=self.BH, RATE=o.rate, TOP_K=o.top_k,
            PRECISION=precision(q.dtype),
        )  # fmt: skip

    def nodes(self, keys: Tensor, values: Tensor | None) -> Nodes:
        """Return the kernels' arguments for trees of keys and values."""
        return Nodes(keys, values, self.offsets, self.cos, self.sin)

    def choices(self, q: Tensor, keys: Tensor, saved: Tensor | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first slot, number of slots, table of choices) of each part of the slots, to attend before the next.

        saved: the whole table, if the forward pass saved it.
        """
        for begin in range(0, self.slots, self.slots_at_once):
            slots = min(self.slots_at_once, self.slots - begin)
            yield begin, slots, saved if saved is not None and len(saved) else self._choose(q, keys, begin, slots)

    def _choose(self, q: Tensor, keys: Tensor, begin: int, slots: int) -> Tensor:
        """Return the table of choices (`choice.py`) of some slots."""
        table = torch.full((slots * self.table_rows + 1, self.width), -1, dtype=torch.int32, device=self.device)
        torch.arange(self.top_k, dtype=torch.int32, device=self.device, out=table[-1, : self.top_k])
        if not self.top:
            return table
        group, most = max(16, next_power_of_2(self.G)), self.rate * self.top_k
        config, siblings = choice_config(self.BH, group, self.item), self.rate % TILE == 0
        programs = min(slots * self.H, launch.multiprocessors(self.device) * config.programs)
        list_size, candidates = max(16, next_power_of_2(self.top_k)), candidate_capacity(most)
        size = list_size + candidates + cdiv(candidates // 32, 32) * 32
        workspace = torch.empty(programs * size, dtype=torch.int32, device=self.device)
        # No importance exceeds G, up to rounding.
        limit = struct.unpack("i", struct.pack("f", 2.0 * group))[0]
        run(
            htree_choose_fwd_kernel, programs, Rows.of(q), self.nodes(keys, None), workspace, table,
            self.scale / math.log(2.0), self.B, self.T, self.top, self.rows, begin, slots, BG=group, LIST=list_size,
            LIST_BLOCK=min(list_size, 64), CANDIDATES=candidates, SORT_BLOCK=min(candidates, 1024), WORKSPACE=size,
            LOW_BITS=next_power_of_2(most) - 1, LIMIT=limit, SIBLINGS=siblings, STEPPED=siblings and self.stepped,
            **self.constants, **config,
        )  # fmt: skip
        return table

    def attending(self, kernel: str, slots: int) -> tuple[tuple[int, int], dict]:
        """Return (grid, keywords) of a kernel that attends, for some slots."""
        rows = self.R * self.G
        by_tile = self.R == 1 and rows <= 16 and self.rate % TILE == 0
        arch = launch.architecture(self.device)
        config = attend_config(kernel, self.BH, self.BV, rows, by_tile, self.item, arch)
        parts = cdiv(rows, config.BM)
        options = dict(
            PARTS=parts, V=self.V, BV=self.BV, PERIOD=self.period, WORDS=self.width - self.top_k, BY_TILE=by_tile,
            **self.constants, **config,
        )  # fmt: skip
        return (slots * parts, self.H), options


def build_tree(problem: Problem, x: Tensor, keys: bool) -> Tensor:
    """Build the tree [Hkv * rows, padded width] over tokens x [T, Hkv, width]: all layers, keys rotated by RoPE."""
    p, (x,) = problem, as_rows(x, align=False)
    padded = p.BH if keys else p.BV
    # Kernels read whole tiles: spare rows follow the last one.
    nodes = x.new_empty(p.H * p.rows + 2 * TILE, 2 * padded if keys else padded)
    shared = dict(BH=padded, RATE=p.rate, PERIOD=p.period, ROWS=max(1, 2048 // padded), ROTARY=keys)
    grid = (cdiv(p.T, shared["ROWS"]), p.H)
    run(
        htree_rotate_fwd_kernel, grid,
        x, nodes, p.offsets, p.cos, p.sin, x.stride(0), x.stride(1), p.B, p.T, p.rows,
        HALF=x.shape[2] // 2 if keys else x.shape[2], **shared,
    )  # fmt: skip
    for below, layer in itertools.pairwise(p.layers):
        run(
            htree_pool_fwd_kernel, (cdiv(layer.slots, shared["ROWS"]), p.H),
            nodes, p.offsets, p.cos, p.sin, p.B, layer.size, layer.slots, layer.base, below.base, p.rows,
            TOKENS=below.number == 0, **shared,
        )  # fmt: skip
    return nodes


def launch_forward(q, k, v, seq_offsets, *options):
    """Return (output [T, Hq, V], lse [T, Hq] fp32 in base 2, the table of choices, without rows if it is not saved)."""
    if q.shape[0] == 0:
        return fake_forward(q, k, v, seq_offsets, *options)
    p = Problem(q, k, v, seq_offsets, Options(*options))
    (q,), keys = as_rows(q, align=False), build_tree(p, k, True)
    nodes = p.nodes(keys, build_tree(p, v, False))
    out = q.new_empty(p.T, q.shape[1], p.V)
    lse = q.new_empty(p.T, q.shape[1], dtype=torch.float32)
    table = q.new_empty(0, p.width, dtype=torch.int32)
    for begin, slots, choices in p.choices(q, keys):
        grid, constants = p.attending("fwd", slots)
        run(
            htree_attend_fwd_kernel, grid, Rows.of(q), nodes, choices, out, lse, p.scale / math.log(2.0), p.B, p.T,
            p.top, p.rows, len(choices) - 1, begin, slots, **constants,
        )  # fmt: skip
        if slots == p.slots:
            table = choices
    return out, lse, table


def fixed_units(problem: Problem, do: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Return [2] powers of two, the fixed-point units of the sums of dk and dv: 1 / unit is the resolution.

    No element of dv exceeds the sum of all T * G weights, each at most 1, times the longest row of do. An element of dk
    also has the factor do.v - do.o, at most twice the longest rows' product, and a row of q times scale / ln 2.
    """
    do_row, q_row, v_row = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax().double() for x in (do, q, v)
    )
    terms = 2.0 * problem.T * problem.G
    bounds = torch.stack([terms * 2 * do_row * v_row * q_row * abs(problem.scale) / math.log(2.0), terms * do_row])
    return fixed_point_unit(bounds)


def launch_backward(grad, q, k, v, seq_offsets, *options):
    """Return [dq, dk, dv]."""
    *inputs, out, lse, table = options
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0:
        return [dq, dk, dv]
    p = Problem(q, k, v, seq_offsets, Options(*inputs))
    q, grad = as_rows(q, grad, align=False)
    fixed = torch.are_deterministic_algorithms_enabled()
    units = fixed_units(p, grad, q, v) if fixed else None
    kind = torch.int64 if fixed else torch.float32
    sum_k, sum_v = (torch.zeros(p.H, p.rows, n, dtype=kind, device=p.device) for n in (p.D, p.V))
    sums = NodeGradients(sum_k, sum_v, units)
    keys = build_tree(p, k, True)
    nodes = p.nodes(keys, build_tree(p, v, False))
    for begin, slots, choices in p.choices(q, keys, table):
        grid, constants = p.attending("bwd", slots)
        run(
            htree_attend_bwd_kernel, grid, Rows.of(grad), Rows.of(q), nodes, choices, out, lse, dq, sums,
            p.scale / math.log(2.0), p.scale, p.B, p.T, p.top, p.rows, len(choices) - 1, begin, slots, FIXED=fixed,
            **constants,
        )  # fmt: skip
    push_gradients(p, sum_k, dk, units, True)
    push_gradients(p, sum_v, dv, units, False)
    return [dq, dk, dv]


def push_gradients(problem: Problem, sums: Tensor, target: Tensor, units: Tensor | None, keys: bool) -> None:
    """Add each node's share of its parent's gradient, layer by layer, and write the tokens' gradients to `target`."""
    p, width = problem, sums.shape[2]
    padded = p.BH if keys else p.BV
    rows = max(1, 2048 // padded)
    above = 0
    for layer in reversed(p.layers):
        run(
            htree_push_bwd_kernel, (cdiv(layer.slots, rows), p.H),
            sums, target, p.offsets, p.cos, p.sin, units, p.B, layer.size, layer.slots, layer.base, above, p.rows,
            HALF=width // 2 if keys else width, BH=padded, RATE=p.rate, PERIOD=p.period, ROWS=rows, ROTARY=keys,
            PARENTS=layer.number < p.top, TOKENS=layer.number == 0, PLACE=0 if keys else 1, FIXED=units is not None,
        )  # fmt: skip
        above = layer.base


def fake_forward(q, k, v, seq_offsets, *options):
    """Return empty outputs of `launch_forward`."""
    o, batch = Options(*options), seq_offsets.shape[0] - 1
    rows, slots_at_once, width = table_sizes(q.shape[0], batch, k.shape[1], o)
    slots = q.shape[0] // o.group + batch
    return (
        q.new_empty(*q.shape[:2], v.shape[2]),
        q.new_empty(q.shape[:2], dtype=torch.float32),
        q.new_empty(slots * rows + 1 if slots_at_once >= slots else 0, width, dtype=torch.int32),
    )


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, SymInt max_seq_len, SymInt rate, SymInt top_k, SymInt group, "
    "float scale, float rope_base"
)
htree_operator = Operator(
    "htree", _SCHEMA, launch_forward, launch_backward, fake_forward, "q k v", outputs=3, keep_output=True
)


def check_supported(q: Tensor, k: Tensor, v: Tensor, rate: int, top_k: int) -> None:
    """Raise ValueError for sizes that the kernels do not support."""
    check_kernel("htree_attention", q, {"D": q.shape[2], "V": v.shape[2]}, most=MAX_HEAD)
    group = q.shape[1] // k.shape[1]
    for name, value, most in (
        ("compression_rate * top_k", rate * top_k, MAX_CANDIDATES),
        ("query heads of a key/value head", group, MAX_GROUP),
        ("T * key/value heads", q.shape[0] * k.shape[1], 2**31 - 1),
    ):
        if value > most:
            raise ValueError(
                f"htree_attention: the kernels take {name} up to {most}, got {value}; use backend='reference'"
            )
