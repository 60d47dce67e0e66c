"""Launch the dense kernels and register them as torch.ops.hstu_sparse.dense_fwd and dense_bwd.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size.

The kernels: plan_kernels.py (by way of plan.py), forward.py, backward_dq.py and backward_dkv.py, on Hopper without a
bias instead hopper_forward.py, hopper_dq.py and hopper_dkv.py, and the small ones of hstu_sparse/bias. Their settings:
configs.py.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from hstu_sparse.bias.buckets import bucket_steps, device_cells, hidden_bucket, num_time_buckets
from hstu_sparse.bias.gradients import greatest_norms_kernel, table_gradients_kernel
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import POSITION_MARGIN, KernelBias, halved_tables_kernel
from hstu_sparse.core.launch import (
    INTERPRET,
    LaunchConfig,
    allow_descriptors,
    cdiv,
    multiprocessors,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.dense.backward_dkv import dense_attention_bwd_dkv_kernel
from hstu_sparse.dense.backward_dq import dense_attention_bwd_dq_kernel
from hstu_sparse.dense.configs import (
    Features,
    bwd_dkv_config,
    bwd_dq_config,
    fwd_config,
    hopper_dkv_config,
    hopper_dq_config,
    hopper_fwd_config,
)
from hstu_sparse.dense.forward import dense_attention_fwd_kernel
from hstu_sparse.dense.plan import (
    AttentionPlan,
    TileMap,
    purpose_of,
    with_backward,
)
from hstu_sparse.tiles.assembly import proven
from hstu_sparse.tiles.rows import Rows

# Copies of the time bias's sums, so that programs do not contend for one address.
_COPIES = 1 if INTERPRET else 64
# Each part of a buffer begins at a multiple of this many elements, so that its alignment does not depend on sizes.
_ALIGNMENT = 16


def _tables_kept(bias: RelativeBias) -> tuple[int, int]:
    """Return the sizes of the halved tables: (position with its margins, time with the hidden bucket)."""
    position = 0 if bias.position is None else bias.position.shape[0] + 2 * POSITION_MARGIN
    time = 0 if bias.time is None else hidden_bucket(num_time_buckets(bias.time)) + 1
    return cdiv(position, _ALIGNMENT) * _ALIGNMENT, time


class _Case(NamedTuple):
    """The properties of a call that determine a kernel's constants, besides the sizes of its tiles."""

    features: Features
    heads: int
    d: int
    v: int
    targets: bool
    window: bool
    precision: str
    asm: bool


@functools.cache
def _constants(case: _Case) -> dict:
    """Return an attention kernel's constants without those of its configuration. `as_rows` pads the heads."""
    d, v, f = cdiv(case.d, 16) * 16, cdiv(case.v, 16) * 16, case.features
    # fp32 tiles must be wider than high: see `bwd_dq_config`.
    least = 32 if f.dtype == torch.float32 else 16
    return dict(
        H=case.heads, D=d, V=v, D_OUT=case.d, V_OUT=case.v, PAD_D=max(least, padded_head(d)),
        PAD_V=max(least, padded_head(v)),
        HAS_TARGETS=case.targets, HAS_WINDOW=case.window, HAS_POSITION=f.position, HAS_TIME=f.time,
        FAST=f.dtype != torch.float32, PRECISION=case.precision, ASM=case.asm,
    )  # fmt: skip


