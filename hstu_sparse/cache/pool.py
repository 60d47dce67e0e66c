"""Define `PagePool`: keys and values of many sequences in pages, preallocated tensors for each layer.

Letters: T tokens, B sequences, P columns of a page table, H heads, D query/key and V value head size.

A row lists the pages of a sequence, the same in every layer. The caller stores it; `reserve` and `shrink` return a
longer or shorter row. `table` copies the rows of a batch to the device.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hstu_sparse.cache import files, store
from hstu_sparse.cache.format import PageFormat
from hstu_sparse.core.jagged import check_jagged, offsets_from_lengths, readable, sequence_ids
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import INTEGER, check_int, check_tensor, choose_backend

Row = array  # of typecode "i"


class PoolFull(RuntimeError):
    """Raised if a pool has fewer free pages, or rows of sinks, than a sequence needs.

    Examples:
        >>> pool = hstu_sparse.PagePool(hstu_sparse.PageFormat(heads=1, head_size=16, value_size=16), num_pages=1)
        >>> pool.reserve([], 17)
        Traceback (most recent call last):
        hstu_sparse.cache.pool.PoolFull: ...
    """


class PagePool:
    """Pages for the keys, values and timestamps of sequences, in `layers` layers.

    A pool is not thread-safe: while one thread reserves, shrinks or writes, no other thread may use the pool.

    Attributes:
        format: the format of the pages.
        layers: the number of layers.
        num_pages: the number of pages in each layer.
        num_sequences: the number of rows of sinks, one for each sequence; 0 if the format has no `sink_tokens`.
        tensors: name -> tensor for each layer, with the shapes of `PageFormat.shapes` and `sink_shapes`.
        timestamps: [num_pages, page_size] int64 seconds, shared by all layers; without rows if timed is False.
        free_pages: the number of free pages.
        free_sequences: the number of free rows of sinks; without sinks the number of free pages.

    Examples:
        >>> format = hstu_sparse.PageFormat(heads=2, head_size=16, value_size=16)
        >>> pool = hstu_sparse.PagePool(format, num_pages=4)
        >>> rows = [pool.reserve([], length) for length in (20, 5)]  # pages for two new sequences
        >>> pages, none, lengths = pool.table(rows), torch.zeros(2, dtype=torch.int64), torch.tensor([20, 5])
        >>> pages.shape, pool.free_pages, pool.free_sequences
        (torch.Size([2, 2]), 1, 1)
        >>> k, v, offsets = torch.randn(25, 2, 16), torch.randn(25, 2, 16), torch.tensor([0, 20, 25])
        >>> pool.check_table(pages, none, offsets)  # `write` does this, too
        >>> pool.write(0, k, v, offsets, pages, none)
        >>> pool.write_timestamps(torch.arange(25), offsets, pages, none)
        >>> torch.equal(pool.read(0, pages, lengths)[0], k), pool.read_timestamps(pages, lengths)[20].item()
        (True, 20)
        >>> pool.save("pool.safetensors", rows, [20, 5])
        >>> again, rows, lengths = hstu_sparse.PagePool.load("pool.safetensors")
        >>> again.free_pages, lengths, again.device.type
        (1, [20, 5], 'cpu')
        >>> pool.enlarge(6)
        >>> len(pool.shrink(rows[0], 16)), pool.free_pages, pool.nbytes
        (1, 4, 25344)
        >>> hstu_sparse.PagePool.within(format, num_bytes=2**20, length=100).num_pages
        248
    """

    def __init__(
        self,
        format: PageFormat,
        num_pages: int,
        *,
        layers: int = 1,
        num_sequences: int = 0,
        timed: bool = True,
        device: torch.device | str = "cpu",
    ):
        """Allocate the tensors of all layers.

        Args:
            format: the format of the pages.
            num_pages: the number of pages in each layer.
            layers: the number of layers.
            num_sequences: the number of rows of sinks; ignored if the format has no sinks.
            timed: whether to store timestamps, which a time bias needs.
            device: the device of all tensors.
        """
        if not isinstance(format, PageFormat):
            raise TypeError(f"format must be a PageFormat, got {type(format).__name__}")
        check_int("num_pages", num_pages, 0, 2**31 - 1)
        check_int("layers", layers, 1)
        check_int("num_sequences", num_sequences, 0, 2**31 - 1)
        if format.sink_tokens and num_pages and not num_sequences:
            raise ValueError(f"num_sequences must be at least 1 with sink_tokens={format.sink_tokens}, got 0")
        self.format, self.layers, self.num_pages = format, layers, num_pages
        self.num_sequences = num_sequences if format.sink_tokens else 0
        shapes = format.shapes(num_pages) | format.sink_shapes(self.num_sequences)
        self.tensors = [
            {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
            for _ in range(layers)
        ]
        self.timed = timed
        self.timestamps = torch.zeros(num_pages * timed, format.page_size, dtype=torch.int64, device=device)
        self._pages = _FreeList(num_pages)
        self._sinks = _FreeList(self.num_sequences)

    @classmethod
    def within(
        cls, format: PageFormat, num_bytes: int, length: int, *, layers: int = 1, device: torch.device | str = "cpu"
    ) -> Self:
        """Return a pool of at most `num_bytes` bytes with room for as many sequences of `length` tokens as possible.

        Raises ValueError if there is no room for one.
        """
        check_int("num_bytes", num_bytes, 1)
        check_int("length", length, 1)
        each = format.bytes(length, layers)
        sequences = num_bytes // each
        if not sequences:
            raise ValueError(f"num_bytes must be at least {each} for a sequence of {length} tokens, got {num_bytes}")
        left = num_bytes - sequences * each
        more = left // (layers * format.page_bytes + format.timestamp_bytes)
        pages = min(sequences * format.num_pages(length) + more, 2**31 - 1)
        return cls(format, pages, layers=layers, num_sequences=min(sequences, 2**31 - 1), device=device)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.timestamps.device

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors, including free pages."""
        return sum(x.nbytes for tensors in self.tensors for x in tensors.values()) + self.timestamps.nbytes

    @property
    def free_pages(self) -> int:
        """The number of free pages."""
        return len(self._pages.free)

    @property
    def free_sequences(self) -> int:
        """The number of free rows of sinks; without sinks the number of free pages."""
        return len(self._sinks.free) if self.format.sink_tokens else self.free_pages

    def enlarge(self, num_pages: int) -> None:
        """Enlarge the pool to num_pages pages. Copies the tensors of pages; rows stay valid."""
        more = num_pages - self.num_pages
        check_int("num_pages", num_pages, self.num_pages, 2**31 - 1)
        for tensors in self.tensors:
            for name in self.format.shapes(0):
                tensors[name] = _extended(tensors[name], more)
        self.timestamps = _extended(self.timestamps, more * self.timed)
        self._pages.more(more)
        self.num_pages = num_pages

    # Rows.

    def reserve(self, row: Sequence[int], length: int) -> Row:
        """Return the row of a sequence, with further pages if `length` tokens need them.

        Args:
            row: the last result of `reserve` or `shrink` for this sequence; [] for a new sequence.
            length: the number of tokens that must fit.

        Raises PoolFull, without a change of the pool, if it has too few free pages or rows of sinks. Raises ValueError
        if the row is not in use.
        """
        check_int("length", length, 0)
        row, sinks = self._checked(row, max(0, len(row) - 1))
        needed = max(0, self.format.num_pages(length) - max(0, len(row) - sinks))
        first = sinks if length and not row else 0
        if needed > len(self._pages.free) or first > len(self._sinks.free):
            free = f"{self.free_pages} free pages" + (f" and {self.free_sequences} free rows of sinks" if sinks else "")
            demand = f"{needed} more pages" + (" and a row of sinks" if first else "")
            raise PoolFull(f"the pool has {free}, a sequence of {length} tokens needs {demand}")
        if first:
            row = array("i", [self._sinks.take()])
        new_pages = array("i", [self._pages.take() for _ in range(needed)])
        if new_pages and self.format.sparse:  # kernels write these pages by setting bits
            page = torch.tensor(new_pages, device=self.device)
            for tensors in self.tensors:
                for name in self.format.shapes(0):
                    tensors[name][page] = 0
        return row + new_pages

    def shrink(self, row: Sequence[int], length: int) -> Row:
        """Free the pages after the first `length` tokens of a sequence; return the row without them.

        Args:
            row: the last result of `reserve` or `shrink` for this sequence.
            length: the number of tokens to keep; 0 frees all pages and returns an empty row.

        Raises ValueError if the row is not in use.
        """
        check_int("length", length, 0)
        sinks = int(self.format.sink_tokens > 0)
        row, _ = self._checked(row, sinks + self.format.num_pages(length) if length else 0)
        keep = sinks + self.format.num_pages(length) if length else 0
        for page in row[max(keep, sinks) :]:
            self._pages.give(page)
        if row and not keep and sinks:
            self._sinks.give(row[0])
        return row[:keep]

    def _checked(self, row: Sequence[int], first: int = 0) -> tuple[Row, int]:
        """Return (row as an array, 1 with sinks, otherwise 0); raise ValueError if entries from `first` on are free."""
        row = row if isinstance(row, array) else array("i", row)
        sinks = int(self.format.sink_tokens > 0)
        for place in range(first, len(row)):
            used = (self._sinks if place < sinks else self._pages).used
            if not (0 <= row[place] < len(used) and used[row[place]]):
                raise ValueError(f"row[{place}]={row[place]} is not in use; pass the last result of reserve or shrink")
        return row, sinks

    def table(self, rows: Sequence[Row]) -> Tensor:
        """Return the rows as a tensor [B, P] int32 on the pool's device, padded with 0; P is at least 1."""
        longest = max([1, *map(len, rows)])
        pages = torch.zeros(len(rows), longest, dtype=torch.int32)
        numbers = pages.numpy()
        for b, row in enumerate(rows):
            numbers[b, : len(row)] = row
        return pages.to(self.device)

    # Tokens. lengths: the number of tokens of each sequence that are already in the pool.

    @without_autocast
    @torch.no_grad()
    def write(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        pages: Tensor,
        lengths: Tensor,
        *,
        backend: str = "auto",
    ) -> None:
        """Write keys and values of new tokens in one layer, in the format of the pages.

        Args:
            layer: 0 to layers - 1.
            k: [T, H, D], v: [T, H, V], fp32, bf16 or fp16 (the reference also fp64), any strides. Their dtype
                may differ from the format's.
            offsets: [B+1], int32 or int64, from 0 to T: the new tokens of each sequence, possibly none.
            pages: [B, P] int32, the result of `table`. A sequence must not occur twice. Tokens for a page of -1 are
                dropped (a row of -1 pads the batch).
            lengths: [B], int32 or int64: token i of sequence b has position lengths[b] + i.
            backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

        Raises:
            TypeError, ValueError: with the expected and the actual value. The reference raises ValueError for numbers
                beyond the range of fp16 in fp16 pages, on a CPU also in scales and zeros of codes. The kernels write
                infinity to fp16 pages, and clamp scales and zeros.
        """
        f, sizes = self.format, {"H": self.format.heads, "D": self.format.head_size, "V": self.format.value_size}
        check_int("layer", layer, 0, self.layers - 1)
        check_tensor("k", k, "T H D", sizes, device=self.device)
        check_tensor("v", v, "T H V", sizes, dtype=k.dtype, device=self.device)
        self._check_new(offsets, pages, lengths, k=k, v=v)
        if choose_backend(backend, k, "PagePool.write") == "reference":
            store.write(self.tensors[layer], f, k, v, pages, *new_tokens(offsets, lengths, len(k)))
            return
        from hstu_sparse.cache.launch import write_pages

        write_pages(self.tensors[layer], f, k, v, offsets, pages, lengths)

    @torch.no_grad()
    def write_timestamps(
        self, timestamps: Tensor, offsets: Tensor, pages: Tensor, lengths: Tensor, *, backend: str = "auto"
    ) -> None:
        """Write the timestamps of new tokens, [T] int64 seconds, once for all layers; other arguments: see `write`."""
        self._check_timed()
        check_tensor("timestamps", timestamps, "T", {}, dtype=torch.int64, device=self.device)
        self._check_new(offsets, pages, lengths, timestamps=timestamps)
        if choose_backend(backend, timestamps, "PagePool.write_timestamps") == "reference":
            page, slot = store.locate_tokens(self.format, pages, *new_tokens(offsets, lengths, len(timestamps)))
            owned = page >= 0
            self.timestamps[page[owned], slot[owned]] = timestamps[owned]
            return
        from hstu_sparse.cache.launch import write_timestamps

        write_timestamps(self.timestamps, self.format, timestamps, offsets, pages, lengths)

    @without_autocast
    @torch.no_grad()
    def read(
        self, layer: int, pages: Tensor, lengths: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the concatenated keys [sum of lengths, H, D] and values [.., H, V] of sequences. Waits for the device.

        Args:
            layer, pages: as in `write`.
            lengths: [B], the number of tokens to read of each sequence.
            dtype: the dtype of the result, the format's by default.
        """
        check_int("layer", layer, 0, self.layers - 1)
        where = self._tokens(pages, lengths)
        return store.read(self.tensors[layer], self.format, pages, *where, dtype or self.format.dtype)

    def read_timestamps(self, pages: Tensor, lengths: Tensor) -> Tensor:
        """Return the concatenated timestamps [sum of lengths] int64 of sequences; see `read`. Waits for the device."""
        self._check_timed()
        return self.timestamps[store.locate_tokens(self.format, pages, *self._tokens(pages, lengths))]

    def _check_timed(self) -> None:
        if not self.timed:
            raise ValueError("the pool has no timestamps, since it was created with timed=False")

    def _tokens(self, pages: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        self.check_table(pages, lengths)
        return all_tokens(lengths)

    def _check_new(self, offsets: Tensor, pages: Tensor, lengths: Tensor, **tensors: Any) -> None:
        check_jagged(offsets, max(1, *(len(x) for x in tensors.values())), name="offsets", **tensors)
        self.check_table(pages, lengths, offsets)

    def check_table(self, pages: Tensor, lengths: Tensor, offsets: Tensor | None = None) -> None:
        """Raise TypeError or ValueError for a wrong page table [B, P], checking the values of `readable` tensors.

        Args:
            pages: the table; a page of -1 is valid for new tokens only.
            lengths: [B], the number of tokens of each sequence in the pool.
            offsets: [B+1] of new tokens, or None.
        """
        sizes = {} if offsets is None else {"B": offsets.shape[0] - 1}
        check_tensor("pages", pages, "B P", sizes, dtype=torch.int32, device=self.device)
        check_tensor("lengths", lengths, "B", sizes, dtype=INTEGER, device=self.device)
        if not readable(lengths) or not sizes["B"]:
            return
        # numpy, whose calls take a fifth of torch's time: serving calls this for every layer of a request.
        cached, numbers = lengths.cpu().numpy(), pages.cpu().numpy()
        whole = cached if offsets is None else cached + np.diff(offsets.cpu().numpy())
        if int(cached.min()) < 0:
            raise ValueError(f"lengths must be at least 0, got {int(cached.min())}")
        sinks = int(self.format.sink_tokens > 0)
        room = (sizes["P"] - sinks) * self.format.page_size
        if int(whole.max()) > room:
            raise ValueError(f"pages has room for {room} tokens of a sequence, got {int(whole.max())}")
        columns = np.arange(sizes["P"] - sinks) * self.format.page_size
        for length, least in ((cached, 0), (whole, -1)):
            used = numbers[:, sinks:][columns < length[:, None]]
            if len(used) and not least <= int(used.min()) <= int(used.max()) < self.num_pages:
                raise ValueError(
                    f"pages must be from {least} to {self.num_pages - 1}, got {int(used.min())} to {int(used.max())}"
                )
            rows = numbers[:, 0][length > 0]
            if sinks and len(rows) and not least <= int(rows.min()) <= int(rows.max()) < self.num_sequences:
                raise ValueError(f"pages[:, 0] must be rows of sinks, from {least} to {self.num_sequences - 1}")

    # Files.

    def save(self, path, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Write sequences to one safetensors file atomically.

        Args:
            path: the file.
            rows: the rows of the sequences, which must not share pages.
            lengths: the number of tokens of each sequence.

        Raises OSError if the file cannot be written, or if the path is a device, a pipe or a folder.
        """
        files.save(self, path, [self._checked(row)[0] for row in rows], lengths)

    @classmethod
    def load(
        cls, path, device: torch.device | str = "cpu", *, num_pages: int | None = None, num_sequences: int | None = None
    ) -> tuple[Self, list[Row], list[int]]:
        """Return (pool, rows, lengths) from a file that `save` wrote; the rows differ from the saved ones.

        Args:
            path: the file.
            device: the device of the new pool.
            num_pages, num_sequences: the sizes of the new pool; by default those of the saved pool.

        Raises ValueError if the file is missing, damaged or of another format, and PoolFull if the sequences need more
        than num_pages or num_sequences.
        """
        return files.load(cls, path, device, num_pages, num_sequences)[:3]


class _FreeList:
    """The numbers 0 .. count - 1, each free or used."""

    def __init__(self, count: int):
        self.free = array("i", range(count - 1, -1, -1))
        self.used = bytearray(count)

    def more(self, count: int) -> None:
        first = len(self.used)
        self.free = array("i", range(first + count - 1, first - 1, -1)) + self.free
        self.used += bytes(count)

    def take(self) -> int:
        number = self.free.pop()
        self.used[number] = 1
        return number

    def give(self, number: int) -> None:
        self.used[number] = 0
        self.free.append(number)


def _extended(x: Tensor, more: int) -> Tensor:
    longer = x.new_empty(len(x) + more, *x.shape[1:])  # torch.cat would allocate the zeros twice
    longer[: len(x)] = x
    longer[len(x) :] = 0
    return longer


def new_tokens(offsets: Tensor, lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return (sequence, position) [T] int64 of new tokens that follow `lengths` [B] tokens. total: T."""
    sequence = sequence_ids(offsets, total)
    begins = lengths.long() - offsets[:-1].long()
    return sequence, torch.arange(total, device=offsets.device) + begins[sequence]


def all_tokens(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sequence, position) [sum of lengths] int64 of all tokens. Waits for the device."""
    offsets = offsets_from_lengths(lengths.long())
    return new_tokens(offsets, torch.zeros_like(lengths), int(offsets[-1]))
