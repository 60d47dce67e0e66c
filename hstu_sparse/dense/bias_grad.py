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


@triton.jit
def _greatest_norms(x, y, greatest):
    """greatest [2], zeros before, becomes at least the greatest squared norms of a row of x and of one of y."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    norms = tl.join(tl.sum(x * x, 1), tl.sum(y * y, 1))
    # A maximum may drop what is not a number; infinity stays, and makes the gradients not a number.
    most = tl.max(tl.where(norms == norms, norms, float("inf")), 0)
    tl.atomic_max(greatest + tl.arange(0, 2), most, sem="relaxed")


@triton.jit
def _exact_scale(greatest):
    """What turns a ds into an integer of 21 bits; greatest: the greatest squared norms of a row of do and of v.

    |ds| <= |do| |v| times twice SiLU's greatest slope, 1.1 (2.3 with room for rounding).
    """
    bound = 2.3 * tl.sqrt(tl.load(greatest)) * tl.sqrt(tl.load(greatest + 1))
    return 2097151.0 / tl.maximum(bound, 1e-30)


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


def _sum_assembly(pack: int, move: bool, exact: bool) -> str:
    """Adds up `pack` values and adds the sum times a scale to a lane's cell; `move`: and takes it from the one before.

    Operands: pack / 4 results, and for each value the address of the bucket's cells, the value and the scale.
    """
    cell, value, scale = (pack // 4 + pack * i for i in range(3))
    lines = [".reg .u32 a;", ".reg .f32 s, t;", ".reg .b32 n;", "mov.f32 s, 0f00000000;"]
    for i in range(0, pack, 4):
        lines += [f"add.f32 t, ${value + i}, ${value + i + 1};", f"add.f32 t, t, ${value + i + 2};"]
        lines += [f"add.f32 t, t, ${value + i + 3};", "add.f32 s, s, t;"]
    lines += ["mov.u32 a, %tid.x;", "and.b32 a, a, 31;", f"mad.lo.u32 a, a, 4, ${cell};", f"mul.f32 s, s, ${scale};"]
    kind, negate = ("u32", "neg.s32 n, n;") if exact else ("f32", "xor.b32 n, n, 0x80000000;")
    lines.append("cvt.rni.s32.f32 n, s;" if exact else "mov.b32 n, s;")
    lines.append(f"red.shared.add.{kind} [a], n;")
    if move:
        lines += [negate, f"red.shared.add.{kind} [a+-128], n;"]
    return "{ " + " ".join(lines + [f"mov.u32 ${i}, 0;" for i in range(pack // 4)]) + " }"


_ADD_SUM, _MOVE_SUM = (tl.constexpr(_sum_assembly(16, move, True)) for move in (False, True))
_ADD_SUM_FP32, _MOVE_SUM_FP32 = (tl.constexpr(_sum_assembly(4, move, False)) for move in (False, True))
_SUM_OPERANDS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 16 + ["f"] * 32))
_SUM_OPERANDS_FP32 = tl.constexpr(",".join(["=r"] + ["r"] * 4 + ["f"] * 8))


@triton.jit
def _histogram_add_sum(base, bucket, value, scale, MOVE: tl.constexpr, EXACT: tl.constexpr):
    """histogram[bucket] += scale * the sum of a tile (EXACT: in integers); MOVE: and histogram[bucket - 1] -= it.

    `bucket` is one number. A thread adds up what it has, 16 or 4 values at a time, so that no thread waits for another.
    """
    cell = base + 128 * bucket
    if EXACT:
        tl.inline_asm_elementwise(
            _MOVE_SUM if MOVE else _ADD_SUM, _SUM_OPERANDS, [cell, value, scale], tl.int8, is_pure=False, pack=16
        )
    else:
        tl.inline_asm_elementwise(
            _MOVE_SUM_FP32 if MOVE else _ADD_SUM_FP32, _SUM_OPERANDS_FP32, [cell, value, scale], tl.int8,
            is_pure=False, pack=4,
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


# The sums along the diagonals, in shared memory too: a cell per distance t - s. A program meets the distances in
# descending order; where they are more than there are cells, all are moved to memory and the cells begin anew, further
# down. Cells are integers: shared memory adds those in one instruction, floats only in a loop of compare-and-swap; and
# integers add up to the same sum in any order. A cell takes at most a term for each query of the tile. Four copies, one
# for each lane of a quad, RING_STRIDE words apart, keep the lanes of a warp in different banks: lane l of the tensor
# cores' layout holds t - s = l // 4 - 2 (l % 4) + const.
RING = tl.constexpr(1056)
RING_STRIDE = tl.constexpr(1066)


@triton.jit
def _ring_open(token):
    """The shared-memory address of the cells, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 hstu_ring[17408]; mov.u32 $0, hstu_ring; }", "=r,r", [token], tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    _zero(base, 4 * RING_STRIDE, 8192)
    return base


