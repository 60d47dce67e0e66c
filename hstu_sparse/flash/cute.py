"""Call FlashAttention-4, whose kernels are written in CuTe DSL, and check what it supports.

The extra `cute` installs it (flash-attn-4 and nvidia-cutlass-dsl); the first call imports it. CuTe DSL compiles a
kernel in the first call with a new dtype, pair of head sizes, kind of mask or number of heads that share keys, which
takes seconds.

The backward pass of FlashAttention-4 sums dq in memory, and also dk and dv if heads share keys. The calls here use its
deterministic form: each tile waits until the previous one has been added, so that gradients have the same bits in every
run. This needs a counter of 4 bytes for each sequence, each head and each tile of 64 tokens of the whole batch.

Letters: T, S tokens of queries and of keys, B sequences, H heads of queries, Hkv of keys and values, D query/key and V
value head size.
"""

import functools
import importlib
import math
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

import torch

from hstu_sparse.core.registration import Operator
from hstu_sparse.flash.reference import Options, empty_results

DISTRIBUTION = "flash-attn-4"
DTYPES = (torch.float16, torch.bfloat16)
# Compute capabilities from 9.0 on have a backward pass, those below 12.0 a deterministic one.
MIN_ARCH, END_ARCH = 90, 120
# 4.0.0b36 computes wrong gradients for heads of 16 (compute capability 9.0); 24 is the smallest size that was verified.
MIN_HEAD_SIZE = 24
# Head size -> average sequence length from which FlashAttention-4, with its deterministic backward pass, was measured
# to be faster than the Triton kernels on an H200 (docs/ring.md, docs/dense.md).
FASTER_FROM: dict[int, int] = {64: 512, 128: 256, 256: 4096}


def _installed() -> bool:
    try:
        metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True


INSTALLED = _installed()


def _architecture(device: int) -> int:
    """Return the compute capability of a CUDA device, a constant under torch.compile."""
    from hstu_sparse.flash.capability import constant_architecture  # imports torch._dynamo

    return constant_architecture(device)


def unsupported_feature(q: torch.Tensor, value_size: int, options: Options) -> str | None:
    """Return the name of the first feature of a call that FlashAttention-4 does not support, or None.

    Args:
        q: [..., D]. A CPU tensor is treated as if it were on compute capability 9.0.
        value_size: V.
    """
    if options.dropout:
        return "dropout"
    if options.slopes is not None:
        return "alibi_slopes"
    if options.mask.first_option is not None:
        return options.mask.first_option
    if q.dtype not in DTYPES:
        return str(q.dtype)
    size = q.shape[-1]
    arch = _architecture(q.get_device()) if q.is_cuda else MIN_ARCH
    most = 256 if arch < 100 or size == 256 else 128
    if size % 8 or size != value_size or not MIN_HEAD_SIZE <= size <= most:
        return f"head sizes D={size}, V={value_size} (only D = V, multiples of 8 from {MIN_HEAD_SIZE} to {most})"
    return None


def check_cute(op: str, q: torch.Tensor, value_size: int, options: Options) -> None:
    """Raise ValueError if backend="cute" cannot run."""
    if (feature := unsupported_feature(q, value_size, options)) is not None:
        raise ValueError(f"{op}: backend='cute' does not support {feature}; use backend='triton'")
    check_available(op, q.device)


def check_available(op: str, device: torch.device) -> None:
    """Raise ValueError if FlashAttention-4 is not installed or does not run on the device."""
    if device.type != "cuda":
        raise ValueError(f"{op}: backend='cute' needs CUDA tensors, got {device}; use backend='reference'")
    if not INSTALLED:
        raise ValueError(f"{op}: backend='cute' needs {DISTRIBUTION} (the extra `cute`); use backend='triton'")
    arch = _architecture(torch.cuda.current_device() if device.index is None else device.index)
    if not MIN_ARCH <= arch < END_ARCH:
        raise ValueError(
            f"{op}: backend='cute' needs compute capability 9.0 to 11.x, got {arch / 10}; use backend='triton'"
        )


