"""Launch the kernels for groups of tokens; register them as torch.ops.hstu_sparse.htree_group_fwd and _bwd.

Letters: T tokens of the batch, B sequences, Hq query heads, Hkv key/value heads, G query heads of each, R tokens of a
group (selection_group), r compression_rate, M = r * top_k the most candidates a layer has, L layers above the tokens.

Memory beyond inputs and outputs: as in `launch.py`, and the table of choices, 4 * top_k + M / 8 bytes for each group,
key/value head and layer above the tokens, which is saved for the backward pass.
"""

import math

import torch
from torch import Tensor

from hstu_sparse.core.launch import LaunchConfig, architecture, cdiv, configuration, next_power_of_2, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.htree.groups import htree_choose_fwd_kernel, htree_group_fwd_kernel
from hstu_sparse.htree.groups_backward import htree_group_bwd_kernel
from hstu_sparse.htree.launch import (
    Problem,
    build_tree,
    check_supported,
    fixed_units,
    most_candidates,
    push_gradients,
)
from hstu_sparse.htree.layout import depth
from hstu_sparse.htree.walk import NodeGradients
from hstu_sparse.tiles.rows import Rows


@configuration
def group_config(kernel: str, half: int, value: int, rows: int, item: int, arch: int) -> LaunchConfig:
    """Return the configuration of an attending kernel, with tiles of BM rows and BN candidates.

    Args:
        kernel: "fwd" or "bwd".
        half, value: padded sizes of half a query/key head and of a value head.
        rows: rows of a group, R * G.
        item: bytes of an element.
        arch: compute capability as one number.
    """
    width = max(2 * half, value) * item  # bytes of a padded row
    most = 64 if item == 2 and width <= 256 else 16
    BM = min(most, max(16, next_power_of_2(rows)))
    if width > 128:
        return LaunchConfig(8 if kernel == "bwd" else 4, 1, BM=BM, BN=32 if width <= 512 else 16)
    if kernel == "fwd":
        # Registers for three programs of 4 warps on a multiprocessor.
        return LaunchConfig(4, 2, 168, BM=BM, BN=32) if BM == 64 else LaunchConfig(1, 2, BM=BM, BN=32)
    if BM == 64 and arch in (90, 100):  # on other GPUs products read operands from registers, which spill
        return LaunchConfig(4, 1, BM=BM, BN=64)
    return LaunchConfig(2 if BM == 16 else 4, 2, BM=BM, BN=32)


def table_sizes(q, k, seq_offsets, max_seq_len, rate, top_k, group) -> tuple[int, int]:
    """Return (rows of the table of choices without the last, one for each slot, head and layer; words in a row)."""
    slots = q.shape[0] // group + seq_offsets.shape[0] - 1
    return slots * k.shape[1] * depth(max_seq_len, rate, rate * top_k), most_candidates(rate * top_k) // 32


class GroupProblem(Problem):
    """The values that both directions derive from the shapes and options of a call."""

    def __init__(self, q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base):
        super().__init__(q, k, v, seq_offsets, max_seq_len, rate, top_k, scale, rope_base)
        self.R = group
        self.slots = self.T // group + self.B
        self.choices, self.words = table_sizes(q, k, seq_offsets, max_seq_len, rate, top_k, group)
        self.group_sizes = self.BH, self.BV, group * self.G, q.dtype.itemsize, architecture(q.device)

    def group_options(self, kernel: str) -> tuple[tuple[int, int], dict]:
        """Return (grid, keywords) of one of the two kernels that attend."""
        config, c = group_config(kernel, *self.group_sizes), self.constants
        parts = cdiv(self.R * self.G, config.BM)
        options = dict(
            H=self.H, G=self.G, R=self.R, PARTS=parts, HALF=c["HALF"], BH=self.BH, V=self.V, BV=self.BV, RATE=self.rate,
            TURN=self.turn, TOP_K=self.top_k, WORDS=self.words, PRECISION=c["PRECISION"], **config,
        )  # fmt: skip
        return (self.slots * parts, self.H), options


