"""Merge the parts of a history that several programs attended to."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "SPLITS"])
def merge_parts_kernel(
    parts, part_lse, out, lse, rows, SPLITS, V: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    SOFTMAX: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge parts [SPLITS, rows, V] fp32 into out [rows, V]: their sum, or for softmax their mean weighted by
    exp(part_lse).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    real = row < rows
    column = tl.arange(0, PAD)[None, :]
    inside = real[:, None] & (column < V)
    total = tl.zeros([ROWS, PAD], tl.float32)
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for split in range(SPLITS):
        at = split * rows.to(tl.int64) + row
        x = tl.load(parts + at[:, None] * V + column, inside, 0.0)
        if SOFTMAX:
            split_lse = tl.load(part_lse + at, real, float("-inf"))
            new = tl.maximum(greatest, split_lse)
            safe = tl.where(new == float("-inf"), 0.0, new)
            factor, share = tl.exp(greatest - safe), tl.exp(split_lse - safe)
            total = total * factor[:, None] + x * share[:, None]
            weight = weight * factor + share
            greatest = new
        else:
            total += x
    if SOFTMAX:
        divisor = tl.where(weight == 0.0, 1.0, weight)
        total = total / divisor[:, None]
        if LSE:
            tl.store(lse + row, tl.where(weight == 0.0, float("-inf"), greatest + tl.log(divisor)), real)
    tl.store(out + row[:, None] * V + column, total.to(out.dtype.element_ty), inside)
