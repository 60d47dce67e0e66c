"""Compute the gradient of a small catalogue for negatives [T, K] by a product with all items.

Letters: T tokens, I items, E embedding size, K negatives. Logits are in base 2, as in products.py.

Forward (sampled.py) sums the gathered rows with an online softmax and saves the logits [T, K]. This sum is the gradient
of the output up to factors.

In backward, adding K rows of E numbers for each token would move more data than a matrix product. Instead a kernel
writes the gradients of the logits as rows [R, I], 0 except for drawn items, for some thousand tokens at a time, and
torch multiplies them. A program has a row; each of several equal negatives writes their sum. The order of additions is
fixed, so that the gradients are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.catalogue.rows import (
    LN2,
    ItemsEnd,
    catalogue_loss_merge_bwd_ditems_kernel,
    inverse_norm,
    load_fp32,
    store_rows,
)
from hstu_sparse.core import launch

# The approximate number of gradients of logits in memory at a time.
HELD = 2**26
# Tokens in memory at a time are a multiple of this.
_TILE = 128


def takes_products(items: int, negatives: int, size: int, dtype: torch.dtype) -> bool:
    """Return whether products with all items take less time than K * E atomic additions for each token.

    On an H200 both take the same time for 13,000 items, K=128, E=256 and bf16 (docs/catalogue_loss.md).
    """
    return items * (4.0 if dtype == torch.float32 else 2.5) <= negatives * size


@triton.jit(do_not_specialize=["begin", "K", "factor"], do_not_specialize_on_alignment=["targets", "negatives"])
def catalogue_loss_pick_bwd_kernel(
    gradients, width, targets, negatives, picked, lse, positive, token_weights, factor, begin, K, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Write row r of gradients [R, width]: the gradients of all logits of token begin + r, times factor and weight.

    token_weights: [T] or None.
    """
    r = tl.program_id(0).to(tl.int64)
    t = begin + r
    row = gradients + r * width
    for first in range(0, width, ZEROS):
        i = first + tl.arange(0, ZEROS)
        tl.store(row + i, tl.zeros([ZEROS], gradients.dtype.element_ty), i < width)
    target = tl.load(targets + t)
    if token_weights is not None:
        factor *= tl.load(token_weights + t)
    if target >= 0:
        # Wait until all zeros are written.
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
                other_ids = tl.load(negatives + t * K + o, o < K, -1).to(tl.int32)
                times += tl.sum((ids[:, None] == other_ids[None, :]).to(tl.int32), 1)
            weights = tl.exp2(tl.load(picked + t * K + k, k < K, float("-inf")) - log_sum) * times
            counts = (ids >= 0) & (ids != target)
            tl.store(row + ids, (weights * factor).to(gradients.dtype.element_ty), counts)


@triton.jit(do_not_specialize=["T", "scale"])
def catalogue_loss_outputs_bwd_kernel(
    out, out_stride, pull, temperature, grad, inverse_count, token_weights, dout, scaled, row_scale, scale, T,
    E: tl.constexpr, PAD_E: tl.constexpr, WIDTH: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dout from pull; row_scale [T], or [1] without NORMALIZE; and scaled [T, WIDTH], outputs times row_scale.

    Columns of `scaled` from E on are 0.
    """
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = load_fp32(out, t, t < T, out_stride, E, PAD_E)
    factor = tl.zeros([ROWS], tl.float32) + scale
    if temperature is not None:
        factor /= tl.load(temperature).to(tl.float32)
    if NORMALIZE:
        factor *= inverse_norm(x)
        x *= factor[:, None]
        tl.store(row_scale + t, factor, t < T)
    else:
        tl.store(row_scale + t, factor, t < 1)
    store_rows(scaled, t, t < T, x, WIDTH, PAD_E, 0)
    factor *= LN2 * tl.load(grad).to(tl.float32) * tl.load(inverse_count)
    if token_weights is not None:
        factor *= tl.load(token_weights + t, t < T, 0.0)
    store_rows(dout, t, t < T, load_fp32(pull, t, t < T, E, E, PAD_E) * factor[:, None], E, PAD_E, 0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def backward(call, grad, lse, positive, inverse_count, picked, pull, dout, token_weights) -> Tensor:
    """Write dout; return the items' gradient."""
    width, columns = launch.cdiv(call.I, 16) * 16, launch.cdiv(call.E, 16) * 16
    row_scale = call.new(call.T if call.normalize else 1)
    # Rows are scaled before the product: fp16 cannot represent a small probability times 1 / |out|.
    scaled = call.new(call.T, columns, dtype=call.out.dtype)
    call.over_rows(
        catalogue_loss_outputs_bwd_kernel, call.T, call.out, call.out.stride(0), pull, call.temperature, grad,
        inverse_count, token_weights, dout, scaled, row_scale, call.scale, call.T, WIDTH=columns,
    )  # fmt: skip
    factor = 32768.0 if call.out.dtype == torch.float16 else 1.0
    ditems = torch.empty_like(call.items, memory_format=torch.contiguous_format)
    total = None
    rows = max(_TILE, HELD // width // _TILE * _TILE)
    for begin in range(0, call.T, rows):
        end = min(begin + rows, call.T)
        gradients = call.new(end - begin, width, dtype=call.out.dtype)
        launch.run(
            catalogue_loss_pick_bwd_kernel, end - begin,
            gradients, width, call.targets, call.negatives, picked, lse, positive, token_weights, factor, begin, call.K,
            ROWS=max(16, min(launch.next_power_of_2(call.K), 128)), OTHERS=32, ZEROS=1024, num_warps=4,
        )  # fmt: skip
        part = _product(gradients.T, scaled[begin:end])
        total = part if total is None else total.add_(part)
    total = total[: call.I, : call.E].contiguous()
    if factor != 1:
        total.mul_(1 / factor)
    call.over_rows(
        catalogue_loss_merge_bwd_ditems_kernel, call.I, total, call.items, call.items.stride(0),
        ItemsEnd(row_scale, None, grad, inverse_count, ditems), 0.0, call.I, 1,
    )  # fmt: skip
    return ditems
