"""Launch the kernels of hierarchical tree attention; register them as torch.ops.hstu_sparse.htree_fwd and _bwd.

Letters: T tokens of the batch, B sequences, N max_seq_len, Hq query heads, Hkv key/value heads, G query heads of each,
D query/key and V value head size, r compression_rate, M = r * top_k the most candidates a layer has.

Memory beyond inputs and outputs. Forward: the tree, which holds a copy of k and v and 1 / (r - 1) of them in means, lse
[T, Hq] fp32, and a workspace for the programs that run at once. Backward: the tree again, and gradients of all its
nodes in fp32, or int64 in the deterministic mode. q, k, v, the output and lse are saved for the backward pass. The
choices would take more memory than k and v, so the backward pass computes them again.
"""

import functools
import itertools
import math
import struct

import torch
from torch import Tensor
from torch.nn import functional as F

from hstu_sparse.bias.gradients import fixed_point_unit
from hstu_sparse.core.launch import (
    LaunchConfig,
    cdiv,
    configuration,
    multiprocessors,
    next_power_of_2,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.core.validation import check_kernel
from hstu_sparse.htree.backward import htree_attend_bwd_kernel
from hstu_sparse.htree.forward import htree_attend_fwd_kernel
from hstu_sparse.htree.layout import depth, tree_layers
from hstu_sparse.htree.pooling import htree_pool_fwd_kernel, htree_push_bwd_kernel, htree_turn_fwd_kernel
from hstu_sparse.htree.reference import rope_tables
from hstu_sparse.htree.walk import NodeGradients, Nodes
from hstu_sparse.tiles.rows import Rows

# Positions within a layer occupy the low bits of a key; the remaining bits of an importance must distinguish
# candidates.
MAX_CANDIDATES = 65536
MAX_GROUP = 64
MAX_HEAD = 256
# Candidates of a tile: two tiles have a word of 32 bits.
TILE = 16
# For these dtypes a query is rotated from tile to tile by a fixed step, whose error grows to 2.5e-4 in 4,096 steps.
STEPPED = (torch.float16, torch.bfloat16)


@configuration
def walk_config(kernel: str, half: int, value: int, group: int, item: int) -> LaunchConfig:
    """Return the configuration of a walking kernel, whose tiles are BN candidates.

    Args:
        kernel: "fwd", "bwd" or "choose" (the choice of groups, `groups.py`).
        half, value: padded sizes of half a query/key head and of a value head.
        group: query heads of a key/value head, padded.
        item: bytes of an element.
    """
    # Registers for a tile's operands and the query, in units of the capacity of a warp.
    load = max(half * 2, value) * group * item // (64 * 16 * 2)
    warps = min(8, max(1, load))
    registers, programs = None, max(1, 8 // warps)
    if load <= 1 and item == 2:
        # Triton 3.6 spills 200 bytes of "choose" with 128 registers.
        registers, programs = {"fwd": (128, 16), "choose": (168, 12), "bwd": (None, 8)}[kernel]
    # With three stages the next tiles are loaded while these are processed. With one stage a barrier for shared memory
    # separates any two loads, and their latencies add up; but the largest heads have no room for more.
    stages = 3 if load <= 1 else 2 if load <= 8 else 1
    return LaunchConfig(warps, stages, registers, programs=programs, BN=TILE)


@functools.lru_cache(maxsize=64)
def cached_tables(rows: int, head_size: int, padded: int, rope_base: float, device: torch.device) -> list[Tensor]:
    """Return cos and sin [rows, padded] fp32. Padding rotates by 0, so that zeros stay zeros."""
    half = padded - head_size // 2
    return [F.pad(x.float(), (0, half)) for x in rope_tables(rows, head_size, rope_base, device)]


def tables(rows: int, head_size: int, padded: int, rope_base: float, device: torch.device) -> list[Tensor]:
    """Return `cached_tables`, computed anew while a graph is captured."""
    # A tensor computed while a graph is captured gets its values when the graph runs, so it must not be cached.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (cached_tables.__wrapped__ if capturing else cached_tables)(rows, head_size, padded, rope_base, device)


def most_candidates(most: int) -> int:
    """Return the capacity for candidates of a layer: `most` rounded up to a power of two, at least four tiles."""
    return max(4 * TILE, next_power_of_2(most))


class Problem:
    """The values that both directions derive from the shapes and options of a call."""

    def __init__(self, q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base):
        self.T, heads, self.D = q.shape
        self.H, self.V = k.shape[1], v.shape[2]
        self.G = heads // self.H
        self.B = seq_offsets.shape[0] - 1
        self.rate, self.top_k = rate, top_k
        # The number of children after which the rotation of a child's key repeats.
        self.turn = TILE if rate % TILE == 0 else rate
        most = rate * top_k
        self.top = depth(max_seq_len, rate, most)
        self.layers = list(tree_layers(self.top, self.T, self.B, rate))
        self.rows = sum(layer.slots for layer in self.layers)
        self.offsets, self.scale, self.device = seq_offsets, scale, q.device
        half = self.D // 2
        group, self.BH, self.BV = max(16, next_power_of_2(self.G)), padded_head(half), padded_head(self.V)
        candidates = most_candidates(most)
        self.padded_sizes = self.BH, self.BV, group, q.dtype.itemsize
        # The last tiles of candidates may reach past the greatest number of candidates.
        rows = most + 4 * TILE
        self.cos, self.sin = tables(rows, self.D, self.BH, rope_base, q.device)
        # The importances add up to at most G and its rounding.
        limit = struct.unpack("i", struct.pack("f", 2.0 * group))[0]
        self.constants = dict(
            H=self.H, G=self.G, BG=group, HALF=half, BH=self.BH, V=self.V, BV=self.BV, RATE=rate, TOP_K=top_k,
            LIST=max(16, next_power_of_2(top_k)), SOME=min(max(16, next_power_of_2(top_k)), 64), CANDIDATES=candidates,
            HELD=min(candidates, 1024), LOW_BITS=next_power_of_2(most) - 1, LIMIT=limit,
            SIBLINGS=rate % TILE == 0, STEPPED=rate % TILE == 0 and q.dtype in STEPPED and self.BH <= 32,
            PRECISION=precision(q.dtype),
        )  # fmt: skip

    def nodes(self, keys: Tensor, values: Tensor | None) -> Nodes:
        """Return the kernels' arguments for trees of keys and values."""
        return Nodes(keys, values, self.offsets, self.cos, self.sin)

    def options(self, kernel: str, items: int) -> tuple[tuple[int], Tensor, dict]:
        """Return (grid, workspace, keywords) of a walking kernel for `items` pairs of a token and a key/value head."""
        config = walk_config(kernel, *self.padded_sizes)
        programs = min(items, multiprocessors(self.device) * config.programs)
        candidates = self.constants["CANDIDATES"]
        size = 2 * self.constants["LIST"] + candidates + cdiv(candidates // 16, 32) * 32
        workspace = torch.empty(programs * size, dtype=torch.int32, device=self.device)
        return (programs,), workspace, dict(**self.constants, WORKSPACE=size, **config)


def build_tree(problem: Problem, x: Tensor, keys: bool) -> Tensor:
    """Build the tree [Hkv * rows, padded width] over tokens x [T, Hkv, width]: all layers, keys rotated by RoPE."""
    p, (x,) = problem, as_rows(x, align=False)
    padded = p.BH if keys else p.BV
    # The walk reads whole tiles, so that spare rows follow the last one.
    nodes = x.new_empty(p.H * p.rows + 2 * TILE, 2 * padded if keys else padded)
    shared = dict(BH=padded, RATE=p.rate, TURN=p.turn, ROWS=max(1, 2048 // padded), ROTARY=keys)
    grid = (cdiv(p.T, shared["ROWS"]), p.H)
    run(
        htree_turn_fwd_kernel, grid,
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


def attend(problem, q, keys, values, choices=None):
    """Return (output [T, Hq, V], lse [T, Hq] in base 2); record the choices, if given."""
    p = problem
    out = q.new_empty(p.T, q.shape[1], p.V)
    lse = q.new_empty(p.T, q.shape[1], dtype=torch.float32)
    grid, workspace, options = p.options("fwd", p.T * p.H)
    run(
        htree_attend_fwd_kernel, grid,
        Rows.of(q), p.nodes(keys, values), workspace, out, lse, choices, p.scale / math.log(2.0), p.B, p.T, p.top,
        p.rows, **options,
    )  # fmt: skip
    return out, lse


def launch_forward(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base):
    """Return (output [T, Hq, V], lse [T, Hq] fp32 in base 2)."""
    if q.shape[0] == 0:
        return q.new_empty(0, q.shape[1], v.shape[2]), q.new_empty(0, q.shape[1], dtype=torch.float32)
    problem = Problem(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base)
    (q,) = as_rows(q, align=False)
    return attend(problem, q, build_tree(problem, k, True), build_tree(problem, v, False))


def fixed_units(problem: Problem, do: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Return [2] powers of two, the fixed-point units of the sums of dk and dv: 1 / unit is the resolution.

    No element of dv exceeds the sum of all T * G weights, each at most 1, times the longest row of do. An element of dk
    also has the factor do.v - do.o, at most twice the longest rows' product, and a row of q, which is in base 2.
    """
    do_row, q_row, v_row = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax().double() for x in (do, q, v)
    )
    terms = 2.0 * problem.T * problem.G
    bounds = torch.stack([terms * 2 * do_row * v_row * q_row * abs(problem.scale) / math.log(2.0), terms * do_row])
    return fixed_point_unit(bounds)


def launch_backward(grad, q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base, out, lse):
    """Return [dq, dk, dv]."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0:
        return [dq, dk, dv]
    p = Problem(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base)
    q, grad = as_rows(q, grad, align=False)
    fixed = torch.are_deterministic_algorithms_enabled()
    units = fixed_units(p, grad, q, v) if fixed else None
    kind = torch.int64 if fixed else torch.float32
    dk_sums, dv_sums = (torch.zeros(p.H, p.rows, x.shape[2], dtype=kind, device=p.device) for x in (k, v))
    grid, workspace, options = p.options("bwd", p.T * p.H)
    run(
        htree_attend_bwd_kernel, grid,
        Rows.of(grad), Rows.of(q), p.nodes(build_tree(p, k, True), build_tree(p, v, False)), workspace, out, lse, dq,
        NodeGradients(dk_sums, dv_sums, units), p.scale / math.log(2.0), p.scale, p.B, p.T, p.top,
        p.rows, FIXED=fixed, **options,
    )  # fmt: skip
    push_gradients(p, dk_sums, dk, units, True)
    push_gradients(p, dv_sums, dv, units, False)
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
            HALF=width // 2 if keys else width, BH=padded, RATE=p.rate, TURN=p.turn, ROWS=rows, ROTARY=keys,
            PARENTS=layer.number < p.top, TOKENS=layer.number == 0, PLACE=0 if keys else 1, FIXED=units is not None,
        )  # fmt: skip
        above = layer.base


def fake_forward(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base):
    """Return empty outputs of `launch_forward`."""
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


htree_operator = Operator(
    "htree",
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, SymInt max_seq_len, SymInt rate, SymInt top_k, float scale, "
    "float rope_base",
    forward=launch_forward,
    backward=launch_backward,
    fake=fake_forward,
    differentiable=("q", "k", "v"),
    outputs=2,
    keep_output=True,
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


def htree_triton(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base):
    """Compute `hstu_sparse.htree_attention` on CUDA or interpreted."""
    check_supported(q, k, v, rate, top_k)
    return htree_operator(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base)[0]
