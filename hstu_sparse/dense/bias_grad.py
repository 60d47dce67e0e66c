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


def _greatest_assembly(kind: str) -> str:
    """The pair of greatest absolute values, or not a number, of 8 values in pairs and of the pair so far; 7 zeros."""
    lines = [".reg .b32 x<4>;", *(f"and.b32 x{i}, ${16 + i}, 0x7FFF7FFF;" for i in range(4))]
    lines += [f"max.NaN.{kind}x2 x{i}, x{i}, x{j};" for i, j in ((0, 1), (2, 3), (0, 2))]
    lines.append(f"max.NaN.{kind}x2 $0, x0, $8;")
    return "{ " + " ".join([*lines, *(f"mov.b32 ${i}, 0;" for i in range(1, 8))]) + " }"


def _number_assembly(kind: str) -> str:
    """The greater one of such a pair as fp32; infinity where it is not a number."""
    lines = [".reg .b16 a, b;", ".reg .b32 c, d;", ".reg .f32 x, y;", ".reg .pred none;"]
    if kind == "f16":
        lines += ["mov.b32 {a, b}, $1;", "cvt.f32.f16 x, a;", "cvt.f32.f16 y, b;"]
    else:
        lines += ["shl.b32 c, $1, 16;", "and.b32 d, $1, 0xFFFF0000;", "mov.b32 x, c;", "mov.b32 y, d;"]
    lines += ["max.NaN.f32 x, x, y;", "setp.nan.f32 none, x, x;", "selp.f32 $0, 0f7F800000, x, none;"]
    return "{ " + " ".join(lines) + " }"


_GREATEST, _GREATEST_FP16 = (tl.constexpr(_greatest_assembly(kind)) for kind in ("bf16", "f16"))
_NUMBER, _NUMBER_FP16 = (tl.constexpr(_number_assembly(kind)) for kind in ("bf16", "f16"))
_GREATEST_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 12))


@triton.jit
def _greatest(most, x):
    """`most` (int32, zeros at first, as large as x, one in eight used) with the |x| of a tile of bf16 or fp16."""
    assembly: tl.constexpr = _GREATEST_FP16 if x.dtype == tl.float16 else _GREATEST
    return tl.inline_asm_elementwise(assembly, _GREATEST_OPERANDS, [most, x], tl.int32, is_pure=True, pack=8)


@triton.jit
def _keep_greatest(most, greatest, IS_FP16: tl.constexpr):
    """greatest [1] fp32, zero before, becomes at least a bound of the |x| that rounded to `most`; infinity for one that
    is not a number.
    """
    assembly: tl.constexpr = _NUMBER_FP16 if IS_FP16 else _NUMBER
    found = tl.inline_asm_elementwise(assembly, "=f,r", [most], tl.float32, is_pure=True, pack=1)
    # Rounding takes less than 1%, but in fp16 up to 2^-25, and all of what is smaller.
    bound = 1.1 * tl.max(tl.max(found, 1), 0) + (6e-8 if IS_FP16 else 1e-30)
    tl.atomic_max(greatest, bound, sem="relaxed")


