"""The fused attention kernel for many queries on Hopper: some warps unpack the history while others multiply.

Written in Gluon, Triton's language of explicit layouts, because Triton's compiler waits for every product whose operand
was computed. A program has 128 queries of one head, 64 for each of two groups of four warps (`attend`). A third group
unpacks the keys and values of 128 tokens after 128 tokens into a ring in shared memory (`produce`). Barriers in shared
memory say which of its stages are full and which are empty.

Letters: T cached tokens, Tq queries, B sequences, S sink tokens, H heads, G heads of a head group, HG = H / G. Heads
are of D = 128 channels for keys and for values, tiles of R = 128 tokens; codes have 2 bits, quantisation groups 64
channels.

The transform of a head group is that of its heads, D channels each, and then one across heads: the latter costs little
as codes are unpacked, the former goes to the queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hstu_sparse.pages.codec import sign
from hstu_sparse.tiles import locate

BQ = gl.constexpr(128)
D = gl.constexpr(128)
R = gl.constexpr(128)
PAGE = gl.constexpr(16)
LN2 = gl.constexpr(0.6931471805599453)
SIGNS = gl.constexpr(-2147450880)  # the sign bits of a pair
# Weights may be this power of two before a new maximum takes them back to 1. With values they are multiplied in fp16,
# which holds 2^15.
LAZY = gl.constexpr(8.0)
# Of a thread's 64 sums (outputs 0 to 63) and what each shrinks by ($128 to $191, one number for each of its two rows).
# A branch, so that a warp without a new maximum does none of it.
SHRINK = gl.constexpr(
    "{.reg .pred p; setp.neu.f32 p, $128, 0f3F800000; setp.neu.or.f32 p, $130, 0f3F800000, p; "
    "vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; "
    + "".join(f"mul.f32 ${i}, ${i}, ${128 + i}; " for i in range(64))
    + "DONE: }"
)
SHRINK_OPERANDS = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 64))

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# A thread unpacks a token: [R, words].
TOKENS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
TOKEN = gl.constexpr(gl.SliceLayout(1, TOKENS))
# A thread transforms half a query: [64, 2, 64].
HALVES = gl.constexpr(gl.BlockedLayout([1, 1, 64], [16, 2, 1], [4, 1, 1], [2, 1, 0]))
# Queries as they are loaded: [64, D].
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# As products have scores and sums: [64, 128].
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
# Each thread's own part of a row's total, two of eight: [64, 8].
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
# The sums as SCORES has them, but for their order in a thread and the channels' numbers: 8 neighbours side by side.
RESULT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)

search = gluon.jit(locate.fn)
sign_of = gluon.jit(sign.fn)


@gluon.jit
def locate_tile(offsets, slot, B, Tq):
    """As `tiles.locate`, without its search, each step of which waits for memory, where all sequences ask alike."""
    guess = gl.minimum(slot.to(gl.int64) * B // (Tq // BQ + B), B - 1).to(gl.int32)
    begin = gl.load(offsets + guess)
    end = gl.load(offsets + guess + 1)
    tile = slot - (begin // BQ).to(gl.int32) - guess
    b, first, length, found = guess, begin.to(gl.int64), (end - begin).to(gl.int32), tile
    if (tile < 0) | (slot > (end // BQ).to(gl.int32) + guess):
        b, first, length, found = search(offsets, slot, B, BQ)
    return b, first, length, found


@gluon.jit
def fused_pairs(a, b, c):
    """a * b + c of int32 pairs of fp16 numbers."""
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], gl.int32, True, 1)


@gluon.jit
def both(x, HIGH: gl.constexpr):
    """The low or the high half of an int32 twice."""
    if HIGH:
        return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [x], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [x], gl.int32, True, 1)


@gluon.jit
def rounded_pairs(x):
    """fp32 [64, R] as int32 pairs [64, R / 2] of fp16. In a loop fp16 numbers would be carried one by one."""
    low, high = gl.split(gl.reshape(x, [64, R // 2, 2]))
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)


@gluon.jit
def halves(pairs, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """fp16 [ROWS, COLUMNS] of int32 pairs."""
    x = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(gl.float16, bitcast=True)
    return gl.reshape(x, [ROWS, COLUMNS])


@gluon.jit
def code_pairs(words, large, FIELD: gl.constexpr):
    """The codes of a field of words [R, 4], as int32 pairs of fp16.

    large: [R, 4] int32, 2^10 twice, which the compiler does not know. Two constants go into one instruction if one of
    them stands in a register of each thread.
    """
    # In the mantissa of 2^10 the field at place p is worth code * 2^p.
    PLACE: gl.constexpr = FIELD % 5 * 2
    x = (words >> (FIELD // 5 * 10)) & (0x30003 << PLACE)
    step = gl.full([R, 4], ((15 - PLACE) << 10) * 0x10001, gl.int32, TOKENS)
    minus = gl.full([R, 4], ((25 - PLACE) << 10) * 0x10001 + SIGNS, gl.int32, TOKENS)
    return fused_pairs(x | large, step, minus)


@gluon.jit
def side_by_side(x, NUMBERED: gl.constexpr):
    """[R, 64] fp16 of eight int32 pairs [R, 4], by field: channel 8 field + 2 word + half.

    They stand as they are NUMBERED, or in each 32 channel 8 a + 2 b in the place of 8 b + 2 a: so a thread of `attend`
    gets 8 neighbours.
    """
    x = gl.join(gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3])), gl.join(gl.join(x[4], x[5]), gl.join(x[6], x[7])))
    if NUMBERED:
        x = gl.permute(x, (0, 4, 3, 2, 1))
    else:
        x = gl.permute(x, (0, 4, 1, 3, 2))
    return halves(gl.reshape(x, [R, 32]), R, 64)


@gluon.jit
def load_pages(page_table, tile, pages, some):
    """The page of each of a tile's tokens, [R]; the last one's of those behind it; 0 if there is not SOME."""
    return gl.load(page_table + gl.minimum(tile * (R // PAGE) + gl.arange(0, R, TOKEN) // PAGE, pages - 1), some, 0)


@gluon.jit
def load_words(codes, ranges, page, group, block, some, HG: gl.constexpr, BLOCKS: gl.constexpr, COUNT: gl.constexpr):
    """Words [R, 4] and scales and zeros, int32 [R], of COUNT of a page's and head group's BLOCKS, from `block` on."""
    words = ()
    found = ()
    for i in gl.static_range(COUNT):
        at = ((page.to(gl.int64) * HG + group) * BLOCKS + block + i) * PAGE + gl.arange(0, R, TOKEN) % PAGE
        words += (gl.load(codes + (at * 4)[:, None] + gl.arange(0, 4, gl.SliceLayout(0, TOKENS))[None, :], some, 0),)
        found += (gl.load(ranges + at, some, 0),)
    return words, found


@gluon.jit
def unpack(out, words, ranges, own, large, HEADS: gl.constexpr, NUMBERED: gl.constexpr):
    """A tile [R, D] into shared memory: a head's values (HEADS = 1) or what it sees of its group's keys (HEADS = G)."""
    for b in gl.static_range(2):
        zero = both(ranges[b], True)
        steps = (gl.broadcast(both(ranges[b], False)[:, None], words[0])[0],)
        for g in gl.static_range(1, HEADS):
            flip = gl.where(sign_of(g, own) < 0, SIGNS, 0)
            one = gl.full([R], 0x3C003C00, gl.int32, TOKEN)
            zero = fused_pairs(both(ranges[g * 2 + b], True), one ^ flip, zero)
            steps += (gl.broadcast((both(ranges[g * 2 + b], False) ^ flip)[:, None], words[0])[0],)
        zero = gl.broadcast(zero[:, None], words[0])[0]
        pairs = (zero, zero, zero, zero, zero, zero, zero, zero)
        for g in gl.static_range(HEADS):
            new = ()
            for f in gl.static_range(8):
                new += (fused_pairs(code_pairs(words[g * 2 + b], large, f), steps[g], pairs[f]),)
            pairs = new
        out.slice(b * 64, 64, 1).store(side_by_side(pairs, NUMBERED))


@gluon.jit
def produce(stored, ring, HG: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr):
    """Unpacks every tile of a head's keys, up to the transform of D, and values."""
    page_table, k_codes, k_ranges, v_codes, v_ranges, group, own, first, last, pages = stored
    keys, values, full, k_empty, v_empty = ring
    some = first < last
    page = load_pages(page_table, first, pages, some)
    large = (page >> 31)[:, None] | gl.full([R, 4], 0x64006400, gl.int32, TOKENS)
    k_words, k_found = load_words(k_codes, k_ranges, page, group, 0, some, HG, 2 * G, 2 * G)
    v_words, v_found = load_words(v_codes, v_ranges, page, group, own * 2, some, HG, 2 * G, 2)
    page = load_pages(page_table, first + 1, pages, some)
    for tile in range(first, last):
        stage = (tile - first) % STAGES
        phase = (tile - first) // STAGES & 1
        # The next tile's, before a wait, behind which ptxas does not put them off. The fence waits for all loads.
        next_k, next_k_found = load_words(k_codes, k_ranges, page, group, 0, True, HG, 2 * G, 2 * G)
        next_v, next_v_found = load_words(v_codes, v_ranges, page, group, own * 2, True, HG, 2 * G, 2)
        page = load_pages(page_table, tile + 2, pages, True)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        unpack(keys.index(stage), k_words, k_found, own, large, G, True)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        unpack(values.index(stage), v_words, v_found, own, large, 1, False)
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)
        k_words, k_found, v_words, v_found = next_k, next_k_found, next_v, next_v_found


