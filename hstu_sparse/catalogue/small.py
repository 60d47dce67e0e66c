"""Negatives of each token over a small catalogue: products with all items, of which the negatives are picked.

Letters: T tokens, I items, E embedding size, K negatives. R rows: as many tokens as have their logits held at a time.
Logits are in base 2, as in products.py.

K gathered rows of E numbers for each token move more than a product with a small catalogue costs. Here torch multiplies
a few thousand outputs with all items at a time, and a kernel picks from the result [R, I] what each token drew: [T, K]
logits are kept for backward. There a kernel writes the gradient of the logits as rows [R, I], zeros but for what was
drawn, and two products make the gradients of it. A program owns a row, repeated negatives are counted and each writes
the same sum, and products follow in one order: the gradients are the same bits in every run.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse import launch
from hstu_sparse.catalogue.rows import (
    LN2,
    LOG2E,
    catalogue_loss_merge_bwd_ditems_kernel,
    catalogue_loss_merge_bwd_dout_kernel,
    inverse_norm,
    load_fp32,
)

# Logits that are held at a time: 4 bytes each forward, those of a dtype's number backward.
HELD = 2**26


def takes_products(items: int, negatives: int, size: int, dtype: torch.dtype) -> bool:
    """Whether products with all items are the smaller work: I numbers a token against K * E gathered and added.

    Where they take the same time, measured on an H200: 13,000 items for 128 negatives of 256 in bf16 (docs).
    """
    return items * (4.0 if dtype == torch.float32 else 2.5) <= negatives * size


@triton.jit(do_not_specialize=["begin", "K", "log_k"], do_not_specialize_on_alignment=["targets", "negatives"])
def catalogue_loss_pick_fwd_kernel(
    products, width, out, out_stride, items, items_stride, row_scale, item_scale, targets, negatives, log_q, picked,
    lse, positive, parts, log_k, begin, K, E: tl.constexpr, PAD_E: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Token begin + r: picked [T, K], its negatives' logits (-inf where they do not count), from products [R, width].

    Also lse and positive [T], and the loss and 1 in parts [T, 2] (0 and 0 without a target, whose lse is infinity).
    """
    r = tl.program_id(0).to(tl.int64)
    t = begin + r
    one = tl.arange(0, 1)
    target = tl.load(targets + t)
    if target < 0:
        tl.store(lse + t, float("inf"))
        tl.store(positive + t, 0.0)
        tl.store(parts + 2 * t, 0.0)
        tl.store(parts + 2 * t + 1, 0.0)
        return
    scale = tl.load(row_scale + t)
    x = load_fp32(out, t + one, one >= 0, out_stride, E, PAD_E)
    y = load_fp32(items, target.to(tl.int64) + one, one >= 0, items_stride, E, PAD_E)
    logit = tl.sum(x * y, 1) * scale
    if NORMALIZE:
        logit *= inverse_norm(y)
    top = logit
    total = tl.zeros([1], tl.float32) + 1.0
    for first in range(0, K, ROWS):
        k = first + tl.arange(0, ROWS)
        ids = tl.load(negatives + t * K + k, k < K, -1)
        counts = (ids >= 0) & (ids != target)
        logits = tl.load(products + r * width + ids, counts, 0.0) * scale
        if NORMALIZE:
            logits *= tl.load(item_scale + ids, counts, 0.0)
        if log_q is not None:
            logits -= (tl.load(log_q + ids, counts, 0.0).to(tl.float32) + log_k) * LOG2E
        logits = tl.where(counts, logits, float("-inf"))
        tl.store(picked + t * K + k, logits, k < K)
        higher = tl.maximum(top, tl.max(logits, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher), 0)
        top = higher
    log_sum = top + tl.log2(total)
    tl.store(lse + t + one, log_sum)
    tl.store(positive + t + one, logit)
    tl.store(parts + 2 * t + one, (log_sum - logit) * LN2)
    tl.store(parts + 2 * t + 1, 1.0)


