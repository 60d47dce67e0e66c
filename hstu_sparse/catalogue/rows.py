"""Define the kernels that read outputs or items once: scales, losses, the last step of the gradients.

Letters: T tokens, I items, E embedding size, R rows of either matrix; m: rows of a program's tile.

Let h_t be the sum over items of dloss/dlogit times the normalised item, and h_i the sum over outputs of dloss/dlogit
times the scaled output. The gradient of x, an output or an item with |x| > eps, is

    (h - x <x, h> / |x|^2) / |x|

times the scale of the logits (not for items, since h_i has it) and the gradient of the loss.
"""

from typing import NamedTuple

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class OutputsEnd(NamedTuple):
    """The tensors that `finish_outputs` reads and writes.

    positive             [T], the logits of the targets; None if acc includes the targets
    table, table_stride  the catalogue, which has the targets as rows
    item_sum             [E], the sum of the normalised items, for smoothing, or None
    grad, inverse_count  the gradient of the loss, and 1 / the number of targets, one number each
    token_weights        [T], the factor of each token's gradient, or None
    dout, along          the results
    """

    positive: object
    table: object
    table_stride: object
    item_sum: object
    grad: object
    inverse_count: object
    token_weights: object
    dout: object
    along: object


class ItemsEnd(NamedTuple):
    """The tensors that `finish_items` reads and writes. out_sum: [E], the sum of outputs, for smoothing, or None."""

    row_scale: object
    out_sum: object
    grad: object
    inverse_count: object
    ditems: object


@triton.jit
def load_fp32(base, r, inside, stride, E: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr = 0):
    """Load chunk CHUNK of WIDTH columns of rows r of a matrix, as fp32; 0 where not `inside`."""
    columns = CHUNK * WIDTH + tl.arange(0, WIDTH)[None, :]
    pointers = base + r[:, None].to(tl.int64) * stride + columns
    return tl.load(pointers, inside[:, None] & (columns < E), 0.0).to(tl.float32)


@triton.jit
def inverse_norm(x):
    """Return 1 / max(|x|, eps) of the rows of x: [m]."""
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), EPS)


