"""The fused attention kernel for many queries on Hopper, in Gluon: warps that unpack beside warps that multiply.

Letters: Tq queries, B sequences, S sink tokens, H heads, D = V = 128 head size, G heads of a head group, HG = H / G,
R = 128 tokens of a tile, BQ = 128 queries of a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hstu_sparse.rotatekv.codec import sign
from hstu_sparse.tiles import locate

R = gl.constexpr(128)
D = gl.constexpr(128)
PAGE = gl.constexpr(16)
SIGNS = gl.constexpr(-2147450880)
# A token's words are one thread's.
TOKENS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
TOKEN = gl.constexpr(gl.SliceLayout(1, TOKENS))
WORDS = gl.constexpr(gl.SliceLayout(0, TOKENS))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# As the threads have the sums, with each one's neighbouring channels in neighbouring registers.
RESULT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
# A thread has half a query.
HALVES = gl.constexpr(gl.BlockedLayout([1, 1, 64], [16, 2, 1], [4, 1, 1], [2, 1, 0]))
HALF_ROW = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))

locate_query = gluon.jit(locate.fn)
sign_of = gluon.jit(sign.fn)


@gluon.jit
def fused_pairs(a, b, c):
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], gl.int32, True, 1)


@gluon.jit
def both(x, HIGH: gl.constexpr):
    if HIGH:
        return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [x], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [x], gl.int32, True, 1)


@gluon.jit
def code_pairs(words, large, FIELD: gl.constexpr):
    """Pair of codes at a field of 2 bits of words [R, 4] as int32 pairs of fp16."""
    PLACE: gl.constexpr = FIELD % 5 * 2
    x = (words >> (FIELD // 5 * 10)) & (0x30003 << PLACE)
    step = gl.full([R, 4], ((15 - PLACE) << 10) * 0x10001, gl.int32, TOKENS)
    minus = gl.full([R, 4], ((25 - PLACE) << 10) * 0x10001 + SIGNS, gl.int32, TOKENS)
    return fused_pairs(x | large, step, minus)


@gluon.jit
def joined(x, OF_KEYS: gl.constexpr):
    """[R, 64] fp16 of eight int32 pairs [R, 4], by field: channels of keys as they are numbered, of values as ..."""
    x = gl.join(gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3])), gl.join(gl.join(x[4], x[5]), gl.join(x[6], x[7])))
    if OF_KEYS:
        x = gl.permute(x, (0, 4, 3, 2, 1))
    else:
        x = gl.permute(x, (0, 4, 1, 3, 2))
    x = gl.reshape(x, [R, 32])
    x = gl.join(x.to(gl.int16), (x >> 16).to(gl.int16)).to(gl.float16, bitcast=True)
    return gl.reshape(x, [R, 64])


@gluon.jit
def load_words(codes, ranges, row, slot, block, BLOCKS: gl.constexpr, COUNT: gl.constexpr, some):
    found = ()
    scales = ()
    for i in gl.static_range(COUNT):
        at = (row * BLOCKS + block + i) * PAGE + slot
        found += (gl.load(codes + (at * 4)[:, None] + gl.arange(0, 4, WORDS)[None, :], some, 0),)
        scales += (gl.load(ranges + at, some, 0),)
    return found, scales


@gluon.jit
def produce(
    stored, ring, HG: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr,
    PRODUCERS: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Unpacks tiles into shared memory."""
    page_table, k_codes, k_ranges, v_codes, v_ranges, group, own, first, last, pages = stored
    keys, values, k_full, k_empty, v_full, v_empty, _ = ring
    r = gl.arange(0, R, TOKEN)
    slot = r % PAGE
    some = first < last
    page = gl.load(page_table + gl.minimum((first + WHICH) * (R // PAGE) + r // PAGE, pages - 1), some, 0)
    large = (page >> 31)[:, None] | gl.full([R, 4], 0x64006400, gl.int32, TOKENS)
    if PREFETCH:
        row = page.to(gl.int64) * HG + group
        words, ranges = load_words(k_codes, k_ranges, row, slot, 0, 2 * G, 2 * G, some)
        v_words, v_ranges_here = load_words(v_codes, v_ranges, row, slot, own * 2, 2 * G, 2, some)
        page = gl.load(
            page_table + gl.minimum((first + WHICH + PRODUCERS) * (R // PAGE) + r // PAGE, pages - 1), some, 0
        )
    for tile in range(first + WHICH, last, PRODUCERS):
        i = tile - first
        stage = i % STAGES
        phase = (i // STAGES) & 1
        if not PREFETCH:
            row = page.to(gl.int64) * HG + group
            words, ranges = load_words(k_codes, k_ranges, row, slot, 0, 2 * G, 2 * G, True)
            v_words, v_ranges_here = load_words(v_codes, v_ranges, row, slot, own * 2, 2 * G, 2, True)
            page = gl.load(page_table + gl.minimum((tile + PRODUCERS) * (R // PAGE) + r // PAGE, pages - 1))
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        for b in gl.static_range(2):
            zero = both(ranges[b], True)
            for g in gl.static_range(1, G):
                flip = gl.where(sign_of(g, own) < 0, SIGNS, 0)
                one = gl.full([R], 0x3C003C00, gl.int32, TOKEN) ^ flip
                zero = fused_pairs(both(ranges[g * 2 + b], True), one, zero)
            zero = gl.broadcast(zero[:, None], words[0])[0]
            pairs = (zero, zero, zero, zero, zero, zero, zero, zero)
            for g in gl.static_range(G):
                step = both(ranges[g * 2 + b], False) ^ gl.where(sign_of(g, own) < 0, SIGNS, 0)
                step = gl.broadcast(step[:, None], words[0])[0]
                new = ()
                for f in gl.static_range(8):
                    new += (fused_pairs(code_pairs(words[g * 2 + b], large, f), step, pairs[f]),)
                pairs = new
            keys.index(stage).slice(b * 64, 64, 1).store(joined(pairs, True))
        fence_async_shared()
        mbarrier.arrive(k_full.index(stage), count=1)
        if PREFETCH:
            row = page.to(gl.int64) * HG + group
            words, ranges = load_words(k_codes, k_ranges, row, slot, 0, 2 * G, 2 * G, True)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        for b in gl.static_range(2):
            zero = gl.broadcast(both(v_ranges_here[b], True)[:, None], v_words[0])[0]
            step = gl.broadcast(both(v_ranges_here[b], False)[:, None], v_words[0])[0]
            pairs = ()
            for f in gl.static_range(8):
                pairs += (fused_pairs(code_pairs(v_words[b], large, f), step, zero),)
            values.index(stage).slice(b * 64, 64, 1).store(joined(pairs, False))
        fence_async_shared()
        mbarrier.arrive(v_full.index(stage), count=1)
        if PREFETCH:
            v_words, v_ranges_here = load_words(v_codes, v_ranges, row, slot, own * 2, 2 * G, 2, True)
            page = gl.load(page_table + gl.minimum((tile + 2 * PRODUCERS) * (R // PAGE) + r // PAGE, pages - 1))


@gluon.jit
def transformed(base, real):
    """Queries [64, D] at `base`, pointers [64], as keys meet them, divided by their greatest element; [64] that."""
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
    channel = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))
    pointers = gl.expand_dims(gl.expand_dims(base, 1), 2) + gl.expand_dims(gl.expand_dims(channel, 0), 1)
    some = gl.expand_dims(gl.expand_dims(real, 1), 2)
    second = gl.load(pointers + 64, some, 0.0).to(gl.float32)
    x = gl.load(pointers, some, 0.0).to(gl.float32)
    x += gl.where(gl.expand_dims(gl.expand_dims(half, 0), 2) == 0, second, -second)
    for _ in gl.static_range(6):
        even, odd = gl.split(gl.reshape(x, [64, 2, 32, 2]))
        x = gl.reshape(gl.permute(gl.join(even + odd, even - odd), (0, 1, 3, 2)), [64, 2, 64])
    x = gl.reshape(x, [64, D])
    most = gl.max(gl.abs(x), 1)
    most = gl.where(most > 0.0, most, 1.0)
    return (x * (1.0 / most)[:, None]).to(gl.float16), gl.convert_layout(most, ROW)


@gluon.jit
def weigh(scores, factor, greatest, total, tile, packed):
    """(weights [64, R] fp32, new maximum, new total, shrink)."""
    if (tile + 1) * R > packed:
        inside = tile * R + gl.arange(0, R, COLUMN) < packed
        scores = gl.where(inside[None, :], scores, float("-inf"))
    new = gl.maximum(greatest, gl.max(scores, 1) * factor)
    shrink = gl.exp2(greatest - new)
    weights = gl.exp2(scores * factor[:, None] - new[:, None])
    return weights, new, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def attend(
    asked,
    ring,
    H: gl.constexpr,
    STAGES: gl.constexpr,
    WHICH: gl.constexpr,
    LSE: gl.constexpr,
    AHEAD: gl.constexpr,
    QREG: gl.constexpr,
    FUSED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """64 queries of one head against the tiles that `produce` makes."""
    (
        queries,
        factors,
        out,
        lse,
        first_query,
        asked_count,
        q_tile,
        head,
        split_row,
        first,
        last,
        packed,
        query_tiles,
        q_stride_t,
        q_stride_h,
        scale,
    ) = asked
    keys, values, k_full, k_empty, v_full, v_empty, turns = ring
    query_tile = query_tiles.index(WHICH)
    if FUSED:
        index = q_tile * 128 + WHICH * 64 + gl.arange(0, 64, HALF_ROW)
        base = queries + (first_query + index) * q_stride_t + head.to(gl.int64) * q_stride_h
        q, factor = transformed(base, index < asked_count)
        factor *= scale
        index = q_tile * 128 + WHICH * 64 + gl.arange(0, 64, ROW)
        real = index < asked_count
    else:
        index = q_tile * 128 + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, QUERIES))
        at = ((first_query + index) * H + head) * D
        column = gl.arange(0, D, gl.SliceLayout(0, QUERIES))
        q = gl.load(queries + at[:, None] + column[None, :], (index < asked_count)[:, None], 0.0)
        index = q_tile * 128 + WHICH * 64 + gl.arange(0, 64, ROW)
        real = index < asked_count
        factor = gl.load(factors + (first_query + index) * H + head, real, 0.0)
    query_tile.store(q)
    fence_async_shared()
    query = query_tile
    if QREG:
        query = query_tile.load(WEIGHTS)
    none = gl.zeros([64, R], gl.float32, SCORES)
    sums = gl.zeros([64, D], gl.float32, SCORES)
    total = gl.zeros([64], gl.float32, ROW)
    greatest = gl.full([64], float("-inf"), gl.float32, ROW)
    if AHEAD:
        if first < last:
            mbarrier.wait(k_full.index(0), 0)
            scores = warpgroup_mma(query, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_empty.index(0), count=1)
            weights, greatest, total, shrink = weigh(scores, factor, greatest, total, first, packed)
            weights = gl.convert_layout(weights.to(gl.float16), WEIGHTS)
            for tile in range(first + 1, last):
                i = tile - first
                stage = i % STAGES
                before = (i - 1) % STAGES
                mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
                if TURNS:
                    mbarrier.wait(turns.index(WHICH), (i & 1) ^ WHICH)
                scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
                sums = warpgroup_mma(weights, values.index(before), sums, is_async=True)
                if TURNS:
                    mbarrier.arrive(turns.index(1 - WHICH), count=1)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                new, greatest, total, shrink = weigh(scores, factor, greatest, total, tile, packed)
                sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))
                mbarrier.arrive(v_empty.index(before), count=1)
                sums = sums * shrink[:, None]
                weights = gl.convert_layout(new.to(gl.float16), WEIGHTS)
            i = last - 1 - first
            mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
            sums = warpgroup_mma(weights, values.index(i % STAGES), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
    else:
        for tile in range(first, last):
            i = tile - first
            stage = i % STAGES
            phase = (i // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            weights, greatest, total, shrink = weigh(scores, factor, greatest, total, tile, packed)
            sums = sums * shrink[:, None]
            weights = gl.convert_layout(weights.to(gl.float16), WEIGHTS)
            mbarrier.wait(v_full.index(stage), phase)
            sums = warpgroup_mma(weights, values.index(stage), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(v_empty.index(stage), count=1)

    divisor = gl.where(total > 0.0, total, 1.0)
    sums = sums * (1.0 / divisor)[:, None]
    row = (split_row + first_query + index) * H + head
    if LSE:
        value = gl.where(total > 0.0, greatest * 0.6931471805599453 + gl.log(divisor), float("-inf"))
        gl.store(lse + row, value, real)
    y = gl.permute(gl.reshape(sums.to(out.dtype.element_ty), [64, 4, 4, 4, 2]), (0, 1, 3, 2, 4))
    y = gl.convert_layout(gl.reshape(y, [64, D]), RESULT, assert_trivial=True)
    index = q_tile * 128 + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, RESULT))
    row = (split_row + first_query + index) * H + head
    column = gl.arange(0, D, gl.SliceLayout(0, RESULT))
    gl.store(out + (row * D)[:, None] + column[None, :], y, (index < asked_count)[:, None])


@gluon.jit(do_not_specialize=["B", "S", "Tq", "SPLITS"])
def rotatekv_hopper_fwd_kernel(
    queries, factors, q_offsets, seq_offsets, page_offsets, page_table, k_codes, k_ranges, v_codes, v_ranges, out, lse,
    B, S, Tq, SPLITS, q_stride_t, q_stride_h, scale,
    HG: gl.constexpr, G: gl.constexpr, LSE: gl.constexpr, STAGES: gl.constexpr, PRODUCERS: gl.constexpr,
    REGISTERS: gl.constexpr, AHEAD: gl.constexpr, PREFETCH: gl.constexpr, QREG: gl.constexpr,
    FUSED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One part of 128 queries of one head; out and lse: [SPLITS, Tq, H, ...], or the final ones."""
    H: gl.constexpr = HG * G
    b, first_query, asked_count, q_tile = locate_query(q_offsets, gl.program_id(0) // (SPLITS * H), B, 128)
    head = gl.program_id(0) % H
    group = head // G
    own = head % G
    split = gl.program_id(0) // H % SPLITS
    begin = gl.load(seq_offsets + b)
    packed = gl.maximum((gl.load(seq_offsets + b + 1) - begin).to(gl.int32) - S, 0)
    tiles = (packed + R - 1) // R
    per = (tiles + SPLITS - 1) // SPLITS
    first = split * per
    last = gl.minimum(tiles, first + per)
    # A program without queries does nothing.
    last = gl.where(q_tile * 128 < asked_count, last, first)
    pages = (packed + PAGE - 1) // PAGE
    page_table += gl.load(page_offsets + b)
    split_row = split * Tq.to(gl.int64)

    query_tiles = gl.allocate_shared_memory(gl.float16, [2, 64, D], SHARED)
    keys = gl.allocate_shared_memory(gl.float16, [STAGES, R, D], SHARED)
    values = gl.allocate_shared_memory(gl.float16, [STAGES, R, D], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    ring = keys, values, k_full, k_empty, v_full, v_empty, turns
    asked = (
        queries,
        factors,
        out,
        lse,
        first_query,
        asked_count,
        q_tile,
        head,
        split_row,
        first,
        last,
        packed,
        query_tiles,
        q_stride_t,
        q_stride_h,
        scale,
    )
    stored = page_table, k_codes, k_ranges, v_codes, v_ranges, group, own, first, last, pages
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    if PRODUCERS == 1:
        gl.warp_specialize(
            [
                (attend, (asked, ring, H, STAGES, ZERO, LSE, AHEAD, QREG, FUSED, TURNS)),
                (attend, (asked, ring, H, STAGES, ONE, LSE, AHEAD, QREG, FUSED, TURNS)),
                (produce, (stored, ring, HG, G, STAGES, ZERO, PRODUCERS, PREFETCH)),
            ],
            [4, 4],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (asked, ring, H, STAGES, ZERO, LSE, AHEAD, QREG, FUSED, TURNS)),
                (attend, (asked, ring, H, STAGES, ONE, LSE, AHEAD, QREG, FUSED, TURNS)),
                (produce, (stored, ring, HG, G, STAGES, ZERO, PRODUCERS, PREFETCH)),
                (produce, (stored, ring, HG, G, STAGES, ONE, PRODUCERS, PREFETCH)),
            ],
            [4, 4, 4],
            [REGISTERS, (512 - 2 * REGISTERS) // 2, (512 - 2 * REGISTERS) // 2],
        )