def faster_with_cute(q: torch.Tensor, value_size: int, size: tuple, options: Options) -> bool:
    """Return whether "auto" chooses FlashAttention-4: it is installed, supports the call and was measured to be faster.

    Args:
        q: [T, H, D].
        value_size: V.
        size: (number of tokens, number of sequences): their quotient decides, since the lengths are on the device.
    """
    if not INSTALLED or not q.is_cuda or options.left >= 0 or options.right > 0:
        return False
    tokens, sequences = size
    if tokens < sequences * FASTER_FROM.get(value_size, math.inf):
        return False
    return MIN_ARCH <= _architecture(q.get_device()) < END_ARCH and unsupported_feature(q, value_size, options) is None


@functools.cache
def _interface():
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # a broken installation may raise anything
        raise RuntimeError(
            f"{DISTRIBUTION} is installed but cannot be imported ({type(error).__name__}: {error}): "
            "install it again, or use backend='triton'"
        ) from error


class RowRanges(NamedTuple):
    """A contiguous range of rows of each sequence, of queries or of keys.

    begins   [B+1] int32: the begin of each range, and the end of the last one
    lengths  [B] int32: the length of each range; None if it ends where the next one begins
    """

    begins: torch.Tensor
    lengths: torch.Tensor | None = None


class CuteCall(NamedTuple):
    """The rows and the mask of a call: row i of n queries sees row j of m keys if -left <= j - i - (m - n) <= right.

    None stands for no bound. Results of rows outside of q and k are not written.
    """

    q: RowRanges
    k: RowRanges
    left: int | None = None
    right: int | None = None

    def keywords(self, scale: float) -> dict:
        return dict(
            softmax_scale=scale,
            cu_seqlens_q=self.q.begins,
            cu_seqlens_k=self.k.begins,
            seqused_q=self.q.lengths,
            seqused_k=self.k.lengths,
            window_size_left=self.left,
            window_size_right=self.right,
        )


def _unexpanded(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if x is expanded, since kernels would be recompiled for a stride of 0."""
    return x.contiguous() if 0 in x.stride() else x


def forward(q, k, v, call: CuteCall, scale: float, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out [T, H, V], dtype of q, and lse [H, T] fp32 of the call's queries."""
    q, k, v = map(_unexpanded, (q, k, v))
    _interface()._flash_attn_fwd(q, k, v, **call.keywords(scale), return_lse=True, out=out, lse=lse)


def backward(grad, q, k, v, out, lse, call: CuteCall, scale: float, gradients: Sequence[torch.Tensor]) -> None:
    """Write the call's part of dq, dk and dv, given the output and log-sum-exp over all keys."""
    dq, dk, dv = gradients
    grad, q, k, v = map(_unexpanded, (grad, q, k, v))
    _interface()._flash_attn_bwd(
        q, k, v, out, grad, lse, **call.keywords(scale), deterministic=True, dq=dq, dk=dk, dv=dv
    )  # fmt: skip


def bound(size: int) -> int | None:
    """Convert a bound of a window: FlashAttention-4 takes None for no bound."""
    return None if size < 0 else size


def _whole_call(q_offsets, k_offsets, left, right) -> CuteCall:
    q, k = (RowRanges(offsets.to(torch.int32)) for offsets in (q_offsets, k_offsets))
    return CuteCall(q, k, bound(left), bound(right))


def _forward(q, k, v, q_offsets, k_offsets, left, right, scale):
    out, lse = empty_results(q, k, v)
    forward(q, k, v, _whole_call(q_offsets, k_offsets, left, right), scale, out, lse)
    return out, lse


def _backward(grad, q, k, v, *others):
    *layout, scale, out, lse = others
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    backward(grad, q, k, v, out, lse, _whole_call(*layout), scale, gradients)
    return gradients


_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, SymInt left, SymInt right, float scale"
flash_cute_operator = Operator(
    "flash_cute", _SCHEMA, _forward, _backward, empty_results, "q k v", outputs=2, keep_output=True
)
