"""What a `RotateKVCache` holds: the packed keys and values of B sequences, and where they lie.

Letters: T cached tokens, B sequences, H heads, D query/key and V value head size, HG head groups, P pages, S sink
tokens. Sizes of the packed tensors: `layout.Layout.shapes`.
"""

import dataclasses
from typing import Self

import torch
from torch import Tensor

from hstu_sparse.jagged import offsets_from_lengths, sequence_ids
from hstu_sparse.pages.layout import Layout, RotateKVOptions

PACKED = ("k_codes", "k_ranges", "v_codes", "v_ranges", "k_bitmap")
DTYPES = {"codes": torch.int32, "ranges": torch.float16, "bitmap": torch.int64}


@dataclasses.dataclass(eq=False)
class PackedCache:
    """Keys and values of B sequences at a few bits each.

    options          how it was compressed
    layout           the sizes that follow from them
    dtype            of the keys and values that went in, and that `rotatekv_decompress` gives back
    seq_offsets      [B+1] int64: sequence b holds seq_offsets[b+1] - seq_offsets[b] tokens
    page_offsets     [B+1] int32, page_table [pages in use] int32: the pages of each sequence, in order
    channel_order    [HG, D * head_group] int64, or None
    packed           name -> tensor of all pages, of which the first `used_pages` are in use
    sink_k, sink_v   [B, S, H, D] and [B, S, H, V] of `dtype`: the first S tokens of each sequence, not in the pages
    """

    layout: Layout
    dtype: torch.dtype
    seq_offsets: Tensor
    page_offsets: Tensor
    page_table: Tensor
    channel_order: Tensor | None
    packed: dict[str, Tensor]
    sink_k: Tensor
    sink_v: Tensor
    used_pages: int

    @classmethod
    def empty(
        cls, layout: Layout, sequences: int, dtype: torch.dtype, device: torch.device, channel_order: Tensor | None
    ) -> Self:
        """A cache of `sequences` sequences without a token."""
        sinks = (sequences, layout.options.sink_tokens, layout.heads)
        return cls(
            layout=layout,
            dtype=dtype,
            seq_offsets=torch.zeros(sequences + 1, dtype=torch.int64, device=device),
            page_offsets=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            page_table=torch.zeros(0, dtype=torch.int32, device=device),
            channel_order=channel_order,
            packed={
                name: torch.zeros(shape, dtype=DTYPES[name[2:]], device=device)
                for name, shape in layout.shapes(0).items()
            },
            sink_k=torch.zeros(*sinks, layout.head_size, dtype=dtype, device=device),
            sink_v=torch.zeros(*sinks, layout.value_size, dtype=dtype, device=device),
            used_pages=0,
        )

    @property
    def options(self) -> RotateKVOptions:
        return self.layout.options

    @property
    def device(self) -> torch.device:
        return self.seq_offsets.device

    @property
    def num_sequences(self) -> int:
        return self.seq_offsets.shape[0] - 1

    def __getattr__(self, name: str) -> Tensor:
        if name in PACKED and "packed" in self.__dict__ and name in self.packed:
            return self.packed[name]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the cache by name, the packed ones cut to the pages in use."""
        found = {name: x[: self.used_pages] for name, x in self.packed.items()}
        found |= {name: getattr(self, name) for name in ("seq_offsets", "page_offsets", "page_table")}
        found |= {name: getattr(self, name) for name in ("sink_k", "sink_v") if self.options.sink_tokens}
        return found | ({} if self.channel_order is None else {"channel_order": self.channel_order})

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept: codes, bitmaps, scales, zeros, sinks, page table and offsets.

        Pages that `append` made room for and has not filled yet are not counted.
        """
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def to(self, device: torch.device | str) -> Self:
        """The cache on another device (itself if it is there already)."""
        device = torch.device(device)
        if self.seq_offsets.to(device).device == self.device:
            return self
        moved = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        packed = {name: x[: self.used_pages].to(device) for name, x in self.packed.items()}
        return dataclasses.replace(self, packed=packed, **moved)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """(sequence, position in it) of every cached token: [T] int64 each. Waits for the device."""
        sequence = sequence_ids(self.seq_offsets, int(self.seq_offsets[-1]))
        return sequence, torch.arange(len(sequence), device=self.device) - self.seq_offsets[sequence]

    def place(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """(page, slot) of tokens behind the sinks."""
        slot = position - self.options.sink_tokens
        pages = self.page_table[self.page_offsets[sequence].long() + slot // self.layout.page].long()
        return pages, slot % self.layout.page

    def grow(self, lengths: Tensor) -> None:
        """Makes room for `lengths` [B] more tokens and counts them in; their slots hold zeros."""
        page, sinks = self.layout.page, self.options.sink_tokens
        before = self.page_offsets.diff().long()
        after = self.seq_offsets.diff() + lengths
        seq_offsets = offsets_from_lengths(after)
        page_offsets = offsets_from_lengths(((after - sinks).clamp(min=0) + page - 1) // page)
        total = int(page_offsets[-1])
        owner = sequence_ids(page_offsets, total)
        place = torch.arange(total, device=self.device) - page_offsets[owner]
        old = place < before[owner]
        table = self.used_pages + (~old).cumsum(0) - 1
        if self.used_pages:
            known = (self.page_offsets[owner] + place).clamp(max=self.used_pages - 1)
            table = torch.where(old, self.page_table[known].long(), table)
        room = next(iter(self.packed.values())).shape[0]
        if total > room:
            # An eighth more than needed, once it grows, so that not every append copies the pages.
            more = (total + total // 8 if self.used_pages else total) - room
            self.packed = {
                name: torch.cat((x, x.new_zeros(more, *x.shape[1:]))) if room else x.new_zeros(more, *x.shape[1:])
                for name, x in self.packed.items()
            }
        self.seq_offsets, self.page_offsets = seq_offsets, page_offsets.int()
        self.page_table, self.used_pages = table.int(), total