@triton.jit
def _exact_scale(greatest):
    """What turns a ds into an integer of 21 bits; greatest: a bound of all |ds|."""
    return 2097151.0 / tl.load(greatest)


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
def _zero(base, BYTES: tl.constexpr):
    """Zeroes BYTES (a multiple of 16) of shared memory from `base` on; a barrier has to follow."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred done;
            .reg .u32 a, end, step, none;
            mov.u32 none, 0;
            mov.u32 a, %tid.x;
            mad.lo.u32 a, a, 16, $1;
            mov.u32 step, %ntid.x;
            shl.b32 step, step, 4;
            add.u32 end, $1, $2;
            AGAIN:
            setp.ge.u32 done, a, end;
            @done bra DONE;
            st.shared.v4.u32 [a], {none, none, none, none};
            add.u32 a, a, step;
            bra AGAIN;
            DONE:
            mov.u32 $0, 0;
        }""",
        "=r,r,r", [base, BYTES], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _histogram_open(token):
    """The shared-memory address of [152, 32] words, zeroed. Called once per program; `token` is any int32 scalar."""
    base = tl.inline_asm_elementwise(
        "{ .shared .align 128 .b8 hstu_histogram[19456]; mov.u32 $0, hstu_histogram; }", "=r,r", [token], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    _zero(base, 19456)
    return base


@triton.jit
def _histogram_lane(base):
    """Where a lane's cells begin."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 lane; mov.u32 lane, %tid.x; and.b32 lane, lane, 31; mad.lo.u32 $0, lane, 4, $1; }", "=&r,r",
        [base], tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _histogram_add(lane, bucket, value, scale, EXACT: tl.constexpr):
    """histogram[bucket] += value for a tile; EXACT: value * scale, rounded, in integers. lane: `_histogram_lane`.

    Else four neighbours that share a bucket, as most do, are added first: an addition in fp32 takes long.
    """
    cell = lane + 128 * bucket
    if EXACT:
        tl.inline_asm_elementwise(
            """{
                .reg .f32 f;
                .reg .b32 n;
                fma.rn.f32 f, $2, $3, 0f4B400000;
                mov.b32 n, f;
                sub.u32 n, n, 0x4B400000;
                red.shared.add.u32 [$1], n;
                mov.u32 $0, 0;
            }""",
            "=r,r,f,f", [cell, value, scale], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .f32 sum;
                .reg .pred same;
                setp.eq.u32 same, $1, $2;
                setp.eq.and.u32 same, $1, $3, same;
                setp.eq.and.u32 same, $1, $4, same;
                @!same bra APART;
                add.f32 sum, $5, $6;
                add.f32 sum, sum, $7;
                add.f32 sum, sum, $8;
                red.shared.add.f32 [$1], sum;
                bra DONE;
                APART:
                red.shared.add.f32 [$1], $5;
                red.shared.add.f32 [$2], $6;
                red.shared.add.f32 [$3], $7;
                red.shared.add.f32 [$4], $8;
                DONE:
                mov.u32 $0, 0;
            }""",
            "=r,r,r,r,r,f,f,f,f", [cell, value], tl.int8, is_pure=False, pack=4,
        )  # fmt: skip


