"""Compute hierarchical tree attention in plain PyTorch: the kernels' specification, and the layout of the tree.

Letters: T tokens of the batch, B sequences, N max_seq_len, Hq query heads, Hkv key/value heads, G = Hq / Hkv query
heads of a key/value head, D query/key and V value head size, r compression_rate, S top_k, M = r * S the greatest number
of a layer's candidates, C a query's candidates in a layer, W the greatest C that any query of the batch may have.

Layer 0 has the tokens in their order. A sequence of n tokens has ceil(n / r^l) nodes in layer l. For l > 0 those of
sequence b have the slots from `offsets[b] // r^l + b` on, of T // r^l + B slots: slots of different sequences never
overlap, some are unused, and the sizes of all tensors follow from T, B and N. One buffer holds all layers in order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hstu_sparse.core.precision import working_dtype


class Layer(NamedTuple):
    """A layer of the tree."""

    number: int
    size: int  # tokens below a node, r^l
    slots: int
    base: int  # first slot in the buffer of all layers


def depth(length: int, rate: int, most: int) -> int:
    """Return the number of layers above the tokens: layers are added while the last one exceeds M (`most`) nodes."""
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


# The number of elements of a chunk's intermediate tensors (see `queries_at_once`); small on a CPU, for its caches.
CHUNK = {"cpu": 1 << 26, "cuda": 1 << 27}


@dataclass
class Walk:
    """The choice of some queries in one layer, for the comparison tool and the tests."""

    number: int
    active: Tensor  # [queries] bool: the query's tree reaches this layer
    nodes: Tensor  # [queries, Hkv, W] int64: candidates in ascending order, -1 past the last
    slots: Tensor  # [queries, Hkv, W] int64: their indices in the layer's tensors
    scores: Tensor  # [queries, Hkv, G, W]: scaled products, -inf past the last candidate
    enters: Tensor  # [queries, Hkv, W] bool: enters the softmax; the others are expanded
    importance: Tensor | None  # [queries, Hkv, W] fp32, by the leaders' scores; None at layer 0
    chosen: Tensor | None  # [queries, Hkv, S] int64: nodes that are expanded, ascending, -1 last; None at layer 0


def htree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    *,
    compression_rate: int,
    top_k: int,
    scale: float,
    rope_base: float,
    selection_group: int = 1,
    choices: list[Tensor] | None = None,
) -> Tensor:
    """Compute the output [T, Hq, V] of `htree_attention` (16-bit inputs in fp32); differentiable in q, k and v.

    choices: chosen nodes [T, Hkv, S] of the layers 1, 2, ..., ascending and -1 last, which replace the choice, so that
    rounding cannot change it where two dtypes are compared.
    """
    tokens = q.shape[0]
    if tokens == 0:  # nothing to compute, but the result must depend on every input
        return (q.sum() + k.sum() + v.sum()).to(q.dtype) + q.new_zeros(0, q.shape[1], v.shape[2])
    tree = Tree(k, v, seq_offsets, max_seq_len, compression_rate, top_k)
    chunk = queries_at_once(tree, q.shape[1] // k.shape[1])
    levels = [x for pair in zip(tree.keys, tree.values) for x in pair]
    leaders = None if selection_group == 1 else q.detach()[group_leaders(tree.offsets, tokens, selection_group)]

    def attend(queries: Tensor, rows: Tensor, chosen: list[Tensor] | None, *nodes: Tensor) -> Tensor:
        tree.keys, tree.values = list(nodes[0::2]), list(nodes[1::2])
        chunk_leaders = None if leaders is None else leaders[rows]
        return attend_queries(queries, rows, tree, scale, rope_base, leaders=chunk_leaders, choices=chosen)[0]

    outputs = []
    for begin in range(0, tokens, chunk):
        rows = torch.arange(begin, min(begin + chunk, tokens), device=q.device)
        chosen = None if choices is None else [x[begin : begin + chunk] for x in choices]
        arguments = (q[begin : begin + chunk], rows, chosen, *levels)
        if chunk < tokens and torch.is_grad_enabled():
            outputs.append(checkpoint(attend, *arguments, use_reentrant=False))
        else:
            outputs.append(attend(*arguments))
    return torch.cat(outputs)


def group_leaders(offsets: Tensor, tokens: int, selection_group: int) -> Tensor:
    """Return [T], the first token of each token's group: those with the same t // selection_group."""
    rows = torch.arange(tokens, device=offsets.device)
    start = offsets[torch.searchsorted(offsets, rows, right=True) - 1]
    return rows - (rows - start) % selection_group


