"""Define the backward kernels: dq by tiles of queries, dk and dv by tiles of keys; without atomic additions.

Letters: H heads of queries, D query/key and V value head size. m: query rows of a tile, n: its key rows, counted
within a piece; t and s: positions in the sequence.

With p a weight of the softmax, o the output and do its gradient: dv = p do, ds = p (do.v - do.o), dq = ds k, dk = ds q,
the last two times the scale. p is recomputed from the scores and the log-sum-exp; do.o is computed first.
"""

import triton
import triton.language as tl

from hstu_sparse.flash import forward
from hstu_sparse.tiles.rows import block_source, in_registers, load_block, load_head, locate, row_pointer


@triton.jit(do_not_specialize=["num_pieces", "total"], do_not_specialize_on_alignment=["q_offsets"])
def flash_attention_bwd_rows_kernel(
    out, do, lse, rows, q_offsets, num_pieces, total,
    H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Compute rows [2, H, slots * ROW_BLOCK]: the log-sum-exp in units of log2, and the sum over V of out * do.

    Past a piece's end, and for a query that sees no key, the log-sum-exp is +inf, so that weights are 0.
    """
    PARTS: tl.constexpr = forward.ROW_BLOCK // BLOCK
    head = tl.program_id(0) % H
    slot = tl.program_id(0) // (H * PARTS)
    _, begin, length, tile = locate(q_offsets, slot, num_pieces, forward.ROW_BLOCK)
    part = tl.program_id(0) // H % PARTS * BLOCK + tl.arange(0, BLOCK)
    row = tile * forward.ROW_BLOCK + part
    token = begin + row
    inside = row < length
    product = load_head(out, head, token, inside, V, PAD_V).to(tl.float32)
    product *= load_head(do, head, token, inside, V, PAD_V).to(tl.float32)
    before = tl.load(lse + head.to(tl.int64) * total + token, inside, float("-inf"))
    width = row_width(num_pieces, total)
    rows += head * width + tl.cast(slot, tl.int64) * forward.ROW_BLOCK + part
    tl.store(rows, tl.where(before > float("-inf"), before * forward.LOG2_E, float("inf")))
    tl.store(rows + H * width, tl.sum(product, 1))


@triton.jit
def row_width(num_pieces, total):
    """Return the number of entries of a head in `rows`: slots (see tiles/rows.py) of ROW_BLOCK queries."""
    return (tl.cast(total, tl.int64) // forward.ROW_BLOCK + num_pieces) * forward.ROW_BLOCK


@triton.jit
def _attend_dq(
    acc, q, do, row_lse, row_delta, first, last, t, t_first, q_inside, k, v, k_stride, v_stride, k_length, k_position,
    options,
    D: tl.constexpr, V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the keys first .. last of a piece to acc [m, D]."""
    n = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        key = load_block(k, start, n, k_stride, k_length, D, PAD_D, MASKED, TMA)
        value = load_block(v, start, n, v_stride, k_length, V, PAD_V, MASKED, TMA)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * options.scale
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        s = (k_position + start + n)[None, :]
        if options.slope is not None:
            scores -= options.slope * forward.distances(t, s, options.sequence, EXTENSION).to(tl.float32)
        if MASKED:
            inside = (start + n < k_length)[None, :]
            scores = forward.mask_scores(scores, t, s, q_inside, inside, options, HAS_LEFT, HAS_RIGHT, EXTENSION)
        weights = tl.exp2(scores - row_lse)
        if options.seed is not None:
            keep = forward.dropout_mask(options, t_first, k_position + start, ALIGNED, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp / (1.0 - options.dropout), 0.0)
        ds = weights * (dp - row_delta)
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=forward.PER_BATCH, do_not_specialize_on_alignment=forward.CALLER_POINTERS)
def flash_attention_bwd_dq_kernel(
    q, k, v, do, rows, before, dq, q_offsets, k_offsets, q_starts, k_starts, num_pieces, total, call, left, right,
    slope_stride, seed,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WGMMA: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK_M queries of one head in one program.

    before: None, or a contiguous [T, H, D] fp32, which is added. IN_PLACE: whether `before` is `dq`.
    """
    tile = forward.find_tile(q_offsets, q_starts, num_pieces, H, PIECES, BLOCK_M, True)
    if tile.first < 0:
        return
    if before is not None and IN_PLACE:
        num_seen = forward.keys_seen(
            tile, k_offsets, k_starts, left, right, PIECES, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
        )
        if num_seen == 0:
            return
    head, begin, length, first_row = tile.head, tile.begin, tile.length, tile.first
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    q_inside = (first_row + m < length)[:, None]
    t_first = tile.position + first_row
    t = (t_first + m)[:, None]
    query = load_block(row_pointer(q, begin, head), first_row, m, q.stride_t, length, D, PAD_D, True)
    query = in_registers(query, WGMMA)
    dout = load_block(row_pointer(do, begin, head), first_row, m, do.stride_t, length, V, PAD_V, True)
    dout = in_registers(dout, WGMMA)
    width = row_width(num_pieces, total)
    rows += head * width + (begin // forward.ROW_BLOCK + tile.index) * forward.ROW_BLOCK + first_row + m
    row_lse = tl.load(rows)[:, None]
    row_delta = tl.load(rows + H * width)[:, None]
    slope = None if call.slopes is None else forward.head_slope(call.slopes, tile, head, slope_stride)
    sequence = None if EXTENSION is None else forward.mask_sequence(call, tile, q_offsets, left)
    pair = tile.sequence * H + head
    options = forward.HeadOptions(call.scale, slope, left, right, seed, pair, call.dropout, sequence)
    acc = tl.zeros([BLOCK_M, PAD_D], tl.float32)
    for i in tl.static_range(PIECES):
        k_begin, k_length, k_position = forward.piece(tile.sequence * PIECES + i, k_offsets, k_starts)
        if EXTENSION is not None:
            bounds = forward.masked_key_ranges(first_row, options.sequence, HAS_LEFT, EXTENSION, BLOCK_M, BLOCK_N)
        else:
            bounds = forward.key_ranges(
                first_row, length, k_length, tile.position - k_position, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M,
                BLOCK_N,
            )  # fmt: skip
        keys = block_source(row_pointer(k, k_begin, head // GROUP), k.stride_t, k_length, D, BLOCK_N, PAD_D, TMA)
        values = block_source(row_pointer(v, k_begin, head // GROUP), v.stride_t, k_length, V, BLOCK_N, PAD_V, TMA)
        for part in tl.static_range(3 if EXTENSION is None else 5):
            if part != 3 and (part > 0 or HAS_LEFT or EXTENSION is not None):  # noqa: SIM102  a compile-time constant
                if bounds[part] < bounds[part + 1]:
                    acc = _attend_dq(
                        acc, query, dout, row_lse, row_delta, bounds[part], bounds[part + 1], t, t_first, q_inside,
                        keys, values, k.stride_t, v.stride_t, k_length, k_position, options, D, V, HAS_LEFT, HAS_RIGHT,
                        EXTENSION, ALIGNED, PRECISION, part != 1, BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA,
                    )  # fmt: skip
    inside = q_inside & (d < D_OUT)[None, :]
    result = acc * (call.scale / forward.LOG2_E)
    if before is not None:
        before += (begin + first_row) * (H * D_OUT) + head * D_OUT
        result += tl.load(before + m[:, None] * (H * D_OUT) + d[None, :], inside, 0.0)
    target = row_pointer(dq, begin + first_row, head) + m[:, None] * dq.stride_t + d[None, :]
    tl.store(target, result.to(dq.pointer.dtype.element_ty), inside)


@triton.jit
def row_source(base, length, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Return the source from which `load_row` reads a piece's entries of `rows`."""
    if TMA:
        blocks = tl.maximum((length + BLOCK - 1) // BLOCK, 1)
        return tl.make_tensor_descriptor(base, [blocks * BLOCK], [1], [BLOCK])
    else:
        return base


@triton.jit
def load_row(base, start, rows, TMA: tl.constexpr):
    """Load the entries start + rows as [1, m].

    Without a descriptor each thread would copy its entries to shared memory, four bytes at a time.
    """
    if TMA:
        return base.load([start])[None, :]
    else:
        return tl.load(base + start + rows)[None, :]


@triton.jit
def _attend_dkv(
    dk, dv, k, v, first, last, s, s_first, k_inside, q, do, lse, delta, q_stride, do_stride, q_length, q_position,
    options,
    D: tl.constexpr, V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the queries first .. last of a piece to dk [n, D] and dv [n, V]; tiles are transposed, keys x queries."""
    m = tl.arange(0, BLOCK_M)
    for start in range(first, last, BLOCK_M):
        query = load_block(q, start, m, q_stride, q_length, D, PAD_D, MASKED, TMA)
        dout = load_block(do, start, m, do_stride, q_length, V, PAD_V, MASKED, TMA)
        row_lse = load_row(lse, start, m, TMA)
        scores = tl.dot(k, tl.trans(query), input_precision=PRECISION) * options.scale
        t = (q_position + start + m)[None, :]
        if options.slope is not None:
            scores -= options.slope * forward.distances(t, s, options.sequence, EXTENSION).to(tl.float32)
        if MASKED:
            inside = (start + m < q_length)[None, :]
            scores = forward.mask_scores(scores, t, s, inside, k_inside, options, HAS_LEFT, HAS_RIGHT, EXTENSION)
        weights = tl.exp2(scores - row_lse)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        passed = weights
        if options.seed is not None:
            keep = tl.trans(forward.dropout_mask(options, q_position + start, s_first, ALIGNED, BLOCK_M, BLOCK_N))
            passed = tl.where(keep, weights / (1.0 - options.dropout), 0.0)
            dp = tl.where(keep, dp / (1.0 - options.dropout), 0.0)
        ds = weights * (dp - load_row(delta, start, m, TMA))
        dv = tl.dot(passed.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _add_head_dkv(
    dk, dv, key, value, head, tile, s, s_first, k_inside, q, do, rows, width, q_offsets, q_starts, call, left, right,
    slope_stride, seed,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr, PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one head of queries to dk and dv."""
    slope = None if call.slopes is None else forward.head_slope(call.slopes, tile, head, slope_stride)
    sequence = None if EXTENSION is None else forward.mask_sequence(call, tile, q_offsets, left)
    pair = tile.sequence * H + head
    options = forward.HeadOptions(call.scale, slope, left, right, seed, pair, call.dropout, sequence)
    for i in tl.static_range(PIECES):
        index = tile.sequence * PIECES + i
        begin, length, position = forward.piece(index, q_offsets, q_starts)
        if EXTENSION is not None:
            bounds = forward.masked_query_ranges(tile.first, options.sequence, HAS_LEFT, EXTENSION, BLOCK_M, BLOCK_N)
        else:
            bounds = forward.query_ranges(
                tile.first, length, tile.length, position - tile.position, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M,
                BLOCK_N,
            )  # fmt: skip
        query = block_source(row_pointer(q, begin, head), q.stride_t, length, D, BLOCK_M, PAD_D, TMA)
        dout = block_source(row_pointer(do, begin, head), do.stride_t, length, V, BLOCK_M, PAD_V, TMA)
        lse = rows + head * width + (begin // forward.ROW_BLOCK + index) * forward.ROW_BLOCK
        delta = row_source(lse + H * width, length, BLOCK_M, TMA)
        lse = row_source(lse, length, BLOCK_M, TMA)
        for part in tl.static_range(3 if EXTENSION is None else 5):
            if part != 3 and (part > 0 or HAS_RIGHT or EXTENSION is not None):  # noqa: SIM102  a compile-time constant
                if bounds[part] < bounds[part + 1]:
                    dk, dv = _attend_dkv(
                        dk, dv, key, value, bounds[part], bounds[part + 1], s, s_first, k_inside, query, dout, lse,
                        delta, q.stride_t, do.stride_t, length, position, options, D, V, HAS_LEFT, HAS_RIGHT,
                        EXTENSION, ALIGNED,
                        PRECISION, part != 1, BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA,
                    )  # fmt: skip
    return dk, dv


@triton.jit
def _store_sum(
    target, sums, begin, head, value, length, WIDTH: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Store the first `length` rows of value, plus contiguous `sums`, in a head's rows of `target` from begin on."""
    row = tl.arange(0, value.shape[0])[:, None]
    column = tl.arange(0, value.shape[1])[None, :]
    inside = (row < length) & (column < WIDTH)
    if sums is not None:
        sums += begin * (HEADS * WIDTH) + head * WIDTH
        value += tl.load(sums + row * (HEADS * WIDTH) + column, inside, 0.0)
    pointers = row_pointer(target, begin, head) + row * target.stride_t + column
    tl.store(pointers, value.to(target.pointer.dtype.element_ty), inside)


@triton.jit(do_not_specialize=forward.PER_BATCH, do_not_specialize_on_alignment=forward.CALLER_POINTERS)
def flash_attention_bwd_dkv_kernel(
    q, k, v, do, rows, dk, dv, dk_sums, dv_sums, q_offsets, k_offsets, q_starts, k_starts, num_pieces, total, call,
    left, right, slope_stride, seed,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_OUT: tl.constexpr, V_OUT: tl.constexpr,
    PIECES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, EXTENSION: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAD_D: tl.constexpr,
    PAD_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK_N keys of one head in one program, over the GROUP heads of queries sharing it.

    dk_sums, dv_sums: None, or contiguous tensors, which are added.
    """
    # With a causal mask the first tile of a piece has the most work.
    tile = forward.find_tile(k_offsets, k_starts, num_pieces, H // GROUP, PIECES, BLOCK_N, False)
    if tile.first < 0:
        return
    k_head, begin, length, first_row = tile.head, tile.begin, tile.length, tile.first
    n = tl.arange(0, BLOCK_N)
    k_inside = (first_row + n < length)[:, None]
    s_first = tile.position + first_row
    s = (s_first + n)[:, None]
    key = load_block(row_pointer(k, begin, k_head), first_row, n, k.stride_t, length, D, PAD_D, True)
    value = load_block(row_pointer(v, begin, k_head), first_row, n, v.stride_t, length, V, PAD_V, True)
    width = row_width(num_pieces, total)
    acc_k = tl.zeros([BLOCK_N, PAD_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    if GROUP == 1:
        acc_k, acc_v = _add_head_dkv(
            acc_k, acc_v, key, value, k_head, tile, s, s_first, k_inside, q, do, rows, width, q_offsets, q_starts, call,
            left, right, slope_stride, seed, H, D, V, PIECES, HAS_LEFT, HAS_RIGHT, EXTENSION, ALIGNED, PRECISION,
            BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA,
        )  # fmt: skip
    else:
        for head in range(k_head * GROUP, (k_head + 1) * GROUP):
            acc_k, acc_v = _add_head_dkv(
                acc_k, acc_v, key, value, head, tile, s, s_first, k_inside, q, do, rows, width, q_offsets, q_starts,
                call, left, right, slope_stride, seed, H, D, V, PIECES, HAS_LEFT, HAS_RIGHT, EXTENSION, ALIGNED,
                PRECISION, BLOCK_M, BLOCK_N, PAD_D, PAD_V, TMA,
            )  # fmt: skip
    acc_k *= call.scale / forward.LOG2_E
    begin += first_row
    num_rows = length - first_row
    _store_sum(dk, dk_sums, begin, k_head, acc_k, num_rows, D_OUT, H // GROUP)
    _store_sum(dv, dv_sums, begin, k_head, acc_v, num_rows, V_OUT, H // GROUP)
