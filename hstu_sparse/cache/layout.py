"""Define the memory layout of a RotateKV cache: options, sizes, and the order of codes in their words.

Letters: T tokens, B sequences, H heads, D query/key and V value head size, G heads of a head group (head_group), C
channels of a head group (D * G for keys, V * G for values), P pages, S sink tokens.

A head group's channels are cut into blocks of at most 64, so that a tile of 64 tokens by one block is what a tensor
core's instruction takes. Tokens lie in pages (16 slots, or 64 where a bitmap says what is kept: a 64-bit word holds 64
tokens of a channel); each sequence owns whole pages, listed in a page table, so that it grows without moving others.

Codes of a block: `plane` bits each (3 bits are a plane of 2 and one of 1), in 32-bit words. Chunk by chunk of up to 4
words, the channel at place ((chunk * fields + field) * words + word) * 2 + half is at bit half * 16 + field * plane of
its word. So a thread that unpacks a word gets pairs of neighbouring channels, in the two halves of a register, which
are the very pairs that it feeds to a tensor core, and no code has to move between threads. With a bitmap the kept
channels' codes are packed one after another, every token having as many of them.
"""

import dataclasses
import functools
import math

from hstu_sparse.core.launch import cdiv, next_power_of_2
from hstu_sparse.core.validation import check_int, check_number

BITS = (2, 3, 4, 8)
HEAD_GROUPS = (1, 2, 4)
TILE = 64  # tokens that kernels process at once, and tokens of a bitmap's word
MOST_CHANNELS = 1024
MOST_SINKS = 1 << 20  # each sequence has this many slots for them


@dataclasses.dataclass(frozen=True)
class RotateKVOptions:
    """The options of `rotatekv_compress`; invalid ones raise."""

    bits: int = 2
    head_group: int = 2
    quant_group: int = 64
    sparsity: float = 0.0
    sink_tokens: int = 0
    clip: float = 1.0

    def __post_init__(self):
        for name in ("bits", "head_group", "quant_group"):
            check_int(name, getattr(self, name), 1)
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {self.bits}")
        if self.head_group not in HEAD_GROUPS:
            raise ValueError(f"head_group must be one of {', '.join(map(str, HEAD_GROUPS))}, got {self.head_group}")
        if self.quant_group < 16 or self.quant_group & (self.quant_group - 1):
            raise ValueError(f"quant_group must be a power of two from 16, got {self.quant_group}")
        sparsity = check_number("sparsity", self.sparsity)
        if not 0 <= sparsity <= 0.9:
            raise ValueError(f"sparsity must be from 0 to 0.9, got {self.sparsity}")
        check_int("sink_tokens", self.sink_tokens, 0, MOST_SINKS)
        if not 0 < check_number("clip", self.clip) <= 1:
            raise ValueError(f"clip must be above 0 and at most 1, got {self.clip}")

    @property
    def inset(self) -> float:
        """The share of a group's range, at either end, that the codes leave out."""
        return (1 - self.clip) / 2


@dataclasses.dataclass(frozen=True)
class Side:
    """The sizes of keys or of values: C channels of a head group, in quantisation groups and blocks of a power of two.

    The last group of values may have fewer channels than its width; the rest is stored as code 0.
    """

    channels: int
    group: int  # channels that share scale and zero
    groups: int
    block: int
    blocks: int
    words: int  # 32-bit words of a block's codes

    @classmethod
    def of(cls, channels: int, quant_group: int, bits: int) -> "Side":
        group = min(quant_group, max(16, next_power_of_2(channels)))
        groups = cdiv(channels, group)
        block = min(TILE, group)
        return cls(channels, group, groups, block, groups * group // block, block_words(block, bits))


def planes(bits: int) -> tuple[int, ...]:
    """Return the sizes of the planes that a code is split into, in bits, the low ones first."""
    return (2, 1) if bits == 3 else (bits,)


def plane_words(width: int, plane: int) -> int:
    """Return the number of 32-bit words that one plane of a block of `width` channels takes."""
    return max(1, width * plane // 32)


def block_words(width: int, bits: int) -> int:
    """Return the number of 32-bit words of the codes of a block of `width` channels."""
    return sum(plane_words(width, plane) for plane in planes(bits))


def kept_words(num_kept: int, bits: int) -> int:
    """Return the number of words of a token's codes with `num_kept` channels, packed in sequence in each plane."""
    return sum(cdiv(num_kept * plane, 32) for plane in planes(bits))


@dataclasses.dataclass(frozen=True)
class Layout:
    """All sizes of a cache; heads that cannot be rotated raise."""

    options: RotateKVOptions
    heads: int
    head_size: int
    value_size: int

    def __post_init__(self):
        group = self.options.head_group
        check_heads(self.heads, self.head_size, group)

    @property
    def head_groups(self) -> int:
        return self.heads // self.options.head_group

    @functools.cached_property
    def keys(self) -> Side:
        return Side.of(self.head_size * self.options.head_group, self.options.quant_group, self.options.bits)

    @functools.cached_property
    def values(self) -> Side:
        return Side.of(self.value_size * self.options.head_group, self.options.quant_group, self.options.bits)

    @property
    def num_kept(self) -> int:
        """The number of a key's channels that pruning leaves; sparsity 0.9 leaves 10%, whatever floats round to."""
        return math.ceil(round((1 - self.options.sparsity) * self.keys.channels, 9))

    @property
    def sparse(self) -> bool:
        return self.options.sparsity > 0

    @property
    def page(self) -> int:
        """The number of slots of a page."""
        return TILE if self.sparse else 16

    def shapes(self, pages: int) -> dict[str, tuple[int, ...]]:
        """Return the packed tensors' shapes by name. Codes are int32, bitmaps int64, ranges (scale, zero) fp16."""
        groups, keys, values, page = self.head_groups, self.keys, self.values, self.page
        codes = (keys.blocks, page, keys.words)
        if self.sparse:
            codes = (page, kept_words(self.num_kept, self.options.bits))
        tensor_shapes = {
            "k_codes": (pages, groups, *codes),
            "k_ranges": (pages, groups, keys.groups, page, 2),
            "v_codes": (pages, groups, values.blocks, page, values.words),
            "v_ranges": (pages, groups, values.groups, page, 2),
        }
        if self.sparse:
            tensor_shapes["k_bitmap"] = (pages, groups, keys.channels)
        return tensor_shapes


def check_heads(heads: int, head_size: int, head_group: int) -> None:
    """Raise ValueError unless head_group divides H, and D * head_group is a power of two from 16 to MOST_CHANNELS."""
    if heads < 1 or heads % head_group:
        raise ValueError(f"head_group={head_group} must divide the number of heads, got H={heads}")
    channels = head_size * head_group
    if channels & (channels - 1) or not 16 <= channels <= MOST_CHANNELS:
        above = min(max(16, next_power_of_2(channels)), MOST_CHANNELS)
        below = min(max(16, above // 2), MOST_CHANNELS)
        near = " or ".join(f"D={size // head_group}" for size in dict.fromkeys((below, above)))
        raise ValueError(
            f"the Hadamard transform needs D * head_group to be a power of two from 16 to {MOST_CHANNELS}, got "
            f"D={head_size}, head_group={head_group}: the nearest head sizes that work are {near}"
        )
