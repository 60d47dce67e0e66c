"""Compute the lightning indexer, sparse attention and the index loss in plain PyTorch: the kernels' specification.

Letters: T tokens of the batch, B sequences, n the longest of them, H heads, D query/key and V value head size, J index
heads, E index head size, K chosen tokens per query (top_k), R tokens that share a choice (selection_group); in padded
chunks C queries and S keys per sequence. Choices have G rows: T, or T // R + B if R > 1.

The jagged functions compute all pairs of the padded sequences, [B, ..., n, n], so that each rule is one mask and
training on a CPU gathers no keys; memory grows with n^2. Slots of a choice are those of `indices`; a slot is masked
unless it has a token at or before the query.

Source: DeepSeek-V3.2-Exp (DeepSeek Sparse Attention).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, pair_bias
from hstu_sparse.core.jagged import check_storage, masked_product, padded_index
from hstu_sparse.core.precision import widened, working_dtype
from hstu_sparse.core.registration import no_second_derivative


def num_rows(tokens: int, seq_offsets: Tensor, group: int) -> int:
    """Return G, the number of rows of a choice."""
    return tokens if group == 1 else tokens // group + seq_offsets.shape[0] - 1


def lightning_indexer_reference(
    iq: Tensor, ik: Tensor, w: Tensor, seq_offsets: Tensor, top_k: int, *, bias: RelativeBias, selection_group: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (scores [G, K], indices [G, K] int32) as `hstu_sparse.lightning_indexer`."""
    options = dict(bias=bias, selection_group=selection_group)
    if iq.shape[0] == 0:
        rows = num_rows(0, seq_offsets, selection_group)
        indices = torch.full((rows, top_k), -1, dtype=torch.int32, device=iq.device)
        return index_scores_reference(iq, ik, w, indices, seq_offsets, **options), indices
    padding = _Padding(seq_offsets, selection_group)
    scores = _all_scores(iq, ik, w, padding, bias)
    indices = padding.unpad_choice(choose(scores.detach(), padding.choosable, top_k), -1)
    return _scores_at(scores, indices, padding), indices


def index_scores_reference(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    indices: Tensor,
    seq_offsets: Tensor,
    *,
    bias: RelativeBias,
    selection_group: int = 1,
) -> Tensor:
    """Return scores [G, K] as `hstu_sparse.index_scores`."""
    if iq.shape[0] == 0:
        tables = sum(x.sum() for x in (bias.position, bias.time) if x is not None)
        empty = iq.sum() + ik.sum() + w.sum() + tables
        # No row has a query; the product keeps every input in the graph, so that its gradient is zeros and not None.
        return 0 * empty + iq.new_full(indices.shape, -torch.inf, dtype=working_dtype(iq.dtype))
    padding = _Padding(seq_offsets, selection_group)
    return _scores_at(_all_scores(iq, ik, w, padding, bias), indices, padding)


def sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    seq_offsets: Tensor,
    *,
    scale: float,
    bias: RelativeBias,
    selection_group: int = 1,
) -> Tensor:
    """Return [T, H, V] as `hstu_sparse.sparse_attention`."""
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if q.shape[0] == 0:
        # Nothing to attend to; the sum keeps every input in the graph, so that its gradient is zeros and not None.
        tables = sum(x.sum() for x in (bias.position, bias.time) if x is not None)
        return (q.sum() + k.sum() + tables + v.new_zeros(*q.shape[:2], v.shape[-1]) * v.sum()).to(dtype)
    padding = _Padding(seq_offsets, selection_group)
    logits = _attention_logits(q, k, scale, padding, bias)  # [B, H, n, n]
    slots, visible = padding.slots(indices)
    # The number of times that each key was chosen. Masked slots are scattered into an extra column.
    n = padding.longest
    times = logits.new_zeros(*slots.shape[:2], n + 1).scatter_add(
        2, slots.where(visible, n), logits.new_ones(slots.shape)
    )[:, None, :, :n]
    if selection_group > 1:  # each token has its group's choice, and the group's tokens up to itself
        number = padding.step // selection_group
        times = times[:, :, number]
        times = times + ((number == number[:, None]) & (padding.step <= padding.step[:, None]))
    weights = masked_softmax(logits + times.clamp(min=1).log(), times > 0)
    out = masked_product(weights.to(v.dtype), _by_head(padding.pad(v), q.shape[1]), times == 0)
    return padding.unpad(out.transpose(1, 2)).to(dtype)