@gluon.jit
def transform(tile, DTYPE: gl.constexpr):
    """Queries [64, D] of DTYPE in a tile of shared memory: transformed, in fp16, divided by their greatest element.

    Returns that, [64] fp32.
    """
    half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, HALVES))), 0), 2)
    near = tile.slice(0, 64, 1).load(gl.SliceLayout(1, HALVES)).to(DTYPE, bitcast=True).to(gl.float32)
    far = tile.slice(64, 64, 1).load(gl.SliceLayout(1, HALVES)).to(DTYPE, bitcast=True).to(gl.float32)
    far = gl.expand_dims(far, 1)
    x = gl.expand_dims(near, 1) + gl.where(half == 0, far, -far)
    # The last bit of a channel's number is done with and becomes the first, six times.
    for _ in gl.static_range(6):
        even, odd = gl.split(gl.reshape(x, [64, 2, 32, 2]))
        x = gl.reshape(gl.permute(gl.join(even + odd, even - odd), (0, 1, 3, 2)), [64, 2, 64])
    x = gl.reshape(x, [64, D])
    most = gl.max(gl.abs(x), 1)
    most = gl.where(most > 0.0, most, 1.0)
    tile.store((x * (1.0 / most)[:, None]).to(gl.float16))
    return gl.convert_layout(most, ROW)


