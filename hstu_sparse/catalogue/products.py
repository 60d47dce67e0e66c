"""Define the kernels that multiply outputs by items, tile by tile, and write no logits.

Letters: T tokens, I items, E embedding size, W rows of the streamed matrix; m: rows of the resident tile, n: rows of a
streamed tile.

A program has a resident tile of outputs (forward, dout) or of items (ditems) and loops over tiles of the other matrix,
so that sums have a fixed order. If there are too few tiles to fill the GPU, several programs (`splits`) share a tile;
the kernels of rows.py merge their log-sum-exps or fp32 gradients. Tiles are tuples of chunks of BLOCK_E columns, since
the last step of a gradient (rows.py) then needs fewer registers.

Logits are in base 2: <out_t, items_i> * row_scale[t] * item_scale[i] with row_scale[t] = log2(e) / (temperature *
|out_t|) and item_scale[i] = 1 / |items_i| (norms 1 without `normalize`). They are scaled after the product, so that
tensor cores multiply unchanged 16-bit inputs.

The items are the catalogue, or drawn negatives (SAMPLED) with their `ids`, which mask negatives that are the target,
and the corrections `shift`. If each block of tokens has other negatives, a tile of a block loops only over the block's
rows of the other matrix: per_group resident rows and per_split streamed rows of a block.

In backward the softmax, rounded to the dtype of the inputs, is the left operand of a second product. fp16 cannot
represent a small probability times 1 / |item|: the right operand is normalised instead, and the probability is
multiplied by 2^15.
"""

import triton
import triton.language as tl

from hstu_sparse.catalogue.rows import finish_items, finish_outputs, store_rows
from hstu_sparse.tiles.rows import in_registers

# Arguments that differ between batches.
PER_BATCH = ["T", "W", "per_split", "per_group"]
CALLER_POINTERS = ["targets", "ids"]


