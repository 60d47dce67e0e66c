"""The lightning indexer, sparse attention and the index loss: public functions, validation, choice of the backend.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, Hkv key heads, D query/key and V value head size, J
index heads, E index head size, K chosen tokens per query, R tokens that share a choice (selection_group); in padded
chunks C queries and S keys per sequence.

A choice has G rows. With R = 1, G = T: one row for each token. With R > 1 the tokens t of a sequence with the same
t // R form a group, which chooses once, and G = T // R + B: group g of sequence b has row seq_offsets[b] // R + b + g.
Rows without a group have indices -1 and scores -inf.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.core import validation
from hstu_sparse.core.jagged import check_jagged, readable
from hstu_sparse.core.launch import padded_head
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import FLOATING, INTEGER, check_int, check_kernel, check_tensor, choose_backend
from hstu_sparse.indexer import reference

# Limits of the kernels; MAX_TOP_K is that of `lightning_indexer`.
MAX_TOP_K = 2048
MAX_HEADS = 128
MAX_KEY_CHANNELS = 512
MAX_REFERENCE_TOP_K = 1 << 20  # top_k in the reference
MAX_REFERENCE_GROUP = 1 << 20  # selection_group in the reference
MAX_GROUP = 128


@without_autocast
def lightning_indexer(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    seq_offsets: Tensor,
    top_k: int,
    *,
    selection_group: int = 1,
    bias: RelativeBias | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose for each query the top_k tokens at or before it that an indexer scores highest.

        I(t, s) = sum over j of w[t, j] * ReLU(iq[t, j] . ik[s]) + b(t, s),    s <= t

    The choice is exact and stable: of equal scores the one with the smaller s is chosen. Scores are computed in fp32
    from unrounded inputs (in the reference, in fp64 for fp64 inputs). The kernels store no [T, N] scores.

    With selection_group R > 1 the tokens t of a sequence with the same t // R form a group, whose first token t0
    chooses for all of them: the top_k greatest I(t0, s) with s < t0. iq, w and the query times of other tokens are not
    read.

    Args:
        iq: [T, J, E], fp16, bf16 or fp32 (the reference also fp64); any strides.
        ik: [T, E], dtype of iq.
        w: [T, J], floating point.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        top_k: K, at least 1; the kernels support up to 2,048.
        selection_group: R in tokens.
        bias: tables by position and time and the tokens' times, see RelativeBias; added after the sum over j. Its
            position table has at least as many entries as the longest sequence has tokens.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        (scores [G, K] fp32 (fp64 for fp64), indices [G, K] int32). Indices count from the sequence's first token,
        ascend, and are padded with -1 (score -inf) if a query sees fewer than K tokens. G = T; with R > 1,
        G = T // R + B, where group g of sequence b has row seq_offsets[b] // R + b + g, and rows without a group have
        indices -1. Gradients flow through the chosen scores to iq, ik, w and the tables.

    Examples:
        >>> iq, ik, w = torch.ones(4, 1, 2), torch.tensor([[3.0, 0], [1, 0], [2, 0], [0, 0]]), torch.ones(4, 1)
        >>> scores, indices = hstu_sparse.lightning_indexer(iq, ik, w, torch.tensor([0, 4]), top_k=2)
        >>> indices.tolist()  # token 0 sees only itself; token 3 chooses tokens 0 and 2
        [[0, -1], [0, 1], [0, 2], [0, 2]]

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: DeepSeek-V3.2-Exp, DeepSeek Sparse Attention, equation 1.
    """
    bias = _check_indexer(iq, ik, w, seq_offsets, bias)
    check_int("top_k", top_k, 1, MAX_REFERENCE_TOP_K)
    check_int("selection_group", selection_group, 1, MAX_REFERENCE_GROUP)
    if choose_backend(backend, iq, "lightning_indexer") == "reference":
        return reference.lightning_indexer_reference(
            iq, ik, w, seq_offsets, top_k, bias=bias, selection_group=selection_group
        )
    _check_index_kernel("lightning_indexer", iq, selection_group)
    if top_k > MAX_TOP_K:
        raise ValueError(
            f"lightning_indexer: the kernels take top_k up to {MAX_TOP_K}, got {top_k}; use backend='reference', or "
            "index_scores to score all tokens"
        )
    from hstu_sparse.indexer.choices import choice_rows
    from hstu_sparse.indexer.launch_indexer import lightning_indexer_jagged

    rows = choice_rows(seq_offsets, iq.shape[0], selection_group)
    return lightning_indexer_jagged(iq, ik, w, seq_offsets, rows, *bias, top_k, selection_group)


