"""Launch the block-sparse kernels, and register the operator.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per group, R tokens per group, NB block slots and NG group slots (see tiles/rows.py),
M = H * NB lists of groups.

If a group fills a tile of queries (R >= QUERY_MAJOR), query-major kernels compute the whole output and dq. For smaller
groups they compute all but the chosen past blocks, whose part the key-major kernels add by fp32 atomics. dk and dv are
always computed by key-major kernels, with one program for each chunk of a block's list.

In deterministic mode (torch.use_deterministic_algorithms) the lists come from a stable sort instead of atomic counters,
and for small groups the choice is processed slot by slot, so that no two programs of a launch add to one row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.gradients import TableGradients
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import HalvedTables
from hstu_sparse.bsa import blocks, key_major, query_major
from hstu_sparse.bsa.bias import MARGIN, pair_norms, table_sums
from hstu_sparse.bsa.blocks import invert
from hstu_sparse.bsa.plan import BlockPlan
from hstu_sparse.core import launch
from hstu_sparse.core.launch import LaunchConfig, cdiv, configuration, next_power_of_2, padded_head, precision, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.tiles.assembly import proven
from hstu_sparse.tiles.rows import as_rows

BLOCK_SIZES = (16, 32, 64, 128)
MAX_BLOCK_COUNTS = 128
# Tokens per group from which the query-major selection is faster.
QUERY_MAJOR = 32


class Chosen(NamedTuple):
    """The blocks that each group chose, ascending, its own block last: [NG, H, S] each.

    indices  int32, padded with -1
    entries  int16, with a time bias: the entry of the group's tile and the block, see `BlockPlan`
    """

    indices: Any
    entries: Any = None


class Gates(NamedTuple):
    """The gates or their gradients, see the public function: [T, H], or by head [H, T and a tile or more] fp32.

    Without a window `swa` is another gate, which is not read.
    """

    cmp: Any
    slc: Any
    swa: Any


class Call(NamedTuple):
    """The numbers of a call.

    inv_n   1 / normalizer
    H, S    heads, and blocks chosen per group
    window  the window's size, or 0
    """

    scale: Any
    inv_n: Any
    H: Any
    S: Any
    window: Any


class KeyGradients(NamedTuple):
    """Gradients of mean keys and values [NB, H, ..], keys and values [T, H, ..]; partial sums [.., BS, D + V] fp32."""

    dkbar: Any
    dvbar: Any
    dk: Any
    dv: Any
    parts: Any


class Strides(NamedTuple):
    """Strides of q, k, v and, in the backward pass, do, between tokens and between heads."""

    q_t: Any
    q_h: Any
    k_t: Any
    k_h: Any
    v_t: Any
    v_h: Any
    do_t: Any = None
    do_h: Any = None

    @classmethod
    def of(cls, *tensors) -> "Strides":
        """Collect the strides of tensors: q, k, v and optionally do."""
        return cls(*(stride for x in tensors for stride in x.stride()[:2]))


@configuration
def tile_config(
    kernel: str, dtype: torch.dtype, head: int, block_size: int, group: int, arch: int, biased: bool
) -> LaunchConfig:
    """Return the configuration of a kernel whose tiles are BM queries by BN keys. `head` is the wider padded head size.

    It is fixed rather than tuned at run time: the kernels add to their outputs, so an autotuner would have to restore
    the outputs before each trial.
    """
    small = 64 if dtype.itemsize * head <= 256 else 32 if dtype.itemsize * head <= 512 else 16
    if dtype == torch.float32 and arch != 90:
        # Hopper's matrix instructions read fp32 from shared memory; elsewhere the split numbers take registers.
        small = min(small, 32)
    query_major = group >= QUERY_MAJOR
    query = min(group, small) if query_major else small
    key = min(block_size, small)
    most = 168 if arch == 90 and head <= 64 else None  # for three programs to a multiprocessor
    if small == 64:  # measured on an H200 with heads of 128 in bf16; see docs/bsa.md
        bm, bn, warps, stages, registers = {
            "query_fwd": (query, key if query_major else 32, 4, 2, most) if biased else (query, 32, 4, 3, None),
            "query_dq": (query, key if query_major else 32 if biased else 64, 4, 2, None),
            # Without wgmma a tile's biases need registers that four warps do not have.
            "select_fwd": (64, key, 8 if biased and arch > 90 else 4, 3, None),
            "select_dq": (64, key, 8 if key == 64 and dtype.itemsize == 2 else 4, 2, None),
            "select_dkv": (
                64 if query_major and not biased else 32, key, 4, 3 if query_major and biased else 2, None
            ),
            "compress_dkv": (32, 64, 4, 3, None),
        }[kernel]  # fmt: skip
        return LaunchConfig(warps, stages, registers, BM=bm, BN=bn)
    queries = query if kernel in ("query_fwd", "query_dq") else small
    keys = key if kernel in ("select_fwd", "select_dq", "select_dkv") else small
    return LaunchConfig(4, 2, BM=queries, BN=keys)


class Arguments(NamedTuple):
    """The operator's arguments in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    seq_offsets: Tensor
    max_seq_len: int
    g_cmp: Tensor
    g_slc: Tensor
    g_swa: Tensor | None
    position: Tensor | None
    time: Tensor | None
    plan: list[Tensor | None]
    block_size: int
    block_counts: int
    window_size: int
    selection_group: int
    scale: float
    normalizer: float
    deterministic: bool

    @property
    def tables(self) -> HalvedTables:
        """The tables of the bias as kernels read them."""
        return HalvedTables(RelativeBias(self.position, self.time), MARGIN)


