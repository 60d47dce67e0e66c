"""Define device functions that the operators' kernels share: activations, and tiles of jagged tensors.

Letters: T tokens of the batch, B sequences, H heads.

Tiles are numbered without reading the offsets on the host: sequence b has its tiles of SIZE tokens from slot
`offsets[b] // SIZE + b` on, one slot per started tile. Slots of different sequences never overlap, there are
T // SIZE + B of them in all, and unused ones cost an early return.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.core.launch import INTERPRET

# A constexpr switch: inline assembly exists only in compiled kernels, including tanh in one instruction.
COMPILED = tl.constexpr(not INTERPRET)


@triton.jit
def tanh_approx(x):
    """Compute tanh in one special-function instruction (relative error 2^-11): only for results rounded to 16 bits."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", constraints="=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """Compute 1 / (1 + exp(-x)) in fp32. FAST uses tanh.approx, accurate to 2^-11: for fp16 and bf16 inputs."""
    if FAST and COMPILED:
        return 0.5 * tanh_approx(0.5 * x) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x, FAST: tl.constexpr):
    """Compute x * sigmoid(x) in fp32."""
    if FAST and COMPILED:
        half = 0.5 * x
        return half * tanh_approx(half) + half
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_and_grad(x, FAST: tl.constexpr):
    """Return (silu(x), its derivative) in fp32: the derivative is s + x s (1 - s) = s + y (1 - s) with y = x s."""
    s = sigmoid(x, FAST)
    y = x * s
    return y, s + y * (1.0 - s)


@triton.jit
def silu_of_half(half, FAST: tl.constexpr):
    """Compute the SiLU of a score in fp32 from half the score, with one product less."""
    if FAST and COMPILED:
        return half * tanh_approx(half) + half
    else:
        return silu(2.0 * half, FAST)


@triton.jit
def silu_and_grad_of_half(half, FAST: tl.constexpr):
    """Return (y, its derivative) in fp32, y the SiLU of a score, from half the score.

    With u = tanh(half) the derivative is 1 + (y - 1) (1 - u) / 2.
    """
    if FAST and COMPILED:
        u = tanh_approx(half)
        y = half * u + half
        return y, (y - 1.0) * (0.5 - 0.5 * u) + 1.0
    else:
        return silu_and_grad(2.0 * half, FAST)


@triton.jit
def drop(values, seed, row, dropout, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Zero the values that the mask of (seed, row, column) drops, and divide the others by 1 - dropout.

    One Philox call gives four columns their random numbers, of which 24 bits decide.
    """
    zero = tl.zeros([ROWS, BLOCK_C // 4], tl.int32)
    first, second, third, fourth = tl.philox(
        tl.load(seed), zero + tl.arange(0, BLOCK_C // 4)[None, :], zero + row, zero, zero
    )
    bits = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(ROWS, BLOCK_C)
    is_kept = (bits >> 8).to(tl.float32) >= dropout * 16777216.0
    return tl.where(is_kept, values / (1.0 - dropout), 0.0)


@triton.jit
def locate(offsets, slot, B, SIZE):
    """Return (sequence, its first token, its length, tile within it) of a slot; the tile may lie past the end."""
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
    """Invert `numbered`."""
    chunk = number // (together * H)
    in_chunk = number - chunk * (together * H)
    size = tl.minimum(together, slots - chunk * together)
    return in_chunk // size, chunk * together + in_chunk % size


@triton.jit
def numbered(h, slot, slots, H, together):
    """Return the number of a head's slot if all heads process `together` slots one after another."""
    first = slot // together * together
    return first * H + h * tl.minimum(together, slots - first) + (slot - first)


class Rows(NamedTuple):
    """A tensor [T, H, size] with adjacent channels, as kernels take it: pointer, strides between tokens and heads."""

    pointer: object
    stride_t: object
    stride_h: object

    @classmethod
    def of(cls, x) -> "Rows":
        return cls(x, x.stride(0), x.stride(1))


@triton.jit
def row_pointer(x, token, head):
    """Return the pointer to a head's row of `Rows`."""
    return x.pointer + token * x.stride_t + head * x.stride_h


@triton.jit
def load_head(x, head, tokens, mask, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile [tokens, PADDED] of one head of `Rows`, zero outside of the mask and past SIZE columns."""
    return load_rows(x.pointer + head * x.stride_h, tokens, x.stride_t, mask, SIZE, PADDED)


@triton.jit
def load_rows(base, rows, stride, mask, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile [rows, PADDED] of the matrix at `base`, zero outside of the mask and past SIZE columns."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if SIZE == PADDED:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=mask[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def gather_rows(base, rows, stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load rows like `load_rows`, if all rows exist."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if SIZE == PADDED:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)


@triton.jit
def load_tile(base, rows, stride, mask, row, column, SIZE: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr):
    """Apply load_rows to consecutive rows; with TMA `base` is a tensor descriptor, read from (row, column) on.

    A descriptor ignores sequences: behind the last token it loads the next sequence's rows, which the caller must
    weight with zero.
    """
    if TMA:
        return base.load([row, column])
    else:
        return load_rows(base, rows, stride, mask, SIZE, PADDED)


@triton.jit
def block_source(base, stride, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Return the source from which `load_block` reads blocks of BLOCK rows: `base`, or its tensor descriptor."""
    if TMA:
        # An empty matrix is never read, but a descriptor has at least one row.
        return tl.make_tensor_descriptor(base, [tl.maximum(length, 1), SIZE], [stride, 1], [BLOCK, WIDTH])
    else:
        return base


@triton.jit
def load_block(
    base, start, rows, stride, limit, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr = False,
):  # fmt: skip
    """Load rows start + rows of a `block_source`; zeros past `limit` (if MASKED) and past SIZE columns.

    Only the block's address has 64 bits; offsets within it have 32, which saves registers in the inner loop.
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
def store_block(base, rows, stride, inside, value, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile to the rows of the matrix at `base`, SIZE of its WIDTH columns; addresses are as in `load_block`."""
    columns = tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), inside[:, None] & (columns < SIZE)[None, :])


@triton.jit
def store_rows(base, rows, stride, mask, value, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store rows, the reverse of load_rows; converts to the dtype of `base`."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask[:, None] & (columns < SIZE)[None, :])


@triton.jit
def opaque(x):
    """Return x (int32 or int64) through assembly that hides its value from the compiler: expressions of it are
    recomputed instead of staying in registers, and no divisibility is assumed.
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
    """Compute the norms of the rows of x, fp32, each divided by its greatest element first: no square overflows."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    ratio = x * (1.0 / largest)[:, None]
    return largest * tl.sqrt(tl.sum(ratio * ratio, 1))


@triton.jit
def in_registers(x, WANTED: tl.constexpr):
    """Put x, the left operand of products, into registers if WANTED, so that shared memory is read once.

    Triton does so only with results of products: this one adds zeros.
    """
    if WANTED:
        none = tl.dot(tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype))
        return (x.to(tl.float32) + none).to(x.dtype)
    else:
        return x