def make_choices(p: GroupProblem, q: Tensor, keys: Tensor) -> Tensor:
    """Return the table of choices (`groups.py`), [choices + 1, top_k + words] int32."""
    table = torch.full((p.choices + 1, p.top_k + p.words), -1, dtype=torch.int32, device=p.device)
    torch.arange(p.top_k, dtype=torch.int32, device=p.device, out=table[p.choices, : p.top_k])
    if p.choices:
        grid, workspace, options = p.options("choose", p.slots * p.H)
        for name in ("V", "BV"):
            del options[name]
        run(
            htree_choose_fwd_kernel, grid,
            Rows.of(q), p.nodes(keys, None), workspace, table, p.scale / math.log(2.0), p.B, p.T,
            p.top, p.rows, p.slots, R=p.R, **options,
        )  # fmt: skip
    return table


def launch_group_forward(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base):
    """Return (output [T, Hq, V], lse [T, Hq] fp32 in base 2, the table of choices)."""
    outputs = fake_group_forward(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base)
    if q.shape[0] == 0:
        return outputs
    out, lse, *_ = outputs
    p = GroupProblem(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base)
    (q,), keys = as_rows(q, align=False), build_tree(p, k, True)
    table = make_choices(p, q, keys)
    grid, options = p.group_options("fwd")
    run(
        htree_group_fwd_kernel, grid,
        Rows.of(q), p.nodes(keys, build_tree(p, v, False)), table, out, lse, p.scale / math.log(2.0), p.B, p.T, p.top,
        p.rows, p.choices, p.slots, **options,
    )  # fmt: skip
    return out, lse, table


def launch_group_backward(
    grad, q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base, out, lse, table
):
    """Return [dq, dk, dv]."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0:
        return [dq, dk, dv]
    p = GroupProblem(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base)
    q, grad = as_rows(q, grad, align=False)
    fixed = torch.are_deterministic_algorithms_enabled()
    units = fixed_units(p, grad, q, v) if fixed else None
    kind = torch.int64 if fixed else torch.float32
    dk_sums, dv_sums = (torch.zeros(p.H, p.rows, x.shape[2], dtype=kind, device=p.device) for x in (k, v))
    grid, options = p.group_options("bwd")
    run(
        htree_group_bwd_kernel, grid,
        Rows.of(grad), Rows.of(q), p.nodes(build_tree(p, k, True), build_tree(p, v, False)), table, out, lse, dq,
        NodeGradients(dk_sums, dv_sums, units), p.scale / math.log(2.0), p.scale, p.B, p.T, p.top, p.rows,
        p.choices, p.slots, FIXED=fixed, **options,
    )  # fmt: skip
    push_gradients(p, dk_sums, dk, units, True)
    push_gradients(p, dv_sums, dv, units, False)
    return [dq, dk, dv]


def fake_group_forward(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base):
    """Return empty outputs of `launch_group_forward`."""
    choices, words = table_sizes(q, k, seq_offsets, max_seq_len, rate, top_k, group)
    return (
        q.new_empty(*q.shape[:2], v.shape[2]),
        q.new_empty(q.shape[:2], dtype=torch.float32),
        q.new_empty(choices + 1, top_k + words, dtype=torch.int32),
    )


htree_group_operator = Operator(
    "htree_group",
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, SymInt max_seq_len, SymInt rate, SymInt top_k, SymInt group, "
    "float scale, float rope_base",
    forward=launch_group_forward,
    backward=launch_group_backward,
    fake=fake_group_forward,
    differentiable=("q", "k", "v"),
    outputs=3,
    keep_output=True,
)


def htree_group_triton(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base):
    """Compute `hstu_sparse.htree_attention` with group = selection_group > 1, on CUDA or interpreted."""
    check_supported(q, k, v, rate, top_k)
    return htree_group_operator(q, k, v, seq_offsets, max_seq_len, rate, top_k, group, scale, rope_base)[0]