@triton.jit
def _chunk(base, start, first_column, stride, limit, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
           MASKED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Load a tile [ROWS, WIDTH] of a matrix [limit, E], or of its tensor descriptor if TMA; 0 outside the matrix."""
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
    """Load ROWS rows of a matrix as a tuple of chunks of WIDTH columns."""
    tile = ()
    for chunk in tl.static_range((E + WIDTH - 1) // WIDTH):
        part = _chunk(base, start, chunk * WIDTH, stride, limit, E, WIDTH, ROWS, MASKED, TMA)
        tile = tile + (in_registers(part, REGISTERS),)  # noqa: RUF005  Triton does not support starred tuples
    return tile


@triton.jit
def _scores(resident, tile, PRECISION: tl.constexpr):
    """Return resident @ tile.T, [m, n]."""
    scores = tl.dot(resident[0], tl.trans(tile[0]), input_precision=PRECISION)
    for chunk in tl.static_range(1, len(resident)):
        scores = tl.dot(resident[chunk], tl.trans(tile[chunk]), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _add_product(acc, weights, tile, length, PRECISION: tl.constexpr):
    """Return the chunks of acc + weights @ tile. length: [n] factors of the rows of the tile (fp16), or None."""
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
def _scale_chunks(acc, factor):
    scaled = ()
    for chunk in tl.static_range(len(acc)):
        scaled = scaled + (acc[chunk] * factor,)  # noqa: RUF005
    return scaled


@triton.jit
def _load_vector(base, start, limit, other, SIZE: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):
    """Load SIZE numbers of a vector from `start` on; past its end `other`, or 0 from a tensor descriptor."""
    if TMA:
        # Through shared memory: otherwise every thread would issue a load for each of its columns.
        return base.load([start])
    else:
        n = start + tl.arange(0, SIZE)
        if MASKED:
            return tl.load(base + n, n < limit, other)
        else:
            return tl.load(base + n)


@triton.jit
def _range(rows, per_group, per_split, W, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (tile, split, bounds): streamed tiles from bounds[0] to bounds[1] are full, those up to bounds[2] masked.

    Programs of a split are adjacent, so that they share streamed data in the L2 cache. With groups there is one split.
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
    """Return (top, total) [m] after the items first .. last: sum of 2^logit = total * 2^top (BOUNDED: 2^bound)."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(items, start, items_stride, last, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(resident, tile, PRECISION)
        if item_scale is not None:
            logits *= _load_vector(item_scale, start, last, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        logits *= row_scale
        if shift is not None:
            logits -= _load_vector(shift, start, last, 0.0, BLOCK_N, MASKED, False)[None, :]
        if MASKED:
            logits = tl.where((n < last)[None, :], logits, float("-inf"))
        if ids is not None:
            drawn = _load_vector(ids, start, last, -1, BLOCK_N, MASKED, False)[None, :]
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
    """Compute lse [splits, T] for BLOCK_M outputs: log2 of the sum of 2^logit over the items of a split, or -1e30.

    BOUNDED: all logits are at most `bound` in magnitude, so that no running maximum is needed.
    """
    tile, split, bounds = _range(T, per_group, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    resident = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)[:, None]
    target = -1
    if ids is not None:
        target = tl.load(targets + t, t < T, -1)[:, None]
    # Finite, since a tile without a valid item would subtract infinity from infinity.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(2):
        # ptxas 12.8 (Triton 3.6) serialises the products of a loop that may have no iterations (warning C7515).
        if bounds[part] < bounds[part + 1]:
            top, total = _sum_exp(
                top, total, resident, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, ids,
                shift, target, bound, E, BLOCK_E, BOUNDED, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if BOUNDED:
        top = tl.zeros([BLOCK_M], tl.float32) + bound
    # These comparisons are false for NaN, so that the loss of NaN items is NaN.
    log_sum = tl.where(total == 0.0, -1e30, top + tl.log2(tl.where(total < 1e-37, 1e-37, total)))
    tl.store(lse + split.to(tl.int64) * T + t, log_sum, t < T)


@triton.jit
def _add_items(
    acc, resident, first, last, items, items_stride, row_scale, item_scale, ids, shift, target, lse,
    E: tl.constexpr, BLOCK_E: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc + softmax @ items (normalised) for the items first .. last."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(items, start, items_stride, last, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(resident, tile, PRECISION)
        length = None
        if item_scale is not None:
            length = _load_vector(item_scale, start, last, 0.0, BLOCK_N, MASKED, TMA)
            logits *= length[None, :]
        logits = logits * row_scale - lse
        if shift is not None:
            logits -= _load_vector(shift, start, last, 0.0, BLOCK_N, MASKED, False)[None, :]
        if MASKED:
            logits = tl.where((n < last)[None, :], logits, float("-inf"))
        weights = tl.exp2(logits)
        if ids is not None:
            drawn = _load_vector(ids, start, last, -1, BLOCK_N, MASKED, False)[None, :]
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
    """Compute BLOCK_M rows of dout [T, SIZE], or of partial [splits, T, SIZE]: softmax @ items of a split.

    E: the number of columns of the matrices, SIZE padded with zeros.
    """
    tile, split, bounds = _range(T, per_group, per_split, W, BLOCK_M, BLOCK_N)
    t = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    HALF: tl.constexpr = out.dtype.element_ty == tl.float16
    resident = _tile(out, tile * BLOCK_M, out_stride, T, E, BLOCK_E, BLOCK_M, True, False, REGISTERS)
    scale = tl.load(row_scale + t, t < T, 0.0)[:, None]
    # The lse of a token without a target is infinity, so that its softmax is 0.
    log_sum = tl.load(lse + t, t < T, float("inf"))[:, None]
    target = -1
    if ids is not None:
        target = tl.load(targets + t, t < T, -1)[:, None]
    acc = _zeros(BLOCK_M, E, BLOCK_E)
    for part in tl.static_range(2):
        if bounds[part] < bounds[part + 1]:
            acc = _add_items(
                acc, resident, bounds[part], bounds[part + 1], items, items_stride, scale, item_scale, ids, shift,
                target, log_sum, E, BLOCK_E, HALF, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if HALF:
        acc = _scale_chunks(acc, 1.0 / 32768.0)
    if partial is not None:
        for chunk in tl.static_range(len(acc)):
            base = partial + split.to(tl.int64) * T * SIZE
            store_rows(base, t, t < T, acc[chunk], SIZE, BLOCK_E, chunk)
    else:
        finish_outputs(
            acc, t, out, out_stride, row_scale, targets, lse, end, smoothing, T, I, SIZE, BLOCK_E, NORMALIZE,
        )  # fmt: skip


@triton.jit
def _add_outputs(
    acc, resident, first, last, out, out_stride, row_scale, item_scale, ids, shift, targets, lse, token_weights, keep,
    E: tl.constexpr, BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr, SAMPLED: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc + (gradients of the logits) @ outputs (scaled) for the outputs first .. last."""
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        tile = _tile(out, start, out_stride, last, E, BLOCK_E, BLOCK_N, MASKED, TMA, False)
        logits = _scores(resident, tile, PRECISION)
        if NORMALIZE:
            logits *= item_scale
        scale = _load_vector(row_scale, start, last, 0.0, BLOCK_N, MASKED, TMA)
        logits = logits * scale[None, :] - _load_vector(lse, start, last, 0.0, BLOCK_N, MASKED, TMA)[None, :]
        if shift is not None:
            logits -= shift
        hit = ids == _load_vector(targets, start, last, -1, BLOCK_N, MASKED, TMA)[None, :]
        if MASKED:
            logits = tl.where((n < last)[None, :], logits, float("-inf"))
            hit = hit & (n < last)[None, :]
        weights = tl.exp2(logits)
        if SAMPLED:
            weights = tl.where(hit, 0.0, weights)
        else:
            weights = tl.where(hit, weights - keep, weights)
        if token_weights is not None:
            weights *= _load_vector(token_weights, start, last, 0.0, BLOCK_N, MASKED, TMA)[None, :]
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
    """Compute BLOCK_M rows of ditems [I, SIZE], or of partial [splits, I, SIZE]: the sum over the outputs of a split.

    TMA: out, row_scale, targets, lse and token_weights are tensor descriptors. W: T.
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
            acc = _add_outputs(
                acc, resident, bounds[part], bounds[part + 1], out, out_stride, row_scale, scale, item_ids,
                None if shift is None else correction, targets, lse, token_weights, 1.0 - smoothing, E, BLOCK_E,
                NORMALIZE, ids is not None, HALF, PRECISION, TMA, BLOCK_N, STAGES, part == 1,
            )  # fmt: skip
    if HALF:
        acc = _scale_chunks(acc, 1.0 / 32768.0)
    if partial is not None:
        for chunk in tl.static_range(len(acc)):
            base = partial + split.to(tl.int64) * I * SIZE
            store_rows(base, i, i < I, acc[chunk], SIZE, BLOCK_E, chunk)
    else:
        finish_items(
            acc, i, i < I, items, items_stride, end, smoothing, I, SIZE, BLOCK_E, NORMALIZE,
        )  # fmt: skip
