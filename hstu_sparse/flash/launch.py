"""Launch the flash kernels, and register them as torch.ops.hstu_sparse.flash_fwd and flash_bwd.

Letters: T, S tokens of queries and of keys, H heads of queries, Hkv of keys and values, D query/key and V value head
size.
"""

import torch

from hstu_sparse.core import launch
from hstu_sparse.core.launch import INTERPRET, LaunchConfig, cdiv, configuration, padded_head, precision, run
from hstu_sparse.core.mask import MASK, Mask
from hstu_sparse.core.registration import Operator
from hstu_sparse.flash.backward import (
    flash_attention_bwd_dkv_kernel,
    flash_attention_bwd_dq_kernel,
    flash_attention_bwd_rows_kernel,
)
from hstu_sparse.flash.forward import (
    LOG2_E,
    ROW_BLOCK,
    TOGETHER,
    Call,
    flash_attention_fwd_kernel,
    flash_attention_key_norms_kernel,
)
from hstu_sparse.flash.reference import Layout, Options, empty_results
from hstu_sparse.tiles.ranges import Extension
from hstu_sparse.tiles.rows import Rows, as_rows

# The number of tokens from which on a bound of the scores (`uses_score_bounds`) saves more time than it takes.
MANY_TOKENS = 2**15


def _has_large_shared_memory(arch: int) -> bool:
    """Return whether a program has over 200 KB of shared memory, and its matrix products are faster in large tiles."""
    return 90 <= arch < 120


@configuration
def fwd_config(pad_d: int, pad_v: int, dtype: torch.dtype, features: frozenset[str], arch: int) -> LaunchConfig:
    """Return tile sizes, warps and pipeline stages of the forward kernel: chosen, not tuned at run time.

    features: those in use out of "dropout", "alibi" and "many" (tokens, see MANY_TOKENS).
    """
    widest, large = max(pad_d, pad_v), _has_large_shared_memory(arch)
    if dtype == torch.float32:
        return LaunchConfig(BLOCK_M=32, BLOCK_N=32, TMA=False, num_warps=4, num_stages=2 if widest <= 128 else 1)
    if widest > 128:
        return LaunchConfig(
            BLOCK_M=128 if large else 64, BLOCK_N=32, TMA=large, num_warps=8, num_stages=2 if large else 1
        )
    if "dropout" in features:
        return LaunchConfig(BLOCK_M=64, BLOCK_N=32, TMA=large, num_warps=4, num_stages=2)
    if not large:
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, TMA=False, num_warps=4, num_stages=2)
    if "alibi" in features:
        return LaunchConfig(BLOCK_M=128, BLOCK_N=64, TMA=True, num_warps=8, num_stages=2)
    if arch == 90:
        # Few registers, so that two programs share a multiprocessor: the softmax of one overlaps products of the other.
        return LaunchConfig(BLOCK_M=128, BLOCK_N=32, TMA=True, num_warps=8, num_stages=3, maxnreg=128)
    return LaunchConfig(BLOCK_M=128, BLOCK_N=128, TMA=False, num_warps=8, num_stages=2)


@configuration
def uses_score_bounds(pad_d: int, pad_v: int, dtype: torch.dtype, features: frozenset[str], arch: int) -> bool:
    """Return whether to bound each head's scores before the forward kernel, which then may need no running maximum."""
    return arch == 90 and dtype == torch.bfloat16 and max(pad_d, pad_v) <= 128 and features == {"many"}


@configuration
def bwd_dq_config(pad_d: int, pad_v: int, dtype: torch.dtype, features: frozenset[str], arch: int) -> LaunchConfig:
    """Return the configuration of the kernel of dq. WGMMA: keep q and do in registers, for sm_90."""
    widest, large = max(pad_d, pad_v), _has_large_shared_memory(arch)
    if dtype == torch.float32:
        return LaunchConfig(
            BLOCK_M=32 if widest <= 64 else 16, BLOCK_N=32, WGMMA=False, TMA=False, num_warps=4, num_stages=1
        )
    if widest > 128 and large:
        return LaunchConfig(BLOCK_M=128, BLOCK_N=32, WGMMA=False, TMA=True, num_warps=8, num_stages=2)
    if widest > 128 or widest <= 32 or "dropout" in features:
        warps = 8 if widest > 128 else 4
        return LaunchConfig(BLOCK_M=64, BLOCK_N=32, WGMMA=False, TMA=large, num_warps=warps, num_stages=1)
    if not large:
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, WGMMA=False, TMA=False, num_warps=4, num_stages=1)
    return LaunchConfig(BLOCK_M=64, BLOCK_N=64, WGMMA=arch == 90, TMA=True, num_warps=4, num_stages=3)