def padded(a: Arguments) -> Arguments:
    """Copy q, k and v where kernels cannot read their rows, padding the head sizes to multiples of 16."""
    q, k, v = as_rows(a.q, a.k, a.v)
    return a._replace(q=q, k=k, v=v)


def unpad(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return the first `size` channels of padded heads, contiguous."""
    return x[..., :size].to(dtype).contiguous()


class Problem:
    """The values that the forward and backward launches derive from a call's arguments."""

    def __init__(self, a: Arguments):
        q, v, group = a.q, a.v, a.selection_group
        self.T, self.H, self.D = q.shape
        self.V = v.shape[2]
        self.B = a.seq_offsets.shape[0] - 1
        self.BS, self.S, self.R = a.block_size, a.block_counts, group
        self.NB, self.NG = self.slots(a.block_size), self.slots(group)
        self.window = a.window_size
        self.call = Call(a.scale, 1.0 / a.normalizer, self.H, self.S, self.window)
        self.BD, self.BV = padded_head(self.D), padded_head(self.V)
        self.query_major = group >= QUERY_MAJOR
        self.offsets, self.max_seq_len, self.deterministic = a.seq_offsets, a.max_seq_len, a.deterministic
        self.blocks_together = self.together(self.BS, self.NB)
        self.biased = a.position is not None or a.time is not None
        self.split = q.dtype != torch.float32
        self.config_arguments = (
            q.dtype, max(self.BD, self.BV), a.block_size, group, launch.architecture(q.device), self.biased
        )  # fmt: skip
        self.heads = dict(D=self.D, V=self.V, BD=self.BD, BV=self.BV)
        self.numeric = dict(
            FAST=q.dtype != torch.float32, PRECISION=precision(q.dtype, "tf32x3"),
            ASM=proven(q.device),
        )  # fmt: skip

        dq = self.config("query_dq")
        # Sums in shared memory are integers, too coarse for fp32; a thread must have 16 values of a tile.
        self.sums = (
            self.biased and self.numeric["ASM"] and self.numeric["FAST"] and not self.deterministic
            and dq.num_warps == 4 and dq.BM == 64 and dq.BN >= 32
        )  # fmt: skip

    def shifts(self, tile: int) -> tuple[int, int]:
        """Return the bits that terms of the time table's histogram are shifted by: (for keys, for mean keys).

        Terms have 21 bits, and a cell gets 1/32 of the pairs of a tile. Its sum must fit into 32 bits.
        """
        keys = (self.S - 1) * self.BS if self.query_major else 0
        keys += 2 * tile + self.BS + (self.window + tile if self.window else 0)
        terms = (min(keys, self.max_seq_len + 2 * tile), self.max_seq_len // self.BS + tile)
        keys_shift, means_shift = (max(0, (tile * x // 32 + 1).bit_length() - 10) for x in terms)
        return keys_shift, means_shift

    def slots(self, size: int) -> int:
        return self.T // size + self.B

    def together(self, size: int, slots: int) -> int:
        """Return how many slots a head processes before the next head, about those of a sequence, to reuse the L2."""
        return min(slots, self.max_seq_len // size + 1)

    def tiles_together(self, size: int, slots: int) -> int:
        """Return `together` for tiles of queries: few, if all heads' keys of a sequence fit into a part of the L2."""
        fits_l2 = self.max_seq_len * self.H * (self.D + self.V) * 2 <= 2**24
        return min(slots, 4) if fits_l2 else self.together(size, slots)

    def config(self, kernel: str) -> LaunchConfig:
        return tile_config(kernel, *self.config_arguments)

    def tma(self, rows: int, *tensors: Tensor) -> list | None:
        """Return descriptors over [T, H * size] for the tensor memory accelerator, in tiles of `rows` rows of one head.

        None if it cannot be used: before Hopper, and for heads that do not fill their tile or are not adjacent.
        """
        usable = launch.architecture(tensors[0].device) >= 90 and self.D == self.BD and self.V == self.BV
        if not usable or any(x.stride(1) != x.shape[2] for x in tensors):
            return None
        from triton.tools.tensor_descriptor import TensorDescriptor

        return [
            TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]])
            for x in tensors
        ]

    def keys(self, config: LaunchConfig, k: Tensor, v: Tensor, kbar: Tensor, vbar: Tensor) -> tuple[list, bool]:
        """Return (k, v, kbar, vbar) for a query-major kernel, and whether they are descriptors."""
        descriptors = self.tma(config.BN, k, v, kbar, vbar) if config.BN <= self.BS else None
        return ([k, v, kbar, vbar], False) if descriptors is None else (descriptors, True)

    def group_tile(self) -> int:
        """Return the number of groups per program: smaller for long groups, since there are few of them."""
        return 64 if self.R < 8 else 16


def new_entries(a: Arguments, indices: Tensor) -> Tensor:
    """Allocate the plan's entries of the chosen blocks; empty without a time bias."""
    return indices.new_zeros(0 if a.time is None else indices.shape, dtype=torch.int16)


def contiguous_gates(a: Arguments) -> Gates:
    """Return contiguous gates; without a window, another gate replaces the window's, which is not read."""
    g_cmp, g_slc = a.g_cmp.contiguous(), a.g_slc.contiguous()
    return Gates(g_cmp, g_slc, g_slc if a.g_swa is None else a.g_swa.contiguous())


def gates_by_head(p: Problem, gates: Sequence[Tensor]) -> Gates:
    """Return gates as [H, at least T] fp32, in which the tokens of a tile are contiguous, for key-major kernels."""
    by_head = torch.empty(len(gates), p.H, cdiv(p.T, 16) * 16 + 128, dtype=torch.float32, device=gates[0].device)
    for rows, gate in zip(by_head, gates):
        rows[:, : p.T] = gate.t()
    return Gates(by_head[0], by_head[1], by_head[-1])


def launch_forward(*arguments):
    """Run the forward pass.

    Returns (output [T, H, V], block indices [NG, H, S] int32, mean keys [NB, H, D], mean values [NB, H, V], halved
    tables, the plan's entries of the chosen blocks [NG, H, S] int16, empty without a time bias).
    """
    a, value_size = padded(Arguments(*arguments)), arguments[2].shape[2]
    p, q, k, v = Problem(a), a.q, a.k, a.v
    kbar, vbar = q.new_zeros(p.NB, p.H, p.D), v.new_zeros(p.NB, p.H, p.V)
    indices = torch.full((p.NG, p.H, p.S), -1, dtype=torch.int32, device=q.device)
    tables, entries = a.tables, new_entries(a, indices)
    if p.T == 0 or p.H == 0:
        return q.new_zeros(p.T, p.H, value_size), indices, kbar, vbar, tables.new(q), entries
    gates, strides = contiguous_gates(a), Strides.of(q, k, v)
    halves = tables.halved(q)
    *times, plan_entries = BlockPlan.from_flat(a.plan)
    bias = tables.kernel_bias(halves, *times)
    chosen = Chosen(indices, None if a.time is None else entries)

    kbar_low = torch.empty_like(kbar) if p.split else kbar
    run(
        blocks.bsa_pool_fwd_kernel, (p.NB, p.H),
        k, v, p.offsets, kbar, kbar_low, vbar, strides, p.H, p.B,
        **p.heads, BS=p.BS, SPLIT=p.split, num_warps=4,
    )  # fmt: skip
    width = max(2, next_power_of_2(p.S))
    groups = p.group_tile()
    run(
        blocks.bsa_choose_fwd_kernel, (p.slots(groups * p.R), p.H),
        q, kbar, kbar_low, p.offsets, chosen, bias, plan_entries, 0 if a.time is None else plan_entries.shape[1],
        strides, p.call, p.B,
        D=p.D, BD=p.BD, BS=p.BS, R=p.R, BG=groups, BC=max(64 if p.split else 32, width), P=width, SPLIT=p.split,
        ASM=p.numeric["ASM"], num_warps=4, num_stages=2,
    )  # fmt: skip

    # fp32 if the key-major kernel adds to it
    out = torch.empty(p.T, p.H, p.V, dtype=q.dtype if p.query_major else torch.float32, device=q.device)
    config = p.config("query_fwd")
    tiles = p.slots(config.BM)
    tensors, tma = p.keys(config, k, v, kbar, vbar)
    run(
        query_major.bsa_query_fwd_kernel, (tiles * p.H,),
        q, *tensors, p.offsets, chosen, gates, bias, out, strides, p.call, p.B, tiles,
        p.tiles_together(config.BM, tiles),
        **p.heads, **p.numeric, BS=p.BS, R=p.R, SELECT=p.query_major, WINDOW=p.window > 0, TMA=tma,
        **config,
    )  # fmt: skip
    if not p.query_major and p.S > 1:
        lists = invert(p, chosen, 2 * p.S * p.BS, by_slot=p.deterministic, stable=p.deterministic)
        for number in range(lists.rounds):
            run(
                key_major.bsa_select_fwd_kernel, (lists.chunks_per_round,),
                q, k, v, gates.slc, out, p.offsets, lists.pointers(), bias, strides, p.call, number * p.H * p.NB, p.NB,
                p.blocks_together, p.B,
                **p.heads, **p.numeric, BS=p.BS, R=p.R, ATOMIC=not p.deterministic, **p.config("select_fwd"),
            )  # fmt: skip
    return unpad(out, value_size, q.dtype), indices, kbar, vbar, halves, entries


def fake_forward(*arguments):
    """Return empty outputs of `launch_forward`."""
    a = Arguments(*arguments)
    q = a.q
    (T, H, D), V, B = q.shape, a.v.shape[2], a.seq_offsets.shape[0] - 1
    indices = q.new_empty(T // a.selection_group + B, H, a.block_counts, dtype=torch.int32)
    kbar, vbar = (q.new_empty(T // a.block_size + B, H, cdiv(size, 16) * 16) for size in (D, V))
    return q.new_empty(T, H, V), indices, kbar, vbar, a.tables.new(q), new_entries(a, indices)


def launch_backward(do, *arguments):
    """Return the gradients of q, k, v, g_cmp, g_slc and, if they exist, g_swa and the tables."""
    *inputs, indices, kbar, vbar, halves, entries = arguments
    unpadded = Arguments(*inputs)
    a = padded(unpadded)
    p = Problem(a)
    present_gates = [g for g in (a.g_cmp, a.g_slc, a.g_swa) if g is not None]
    if p.T == 0 or p.H == 0:
        graded = *unpadded[:3], *present_gates, *(x for x in (a.position, a.time) if x is not None)
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in graded]
    (do,), q, k, v = as_rows(do), a.q, a.k, a.v
    gates, strides = contiguous_gates(a), Strides.of(q, k, v, do)
    bias = a.tables.kernel_bias(halves, *BlockPlan.from_flat(a.plan)[:2])
    chosen = Chosen(indices, None if a.time is None else entries)
    # A bound of the terms of a table's gradient; the compression adds BS terms for each pair.
    terms = p.T * p.H * (p.S * p.BS + p.max_seq_len + min(p.window, p.max_seq_len))
    sums = table_sums(RelativeBias(a.position, a.time), do, v, present_gates, terms, p.deterministic)
    tables = sums.arguments

    fp32: dict[str, Any] = dict(dtype=torch.float32, device=q.device)
    dq = torch.empty(p.T, p.H, p.D, dtype=q.dtype if p.query_major else torch.float32, device=q.device)
    dgates = Gates(*(torch.empty(shape, **fp32) for shape in [(p.T, p.H)] * 2 + [(p.T, p.H) if p.window else (0,)]))
    config = p.config("query_dq")
    tiles = p.slots(config.BM)
    tensors, tma = p.keys(config, k, v, kbar, vbar)
    keys_shift, means_shift = p.shifts(config.BM)
    norms = pair_norms(do, v, present_gates) if p.sums else None
    query_tables = tables._replace(norms=norms, means_factor=2.0**-means_shift / p.BS)
    run(
        query_major.bsa_query_bwd_dq_kernel, (tiles * p.H,),
        do, q, *tensors, p.offsets, chosen, gates, dq, dgates, bias, query_tables, keys_shift, strides, p.call, p.B,
        tiles, p.tiles_together(config.BM, tiles),
        **p.heads, **p.numeric, BS=p.BS, R=p.R, SELECT=p.query_major, WINDOW=p.window > 0, SUMS=p.sums,
        TMA=tma, **config,
    )  # fmt: skip

    by_head = gates_by_head(p, present_gates)
    dkbar, dvbar = torch.zeros(p.NB, p.H, p.D, **fp32), torch.zeros(p.NB, p.H, p.V, **fp32)
    key_gradients = KeyGradients(dkbar, dvbar, None, None, None)
    config = p.config("compress_dkv")
    # Several programs for each tile of blocks, since nearly every query sees the earliest ones; one if deterministic.
    splits = 1 if p.deterministic else min(16, cdiv(p.max_seq_len, 2048))
    described = p.tma(config.BM, do, q)
    run(
        key_major.bsa_compress_bwd_dkv_kernel, (p.slots(config.BN * p.BS), p.H, splits),
        *(described or (do, q)), kbar, vbar, p.offsets, by_head, by_head.cmp.stride(0), key_gradients, bias, strides,
        p.call, p.B, **p.heads, **p.numeric, BS=p.BS, ATOMIC=splits > 1,
        TMA=described is not None, **config,
    )  # fmt: skip

    atomic_dq = not p.query_major and not p.deterministic
    lists = invert(p, chosen, 8 * p.S * p.BS, by_slot=False, stable=p.deterministic)
    dk, dv = (
        torch.empty(p.T, p.H, p.D, **fp32 | dict(dtype=k.dtype)),
        torch.empty(p.T, p.H, p.V, **fp32 | dict(dtype=v.dtype)),
    )
    parts = torch.empty(lists.max_parts * p.BS * (p.D + p.V), **fp32)
    config = p.config("select_dkv")
    described = p.tma(config.BM, do, q) if config.BM <= p.R else None
    run(
        key_major.bsa_select_bwd_dkv_kernel, (lists.chunks_per_round, p.BS // config.BN),
        *(described or (do, q)), k, v, by_head, by_head.slc.stride(0), KeyGradients(dkbar, dvbar, dk, dv, parts), dq,
        dgates.slc, p.offsets, lists.pointers(), bias, TableGradients() if p.query_major else tables, strides, p.call,
        p.NB, p.blocks_together, p.B,
        **p.heads, **p.numeric, BS=p.BS, R=p.R, WINDOW=p.window > 0, DQ=atomic_dq,
        TMA=described is not None, **config,
    )  # fmt: skip
    run(
        key_major.bsa_merge_bwd_dkv_kernel, (p.H * p.NB, p.BS // 16),
        parts, lists.part_start, p.offsets, dk, dv, p.NB, p.blocks_together, p.H, p.B,
        **p.heads, BS=p.BS, BN=16, num_warps=4,
    )  # fmt: skip
    del parts, lists

    if not p.query_major and p.deterministic and p.S > 1:
        lists = invert(p, chosen, 2 * p.S * p.BS, by_slot=True, stable=True)
        for number in range(lists.rounds):
            run(
                key_major.bsa_select_bwd_dq_kernel, (lists.chunks_per_round,),
                do, q, k, v, gates.slc, dq, dgates.slc, p.offsets, lists.pointers(), bias, strides, p.call,
                number * p.H * p.NB, p.NB, p.blocks_together, p.B,
                **p.heads, **p.numeric, BS=p.BS, R=p.R, **p.config("select_dq"),
            )  # fmt: skip
    gradients = [unpad(d, x.shape[2], x.dtype) for d, x in zip((dq, dk, dv), unpadded[:3])]
    gradients += [d.to(g.dtype) for d, g in zip(dgates, present_gates)]
    if p.biased:
        factor = p.call.inv_n
        if norms is not None:  # if a norm is not finite, the gradients must be NaN
            factor = torch.where(norms.prod().isfinite(), p.call.inv_n, float("nan"))
        gradients += sums.gradients(factor)
    return gradients


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, SymInt max_seq_len, Tensor g_cmp, Tensor g_slc, Tensor? g_swa, "
    "Tensor? position, Tensor? time, Tensor?[] plan, "
    "int block_size, int block_counts, int window_size, int selection_group, float scale, "
    "float normalizer, bool deterministic"
)
operator = Operator(
    "bsa", _SCHEMA, launch_forward, launch_backward, fake_forward, "q k v g_cmp g_slc g_swa position time", outputs=6
)
