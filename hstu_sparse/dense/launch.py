"""Launch the dense kernels and register them as torch.ops.hstu_sparse.dense_fwd and dense_bwd.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size.

The kernels are in plan.py, kernels.py (hopper/ on Hopper without a bias) and hstu_sparse/bias; configs.py has their
settings.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.gradients import TableGradients, max_norms_kernel, table_gradients_kernel
from hstu_sparse.bias.relative import BIAS, RelativeBias, unflatten_arguments
from hstu_sparse.bias.scores import POSITION_MARGIN, HalvedTables, KernelBias
from hstu_sparse.core.launch import INTERPRET, allow_descriptors, cdiv, multiprocessors, padded_head, precision, run
from hstu_sparse.core.mask import MASK, Mask
from hstu_sparse.core.registration import Operator
from hstu_sparse.dense import configs, kernels
from hstu_sparse.dense.configs import Features
from hstu_sparse.dense.kernels import Kind
from hstu_sparse.dense.plan import AttentionPlan, TileMap, purpose_of, with_backward
from hstu_sparse.tiles.assembly import proven
from hstu_sparse.tiles.ranges import Extension
from hstu_sparse.tiles.rows import Rows, as_rows

# Copies of the time bias's sums, so that programs do not contend for one address.
_COPIES = 1 if INTERPRET else 64
# Each part of a buffer begins at a multiple of this many elements, so that its alignment does not depend on sizes.
_ALIGNMENT = 16


class Arguments(NamedTuple):
    """The operator's arguments in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    seq_offsets: Tensor
    mask: Mask
    bias: RelativeBias
    plan: list[Tensor | None]  # `AttentionPlan.flat`
    max_seq_len: int
    scale: float
    normalizer: float
    hopper: bool | None  # whether to run the kernels for Hopper; None: `prefers_hopper` decides

    @property
    def batch(self) -> tuple[Tensor, Mask, RelativeBias]:
        """The arguments that a plan is made from."""
        return self.seq_offsets, self.mask, self.bias

    @property
    def for_kernels(self) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """The offsets and the part of the mask that are arguments of the attention kernels."""
        return self.seq_offsets, *self.mask[:3]


@functools.cache
def _kind(
    features: Features, heads: int, d: int, v: int, form: tuple[bool, bool, Extension | None], products: str, asm: bool
) -> Kind:
    """Return an attention kernel's constants. `as_rows` pads the heads. form: HAS_TARGETS, HAS_WINDOW, EXTENSION."""
    targets, window, more = form
    size, value_size = cdiv(d, 16) * 16, cdiv(v, 16) * 16
    # The fp32 tiles of the kernel of dq, 16 rows high, must be wider than high: see `bwd_dq_config`.
    least = 32 if features.dtype == torch.float32 else 16
    context, sees_all, group, prefix = more or Extension(False, False, 1, 0)
    return Kind(
        heads, size, value_size, d, v, max(least, padded_head(size)), max(least, padded_head(value_size)), targets,
        window, features.position, features.time, features.dtype != torch.float32, products, asm, more,
        context, sees_all, window and (context or prefix > 0), group,
    )  # fmt: skip