@gluon.jit
def shrunk(sums, shrink):
    """sums [64, D] times shrink [64]."""
    shrink = gl.broadcast(shrink[:, None], sums)[0]
    return gl.inline_asm_elementwise(SHRINK, SHRINK_OPERANDS, [sums, shrink], gl.float32, True, 64)


@gluon.jit
def bound(scores, factor, greatest, tile, packed, MASK: gl.constexpr):
    """(scores [64, R], -inf behind the last token, what their exponentials are taken from, by what the others shrink).

    That is not the maximum itself: a new one counts where it is more than LAZY above the old.
    """
    if MASK and ((tile + 1) * R > packed):
        inside = tile * R + gl.arange(0, R, gl.SliceLayout(0, SCORES)) < packed
        scores = gl.where(inside[None, :], scores, float("-inf"))
    # In two steps, so that a thread's comparisons are not one chain.
    most = gl.convert_layout(gl.max(gl.max(gl.reshape(scores, [64, R // 8, 8]), 1), 1), ROW, assert_trivial=True)
    most *= factor
    new = gl.where(most > greatest + LAZY, most, greatest)
    return scores, new, gl.exp2(greatest - new)


@gluon.jit
def weigh(scores, factor, greatest, total, shrink):
    """(weights [64, R], the new total)."""
    weights = gl.exp2(scores * factor[:, None] - greatest[:, None])
    parts = gl.convert_layout(gl.sum(gl.reshape(weights, [64, R // 8, 8]), 1), PARTS, assert_trivial=True)
    of_parts = gl.convert_layout(shrink, gl.SliceLayout(1, PARTS), assert_trivial=True)
    return weights, total * of_parts[:, None] + parts


@gluon.jit
def attend(asked, ring, H: gl.constexpr, WHICH: gl.constexpr, LSE: gl.constexpr, STAGES: gl.constexpr):
    """64 queries of one head against the tiles that are unpacked."""
    given, query, asked_count, head, part_row, first, last, packed, scale, tiles = asked
    q, q_stride_t, q_stride_h, out, lse = given
    keys, values, full, k_empty, v_empty = ring
    query_tile = tiles.index(WHICH)
    index = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, QUERIES))
    rows = q + (query + index) * q_stride_t + head.to(gl.int64) * q_stride_h
    column = gl.arange(0, D, gl.SliceLayout(0, QUERIES))
    x = gl.load(rows[:, None] + column[None, :], (index < asked_count)[:, None], 0.0)
    query_tile.store(x.to(gl.float16, bitcast=True))
    factor = transform(query_tile, q.dtype.element_ty) * scale
    fence_async_shared()

    none = gl.zeros([64, R], gl.float32, SCORES)
    sums = gl.zeros([64, D], gl.float32, SCORES)
    total = gl.zeros([64, 8], gl.float32, PARTS)
    greatest = gl.full([64], float("-inf"), gl.float32, ROW)
    if first < last:
        mbarrier.wait(full.index(0), 0)
        scores = warpgroup_mma(query_tile, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(0), count=1)
        scores, greatest, shrink = bound(scores, factor, greatest, first, packed, True)
        new, total = weigh(scores, factor, greatest, total, shrink)
        pairs = rounded_pairs(new)
        mbarrier.wait(full.index(1), 0, pred=first + 1 < last)
        # Those with all their tokens, then the last one if it has fewer.
        whole = gl.minimum(packed // R, last)
        for END in gl.static_range(2):
            for tile in range(gl.maximum(whole, first + 1) if END else first + 1, last if END else whole):
                i = tile - first
                before = (i - 1) % STAGES
                after = (i + 1) % STAGES
                key_tile = keys.index(i % STAGES).permute((1, 0))
                scores = warpgroup_mma(query_tile, key_tile, none, use_acc=False, is_async=True)
                sums = shrunk(sums, shrink)
                weights = gl.convert_layout(halves(pairs, 64, R), WEIGHTS, assert_trivial=True)
                sums = warpgroup_mma(weights, values.index(before), sums, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                scores, greatest, shrink = bound(scores, factor, greatest, tile, packed, END)
                # A wait in between keeps ptxas from waiting for the products first.
                mbarrier.wait(full.index(after), (i + 1) // STAGES & 1, pred=tile + 1 < last)
                sums, weights, scores = warpgroup_mma_wait(0, deps=(sums, weights, scores))
                mbarrier.arrive(k_empty.index(i % STAGES), count=1)
                mbarrier.arrive(v_empty.index(before), count=1)
                new, total = weigh(scores, factor, greatest, total, shrink)
                pairs = rounded_pairs(new)
        sums = shrunk(sums, shrink)
        weights = gl.convert_layout(halves(pairs, 64, R), WEIGHTS, assert_trivial=True)
        sums = warpgroup_mma(weights, values.index((last - 1 - first) % STAGES), sums, is_async=True)
        sums, weights = warpgroup_mma_wait(0, deps=(sums, weights))

    whole = gl.convert_layout(gl.sum(total, 1), ROW)
    divisor = gl.where(whole > 0.0, whole, 1.0)
    if LSE:
        index = WHICH * 64 + gl.arange(0, 64, ROW)
        value = gl.where(whole > 0.0, greatest * LN2 + gl.log(divisor), float("-inf"))
        gl.store(lse + (part_row + query + index) * H + head, value, index < asked_count)
    x = (sums * (1.0 / divisor)[:, None]).to(out.dtype.element_ty)
    x = gl.reshape(gl.permute(gl.reshape(x, [64, 4, 4, 4, 2]), (0, 1, 3, 2, 4)), [64, D])
    x = gl.convert_layout(x, RESULT, assert_trivial=True)
    index = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, RESULT))
    row = (part_row + query + index) * H + head
    column = gl.arange(0, D, gl.SliceLayout(0, RESULT))
    gl.store(out + (row * D)[:, None] + column[None, :], x, (index < asked_count)[:, None])


@gluon.jit(do_not_specialize=["B", "S", "Tq", "SPLITS"])
def rotatekv_hopper_fwd_kernel(
    q, q_stride_t, q_stride_h, q_offsets, seq_offsets, page_offsets, page_table, k_codes, k_ranges, v_codes, v_ranges,
    out, lse, B, S, Tq, SPLITS, scale,
    HG: gl.constexpr, G: gl.constexpr, LSE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One part of 128 queries of one head; out and lse: [SPLITS, Tq, H, ...], or the final ones.

    scale: of q, times log2(e) and that of the transform.
    """
    H: gl.constexpr = HG * G
    b, first_query, asked_count, q_tile = locate_tile(q_offsets, gl.program_id(0) // (SPLITS * H), B, Tq)
    if q_tile * BQ >= asked_count:
        return
    head = gl.program_id(0) % H
    split = gl.program_id(0) // H % SPLITS
    length = (gl.load(seq_offsets + b + 1) - gl.load(seq_offsets + b)).to(gl.int32)
    packed = gl.maximum(length - S, 0)
    tiles = (packed + R - 1) // R
    per = (tiles + SPLITS - 1) // SPLITS
    first = split * per
    last = gl.minimum(tiles, first + per)
    pages = (packed + PAGE - 1) // PAGE
    page_table += gl.load(page_offsets + b)

    query_tiles = gl.allocate_shared_memory(gl.float16, [2, 64, D], SHARED)
    keys = gl.allocate_shared_memory(gl.float16, [STAGES, R, D], SHARED)
    values = gl.allocate_shared_memory(gl.float16, [STAGES, R, D], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    ring = keys, values, full, k_empty, v_empty
    part_row = split * Tq.to(gl.int64)
    query = first_query + q_tile * BQ
    asked_count -= q_tile * BQ
    given = q, q_stride_t, q_stride_h, out, lse
    asked = given, query, asked_count, head, part_row, first, last, packed, scale, query_tiles
    stored = page_table, k_codes, k_ranges, v_codes, v_ranges, head // G, head % G, first, last, pages
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend, (asked, ring, H, FIRST, LSE, STAGES)),
            (attend, (asked, ring, H, SECOND, LSE, STAGES)),
            (produce, (stored, ring, HG, G, STAGES)),
        ],
        [4, 4],
        # Of the 504 registers that three threads share.
        [200, 104],
    )
