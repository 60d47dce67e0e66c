"""Define `PageFormat`: the tensors of a pool's pages, their size in bytes, and the order of codes in words.

Letters: T tokens, H heads, D query/key and V value head size, G heads of a head group (head_group), HG = H / G, C
channels of a head group (D * G for keys, V * G for values), P pages, S sink tokens.

A page has 16 slots for tokens, or 64 if keys are pruned, since a 64-bit word of the bitmap marks the tokens that keep a
channel. A page belongs to one sequence, so that a sequence grows without moving others.

The channels of a head group are cut into blocks of at most 64. The codes of a token's block are packed in 32-bit words:
each plane of bits by itself (a code of 3 bits has a plane of 2 bits and one of 1 bit), in chunks of up to 4 words.
With w words in a chunk and f codes in each half of a word, channel ((chunk * f + field) * w + word) * 2 + half is at
bit half * 16 + field * p of its word, for a plane of p bits. So a thread that unpacks a word gets pairs of neighbouring
channels, as tensor cores take them, without an exchange between threads.

If keys are pruned, the codes of the kept channels of a token are packed in order; all tokens keep the same number.
"""

import dataclasses
import functools
import math

import torch

from hstu_sparse.core.launch import cdiv, next_power_of_2
from hstu_sparse.core.validation import FLOATING_DTYPES, check_int, check_number

