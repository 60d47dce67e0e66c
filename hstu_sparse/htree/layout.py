"""How many layers a tree has and where its nodes lie, from sizes alone: no look at the offsets, so no device sync.

Letters: T tokens of the batch, B sequences, r compression_rate, M = r * top_k the most candidates a layer has.

Layer l > 0 of sequence b has its nodes at the slots `offsets[b] // r^l + b` and after, of T // r^l + B in all: slots of
different sequences never meet, some stay unused. One buffer holds the layers 1, 2, ... one behind the other.
"""


def depth(length: int, rate: int, most: int) -> int:
    """Layers above the tokens for a sequence of `length`: layers are added while the last has more than M nodes."""
    layers = 0
    while length > most:
        length = -(-length // rate)
        layers += 1
    return layers


def layer_slots(layer: int, tokens: int, batch: int, rate: int) -> int:
    """Slots of a layer; layer 0 has one a token."""
    return tokens // rate**layer + batch if layer else tokens


def tree_slots(layers: int, tokens: int, batch: int, rate: int) -> int:
    """Slots of the layers 1 .. layers together."""
    return sum(layer_slots(layer, tokens, batch, rate) for layer in range(1, layers + 1))
