"""Define attention for training a model that is served from a RotateKV cache, from the operators `rotatekv` and
`dense`.

Letters: T tokens, H heads, D query/key and V value head size.
"""

import typing

from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.cache.rotatekv import reference, rotatekv_round_trip
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_normalizer, check_qkv, check_scale, choose_backend
from hstu_sparse.dense import hstu_attention

if typing.TYPE_CHECKING:
    from hstu_sparse.dense.plan import AttentionPlan


@without_autocast
def rotatekv_self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    *,
    bits: int = 2,
    head_group: int = 2,
    quant_group: int = 64,
    sparsity: float = 0.0,
    sink_tokens: int = 0,
    clip: float = 1.0,
    channel_order: Tensor | None = None,
    scale: float | None = None,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    plan: "AttentionPlan | None" = None,
    backend: str = "auto",
) -> Tensor:
    """Compute dense HSTU attention for training a model that is served from a cache: as `hstu_attention`, but a token
    sees other tokens as the cache restores them, and itself exactly.

    Gradients pass straight through the codes: the gradient of a coded key or value is that of the key or value.

    Args:
        q, k: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        v: [T, H, V], dtype of q.
        bits, head_group, quant_group, sparsity, sink_tokens, clip, channel_order: as `rotatekv_compress`.
        The others: as `hstu_attention`.

    Returns:
        [T, H, V], dtype of q. Gradients flow to q, k, v and both tables.

    Examples:
        >>> q, k, v = torch.randn(3, 40, 2, 64)
        >>> seq_offsets = torch.tensor([0, 40])
        >>> out = hstu_sparse.rotatekv_self_attention(q, k, v, seq_offsets, max_seq_len=40, bits=8)
        >>> torch.allclose(out, hstu_sparse.hstu_attention(q, k, v, seq_offsets, max_seq_len=40), atol=0.02)
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    backend = choose_backend(backend, q, "rotatekv_self_attention")
    sizes = check_qkv(q, k, v, seq_offsets, max_seq_len)
    scale, normalizer = check_scale(scale, sizes["D"]), check_normalizer(normalizer, max_seq_len)
    bias = check_bias(bias, max_seq_len, sizes["T"], q.device)
    coded = rotatekv_round_trip(
        k, v, seq_offsets, bits=bits, head_group=head_group, quant_group=quant_group, sparsity=sparsity,
        sink_tokens=sink_tokens, clip=clip, channel_order=channel_order, backend=backend,
    )  # fmt: skip
    own_token = reference.own_token
    if backend == "triton":
        from hstu_sparse.cache.rotatekv.own import own_token_triton as own_token
    q, coded_k, coded_v, self_term = own_token(q, k, v, *coded, bias, scale, normalizer)
    options: dict[str, typing.Any] = dict(scale=scale, normalizer=normalizer, bias=bias, plan=plan, backend=backend)
    return hstu_attention(q, coded_k, coded_v, seq_offsets, max_seq_len, **options) + self_term
