"""Define the kernels that multiply outputs with items, tile by tile, and never write a logit.

Letters: T tokens, I items, E embedding size; W rows of the streamed matrix. In the kernels m: the rows of the program's
own (resident) tile, n: the rows of the current streamed tile.

A program has a resident tile of outputs (forward, dout) or of items (ditems) and iterates over the other side, so every
sum has a fixed order. With too few tiles to fill the GPU each is shared by several programs (`splits`), which process a
part each; their results, log-sum-exps or fp32 gradients, are merged by the kernels of rows.py. Tiles are tuples of
chunks of BLOCK_E columns, so that the end of a gradient needs few registers.

Logits are in base 2: with row_scale[t] = log2(e) / (temperature * |out_t|) and item_scale[i] = 1 / |items_i| (norms 1
without `normalize`) the logit is <out_t, items_i> * row_scale[t] * item_scale[i], scaled after the product so that
16-bit inputs enter the tensor cores unchanged.

The items are the catalogue, or (sampled) the rows drawn for the whole batch, with their `ids`, by which accidental hits
are removed, and the correction `shift` of each. If blocks of tokens have their own drawn rows, a group is a block's
outputs, or its drawn rows, and a tile of one iterates over the other: per_group resident rows, per_split streamed ones.

In backward the softmax, rounded to the inputs' dtype, is the left side of a second product. fp16 cannot represent a
small probability times 1 / |item|: there the right side is normalised, and the probability multiplied by 2^15.
"""

import triton
import triton.language as tl

from hstu_sparse.catalogue.rows import finish_items, finish_outputs, store_rows
from hstu_sparse.tiles.rows import in_registers

# Sizes that differ between batches.
PER_BATCH = ["T", "W", "per_split", "per_group"]
CALLER_POINTERS = ["targets", "ids"]


