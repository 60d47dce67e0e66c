"""Define `PageFormat`: the content of a pool's pages, and their size in bytes.

Letters: T tokens, H heads, D query/key and V value head size, S sink tokens.
"""

import dataclasses
import functools
import math

import torch

from hstu_sparse.cache.layout import Layout, RotateKVOptions
from hstu_sparse.core.launch import cdiv, next_power_of_2
from hstu_sparse.core.validation import FLOATING_DTYPES, check_int

PAGE = 16  # tokens of a page of plain keys and values, and of unpruned codes
CODE_DTYPES = {"codes": torch.int32, "ranges": torch.float16, "bitmap": torch.int64}


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """The format in which a pool stores the keys and values of a token; invalid options raise.

    Attributes:
        heads: H, the number of heads.
        head_size: D, the size of queries and keys.
        value_size: V.
        dtype: of uncompressed keys and values, and of sinks: fp32, bf16 or fp16 (the reference also fp64).
        bits: None to store keys and values in `dtype`; 2, 3, 4 or 8 for RotateKV codes of that many bits. Keys whose
            head size is not a power of two are then padded with zeros.
        head_group: option of the codes, as in `rotatekv_compress`; so are the following.
        quant_group: see `rotatekv_compress`.
        sparsity: see `rotatekv_compress`.
        sink_tokens: see `rotatekv_compress`.
        clip: see `rotatekv_compress`.
    """

    heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    head_group: int = 2
    quant_group: int = 64
    sparsity: float = 0.0
    sink_tokens: int = 0
    clip: float = 1.0

    def __post_init__(self):
        for name in ("heads", "head_size", "value_size"):
            check_int(name, getattr(self, name), 1)
        if self.dtype not in FLOATING_DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, FLOATING_DTYPES))}, got {self.dtype}")
        if self.bits is None:
            if self.sink_tokens:
                raise ValueError(
                    f"sink_tokens need bits: without, every token is kept as it is, got {self.sink_tokens}"
                )
        else:
            self.layout  # noqa: B018  refuses what cannot be packed

    @property
    def options(self) -> RotateKVOptions | None:
        """The options of the codes; None for uncompressed keys and values."""
        if self.bits is None:
            return None
        return RotateKVOptions(
            self.bits, self.head_group, self.quant_group, float(self.sparsity), self.sink_tokens, self.clip
        )

    @functools.cached_property
    def layout(self) -> Layout | None:
        """The sizes of the codes, of keys that are padded to `coded_size`; None without codes."""
        return None if self.bits is None else Layout(self.options, self.heads, self.coded_size, self.value_size)

    @property
    def coded_size(self) -> int:
        """D, rounded up to a power of two for the Hadamard transform."""
        return max(next_power_of_2(self.head_size), 16 // self.head_group)

    @property
    def page_size(self) -> int:
        """The number of tokens of a page."""
        return PAGE if self.layout is None else self.layout.page

    def shapes(self, pages: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of one layer's tensors of `pages` pages, by name."""
        if self.layout is None:
            page = (pages, self.heads, PAGE)
            return {"k": ((*page, self.head_size), self.dtype), "v": ((*page, self.value_size), self.dtype)}
        return {name: (shape, CODE_DTYPES[name[2:]]) for name, shape in self.layout.shapes(pages).items()}

    def sink_shapes(self, sequences: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of one layer's tensors of the sinks of `sequences` sequences; empty without sinks."""
        if not self.sink_tokens:
            return {}
        row = (sequences, self.sink_tokens, self.heads)
        return {"sink_k": ((*row, self.head_size), self.dtype), "sink_v": ((*row, self.value_size), self.dtype)}

    @property
    def page_bytes(self) -> int:
        """The number of bytes of a page in one layer, without its timestamps."""
        return _bytes(self.shapes(1))

    @property
    def sequence_bytes(self) -> int:
        """The number of bytes of a sequence's sinks in one layer."""
        return _bytes(self.sink_shapes(1))

    @property
    def timestamp_bytes(self) -> int:
        """The number of bytes of a page's timestamps, which all layers share."""
        return 8 * self.page_size

    def num_pages(self, length: int) -> int:
        """Return the number of pages of a sequence of `length` tokens."""
        return cdiv(length, self.page_size)

    def bytes(self, length: int, layers: int = 1) -> int:
        """Return the number of bytes of a sequence of `length` tokens in a pool of `layers` layers, with timestamps."""
        pages = self.num_pages(length)
        return layers * (pages * self.page_bytes + self.sequence_bytes) + pages * self.timestamp_bytes


def _bytes(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
