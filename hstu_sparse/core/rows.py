"""Prepare tensors so that kernels can read their rows: adjacent channels, aligned to 16 bytes, heads padded with zeros.

Letters: T tokens, H heads.
"""

from typing import TypeVar

import torch
import triton
import triton.language as tl

from hstu_sparse.core import launch

# Tensors of one launch, and rows of a program's tile.
_MOST, _ROWS = 4, 32


@triton.jit
def _pad(source, target, stride_t, stride_h, r, R, H: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)[None, :]
    rows = source + ((r // H).to(tl.int64) * stride_t + (r % H) * stride_h)[:, None]
    inside = (r < R)[:, None]
    value = tl.load(rows + column, inside & (column < SIZE), 0.0)
    PADDED: tl.constexpr = (SIZE + 15) // 16 * 16
    tl.store(target + r[:, None].to(tl.int64) * PADDED + column, value, inside & (column < PADDED))


@triton.jit(do_not_specialize=["R"])
def pad_heads_kernel(
    a, b, c, d, to_a, to_b, to_c, to_d, a_stride_t, a_stride_h, b_stride_t, b_stride_h, c_stride_t, c_stride_h,
    d_stride_t, d_stride_h, R, H: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows of up to four tensors [T, H, size] into [T, H, size padded to 16]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _pad(a, to_a, a_stride_t, a_stride_h, r, R, H, A, WIDTH)
    if b is not None:
        _pad(b, to_b, b_stride_t, b_stride_h, r, R, H, B, WIDTH)
    if c is not None:
        _pad(c, to_c, c_stride_t, c_stride_h, r, R, H, C, WIDTH)
    if d is not None:
        _pad(d, to_d, d_stride_t, d_stride_h, r, R, H, D, WIDTH)


_Rows = TypeVar("_Rows", torch.Tensor, torch.Tensor | None)


def as_rows(*tensors: _Rows, align: bool = True) -> list[_Rows]:
    """Return tensors whose rows kernels can read; suitable tensors are returned unchanged.

    Channels become adjacent. With `align` rows can be read 16 bytes at a time: the last dimension is padded with zeros
    to a multiple of 16, and tensors that are not aligned, or are expanded (tensor descriptors do not support stride 0),
    are copied. The views of a fused projection are returned unchanged. A copy costs less than reading a head of e.g. 25
    two bytes at a time, once for every block; zeros change no sum.

    Args:
        tensors: [..., size], or None, which is returned. Heads [T, H, size] are padded by one kernel, up to four with
            the same T and H.
        align: False for kernels that read any row whose channels are adjacent.
    """
    if not align:
        return [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors]
    padded = iter(_padded([x for x in tensors if x is not None and x.shape[-1] % 16]))
    return [x if x is None else next(padded) if x.shape[-1] % 16 else _aligned(x) for x in tensors]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    *strides, last = x.stride()
    is_aligned = last == 1 and all(stride and stride % 16 == 0 for stride in strides) and x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _padded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pad the last dimension of the tensors to a multiple of 16, by one kernel if possible."""
    first = tensors[0] if tensors else None
    if (
        not 0 < len(tensors) <= _MOST
        or not first.numel()
        or any(x.dim() != 3 or x.shape[:2] != first.shape[:2] or x.stride(-1) != 1 for x in tensors)
    ):
        return [torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)) for x in tensors]
    tokens, heads, _ = first.shape
    padded = [x.new_empty(tokens, heads, launch.cdiv(x.shape[2], 16) * 16) for x in tensors]
    spare = [None] * (_MOST - len(tensors))
    strides = [stride for x in tensors for stride in x.stride()[:2]] + [0, 0] * len(spare)
    sizes = dict(zip("ABCD", [x.shape[2] for x in tensors] + [0] * len(spare)))
    width = launch.next_power_of_2(max(x.shape[2] for x in padded))
    launch.run(
        pad_heads_kernel, launch.cdiv(tokens * heads, _ROWS), *tensors, *spare, *padded, *spare, *strides,
        tokens * heads, H=heads, **sizes, WIDTH=width, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return padded