@triton.jit
def _chunk(base, start, first_column, stride, limit, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
           MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Load a tile [ROWS, WIDTH] of a matrix [limit, E] or of its tensor descriptor, zeros outside of it."""
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
    """Load ROWS whole rows of a matrix: a tuple of chunks of WIDTH columns."""
    tile = ()
    for chunk in tl.static_range((E + WIDTH - 1) // WIDTH):
        part = _chunk(base, start, chunk * WIDTH, stride, limit, E, WIDTH, ROWS, MASKED, TMA)
        tile = tile + (in_registers(part, REGISTERS),)  # noqa: RUF005  Triton does not support starred tuples
    return tile


@triton.jit
def _scores(resident, tile, PRECISION: tl.constexpr):
    """Compute [M, N]: resident times tile, transposed."""
    scores = tl.dot(resident[0], tl.trans(tile[0]), input_precision=PRECISION)
    for chunk in tl.static_range(1, len(resident)):
        scores = tl.dot(resident[chunk], tl.trans(tile[chunk]), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _add_product(acc, weights, tile, length, PRECISION: tl.constexpr):
    """Return the chunks of acc + weights times tile; with length [N] (fp16) the tile is multiplied by it."""
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
    """Load SIZE numbers of a vector from `start` on; behind its end `other`, from a tensor descriptor 0."""
    if TMA:
        # Through shared memory: every thread needs its columns' numbers, and would otherwise issue one load for each.
        return base.load([start])
    else:
        n = start + tl.arange(0, SIZE)
        if MASKED:
            return tl.load(base + n, n < limit, other)
        else:
            return tl.load(base + n)


@triton.jit
def _range(rows, per_group, per_split, W, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (tile, split, bounds): whole tiles from bounds[0] to bounds[1], masked ones from bounds[1] to bounds[2].

    Programs of one split are neighbours, so that their streamed data stay in the cache. With groups there is one split.
    """
    tiles = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    if per_group is None:
        first = split * per_split
    else:
        first = tile * BLOCK_M // per_group * per_split
    last = tl.minimum(first + per_split, W)
    return tile, split, (first, first + (last - first) // BLOCK_N * BLOCK_N, last)


@triton.jit
def _sum_exp(
    top, total, resident, first, last, items, items_stride, row_scale, item_scale, ids, shift, target, bound,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return (top, total) [M] with the items first .. last: sum of 2^logit = total * 2^(BOUNDED: bound; else top)."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(items, start, items_stride, last, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(resident, tile, PRECISION)
        if item_scale is not None:
            logits *= _numbers(item_scale, start, last, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        logits *= row_scale
        if shift is not None:
            logits -= _numbers(shift, start, last, 0.0, BLOCK_N, MASKED, False)[None, :]
        if MASKED:
            logits = tl.where((n < last)[None, :], logits, float("-inf"))
        if ids is not None:
            drawn = _numbers(ids, start, last, -1, BLOCK_N, MASKED, False)[None, :]
            logits = tl.where((drawn == target) | (drawn < 0), float("-inf"), logits)
        if BOUNDED:
            total += tl.sum(tl.exp2(logits - bound), 1)
        else:
            higher = tl.maximum(top, tl.max(logits, 1))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
            top = higher
    return top, total


@triton.jit(do_not_specialize=[*PER_BATCH, "bound"], do_not_specialize_on_alignment=CALLER_POINTERS)
def catalogue_loss_fwd_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, ids, shift, targets, lse, bound, T, W, per_split,
    per_group, E: tl.constexpr, BOUNDED: tl.constexpr, REGISTERS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute lse [splits, T]: log2 of the sum of 2^logit over a split's items (-1e30 for none), for BLOCK_M outputs.

    BOUNDED: all logits are within `bound` of 0, small enough for fp32, so that no maximum is needed.
    """
    tile, split, bounds = _range(T, per_group, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    resident = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)[:, None]
    target = -1
    if ids is not None:
        target = tl.load(targets + t, t < T, -1)[:, None]
    # Finite, so that infinity is never subtracted from itself in a tile without a valid item.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(2):
        # ptxas 12.8 (Triton 3.6) serialises the products of a loop that may have no iteration (warning C7515).
        if bounds[part] < bounds[part + 1]:
            top, total = _sum_exp(
                top, total, resident, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, ids,
                shift, target, bound, E, BLOCK_E, BOUNDED, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if BOUNDED:
        top = tl.zeros([BLOCK_M], tl.float32) + bound
    # These comparisons are false for NaN: an item that is not finite must not give a finite loss.
    log_sum = tl.where(total == 0.0, -1e30, top + tl.log2(tl.where(total < 1e-37, 1e-37, total)))
    tl.store(lse + split.to(tl.int64) * T + t, log_sum, t < T)


@triton.jit
def _weigh_items(
    acc, resident, first, last, items, items_stride, row_scale, item_scale, ids, shift, target, lse,
    E: tl.constexpr, BLOCK_E: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc + softmax of the items first .. last times the (normalised) items."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(items, start, items_stride, last, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(resident, tile, PRECISION)
        length = None
        if item_scale is not None:
            length = _numbers(item_scale, start, last, 0.0, BLOCK_N, MASKED, TMA)
            logits *= length[None, :]
        logits = logits * row_scale - lse
        if shift is not None:
            logits -= _numbers(shift, start, last, 0.0, BLOCK_N, MASKED, False)[None, :]
        if MASKED:
            logits = tl.where((n < last)[None, :], logits, float("-inf"))
        weights = tl.exp2(logits)
        if ids is not None:
            drawn = _numbers(ids, start, last, -1, BLOCK_N, MASKED, False)[None, :]
            weights = tl.where((drawn == target) | (drawn < 0), 0.0, weights)
        if HALF:
            weights *= 32768.0
        elif item_scale is not None:
            weights *= length[None, :]
        acc = _add_product(acc, weights, tile, length if HALF else None, PRECISION)
    return acc


@triton.jit(do_not_specialize=[*PER_BATCH, "smoothing"], do_not_specialize_on_alignment=CALLER_POINTERS)
def catalogue_loss_bwd_dout_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, ids, shift, targets, lse, end, partial,
    smoothing, T, I, W, per_split, per_group,
    SIZE: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    REGISTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of dout [T, SIZE], or (with `partial` [splits, T, SIZE]) a split's softmax times items.

    E: columns of the matrices, SIZE padded with zeros.
    """
    tile, split, bounds = _range(T, per_group, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    HALF: tl.constexpr = out.dtype.element_ty == tl.float16
    resident = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)[:, None]
    # Tokens without a target have an lse of infinity, and no softmax.
    log_sum = tl.load(lse + t, t < T, float("inf"))[:, None]
    target = -1
    if ids is not None:
        target = tl.load(targets + t, t < T, -1)[:, None]
    acc = _zeros(BLOCK_M, E, BLOCK_E)
    for part in tl.static_range(2):
        if bounds[part] < bounds[part + 1]:
            acc = _weigh_items(
                acc, resident, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, ids, shift,
                target, log_sum, E, BLOCK_E, HALF, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if HALF:
        acc = _times(acc, 1.0 / 32768.0)
    if partial is not None:
        for chunk in tl.static_range(len(acc)):
            base = partial + split.to(tl.int64) * T * SIZE
            store_rows(base, t, t < T, acc[chunk], SIZE, BLOCK_E, chunk)
    else:
        finish_outputs(
            acc, t, out, out_stride, row_scale, targets, lse, end, smoothing, T, I, SIZE, BLOCK_E, NORMALIZE,
        )  # fmt: skip


@triton.jit
def _weigh_outputs(
    acc, resident, first, last, out, out_stride, row_scale, item_scale, ids, shift, targets, lse, token_weights, keep,
    E: tl.constexpr, BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr, SAMPLED: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc + gradient of the logits at the outputs first .. last times the (scaled) outputs."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(out, start, out_stride, last, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(resident, tile, PRECISION)
        if NORMALIZE:
            logits *= item_scale
        scale = _numbers(row_scale, start, last, 0.0, BLOCK_N, MASKED, TMA)
        logits = logits * scale[None, :] - _numbers(lse, start, last, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        if shift is not None:
            logits -= shift
        hit = ids == _numbers(targets, start, last, -1, BLOCK_N, MASKED, TMA)[None, :]
        if MASKED:
            logits = tl.where((n < last)[None, :], logits, float("-inf"))
            hit = hit & (n < last)[None, :]
        weights = tl.exp2(logits)
        if SAMPLED:
            weights = tl.where(hit, 0.0, weights)
        else:
            weights = tl.where(hit, weights - keep, weights)
        if token_weights is not None:
            weights *= _numbers(token_weights, start, last, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        if HALF:
            weights *= 32768.0
        elif NORMALIZE:
            weights *= scale[None, :]
        acc = _add_product(acc, weights, tile, scale if HALF and NORMALIZE else None, PRECISION)
    return acc


@triton.jit(do_not_specialize=[*PER_BATCH, "smoothing"], do_not_specialize_on_alignment=CALLER_POINTERS)
def catalogue_loss_bwd_ditems_kernel(
    out, items, out_stride, items_stride, row_scale, item_scale, ids, shift, targets, lse, token_weights, end, partial,
    smoothing, I, W, per_split, per_group,
    SIZE: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    REGISTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of ditems [I, SIZE], or (with `partial` [splits, I, SIZE]) a split's sum over outputs.

    TMA: out, row_scale, targets, lse and token_weights are tensor descriptors. I: rows of `items`, W: T.
    """
    tile, split, bounds = _range(I, per_group, per_split, W, BLOCK_M, BLOCK_N)
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    HALF: tl.constexpr = items.dtype.element_ty == tl.float16
    resident = _tile(items, tile * BLOCK_M, items_stride, I, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = 1.0
    if NORMALIZE:
        scale = tl.load(item_scale + i, i < I, 0.0)[:, None]
    item_ids = i[:, None]
    correction = 0.0
    if ids is not None:
        item_ids = tl.load(ids + i, i < I, -1)[:, None]
    if shift is not None:
        correction = tl.load(shift + i, i < I, 0.0)[:, None]
    acc = _zeros(BLOCK_M, E, BLOCK_E)
    for part in tl.static_range(2):
        if bounds[part] < bounds[part + 1]:
            acc = _weigh_outputs(
                acc, resident, bounds[part], bounds[part + 1], out, out_stride, row_scale, scale, item_ids,
                None if shift is None else correction, targets, lse, token_weights, 1.0 - smoothing, E, BLOCK_E,
                NORMALIZE, ids is not None, HALF, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if HALF:
        acc = _times(acc, 1.0 / 32768.0)
    if partial is not None:
        for chunk in tl.static_range(len(acc)):
            base = partial + split.to(tl.int64) * I * SIZE
            store_rows(base, i, i < I, acc[chunk], SIZE, BLOCK_E, chunk)
    else:
        finish_items(
            acc, i, i < I, items, items_stride, end, smoothing, I, SIZE, BLOCK_E, NORMALIZE,
        )  # fmt: skip
