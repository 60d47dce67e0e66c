"""Heads padded to rows that can be read 16 bytes at a time, several tensors by one kernel.

Letters: T tokens, H heads.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse import launch

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
    """ROWS rows of each of four [T, H, size], as far as they are given, into [T, H, size padded to 16]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _pad(a, to_a, a_stride_t, a_stride_h, r, R, H, A, WIDTH)
    if b is not None:
        _pad(b, to_b, b_stride_t, b_stride_h, r, R, H, B, WIDTH)
    if c is not None:
        _pad(c, to_c, c_stride_t, c_stride_h, r, R, H, C, WIDTH)
    if d is not None:
        _pad(d, to_d, d_stride_t, d_stride_h, r, R, H, D, WIDTH)


def padded(*given: torch.Tensor) -> list[torch.Tensor]:
    """`launch.aligned` of up to four [T, H, size] of the same T and H, by one kernel where heads have to be padded."""
    wanted = [x for x in given if x.shape[-1] % 16 and x.stride(-1) == 1]
    if not wanted or len(given) > _MOST or not given[0].shape[0]:
        return [launch.aligned(x) for x in given]
    tokens, heads, _ = given[0].shape
    made = [x.new_empty(tokens, heads, launch.cdiv(x.shape[2], 16) * 16) for x in wanted]
    spare = [None] * (_MOST - len(wanted))
    strides = [stride for x in wanted for stride in x.stride()[:2]] + [0, 0] * len(spare)
    sizes = dict(zip("ABCD", [x.shape[2] for x in wanted] + [0] * len(spare)))
    width = launch.next_power_of_2(max(x.shape[2] for x in made))
    launch.run(
        pad_heads_kernel, launch.cdiv(tokens * heads, _ROWS), *wanted, *spare, *made, *spare, *strides, tokens * heads,
        H=heads, **sizes, WIDTH=width, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    done = iter(made)
    return [next(done) if any(x is y for y in wanted) else launch.aligned(x) for x in given]