@without_autocast
def index_scores(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    indices: Tensor,
    seq_offsets: Tensor,
    *,
    selection_group: int = 1,
    bias: RelativeBias | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the scores I(t, s) of `lightning_indexer` at given tokens, such as those chosen earlier, or all.

    Args:
        indices: [G, K] int32 or int64, tokens counted from the sequence's first, in any order and with repetitions;
            those below 0 or after the query are masked, with selection_group > 1 those at or after t0. G is T, or T //
            R + B, as in `lightning_indexer`.
        The others: as in `lightning_indexer`.

    Returns:
        [G, K] fp32 (fp64 for fp64), -inf where masked. Gradients flow to iq, ik, w and the tables.

    Examples:
        >>> iq, ik, w = torch.ones(2, 1, 2), torch.tensor([[3.0, 0], [1, 0]]), torch.ones(2, 1)
        >>> hstu_sparse.index_scores(iq, ik, w, torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 2]))
        tensor([[3., -inf],
                [3., 1.]])

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    bias = _check_indexer(iq, ik, w, seq_offsets, bias)
    _check_indices(indices, iq, seq_offsets, selection_group, {})
    if choose_backend(backend, iq, "index_scores") == "reference":
        return reference.index_scores_reference(
            iq, ik, w, indices, seq_offsets, bias=bias, selection_group=selection_group
        )
    _check_index_kernel("index_scores", iq, selection_group)
    from hstu_sparse.indexer.choices import choice_rows
    from hstu_sparse.indexer.launch_indexer import index_scores_jagged

    rows = choice_rows(seq_offsets, iq.shape[0], selection_group)
    return index_scores_jagged(iq, ik, w, indices, rows, *bias, selection_group)


