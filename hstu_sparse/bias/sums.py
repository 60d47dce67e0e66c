"""Sum the gradients of the bias tables of one program in shared memory, by inline assembly: a histogram and a ring.

tiles/assembly.py decides which machines use them.

Letters: N max_seq_len; t and s: the positions of queries and keys in their sequence.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.buckets import MAX_BUCKETS

# The assembly declares static shared memory. Triton's dynamic shared memory follows it and must be aligned to 1 KB for
# its swizzled tiles: hence sizes in whole KB.
_KB = 1024
_WORD = 4
# The bits of 1.5 * 2^23 in fp32. The low bits of its sum with a number below 2^22 are the number, rounded.
_ROUNDING = "4B400000"
# Callers scale their terms to at most this value; rounding is correct up to twice as much.
MAX_TERM = tl.constexpr(2.0**21 - 1)


@triton.jit
def _zero(base, BYTES: tl.constexpr):
    """Zero BYTES (a multiple of 16) of shared memory from `base` on. The caller adds a barrier."""
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
def barrier(token):
    """Synchronise the program's threads. `tl.debug_barrier` would prevent the pipelining of the loop around it."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [token], tl.int32, is_pure=False, pack=1)


# The histogram sums the gradient of the time table: a row for each bucket, a column for each of the 32 lanes of a warp,
# so that no two lanes access the same bank.
_LANES = 32
HISTOGRAM_ROWS = 152  # buckets, the entries that are read after the table, and the bucket of masked pairs
HISTOGRAM_BYTES = HISTOGRAM_ROWS * _LANES * _WORD
assert HISTOGRAM_BYTES % _KB == 0 and HISTOGRAM_ROWS >= MAX_BUCKETS + 6
_ROW, _HISTOGRAM = tl.constexpr(_LANES * _WORD), tl.constexpr(HISTOGRAM_BYTES)
_OPEN_HISTOGRAM = tl.constexpr(
    f"{{ .shared .align 128 .b8 hstu_histogram[{HISTOGRAM_BYTES}]; mov.u32 $0, hstu_histogram; }}"
)
_LANE_CELL = tl.constexpr(
    f"{{ .reg .u32 n; mov.u32 n, %tid.x; and.b32 n, n, {_LANES - 1}; mad.lo.u32 $0, n, {_WORD}, $1; }}"
)


@triton.jit
def histogram_open(token):
    """Zero the histogram and return its shared-memory address. Call it once in a program. token: any int32 scalar."""
    base = tl.inline_asm_elementwise(_OPEN_HISTOGRAM, "=r,r", [token], tl.int32, is_pure=False, pack=1)
    _zero(base, _HISTOGRAM)
    return base


@triton.jit
def histogram_clear(base):
    """Zero the histogram again, between barriers."""
    tl.debug_barrier()
    _zero(base, _HISTOGRAM)
    tl.debug_barrier()


@triton.jit
def histogram_lane(base):
    """Return the address of the cells of each thread's lane."""
    return tl.inline_asm_elementwise(_LANE_CELL, "=&r,r", [base], tl.int32, is_pure=True, pack=1)


_ADD_EXACT = tl.constexpr(f"""{{
    .reg .f32 f;
    .reg .b32 n;
    fma.rn.f32 f, $2, $3, 0f{_ROUNDING};
    mov.b32 n, f;
    sub.u32 n, n, 0x{_ROUNDING};
    red.shared.add.u32 [$1], n;
    mov.u32 $0, 0;
}}""")
_ADD_FOUR = tl.constexpr("""{
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
}""")


@triton.jit
def histogram_add(lane, bucket, value, scale, EXACT: tl.constexpr):
    """Add a tile of values to histogram[bucket]. EXACT: add the integers round(value * scale), otherwise fp32 values.

    An atomic addition of fp32 is slow. Four neighbours share one if they have the same bucket, as most do. lane:
    `histogram_lane`.
    """
    cell = lane + _ROW * bucket
    if EXACT:
        tl.inline_asm_elementwise(_ADD_EXACT, "=r,r,f,f", [cell, value, scale], tl.int32, is_pure=False, pack=1)
    else:
        tl.inline_asm_elementwise(_ADD_FOUR, "=r,r,r,r,r,f,f,f,f", [cell, value], tl.int8, is_pure=False, pack=4)


