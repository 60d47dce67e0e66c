"""Define the kernels of sampled negatives: those of negatives [T, K], and the gradient of the table.

Letters: T tokens, I items, E embedding size, K negatives. Logits are in base 2, as in products.py.

With negatives [T, K] a program has a token and gathers its K rows, in forward and again in backward. Rows are read 16
bytes at a time; if E does not allow it, the table is copied with rows padded to WIDTH columns. item_scale [I] has 1 /
norm of each row; without it a program computes the norms of its rows.

The gradient of the table is a sum over entries: the T targets, followed by the negatives. For negatives [T, K], a small
table, and without torch's deterministic algorithms, the program of a token adds to an fp32 table atomically. Otherwise:
- Entries are sorted by item (stable). A run is all entries of an item.
- A program sums a run in order and writes the item's row, so that the result is deterministic.
- Runs are cut into pieces at multiples of PIECE entries (the ends of windows), so that a popular item does not keep
  one program busy for long. The sums of pieces are written to slots, at most two for a window, and added by a second
  kernel.
"""

import triton
import triton.language as tl

from hstu_sparse.catalogue.rows import EPS, LN2, LOG2E, ItemsEnd, finish_items, inverse_norm, load_fp32


@triton.jit
def _token(t, out, out_stride, targets, table, temperature, scale, E: tl.constexpr, WIDTH: tl.constexpr,
           PAD_E: tl.constexpr, NORMALIZE: tl.constexpr):  # fmt: skip
    """Return (output x [1, PAD_E], its scale, target, its row y [1, PAD_E], scale of y, logit of the target)."""
    zero = tl.arange(0, 1)
    target = tl.load(targets + t).to(tl.int64)
    x = load_fp32(out, t + zero, t + zero >= 0, out_stride, E, PAD_E)
    y = load_fp32(table, target + zero, target + zero >= 0, WIDTH, WIDTH, PAD_E)
    factor = tl.zeros([1], tl.float32) + scale
    if temperature is not None:
        factor /= tl.load(temperature).to(tl.float32)
    y_scale = tl.zeros([1], tl.float32) + 1.0
    if NORMALIZE:
        factor *= inverse_norm(x)
        y_scale = inverse_norm(y)
    return x, factor, target, y, y_scale, tl.sum(x * y, 1) * factor * y_scale


@triton.jit
def _along(x, projection):
    """Return the projection of a vector on x [1, PAD_E]. projection: their dot product. 0 if |x| is at most EPS."""
    square = tl.sum(x * x, 1)
    return x * tl.where(square > EPS * EPS, projection / tl.maximum(square, EPS * EPS), 0.0)[:, None]


@triton.jit
def _drawn(t, first, x, factor, target, negatives, log_q, table, item_scale, log_k, K, WIDTH: tl.constexpr,
           PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Return (rows [ROWS, PAD_E], their scales, corrected logits) of negatives first .. first + ROWS - 1 of a token."""
    k = first + tl.arange(0, ROWS)
    ids = tl.load(negatives + t.to(tl.int64) * K + k, k < K, -1)
    counts = (ids >= 0) & (ids != target)
    rows = load_fp32(table, ids, counts, WIDTH, WIDTH, PAD_E)
    scales = tl.zeros([ROWS], tl.float32) + 1.0
    if item_scale is not None:
        scales = tl.load(item_scale + ids, counts, 1.0)
    elif NORMALIZE:
        scales = inverse_norm(rows)
    logits = tl.sum(rows * x, 1) * factor * scales
    if log_q is not None:
        logits -= (tl.load(log_q + ids, counts, 0.0).to(tl.float32) + log_k) * LOG2E
    return rows, scales, tl.where(counts, logits, float("-inf"))


@triton.jit(do_not_specialize=["K", "scale", "log_k"])
def catalogue_loss_sampled_fwd_kernel(
    out, out_stride, targets, negatives, log_q, table, item_scale, temperature, lse, positive, picked, pull, along,
    parts, scale, log_k, K, E: tl.constexpr, WIDTH: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute lse [T] of a token's target and negatives, and its loss and 1 in parts [T, 2] (0 and 0 without a target).

    For small.py also write positive [T] and picked [T, K], the logits, -inf for ignored negatives; along [T], the sum
    of logit times its gradient; and pull [T, E], the gradient of the output without factors that only backward has.
    """
    t = tl.program_id(0)
    zero = tl.arange(0, 1)
    e = tl.arange(0, PAD_E)[None, :]
    if tl.load(targets + t) < 0:
        tl.store(parts + 2 * t, 0.0)
        tl.store(parts + 2 * t + 1, 0.0)
        if pull is not None:
            tl.store(along + t, 0.0)
            nothing = tl.zeros([1, PAD_E], tl.float32).to(pull.dtype.element_ty)
            tl.store(pull + t.to(tl.int64) * E + e, nothing, e < E)
        return
    x, factor, target, y, y_scale, logit = _token(
        t, out, out_stride, targets, table, temperature, scale, E, WIDTH, PAD_E, NORMALIZE
    )
    # A maximum and a sum for each row of the tile, merged at the end: otherwise threads of different rows would
    # synchronise in every iteration.
    top = tl.zeros([ROWS], tl.float32) + logit
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PAD_E], tl.float32)
    for first in range(0, K, ROWS):
        rows, scales, logits = _drawn(
            t, first, x, factor, target, negatives, log_q, table, item_scale, log_k, K, WIDTH, PAD_E, NORMALIZE, ROWS
        )
        if picked is not None:
            k = first + tl.arange(0, ROWS)
            tl.store(picked + t.to(tl.int64) * K + k, logits, k < K)
        higher = tl.maximum(top, logits)
        shrink, weights = tl.exp2(top - higher), tl.exp2(logits - higher)
        total = total * shrink + weights
        if pull is not None:
            acc = acc * shrink[:, None] + rows * (weights * scales)[:, None]
        top = higher
    most = tl.max(top, 0)
    log_sum = most + tl.log2(tl.exp2(logit - most) + tl.sum(total * tl.exp2(top - most), 0))
    tl.store(lse + t + zero, log_sum)
    if positive is not None:
        tl.store(positive + t + zero, logit)
    if pull is not None:
        negative_sum = tl.sum(acc * tl.exp2(top - log_sum)[:, None], 0)[None, :]
        direction = negative_sum + y * ((tl.exp2(logit - log_sum) - 1.0) * y_scale)[:, None]
        projection = tl.sum(x * direction, 1)
        tl.store(along + t + zero, projection * factor * LN2)
        if NORMALIZE:
            direction -= _along(x, projection)
        tl.store(pull + t.to(tl.int64) * E + e, direction.to(pull.dtype.element_ty), e < E)
    tl.store(parts + 2 * t + zero, (log_sum - logit) * LN2)
    tl.store(parts + 2 * t + 1, 1.0)