@without_autocast
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    seq_offsets: Tensor,
    *,
    selection_group: int = 1,
    scale: float | None = None,
    bias: RelativeBias | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax attention of each query over chosen tokens, the same ones for all heads.

        o[t] = sum over chosen s of softmax(scale * q[t].k[s] + b(t, s)) * v[s]

    With selection_group R > 1 token t attends to the tokens that its group chose, which precede the group's first token
    t0, and to t0 .. t.

    Args:
        q: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        k: [T, D], v: [T, V], dtype of q, shared by all heads; or [T, Hkv, D] and [T, Hkv, V], where each key head is
            shared by H / Hkv consecutive heads.
        indices: [G, K] int32 or int64, tokens counted from the sequence's first, as returned by `lightning_indexer`.
            Those below 0 or after the query are masked, with selection_group > 1 those at or after t0; repeated ones
            count repeatedly. A query without tokens gets zeros. G is T, or T // R + B.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        selection_group: R in tokens.
        scale: D ** -0.5 by default.
        bias: tables by position and time and the tokens' times, see RelativeBias; shared by the heads. Its position
            table has at least as many entries as the longest sequence has tokens.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, H, V], dtype of q. Gradients flow to q, k, v and the tables. On CUDA those of k, v and the tables are sums
        by atomic additions, whose last bits vary from run to run; under torch.use_deterministic_algorithms(True) they
        have the same bits in every run, and take longer (docs/indexer.md).

    Examples:
        >>> q, k, v = torch.zeros(3, 2, 4), torch.zeros(3, 4), torch.tensor([[1.0], [2], [6]])
        >>> indices = torch.tensor([[0, -1], [0, 1], [0, 2]])
        >>> out = hstu_sparse.sparse_attention(q, k, v, indices, torch.tensor([0, 3]))
        >>> out[:, 0, 0]  # means of the chosen values
        tensor([1.0000, 1.5000, 3.5000])

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: DeepSeek-V3.2-Exp, DeepSeek Sparse Attention, equation 2.
    """
    sizes, bias, scale = _check_attention(q, k, indices, seq_offsets, selection_group, bias, scale)
    check_tensor("v", v, "T Hkv V" if "Hkv" in sizes else "T V", sizes, dtype=q.dtype, device=q.device)
    if choose_backend(backend, q, "sparse_attention") == "reference":
        return reference.sparse_attention_reference(
            q, k, v, indices, seq_offsets, scale=scale, bias=bias, selection_group=selection_group
        )
    _check_attention_kernel("sparse_attention", q, sizes, selection_group)
    from hstu_sparse.indexer.attention import sparse_attention_jagged
    from hstu_sparse.indexer.choices import choice_rows

    rows = choice_rows(seq_offsets, q.shape[0], selection_group)
    if k.dim() == 2 or selection_group > 1:
        return sparse_attention_jagged(q, k, v, indices, rows, *bias, scale, selection_group)[0]
    # In one call, tiles of one token would multiply the rows of all heads by the keys of every key head.
    by_key_head = zip(q.unflatten(1, (k.shape[1], -1)).unbind(1), k.unbind(1), v.unbind(1))
    shared = (indices, rows, *bias, scale, selection_group)
    return torch.cat([sparse_attention_jagged(*heads, *shared)[0] for heads in by_key_head], 1)


@without_autocast
def indexer_loss(
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    indices: Tensor,
    seq_offsets: Tensor,
    *,
    selection_group: int = 1,
    scale: float | None = None,
    bias: RelativeBias | None = None,
    valid: Tensor | None = None,
    eps: float = 1e-10,
    group=None,
    backend: str = "auto",
) -> Tensor:
    """Compute the KL divergence KL(p || pi) of an indexer from the attention over its choice, averaged over tokens.

        p[t]  = mean over heads of softmax(scale * q[t].k[s] + b(t, s)) over the chosen s, a constant
        pi[t] = softmax of scores[t] over the same tokens
        loss  = mean over t of sum over s of p (ln(p + eps) - ln(pi + eps))

    Only the scores get a gradient, which is defined as (pi - p)/T, without eps.

    With selection_group > 1 p is the attention of a group's first token t0 over the group's choice only, and the mean
    is over the groups that have a choice and whose t0 is valid. T is then their number.

    Args:
        q: [T, H, D], k: [T, D] or [T, Hkv, D], indices: [G, K], seq_offsets, selection_group, scale, bias: as in
            `sparse_attention`.
        scores: [G, K], floating point, the indexer's scores at `indices`; those at masked indices are not read.
        valid: [T] bool, the tokens that count, all by default; their number replaces T in the mean and the gradient.
        eps: positive.
        group: a torch.distributed process group whose ranks have equally many heads each, for the same tokens, scores
            and choice: p is the mean over the heads of all ranks, and every rank returns the whole loss.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), 0 if no token counts. A token that sees no chosen token contributes 0.

    Examples:
        >>> q, k, indices = torch.zeros(2, 2, 4), torch.zeros(2, 4), torch.tensor([[0, -1], [0, 1]])
        >>> scores = torch.zeros(2, 2)  # as uniform as the attention
        >>> hstu_sparse.indexer_loss(q, k, scores, indices, torch.tensor([0, 2]))
        tensor(0.)

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: DeepSeek-V3.2-Exp, DeepSeek Sparse Attention, equations 3 and 4.
    """
    sizes, bias, scale = _check_attention(q, k, indices, seq_offsets, selection_group, bias, scale)
    check_tensor("scores", scores, "T K" if selection_group == 1 else "G K", sizes, device=q.device)
    if valid is not None:
        check_tensor("valid", valid, "T", sizes, dtype=torch.bool, device=q.device)
    eps = validation.check_number("eps", eps, above=0)
    over_ranks = None if group is None else functools.partial(_mean_over_ranks, group)
    if choose_backend(backend, q, "indexer_loss") == "reference":
        return reference.indexer_loss_reference(
            q, k, scores, indices, seq_offsets, scale, bias, valid, eps, selection_group, over_ranks
        )
    _check_attention_kernel("indexer_loss", q, sizes, selection_group)
    if q.shape[0] == 0:
        return scores[:0].sum(dtype=torch.float32)
    from hstu_sparse.indexer.choices import choice_rows
    from hstu_sparse.indexer.loss import chosen_attention, indexer_loss_operator

    rows = choice_rows(seq_offsets, q.shape[0], selection_group)
    if over_ranks is not None:
        p = chosen_attention(scores, q, k, indices, rows, *bias, valid, scale, eps, selection_group)
        return _divergence(scores, over_ranks(p), indices, rows, valid, eps, selection_group)
    losses, counted = indexer_loss_operator(scores, q, k, indices, rows, *bias, valid, scale, eps, selection_group)
    if selection_group > 1:
        return losses.sum() / counted.sum().clamp(min=1)
    return losses.mean() if valid is None else losses.sum() / valid.sum().clamp(min=1)


def _mean_over_ranks(group, p: Tensor) -> Tensor:
    """Return the mean of p over all ranks; may overwrite p."""
    p = p.contiguous()
    dist.all_reduce(p, group=group)
    return p / dist.get_world_size(group)


def _divergence(scores: Tensor, p: Tensor, indices: Tensor, rows: Tensor, valid, eps: float, group: int) -> Tensor:
    """Return `indexer_loss` of attention p [G, K]; rows: see choices.py."""
    begin, token, _ = rows
    counts = token >= 0 if valid is None else (token >= 0) & valid[token.clamp(min=0)]
    last = token - begin - (1 if group > 1 else 0)
    visible = (indices >= 0) & (indices <= last[:, None]) & counts[:, None]
    losses = reference.index_divergence(scores, p, visible, eps)
    return losses.sum() / (visible.any(1) if group > 1 else counts).sum().clamp(min=1)


@without_autocast
def padded_indexer_loss(
    query: Tensor,
    key: Tensor,
    index_score: Tensor,
    indices: Tensor,
    *,
    scale: float,
    chunk_offset: int = 0,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Compute `indexer_loss` for one padded chunk of queries: the sum over its rows divided by B.

    Row i of the chunk has position chunk_offset + i and sees only indices up to this position. The losses of a
    sequence's chunks add up to its loss. Only index_score gets a gradient, (pi - p)/B at unmasked entries.

    Args:
        query: [B, H, C, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        key: [B, S, D], dtype of query; one key head.
        index_score: [B, C, K], floating point.
        indices: [B, C, K], int32 or int64, positions among the S keys. Negative ones are masked too; repeated ones
            count repeatedly.
        scale: factor of the attention's scores.
        chunk_offset: position of the first row, at least 0.
        eps: positive.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        A scalar, fp32 (fp64 for fp64). A row without visible indices contributes 0.

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: DeepSeek-V3.2-Exp, DeepSeek Sparse Attention, equation 4.
    """
    sizes: dict[str, int] = {}
    device = query.device if isinstance(query, Tensor) else None
    check_tensor("query", query, "B H C D", sizes)
    check_tensor("key", key, "B S D", sizes, dtype=query.dtype, device=device)
    check_tensor("index_score", index_score, "B C K", sizes, device=device)
    check_tensor("indices", indices, "B C K", sizes, dtype=INTEGER, device=device)
    _check_has_heads("query", sizes["H"])
    scale, eps = validation.check_number("scale", scale), validation.check_number("eps", eps, above=0)
    check_int("chunk_offset", chunk_offset, 0)
    if sizes["S"] == 0:
        raise ValueError("key must be [B, S, D] with S > 0, got S=0")
    if choose_backend(backend, query, "padded_indexer_loss") == "reference":
        return reference.padded_indexer_loss_reference(query, key, index_score, indices, scale, chunk_offset, eps)
    _check_attention_kernel("padded_indexer_loss", query, sizes)
    if index_score.numel() == 0:
        return index_score.sum(dtype=torch.float32)
    from hstu_sparse.indexer.loss import padded_loss

    losses = padded_loss(index_score, query, key, indices, chunk_offset, scale, eps)
    return losses.sum() if sizes["B"] == 1 else losses.sum() / sizes["B"]