class Tree:
    """The pooled keys and values of every layer, and the slots of each sequence's nodes."""

    def __init__(self, k: Tensor, v: Tensor, seq_offsets: Tensor, max_seq_len: int, rate: int, top_k: int):
        wide = working_dtype(k.dtype)
        self.rate, self.top_k, self.most = rate, top_k, rate * top_k
        self.depth = depth(max_seq_len, rate, self.most)
        self.max_seq_len = max_seq_len
        self.offsets = seq_offsets.long()
        self.lengths = self.offsets.diff()
        self.batch = torch.arange(len(self.lengths), device=k.device)
        self.keys, self.values = [k.to(wide)], [v.to(wide)]
        for layer, _, size, _ in list(tree_layers(self.depth, k.shape[0], len(self.lengths), rate))[1:]:
            above = self.first_slot(layer)
            sequence, node = self.locate(layer - 1)
            # Unused slots are added to a row that is cut off.
            parent = torch.where(node < self.nodes(layer - 1)[sequence], above[sequence] + node // rate, size)
            count = k.new_zeros(size + 1, dtype=wide).index_add(0, parent, torch.ones_like(parent, dtype=wide))
            count = count.clamp(min=1)[:, None, None]
            for level in (self.keys, self.values):
                sums = level[-1].new_zeros(size + 1, *level[-1].shape[1:]).index_add(0, parent, level[-1])
                level.append((sums / count)[:size])

    def first_slot(self, layer: int) -> Tensor:
        """Return [B], the slot of each sequence's first node."""
        return self.offsets[:-1] if layer == 0 else self.offsets[:-1] // self.rate**layer + self.batch

    def locate(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return (sequence, node) of each slot; an unused slot belongs to the sequence before it."""
        first, slot = self.first_slot(layer), torch.arange(self.keys[layer].shape[0], device=self.offsets.device)
        sequence = torch.searchsorted(first, slot, right=True) - 1
        return sequence, slot - first[sequence]

    def nodes(self, layer: int) -> Tensor:
        """Return [B], the number of nodes of each sequence."""
        return (self.lengths + self.rate**layer - 1) // self.rate**layer


def queries_at_once(tree: Tree, group: int) -> int:
    """Return the number of queries in a chunk, by the elements of their intermediate tensors.

    In every layer a query has keys, values, scores and weights for all candidates, and rotated queries for all parents,
    including the tensors that autograd saves.
    """
    kv_heads, head_size = tree.keys[0].shape[1:]
    scores = group * (8 + 3 * head_size // tree.rate)
    candidates = (tree.depth + 1) * kv_heads * min(tree.most, tree.max_seq_len)
    elements = candidates * (2 * head_size + 2 * tree.values[0].shape[2] + scores)
    return max(1, CHUNK[tree.keys[0].device.type] // elements)


def rope_tables(most: int, head_size: int, rope_base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [most, D // 2] in fp64: position p rotates channels i and i + D // 2 by p * base^(-2i / D)."""
    pair = torch.arange(head_size // 2, dtype=torch.float64, device=device)
    angle = torch.arange(most, dtype=torch.float64, device=device)[:, None] * rope_base ** (-2.0 * pair / head_size)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + D // 2 of x by the angles with these cos and sin."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def importances(scores: Tensor, last: Tensor) -> Tensor:
    """Return [..., W] fp32: sum over heads of exp(score [..., G, W] - max), the max without the last candidate."""
    other_scores = scores.masked_fill(last.unsqueeze(-2), -torch.inf)
    top = other_scores.amax((-2, -1), keepdim=True)
    return (other_scores - top.masked_fill(top == -torch.inf, 0.0)).exp().sum(-2).float()


def choose(importance: Tensor, valid: Tensor, last: Tensor, top_k: int, most: int) -> Tensor:
    """Return [..., W] bool: the last candidate, and the greatest importances, up to top_k in all."""
    low_bits = (1 << (most - 1).bit_length()) - 1
    position = torch.arange(importance.shape[-1], device=importance.device)
    key = importance.contiguous().view(torch.int32).long() & ~low_bits | (low_bits - position)
    key = key.masked_fill(last, torch.iinfo(torch.int32).max).masked_fill(~valid, -1)
    if importance.shape[-1] <= top_k:
        return valid
    threshold = key.topk(top_k).values[..., -1:]
    return valid & (key >= threshold)


def attend_queries(
    q: Tensor,
    rows: Tensor,
    tree: Tree,
    scale: float,
    rope_base: float,
    *,
    leaders: Tensor | None = None,
    choices: list[Tensor] | None = None,
) -> tuple[Tensor, list[Walk]]:
    """Return (output [queries, Hq, V], `Walk` of each layer from the top down) of the queries of the tokens `rows`.

    leaders: [queries, Hq, D], the queries of the groups' first tokens, which choose. Above layer 0 a group's tokens
    have the same candidates, since the group size divides `rate`.
    """
    queries, _, head_size = q.shape
    kv_heads, rate, top_k, most = tree.keys[0].shape[1], tree.rate, tree.top_k, tree.most
    device = q.device
    wide = tree.keys[0].dtype
    query = q.to(wide).unflatten(1, (kv_heads, -1))
    leader = None if leaders is None else leaders.to(wide).unflatten(1, (kv_heads, -1))
    cos, sin = (x.to(wide) for x in rope_tables(most, head_size, rope_base, device))
    sequence = torch.searchsorted(tree.offsets, rows, right=True) - 1
    position = rows - tree.offsets[sequence]
    top = sum((tree.nodes(layer)[sequence] > most).long() for layer in range(tree.depth)) if tree.depth else 0 * rows

    walk: list[Walk] = []
    entered: list[Tensor] = []
    parents = count = None
    for layer in range(tree.depth, -1, -1):
        width = min(most, -(-tree.max_seq_len // rate**layer))
        rightmost = position // rate**layer
        begins = (top == layer)[:, None]
        # The top layer's candidates are the children of nodes 0, 1, ..., so that one rule holds for every layer.
        identity = torch.arange(-(-width // rate), device=device).expand(queries, kv_heads, -1)
        all_parents = (rightmost // rate + 1)[:, None].expand(-1, kv_heads)
        if parents is None:
            parents, count = identity, all_parents
        else:
            size = max(parents.shape[-1], identity.shape[-1])
            pad = [torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in (identity, parents)]
            parents = torch.where(begins[..., None], *pad)
            count = torch.where(begins, all_parents, count)
        active = top >= layer
        candidates = ((count - 1) * rate + (rightmost % rate + 1)[:, None]) * active[:, None]
        parents = parents[..., : identity.shape[-1]]
        c = torch.arange(parents.shape[-1] * rate, device=device)
        valid = c < candidates[..., None]
        node = parents[..., c // rate] * rate + c % rate
        slot = torch.where(valid, tree.first_slot(layer)[sequence][:, None, None] + node, 0)
        scores = scale * products(tree, layer, slot, query, candidates - 1, cos, sin)
        scores = scores.masked_fill(~valid.unsqueeze(-2), -torch.inf)
        importance = chosen_nodes = None
        enters = valid
        if layer:
            with torch.no_grad():
                last = c == candidates[..., None] - 1
                choosing = scores
                if leader is not None:
                    choosing = scale * products(tree, layer, slot, leader, candidates - 1, cos, sin)
                    choosing = choosing.masked_fill(~valid.unsqueeze(-2), -torch.inf)
                importance = importances(choosing, last)
                if choices is None:
                    chosen = choose(importance, valid, last, top_k, most)
                else:
                    chosen = valid & _contains(choices[layer - 1].long(), node)
                # Ascending positions of the chosen candidates, padded with `beyond`.
                beyond = len(c)
                order = torch.where(chosen, c, beyond).sort(-1).values[..., :top_k]
                count = chosen.sum(-1)
                parents = node.gather(-1, order.clamp(max=beyond - 1)).masked_fill(order == beyond, 0)
                chosen_nodes = torch.nn.functional.pad(
                    parents.masked_fill(order == beyond, -1), (0, top_k - order.shape[-1]), value=-1
                )
            enters = valid & ~chosen
        nodes = node.masked_fill(~valid, -1)
        walk.append(Walk(layer, active, nodes, slot, scores.detach(), enters, importance, chosen_nodes))
        entered.append(scores.masked_fill(~enters.unsqueeze(-2), -torch.inf))

    weights = torch.cat(entered, -1).softmax(-1).split([scores.shape[-1] for scores in entered], -1)
    out = sum(weighted_values(tree, layer, weight) for layer, weight in zip(walk, weights))
    return out.flatten(1, 2).to(q.dtype), walk


def gather(level: Tensor, slot: Tensor) -> Tensor:
    """Gather from a layer [slots, Hkv, ...] each head's slots [queries, Hkv, W]: [queries, Hkv, W, ...]."""
    heads = slot.shape[1]
    row = slot * heads + torch.arange(heads, device=slot.device)[:, None]
    return level.flatten(0, 1).index_select(0, row.flatten()).unflatten(0, slot.shape)


def products(tree: Tree, layer: int, slot: Tensor, query: Tensor, last: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [queries, Hkv, G, W]: RoPE(q, last) . RoPE(k, c) for the candidates in the slots [queries, Hkv, W].

    The product depends only on last - c. Candidate c is child i = c % r of parent j = c // r, so that each key of the
    layer is rotated once, by i, and the query once for each parent, by last - j * r.
    """
    rate = tree.rate
    place = tree.locate(layer)[1].clamp(min=0)[:, None] % rate
    keys = rotate(tree.keys[layer], cos[place], sin[place])
    keys = gather(keys, slot).unflatten(2, (-1, rate))
    offset = (last[..., None] - rate * torch.arange(keys.shape[2], device=slot.device)).clamp(min=0)[:, :, None]
    rotated = rotate(query.unsqueeze(3), cos[offset], sin[offset])
    if query.shape[2] == 1:  # on a CPU, many small matrix products take several times as long as this sum
        return (rotated.unsqueeze(4) * keys.unsqueeze(2)).sum(-1).flatten(3)
    return torch.einsum("qhgjd,qhjid->qhgji", rotated, keys).flatten(3)


def weighted_values(tree: Tree, layer: Walk, weight: Tensor) -> Tensor:
    """Return [queries, Hkv, G, V], the weighted sum of a layer's values that enter. weight [queries, Hkv, G, W]."""
    value = gather(tree.values[layer.number], layer.slots).masked_fill(~layer.enters[..., None], 0.0)
    if weight.shape[2] == 1:
        return (weight.unsqueeze(-1) * value.unsqueeze(2)).sum(3)
    return torch.einsum("qhgc,qhcv->qhgv", weight, value)


def _contains(choices: Tensor, node: Tensor) -> Tensor:
    """Return [..., W] bool: which nodes are among the choices [..., S], ascending with -1 last."""
    ordered = choices.masked_fill(choices < 0, torch.iinfo(torch.int64).max)
    place = torch.searchsorted(ordered.contiguous(), node.contiguous()).clamp(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, place) == node
