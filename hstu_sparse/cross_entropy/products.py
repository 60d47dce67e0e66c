"""The kernels that multiply outputs with items, tile by tile, and never write a logit.

Letters: T tokens, I items, E embedding size; W rows of the matrix that is walked over. In the kernels m: the rows of
the tile that a program owns, n: the rows of the tile at hand of those it walks over.

A program owns a tile of outputs (forward, dout) or of items (ditems) and walks over the other side, so every sum has a
fixed order. Where there are too few tiles to fill the GPU each is shared by several programs (`splits`), which walk
over a part each; their results, log-sum-exps or fp32 gradients, are merged by the kernels of rows.py. Tiles are held in
chunks of BLOCK_E columns, as tuples, so that what ends a gradient needs few registers.

Logits are kept in base 2: with row_scale[t] = log2(e) / (temperature * |out_t|) and item_scale[i] = 1 / |items_i|
(norms 1 without `normalize`) the logit is <out_t, items_i> * row_scale[t] * item_scale[i], scaled behind the product so
that 16-bit inputs enter the tensor cores as they are.

The items are the catalogue, or (sampled) the rows drawn for the whole batch: these come with their `ids`, by which
accidental hits are taken out, and with the correction `shift` of each.

In backward the softmax, rounded to the inputs' dtype, is the left side of a second product. fp16 has no exponents for a
small probability times 1 / |item|: there the right side is normalised, and the probability multiplied by 2^15.
"""

import triton
import triton.language as tl

from hstu_sparse.cross_entropy.rows import finish_items, finish_outputs, store_rows
from hstu_sparse.tiles import in_registers

# Sizes that differ between batches.
PER_BATCH = ["T", "W", "per_split"]
GIVEN = ["targets", "ids"]