def _check_indexer(iq, ik, w, seq_offsets, bias) -> RelativeBias:
    sizes: dict[str, int] = {}
    check_tensor("iq", iq, "T J E", sizes)
    check_tensor("ik", ik, "T E", sizes, dtype=iq.dtype, device=iq.device)
    check_tensor("w", w, "T J", sizes, dtype=FLOATING, device=iq.device)
    _check_has_heads("iq", sizes["J"], "J")
    check_jagged(seq_offsets, max(iq.shape[0], 1), iq=iq, ik=ik, w=w)
    return _check_bias(bias, iq, seq_offsets)


def _check_attention(
    q, k, indices, seq_offsets, selection_group, bias, scale
) -> tuple[dict[str, int], RelativeBias, float]:
    """Check the arguments of attention to a choice except v; return (sizes by letter, bias, scale)."""
    sizes: dict[str, int] = {}
    check_tensor("q", q, "T H D", sizes)
    several = isinstance(k, Tensor) and k.dim() == 3
    check_tensor("k", k, "T Hkv D" if several else "T D", sizes, dtype=q.dtype, device=q.device)
    _check_has_heads("q", sizes["H"])
    if several and (sizes["Hkv"] == 0 or sizes["H"] % sizes["Hkv"]):
        raise ValueError(f"the heads of k must divide the {sizes['H']} heads of q, got {sizes['Hkv']}")
    check_jagged(seq_offsets, max(q.shape[0], 1), q=q, k=k)
    _check_indices(indices, q, seq_offsets, selection_group, sizes)
    return sizes, _check_bias(bias, q, seq_offsets), validation.check_scale(scale, q.shape[2], "scale")