def _sum_assembly(pack: int, past_edge: bool, exact: bool) -> str:
    """Adds up `pack` values and adds the sum times a scale to a lane's cell.

    past_edge: only the values at or past an edge, and takes their sum from the cell of the bucket before. Operands:
    pack / 4 results, and for each value the cell, the value, the scale and, past_edge, the two places of `_reached`.
    """
    cell, value, scale, own, other = (pack // 4 + pack * i for i in range(5))
    lines = [".reg .f32 s<4>, t;", ".reg .b32 n;", *(f"mov.f32 s{i}, 0f00000000;" for i in range(4))]
    for i in range(pack):
        if past_edge:
            lines += [f"add.sat.f32 t, ${own + i}, ${other + i};", f"fma.rn.f32 s{i % 4}, t, ${value + i}, s{i % 4};"]
        else:
            lines.append(f"add.f32 s{i % 4}, s{i % 4}, ${value + i};")
    lines += ["add.f32 s0, s0, s1;", "add.f32 s2, s2, s3;", "add.f32 s0, s0, s2;", f"mul.f32 s0, s0, ${scale};"]
    kind, negate = ("u32", "neg.s32 n, n;") if exact else ("f32", "xor.b32 n, n, 0x80000000;")
    lines.append("cvt.rni.s32.f32 n, s0;" if exact else "mov.b32 n, s0;")
    lines.append(f"red.shared.add.{kind} [${cell}], n;")
    if past_edge:
        lines += [negate, f"red.shared.add.{kind} [${cell}+-128], n;"]
    return "{ " + " ".join(lines + [f"mov.u32 ${i}, 0;" for i in range(pack // 4)]) + " }"


def _sum_operands(pack: int, past_edge: bool) -> str:
    return ",".join(["=r"] * (pack // 4) + ["r"] * pack + ["f"] * pack * (4 if past_edge else 2))


_ADD_SUM, _MOVE_SUM = (tl.constexpr(_sum_assembly(16, edge, True)) for edge in (False, True))
_ADD_SUM_FP32, _MOVE_SUM_FP32 = (tl.constexpr(_sum_assembly(4, edge, False)) for edge in (False, True))
_ADD_OPERANDS, _MOVE_OPERANDS = (tl.constexpr(_sum_operands(16, edge)) for edge in (False, True))
_ADD_OPERANDS_FP32, _MOVE_OPERANDS_FP32 = (tl.constexpr(_sum_operands(4, edge)) for edge in (False, True))


@triton.jit
def _histogram_add_sum(lane, bucket, value, scale, EXACT: tl.constexpr):
    """histogram[bucket] += scale * the sum of a tile (EXACT: in integers).

    `bucket` is one number. A thread adds up what it has, 16 or 4 values at a time, so that no thread waits for another.
    """
    cell = lane + 128 * bucket
    if EXACT:
        tl.inline_asm_elementwise(_ADD_SUM, _ADD_OPERANDS, [cell, value, scale], tl.int8, is_pure=False, pack=16)
    else:
        tl.inline_asm_elementwise(
            _ADD_SUM_FP32, _ADD_OPERANDS_FP32, [cell, value, scale], tl.int8, is_pure=False, pack=4
        )


@triton.jit
def _histogram_move_sum(lane, bucket, value, own, other, scale, EXACT: tl.constexpr):
    """The same with what has reached an edge (own, other: see `_reached`), and histogram[bucket - 1] -= as much."""
    cell = lane + 128 * bucket
    if EXACT:
        tl.inline_asm_elementwise(
            _MOVE_SUM, _MOVE_OPERANDS, [cell, value, scale, own, other], tl.int8, is_pure=False, pack=16
        )
    else:
        tl.inline_asm_elementwise(
            _MOVE_SUM_FP32, _MOVE_OPERANDS_FP32, [cell, value, scale, own, other], tl.int8, is_pure=False, pack=4
        )


def _total_assembly(exact: bool) -> str:
    """The sum of a bucket's 32 cells, the first one another for every bucket: lanes do not meet in a bank."""
    kind, zero = ("s32", "mov.s64 $0, 0;") if exact else ("f32", "mov.f32 $0, 0f00000000;")
    lines = [".reg .pred out;", ".reg .u32 first, a;", f".reg .{kind} x;", zero, "setp.gt.u32 out, $2, 151;"]
    lines += ["@out bra DONE;", "and.b32 a, $2, 31;", "mad.lo.u32 first, $2, 128, $1;"]
    lines.append("mad.lo.u32 first, a, 4, first;")
    for i in range(32):
        lines += [f"xor.b32 a, first, {4 * i};", f"ld.shared.{kind} x, [a];"]
        lines.append("mad.wide.s32 $0, x, 1, $0;" if exact else "add.f32 $0, $0, x;")
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


_TOTAL, _TOTAL_FP32 = (tl.constexpr(_total_assembly(exact)) for exact in (True, False))


@triton.jit
def _histogram_close(base, grad, scale, shift, TABLE: tl.constexpr, EXACT: tl.constexpr):
    """grad[bucket] += scale * histogram[bucket]; EXACT: histogram[bucket] << shift."""
    tl.debug_barrier()
    bucket = tl.arange(0, 256)
    if EXACT:
        total = tl.inline_asm_elementwise(_TOTAL, "=&l,r,r", [base, bucket], tl.int64, is_pure=False, pack=1) << shift
    else:
        total = tl.inline_asm_elementwise(_TOTAL_FP32, "=&f,r,r", [base, bucket], tl.float32, is_pure=False, pack=1)
        total *= scale
    tl.atomic_add(grad + bucket, total, (bucket < TABLE) & (total != 0), sem="relaxed")


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
    _zero(base, 17408)
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
