"""Launches the dense kernels and registers them as torch.ops.hstu_sparse.dense_fwd and dense_bwd.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size.

The kernels: tiles.py (their schedule, and what they share), bias.py, bias_map.py, forward.py, bias_grad.py and
backward.py. Here are their tile sizes, their arguments and their launches.
"""

import functools
import math

import torch
import triton

from hstu_sparse._triton import INTERPRET, cdiv, padded_head, plain, require_runnable
from hstu_sparse.dense.backward import dense_attention_bwd_dkv_kernel, dense_attention_bwd_dq_kernel
from hstu_sparse.dense.bias import (
    MAX_BUCKETS,
    MOST_EDGES,
    NEAR,
    POSITION_MARGIN,
    bucket_cells,
)
from hstu_sparse.dense.bias_grad import dense_attention_gradients_kernel
from hstu_sparse.dense.bias_map import dense_attention_map_kernel
from hstu_sparse.dense.forward import dense_attention_fwd_kernel
from hstu_sparse.dense.tiles import dense_attention_schedule_kernel
from hstu_sparse.relative_bias import bucket_edges


@functools.lru_cache(maxsize=64)
def _buckets(num_buckets: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`bucket_cells`, and [num_buckets + 1 + MOST_EDGES] int64: the least integer in each bucket, then beyond all."""
    steps = [min(math.ceil(edge), 2**62) if edge < math.inf else 2**62 for edge in bucket_edges(num_buckets)]
    steps = [0, *steps, *[2**62] * MOST_EDGES.value]
    return bucket_cells(num_buckets).to(device), torch.tensor(steps, dtype=torch.int64, device=device)


def fwd_config(pad_d: int, pad_v: int, dtype: torch.dtype, features: set[str], arch: int) -> dict:
    """Tile sizes, warps and pipeline stages of the forward kernel: chosen, not tuned at run time, so that no batch pays
    for tuning. Measured on an H200 (docs/performance.md); for sm_80 only made to fit. `features`: those in use, of
    position, time, targets.
    """
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=64 if arch < 90 else 128, BLOCK_N=64, num_warps=8, num_stages=2 if arch >= 90 else 1)
    if arch < 90:
        return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
    # Few registers and little shared memory, so that two or three programs share a multiprocessor: while one waits for
    # its products, another computes SiLU and bias.
    if "time" in features:
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3, maxnreg=168)
    return dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=3, maxnreg=128)


def bwd_dq_config(pad_d: int, pad_v: int, dtype: torch.dtype, features: set[str], arch: int) -> dict:
    """The same for the kernel of dq and of the bias tables' gradients.

    WGMMA: made for sm_90 and its layout of a tile; q and do are held in registers.
    """
    sizes = functools.partial(dict, WGMMA=False)
    both = pad_d + pad_v
    if dtype == torch.float32:
        if both <= 64:
            return sizes(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1)
        return sizes(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)
    if max(pad_d, pad_v) > 128 or both <= 64:
        return sizes(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2 if arch >= 90 or both <= 64 else 1)
    if arch < 90:
        if "time" in features:
            return sizes(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
        return sizes(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1 if "position" in features else 2)
    return dict(BLOCK_M=64, BLOCK_N=32, WGMMA=True, num_warps=4, num_stages=3)


def bwd_dkv_config(pad_d: int, pad_v: int, dtype: torch.dtype, features: set[str], arch: int) -> dict:
    """The same for the kernel of dk and dv. TMA: queries come by tensor descriptor, which needs few registers."""
    if dtype == torch.float32:
        return dict(BLOCK_M=16, BLOCK_N=32, TMA=False, num_warps=4, num_stages=1)
    if max(pad_d, pad_v) > 128:
        return dict(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=8, num_stages=1 if arch < 90 else 2)
    if arch < 90:
        return dict(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=4, num_stages=2)
    if "time" in features:
        return dict(BLOCK_M=32, BLOCK_N=64, TMA=True, num_warps=4, num_stages=3)
    return dict(BLOCK_M=64, BLOCK_N=64, TMA=True, num_warps=4, num_stages=2)


def _precision(dtype: torch.dtype) -> str:
    """fp32 products are exact unless the user allowed tf32 for torch's own."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with rows that can be read 16 bytes at a time: a copy, heads padded with zeros, where they cannot.

    The copy costs less than reading a head of, say, 25 two bytes at a time, once for every block.
    """
    size = x.shape[2]
    if size % 16:
        return torch.nn.functional.pad(x, (0, 16 - size % 16))
    aligned = x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 and x.data_ptr() % 16 == 0
    return x if x.stride(2) == 1 and aligned else x.contiguous()


def _launch_with_static_memory(kernel, grid, *args, **kwargs):
    """kernel[grid](*args, **kwargs) for a kernel with static shared memory, which Triton does not know of.

    Triton asks the driver for more than 48 KB only if the dynamic part alone exceeds that. If the sum does, the first
    launch is refused; then it is asked for here, once per compiled kernel.
    """
    try:
        return kernel[grid](*args, **kwargs)
    except RuntimeError as error:
        if "invalid argument" not in str(error):
            raise
    import ctypes

    compiled = kernel.warmup(*args, grid=grid, **kwargs)
    compiled._init_handles()
    max_dynamic_shared_size = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(compiled.function), max_dynamic_shared_size, compiled.metadata.shared
    )
    if status:
        raise RuntimeError(f"cuFuncSetAttribute failed with CUDA error {status} for {kernel.__name__}")
    return kernel[grid](*args, **kwargs)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where the programs put their tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class _Launch:
    """What the forward and backward launches share: arguments of the operator in the kernels' terms."""

    def __init__(
        self, q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps,
        query_timestamps, prepared=None,
    ):  # fmt: skip
        require_runnable(q, "hstu_attention")
        if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"hstu_attention: the kernels take fp16, bf16 and fp32, got {q.dtype}; use backend='reference'"
            )
        for name, size in (("D", q.shape[2]), ("V", v.shape[2])):
            if not 1 <= size <= 256:
                raise ValueError(
                    f"hstu_attention: the kernels take head sizes up to 256, got {name}={size}; use backend='reference'"
                )
        self.d_out, self.v_out = q.shape[2], v.shape[2]
        self.q, self.k, self.v = _rows(q), _rows(k), _rows(v)
        self.seq_offsets, self.max_seq_len, self.alpha = seq_offsets.contiguous(), max_seq_len, alpha
        self.num_targets, self.window_size = num_targets, window_size
        self.tables = position_bias, time_bias
        self.timestamps, self.query_timestamps = (
            (None, None) if time_bias is None else (timestamps.contiguous(), query_timestamps.contiguous())
        )
        self.total, self.heads, self.d = self.q.shape
        self.v_size = self.v.shape[2]
        self.empty = self.total == 0 or seq_offsets.shape[0] == 1
        self.biased = position_bias is not None or time_bias is not None
        # Differences of int64 seconds never get past bucket 145, so a longer table has a tail that is never read.
        self.num_buckets = 0 if time_bias is None else min(time_bias.shape[0] - 1, MAX_BUCKETS)
        # What depends on the batch and the tables alone: the forward pass hands it on to the backward pass.
        self.prepared: dict = {} if prepared is None else prepared
        # The bucket of pairs that are not seen, behind the table and what is read beyond its end.
        self.hidden = self.num_buckets + 1 + MOST_EDGES.value
        self.cells, self.steps = (None, None) if time_bias is None else _buckets(self.num_buckets, q.device)

    def constants(self) -> dict:
        return dict(
            H=self.heads,
            D=self.d,
            V=self.v_size,
            D_OUT=self.d_out,
            V_OUT=self.v_out,
            HAS_TARGETS=self.num_targets is not None,
            HAS_WINDOW=self.window_size > 0,
            HAS_POSITION=self.tables[0] is not None,
            HAS_TIME=self.tables[1] is not None,
            FAST=self.q.dtype != torch.float32,
            PRECISION=_precision(self.q.dtype),
            PAD_D=padded_head(self.d),
            PAD_V=padded_head(self.v_size),
        )

    def choose(self, config) -> dict:
        arch = 90 if not self.q.is_cuda else 10 * torch.cuda.get_device_capability(self.q.device)[0]
        sizes = padded_head(self.d), padded_head(self.v_size)
        given = {"position": self.tables[0], "time": self.tables[1], "targets": self.num_targets}
        return config(*sizes, self.q.dtype, {name for name, x in given.items() if x is not None}, arch)

    def tiles(self, own: int, other: int, own_is_query: bool) -> tuple:
        """A kernel's arguments that depend on its tiles: (the schedule, (the tables, what finds their entries)).

        (position_bias, time_bias, cells, steps, q_times, q_offset, k_times, k_offset, tile_buckets, runs, near, row, T)
        """
        key = own, other, own_is_query
        maps = self.prepared.get(key, (None, None, None, 0))
        if self.biased and ("tables" not in self.prepared or (self.tables[1] is not None and maps[0] is None)):
            maps = self._map(*key)
        if own not in self.prepared:
            num_seqs = self.seq_offsets.shape[0] - 1
            self.prepared[own] = tiles = self._new_schedule(own)
            dense_attention_schedule_kernel[(num_seqs,)](
                self.seq_offsets, tiles, num_seqs, tiles.shape[0], BLOCK=own, CHUNK=256
            )
        tables, queries, keys = (self.prepared.get(name, (None, None)) for name in ("tables", "queries", "keys"))
        return self.prepared[own], (*tables, self.cells, self.steps, *queries, *keys, *maps, self.total)

    def _new_schedule(self, block: int) -> torch.Tensor:
        """Room for [slots, 2] int32: (sequence, block) of every tile, longest sequences first, then (-1, *)."""
        return torch.empty(self._slots(block), 2, dtype=torch.int32, device=self.q.device)

    def _slots(self, block: int) -> int:
        """A bound of the number of tiles that needs no lengths."""
        return self.total // block + self.seq_offsets.shape[0] - 1

    def _map(self, own: int, other: int, own_is_query: bool) -> tuple:
        """(tile_buckets, runs, near, row) of tiles of a size; the first time also prepares what serves all sizes."""
        new = functools.partial(torch.empty, device=self.q.device)
        num_seqs, slots = self.seq_offsets.shape[0] - 1, self._slots(own)
        position, time = self.tables
        programs, maps = 0, (None, None, None, 0)
        if time is not None:
            programs = slots
            row = cdiv(min(self.max_seq_len, self.total), other) + 2  # two more, since the kernels read ahead
            near = new(slots, min(NEAR.value, row), own * other, dtype=torch.uint8)
            maps = new(slots * row, dtype=torch.int16), new(slots, dtype=torch.int32), near, row
            # Kept for the backward pass where dq's tiles are the same, and unless the bytes of far blocks are many.
            dq = self.choose(bwd_dq_config)
            if own_is_query and (own, other) == (dq["BLOCK_M"], dq["BLOCK_N"]) and 2 * slots * row <= near.numel():
                self.prepared[own, other, own_is_query] = maps
        tiles, half_position, half_time, table_programs = None, None, None, 0
        keys, queries = (None, None), (None, None)
        if "tables" not in self.prepared:
            self.prepared[own] = tiles = self._new_schedule(own)
            width = 0
            if position is not None:
                width = self.max_seq_len + 2 * POSITION_MARGIN
                position, half_position = position.contiguous(), new(width, dtype=torch.float32)
            if time is not None:
                width = max(width, self.hidden + 1)
                time, half_time = time.contiguous(), new(self.hidden + 1, dtype=torch.float32)
                keys = new(2, self.total, dtype=torch.float32), new(self.total, dtype=torch.int32)
                self.prepared["keys"] = self.prepared["queries"] = keys
                # By role, not address: a hook may hand the backward pass copies of what forward saved.
                if self.query_timestamps.data_ptr() != self.timestamps.data_ptr():
                    queries = new(2, self.total, dtype=torch.float32), new(self.total, dtype=torch.int32)
                    self.prepared["queries"] = queries
            self.prepared["tables"] = None if position is None else half_position[POSITION_MARGIN:], half_time
            table_programs = cdiv(width, 1024)
            programs += num_seqs + table_programs
        else:
            position, time = None, None
        dense_attention_map_kernel[(programs,)](
            self.seq_offsets, num_seqs, slots, self.num_targets, self.window_size, self.timestamps,
            self.query_timestamps, self.cells, *maps, tiles, position, time, half_position, half_time,
            table_programs, *keys, *queries, self.total, HAS_TARGETS=self.num_targets is not None,
            HAS_WINDOW=self.window_size > 0, OWN=own, OTHER=other, OWN_IS_QUERY=own_is_query, HIDDEN=self.hidden,
            N=0 if position is None else self.max_seq_len, TIMES=self.num_buckets + 1, MARGIN=POSITION_MARGIN,
            CHUNK=16, num_warps=8,
        )  # fmt: skip
        return maps

    def forward(self, config: dict | None = None) -> torch.Tensor:
        out = torch.empty(self.total, self.heads, self.v_out, dtype=self.q.dtype, device=self.q.device)
        if self.empty:
            return out.zero_()
        config = config or self.choose(fwd_config)
        tiles, bias = self.tiles(config["BLOCK_M"], config["BLOCK_N"], True)
        dense_attention_fwd_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, out, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *out.stride()[:2], self.seq_offsets, tiles, self.num_targets, self.window_size, 0.5 * self.alpha,
            1.0 / self.max_seq_len, *bias, **self.constants(), **config,
        )  # fmt: skip
        return out

    def backward(self, do: torch.Tensor, dq_config: dict | None = None, dkv_config: dict | None = None) -> tuple:
        """(dq, dk, dv, position_bias's gradient or None, time_bias's or None)."""
        dq, dk, dv = (
            torch.empty(self.total, self.heads, size, dtype=self.q.dtype, device=self.q.device)
            for size in (self.d_out, self.d_out, self.v_out)
        )
        position, time = self.tables
        grads = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self.tables]
        if self.empty:
            return dq, dk, dv, *(None if x is None else x.zero_() for x in grads)
        do = _rows(do)
        # Integers, whose sums do not depend on the order of additions; fp32 needs more digits than they have.
        exact = self.biased and self.q.dtype != torch.float32 and not INTERPRET
        copies, width = 1 if INTERPRET else 64, self.hidden
        sizes = 0 if position is None else self.max_seq_len, 0 if time is None else copies * width
        position_sums, time_sums, greatest = None, None, None
        if self.biased:
            sums = torch.zeros(sum(sizes) + 1, dtype=torch.int64 if exact else torch.float32, device=do.device)
            position_sums = None if position is None else sums[: sizes[0]]
            time_sums = None if time is None else sums[sizes[0] : -1]
            greatest = sums[-1:].view(torch.float32) if exact else None
        self._backward_dkv(do, dk, dv, greatest, dkv_config or self.choose(bwd_dkv_config))
        config = dq_config or self.choose(bwd_dq_config)
        self._backward_dq(do, dq, position_sums, time_sums, greatest, copies, width, config)
        if self.biased:
            times = 0 if time is None else time.shape[0]
            dense_attention_gradients_kernel[(cdiv(max(sizes[0], times), 128),)](
                position_sums, time_sums, *grads, greatest, 0.5 / self.max_seq_len, N=self.max_seq_len,
                TIMES=self.num_buckets + 1, ALL=times, TABLE=width, COPIES=copies, BLOCK=128,
            )  # fmt: skip
        return dq, dk, dv, *grads

    def _backward_dq(self, do, dq, position_sums, time_sums, greatest, copies, width, config):
        tiles, (position_bias, time_bias, *bias) = self.tiles(config["BLOCK_M"], config["BLOCK_N"], True)
        # A cell of the time bias's histogram takes at most so many terms, of 21 bits before the shift.
        terms = config["BLOCK_M"] * (min(self.max_seq_len, self.total) + config["BLOCK_N"]) // 32
        time_shift = max(0, terms.bit_length() - 10)
        _launch_with_static_memory(
            dense_attention_bwd_dq_kernel, (tiles.shape[0] * self.heads,),
            self.q, self.k, self.v, do, dq, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *do.stride()[:2], *dq.stride()[:2], self.seq_offsets, tiles, self.num_targets, self.window_size,
            0.5 * self.alpha, 0.5 / self.max_seq_len, self.alpha, position_bias, time_bias, position_sums, time_sums,
            greatest, time_shift, *bias, **self.constants(), COPIES=copies, TABLE=width, **config,
        )  # fmt: skip

    def _backward_dkv(self, do, dk, dv, greatest, config):
        tiles, (position_bias, time_bias, *bias) = self.tiles(config["BLOCK_N"], config["BLOCK_M"], False)
        if config["TMA"]:
            triton.set_allocator(_scratch)
        dense_attention_bwd_dkv_kernel[(tiles.shape[0] * self.heads,)](
            self.q, self.k, self.v, do, dk, dv, *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2],
            *do.stride()[:2], *dk.stride()[:2], *dv.stride()[:2], self.seq_offsets, tiles,
            self.num_targets, self.window_size, 0.5 * self.alpha, 0.5 / self.max_seq_len, self.alpha,
            position_bias, time_bias, greatest, *bias, **self.constants(), **config,
        )  # fmt: skip


