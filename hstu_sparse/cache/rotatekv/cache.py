"""Define `RotateKVCache`: the codes of keys and values of B sequences, in a `PagePool` that grows.

Letters: T cached tokens, B sequences, P columns of the page table, H heads, D query/key and V value head size, HG head
groups.
"""

from array import array
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from hstu_sparse.cache import files, store
from hstu_sparse.cache.format import PageFormat, check_codes, check_heads
from hstu_sparse.cache.pool import PagePool, new_tokens
from hstu_sparse.core.jagged import check_jagged, offsets_from_lengths, readable, sequence_ids
from hstu_sparse.core.validation import check_tensor, choose_backend


def check_kv(k: Tensor, v: Tensor, seq_offsets: Tensor) -> dict[str, int]:
    """Check keys [T, H, D] and values [T, H, V] of jagged sequences; return letter -> size."""
    sizes: dict[str, int] = {}
    check_tensor("k", k, "T H D", sizes)
    check_tensor("v", v, "T H V", sizes, dtype=k.dtype, device=k.device)
    check_jagged(seq_offsets, max(1, sizes["T"]), k=k, v=v)
    if sizes["V"] < 1:
        raise ValueError("v must be [T, H, V] with V of at least 1")
    return sizes


class RotateKVCache:
    """The keys and values of B sequences as codes of a few bits, created by `rotatekv_compress`.

    pool             a `PagePool` with one layer, without timestamps
    lengths, rows    the number of tokens and the row of each sequence, on the host
    seq_offsets      [B+1] int64: sequence b has seq_offsets[b+1] - seq_offsets[b] tokens
    pages            [B, P] int32, the page table
    channel_order    [HG, D * head_group] int64, or None

    Examples:
        >>> RotateKVCache = hstu_sparse.RotateKVCache
        >>> RotateKVCache.check(heads=4, head_size=16, bits=2)
        >>> k, v, offsets = torch.randn(8, 4, 16), torch.randn(8, 4, 16), torch.tensor([0, 3, 8])
        >>> cache = hstu_sparse.rotatekv_compress(k, v, offsets, bits=4)
        >>> cache.num_sequences, cache.lengths, cache.dtype, cache.device.type, cache.format.bits, cache.nbytes
        (2, [3, 5], torch.float32, 'cpu', 4, 2592)
        >>> sequences, positions = cache.tokens()
        >>> positions.tolist(), sorted(cache.tensors)
        ([0, 1, 2, 0, 1, 2, 3, 4], ['k_codes', 'k_ranges', 'v_codes', 'v_ranges'])
        >>> cache.append(k[:1], v[:1], torch.tensor([0, 1, 1])).lengths
        [4, 5]
        >>> cache.save("cache.safetensors")
        >>> RotateKVCache.load("cache.safetensors").lengths, RotateKVCache.empty(cache.format, 2, "cpu").lengths
        ([4, 5], [0, 0])
    """

    def __init__(self, pool: PagePool, rows: list[array], lengths: Sequence[int], channel_order: Tensor | None):
        self.pool, self.channel_order = pool, channel_order
        self._hold(rows, lengths)

    def _hold(self, rows: list[array], lengths: Sequence[int]) -> None:
        self.rows, self.lengths = rows, list(lengths)
        self.pages = self.pool.table(rows)
        self.seq_offsets = offsets_from_lengths(torch.tensor(self.lengths, dtype=torch.int64)).to(self.device)

    @classmethod
    def empty(
        cls, format: PageFormat, sequences: int, device: torch.device | str, channel_order: Tensor | None = None
    ) -> Self:
        """Create a cache of `sequences` sequences without tokens."""
        pool = PagePool(format, 0, num_sequences=sequences, timed=False, device=device)
        return cls(pool, [array("i") for _ in range(sequences)], [0] * sequences, channel_order)

    @staticmethod
    def check(heads: int, head_size: int, *, head_group: int = 2, **options) -> None:
        """Raise TypeError or ValueError if keys of H heads of D cannot be cached with these options.

        head_group, options: `bits`, `quant_group`, `sparsity`, `sink_tokens`, `clip` as in `rotatekv_compress`.
        """
        check_codes(head_group=head_group, **options)
        check_heads(heads, head_size, head_group)

    @property
    def format(self) -> PageFormat:
        """The format of the pages."""
        return self.pool.format

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the original keys and values, which `rotatekv_decompress` returns."""
        return self.format.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.pool.device

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the pool by name: codes, ranges, bitmap, sinks."""
        return self.pool.tensors[0]

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all data: used pages, sinks, page table, offsets and channel order.

        Free pages that `append` allocated in advance are not included.
        """
        format, used = self.format, self.pool.num_pages - self.pool.free_pages
        tables = [self.pages, self.seq_offsets] + ([] if self.channel_order is None else [self.channel_order])
        return used * format.page_bytes + self.num_sequences * format.sequence_bytes + sum(x.nbytes for x in tables)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return (sequence, position) of every cached token, [T] int64."""
        sequence = sequence_ids(self.seq_offsets, sum(self.lengths))
        return sequence, torch.arange(len(sequence), device=self.device) - self.seq_offsets[sequence]

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, seq_offsets: Tensor, *, backend: str = "auto") -> Self:
        """Append new tokens to the sequences in place. The codes of earlier tokens do not change.

        Args:
            k: [T', H, D] new keys, in the dtype of the cache; v: [T', H, V].
            seq_offsets: [B+1], the new tokens of each sequence, possibly none.
            backend: see `rotatekv_compress`.

        Returns:
            The cache. Waits for the device once, for the numbers of new tokens.
        """
        sizes, format = check_kv(k, v, seq_offsets), self.format
        expected = {"H": format.heads, "D": format.head_size, "V": format.value_size}
        for letter, size in expected.items():
            if sizes[letter] != size:
                raise ValueError(f"the cache has {letter}={size}, got keys and values with {letter}={sizes[letter]}")
        if k.dtype != self.dtype or k.device != self.device:
            raise TypeError(f"the cache is of {self.dtype} on {self.device}, got {k.dtype} on {k.device}")
        if seq_offsets.shape[0] != self.num_sequences + 1:
            raise ValueError(f"seq_offsets must be [B+1={self.num_sequences + 1}], got {list(seq_offsets.shape)}")
        chosen = choose_backend(backend, k, "rotatekv_compress")
        if chosen == "triton":
            from hstu_sparse.core.validation import check_kernel

            check_kernel("rotatekv_compress", k, {"D": format.head_size, "V": format.value_size})
        before = self.seq_offsets.diff()
        sequence, position = new_tokens(seq_offsets, before, len(k))
        if chosen == "reference" or readable(k):
            packed = position >= format.sink_tokens
            # Raise for numbers beyond the range of fp16 before the cache changes.
            store.encode(k[packed], v[packed], format, self.channel_order)
        self._grow(seq_offsets.diff().tolist())
        if chosen == "reference":
            store.write(self.tensors, format, k, v, self.pages, sequence, position, self.channel_order)
        else:
            from hstu_sparse.cache.launch import write_pages

            write_pages(self.tensors, format, k, v, seq_offsets, self.pages, before, self.channel_order)
        return self

    def _grow(self, more: list[int]) -> None:
        """Reserve pages for `more` tokens of each sequence."""
        lengths = [length + new for length, new in zip(self.lengths, more)]
        total = sum(map(self.format.num_pages, lengths))
        if total > self.pool.num_pages:
            # Allocate an eighth more than needed, so that not every append copies all pages.
            self.pool.enlarge(total + (total // 8 if self.pool.num_pages else 0))
        self._hold([self.pool.reserve(row, length) for row, length in zip(self.rows, lengths)], lengths)

    def save(self, path) -> None:
        """Write the cache to one safetensors file atomically.

        Raises OSError if the file cannot be written, or if the path is a device, a pipe or a folder. Raises ValueError
        if the cache has NaN or infinity.
        """
        _check_values(self.tensors)
        files.save(self.pool, path, self.rows, self.lengths, self.channel_order)

    @classmethod
    def load(cls, path, device: torch.device | str = "cpu") -> Self:
        """Return the cache that `save` wrote; raise ValueError if the file is missing, damaged or of another format."""

        def check(format: PageFormat, layers: int, tensors: dict[str, Tensor]) -> None:
            if format.bits is None or layers != 1:
                raise ValueError("expected a RotateKV cache, got the pages of a pool; use PagePool.load")
            _check_values({name.partition(".")[2]: x for name, x in tensors.items()})

        pool, rows, lengths, order = files.load(PagePool, path, device, None, None, check)
        return cls(pool, rows, lengths, order)


def _check_values(tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{name} has NaN or infinity; keys and values must be finite")
        if name.endswith("ranges") and (x[..., 0] < 0).any():
            raise ValueError(f"{name} has a negative scale")
