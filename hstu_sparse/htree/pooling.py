"""Define the kernels of the tree itself: means of children upwards, gradients from parents to children downwards.

Letters: T tokens of the batch, B sequences, H key/value heads, D query/key and V value head size, r compression_rate
(RATE), i a node's index among its parent's children. `reference.py` explains slots.

Keys are stored rotated by RoPE to position i % PERIOD. Candidate c is child i = c % r of parent c // r, so that PERIOD
neighbours (r, or a tile that divides r) need the same further rotation.
Rows are padded with zeros: both halves of a key to BH channels, values to BV. HALF is D / 2; without ROTARY (values) it
is V, and there is one half only.
"""

import triton
import triton.language as tl

from hstu_sparse.htree.choice import rotate

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate_slots(offsets, slot, B, size, TOKENS: tl.constexpr):
    """Return (sequence, its first token, its length, node) of each slot of a layer; the node may lie past the last.

    size: tokens below a node. The tokens have no unused slots, and empty sequences are skipped.
    """
    low = tl.zeros_like(slot)
    high = low + B - 1
    while tl.max(high - low, 0) > 0:
        middle = (low + high + 1) // 2
        first = tl.load(offsets + middle).to(tl.int64)
        if not TOKENS:
            first = first // size + middle
        right = first <= slot
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    start = tl.load(offsets + low).to(tl.int64)
    length = (tl.load(offsets + low + 1).to(tl.int64) - start).to(tl.int32)
    if TOKENS:
        node = slot - start
    else:
        node = slot - start // size - low
    return low, start, length, node.to(tl.int32)


@triton.jit
def child_angle(cos, sin, place, BH: tl.constexpr):
    """Return [ROWS, BH] cos and sin of the positions `place`."""
    f = tl.arange(0, BH)[None, :]
    return tl.load(cos + place[:, None] * BH + f), tl.load(sin + place[:, None] * BH + f)


@triton.jit(do_not_specialize=["B", "tokens", "total"])
def htree_rotate_fwd_kernel(
    x, nodes, offsets, cos, sin, x_stride_t, x_stride_h, B, tokens, total,
    HALF: tl.constexpr, BH: tl.constexpr, RATE: tl.constexpr, PERIOD: tl.constexpr, ROWS: tl.constexpr,
    ROTARY: tl.constexpr,
):  # fmt: skip
    """Compute layer 0 of nodes [H, total, BH or 2 BH]: ROWS tokens of one head of x [T, H, HALF or 2 HALF]."""
    slot, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    f = tl.arange(0, BH)[None, :]
    inside = (slot < tokens)[:, None]
    source = x + slot[:, None].to(tl.int64) * x_stride_t + h * x_stride_h + f
    low = tl.load(source, mask=inside & (f < HALF), other=0.0)
    if ROTARY:
        target = nodes + (h * total + slot)[:, None] * (2 * BH) + f
        high = tl.load(source + HALF, mask=inside & (f < HALF), other=0.0).to(tl.float32)
        _b, _start, _length, t = locate_slots(offsets, slot, B, 1, True)
        angle_cos, angle_sin = child_angle(cos, sin, tl.maximum(t, 0) % PERIOD, BH)
        low, high = rotate(low.to(tl.float32), high, angle_cos, angle_sin)
        tl.store(target, low.to(nodes.dtype.element_ty), mask=inside)
        tl.store(target + BH, high.to(nodes.dtype.element_ty), mask=inside)
    else:
        tl.store(nodes + (h * total + slot)[:, None] * BH + f, low, mask=inside)