def _check_indices(indices, x, seq_offsets, selection_group, sizes) -> None:
    """Check that a choice has a row for each token of x [T, ...], or for each group."""
    check_int("selection_group", selection_group, 1, MAX_REFERENCE_GROUP)
    if selection_group > 1:
        sizes["G"] = reference.num_rows(x.shape[0], seq_offsets, selection_group)
    shape = "T K" if selection_group == 1 else "G K"
    check_tensor("indices", indices, shape, sizes | {"T": x.shape[0]}, dtype=INTEGER, device=x.device)
    sizes["K"] = indices.shape[1]


def _check_has_heads(name: str, heads: int, letter: str = "H") -> None:
    if heads == 0:
        raise ValueError(f"{name} must have at least one head, got {letter}=0")


def _check_bias(bias: RelativeBias | None, x: Tensor, seq_offsets: Tensor) -> RelativeBias:
    """Return `check_bias` of tokens x [T, ...], after checking that the position table covers the longest sequence."""
    bias = check_bias(bias, 0, x.shape[0], x.device)
    if bias.position is not None and readable(seq_offsets):
        longest = max(seq_offsets.diff().tolist(), default=0)
        if bias.position.shape[0] < longest:
            raise ValueError(
                f"bias.position must have an entry for each of the longest sequence's {longest} tokens, got "
                f"{bias.position.shape[0]}"
            )
    return bias


def _check_index_kernel(op: str, iq: Tensor, selection_group: int) -> None:
    check_kernel(op, iq, {"E": iq.shape[2]})
    check_kernel(op, iq, {"selection_group": selection_group}, most=MAX_GROUP)
    check_kernel(op, iq, {"J": iq.shape[1]}, most=MAX_HEADS)


def _check_attention_kernel(op: str, q: Tensor, sizes: dict[str, int], selection_group: int = 1) -> None:
    check_kernel(op, q, {letter: sizes[letter] for letter in ("D", "V") if letter in sizes})
    if sizes.get("Hkv", 1) > 1:
        channels = sizes["Hkv"] * padded_head(max(sizes["D"], sizes.get("V", 0)))
        if channels > MAX_KEY_CHANNELS:
            raise ValueError(
                f"{op}: the kernels take up to {MAX_KEY_CHANNELS} channels in all key heads, padded to powers of two, "
                f"got {channels}; use backend='reference'"
            )
    check_kernel(op, q, {"selection_group": selection_group}, most=MAX_GROUP)
    check_kernel(op, q, {"H": q.shape[1]}, most=MAX_HEADS)
