"""Define what kernels share: activations, online softmax, tiles of jagged tensors, loads and stores of rows.

Letters: T tokens of the batch, B sequences, H heads.

A tile of a jagged batch has a slot, which is computed without reading the offsets on the host: sequence b has its tiles
of SIZE tokens, the last one possibly partial, from slot `offsets[b] // SIZE + b` on. Slots of different sequences never
overlap. There are T // SIZE + B slots; a program with an unused one returns at once.
"""

from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from hstu_sparse.core import launch
from hstu_sparse.core.launch import INTERPRET

# Inline assembly exists only in compiled kernels.
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
    """Compute SiLU(2 * half) in fp32; this saves a multiplication."""
    if FAST and COMPILED:
        return half * tanh_approx(half) + half
    else:
        return silu(2.0 * half, FAST)


@triton.jit
def silu_and_grad_of_half(half, FAST: tl.constexpr):
    """Return (y, dy/dx) in fp32 for y = SiLU(x), x = 2 * half.

    With u = tanh(half), dy/dx = 1 + (y - 1) (1 - u) / 2.
    """
    if FAST and COMPILED:
        u = tanh_approx(half)
        y = half * u + half
        return y, (y - 1.0) * (0.5 - 0.5 * u) + 1.0
    else:
        return silu_and_grad(2.0 * half, FAST)


@triton.jit
def drop(values, seed, row, dropout, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Apply dropout: zero the values that (seed, row, column) drops, and divide the others by 1 - dropout.

    One Philox call yields the random numbers of four columns. 24 bits of a number decide.
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
    """Return (sequence, its first token, its length, the tile's index) of a slot; unused slots lie past the end."""
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
    """Return (head, slot) of a number. Numbers cover the first `together` slots head by head, then the next, ..."""
    chunk = number // (together * H)
    in_chunk = number - chunk * (together * H)
    size = tl.minimum(together, slots - chunk * together)
    return in_chunk // size, chunk * together + in_chunk % size


@triton.jit
def head_slot_number(h, slot, slots, H, together):
    """Invert `head_and_slot`."""
    first = slot // together * together
    return first * H + h * tl.minimum(together, slots - first) + (slot - first)


class Rows(NamedTuple):
    """A tensor [T, H, size] with adjacent channels: its pointer, and strides between tokens and between heads."""

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
    """Load rows as `load_rows` does, but without a mask: all rows must exist."""
    columns = tl.arange(0, PADDED)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if SIZE == PADDED:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)


@triton.jit
def load_tile(base, rows, stride, mask, row, column, SIZE: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr):
    """Load consecutive rows as `load_rows` does; with TMA `base` is a tensor descriptor, read from (row, column) on.

    A descriptor ignores sequences: past the last token it loads the next sequence's rows, which the caller must
    give zero weight.
    """
    if TMA:
        return base.load([row, column])
    else:
        return load_rows(base, rows, stride, mask, SIZE, PADDED)


@triton.jit
def block_source(base, stride, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Return the source from which `load_block` reads blocks of BLOCK rows: `base`, or its tensor descriptor."""
    if TMA:
        # A descriptor must have at least one row, even if the matrix is empty.
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
    """Return x (int32 or int64), hiding its value from the compiler.

    Expressions of x are then recomputed instead of kept in registers, and no divisibility is assumed.
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
    """Compute the norm of each row of x in fp32, scaled by its greatest element so that no square overflows."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    ratio = x * (1.0 / largest)[:, None]
    return largest * tl.sqrt(tl.sum(ratio * ratio, 1))


@triton.jit
def in_registers(x, HOLD: tl.constexpr):
    """Put x, the left operand of products, into registers if HOLD, so that shared memory is read once.

    Triton keeps only results of products in registers, so a product of zeros is added.
    """
    if HOLD:
        none = tl.dot(tl.zeros([x.shape[0], 16], x.dtype), tl.zeros([16, x.shape[1]], x.dtype))
        return (x.to(tl.float32) + none).to(x.dtype)
    else:
        return x


# The number of tensors for each launch of `pad_heads_kernel`, and of rows for each of its programs.
_MAX_TENSORS, _ROWS = 4, 32


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
    are copied. Views of a fused projection are returned unchanged. A copy costs less than reading heads of, say, 25
    channels two bytes at a time in every block. The zeros change no sum.

    Args:
        tensors: [..., size], or None, which is returned as None. Heads [T, H, size] are padded by one kernel, up to
            four with the same T and H.
        align: False for kernels that need only adjacent channels.
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
        not 0 < len(tensors) <= _MAX_TENSORS
        or not first.numel()
        or any(x.dim() != 3 or x.shape[:2] != first.shape[:2] or x.stride(-1) != 1 for x in tensors)
    ):
        return [torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)) for x in tensors]
    tokens, heads, _ = first.shape
    padded = [x.new_empty(tokens, heads, launch.cdiv(x.shape[2], 16) * 16) for x in tensors]
    spare = [None] * (_MAX_TENSORS - len(tensors))
    strides = [stride for x in tensors for stride in x.stride()[:2]] + [0, 0] * len(spare)
    sizes = dict(zip("ABCD", [x.shape[2] for x in tensors] + [0] * len(spare)))
    width = launch.next_power_of_2(max(x.shape[2] for x in padded))
    launch.run(
        pad_heads_kernel, launch.cdiv(tokens * heads, _ROWS), *tensors, *spare, *padded, *spare, *strides,
        tokens * heads, H=heads, **sizes, WIDTH=width, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return padded


@triton.jit
def finite_or_zero(row_max):
    """Return row_max with -inf replaced by 0, since -inf minus -inf is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def add_scores(row_max, row_sum, scores):
    """Update an online softmax by a block of scores: return (row_max, row_sum, weights, factor of earlier sums).

    row_max, row_sum: [rows], at first -inf and 0; scores: [rows, keys] in units of log 2, -inf where masked. Weights
    are relative to row_max; those of a row without keys are 0.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = finite_or_zero(new_max)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    return new_max, row_sum * rescale + tl.sum(weights, 1), weights, rescale


@triton.jit
def log_sum(row_max, row_sum):
    """Return the log-sum-exp of rows in units of log 2, 0 for a row without keys."""
    return tl.where(row_sum == 0.0, 0.0, row_max + tl.log2(row_sum))
