"""Launches of the kernels that write pages, and what every kernel on codes is told. Imported only when it is needed.

Letters: T new tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size.
"""

import torch
from torch import Tensor

from hstu_sparse.launch import on_device, padded_head, run
from hstu_sparse.pages.format import PageFormat
from hstu_sparse.pages.write import write_pages_kernel
from hstu_sparse.rows import as_rows
from hstu_sparse.validation import check_kernel

LOW_BITS = {torch.bfloat16: 4, torch.float16: 8}  # what a 16-bit type's mantissa holds beside its first bit


def code_offset(bits: int, dtype: torch.dtype, sparse: bool = False) -> int:
    """What unpacking leaves on top of a code: it is the mantissa of 2 ** plane, of each plane (see `codec`)."""
    if sparse or bits > LOW_BITS.get(dtype, 0):
        return 0
    return 4 + 4 * 2 if bits == 3 else 2**bits


def words(x: Tensor | None) -> Tensor | None:
    """Scales and zeros as the kernels take them: an int32 for both."""
    return None if x is None else x.view(torch.int32)


def write_pages(
    tensors: dict[str, Tensor], format: PageFormat, k: Tensor, v: Tensor, offsets: Tensor, pages: Tensor,
    lengths: Tensor,
) -> None:  # fmt: skip
    """Writes keys [T, H, D] and values [T, H, V] as `PagePool.write` says, in a format without codes."""
    check_kernel("PagePool.write", k, {"D": format.head_size, "V": format.value_size})
    check_kernel("PagePool.write", tensors["k"], {})
    if len(k) == 0:
        return
    k, v = as_rows(k, v, align=False)
    batch, rows = offsets.shape[0] - 1, 16
    with on_device(k.device):
        run(
            write_pages_kernel, (len(k) // rows + batch, format.heads), k, *k.stride()[:2], v,
            *v.stride()[:2], offsets.contiguous(), lengths.contiguous(), pages.contiguous(), tensors["k"], tensors["v"],
            batch, pages.shape[1], H=format.heads, D=format.head_size, V=format.value_size,
            PAD_D=padded_head(format.head_size), PAD_V=padded_head(format.value_size), PAGE=format.page_size, R=rows,
            num_warps=4,
        )  # fmt: skip