def _sum_assembly(pack: int, past_edge: bool, exact: bool, row_bytes: int) -> str:
    """Return assembly that sums `pack` values and adds the sum times a scale to a cell of the histogram.

    past_edge: sum only the values at or past an edge, and subtract the sum from the cell of the previous bucket.
    Operands: pack / 4 unused results, then the cells of all values, all values, a scale for each and, with past_edge,
    the first and then the second argument of `buckets.past_edge` for each.
    """
    cell, value, scale, resident, streamed = (pack // 4 + pack * i for i in range(5))
    lines = [".reg .f32 s<4>, t;", ".reg .b32 n;", *(f"mov.f32 s{i}, 0f00000000;" for i in range(4))]
    for i in range(pack):
        if past_edge:
            lines += [
                f"add.sat.f32 t, ${resident + i}, ${streamed + i};",
                f"fma.rn.f32 s{i % 4}, t, ${value + i}, s{i % 4};",
            ]
        else:
            lines.append(f"add.f32 s{i % 4}, s{i % 4}, ${value + i};")
    lines += ["add.f32 s0, s0, s1;", "add.f32 s2, s2, s3;", "add.f32 s0, s0, s2;", f"mul.f32 s0, s0, ${scale};"]
    kind, negate = ("u32", "neg.s32 n, n;") if exact else ("f32", "xor.b32 n, n, 0x80000000;")
    lines.append("cvt.rni.s32.f32 n, s0;" if exact else "mov.b32 n, s0;")
    lines.append(f"red.shared.add.{kind} [${cell}], n;")
    if past_edge:
        lines += [negate, f"red.shared.add.{kind} [${cell}+-{row_bytes}], n;"]
    return "{ " + " ".join(lines + [f"mov.u32 ${i}, 0;" for i in range(pack // 4)]) + " }"


def _sum_operands(pack: int, past_edge: bool) -> str:
    return ",".join(["=r"] * (pack // 4) + ["r"] * pack + ["f"] * pack * (4 if past_edge else 2))


# The number of values that a thread sums before it accesses shared memory.
_PACK, _PACK_FP32 = tl.constexpr(16), tl.constexpr(4)
_ADD_SUM, _MOVE_SUM = (tl.constexpr(_sum_assembly(_PACK.value, edge, True, _ROW.value)) for edge in (False, True))
_ADD_SUM_FP32, _MOVE_SUM_FP32 = (
    tl.constexpr(_sum_assembly(_PACK_FP32.value, edge, False, _ROW.value)) for edge in (False, True)
)
_ADD_OPERANDS, _MOVE_OPERANDS = (tl.constexpr(_sum_operands(_PACK.value, edge)) for edge in (False, True))
_ADD_OPERANDS_FP32, _MOVE_OPERANDS_FP32 = (
    tl.constexpr(_sum_operands(_PACK_FP32.value, edge)) for edge in (False, True)
)


@triton.jit
def histogram_add_sum(lane, bucket, value, scale, EXACT: tl.constexpr):
    """Add scale * sum(value) to histogram[bucket]; bucket: a scalar. EXACT: in integers.

    Every thread adds the sum of its values, 16 or 4 at a time, so that threads do not wait for one another.
    """
    cell = lane + _ROW * bucket
    if EXACT:
        tl.inline_asm_elementwise(_ADD_SUM, _ADD_OPERANDS, [cell, value, scale], tl.int8, is_pure=False, pack=_PACK)
    else:
        tl.inline_asm_elementwise(
            _ADD_SUM_FP32, _ADD_OPERANDS_FP32, [cell, value, scale], tl.int8, is_pure=False, pack=_PACK_FP32
        )


@triton.jit
def histogram_move_sum(lane, bucket, value, resident, streamed, scale, EXACT: tl.constexpr):
    """Move scale * the sum of the values at or past an edge from histogram[bucket - 1] to histogram[bucket].

    resident, streamed: the arguments of `buckets.past_edge`.
    """
    cell = lane + _ROW * bucket
    if EXACT:
        tl.inline_asm_elementwise(
            _MOVE_SUM, _MOVE_OPERANDS, [cell, value, scale, resident, streamed], tl.int8, is_pure=False, pack=_PACK
        )
    else:
        tl.inline_asm_elementwise(
            _MOVE_SUM_FP32, _MOVE_OPERANDS_FP32, [cell, value, scale, resident, streamed], tl.int8, is_pure=False,
            pack=_PACK_FP32,
        )  # fmt: skip


def _total_assembly(exact: bool, lanes: int) -> str:
    """Return assembly that sums the cells of a bucket; each bucket starts at another lane, to avoid bank conflicts."""
    kind, zero = ("s32", "mov.s64 $0, 0;") if exact else ("f32", "mov.f32 $0, 0f00000000;")
    lines = [".reg .pred out;", ".reg .u32 first, a;", f".reg .{kind} x;", zero]
    lines += [f"setp.gt.u32 out, $2, {HISTOGRAM_ROWS - 1};", "@out bra DONE;", f"and.b32 a, $2, {lanes - 1};"]
    lines += [f"mad.lo.u32 first, $2, {lanes * _WORD}, $1;", f"mad.lo.u32 first, a, {_WORD}, first;"]
    for i in range(lanes):
        lines += [f"xor.b32 a, first, {_WORD * i};", f"ld.shared.{kind} x, [a];"]
        lines.append("mad.wide.s32 $0, x, 1, $0;" if exact else "add.f32 $0, $0, x;")
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


_TOTAL, _TOTAL_FP32 = (tl.constexpr(_total_assembly(exact, _LANES)) for exact in (True, False))


@triton.jit
def histogram_close(
    base, grad, scale, shift, TABLE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Add scale * histogram[bucket] to grad[bucket], or, with EXACT and an int64 grad, histogram[bucket] << shift."""
    tl.debug_barrier()
    bucket = tl.arange(0, 256)
    if EXACT:
        total = tl.inline_asm_elementwise(_TOTAL, "=&l,r,r", [base, bucket], tl.int64, is_pure=False, pack=1)
        if grad.dtype.element_ty == tl.int64:
            total = total << shift
        else:
            total = total.to(tl.float32) * scale
    else:
        total = tl.inline_asm_elementwise(_TOTAL_FP32, "=&f,r,r", [base, bucket], tl.float32, is_pure=False, pack=1)
        total *= scale
    tl.atomic_add(grad + bucket, total, (bucket < TABLE) & (total != 0), sem="relaxed")


# The ring sums the gradient of the position table: a cell for each distance t - s. A program reaches the distances in
# descending order. When it runs out of cells, it moves all sums to global memory and uses the cells for the next
# distances.
#
# Cells are integers. Shared memory adds integers in one instruction, but fp32 in a compare-and-swap loop, and the sum
# of integers does not depend on the order. A cell gets at most one term for each query of the tile.
#
# There are four copies of the cells, one for each lane of a quad. In the layouts of the tensor cores, the lanes of a
# quad have neighbouring keys of one query, so that adjacent quads have the same distances. With copies, no two lanes
# access the same address, and due to the stride of the copies not the same bank either.
RING_CELLS = 1056
RING = tl.constexpr(RING_CELLS)
_COPIES = 4


_RING = tl.constexpr(17 * _KB)
# The stride of the copies, padded so that they begin in different banks.
_COPY_BYTES = (RING_CELLS + 10) * _WORD
assert _RING.value >= _COPIES * _COPY_BYTES
_OPEN_RING = tl.constexpr(f"{{ .shared .align 16 .b8 hstu_ring[{_RING.value}]; mov.u32 $0, hstu_ring; }}")
_COPY_OF_THREAD = tl.constexpr(
    f"{{ .reg .u32 n; mov.u32 n, %tid.x; and.b32 n, n, {_COPIES - 1}; mad.lo.u32 $0, n, {_COPY_BYTES}, $1; }}"
)


def _take_assembly() -> str:
    """Return assembly that sums the copies of a cell and zeroes them; the sum of a cell past the ring's end is 0."""
    lines = [".reg .u32 n, z;", "mov.u32 z, 0;", "mov.u32 $0, 0;", ".reg .pred p;", "setp.lt.u32 p, $1, $2;"]
    for copy in range(_COPIES):
        place = f"[$3+{copy * _COPY_BYTES}]" if copy else "[$3]"
        lines += [f"@p ld.shared.u32 {'n' if copy else '$0'}, {place};", f"@p st.shared.u32 {place}, z;"]
        lines += ["@p add.u32 $0, $0, n;"] if copy else []
    return "{ " + " ".join(lines) + " }"


_TAKE = tl.constexpr(_take_assembly())


@triton.jit
def ring_open(token):
    """Zero the ring and return its shared-memory address. Call it once in a program. token: any int32 scalar."""
    base = tl.inline_asm_elementwise(_OPEN_RING, "=r,r", [token], tl.int32, is_pure=False, pack=1)
    _zero(base, _RING)
    return base


@triton.jit
def ring_lane(base):
    """Return the address of each thread's copy."""
    return tl.inline_asm_elementwise(_COPY_OF_THREAD, "=&r,r", [base], tl.int32, is_pure=True, pack=1)


@triton.jit
def ring_add(cell, value, to_exact):
    """Add round(value * to_exact) to the cells at these addresses."""
    tl.inline_asm_elementwise(_ADD_EXACT, "=r,r,f,f", [cell, value, to_exact], tl.int32, is_pure=False, pack=1)


@triton.jit
def ring_take(base, cell):
    """Return the sums of cells and zero them; 0 for a cell past the ring's end."""
    return tl.inline_asm_elementwise(_TAKE, "=&r,r,r,r", [cell, RING, base + 4 * cell], tl.int32, is_pure=False, pack=1)


@triton.jit
def ring_flush(base, grad, low, first, last, length):
    """Move the sums of distances first .. last - 1 to grad [N] int64. low: the distance of cell 0. For 4 warps."""
    lane = tl.arange(0, 128)
    for start in range(first, last, 128):
        distance = start + lane
        value = ring_take(base, distance - low)
        use = (distance >= 0) & (distance < length) & (value != 0)
        tl.atomic_add(grad + distance, value.to(tl.int64), use, sem="relaxed")