BITS = (2, 3, 4, 8)
HEAD_GROUPS = (1, 2, 4)
PAGE = 16  # tokens of a page, unless keys are pruned
TILE = 64  # tokens of a kernel's tile, and of a word of the bitmap
MAX_CHANNELS = 1024
MAX_SINKS = 1 << 20
CODE_DTYPES = {"codes": torch.int32, "ranges": torch.float16, "bitmap": torch.int64}

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclasses.dataclass(frozen=True)
class Side:
    """The sizes of the codes of keys or of values for a head group.

    The last quantisation group of values may be wider than its channels; the codes after the last channel are 0.
    """

    channels: int  # C
    group: int  # channels that share a scale and a zero, a power of two
    groups: int
    block: int  # channels of a block, a power of two
    blocks: int
    words: int  # 32-bit words of the codes of a block

    @classmethod
    def for_channels(cls, channels: int, quant_group: int, bits: int) -> "Side":
        group = min(quant_group, max(16, next_power_of_2(channels)))
        groups, block = cdiv(channels, group), min(TILE, group)
        words = sum(plane_words(block, plane) for plane in planes(bits))
        return cls(channels, group, groups, block, groups * group // block, words)


def planes(bits: int) -> tuple[int, ...]:
    """Return the numbers of bits of the planes of a code, from the lowest bits on."""
    return (2, 1) if bits == 3 else (bits,)


def plane_words(width: int, plane: int) -> int:
    """Return the number of 32-bit words of a plane of a block of `width` channels."""
    return max(1, width * plane // 32)


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """The format in which a pool stores keys and values. Raises TypeError or ValueError for invalid options.

    Attributes:
        heads: H, the number of heads.
        head_size: D, the head size of queries and keys.
        value_size: V, the head size of values.
        dtype: the dtype of uncompressed keys and values, and of sinks: fp32, bf16 or fp16 (the reference also fp64).
        bits: None to store keys and values in `dtype`; 2, 3, 4 or 8 for RotateKV codes with this number of bits. With
            codes, keys are padded with zeros to a head size that is a power of two.
        head_group: see `rotatekv_compress`.
        quant_group: see `rotatekv_compress`.
        sparsity: see `rotatekv_compress`.
        sink_tokens: see `rotatekv_compress`.
        clip: see `rotatekv_compress`.

    Examples:
        >>> plain = hstu_sparse.PageFormat(heads=4, head_size=32, value_size=32)
        >>> coded = hstu_sparse.PageFormat(heads=4, head_size=32, value_size=32, bits=4, sink_tokens=2)
        >>> plain.page_size, plain.num_pages(100), plain.page_bytes, coded.page_bytes
        (16, 7, 16384, 2304)
        >>> plain.bytes(100, layers=2), coded.bytes(100, layers=2), coded.sequence_bytes
        (230272, 37248, 2048)
        >>> plain.shapes(7)
        {'k': ((7, 4, 16, 32), torch.float32), 'v': ((7, 4, 16, 32), torch.float32)}
        >>> sorted(coded.sink_shapes(3))
        ['sink_k', 'sink_v']
        >>> hstu_sparse.PageFormat(heads=4, head_size=32, value_size=32, bits=5)
        Traceback (most recent call last):
        ValueError: ...
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
        if self.bits is not None:
            check_codes(self.bits, self.head_group, self.quant_group, self.sparsity, self.sink_tokens, self.clip)
            check_heads(self.heads, self.coded_size, self.head_group)
        elif self.sink_tokens:
            raise ValueError(f"sink_tokens={self.sink_tokens} needs bits, got bits=None")

    @property
    def sparse(self) -> bool:
        """Whether keys are pruned."""
        return self.bits is not None and self.sparsity > 0

    @property
    def coded_size(self) -> int:
        """D, rounded up to a power of two of at least 16 / head_group, for the Hadamard transform."""
        return max(next_power_of_2(self.head_size), 16 // self.head_group)

    @property
    def head_groups(self) -> int:
        return self.heads // self.head_group

    @functools.cached_property
    def keys(self) -> Side:
        """The sizes of the codes of keys, padded to `coded_size`."""
        assert self.bits is not None
        return Side.for_channels(self.coded_size * self.head_group, self.quant_group, self.bits)

    @functools.cached_property
    def values(self) -> Side:
        """The sizes of the codes of values."""
        assert self.bits is not None
        return Side.for_channels(self.value_size * self.head_group, self.quant_group, self.bits)

    @property
    def num_kept(self) -> int:
        """The number of channels of a key that are not pruned; the rounding of floats does not change it."""
        return math.ceil(round((1 - self.sparsity) * self.keys.channels, 9))

    @property
    def inset(self) -> float:
        """The share of a quantisation group's range, at either end, that the codes do not cover."""
        return (1 - self.clip) / 2

    @property
    def page_size(self) -> int:
        """The number of tokens of a page."""
        return TILE if self.sparse else PAGE

    def shapes(self, pages: int) -> Shapes:
        """Return name -> (shape, dtype) of the tensors of one layer with `pages` pages."""
        if self.bits is None:
            page = (pages, self.heads, PAGE)
            return {"k": ((*page, self.head_size), self.dtype), "v": ((*page, self.value_size), self.dtype)}
        keys, values, page_size, rows = self.keys, self.values, self.page_size, (pages, self.head_groups)
        codes: tuple[int, ...] = (keys.blocks, page_size, keys.words)
        if self.sparse:
            codes = (page_size, sum(cdiv(self.num_kept * plane, 32) for plane in planes(self.bits)))
        shapes: dict[str, tuple[int, ...]] = {
            "k_codes": (*rows, *codes),
            "k_ranges": (*rows, keys.groups, page_size, 2),
            "v_codes": (*rows, values.blocks, page_size, values.words),
            "v_ranges": (*rows, values.groups, page_size, 2),
        }
        if self.sparse:
            shapes["k_bitmap"] = (*rows, keys.channels)
        return {name: (shape, CODE_DTYPES[name[2:]]) for name, shape in shapes.items()}

    def sink_shapes(self, sequences: int) -> Shapes:
        """Return name -> (shape, dtype) of the sinks of one layer for `sequences` sequences; empty without sinks."""
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


def _bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def check_codes(
    bits: int = 2, head_group: int = 2, quant_group: int = 64, sparsity: float = 0.0, sink_tokens: int = 0,
    clip: float = 1.0,
) -> None:  # fmt: skip
    """Check the options of codes (see `rotatekv_compress`); raise TypeError or ValueError."""
    for name, number in (("bits", bits), ("head_group", head_group), ("quant_group", quant_group)):
        check_int(name, number, 1)
    for name, number, some in (("bits", bits, BITS), ("head_group", head_group, HEAD_GROUPS)):
        if number not in some:
            raise ValueError(f"{name} must be one of {', '.join(map(str, some))}, got {number}")
    if quant_group < 16 or quant_group & (quant_group - 1):
        raise ValueError(f"quant_group must be a power of two from 16, got {quant_group}")
    if not 0 <= check_number("sparsity", sparsity) <= 0.9:
        raise ValueError(f"sparsity must be from 0 to 0.9, got {sparsity}")
    check_int("sink_tokens", sink_tokens, 0, MAX_SINKS)
    if not 0 < check_number("clip", clip) <= 1:
        raise ValueError(f"clip must be above 0 and at most 1, got {clip}")


def check_heads(heads: int, head_size: int, head_group: int) -> None:
    """Raise ValueError unless head_group divides H, and D * head_group is a power of two from 16 to MAX_CHANNELS."""
    if heads < 1 or heads % head_group:
        raise ValueError(f"head_group={head_group} must divide the number of heads, got H={heads}")
    channels = head_size * head_group
    if channels & (channels - 1) or not 16 <= channels <= MAX_CHANNELS:
        above = min(max(16, next_power_of_2(channels)), MAX_CHANNELS)
        below = min(max(16, above // 2), MAX_CHANNELS)
        near = " or ".join(f"D={size // head_group}" for size in dict.fromkeys((below, above)))
        raise ValueError(
            f"the Hadamard transform needs D * head_group to be a power of two from 16 to {MAX_CHANNELS}, got "
            f"D={head_size}, head_group={head_group}; the nearest valid head sizes are {near}"
        )