def _forward(*arguments, prepared: dict | None = None) -> torch.Tensor:
    """[T, H, V]."""
    return _Launch(*arguments, prepared=prepared).forward()


def _backward(grad: torch.Tensor, *arguments, prepared: dict | None = None) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and the tables' gradients (empty where there is no table)."""
    found = _Launch(*arguments, prepared=prepared).backward(grad)
    return tuple(grad.new_empty(0) if x is None else x for x in found)


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, *rest = arguments
        ctx.save_for_backward(q, k, v, seq_offsets, num_targets, *rest)
        ctx.options = max_seq_len, alpha, window_size
        ctx.prepared = {}
        if plain(q):
            return _forward(*arguments, prepared=ctx.prepared)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.hstu_sparse.dense_fwd.default(*arguments)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, seq_offsets, num_targets, *rest = ctx.saved_tensors
        max_seq_len, alpha, window_size = ctx.options
        arguments = grad, q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, *rest
        if plain(grad):
            if torch.is_grad_enabled():
                raise RuntimeError("hstu_attention has no second derivative in Triton: use backend='reference'")
            found = _backward(*arguments, prepared=dict(ctx.prepared))
        else:
            found = torch.ops.hstu_sparse.dense_bwd.default(*arguments)
        dq, dk, dv, *tables = found
        tables = (None if table is None else x for table, x in zip(rest, tables))
        return dq, dk, dv, None, None, None, None, None, *tables, None, None