@triton.jit(do_not_specialize=["R", "scale"])
def catalogue_loss_scale_kernel(
    x, stride, temperature, scales, scale, R, E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute scales[r] = scale / |x_r|, or scale without NORMALIZE; divide it by temperature unless that is None."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    factor = tl.zeros([ROWS], tl.float32) + scale
    if temperature is not None:
        factor /= tl.load(temperature).to(tl.float32)
    if NORMALIZE:
        factor *= inverse_norm(load_fp32(x, r, r < R, stride, E, PAD_E))
    tl.store(scales + r, factor, r < R)


@triton.jit(do_not_specialize=["R"])
def catalogue_loss_sum_kernel(
    x, stride, scales, targets, sums, R, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Compute sums [programs, E]: the sum of x_r * scales[r] over every programs-th tile of ROWS rows.

    scales, targets: [R] or None; with targets, rows without a target are left out.
    """
    acc = tl.zeros([ROWS, PAD_E], tl.float32)
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        r = first + tl.arange(0, ROWS)
        counts = r < R
        if targets is not None:
            counts = counts & (tl.load(targets + r, counts, -1) >= 0)
        rows = load_fp32(x, r, counts, stride, E, PAD_E)
        if scales is not None:
            rows *= tl.load(scales + r, counts, 0.0)[:, None]
        acc += rows
    e = tl.arange(0, PAD_E)
    tl.store(sums + tl.program_id(0) * E + e, tl.sum(acc, 0), e < E)


@triton.jit
def add_exp2(a, b):
    """Return log2(2^a + 2^b)."""
    return tl.maximum(a, b) + tl.log2(1.0 + tl.exp2(-tl.abs(a - b)))


@triton.jit(do_not_specialize=["T", "I", "splits", "smoothing"])
def catalogue_loss_rows_fwd_kernel(
    out, items, out_stride, items_stride, row_scale, targets, partial, item_sum, lse, positive, parts, losses,
    smoothing, T, I, splits, E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, SAMPLED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute lse [T] and positive [T], and losses [T] or, if that is None, parts [programs, 2].

    lse is computed from partial [splits, T]; it is infinity for a token without a target. SAMPLED: partial does not
    include the target. positive: the logit of the target. parts: the sum and the number of a program's losses.
    item_sum: [E], the sum of the normalised items, for smoothing, or None.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + t, t < T, -1)
    counts = target >= 0
    x = load_fp32(out, t, counts, out_stride, E, PAD_E)
    y = load_fp32(items, target, counts, items_stride, E, PAD_E)
    scale = tl.load(row_scale + t, counts, 0.0)
    logit = tl.sum(x * y, 1) * scale
    if NORMALIZE:
        logit *= inverse_norm(y)
    log_sum = tl.full([ROWS], -1e30, tl.float32)
    for split in range(0, splits):
        other = tl.load(partial + tl.cast(split, tl.int64) * T + t, counts, 0.0)
        log_sum = add_exp2(log_sum, other)
    if SAMPLED:
        log_sum = add_exp2(logit, log_sum)
    loss = log_sum - logit
    if item_sum is not None:
        e = tl.arange(0, PAD_E)
        mean = tl.sum(x * tl.load(item_sum + e, e < E, 0.0)[None, :], 1) * scale / I
        loss -= smoothing * (mean - logit)
    tl.store(lse + t, tl.where(counts, log_sum, float("inf")), t < T)
    tl.store(positive + t, logit, t < T)
    if losses is not None:
        tl.store(losses + t, tl.where(counts, loss, 0.0) * LN2, t < T)
    else:
        tl.store(parts + 2 * tl.program_id(0), tl.sum(tl.where(counts, loss, 0.0), 0) * LN2)
        tl.store(parts + 2 * tl.program_id(0) + 1, tl.sum(counts.to(tl.float32), 0))


@triton.jit(do_not_specialize=["programs"])
def catalogue_loss_mean_kernel(parts, loss, inverse_count, programs, SIZE: tl.constexpr):
    """Compute the mean of all losses and 1 / their number; without losses 0 and 1."""
    total = tl.zeros([SIZE], tl.float32)
    number = tl.zeros([SIZE], tl.float32)
    for first in range(0, programs, SIZE):
        p = first + tl.arange(0, SIZE)
        total += tl.load(parts + 2 * p, p < programs, 0.0)
        number += tl.load(parts + 2 * p + 1, p < programs, 0.0)
    inverse = 1.0 / tl.maximum(tl.sum(number, 0), 1.0)
    tl.store(loss, tl.sum(total, 0) * inverse)
    tl.store(inverse_count, inverse)


@triton.jit
def store_rows(base, r, inside, value, E: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Write a chunk of rows r of a matrix of E columns."""
    columns = CHUNK * WIDTH + tl.arange(0, WIDTH)[None, :]
    pointers = base + r[:, None].to(tl.int64) * E + columns
    tl.store(pointers, value.to(base.dtype.element_ty), inside[:, None] & (columns < E))


@triton.jit
def _smooth(mean, factor, E: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return chunk CHUNK of mean [E] times factor: [1, WIDTH]."""
    e = CHUNK * WIDTH + tl.arange(0, WIDTH)
    return tl.load(mean + e, e < E, 0.0)[None, :] * factor


@triton.jit
def finish_outputs(
    acc, t, out, out_stride, row_scale, targets, lse, end, smoothing, T, I,
    E: tl.constexpr, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write dout and along[t], the sum over items of logit times its gradient.

    acc: softmax @ items, a tuple of chunks [m, WIDTH]. end: `OutputsEnd`.
    """
    target = tl.load(targets + t, t < T, -1)
    counts = target >= 0
    if end.positive is None:
        share = tl.where(counts, smoothing - 1.0, 0.0)
    else:
        share = tl.exp2(tl.load(end.positive + t, counts, 0.0) - tl.load(lse + t, counts, 0.0)) - 1.0
    if NORMALIZE:
        square = tl.zeros_like(share)
        for chunk in tl.static_range(len(acc)):
            y = load_fp32(end.table, target, counts, end.table_stride, E, WIDTH, chunk)
            square += tl.sum(y * y, 1)
        share *= 1.0 / tl.maximum(tl.sqrt(square), EPS)
    projection = tl.zeros_like(share)
    square = tl.zeros_like(share)
    complete = ()
    for chunk in tl.static_range(len(acc)):
        y = load_fp32(end.table, target, counts, end.table_stride, E, WIDTH, chunk)
        part = acc[chunk] + share[:, None] * y
        if end.item_sum is not None:
            part -= tl.where(counts[:, None], _smooth(end.item_sum, smoothing / I, E, WIDTH, chunk), 0.0)
        x = load_fp32(out, t, counts, out_stride, E, WIDTH, chunk)
        projection += tl.sum(x * part, 1)
        square += tl.sum(x * x, 1)
        complete = complete + (part,)  # noqa: RUF005  Triton does not support starred tuples
    scale = tl.load(row_scale + t, counts, 0.0) * LN2
    if end.token_weights is not None:
        scale *= tl.load(end.token_weights + t, counts, 0.0)
    tl.store(end.along + t, projection * scale, t < T)
    projection = tl.where(square > EPS * EPS, projection / tl.maximum(square, EPS * EPS), 0.0)
    factor = scale * (tl.load(end.grad).to(tl.float32) * tl.load(end.inverse_count))
    for chunk in tl.static_range(len(acc)):
        part = complete[chunk]
        if NORMALIZE:
            part -= load_fp32(out, t, counts, out_stride, E, WIDTH, chunk) * projection[:, None]
        store_rows(end.dout, t, t < T, part * factor[:, None], E, WIDTH, chunk)


@triton.jit
def finish_items(
    acc, i, inside, items, items_stride, end, smoothing, I,
    E: tl.constexpr, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write rows i of ditems.

    acc: (gradients of the logits) @ outputs, a tuple of chunks [m, WIDTH]; outputs are scaled if NORMALIZE. end:
    `ItemsEnd`.
    """
    factor = tl.load(end.grad).to(tl.float32) * tl.load(end.inverse_count) * LN2
    if not NORMALIZE:
        # The scale is one number for all tokens.
        factor *= tl.load(end.row_scale)
    projection = tl.zeros_like(i).to(tl.float32)
    square = tl.zeros_like(projection)
    if NORMALIZE:
        for chunk in tl.static_range(len(acc)):
            part = acc[chunk]
            if end.out_sum is not None:
                part -= _smooth(end.out_sum, smoothing / I, E, WIDTH, chunk)
            y = load_fp32(items, i, inside, items_stride, E, WIDTH, chunk)
            projection += tl.sum(y * part, 1)
            square += tl.sum(y * y, 1)
        projection = tl.where(square > EPS * EPS, projection / tl.maximum(square, EPS * EPS), 0.0)
    for chunk in tl.static_range(len(acc)):
        part = acc[chunk]
        if end.out_sum is not None:
            part -= _smooth(end.out_sum, smoothing / I, E, WIDTH, chunk)
        if NORMALIZE:
            part -= load_fp32(items, i, inside, items_stride, E, WIDTH, chunk) * projection[:, None]
            part *= (factor / tl.maximum(tl.sqrt(square), EPS))[:, None]
        else:
            part *= factor
        store_rows(end.ditems, i, inside, part, E, WIDTH, chunk)


@triton.jit
def _merge(partial, r, R, splits, E: tl.constexpr, PAD_E: tl.constexpr, ROWS: tl.constexpr):
    """Return the sum over splits of rows r of partial [splits, R, E]."""
    acc = tl.zeros([ROWS, PAD_E], tl.float32)
    for split in range(0, splits):
        acc += load_fp32(partial + tl.cast(split, tl.int64) * R * E, r, r < R, E, E, PAD_E)
    return acc


@triton.jit(do_not_specialize=["T", "I", "splits", "smoothing"])
def catalogue_loss_merge_bwd_dout_kernel(
    partial, out, out_stride, row_scale, targets, lse, end, smoothing, T, I, splits,
    E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum partial [splits, T, E] and write dout by `finish_outputs`."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = _merge(partial, t, T, splits, E, PAD_E, ROWS)
    finish_outputs(
        (acc,), t, out, out_stride, row_scale, targets, lse, end, smoothing, T, I, E, PAD_E, NORMALIZE
    )  # fmt: skip


@triton.jit(do_not_specialize=["I", "splits", "smoothing"])
def catalogue_loss_merge_bwd_ditems_kernel(
    partial, items, items_stride, end, smoothing, I, splits,
    E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Finish ditems from the sum over splits."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = _merge(partial, i, I, splits, E, PAD_E, ROWS)
    finish_items((acc,), i, i < I, items, items_stride, end, smoothing, I, E, PAD_E, NORMALIZE)
