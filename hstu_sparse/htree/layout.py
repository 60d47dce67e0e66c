"""Compute a tree's number of layers and the places of its nodes from sizes alone, without a device sync for offsets.

Letters: T tokens of the batch, B sequences, r compression_rate, M = r * top_k the greatest number of a layer's
candidates.

Layer 0 has the tokens in their order. Layer l > 0 of sequence b has its nodes from slot `offsets[b] // r^l + b` on, of
T // r^l + B in all: slots of different sequences never overlap, some stay unused. One buffer holds the layers one
after the other.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Layer(NamedTuple):
    """A layer of the tree."""

    number: int
    size: int  # tokens below a node, r^l
    slots: int
    base: int  # first slot in the buffer of all layers


def depth(length: int, rate: int, most: int) -> int:
    """Return the layers above the tokens: they are added while the last one exceeds M nodes."""
    layers = 0
    while length > most:
        length = -(-length // rate)
        layers += 1
    return layers


def tree_layers(top: int, tokens: int, batch: int, rate: int) -> Iterator[Layer]:
    """Yield the layers from the tokens to `top`."""
    base = 0
    for number in range(top + 1):
        slots = tokens // rate**number + batch if number else tokens
        yield Layer(number, rate**number, slots, base)
        base += slots