@triton.jit(do_not_specialize=["T", "K", "scale", "log_k"])
def catalogue_loss_sampled_bwd_dout_kernel(
    out, out_stride, targets, negatives, log_q, table, item_scale, temperature, lse, grad, inverse_count,
    token_weights, dout, along, shares, sums, scale, log_k, T, K, E: tl.constexpr, WIDTH: tl.constexpr,
    PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute a row of dout; along[t], the sum of logit times its gradient; and the factors of out[t] in the entries.

    The factors are written to shares [T + T * K], or, unless sums is None, factor * out[t] is added to sums [I, WIDTH].
    """
    t = tl.program_id(0)
    zero = tl.arange(0, 1)
    e = tl.arange(0, PAD_E)
    place = T + t.to(tl.int64) * K
    if tl.load(targets + t) < 0:
        tl.store(along + t, 0.0)
        tl.store(dout + t.to(tl.int64) * E + e, tl.zeros([PAD_E], tl.float32).to(dout.dtype.element_ty), e < E)
        if sums is None:
            tl.store(shares + t, 0.0)
            for first in range(0, K, ROWS):
                k = first + tl.arange(0, ROWS)
                tl.store(shares + place + k, tl.zeros([ROWS], tl.float32), k < K)
        return
    x, factor, target, y, y_scale, logit = _token(
        t, out, out_stride, targets, table, temperature, scale, E, WIDTH, PAD_E, NORMALIZE
    )
    log_sum = tl.load(lse + t + zero)
    share = tl.exp2(logit - log_sum) - 1.0
    token_weight = 1.0
    if token_weights is not None:
        token_weight = tl.load(token_weights + t)
        share *= token_weight
    # Summed over its rows at the end: otherwise threads of different rows would synchronise in every iteration.
    acc = tl.zeros([ROWS, PAD_E], tl.float32)
    target_share = share * factor if NORMALIZE else share
    if sums is None:
        tl.store(shares + t + zero, target_share)
    else:
        tl.atomic_add(
            sums + target * WIDTH + e[None, :], target_share[:, None] * x, (e < WIDTH)[None, :], sem="relaxed"
        )
    for first in range(0, K, ROWS):
        rows, scales, logits = _drawn(
            t, first, x, factor, target, negatives, log_q, table, item_scale, log_k, K, WIDTH, PAD_E, NORMALIZE, ROWS
        )
        weights = tl.exp2(logits - log_sum)
        if token_weights is not None:
            weights *= token_weight
        acc += rows * (weights * scales)[:, None]
        k = first + tl.arange(0, ROWS)
        part = weights * factor if NORMALIZE else weights
        if sums is None:
            tl.store(shares + place + k, part, k < K)
        else:
            ids = tl.load(negatives + place - T + k, k < K, -1).to(tl.int64)
            counts = (ids >= 0) & (ids != target)
            tl.atomic_add(
                sums + ids[:, None] * WIDTH + e[None, :], part[:, None] * x, counts[:, None] & (e < WIDTH)[None, :],
                sem="relaxed",
            )  # fmt: skip
    total = tl.sum(acc, 0)[None, :] + y * (share * y_scale)[:, None]
    projection = tl.sum(x * total, 1)
    tl.store(along + t + zero, projection * factor * LN2)
    if NORMALIZE:
        total -= _along(x, projection)
    total *= (factor * LN2 * tl.load(grad).to(tl.float32) * tl.load(inverse_count))[:, None]
    address = dout + t.to(tl.int64) * E + e[None, :]
    tl.store(address, total.to(dout.dtype.element_ty), (e < E)[None, :])


@triton.jit
def _key(keys, p, inside, other):
    """Return the item of a sorted entry, `other` where not `inside`. keys: int16 or int32."""
    return tl.load(keys + p, inside, other).to(tl.int32)


@triton.jit
def _entries(first, keys, order, item, end, rows, rows_stride, shares, drawn, T, K, E: tl.constexpr,
             PAD_E: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Return (sum [1, PAD_E] of the item's entries from first to first + ROWS - 1, their number)."""
    p = first + tl.arange(0, ROWS)
    belongs = (p < end) & (_key(keys, p, p < end, -1) == item)
    entry = tl.load(order + p, belongs, 0)
    if drawn is None:
        token = tl.where(entry < T, entry, (entry - T) // tl.maximum(K, 1))
        acc = load_fp32(rows, token, belongs, rows_stride, E, PAD_E) * tl.load(shares + entry, belongs, 0.0)[:, None]
    else:
        is_target = belongs & (entry < T)
        acc = load_fp32(rows, entry, is_target, rows_stride, E, PAD_E)
        acc *= tl.load(shares + entry, is_target, 0.0)[:, None]
        acc += load_fp32(drawn, entry - T, belongs & (entry >= T), E, E, PAD_E)
    return tl.sum(acc, 0)[None, :], tl.sum(belongs.to(tl.int32), 0)


@triton.jit(do_not_specialize=["entries", "T", "K", "I"])
def catalogue_loss_table_bwd_kernel(
    keys, order, rows, rows_stride, shares, drawn, table, table_stride, row_scale, grad, inverse_count, dtable, slots,
    entries, T, K, I, E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Sum the pieces that begin in CHUNK entries: whole runs to dtable, pieces of cut runs to slots [windows, 2, E].

    keys: the items of the sorted entries, I for ignored ones, which are last. order: their original indices. rows:
    [T, E], the outputs. Entry n adds shares[n] * rows[t]: a target n < T of token t = n, a negative of token
    t = (n - T) // K. With drawn [K, E] a negative adds row n - T of drawn instead.
    """
    e = tl.arange(0, PAD_E)[None, :]
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    for place in range(0, CHUNK):
        p = begin + place
        item = _key(keys, p, p < entries, I)
        before = _key(keys, p - 1, (p > 0) & (p <= entries), -1)
        at_cut = p % PIECE == 0
        if (item < I) & ((item != before) | at_cut):
            end = tl.minimum((p // PIECE + 1) * PIECE, entries)
            acc, count = _entries(p, keys, order, item, end, rows, rows_stride, shares, drawn, T, K, E, PAD_E, ROWS)
            q = p + ROWS
            has_more = count == ROWS
            while has_more & (q < end):
                part, count = _entries(
                    q, keys, order, item, end, rows, rows_stride, shares, drawn, T, K, E, PAD_E, ROWS
                )
                acc += part
                q += ROWS
                has_more = count == ROWS
            last = _key(keys, end - 1, end <= entries, -1) == item
            after = _key(keys, end, end < entries, -1)
            if (item == before) | (last & (after == item)):
                # The piece at the beginning of a window has slot 0, even if it begins a run.
                slot = slots + (p // PIECE * 2 + tl.where(at_cut, 0, 1)) * E
                tl.store(slot + e, acc, e < E)
            else:
                row = tl.zeros([1], tl.int64) + item
                ending = ItemsEnd(row_scale, None, grad, inverse_count, dtable)
                finish_items((acc,), row, row >= 0, table, table_stride, ending, 0.0, I, E, PAD_E, NORMALIZE)


@triton.jit(do_not_specialize=["entries", "I"])
def catalogue_loss_pieces_bwd_kernel(
    keys, table, table_stride, row_scale, grad, inverse_count, dtable, slots, entries, I,
    E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Sum the pieces of the run that begins in a window and continues in the next one; write the row of dtable."""
    e = tl.arange(0, PAD_E)[None, :]
    window = tl.program_id(0).to(tl.int64)
    begin = window * PIECE
    end = begin + PIECE
    item = _key(keys, end - 1, end <= entries, I)
    after = _key(keys, end, end < entries, -1)
    covers = _key(keys, begin, begin < entries, -1) == item
    starts = (covers == 0) | (_key(keys, begin - 1, begin > 0, -1) != item)
    if (item < I) & (after == item) & starts:
        acc = tl.load(slots + (2 * window + tl.where(covers, 0, 1)) * E + e, e < E, 0.0)
        more = end < entries
        while more:
            window += 1
            acc += tl.load(slots + 2 * window * E + e, e < E, 0.0)
            end += PIECE
            more = _key(keys, end, end < entries, -1) == item
        row = tl.zeros([1], tl.int64) + item
        ending = ItemsEnd(row_scale, None, grad, inverse_count, dtable)
        finish_items((acc,), row, row >= 0, table, table_stride, ending, 0.0, I, E, PAD_E, NORMALIZE)
