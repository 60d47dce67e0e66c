"""How many layers a tree has and where its nodes lie, from sizes alone: no look at the offsets, so no device sync.

Letters: T tokens of the batch, B sequences, r compression_rate, M = r * top_k the most candidates a layer has.

Layer 0 are the tokens as they lie. Layer l > 0 of sequence b has its nodes at the slots `offsets[b] // r^l + b` and
after, of T // r^l + B in all: slots of different sequences never meet, some stay unused. One buffer holds the layers
one behind the other.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Layer(NamedTuple):
    number: int
    size: int  # tokens below a node, r^l
    slots: int
    base: int  # first slot in the buffer of all layers


def depth(length: int, rate: int, most: int) -> int:
    """Layers above the tokens for a sequence of `length`: layers are added while the last has more than M nodes."""
    layers = 0
    while length > most:
        length = -(-length // rate)
        layers += 1
    return layers


def tree_layers(top: int, tokens: int, batch: int, rate: int) -> Iterator[Layer]:
    """The layers from the tokens to `top`."""
    base = 0
    for number in range(top + 1):
        slots = tokens // rate**number + batch if number else tokens
        yield Layer(number, rate**number, slots, base)
        base += slots