class _Launch:
    """The kernels' arguments, computed from the operator's, for the forward and backward launches."""

    def __init__(self, a: Arguments):
        q, v, self.a, self.bias = a.q, a.v, a, a.bias
        purpose = purpose_of(q, v, *a.batch, a.max_seq_len, a.hopper)
        self.features = purpose.features
        self.plan = AttentionPlan.from_flat(purpose, a.plan)
        self.tables = HalvedTables(self.bias, POSITION_MARGIN)
        self.q, self.k, self.v = as_rows(q, a.k, v)
        self.empty = purpose.total == 0 or purpose.num_seqs == 0
        self.biased = self.tables.size > 0
        self.kind = _kind(
            self.features, q.shape[1], q.shape[2], v.shape[2],
            (purpose.targets, purpose.window_size > 0, purpose.more), precision(q.dtype, "tf32x3"), proven(q.device),
        )  # fmt: skip

    def new(self, size: int) -> Tensor:
        """Allocate [T, H, size]."""
        return torch.empty(*self.q.shape[:2], size, dtype=self.q.dtype, device=self.q.device)

    def run(self, kernel, tiles: TileMap, arguments: tuple, halves: Tensor, config: Callable, **constants) -> None:
        """Launch an attention kernel; its last arguments are the tile map and the bias."""
        bias: KernelBias = self.tables.kernel_bias(halves, self.plan.keys, self.plan.queries)
        grid = tiles.schedule.shape[0] * self.kind.H
        run(kernel, grid, *arguments, tiles, tiles.row, bias, kind=self.kind, **config(self.features), **constants)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (output, halved tables)."""
        a, out, halves = self.a, self.new(self.a.v.shape[2]), self.tables.halved(self.q)
        if self.empty:
            return out.zero_(), halves
        factors = 0.5 * a.scale, 1.0 / a.normalizer
        if self.features.hopper:
            from hstu_sparse.dense.hopper.kernels import dense_attention_fwd_hopper_kernel as kernel

            sources = self.q, self.k, self.v
            self._run_hopper(kernel, self.plan.forward, "MNN", sources, (out,), factors, configs.hopper_fwd_config)
            return out, halves
        rows = map(Rows.of, (self.q, self.k, self.v, out))
        arguments = (*rows, *a.for_kernels, *factors)
        self.run(kernels.dense_attention_fwd_kernel, self.plan.forward, arguments, halves, configs.fwd_config)
        return out, halves

    def _run_hopper(
        self, kernel, tiles: TileMap, blocks: str, sources: tuple, outputs: tuple, factors: tuple, config: Callable
    ) -> None:
        """Launch a kernel for Hopper.

        blocks: a letter for each of `sources`: M if its tensor descriptor has BLOCK_M rows, N if it has BLOCK_N.
        """
        from hstu_sparse.dense.hopper.tiles import descriptor

        settings, schedule, heads = config(self.features), tiles.schedule, self.kind.H
        slots, mask = schedule.shape[0], self.a.mask
        descriptors = [descriptor(x, settings[f"BLOCK_{block}"]) for x, block in zip(sources, blocks)]
        strides = tuple(x.base.stride(1) for x in descriptors)
        taken = torch.zeros(1, dtype=torch.int32, device=self.q.device)
        run(
            kernel, min(multiprocessors(self.q.device), slots * heads), *descriptors, strides,
            *map(Rows.of, outputs), self.a.seq_offsets, mask.num_targets, mask.window_size, factors, taken, slots,
            schedule, H=heads, HAS_TARGETS=self.kind.HAS_TARGETS, HAS_WINDOW=self.kind.HAS_WINDOW, **settings,
        )  # fmt: skip

    def backward(self, do: Tensor, halves: Tensor) -> list[Tensor]:
        """Return dq, dk, dv and the gradients of the present tables."""
        a = self.a
        dq, dk, dv = self.new(a.q.shape[2]), self.new(a.q.shape[2]), self.new(a.v.shape[2])
        grads = [None if x is None else torch.empty_like(x) for x in self.bias[:2]]
        table_grads = [x for x in grads if x is not None]
        if self.empty:
            return [dq, dk, dv, *(x.zero_() for x in table_grads)]
        (do,) = as_rows(do)
        sources, half_scale = (self.q, self.k, self.v, do), 0.5 * a.scale
        factors = half_scale, 0.5 / a.normalizer, a.scale
        plan = with_backward(self.plan, *a.batch)
        assert plan.dq is not None and plan.dkv is not None
        if self.features.hopper:
            from hstu_sparse.dense.hopper.kernels import dense_attention_bwd_dkv_hopper_kernel as dkv_kernel
            from hstu_sparse.dense.hopper.kernels import dense_attention_bwd_dq_hopper_kernel as dq_kernel

            self._run_hopper(dkv_kernel, plan.dkv, "MNNM", sources, (dk, dv), factors, configs.hopper_dkv_config)
            dq_factors = half_scale, half_scale / a.normalizer
            self._run_hopper(dq_kernel, plan.dq, "MNNM", sources, (dq,), dq_factors, configs.hopper_dq_config)
            return [dq, dk, dv]
        rows = [*map(Rows.of, sources)]
        shared: tuple = (*a.for_kernels, *factors)

        if configs.bwd_dkv_config(self.features).TMA:
            allow_descriptors()
        to_dk, to_dv = Rows.of(dk), Rows.of(dv)
        launches = ((to_dk, None), (None, to_dv)) if configs.separate_dkv(self.features) else ((to_dk, to_dv),)
        for outputs in launches:
            arguments: tuple = (*rows, *outputs, *shared)
            self.run(kernels.dense_attention_bwd_dkv_kernel, plan.dkv, arguments, halves, configs.bwd_dkv_config)

        purpose, config, sums = plan.purpose, configs.bwd_dq_config(self.features), self._sums(do)
        # The most terms that a cell of the time bias's histogram may get; before the shift a term has 21 bits.
        terms = config.BLOCK_M * (min(purpose.max_seq_len, purpose.total) + config.BLOCK_N) // 32
        time_shift = max(0, terms.bit_length() - 10)
        constants = dict(TABLE=self.tables.masked, COPIES=_COPIES)
        arguments = (*rows, Rows.of(dq), sums, time_shift, *shared)
        self.run(kernels.dense_attention_bwd_dq_kernel, plan.dq, arguments, halves, configs.bwd_dq_config, **constants)
        if self.biased:
            position, time = (0 if x is None else x.shape[0] for x in grads)
            times = 0 if time == 0 else self.tables.entries
            run(
                table_gradients_kernel, cdiv(max(position, time), 128), sums, *grads, 0.5 / a.normalizer, N=position,
                TIMES=times, ALL=time, **constants, BLOCK=128,
            )  # fmt: skip
        return [dq, dk, dv, *table_grads]

    def _sums(self, do: Tensor) -> TableGradients:
        """Return zeros for the sums of the tables' gradients, and the norms that bound ds.

        The sums of fp16 and bf16 inputs are integers, so that the order of additions does not matter. fp32 inputs need
        more digits: their sums are fp32, without norms.
        """
        if not self.biased:
            return TableGradients()
        exact = self.q.dtype != torch.float32 and not INTERPRET
        buckets = self.tables.masked
        width = cdiv(self.tables.positions, _ALIGNMENT) * _ALIGNMENT
        dtype = torch.int64 if exact else torch.float32
        sums = torch.zeros(width + _COPIES * buckets + 1, dtype=dtype, device=self.q.device)
        norms = None
        if exact:
            norms, (tokens, heads, size) = sums[-1:].view(torch.float32), self.v.shape
            constants = dict(H=heads, V=size, PAD_V=padded_head(size), BLOCK=128, num_warps=8)
            grid, rows = cdiv(tokens * heads, 128), (Rows.of(self.v), Rows.of(do))
            run(max_norms_kernel, grid, *rows, norms, tokens, **constants)
        position, time = None if width == 0 else sums[:width], None if buckets == 0 else sums[width:-1]
        return TableGradients(position, time, None, 0, buckets, norms)


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    return _Launch(unflatten_arguments(Arguments, arguments, mask=Mask)).forward()


def _backward(grad: Tensor, *arguments) -> list[Tensor]:
    return _Launch(unflatten_arguments(Arguments, arguments[:-1], mask=Mask)).backward(grad, arguments[-1])


def _fake(*arguments) -> tuple[Tensor, Tensor]:
    a = unflatten_arguments(Arguments, arguments, mask=Mask)
    return a.q.new_empty(a.v.shape), HalvedTables(a.bias, POSITION_MARGIN).new(a.q)


_SCHEMA = (
    f"Tensor q, Tensor k, Tensor v, Tensor seq_offsets, {MASK}, {BIAS}, Tensor?[] plan, "
    "SymInt max_seq_len, float scale, float normalizer, bool? hopper"
)
dense_operator = Operator("dense", _SCHEMA, _forward, _backward, _fake, "q k v position time", outputs=2)
