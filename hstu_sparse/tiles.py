"""Device functions that the operators' kernels share: activations, and tiles of jagged tensors.

Letters: T tokens of the batch, B sequences, H heads.

Numbering of tiles without a look at the offsets on the host: sequence b has its tiles of SIZE tokens at the slots
`offsets[b] // SIZE + b` and after, one slot per started tile. Slots of different sequences never meet, there are
T // SIZE + B of them in all, and those that stay unused cost an early return.
"""

import triton
import triton.language as tl

from hstu_sparse.launch import INTERPRET

# A constexpr switch: inline assembly is there only in compiled kernels, tanh in one instruction too.
COMPILED = tl.constexpr(not INTERPRET)


@triton.jit
def tanh_approx(x):
    """tanh in one special-function instruction (relative error 2^-11): only where the result is rounded to 16 bits."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)) in fp32. FAST uses tanh.approx, good to 2^-11: for fp16 and bf16 inputs."""
    if FAST and COMPILED:
        return 0.5 * tanh_approx(0.5 * x) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x, FAST: tl.constexpr):
    """x * sigmoid(x) in fp32."""
    if FAST and COMPILED:
        half = 0.5 * x
        return half * tanh_approx(half) + half
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_and_grad(x, FAST: tl.constexpr):
    """(silu(x), its derivative) in fp32: the derivative is s + x s (1 - s) = s + y (1 - s) with y = x s."""
    s = sigmoid(x, FAST)
    y = x * s
    return y, s + y * (1.0 - s)


@triton.jit
def silu_of_twice(x, FAST: tl.constexpr):
    """silu(2 x) in fp32: what comes of a score whose scale and bias were halved, with one product less."""
    if FAST and COMPILED:
        return x * tanh_approx(x) + x
    else:
        return silu(2.0 * x, FAST)


@triton.jit
def silu_and_grad_of_twice(x, FAST: tl.constexpr):
    """(silu(y), its derivative) at y = 2 x in fp32; with u = tanh(x) the latter is 1 + (silu(y) - 1) (1 - u) / 2."""
    if FAST and COMPILED:
        u = tanh_approx(x)
        y = x * u + x
        return y, (y - 1.0) * (0.5 - 0.5 * u) + 1.0
    else:
        return silu_and_grad(2.0 * x, FAST)


@triton.jit
def drop(values, seed, row, dropout, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Zeroes what the mask of (seed, row, column) drops, divides the rest by 1 - dropout.

    One Philox call gives four columns their random numbers, of which 24 bits decide.
    """
    zero = tl.zeros([ROWS, BLOCK_C // 4], tl.int32)
    first, second, third, fourth = tl.philox(
        tl.load(seed), zero + tl.arange(0, BLOCK_C // 4)[None, :], zero + row, zero, zero
    )
    bits = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(ROWS, BLOCK_C)
    kept = (bits >> 8).to(tl.float32) >= dropout * 16777216.0
    return tl.where(kept, values / (1.0 - dropout), 0.0)


@triton.jit
def sequence_of(offsets, token, B):
    """The sequence of a token."""
    low = 0
    high = B - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def locate(offsets, slot, B, SIZE):
    """(sequence, its first token, its length, tile within the sequence) of a slot; the tile may lie past the end."""
    low = 0
    high = B - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) // SIZE + middle <= slot:
            low = middle
        else:
            high = middle - 1
    start = tl.load(offsets + low).to(tl.int64)
    length = (tl.load(offsets + low + 1) - start).to(tl.int32)
    return low, start, length, (slot - start // SIZE - low).to(tl.int32)


@triton.jit
def head_and_slot(number, slots, H, together):
    """The inverse of `numbered`."""
    chunk = number // (together * H)
    rest = number - chunk * (together * H)
    size = tl.minimum(together, slots - chunk * together)
    return rest // size, chunk * together + rest % size


@triton.jit
def numbered(h, slot, slots, H, together):
    """The number of a head's slot among all heads' where of each `together` slots head follows upon head."""
    first = slot // together * together
    return first * H + h * tl.minimum(together, slots - first) + (slot - first)


@triton.jit
def load_rows(base, rows, stride, mask, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """A tile [rows, PADDED] of the matrix at `base`, zero outside of the mask and past SIZE columns."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if SIZE == PADDED:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=mask[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def load_tile(base, rows, stride, mask, row, column, SIZE: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr):
    """load_rows of consecutive rows; with TMA `base` is a tensor descriptor and the tile begins at (row, column) of it.

    A descriptor knows no sequence: behind the last token it gives the next sequence's rows, which the caller must give
    the weight zero.
    """
    if TMA:
        return base.load([row, column])
    else:
        return load_rows(base, rows, stride, mask, SIZE, PADDED)


@triton.jit
def block_source(base, stride, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """What `load_block` reads blocks of BLOCK rows from: `base`, or its tensor descriptor."""
    if TMA:
        # Nothing is read of an empty matrix, but a descriptor has at least one row.
        return tl.make_tensor_descriptor(base, [tl.maximum(length, 1), SIZE], [stride, 1], [BLOCK, WIDTH])
    else:
        return base


@triton.jit
def load_block(
    base, start, rows, stride, limit, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr = False,
):  # fmt: skip
    """Rows start + rows of a `block_source`; zeros past `limit` (only MASKED looks) and past SIZE columns.

    One address in 64 bits, of the block; within it 32 bits do, which spares registers in the inner loop.
    """
    if TMA:
        return base.load([start, 0])
    else:
        columns = tl.arange(0, WIDTH)
        pointers = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
        if MASKED:
            inside = (start + rows < limit)[:, None]
            if SIZE != WIDTH:
                inside = inside & (columns < SIZE)[None, :]
            return tl.load(pointers, inside, 0.0)
        elif SIZE != WIDTH:
            return tl.load(pointers, (columns < SIZE)[None, :], 0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_rows(base, rows, stride, mask, value, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The reverse of load_rows; converts to the dtype of `base`."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask[:, None] & (columns < SIZE)[None, :])


@triton.jit
def opaque(x):
    """x (int32 or int64), without the compiler's knowing it: what is computed from it is computed anew, not kept in
    registers, and no multiple of anything.
    """
    if COMPILED:
        if x.dtype.primitive_bitwidth == 64:
            return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], tl.int64, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def row_norms(x):
    """Norms of the rows of x, fp32, each divided by its largest element first: no square leaves fp32's range."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    ratio = x * (1.0 / largest)[:, None]
    return largest * tl.sqrt(tl.sum(ratio * ratio, 1))


@triton.jit
def in_registers(x, WANTED: tl.constexpr):
    """x, the left operand of products, WANTED in registers and not read from shared memory for every one of them.

    Triton does so only with what comes out of a product: this one adds zeros.
    """
    if WANTED:
        none = tl.dot(tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype))
        return (x.to(tl.float32) + none).to(x.dtype)
    else:
        return x