@triton.jit
def _barrier(token):
    """A barrier of the program's threads. Triton's own keeps the loop around it from being pipelined."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [token], tl.int32, is_pure=False, pack=1)


@triton.jit
def _ring_add(cell, value, to_exact):
    """The cells at these addresses (of the first copy) += value, rounded; any layout."""
    tl.inline_asm_elementwise(
        """{
            .reg .u32 a, copy;
            .reg .f32 f;
            .reg .b32 n;
            mov.u32 copy, %tid.x;
            and.b32 copy, copy, 3;
            mad.lo.u32 a, copy, 4264, $1;
            fma.rn.f32 f, $2, $3, 0f4B400000;
            mov.b32 n, f;
            sub.u32 n, n, 0x4B400000;
            red.shared.add.u32 [a], n;
            mov.u32 $0, 0;
        }""",
        "=r,r,f,f", [cell, value, to_exact], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# A tile of 64 queries by 32 keys on 4 warps, as wgmma leaves it: value 4 j + 2 i + e of lane l of warp w is that of
# query 16 w + l // 4 + 8 i and key 2 (l % 4) + 8 j + e.
_LANE = """
    .reg .u32 lane, row, pair;
    mov.u32 lane, %tid.x;
    and.b32 pair, lane, 3;
    shr.u32 row, lane, 5;
    shl.b32 row, row, 4;
    and.b32 lane, lane, 31;
    shr.u32 lane, lane, 2;
    add.u32 row, row, lane;
"""
_PLACES = [(4 * j + 2 * i + e, 8 * (i - j) - e) for j in range(4) for i in range(2) for e in range(2)]


def _check_assembly() -> str:
    """Writes infinity to memory unless the values' distances are those of _PLACES."""
    lines = [_LANE, ".reg .s32 d, wrong;", ".reg .pred p;", "shl.b32 pair, pair, 1;", "sub.s32 row, row, pair;"]
    lines.append("mov.u32 wrong, 0;")
    for value, offset in _PLACES:
        lines += [f"sub.s32 d, ${20 + value}, row;", f"sub.s32 d, d, {offset};", "or.b32 wrong, wrong, d;"]
    lines += ["setp.ne.s32 p, wrong, 0;", "@p st.global.u32 [$36], 0x7F800000;"]
    return "{ " + " ".join([*lines, *(f"mov.u32 ${i}, 0;" for i in range(4))]) + " }"


def _diagonals_assembly() -> str:
    """Adds 16 values, times a scale and rounded, to the cells of their distances: one addition for each distance."""
    lines = [".reg .f32 f;", ".reg .b32 n;"]
    for offset in sorted({offset for _, offset in _PLACES}):
        first, *other = [20 + value for value, x in _PLACES if x == offset]
        lines += [f"add.f32 f, ${first}, ${x};" for x in other]
        lines += [f"fma.rn.f32 f, {'f' if other else f'${first}'}, $36, 0f4B400000;", "mov.b32 n, f;"]
        lines += ["sub.u32 n, n, 0x4B400000;", f"red.shared.add.u32 [$4+{4 * offset}], n;"]
    return "{ " + " ".join([*lines, *(f"mov.u32 ${i}, 0;" for i in range(4))]) + " }"


_LANE_CELL = tl.constexpr(
    "{" + _LANE + "mad.lo.u32 $0, row, 4, $1; mul.lo.u32 pair, pair, 4256; add.u32 $0, $0, pair; }"
)
_CHECK, _DIAGONALS = tl.constexpr(_check_assembly()), tl.constexpr(_diagonals_assembly())
_CHECK_OPERANDS = tl.constexpr(",".join(["=r"] * 4 + ["f"] * 16 + ["r"] * 16 + ["l"] * 16))
_DIAGONALS_OPERANDS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 16 + ["f"] * 32))


@triton.jit
def _ring_lane(base):
    """Where a lane's first value goes in a tile whose first pair has the ring's lowest distance."""
    return tl.inline_asm_elementwise(_LANE_CELL, "=&r,r", [base], tl.int32, is_pure=True, pack=1)


@triton.jit
def _ring_check(value, distance, greatest):
    """Makes the tables' gradients not a number unless the tile lies as wgmma leaves it. distance: t - s, 0 at first."""
    where = greatest.to(tl.int64)
    tl.inline_asm_elementwise(_CHECK, _CHECK_OPERANDS, [value, distance, where], tl.int8, is_pure=False, pack=16)


@triton.jit
def _ring_add_wgmma(lane, value, to_exact):
    """`_ring_add` for a tile of wgmma's layout. lane: `_ring_lane`, and 4 times the cell of the tile's first pair."""
    tl.inline_asm_elementwise(_DIAGONALS, _DIAGONALS_OPERANDS, [lane, value, to_exact], tl.int8, is_pure=False, pack=16)


@triton.jit
def _ring_flush(base, grad, low, first, last, length):
    """Moves the distances first .. last - 1 to grad [N] int64; low: the distance of the first cell. For 4 warps."""
    lane = tl.arange(0, 128)
    for start in range(first, last, 128):
        distance = start + lane
        value = tl.inline_asm_elementwise(
            """{
                .reg .u32 n, z;
                mov.u32 z, 0;
                mov.u32 $0, 0;
                .reg .pred p;
                setp.lt.u32 p, $1, $2;
                @p ld.shared.u32 $0, [$3];
                @p st.shared.u32 [$3], z;
                @p ld.shared.u32 n, [$3+4264];
                @p st.shared.u32 [$3+4264], z;
                @p add.u32 $0, $0, n;
                @p ld.shared.u32 n, [$3+8528];
                @p st.shared.u32 [$3+8528], z;
                @p add.u32 $0, $0, n;
                @p ld.shared.u32 n, [$3+12792];
                @p st.shared.u32 [$3+12792], z;
                @p add.u32 $0, $0, n;
            }""",
            "=&r,r,r,r", [distance - low, RING, base + 4 * (distance - low)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        use = (distance >= 0) & (distance < length) & (value != 0)
        tl.atomic_add(grad + distance, value.to(tl.int64), use, sem="relaxed")