@configuration
def bwd_dkv_config(pad_d: int, pad_v: int, dtype: torch.dtype, features: frozenset[str], arch: int) -> LaunchConfig:
    """Return the configuration of the kernel of dk and dv. TMA: load queries by descriptor, to save registers."""
    widest, large = max(pad_d, pad_v), _has_large_shared_memory(arch)
    if dtype == torch.float32:
        return LaunchConfig(BLOCK_M=32 if widest <= 64 else 16, BLOCK_N=32, TMA=False, num_warps=4, num_stages=1)
    if widest > 128:
        return LaunchConfig(
            BLOCK_M=32, BLOCK_N=64 if large else 32, TMA=False, num_warps=8, num_stages=2 if large else 1
        )
    if not large or "dropout" in features:
        return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=4, num_stages=1)
    return LaunchConfig(BLOCK_M=64, BLOCK_N=64, TMA=True, num_warps=4, num_stages=2)


class Launch:
    """The kernel launches of one call; tensors are on the current device (see core/registration.py).

    q: [T, H, D], k: [S, Hkv, D], v: [S, Hkv, V], of one dtype.
    """

    def __init__(self, q, k, v, layout: Layout, options: Options):
        self.d_out, self.v_out = q.shape[2], v.shape[2]
        self.q, self.k, self.v = self.as_rows(q, k, v)
        self.inputs = [Rows.of(x) for x in (self.q, self.k, self.v)]
        self.layout, self.options = layout, options
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        self.pieces = layout.q_offsets.shape[0] - 1
        slopes = options.slopes
        self.problem = (
            layout.q_offsets, layout.k_offsets, layout.q_starts, layout.k_starts, self.pieces, q.shape[0],
            Call(options.scale * LOG2_E.value, slopes, options.dropout, *options.mask[:2]), options.left, options.right,
            slopes.shape[1] if slopes is not None and slopes.dim() == 2 else 0,
            options.seed if options.dropout else None,
        )  # fmt: skip
        features = {"dropout"} if options.dropout else set()
        features |= {"alibi"} if slopes is not None else set()
        features |= {"many"} if q.shape[0] >= MANY_TOKENS else set()
        self.sizes = padded_head(self.q.shape[2]), padded_head(self.v.shape[2])
        self.chosen = (*self.sizes, q.dtype, frozenset(features), launch.architecture(q.device))
        # For wider heads the bf16 parts do not fit into the registers.
        parts = "bf16x6" if max(self.sizes) <= 64 and not INTERPRET else "ieee"
        self.constants = dict(
            H=self.heads, GROUP=self.heads // self.kv_heads, D=self.q.shape[2], V=self.v.shape[2], D_OUT=self.d_out,
            V_OUT=self.v_out, PIECES=layout.pieces, HAS_LEFT=options.left >= 0, HAS_RIGHT=options.right >= 0,
            EXTENSION=Extension.of(options.mask, options.mask.first_option), ALIGNED=layout.k_starts is None,
            PRECISION=precision(q.dtype, parts), PAD_D=self.sizes[0], PAD_V=self.sizes[1],
        )  # fmt: skip

    @staticmethod
    def as_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
        # fp32 is not padded: a padded copy of heads of e.g. 50 costs more than it saves.
        return as_rows(*tensors, align=tensors[0].dtype != torch.float32)

    def _start(self, kernel, rows: int, heads: int, arguments: tuple, config: LaunchConfig, **more) -> None:
        """Launch a program for each head and each tile: `rows` complete tiles, and a partial one of each piece."""
        if config.TMA:
            launch.allow_descriptors()
        slots = cdiv(rows + self.pieces, TOGETHER.value) * TOGETHER.value
        run(kernel, slots * heads, *arguments, *self.problem, **self.constants, **more, **config)

    def _key_norms(self) -> torch.Tensor:
        """Compute [Hkv] fp32: the square of the greatest norm of each head's keys."""
        key_norms = torch.zeros(self.kv_heads, dtype=torch.float32, device=self.k.device)
        tokens, block = self.k.shape[0], max(16, 8192 // self.sizes[0])
        if tokens:
            run(
                flash_attention_key_norms_kernel, cdiv(tokens, block) * self.kv_heads, Rows.of(self.k), key_norms,
                tokens, HEADS=self.kv_heads, D=self.k.shape[2], BLOCK=block,
                PAD_D=self.sizes[0],
            )  # fmt: skip
        return key_norms

    def forward(self, out: torch.Tensor, lse: torch.Tensor, *, before=None) -> None:
        """Write out [T, H, V] and lse [H, T] fp32.

        before: the output of other keys, to be merged, whose log-sum-exp is in lse: [T, H, V] fp32, contiguous; may be
            `out`.
        """
        if not self.q.shape[0]:
            return
        config = fwd_config(*self.chosen)
        key_norms = self._key_norms() if uses_score_bounds(*self.chosen) else None
        self._start(
            flash_attention_fwd_kernel, self.q.shape[0] // config.BLOCK_M, self.heads,
            (*self.inputs, key_norms, before, Rows.of(out), lse), config, IN_PLACE=before is out,
        )  # fmt: skip

    def rows(self, out: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Compute the backward kernels' inputs for each query, fp32: see `flash_attention_bwd_rows_kernel`."""
        tokens = self.q.shape[0]
        slots = tokens // ROW_BLOCK.value + self.pieces
        rows = torch.empty(2, self.heads, slots * ROW_BLOCK.value, dtype=torch.float32, device=self.q.device)
        if tokens:
            (grad,) = as_rows(grad, align=False)
            block = min(ROW_BLOCK.value, max(16, 4096 // self.sizes[1]))
            run(
                flash_attention_bwd_rows_kernel, slots * ROW_BLOCK.value // block * self.heads, Rows.of(out),
                Rows.of(grad), lse, rows, self.layout.q_offsets, self.pieces, tokens, H=self.heads, V=self.v_out,
                BLOCK=block, PAD_V=self.sizes[1],
            )  # fmt: skip
        return rows

    def dq(self, grad: torch.Tensor, rows: torch.Tensor, dq: torch.Tensor, *, before=None) -> None:
        """Write dq [T, H, D]: the gradient by these keys, plus `before` ([T, H, D] fp32, contiguous; may be dq)."""
        if not self.q.shape[0]:
            return
        (grad,), config = self.as_rows(grad), bwd_dq_config(*self.chosen)
        self._start(
            flash_attention_bwd_dq_kernel, self.q.shape[0] // config.BLOCK_M, self.heads,
            (*self.inputs, Rows.of(grad), rows, before, Rows.of(dq)), config, IN_PLACE=before is dq,
        )  # fmt: skip

    def dkv(self, grad, rows: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *, sums=None) -> None:
        """Write dk [S, Hkv, D] and dv [S, Hkv, V], plus the contiguous tensors `sums`, which may be dk and dv."""
        if not self.k.shape[0]:
            return
        (grad,), config = self.as_rows(grad), bwd_dkv_config(*self.chosen)
        self._start(
            flash_attention_bwd_dkv_kernel, self.k.shape[0] // config.BLOCK_N, self.kv_heads,
            (*self.inputs, Rows.of(grad), rows, Rows.of(dk), Rows.of(dv), *(sums or (None, None))), config,
        )  # fmt: skip


def _launch(q, k, v, *layout_and_options) -> Launch:
    q_offsets, k_offsets, q_starts, *mask, slopes, seed, left, right, scale, dropout = layout_and_options
    options = Options(scale, left, right, slopes, dropout, seed, Mask(*mask))
    return Launch(q, k, v, Layout(q_offsets, k_offsets, q_starts), options)


def _forward(q, k, v, *layout_and_options):
    launch = _launch(q, k, v, *layout_and_options)
    out, lse = empty_results(q, k, v)
    launch.forward(out, lse)
    return out, lse


def _backward(grad, q, k, v, *layout_and_options):
    *inputs, out, lse = layout_and_options
    launch = _launch(q, k, v, *inputs)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    rows = launch.rows(out, grad, lse)
    launch.dkv(grad, rows, dk, dv)
    launch.dq(grad, rows, dq)
    return [dq, dk, dv]


_SCHEMA = (
    f"Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, Tensor? q_starts, {MASK}, Tensor? slopes, "
    "Tensor? seed, SymInt left, SymInt right, float scale, float dropout"
)
flash_operator = Operator("flash", _SCHEMA, _forward, _backward, empty_results, "q k v", outputs=2, keep_output=True)
