"""Kernels of the tree itself: means of children upwards, gradients from parents to children downwards.

Letters: T tokens of the batch, B sequences, Hkv key/value heads (H here), D query/key and V value head size, r
compression_rate (RATE). Slots are numbered as `layout.py` says; SIZE = r^l is the number of tokens below a node.
"""

import triton
import triton.language as tl


@triton.jit
def locate_slots(offsets, slot, B, SIZE):
    """(sequence, its first token, its length, node) of each slot of a layer; the node may lie past the last.

    SIZE is 1 for the tokens themselves, which have no unused slots: then empty sequences are stepped over.
    """
    low = tl.zeros_like(slot)
    high = low + B - 1
    while tl.max(high - low, 0) > 0:
        middle = (low + high + 1) // 2
        first = tl.load(offsets + middle).to(tl.int64)
        right = first // SIZE + tl.where(SIZE == 1, 0, middle) <= slot
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    start = tl.load(offsets + low).to(tl.int64)
    length = (tl.load(offsets + low + 1).to(tl.int64) - start).to(tl.int32)
    return low, start, length, (slot - start // SIZE - tl.where(SIZE == 1, 0, low)).to(tl.int32)


@triton.jit(do_not_specialize=["B", "SIZE", "slots", "base", "below", "total"])
def htree_pool_fwd_kernel(
    x, nodes, offsets, x_stride_t, x_stride_h, B, SIZE, slots, base, below, total,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, RATE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """ROWS means of one head, from the layer below: from the tokens x [T, H, WIDTH], or from nodes [H, total, WIDTH].

    SIZE tokens stand below a node of this layer, whose slots begin at `base` of the buffer, the layer below at `below`.
    """
    slot, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    b, start, length, p = locate_slots(offsets, slot, B, SIZE)
    size = SIZE // RATE
    children = tl.minimum((length + size - 1) // size - p * RATE, RATE)
    live = (slot < slots) & (children > 0)
    column = tl.arange(0, PADDED)[None, :]
    if TOKENS:
        row, stride = start + p * RATE, x_stride_t
        source = x + h * x_stride_h
    else:
        row, stride = below + start // size + b + p * RATE, WIDTH
        source = nodes + h * total * WIDTH
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for i in range(0, RATE):
        inside = (live & (i < children))[:, None] & (column < WIDTH)
        sums += tl.load(source + (row + i)[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    mean = sums / tl.maximum(children, 1)[:, None].to(tl.float32)
    target = nodes + (h * total + base + slot)[:, None] * WIDTH + column
    tl.store(target, mean.to(nodes.dtype.element_ty), mask=live[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=["B", "SIZE", "slots", "base", "above", "total", "unit"])
def htree_push_bwd_kernel(
    grads, out, offsets, unit, B, SIZE, slots, base, above, total,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, RATE: tl.constexpr, ROWS: tl.constexpr,
    PARENTS: tl.constexpr, TOKENS: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """ROWS nodes of one head take their share of their parent's gradient; at the tokens the result goes to `out`.

    grads [H, total, WIDTH] holds the tokens and then the layers above; with FIXED in whole multiples of 1 / unit.
    The layer's slots begin at `base`, the parents' at `above`, and SIZE tokens stand below a node of this layer.
    """
    slot, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    b, start, length, p = locate_slots(offsets, slot, B, SIZE)
    count = (length + SIZE - 1) // SIZE
    live = (slot < slots) & (p < count)
    column = tl.arange(0, PADDED)[None, :]
    inside = live[:, None] & (column < WIDTH)
    source = grads + h * total * WIDTH
    here = source + (base + slot)[:, None].to(tl.int64) * WIDTH + column
    grad = tl.load(here, mask=inside, other=0)
    if PARENTS:
        parent = above + start // (SIZE * RATE) + b + p // RATE
        family = tl.minimum(count - p // RATE * RATE, RATE)
        share = tl.load(source + parent[:, None] * WIDTH + column, mask=inside, other=0)
    if FIXED:
        # Exact sums: what a division by the number of children leaves over is less than a unit.
        if PARENTS:
            grad += share // tl.maximum(family, 1)[:, None]
        grad_float = grad.to(tl.float32) / tl.load(unit)
    else:
        if PARENTS:
            grad += share / tl.maximum(family, 1)[:, None].to(tl.float32)
        grad_float = grad
    if TOKENS:
        target = out + (slot[:, None].to(tl.int64) * tl.num_programs(1) + h) * WIDTH + column
        tl.store(target, grad_float.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(here, grad, mask=inside)