def indexer_loss_reference(
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    indices: Tensor,
    seq_offsets: Tensor,
    scale: float,
    bias: RelativeBias,
    valid: Tensor | None,
    eps: float,
    selection_group: int = 1,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `hstu_sparse.indexer_loss`; over_ranks: a function that averages p over the ranks, or None."""
    if q.shape[0] == 0:
        return scores[:0].sum()
    padding = _Padding(seq_offsets, selection_group)
    slots, visible = padding.slots(indices)
    with torch.no_grad():
        wide = working_dtype(q.dtype)
        logits = _attention_logits(q.to(wide), k.to(wide), scale, padding, bias, stride=selection_group)
        logits = logits.gather(3, slots[:, None].expand(-1, q.shape[1], -1, -1))
        p = padding.unpad_choice(masked_softmax(logits, visible[:, None]).mean(1), 0)
        p = p if over_ranks is None else over_ranks(p)
    if selection_group > 1:
        # A group counts if its first token is valid and it has a choice.
        counts = visible.any(-1)
        if valid is not None:
            counts = counts & padding.pad(valid)[:, ::selection_group]
        valid = padding.unpad_choice(counts, False)
    visible = padding.unpad_choice(visible, False)
    rows = index_divergence(scores, p, visible, eps)
    if valid is None:
        return rows.mean()
    return rows.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1)


def padded_indexer_loss_reference(
    query: Tensor, key: Tensor, index_score: Tensor, indices: Tensor, scale: float, chunk_offset: int, eps: float
) -> Tensor:
    """Return the scalar of `padded_indexer_loss`."""
    last = chunk_offset + torch.arange(query.shape[2], device=query.device)
    visible = (indices >= 0) & (indices <= last[:, None]) & (indices < key.shape[1])
    with torch.no_grad():
        wide = working_dtype(query.dtype)
        batch = torch.arange(key.shape[0], device=key.device)[:, None, None]
        chosen = key.to(wide)[batch, indices.long().where(visible, 0)]  # [B, C, K, D]
        logits = torch.einsum("bhcd,bckd->bhck", query.to(wide) * scale, chosen)
        p = masked_softmax(logits, visible[:, None]).mean(1)
    return index_divergence(index_score, p, visible, eps).sum() / max(query.shape[0], 1)


def choose(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Return the indices [..., top_k] int32 of the top_k greatest visible scores [..., n] of each row.

    Ties go to the smaller index. Indices ascend, and are padded with -1.
    """
    n = scores.shape[-1]
    scores = scores.masked_fill(~visible, -torch.inf)
    least = scores.topk(min(top_k, n), sorted=True).values[..., -1:]
    above = scores > least
    # Tokens whose score ties with the last one chosen fill the remaining places in order of position.
    equal = (scores == least) & visible
    chosen = above | equal & (equal.cumsum(-1) <= top_k - above.sum(-1, keepdim=True))
    place = torch.where(chosen, chosen.cumsum(-1) - 1, top_k)
    indices = torch.full((*scores.shape[:-1], top_k + 1), -1, dtype=torch.int32, device=scores.device)
    step = torch.arange(n, dtype=torch.int32, device=scores.device).expand(scores.shape)
    return indices.scatter(-1, place, step)[..., :top_k]


def masked_softmax(x: Tensor, visible: Tensor) -> Tensor:
    """Compute the softmax over the visible entries of the last dimension; 0 for other entries."""
    some = visible.any(-1, keepdim=True)
    x = x.masked_fill(~visible, 0).masked_fill(~visible & some, -torch.inf)
    return x.softmax(-1).masked_fill(~visible, 0)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, p, visible, eps):
        pi = masked_softmax(scores.to(p.dtype), visible)
        ctx.save_for_backward((pi - p).to(scores.dtype))
        return (p * ((p + eps).log() - (pi + eps).log())).sum(-1)

    @staticmethod
    @no_second_derivative("indexer_loss")
    def backward(ctx, grad):
        (difference,) = ctx.saved_tensors
        return (grad[..., None] * difference).to(difference.dtype), None, None, None


def index_divergence(scores: Tensor, p: Tensor, visible: Tensor, eps: float) -> Tensor:
    """Compute sum_s p (ln(p + eps) - ln(pi + eps)), pi the softmax of visible scores; [..., K] -> [...].

    Only the scores get a gradient, pi - p, which does not include eps.
    """
    return _Divergence.apply(scores, p, visible, eps)


