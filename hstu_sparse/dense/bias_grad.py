"""Gradients of the bias tables: device functions that add a tile of ds, the scores' gradients, into a table.

Letters: N max_seq_len; t and s: the positions of queries and keys in their sequence. A tile is BLOCK_M queries by
BLOCK_N keys.

Position bias: sums along the diagonals of a tile, in registers (`_add_diagonals`, fp32 and the interpreter) or in the
ring. Time bias: a sum per bucket edge for a narrow tile (see bias.py), the histogram for any other. Sums are integers
for fp16 and bf16 inputs, so that no order of additions matters, and fp32 for others.
"""

import triton
import triton.language as tl


@triton.jit
def _add_diagonals(grad, ds, first_row, start, length, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """grad[d] += the sum of ds [BLOCK_M, BLOCK_N] along its diagonal t - s = d.

    Row i is rotated by i, which turns the diagonals into columns; a column then holds pieces of neighbouring diagonals,
    BLOCK_N apart, one piece above and one below the place where the rotation wraps.
    """
    REPEATS: tl.constexpr = BLOCK_M // BLOCK_N if BLOCK_M > BLOCK_N else 1
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    rotated = tl.gather(ds, (row - column) & (BLOCK_N - 1), 1)
    wraps = (row & (BLOCK_N - 1)) < column
    above = tl.sum(tl.reshape(tl.where(wraps, 0.0, rotated), [REPEATS, BLOCK_M // REPEATS, BLOCK_N]), 1)
    below = tl.sum(tl.reshape(tl.where(wraps, rotated, 0.0), [REPEATS, BLOCK_M // REPEATS, BLOCK_N]), 1)
    distance = first_row - start + column + BLOCK_N * tl.arange(0, REPEATS)[:, None]
    tl.atomic_add(grad + distance, above * scale, (distance >= 0) & (distance < length), sem="relaxed")
    distance -= BLOCK_N
    tl.atomic_add(grad + distance, below * scale, (distance >= 0) & (distance < length), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def dense_attention_norms_kernel(
    do, v, do_stride_t, do_stride_h, v_stride_t, v_stride_h, greatest, rows, H: tl.constexpr, V: tl.constexpr,
    PAD_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """greatest [2] fp32, zeros before: the greatest squared norms of a row of do and of v, [T, H, V]; rows = T * H."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = tl.arange(0, PAD_V)[None, :]
    inside = (row < rows) & (e < V)
    x = tl.load(do + row // H * do_stride_t + row % H * do_stride_h + e, inside, 0.0).to(tl.float32)
    y = tl.load(v + row // H * v_stride_t + row % H * v_stride_h + e, inside, 0.0).to(tl.float32)
    x, y = tl.sum(x * x, 1), tl.sum(y * y, 1)
    # A maximum may drop what is not a number; infinity stays, and makes the gradients not a number.
    tl.atomic_max(greatest, tl.max(tl.where(x == x, x, float("inf")), 0), sem="relaxed")
    tl.atomic_max(greatest + 1, tl.max(tl.where(y == y, y, float("inf")), 0), sem="relaxed")


@triton.jit
def _exact_scale(greatest):
    """What turns a ds into an integer of 22 bits, from `dense_attention_norms_kernel`.

    |ds| <= |do| |v| times twice SiLU's greatest slope, 1.1 (2.3 with room for rounding).
    """
    bound = 2.3 * tl.sqrt(tl.load(greatest)) * tl.sqrt(tl.load(greatest + 1))
    return 4194303.0 / tl.maximum(bound, 1e-30)


@triton.jit(do_not_specialize=["scale"])
def dense_attention_gradients_kernel(
    position, time, position_grad, time_grad, greatest, scale, N: tl.constexpr, TIMES: tl.constexpr, ALL: tl.constexpr,
    TABLE: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums to gradients: position [N] to position_grad, the first TIMES columns of time [COPIES, TABLE] to time_grad
    [ALL], zeros behind. Integer sums, where `greatest` is given, become numbers, times `scale`.
    """
    unit = 1.0
    if greatest is not None:
        unit = scale / _exact_scale(greatest).to(tl.float64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if position is not None:
        tl.store(position_grad + i, (tl.load(position + i, i < N, 0) * unit).to(position_grad.dtype.element_ty), i < N)
    if time is not None:
        copies = tl.arange(0, COPIES)[:, None]
        total = tl.sum(tl.load(time + copies * TABLE + i[None, :], (i < TIMES)[None, :], 0), 0)
        tl.store(time_grad + i, (total * unit).to(time_grad.dtype.element_ty), i < ALL)


@triton.jit
def _atomic_add(pointers, value, mask=None):
    """Adds to fp32 cells, or to int64 ones, rounded."""
    if pointers.dtype.element_ty == tl.int64:
        tl.atomic_add(pointers, tl.extra.cuda.libdevice.rint(value).to(tl.int64), mask, sem="relaxed")
    else:
        tl.atomic_add(pointers, value, mask, sem="relaxed")


@triton.jit
def _add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def _add_narrow_time_grad(grad, lowest, sums0, sums1, sums2, sums3, sums4, scale):
    """grad[bucket] += the sum of ds in that bucket, for narrow tiles with one lowest bucket.

    The sums, [BLOCK_M] each: of all pairs, of those past the first edge, and so on.
    """
    if lowest >= 0:
        past0, past1, past2, past3, past4 = tl.reduce((sums0, sums1, sums2, sums3, sums4), 0, _add_five)
        grad += lowest
        _atomic_add(grad, (past0 - past1) * scale)
        _atomic_add(grad + 1, (past1 - past2) * scale)
        _atomic_add(grad + 2, (past2 - past3) * scale)
        _atomic_add(grad + 3, (past3 - past4) * scale)
        _atomic_add(grad + 4, past4 * scale)


# A histogram in shared memory, which Triton has no words for: one table for each of the 32 lanes of a warp, so that the
# lanes neither meet in a bank nor at an address. The variable is declared inside the assembly, in the program's static
# shared memory. The dynamic part, which Triton lays out, comes after it and wants 1 KB alignment for its swizzled
# tiles: hence sizes in whole KB.


@triton.jit
def _zero(base, WORDS: tl.constexpr, SPAN: tl.constexpr):
    """Zeroes WORDS words of shared memory from `base` on, and waits for it; SPAN: a power of two, at least WORDS."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 a;
            setp.lt.u32 p, $2, $3;
            mad.lo.u32 a, $2, 4, $1;
            @p st.shared.u32 [a], 0;
            mov.u32 $0, 0;
        }""",
        "=r,r,r,r", [base, tl.arange(0, SPAN), WORDS], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _histogram_open(token):
    """The shared-memory address of [146, 32] fp32, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 hstu_histogram[19456]; mov.u32 $0, hstu_histogram; }", "=r,r", [token], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    _zero(base, 4672, 8192)
    return base


@triton.jit
def _histogram_add(base, bucket, value, scale, EXACT: tl.constexpr):
    """histogram[bucket] += value for a tile; EXACT: value * scale, rounded, in integers.

    Four neighbours that share a bucket, as most do, are added first.
    """
    if EXACT:
        tl.inline_asm_elementwise(
            """{
                .reg .u32 lane, a;
                .reg .f32 f;
                .reg .b32 m, n, o, p;
                .reg .pred same;
                mov.u32 lane, %tid.x;
                and.b32 lane, lane, 31;
                mad.lo.u32 lane, lane, 4, $1;
                setp.eq.u32 same, $5, $6;
                setp.eq.and.u32 same, $5, $7, same;
                setp.eq.and.u32 same, $5, $8, same;
                fma.rn.f32 f, $9, $13, 0f4B400000;
                mov.b32 m, f;
                fma.rn.f32 f, $10, $13, 0f4B400000;
                mov.b32 n, f;
                fma.rn.f32 f, $11, $13, 0f4B400000;
                mov.b32 o, f;
                fma.rn.f32 f, $12, $13, 0f4B400000;
                mov.b32 p, f;
                mad.lo.u32 a, $5, 128, lane;
                @!same bra APART;
                add.u32 m, m, n;
                add.u32 o, o, p;
                add.u32 m, m, o;
                sub.u32 m, m, 0x2D000000;
                red.shared.add.u32 [a], m;
                bra DONE;
                APART:
                sub.u32 m, m, 0x4B400000;
                red.shared.add.u32 [a], m;
                mad.lo.u32 a, $6, 128, lane;
                sub.u32 n, n, 0x4B400000;
                red.shared.add.u32 [a], n;
                mad.lo.u32 a, $7, 128, lane;
                sub.u32 o, o, 0x4B400000;
                red.shared.add.u32 [a], o;
                mad.lo.u32 a, $8, 128, lane;
                sub.u32 p, p, 0x4B400000;
                red.shared.add.u32 [a], p;
                DONE:
                mov.u32 $0, 0;
            }""",
            "=r,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f", [base, bucket, value, scale], tl.int8, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .u32 lane, a;
                .reg .f32 sum;
                .reg .pred same;
                mov.u32 lane, %tid.x;
                and.b32 lane, lane, 31;
                mad.lo.u32 lane, lane, 4, $1;
                setp.eq.u32 same, $5, $6;
                setp.eq.and.u32 same, $5, $7, same;
                setp.eq.and.u32 same, $5, $8, same;
                mad.lo.u32 a, $5, 128, lane;
                @!same bra APART;
                add.f32 sum, $9, $10;
                add.f32 sum, sum, $11;
                add.f32 sum, sum, $12;
                red.shared.add.f32 [a], sum;
                bra DONE;
                APART:
                red.shared.add.f32 [a], $9;
                mad.lo.u32 a, $6, 128, lane;
                red.shared.add.f32 [a], $10;
                mad.lo.u32 a, $7, 128, lane;
                red.shared.add.f32 [a], $11;
                mad.lo.u32 a, $8, 128, lane;
                red.shared.add.f32 [a], $12;
                DONE:
                mov.u32 $0, 0;
            }""",
            "=r,r,r,r,r,r,r,r,r,f,f,f,f", [base, bucket, value], tl.int8, is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _histogram_close(base, grad, scale, shift, TABLE: tl.constexpr, EXACT: tl.constexpr):
    """grad[bucket] += scale * histogram[bucket]; EXACT: histogram[bucket] << shift."""
    tl.debug_barrier()
    copies = tl.inline_asm_elementwise(
        """{
            .reg .pred p;
            .reg .u32 a;
            setp.lt.u32 p, $2, 4672;
            mad.lo.u32 a, $2, 4, $1;
            mov.f32 $0, 0f00000000;
            @p ld.shared.f32 $0, [a];
        }""",
        "=&f,r,r", [base, tl.arange(0, 8192)], tl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    bucket = tl.arange(0, 256)
    if EXACT:
        total = tl.sum(tl.reshape(copies.to(tl.int32, bitcast=True).to(tl.int64), [256, 32]), 1) << shift
        tl.atomic_add(grad + bucket, total, (bucket < TABLE) & (total != 0), sem="relaxed")
    else:
        total = tl.sum(tl.reshape(copies, [256, 32]), 1) * scale
        tl.atomic_add(grad + bucket, total, (bucket < TABLE) & (total != 0.0), sem="relaxed")


# The sums along the diagonals, in shared memory too. A tile of queries meets the diagonals in descending order, and of
# the BLOCK_M + BLOCK_N - 1 that a block of keys touches, BLOCK_N are touched for the last time: a ring of 256 cells
# holds those in progress. Cells are integers: shared memory adds those in one instruction, floats only in a loop of
# compare-and-swap; and integers add up to the same sum in any order. A term is rounded to 22 bits of its upper bound, a
# cell takes at most 128 terms. Four copies, one for each lane of a quad, 266 words apart, keep the lanes of a warp in
# different banks: lane l of the tensor cores' layout holds t - s = l // 4 - 2 (l % 4) + const.


@triton.jit
def _ring_open(token):
    """The shared-memory address of the ring, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 hstu_ring[5120]; mov.u32 $0, hstu_ring; }", "=r,r", [token], tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    _zero(base, 1064, 2048)
    return base


@triton.jit
def _barrier(token):
    """A barrier of the program's threads. Triton's own keeps the loop around it from being pipelined."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [token], tl.int32, is_pure=False, pack=1)


@triton.jit
def _ring_add(base, distance, value, to_exact):
    """ring[distance] += value, rounded."""
    tl.inline_asm_elementwise(
        """{
            .reg .u32 a, copy;
            .reg .f32 f;
            .reg .b32 n;
            mov.u32 copy, %tid.x;
            and.b32 copy, copy, 3;
            mad.lo.u32 copy, copy, 1064, $1;
            and.b32 a, $2, 255;
            mad.lo.u32 a, a, 4, copy;
            fma.rn.f32 f, $3, $4, 0f4B400000;
            mov.b32 n, f;
            sub.u32 n, n, 0x4B400000;
            red.shared.add.u32 [a], n;
            mov.u32 $0, 0;
        }""",
        "=r,r,r,f,f", [base, distance, value, to_exact], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ring_flush(base, grad, last, length, COUNT: tl.constexpr):
    """Moves the COUNT cells of the distances last - COUNT + 1 .. last to grad [N] int64."""
    cell = tl.arange(0, 4 * COUNT)
    distance = last - cell % COUNT
    value = tl.inline_asm_elementwise(
        """{
            .reg .u32 a;
            and.b32 a, $2, 255;
            mad.lo.u32 a, a, 4, $1;
            mad.lo.u32 a, $3, 1064, a;
            atom.shared.exch.b32 $0, [a], 0;
        }""",
        "=r,r,r,r", [base, distance, cell // COUNT], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    use = (distance >= 0) & (distance < length) & (value != 0)
    tl.atomic_add(grad + distance, value.to(tl.int64), use, sem="relaxed")