@triton.jit
def _chunk(base, start, first_column, stride, limit, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
           MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """A tile [ROWS, WIDTH] of a matrix [limit, E] or of its tensor descriptor, zeros outside of it."""
    if TMA:
        return base.load([start, first_column])
    else:
        rows = tl.arange(0, ROWS)[:, None]
        columns = first_column + tl.arange(0, WIDTH)[None, :]
        pointers = base + tl.cast(start, tl.int64) * stride + (rows * stride + columns)
        if MASKED:
            inside = start + rows < limit
            if E % WIDTH != 0:
                inside = inside & (columns < E)
            return tl.load(pointers, inside, 0.0)
        elif E % WIDTH != 0:
            return tl.load(pointers, columns < E, 0.0)
        else:
            return tl.load(pointers)


@triton.jit
def _tile(base, start, stride, limit, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
          TMA: tl.constexpr, REGISTERS: tl.constexpr):  # fmt: skip
    """ROWS whole rows of a matrix: a tuple of chunks of WIDTH columns."""
    tile = ()
    for chunk in tl.static_range((E + WIDTH - 1) // WIDTH):
        part = _chunk(base, start, chunk * WIDTH, stride, limit, E, WIDTH, ROWS, MASKED, TMA)
        tile = tile + (in_registers(part, REGISTERS),)  # noqa: RUF005  Triton knows no starred tuples
    return tile


@triton.jit
def _scores(own, tile, PRECISION: tl.constexpr):
    """[M, N]: own times tile, transposed."""
    scores = tl.dot(own[0], tl.trans(tile[0]), input_precision=PRECISION)
    for chunk in tl.static_range(1, len(own)):
        scores = tl.dot(own[chunk], tl.trans(tile[chunk]), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _add_product(acc, weights, tile, length, PRECISION: tl.constexpr):
    """The chunks of acc + weights times tile. With length [N] the tile is multiplied by it, weights are for fp16."""
    added = ()
    for chunk in tl.static_range(len(acc)):
        right = tile[chunk]
        if length is not None:
            right = (right.to(tl.float32) * length[:, None]).to(right.dtype)
        part = tl.dot(weights.to(right.dtype), right, acc[chunk], input_precision=PRECISION)
        added = added + (part,)  # noqa: RUF005
    return added


@triton.jit
def _zeros(ROWS: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):
    acc = ()
    for _ in tl.static_range((E + WIDTH - 1) // WIDTH):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)  # noqa: RUF005
    return acc


@triton.jit
def _times(acc, factor):
    scaled = ()
    for chunk in tl.static_range(len(acc)):
        scaled = scaled + (acc[chunk] * factor,)  # noqa: RUF005
    return scaled


@triton.jit
def _numbers(base, start, limit, other, SIZE: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):
    """SIZE numbers of a vector from `start` on; behind its end `other`, of a tensor descriptor 0."""
    if TMA:
        # Through shared memory: every thread wants its columns' numbers, which as loads would be one for each.
        return base.load([start])
    else:
        n = start + tl.arange(0, SIZE)
        if MASKED:
            return tl.load(base + n, n < limit, other)
        else:
            return tl.load(base + n)


@triton.jit
def _range(rows, per_split, W, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tile, split, bounds): walked are bounds[0] .. bounds[1] in whole tiles, bounds[1] .. bounds[2] with a mask.

    Programs of one split are neighbours: what they walk over stays in the cache.
    """
    tiles = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    first = split * per_split
    last = tl.minimum(first + per_split, W)
    return tile, split, (first, first + (last - first) // BLOCK_N * BLOCK_N, last)


@triton.jit
def _sum_exp(
    top, total, own, first, last, items, items_stride, row_scale, item_scale, ids, shift, target, bound, W,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(top, total) [M] with the items first .. last: the sum of 2^logit is total * 2^top; BOUNDED: total * 2^bound."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(items, start, items_stride, W, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(own, tile, PRECISION)
        if item_scale is not None:
            logits *= _numbers(item_scale, start, W, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        logits *= row_scale
        if shift is not None:
            logits -= _numbers(shift, start, W, 0.0, BLOCK_N, MASKED, False)[None, :]
        if MASKED:
            logits = tl.where((n < W)[None, :], logits, float("-inf"))
        if ids is not None:
            drawn = _numbers(ids, start, W, -1, BLOCK_N, MASKED, False)[None, :]
            logits = tl.where((drawn == target) | (drawn < 0), float("-inf"), logits)
        if BOUNDED:
            total += tl.sum(tl.exp2(logits - bound), 1)
        else:
            higher = tl.maximum(top, tl.max(logits, 1))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
            top = higher
    return top, total


@triton.jit(do_not_specialize=[*PER_BATCH, "bound"], do_not_specialize_on_alignment=GIVEN)
def catalogue_loss_fwd_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, ids, shift, targets, lse, bound, T, W, per_split,
    E: tl.constexpr, BOUNDED: tl.constexpr, REGISTERS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """lse [splits, T]: log2 of the sum of 2^logit over a split's items (-1e30 for none), for BLOCK_M outputs.

    BOUNDED: all logits are known to lie within `bound` of 0, little enough for fp32, and no maximum is looked for.
    """
    tile, split, bounds = _range(T, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)[:, None]
    target = -1
    if ids is not None:
        target = tl.load(targets + t, t < T, -1)[:, None]
    # Finite, so that nothing is subtracted from itself where a tile has no item that counts.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(2):
        # Around a loop that never runs zero times ptxas does not serialise the products.
        if bounds[part] < bounds[part + 1]:
            top, total = _sum_exp(
                top, total, own, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, ids, shift,
                target, bound, W, E, BLOCK_E, BOUNDED, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if BOUNDED:
        top = tl.zeros([BLOCK_M], tl.float32) + bound
    # Comparisons that are false for NaN: an item that is not finite must not leave a loss that is.
    log_sum = tl.where(total == 0.0, -1e30, top + tl.log2(tl.where(total < 1e-37, 1e-37, total)))
    tl.store(lse + split.to(tl.int64) * T + t, log_sum, t < T)


@triton.jit
def _mark(
    marks, own, first, last, items, items_stride, row_scale, item_scale, limit, W,
    E: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MARK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        tile = _tile(items, start, items_stride, W, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(own, tile, PRECISION)
        if item_scale is not None:
            logits *= _numbers(item_scale, start, W, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        if MASKED:
            logits = tl.where((start + tl.arange(0, BLOCK_N) < W)[None, :], logits, float("-inf"))
        reaches = tl.max(logits, 1) * row_scale >= limit
        # Every token that finds something writes the same.
        tl.store(marks + start // MARK + tl.zeros([BLOCK_M], tl.int32), tl.full([BLOCK_M], 1, tl.uint8), reaches)


@triton.jit(do_not_specialize=[*PER_BATCH, "log_skip", "marks_stride"], do_not_specialize_on_alignment=GIVEN)
def catalogue_loss_mark_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, targets, lse, marks, marks_stride, log_skip, T, W,
    per_split, E: tl.constexpr, OWN_MARK: tl.constexpr, MARK: tl.constexpr, REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """marks [rows of OWN_MARK tokens, columns of MARK items]: 1 where a probability reaches 2^log_skip, or a target is.

    row_scale is positive: the greatest logit of a row is the greatest product.
    """
    tile, split, bounds = _range(T, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)
    # Tokens without a target have an lse of infinity: they mark nothing.
    limit = tl.load(lse + t, t < T, float("inf")) + log_skip
    marks += tile * BLOCK_M // OWN_MARK * marks_stride
    if split == 0:
        target = tl.load(targets + t, t < T, -1)
        tl.store(marks + target // MARK, tl.full([BLOCK_M], 1, tl.uint8), target >= 0)
    for part in tl.static_range(2):
        if bounds[part] < bounds[part + 1]:
            _mark(
                marks, own, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, limit, W, E,
                BLOCK_E, PRECISION, TMA, BLOCK_M, BLOCK_N, STAGES, MARK, part == 1,
            )  # fmt: skip


@triton.jit
def _weigh_item_tile(
    acc, own, start, items, items_stride, row_scale, item_scale, ids, shift, target, lse, W,
    E: tl.constexpr, BLOCK_E: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc + softmax of BLOCK_N items times the (normalised) items."""
    n = start + tl.arange(0, BLOCK_N)
    tile = _tile(items, start, items_stride, W, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
    logits = _scores(own, tile, PRECISION)
    length = None
    if item_scale is not None:
        length = _numbers(item_scale, start, W, 0.0, BLOCK_N, MASKED, TMA)
        logits *= length[None, :]
    logits = logits * row_scale - lse
    if shift is not None:
        logits -= _numbers(shift, start, W, 0.0, BLOCK_N, MASKED, False)[None, :]
    if MASKED:
        logits = tl.where((n < W)[None, :], logits, float("-inf"))
    weights = tl.exp2(logits)
    if ids is not None:
        drawn = _numbers(ids, start, W, -1, BLOCK_N, MASKED, False)[None, :]
        weights = tl.where((drawn == target) | (drawn < 0), 0.0, weights)
    if HALF:
        weights *= 32768.0
    elif item_scale is not None:
        weights *= length[None, :]
    return _add_product(acc, weights, tile, length if HALF else None, PRECISION)


@triton.jit
def _weigh_items(
    acc, own, first, last, items, items_stride, row_scale, item_scale, ids, shift, target, lse, marks, W,
    E: tl.constexpr, BLOCK_E: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MARK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc + softmax of the items first .. last times the (normalised) items; with marks, of every MARK items marked."""
    if marks is None:
        for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            acc = _weigh_item_tile(
                acc, own, start, items, items_stride, row_scale, item_scale, ids, shift, target, lse, W, E, BLOCK_E,
                HALF, PRECISION, TMA, BLOCK_N, MASKED,
            )  # fmt: skip
    else:
        for start in tl.range(first, last, BLOCK_N, num_stages=1):
            if tl.load(marks + start // MARK) != 0:
                acc = _weigh_item_tile(
                    acc, own, start, items, items_stride, row_scale, item_scale, ids, shift, target, lse, W, E,
                    BLOCK_E, HALF, PRECISION, TMA, BLOCK_N, MASKED,
                )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=[*PER_BATCH, "smoothing", "marks_stride"], do_not_specialize_on_alignment=GIVEN)
def catalogue_loss_bwd_dout_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, ids, shift, targets, lse, positive, table,
    table_stride, item_sum, grad, inverse_count, dout, along, partial, smoothing, marks, marks_stride, T, I, W,
    per_split, SIZE: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr, OWN_MARK: tl.constexpr,
    MARK: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, REGISTERS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of dout [T, SIZE], or (with `partial` [splits, T, SIZE]) a split's softmax times items.

    E: columns of the matrices, SIZE and zeros behind them. marks [rows of OWN_MARK tokens, columns of MARK items]:
    what is not marked is left out.
    """
    tile, split, bounds = _range(T, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    HALF: tl.constexpr = out.dtype.element_ty == tl.float16
    own = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)[:, None]
    # Tokens without a target have an lse of infinity, and no softmax.
    log_sum = tl.load(lse + t, t < T, float("inf"))[:, None]
    target = -1
    if ids is not None:
        target = tl.load(targets + t, t < T, -1)[:, None]
    if marks is not None:
        marks += tile * BLOCK_M // OWN_MARK * marks_stride
    acc = _zeros(BLOCK_M, E, BLOCK_E)
    for part in tl.static_range(2):
        if bounds[part] < bounds[part + 1]:
            acc = _weigh_items(
                acc, own, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, ids, shift, target,
                log_sum, marks, W, E, BLOCK_E, HALF, PRECISION, TMA, BLOCK_N, STAGES, MARK, part == 1,
            )  # fmt: skip
    if HALF:
        acc = _times(acc, 1.0 / 32768.0)
    if partial is not None:
        for chunk in tl.static_range(len(acc)):
            base = partial + split.to(tl.int64) * T * SIZE
            store_rows(base, t, t < T, acc[chunk], SIZE, BLOCK_E, chunk)
    else:
        finish_outputs(
            acc, t, out, out_stride, row_scale, targets, lse, positive, table, table_stride, item_sum, grad,
            inverse_count, dout, along, smoothing, T, I, SIZE, BLOCK_E, NORMALIZE,
        )  # fmt: skip


@triton.jit
def _weigh_output_tile(
    acc, own, start, out, out_stride, row_scale, item_scale, ids, shift, targets, lse, keep, W,
    E: tl.constexpr, BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr, SAMPLED: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc + gradient of the logits at BLOCK_N outputs times the (scaled) outputs."""
    n = start + tl.arange(0, BLOCK_N)
    tile = _tile(out, start, out_stride, W, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
    logits = _scores(own, tile, PRECISION)
    if NORMALIZE:
        logits *= item_scale
    scale = _numbers(row_scale, start, W, 0.0, BLOCK_N, MASKED, TMA)
    logits = logits * scale[None, :] - _numbers(lse, start, W, 0.0, BLOCK_N, MASKED, TMA)[None, :]
    if shift is not None:
        logits -= shift
    hit = ids == _numbers(targets, start, W, -1, BLOCK_N, MASKED, TMA)[None, :]
    if MASKED:
        logits = tl.where((n < W)[None, :], logits, float("-inf"))
        hit = hit & (n < W)[None, :]
    weights = tl.exp2(logits)
    if SAMPLED:
        weights = tl.where(hit, 0.0, weights)
    else:
        weights = tl.where(hit, weights - keep, weights)
    if HALF:
        weights *= 32768.0
    elif NORMALIZE:
        weights *= scale[None, :]
    return _add_product(acc, weights, tile, scale if HALF and NORMALIZE else None, PRECISION)


@triton.jit
def _weigh_outputs(
    acc, own, first, last, out, out_stride, row_scale, item_scale, ids, shift, targets, lse, keep, marks, W,
    E: tl.constexpr, BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr, SAMPLED: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MARK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """acc + gradient of the logits at the outputs first .. last times the outputs; with marks, as `_weigh_items`."""
    if marks is None:
        for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            acc = _weigh_output_tile(
                acc, own, start, out, out_stride, row_scale, item_scale, ids, shift, targets, lse, keep, W, E, BLOCK_E,
                NORMALIZE, SAMPLED, HALF, PRECISION, TMA, BLOCK_N, MASKED,
            )  # fmt: skip
    else:
        for start in tl.range(first, last, BLOCK_N, num_stages=1):
            if tl.load(marks + start // MARK) != 0:
                acc = _weigh_output_tile(
                    acc, own, start, out, out_stride, row_scale, item_scale, ids, shift, targets, lse, keep, W, E,
                    BLOCK_E, NORMALIZE, SAMPLED, HALF, PRECISION, TMA, BLOCK_N, MASKED,
                )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=[*PER_BATCH, "smoothing", "marks_stride"], do_not_specialize_on_alignment=GIVEN)
def catalogue_loss_bwd_ditems_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, ids, shift, targets, lse, first_scale, out_sum, grad,
    inverse_count, ditems, partial, smoothing, marks, marks_stride, I, W, per_split,
    SIZE: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr, OWN_MARK: tl.constexpr, MARK: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, REGISTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of ditems [I, SIZE], or (with `partial` [splits, I, SIZE]) a split's sum over outputs.

    TMA: out, row_scale, targets and lse are tensor descriptors. first_scale: row_scale as a pointer. I: rows of
    `items`, W: T. marks [rows of OWN_MARK items, columns of MARK tokens].
    """
    tile, split, bounds = _range(I, per_split, W, BLOCK_M, BLOCK_N)
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    HALF: tl.constexpr = items.dtype.element_ty == tl.float16
    own = _tile(items, tile * BLOCK_M, items_stride, I, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = 1.0
    if NORMALIZE:
        scale = tl.load(item_scale + i, i < I, 0.0)[:, None]
    known = i[:, None]
    correction = 0.0
    if ids is not None:
        known = tl.load(ids + i, i < I, -1)[:, None]
    if shift is not None:
        correction = tl.load(shift + i, i < I, 0.0)[:, None]
    if marks is not None:
        marks += tile * BLOCK_M // OWN_MARK * marks_stride
    acc = _zeros(BLOCK_M, E, BLOCK_E)
    for part in tl.static_range(2):
        if bounds[part] < bounds[part + 1]:
            acc = _weigh_outputs(
                acc, own, bounds[part], bounds[part + 1], out, out_stride, row_scale, scale, known,
                None if shift is None else correction, targets, lse, 1.0 - smoothing, marks, W, E, BLOCK_E, NORMALIZE,
                ids is not None, HALF, PRECISION, TMA, BLOCK_N, STAGES, MARK, part == 1,
            )  # fmt: skip
    if HALF:
        acc = _times(acc, 1.0 / 32768.0)
    if partial is not None:
        for chunk in tl.static_range(len(acc)):
            base = partial + split.to(tl.int64) * I * SIZE
            store_rows(base, i, i < I, acc[chunk], SIZE, BLOCK_E, chunk)
    else:
        finish_items(
            acc, i, i < I, items, items_stride, first_scale, out_sum, grad, inverse_count, ditems, smoothing, I, SIZE,
            BLOCK_E, NORMALIZE,
        )  # fmt: skip