class _Launch:
    """The operator's arguments in the form that the kernels take, shared by the forward and backward launches."""

    def __init__(
        self, q, k, v, seq_offsets, num_targets, position, time, timestamps, query_timestamps, plan, max_seq_len,
        window_size, scale, normalizer, hopper,
    ):  # fmt: skip
        self.bias = RelativeBias(position, time, timestamps, query_timestamps)
        self.metadata = seq_offsets, num_targets, timestamps, query_timestamps
        purpose = purpose_of(q, v, seq_offsets, num_targets, self.bias, max_seq_len, window_size, hopper)
        self.features = purpose.features
        self.plan = AttentionPlan.of_flat(purpose, plan)
        self.d_out, self.v_out = q.shape[2], v.shape[2]
        self.q, self.k, self.v = as_rows(q, k, v)
        self.scale, self.normalizer = scale, normalizer
        self.empty = purpose.total == 0 or purpose.num_seqs == 0
        self.biased = position is not None or time is not None
        self.hopper = self.features.hopper
        self.case = _Case(
            self.features, q.shape[1], self.d_out, self.v_out, purpose.targets, window_size > 0,
            precision(q.dtype, "tf32x3"), proven(q.device),
        )  # fmt: skip

    def new(self, size: int) -> torch.Tensor:
        """Allocate [T, H, size]."""
        return torch.empty(*self.q.shape[:2], size, dtype=self.q.dtype, device=self.q.device)

    def run(self, kernel, tiles: TileMap, arguments: tuple, config: Callable, **more) -> None:
        grid, config = tiles.schedule.shape[0] * self.q.shape[1], config(self.features)
        run(kernel, grid, *arguments, **_constants(self.case), **config, **more)

    def planned(self, tiles: TileMap, tables: torch.Tensor) -> tuple:
        """Return an attention kernel's last arguments: the tile map, the numbers that vary with it, the bias."""
        buckets, device = self.plan.purpose.num_buckets, self.q.device
        if buckets is None:
            times, finders = (None,) * 4, (None, None)
        else:
            times = (*self.plan.queries, *self.plan.keys)
            finders = device_cells(buckets, device), bucket_steps(buckets, device)
        width, _ = _tables_kept(self.bias)
        position = None if self.bias.position is None else tables[POSITION_MARGIN:]
        time = None if self.bias.time is None else tables[width:]
        total = self.plan.purpose.total
        return tiles, tiles.row, total, KernelBias(position, time, *finders, *times)

    def halved_tables(self) -> torch.Tensor:
        """Return half the values of the bias tables in fp32, as the kernels read them; empty without a bias."""
        position, time = self.bias.position, self.bias.time
        position_width, time_width = _tables_kept(self.bias)
        tables = torch.empty(position_width + time_width, dtype=torch.float32, device=self.q.device)
        if self.biased:
            arguments = tables, tables[position_width:], position, time
            times = 0 if time is None else self.plan.purpose.num_buckets + 1
            n = 0 if position is None else position.shape[0]
            run(
                halved_tables_kernel, cdiv(max(position_width, time_width), 1024), *arguments, N=n,
                WIDTH=position_width, TIMES=times, MARGIN=POSITION_MARGIN, BLOCK=1024,
            )  # fmt: skip
        return tables

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (output, halved tables)."""
        out, tables = self.new(self.v_out), self.halved_tables()
        if self.empty:
            return out.zero_(), tables
        if self.hopper:
            from hstu_sparse.dense.hopper.forward import dense_attention_fwd_hopper_kernel as kernel

            factors, config = (0.5 * self.scale, 1.0 / self.normalizer), hopper_fwd_config(self.features)
            self._run_hopper(kernel, "MNN", (self.q, self.k, self.v), (out,), factors, config)
            return out, tables
        purpose, tiles = self.plan.purpose, self.plan.forward
        arguments = (
            *map(Rows.of, (self.q, self.k, self.v, out)), *self.metadata[:2], purpose.window_size,
            0.5 * self.scale, 1.0 / self.normalizer, *self.planned(tiles, tables),
        )  # fmt: skip
        self.run(dense_attention_fwd_kernel, tiles, arguments, fwd_config)
        return out, tables

    def _run_hopper(
        self, kernel, blocks: str, sources: tuple, outputs: tuple, factors: tuple, config: LaunchConfig
    ) -> None:
        """Launch a kernel for Hopper; all of them have the same tiles.

        blocks: for each of `sources` M or N, the rows of its tensor descriptor: BLOCK_M or BLOCK_N.
        """
        from hstu_sparse.dense.hopper.tiles import descriptor

        schedule = self.plan.forward.schedule
        heads, slots = self.case.heads, schedule.shape[0]
        descriptors = [descriptor(x, config[f"BLOCK_{block}"]) for x, block in zip(sources, blocks)]
        strides = *(x.base.stride(1) for x in descriptors), *(n for x in outputs for n in x.stride()[:2])
        taken = torch.zeros(1, dtype=torch.int32, device=self.q.device)
        run(
            kernel, min(multiprocessors(self.q.device), slots * heads), *descriptors, *outputs, *strides,
            *self.metadata[:2], self.plan.purpose.window_size, *factors, taken, slots, schedule, H=heads,
            HAS_TARGETS=self.case.targets, HAS_WINDOW=self.case.window, **config,
        )  # fmt: skip

    def backward(self, do: torch.Tensor, tables: torch.Tensor) -> list[torch.Tensor]:
        """Return dq, dk, dv and the gradients of the present tables."""
        dq, dk, dv = self.new(self.d_out), self.new(self.d_out), self.new(self.v_out)
        grads = [None if x is None else torch.empty_like(x) for x in self.bias[:2]]
        table_grads = [x for x in grads if x is not None]
        if self.empty:
            return [dq, dk, dv, *(x.zero_() for x in table_grads)]
        (do,) = as_rows(do)
        sources, half_scale = (self.q, self.k, self.v, do), 0.5 * self.scale
        if self.hopper:
            from hstu_sparse.dense.hopper.backward_dkv import dense_attention_bwd_dkv_hopper_kernel
            from hstu_sparse.dense.hopper.backward_dq import dense_attention_bwd_dq_hopper_kernel

            factors, config = (half_scale, 0.5 / self.normalizer, self.scale), hopper_dkv_config(self.features)
            self._run_hopper(dense_attention_bwd_dkv_hopper_kernel, "MNNM", sources, (dk, dv), factors, config)
            factors, config = (half_scale, half_scale / self.normalizer), hopper_dq_config(self.features)
            self._run_hopper(dense_attention_bwd_dq_hopper_kernel, "MNNM", sources, (dq,), factors, config)
            return [dq, dk, dv]
        self.plan = with_backward(self.plan, *self.metadata)
        purpose, rows = self.plan.purpose, [*map(Rows.of, sources)]
        numbers = *self.metadata[:2], purpose.window_size, half_scale, 0.5 / self.normalizer, self.scale

        if bwd_dkv_config(self.features).TMA:
            allow_descriptors()
        arguments = (
            *rows, Rows.of(dk), Rows.of(dv), *numbers, *self.planned(self.plan.dkv, tables),
        )  # fmt: skip
        self.run(dense_attention_bwd_dkv_kernel, self.plan.dkv, arguments, bwd_dkv_config)

        config = bwd_dq_config(self.features)
        position_sums, time_sums, norms = self._sums(do)
        # The greatest number of terms, of 21 bits before the shift, that one cell of the time bias's histogram gets.
        terms = config.BLOCK_M * (min(purpose.max_seq_len, purpose.total) + config.BLOCK_N) // 32
        time_shift = max(0, terms.bit_length() - 10)
        table = 0 if self.bias.time is None else hidden_bucket(purpose.num_buckets)
        arguments = (
            *rows, Rows.of(dq), position_sums, time_sums, norms, time_shift, *numbers, *self.planned(self.plan.dq,
            tables),
        )  # fmt: skip
        self.run(dense_attention_bwd_dq_kernel, self.plan.dq, arguments, bwd_dq_config, TABLE=table, COPIES=_COPIES)
        if self.biased:
            position, time = (0 if x is None else x.shape[0] for x in grads)
            arguments = position_sums, time_sums, *grads, norms, 0.5 / self.normalizer
            times = 0 if time == 0 else purpose.num_buckets + 1
            run(
                table_gradients_kernel, cdiv(max(position, time), 128), *arguments, N=position, TIMES=times, ALL=time,
                TABLE=table, COPIES=_COPIES, BLOCK=128,
            )  # fmt: skip
        return [dq, dk, dv, *table_grads]

    def _sums(self, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return (zeros for the position bias's sums, for the time bias's, the norms that bound ds); None if not
        needed.

        The sums of fp16 and bf16 inputs are integers, which do not depend on the order of additions; fp32 needs more
        digits than they have.
        """
        if not self.biased:
            return None, None, None
        exact = self.q.dtype != torch.float32 and not INTERPRET
        position, time = self.bias.position, self.bias.time
        width = 0 if position is None else cdiv(position.shape[0], _ALIGNMENT) * _ALIGNMENT
        times = 0 if time is None else _COPIES * hidden_bucket(self.plan.purpose.num_buckets)
        sums = torch.zeros(width + times + 1, dtype=torch.int64 if exact else torch.float32, device=self.q.device)
        norms = None
        if exact:
            norms = sums[-1:].view(torch.float32)
            rows, block = self.v.shape[0] * self.v.shape[1], 128
            arguments = self.v, do, norms, *self.v.stride()[:2], *do.stride()[:2], self.v.shape[0]
            constants = dict(H=self.v.shape[1], V=self.v.shape[2], PAD_V=padded_head(self.v.shape[2]), BLOCK=block)
            run(greatest_norms_kernel, cdiv(rows, block), *arguments, **constants, num_warps=8)
        return (
            None if position is None else sums[:width], None if time is None else sums[width:-1], norms,
        )  # fmt: skip


