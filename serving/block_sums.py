"""Store the sums of keys and values over the complete blocks of bsa.

A request reads one sum for each block instead of all of its tokens. The sum of a block is stored under the page of the
block's last token, so that it is allocated and freed with the page.

Letters: B users, P columns of a page table, H heads, D query/key and V value head size, M blocks, K tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

import hstu_sparse
from hstu_sparse.core.launch import cdiv


class Stored:
    """The uncompressed keys and values in the pages of one layer. table: [B, P] int32."""

    def __init__(self, pool: hstu_sparse.PagePool, layer: int, table: Tensor):
        self.pool, self.tensors, self.table = pool, pool.tensors[layer], table
        self.page_size = pool.format.page_size

    def place(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return (page, slot) of positions [B, ...]; an arbitrary one for a position without a page."""
        flat = position.flatten(1)
        column = (flat // self.page_size).clamp(0, self.table.shape[1] - 1)
        page = self.table.gather(1, column).long().clamp(min=0)
        return page.view(position.shape), position % self.page_size

    def read(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys [B, H, K, D], values [B, H, K, V]) in fp32 at positions [B, H or 1, K]."""
        page, slot = self.place(position)
        head = torch.arange(self.pool.format.heads, device=page.device)[:, None]
        return self.tensors["k"][page, head, slot].float(), self.tensors["v"][page, head, slot].float()

    def times(self, position: Tensor) -> Tensor:
        """Return the times at positions [B, ...], in seconds."""
        return self.pool.timestamps[self.place(position)]


class BlockSums:
    """The sums of complete blocks. sizes: layer -> tokens of a block, for the layers of kind bsa."""

    def __init__(self, pool: hstu_sparse.PagePool, sizes: Mapping[int, int]):
        self.pool, self.sizes, f = pool, sizes, pool.format
        self.tensors = {
            layer: tuple(
                torch.zeros(pool.num_pages, ends_in_page(f, size), f.heads, width, device=pool.device)
                for width in (f.head_size, f.value_size)
            )
            for layer, size in sizes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self.tensors.values() for x in pair)

    @staticmethod
    def page_bytes(form: hstu_sparse.PageFormat, sizes: Mapping[int, int]) -> int:
        """Return the bytes of the sums stored under one page."""
        width = 4 * form.heads * (form.head_size + form.value_size)
        return sum(width * ends_in_page(form, size) for size in sizes.values())

    def _place(self, layer: int, stored: Stored, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the sums of blocks [B, M] are stored: (page, number among the blocks that end in the page)."""
        size = self.sizes[layer]
        last = (block + 1) * size - 1
        return stored.place(last)[0], block - last // stored.page_size * stored.page_size // size

    def write(self, layer: int, table: Tensor, lengths: Tensor, counts: Tensor) -> None:
        """Sum the blocks that new tokens complete; waits for the device.

        counts: [B] new tokens of each user; lengths: [B] stored tokens before them.
        """
        size, stored = self.sizes[layer], Stored(self.pool, layer, table)
        first = lengths // size
        most = int(((lengths + counts) // size - first).max())
        if not most:
            return
        block = first[:, None] + torch.arange(most, device=table.device)
        complete = (block + 1) * size <= (lengths + counts)[:, None]
        position = (block[..., None] * size + torch.arange(size, device=table.device)).flatten(1)
        page, slot = (x[complete] for x in self._place(layer, stored, block))
        for target, x in zip(self.tensors[layer], stored.read(position[:, None])):
            sums = x.unflatten(2, (most, size)).sum(3).transpose(1, 2)  # [B, M, H, ..]
            target[page, slot] = sums[complete]

    def read(self, layer: int, table: Tensor, lengths: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the sums of the first `blocks` blocks, [B, H, M, D] and [.., V].

        They are 0 for blocks that the first `lengths` [B] tokens do not complete.
        """
        stored = Stored(self.pool, layer, table)
        block = torch.arange(blocks, device=table.device).expand(len(table), -1)
        hidden = ((block + 1) * self.sizes[layer] > lengths[:, None])[:, None, :, None]
        where = self._place(layer, stored, block)
        keys, values = (x[where].transpose(1, 2).masked_fill(hidden, 0) for x in self.tensors[layer])
        return keys, values

    def begun(self, layer: int, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of the stored tokens in the block of each user's next token: [B, H, 1, D] and [.., V]."""
        size, stored = self.sizes[layer], Stored(self.pool, layer, table)
        position = (lengths // size * size)[:, None] + torch.arange(size, device=table.device)
        hidden = (position >= lengths[:, None])[:, None, :, None]
        keys, values = (x.masked_fill(hidden, 0).sum(2, keepdim=True) for x in stored.read(position[:, None]))
        return keys, values


def ends_in_page(form: hstu_sparse.PageFormat, size: int) -> int:
    """Return the number of blocks that can end in one page."""
    return cdiv(form.page_size, size)
