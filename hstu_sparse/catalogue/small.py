"""Compute the gradients of each token's negatives over a small catalogue as products with all items.

Letters: T tokens, I items, E embedding size, K negatives. R rows: the number of tokens whose logits are in memory at a
time. Logits are in base 2, as in products.py.

The gradients of K gathered rows of E numbers a token move more data than products with a small catalogue cost. So
forward, which gathers rows as sampled.py does, saves the logits [T, K]. In backward a kernel writes the gradient of the
logits as rows [R, I], zero except for drawn items, and torch's products compute the gradients from it, some thousand
tokens at a time. A program has a row, repeated negatives are counted and each writes the same sum, and products follow
in a fixed order: the gradients have the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.catalogue.rows import (
    ItemsEnd,
    OutputsEnd,
    catalogue_loss_merge_bwd_ditems_kernel,
    catalogue_loss_merge_bwd_dout_kernel,
)
from hstu_sparse.core import launch
from hstu_sparse.tiles.rows import as_rows

# Approximate number of logits whose gradients are in memory at a time.
HELD = 2**26
# Rows and columns of a tile of torch's products.
_TILE = 128


def takes_products(items: int, negatives: int, size: int, dtype: torch.dtype) -> bool:
    """Return whether products with all items are less work: I numbers a token against K * E added.

    Both take the same time, measured on an H200, for 13,000 items and 128 negatives of 256 in bf16 (docs).
    """
    return items * (4.0 if dtype == torch.float32 else 2.5) <= negatives * size


@triton.jit(do_not_specialize=["begin", "K", "factor"], do_not_specialize_on_alignment=["targets", "negatives"])
def catalogue_loss_pick_bwd_kernel(
    gradients, width, targets, negatives, picked, lse, positive, token_weights, factor, begin, K, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Write row r of gradients [R, width]: those of token begin + r's logits, 0 for other items, times factor and, if
    given, the token's weight.
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
        # The zeros are written before any thread overwrites one.
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


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _with_zero_rows(x: Tensor, rows: int) -> Tensor:
    """Return x with rows and columns of zeros that align its products."""
    (x,) = as_rows(x)
    return x if len(x) == rows else torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))


def _chunks(call, width: int):
    """Yield (begin, end) of the tokens in memory at a time: enough for a tile of dout on each multiprocessor.

    The number of multiprocessors is rounded down to a power of two, since tiles are grouped in clusters.
    """
    rows, processors = HELD // width, launch.multiprocessors(call.out.device)
    wave = max(1, 2 ** (processors.bit_length() - 1) // launch.cdiv(call.E, _TILE)) * _TILE
    rows = round(rows / wave) * wave if 2 * rows > wave else max(_TILE, rows // _TILE * _TILE)
    for begin in range(0, call.T, rows):
        yield begin, min(begin + rows, call.T)


def _width(call) -> int:
    return launch.cdiv(call.I, 16) * 16


def backward(call, grad, lse, positive, inverse_count, picked, dout, along, token_weights) -> Tensor:
    """Write dout and along; return the items' gradient."""
    row_scale = call.scales(call.out, call.scale, call.temperature)
    width = _width(call)
    # Rows are scaled before the products: fp16 cannot represent a small probability times 1 / |item|.
    (out,), items = as_rows(call.out), _with_zero_rows(call.items, width)
    rows = torch.mul(out, row_scale[:, None], out=torch.empty_like(out)) if call.normalize else out
    columns = items
    if call.normalize:
        scale = torch.nn.functional.pad(call.scales(call.items, 1.0, None), (0, width - call.I))
        columns = torch.mul(items, scale[:, None], out=torch.empty_like(items))
    factor = 32768.0 if call.out.dtype == torch.float16 else 1.0
    ditems = torch.empty_like(call.items, memory_format=torch.contiguous_format)
    total = None
    for begin, end in _chunks(call, width):
        gradients = call.new(end - begin, width, dtype=call.out.dtype)
        launch.run(
            catalogue_loss_pick_bwd_kernel, end - begin,
            gradients, width, call.targets, call.negatives, picked, lse, positive, token_weights, factor, begin, call.K,
            ROWS=max(16, min(launch.next_power_of_2(call.K), 128)), OTHERS=32, ZEROS=1024, num_warps=4,
        )  # fmt: skip
        part = _product(gradients, columns)[:, : call.E]
        part = part.mul_(1 / factor).contiguous() if factor != 1 else part.contiguous()
        tokens = slice(begin, end)
        # The product includes the targets' own -1: with smoothing 1 nothing is added.
        call.over_rows(
            catalogue_loss_merge_bwd_dout_kernel, end - begin, part, call.out[tokens], call.out.stride(0),
            row_scale[tokens], call.targets[tokens], lse[tokens], OutputsEnd(
                None, call.items, call.items.stride(0), None, grad, inverse_count, None, dout[tokens], along[tokens]
            ), 1.0, end - begin, call.I, 1,
        )  # fmt: skip
        part = _product(gradients.T, rows[tokens])
        total = part if total is None else total.add_(part)
    total = total[: call.I, : call.E].contiguous()
    if factor != 1:
        total.mul_(1 / factor)
    call.over_rows(
        catalogue_loss_merge_bwd_ditems_kernel, call.I, total, call.items, call.items.stride(0),
        ItemsEnd(row_scale, None, grad, inverse_count, ditems), 0.0, call.I, 1,
    )  # fmt: skip
    return ditems