_library = torch.library.Library("hstu_sparse", "FRAGMENT")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor seq_offsets, SymInt max_seq_len, float alpha, Tensor? num_targets, "
    "SymInt window_size, Tensor? position_bias, Tensor? time_bias, Tensor? timestamps, Tensor? query_timestamps"
)
_library.define(f"dense_fwd({_ARGUMENTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"dense_bwd(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
for _device in ("CPU", "CUDA"):
    _library.impl("dense_fwd", _forward, _device)
    _library.impl("dense_bwd", _backward, _device)
_library.impl("dense_fwd", _DenseAttention.apply, "Autograd")


@functools.partial(torch.library.register_fake, "hstu_sparse::dense_fwd", lib=_library)
def _(q, k, v, *_):
    return q.new_empty(v.shape)


@functools.partial(torch.library.register_fake, "hstu_sparse::dense_bwd", lib=_library)
def _(grad, q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, *_):
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        *(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (position_bias, time_bias)),
    )


def hstu_attention_triton(q, k, v, seq_offsets, max_seq_len, *, alpha, num_targets, window_size, bias):
    """Arguments and result as `hstu_sparse.hstu_attention`, on CUDA or in Triton's interpreter."""
    arguments = (q, k, v, seq_offsets, max_seq_len, alpha, num_targets, window_size, *bias)
    if torch.compiler.is_compiling():
        return torch.ops.hstu_sparse.dense_fwd.default(*arguments)
    if not torch.is_grad_enabled() and plain(q):
        return _forward(*arguments)
    return _DenseAttention.apply(*arguments)
