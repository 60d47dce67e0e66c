"""Define hierarchical tree attention: public function, validation, choice of the backend.

Letters: T tokens of the batch, B sequences, N max_seq_len, Hq query heads, Hkv key/value heads, D query/key and V value
head size, r compression_rate.
"""

from torch import Tensor

from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_int, check_number, check_qkv, check_scale, choose_backend
from hstu_sparse.htree.reference import htree_attention_reference


@without_autocast
def htree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    *,
    compression_rate: int = 16,
    top_k: int = 512,
    selection_group: int = 1,
    scale: float | None = None,
    rope_base: float = 10000.0,
    backend: str = "auto",
) -> Tensor:
    """Compute causal softmax attention over nodes of a tree: important tokens, and means of the other tokens.

    Layer 0 of the tree has the tokens. Node p of layer l + 1 is the mean (of keys and of values) of the nodes
    p*r .. min((p+1)*r, n_l) - 1 of layer l. Layers are added while n_l > r * top_k.

    A query's first candidates are the nodes of the top layer. In each layer the top_k most important candidates are
    replaced by their children, which are the candidates of the next layer; the others enter the softmax. At layer 0 all
    candidates enter. The last candidate of a layer, which contains the query's token, is always replaced. RoPE rotates
    candidate c of C to position c, and the query to position C - 1.

    All query heads of a key/value head choose together: a candidate's importance is the sum over these heads of
    exp(score - max), where max excludes the last candidate. Ties go to the smaller position. With r * top_k >= n the
    result is dense causal softmax attention with RoPE. No token after t changes output t.

    The tokens t of a sequence with the same t // selection_group form a group. The first token of a group chooses for
    all of them, and each token scores the candidates with its own query. At layer 0 a token has the candidates of the
    group's first token and the group's tokens up to itself.

    Args:
        q: [T, Hq, D], fp16, bf16 or fp32 (the reference also fp64), D even.
        k: [T, Hkv, D]; Hkv divides Hq, and query head h belongs to key/value head h // (Hq // Hkv).
        v: [T, Hkv, V].
        seq_offsets: [B+1], int32 or int64, first 0, last T.
        max_seq_len: N, at least the longest sequence's length.
        compression_rate: r >= 2, children of a node.
        top_k: the number of nodes that are expanded in each layer above the tokens.
        selection_group: the number of tokens that share a choice; divides compression_rate.
        scale: factor of the scores, by default D ** -0.5.
        rope_base: RoPE rotates channels i and i + D // 2 by position * rope_base ** (-2 i / D).
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, Hq, V], dtype of q. Gradients flow to q, k and v, to k and v also through the means; the choice has none.
        The kernels' backward pass adds atomically, so that the last bits vary from run to run; with
        `torch.use_deterministic_algorithms(True)` gradients have the same bits in every run.

    Examples:
        >>> seq_offsets = torch.tensor([0, 40, 100])  # two sequences, of 40 and 60 tokens
        >>> q, k, v = torch.randn(100, 4, 16), torch.randn(100, 1, 16), torch.randn(100, 1, 16)
        >>> out = hstu_sparse.htree_attention(q, k, v, seq_offsets, 60, compression_rate=4, top_k=2)
        >>> out.shape
        torch.Size([100, 4, 16])
        >>> torch.allclose(out[[0, 40]], v[[0, 40]].expand(2, 4, 16))  # a first token sees only itself
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    sizes = check_qkv(q, k, v, seq_offsets, max_seq_len, kv_heads="Hkv")
    if sizes["D"] % 2 or not sizes["D"]:
        raise ValueError(f"D must be even and positive, since RoPE rotates pairs of channels, got {sizes['D']}")
    check_int("compression_rate", compression_rate, 2)
    check_int("top_k", top_k, 1)
    check_int("selection_group", selection_group, 1)
    if compression_rate % selection_group:
        raise ValueError(f"selection_group must divide compression_rate={compression_rate}, got {selection_group}")
    scale = check_scale(scale, sizes["D"], "scale")
    rope_base = check_number("rope_base", rope_base, above=0.0)
    # Values above N would only make tables larger.
    compression_rate, top_k = min(compression_rate, max(2, max_seq_len)), min(top_k, max_seq_len)
    selection_group = min(selection_group, compression_rate)
    if choose_backend(backend, q, "htree_attention") == "reference":
        return htree_attention_reference(
            q, k, v, seq_offsets, max_seq_len, compression_rate=compression_rate, top_k=top_k, scale=scale,
            rope_base=rope_base, selection_group=selection_group,
        )  # fmt: skip
    from hstu_sparse.htree.launch import check_supported, htree_operator

    check_supported(q, k, v, compression_rate, top_k)
    options = max_seq_len, compression_rate, top_k, selection_group, scale, rope_base
    return htree_operator(q, k, v, seq_offsets, *options)[0]