@triton.jit(do_not_specialize=["begin", "K", "factor"], do_not_specialize_on_alignment=["targets", "negatives"])
def catalogue_loss_pick_bwd_kernel(
    gradients, width, targets, negatives, picked, lse, positive, factor, begin, K, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Row r of gradients [R, width]: factor times those of token begin + r's logits; zeros for what it did not draw."""
    r = tl.program_id(0).to(tl.int64)
    t = begin + r
    row = gradients + r * width
    for first in range(0, width, ZEROS):
        i = first + tl.arange(0, ZEROS)
        tl.store(row + i, tl.zeros([ZEROS], gradients.dtype.element_ty), i < width)
    target = tl.load(targets + t)
    if target >= 0:
        # The zeros stand before any thread writes over one.
        tl.debug_barrier()
        log_sum = tl.load(lse + t)
        share = tl.exp2(tl.load(positive + t) - log_sum) - 1.0
        tl.store(row + target, (share * factor).to(gradients.dtype.element_ty))
        for first in range(0, K, ROWS):
            k = first + tl.arange(0, ROWS)
            ids = tl.load(negatives + t * K + k, k < K, -1).to(tl.int32)
            times = tl.zeros([ROWS], tl.int32)
            for begin_others in range(0, K, OTHERS):
                o = begin_others + tl.arange(0, OTHERS)
                others = tl.load(negatives + t * K + o, o < K, -1).to(tl.int32)
                times += tl.sum((ids[:, None] == others[None, :]).to(tl.int32), 1)
            weights = tl.exp2(tl.load(picked + t * K + k, k < K, float("-inf")) - log_sum) * times
            counts = (ids >= 0) & (ids != target)
            tl.store(row + ids, (weights * factor).to(gradients.dtype.element_ty), counts)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _padded(x: Tensor, rows: int) -> Tensor:
    """x with rows and columns of zeros that make products of it aligned."""
    x = launch.aligned(x)
    return x if len(x) == rows else torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))


def _chunks(call, width: int):
    """(begin, end) of the tokens whose rows are held at a time."""
    rows = max(128, HELD // width // 128 * 128)
    for begin in range(0, call.T, rows):
        yield begin, min(begin + rows, call.T)


def _width(call) -> int:
    return launch.cdiv(call.I, 16) * 16


def forward(call):
    """The loss, lse [T], row_scale [T], item_scale [I], positive [T], inverse_count, picked [T, K]."""
    row_scale = call.scales(call.out, call.scale, call.temperature)
    item_scale = call.scales(call.items, 1.0, None) if call.normalize else call.new(0)
    lse, positive, parts = call.new(call.T), call.new(call.T), call.new(call.T, 2)
    picked = call.new(call.T, call.K)
    width = _width(call)
    out, items = launch.aligned(call.out), _padded(call.items, width)
    for begin, end in _chunks(call, width):
        products = _product(out[begin:end], items.T)
        catalogue_loss_pick_fwd_kernel[(end - begin,)](
            products, width, call.out, call.out.stride(0), call.items, call.items.stride(0), row_scale, item_scale,
            call.targets, call.negatives, call.log_q, picked, lse, positive, parts, math.log(max(1, call.K)), begin,
            call.K, **call.sizes, ROWS=_rows(call.K), num_warps=2,
        )  # fmt: skip
    loss, inverse_count = call.mean(parts)
    return loss, lse, row_scale, item_scale, positive, inverse_count, picked


def _rows(K: int) -> int:
    return max(16, min(launch.next_power_of_2(K), 128))


def backward(call, grad, lse, row_scale, item_scale, positive, inverse_count, picked, dout, along) -> Tensor:
    """Writes dout and along; returns the items' gradient."""
    width = _width(call)
    # Rows are scaled before the products: fp16 has no exponents for a small probability times 1 / |item|.
    out, items = launch.aligned(call.out), _padded(call.items, width)
    rows = torch.mul(out, row_scale[:, None], out=torch.empty_like(out)) if call.normalize else out
    columns = items
    if call.normalize:
        scale = torch.nn.functional.pad(item_scale, (0, width - call.I))
        columns = torch.mul(items, scale[:, None], out=torch.empty_like(items))
    factor = 32768.0 if call.out.dtype == torch.float16 else 1.0
    ditems = torch.empty_like(call.items, memory_format=torch.contiguous_format)
    total = None
    for begin, end in _chunks(call, width):
        gradients = call.new(end - begin, width, dtype=call.out.dtype)
        catalogue_loss_pick_bwd_kernel[(end - begin,)](
            gradients, width, call.targets, call.negatives, picked, lse, positive, factor, begin, call.K,
            ROWS=_rows(call.K), OTHERS=32, ZEROS=1024, num_warps=4,
        )  # fmt: skip
        part = _product(gradients, columns)[:, : call.E]
        part = part.mul_(1 / factor).contiguous() if factor != 1 else part.contiguous()
        tokens = slice(begin, end)
        # The targets' own -1 is in the product: with smoothing 1 nothing is added.
        call.over_rows(
            catalogue_loss_merge_bwd_dout_kernel, end - begin, part, call.out[tokens], call.out.stride(0),
            row_scale[tokens], call.targets[tokens], lse[tokens], None, call.items, call.items.stride(0), None, grad,
            inverse_count, dout[tokens], along[tokens], 1.0, end - begin, call.I, 1,
        )  # fmt: skip
        part = _product(gradients.T, rows[tokens])
        total = part if total is None else total.add_(part)
    total = total[: call.I, : call.E].contiguous()
    if factor != 1:
        total.mul_(1 / factor)
    call.over_rows(
        catalogue_loss_merge_bwd_ditems_kernel, call.I, total, call.items, call.items.stride(0), row_scale, None, grad,
        inverse_count, ditems, 0.0, call.I, 1,
    )  # fmt: skip
    return ditems