def _forward(*arguments):
    return _Launch(*arguments).forward()


def _backward(grad, *arguments):
    *arguments, tables = arguments
    return _Launch(*arguments).backward(grad, tables)


def _fake(q, k, v, seq_offsets, num_targets, position, time, *_):
    widths = _tables_kept(RelativeBias(position, time))
    return q.new_empty(v.shape), q.new_empty(sum(widths), dtype=torch.float32)


dense_operator = Operator(
    "dense",
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, Tensor? num_targets, Tensor? position_bias, Tensor? time_bias, "
    "Tensor? timestamps, Tensor? query_timestamps, Tensor?[] plan, SymInt max_seq_len, SymInt window_size, "
    "float scale, float normalizer, bool? hopper",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("q", "k", "v", "position_bias", "time_bias"),
    outputs=2,
)


def hstu_attention_triton(
    q, k, v, seq_offsets, plan, *, num_targets, bias, window_size, max_seq_len, scale, normalizer, hopper
):
    """Compute `hstu_sparse.hstu_attention` for checked arguments, on CUDA or in Triton's interpreter.

    hopper: whether the kernels for Hopper are taken; None where `prefers_hopper` says so.
    """
    return dense_operator(
        q, k, v, seq_offsets, num_targets, *bias, plan.flat(), max_seq_len, window_size, scale, normalizer, hopper
    )[0]
