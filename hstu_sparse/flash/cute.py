"""Call FlashAttention-4, whose kernels are written in CuTe DSL: its limits, when it is faster, its calls.

FlashAttention-4 is the extra `cute` (flash-attn-4 and nvidia-cutlass-dsl) and is imported by the first call that uses
it. CuTe DSL compiles a kernel for each dtype, pair of head sizes, kind of mask and number of heads that share keys in
the first call that needs it, which takes seconds.

Its backward pass adds the parts of dq, and of dk and dv if heads share keys, atomically. The calls here always use the
deterministic form, in which a tile waits until the tile before it has added its part: gradients have the same bits in
every run. That needs a counter of 4 bytes for each sequence, head and tile of 64 tokens, of the whole batch each.

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
# Compute capabilities: below there is no backward pass; from 12.0 on it is not deterministic.
LEAST, BEYOND = 90, 120
# Gradients of 4.0.0b36 are wrong for heads of 16 (compute capability 9.0); 24 is the smallest size verified as correct.
LEAST_SIZE = 24
# Head sizes whose forward and deterministic backward were measured against the Triton kernels, through the functions
# here, on an H200 (docs/ring.md) -> tokens of the average sequence from which it is faster.
FASTER_FROM: dict[int, int] = {64: 512, 128: 256}


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


def lacks(q: torch.Tensor, value_size: int, options: Options) -> str | None:
    """Return the name of the first feature of a problem that FlashAttention-4 does not support, or None.

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
    arch = _architecture(q.get_device()) if q.is_cuda else LEAST
    most = 256 if arch < 100 or size == 256 else 128
    if size % 8 or size != value_size or not LEAST_SIZE <= size <= most:
        return f"head sizes D={size}, V={value_size} (only D = V, multiples of 8 from {LEAST_SIZE} to {most})"
    return None


def check_cute(op: str, q: torch.Tensor, value_size: int, options: Options) -> None:
    """Raise ValueError, in one line, if backend="cute" cannot run."""
    if (lacking := lacks(q, value_size, options)) is not None:
        raise ValueError(f"{op}: backend='cute' does not take {lacking}; use backend='triton'")
    check_available(op, q.device)


def check_available(op: str, device: torch.device) -> None:
    """Raise ValueError if FlashAttention-4 is not installed or does not run on the device."""
    if device.type != "cuda":
        raise ValueError(f"{op}: backend='cute' needs CUDA tensors, got {device}; use backend='reference'")
    if not INSTALLED:
        raise ValueError(f"{op}: backend='cute' needs {DISTRIBUTION} (the extra `cute`); use backend='triton'")
    arch = _architecture(torch.cuda.current_device() if device.index is None else device.index)
    if not LEAST <= arch < BEYOND:
        raise ValueError(f"{op}: backend='cute' needs compute capability 9.0 to 11.x, got {arch / 10}; use 'triton'")


def faster_with_cute(q: torch.Tensor, value_size: int, size: tuple, options: Options) -> bool:
    """Return whether `auto` uses FlashAttention-4: installed, supporting the problem, and measured to be faster.

    Args:
        q: [T, H, D].
        value_size: V.
        size: numbers of tokens and of sequences, whose quotient decides, since the lengths are on the device.
    """
    if not INSTALLED or not q.is_cuda or options.left >= 0 or options.right > 0:
        return False
    tokens, sequences = size
    if tokens < sequences * FASTER_FROM.get(value_size, math.inf):
        return False
    return LEAST <= _architecture(q.get_device()) < BEYOND and lacks(q, value_size, options) is None


@functools.cache
def _interface():
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # a broken installation may raise anything
        raise RuntimeError(
            f"{DISTRIBUTION} is installed but cannot be imported ({type(error).__name__}: {error}): "
            "install it again, or use backend='triton'"
        ) from error


class Rows(NamedTuple):
    """A contiguous range of rows of each sequence, of queries or of keys.

    begins   [B+1] int32: the begin of each range, and the end of the last one
    lengths  [B] int32: their lengths, None if each ends at the next one's begin
    """

    begins: torch.Tensor
    lengths: torch.Tensor | None = None


class Part(NamedTuple):
    """The arguments of a call: row i of n queries sees row j of m keys if -left <= j - i - (m - n) <= right.

    None is no bound. q, k: the rows that the call processes; the results of other rows are not written.
    """

    q: Rows
    k: Rows
    left: int | None = None
    right: int | None = None

    def arguments(self, scale: float) -> dict:
        return dict(
            softmax_scale=scale,
            cu_seqlens_q=self.q.begins,
            cu_seqlens_k=self.k.begins,
            seqused_q=self.q.lengths,
            seqused_k=self.k.lengths,
            window_size_left=self.left,
            window_size_right=self.right,
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if it was expanded, since kernels would be compiled again for that."""
    return x.contiguous() if 0 in x.stride() else x


def forward(q, k, v, part: Part, scale: float, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out [T, H, V], dtype of q, and lse [H, T] fp32 of the part's queries."""
    q, k, v = map(_dense, (q, k, v))
    _interface()._flash_attn_fwd(q, k, v, **part.arguments(scale), return_lse=True, out=out, lse=lse)


def backward(grad, q, k, v, out, lse, part: Part, scale: float, gradients: Sequence[torch.Tensor]) -> None:
    """Write the gradients dq, dk and dv from these queries and keys, given the final out and lse."""
    dq, dk, dv = gradients
    grad, q, k, v = map(_dense, (grad, q, k, v))
    _interface()._flash_attn_bwd(
        q, k, v, out, grad, lse, **part.arguments(scale), deterministic=True, dq=dq, dk=dk, dv=dv
    )  # fmt: skip


def bound(size: int) -> int | None:
    """Convert a bound of a window for FlashAttention-4: None for no bound."""
    return None if size < 0 else size


def _part(q_offsets, k_offsets, left, right) -> Part:
    return Part(Rows(q_offsets.to(torch.int32)), Rows(k_offsets.to(torch.int32)), bound(left), bound(right))


def _forward(q, k, v, q_offsets, k_offsets, left, right, scale):
    out, lse = empty_results(q, k, v)
    forward(q, k, v, _part(q_offsets, k_offsets, left, right), scale, out, lse)
    return out, lse


def _backward(grad, q, k, v, *others):
    *layout, scale, out, lse = others
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    backward(grad, q, k, v, out, lse, _part(*layout), scale, gradients)
    return gradients


_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, SymInt left, SymInt right, float scale"
flash_cute_operator = Operator(
    "flash_cute", _SCHEMA, _forward, _backward, empty_results, "q k v", outputs=2, keep_output=True
)