@triton.jit(do_not_specialize=["B", "size", "slots", "base", "below", "total"])
def htree_pool_fwd_kernel(
    nodes, offsets, cos, sin, B, size, slots, base, below, total,
    BH: tl.constexpr, RATE: tl.constexpr, PERIOD: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS means of one head, of nodes [H, total, BH or 2 BH], from the layer below (TOKENS: layer 0).

    `size` tokens are below a node of this layer; its slots begin at `base` and those of the layer below at `below`.
    """
    slot, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    b, start, length, p = locate_slots(offsets, slot, B, size, False)
    part = size // RATE
    children = tl.minimum((length + part - 1) // part - p * RATE, RATE)
    live = (slot < slots) & (children > 0)
    if TOKENS:
        row = h * total + start + p * RATE
    else:
        row = h * total + below + start // part + b + p * RATE
    f = tl.arange(0, BH)[None, :]
    WIDTH: tl.constexpr = 2 * BH if ROTARY else BH
    low = tl.zeros([ROWS, BH], tl.float32)
    high = tl.zeros([ROWS, BH], tl.float32)
    for i in range(0, RATE):
        inside = (live & (i < children))[:, None]
        source = nodes + (row + i)[:, None] * WIDTH + f
        child_low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if ROTARY:
            child_high = tl.load(source + BH, mask=inside, other=0.0).to(tl.float32)
            child_cos, child_sin = tl.load(cos + i % PERIOD * BH + f), tl.load(sin + i % PERIOD * BH + f)
            child_low, child_high = rotate(child_low, child_high, child_cos, -child_sin)
            high += child_high
        low += child_low
    count = tl.maximum(children, 1)[:, None].to(tl.float32)
    low, high = low / count, high / count
    target = nodes + (h * total + base + slot)[:, None] * WIDTH + f
    if ROTARY:
        angle_cos, angle_sin = child_angle(cos, sin, tl.maximum(p, 0) % PERIOD, BH)
        low, high = rotate(low, high, angle_cos, angle_sin)
        tl.store(target + BH, high.to(nodes.dtype.element_ty), mask=live[:, None])
    tl.store(target, low.to(nodes.dtype.element_ty), mask=live[:, None])


@triton.jit
def load_sum(pointers, inside, units, DONE: tl.constexpr, PLACE: tl.constexpr, FIXED: tl.constexpr):
    """Load a gradient as fp32. FIXED: it is an int64 multiple of 1 / units[PLACE], or, if DONE, the bits of an fp32."""
    value = tl.load(pointers, mask=inside, other=0)
    if FIXED:
        if DONE:
            value = value.to(tl.int32).to(tl.float32, bitcast=True)
        else:
            value = value.to(tl.float32) / tl.load(units + PLACE)
    return value


@triton.jit(do_not_specialize=["B", "size", "slots", "base", "above", "total"])
def htree_push_bwd_kernel(
    grads, out, offsets, cos, sin, units, B, size, slots, base, above, total,
    HALF: tl.constexpr, BH: tl.constexpr, RATE: tl.constexpr, PERIOD: tl.constexpr, ROWS: tl.constexpr,
    ROTARY: tl.constexpr, PARENTS: tl.constexpr, TOKENS: tl.constexpr, PLACE: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Rotate the gradients of ROWS nodes of one head back, and add their share of their parents' gradients.

    The result overwrites grads [H, total, HALF or 2 HALF]; that of the tokens is stored to out [T, H, ..]. The layer's
    slots begin at `base`, its parents' at `above`, and `size` tokens are below one of its nodes.
    """
    slot, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    b, start, length, p = locate_slots(offsets, slot, B, size, TOKENS)
    count = (length + size - 1) // size
    live = (slot < slots) & (p < count)
    f = tl.arange(0, BH)[None, :]
    inside = live[:, None] & (f < HALF)
    WIDTH: tl.constexpr = 2 * HALF if ROTARY else HALF
    node_grads = grads + (h * total + base + slot)[:, None] * WIDTH + f
    low = load_sum(node_grads, inside, units, False, PLACE, FIXED)
    high = tl.zeros_like(low)
    if ROTARY:
        high = load_sum(node_grads + HALF, inside, units, False, PLACE, FIXED)
        angle_cos, angle_sin = child_angle(cos, sin, tl.maximum(p, 0) % PERIOD, BH)
        low, high = rotate(low, high, angle_cos, -angle_sin)
    if PARENTS:
        parent = h * total + above + start // (size * RATE) + b + p // RATE
        family = tl.maximum(tl.minimum(count - p // RATE * RATE, RATE), 1)[:, None].to(tl.float32)
        parent_grads = grads + parent[:, None] * WIDTH + f
        low += load_sum(parent_grads, inside, units, True, PLACE, FIXED) / family
        if ROTARY:
            high += load_sum(parent_grads + HALF, inside, units, True, PLACE, FIXED) / family
    if TOKENS:
        if ROTARY:  # queries were in base 2: remove their factor log2(e)
            low, high = low * LN2, high * LN2
        target = out + (slot[:, None].to(tl.int64) * tl.num_programs(1) + h) * WIDTH + f
        low, high = low.to(out.dtype.element_ty), high.to(out.dtype.element_ty)
    else:
        target = node_grads
        if FIXED:
            low = low.to(tl.int32, bitcast=True).to(tl.int64)
            high = high.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(target, low, mask=inside)
    if ROTARY:
        tl.store(target + HALF, high, mask=inside)