class _Padding:
    """Convert jagged tensors to padded ones and back. The causal mask hides the padding after a sequence.

    Every `group`-th token chooses: m tokens of a padded sequence.
    """

    def __init__(self, seq_offsets: Tensor, group: int = 1):
        check_storage("seq_offsets", seq_offsets, values=True)
        self.longest, self.group = int(seq_offsets.diff().max()), group
        self.index, inside = padded_index(seq_offsets, self.longest)
        self.rows = inside.flatten().nonzero()[:, 0]
        self.step = torch.arange(self.longest, device=seq_offsets.device)
        self.first = self.step[::group]
        # The last token that may be chosen: the query itself, or with groups the token before it.
        self.last = self.first - int(group > 1)
        self.choosable = self.step <= self.last[:, None]  # [m, n]
        if group > 1:
            sequence = torch.arange(self.index.shape[0], device=seq_offsets.device)
            begin = seq_offsets[:-1].long() // group + sequence
            self.num_rows = int(seq_offsets[-1]) // group + len(sequence)
            self.chooses = inside[:, ::group].flatten().nonzero()[:, 0]
            self.choice = begin[:, None] + torch.arange(len(self.first), device=seq_offsets.device)
            self.choice = self.choice.clamp(max=self.num_rows - 1)

    def pad(self, x: Tensor) -> Tensor:  # [T, ...] -> [B, n, ...]
        return x.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)

    def unpad(self, x: Tensor) -> Tensor:  # [B, n, ...] -> [T, ...]
        return x.flatten(0, 1).index_select(0, self.rows)

    def pad_choice(self, x: Tensor) -> Tensor:  # [G, ...] -> [B, m, ...]
        if self.group == 1:
            return self.pad(x)
        return x.index_select(0, self.choice.flatten()).unflatten(0, self.choice.shape)

    def unpad_choice(self, x: Tensor, unused: float) -> Tensor:  # [B, m, ...] -> [G, ...]
        if self.group == 1:
            return self.unpad(x)
        rows = x.new_full((self.num_rows, *x.shape[2:]), unused)
        chooses = self.chooses
        return rows.index_copy(0, self.choice.flatten()[chooses], x.flatten(0, 1).index_select(0, chooses))

    def slots(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (indices int64, visible) [B, m, K]; index 0 where not visible."""
        slots = self.pad_choice(indices.long())
        visible = (slots >= 0) & (slots <= self.last[:, None])
        return slots.masked_fill(~visible, 0), visible


def _bias(bias: RelativeBias, padding: _Padding, stride: int) -> Tensor | float:
    """Return b(t, s) of all pairs of every `stride`-th query: [B, n / stride, n], or a tensor that broadcasts to it."""
    query_times = key_times = None
    if bias.time is not None:
        query_times, key_times = (
            padding.pad(bias.query_timestamps)[:, ::stride, None],
            padding.pad(bias.timestamps)[:, None, :],
        )
    return pair_bias(bias, padding.step[::stride, None] - padding.step, query_times, key_times)


def _all_scores(iq: Tensor, ik: Tensor, w: Tensor, padding: _Padding, bias: RelativeBias) -> Tensor:
    """Return I(t, s) [B, m, n] of the queries that choose, in at least fp32, since rounding could change the choice."""
    wide = working_dtype(iq.dtype)
    iq, ik, w = (padding.pad(x.to(wide)) for x in (iq, ik, w))
    iq, w = iq[:, :: padding.group], w[:, :: padding.group]
    dots = (iq.flatten(1, 2) @ ik.mT).unflatten(1, iq.shape[1:3])  # [B, m, J, n]
    scores = (w[:, :, None] @ dots.relu()).squeeze(2)
    return scores + _bias(bias, padding, padding.group)


def _scores_at(scores: Tensor, indices: Tensor, padding: _Padding) -> Tensor:
    """Return scores [B, m, n] at indices [G, K], -inf where these are masked."""
    slots, visible = padding.slots(indices)
    return padding.unpad_choice(scores.gather(2, slots).masked_fill(~visible, -torch.inf), -torch.inf)


def _attention_logits(
    q: Tensor, k: Tensor, scale: float, padding: _Padding, bias: RelativeBias, stride: int = 1
) -> Tensor:
    """Return scale * q.k + b of all pairs of every `stride`-th query: [B, H, n / stride, n]."""
    logits = padding.pad(q * scale)[:, ::stride].transpose(1, 2) @ _by_head(padding.pad(k), q.shape[1]).mT
    biases = _bias(bias, padding, stride)
    return logits + (biases[..., None, :, :] if isinstance(biases, Tensor) else biases)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return keys or values [B, n, size] or [B, n, Hkv, size] for each head of queries: [B, 1 or H, n, size]."""
    return x[:, None] if x.dim() == 3 else x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)
