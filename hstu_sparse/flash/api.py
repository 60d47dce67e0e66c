"""Define softmax attention over jagged sequences: public function, validation, choice of the backend.

Letters: T, S tokens of queries and of keys, B sequences, H heads of queries, Hkv of keys and values, D query/key and V
value head size.
"""

import torch

from hstu_sparse.core import validation
from hstu_sparse.core.jagged import LARGEST, check_jagged, check_storage, format_number
from hstu_sparse.core.mask import Mask, check_mask
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_bool, check_heads, check_kernel, check_scale, check_seed, choose_backend
from hstu_sparse.flash.cute import check_cute, faster_with_cute, flash_cute_operator
from hstu_sparse.flash.reference import Layout, Options, flash_attention_reference


@without_autocast
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    k_offsets: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: torch.Tensor | None = None,
    target_group_size: int = 1,
    num_context: torch.Tensor | None = None,
    context_sees_all: bool = False,
    full_attention_prefix: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention of each sequence separately, without padding and without storing the weights.

        o[t] = sum over visible s of softmax(scale * q[t].k[s] - slope * |t - s|) * v[s]

    A query that sees no key has output 0 and log-sum-exp -inf. Gradients are sums in a fixed order: the same bits in
    every run.

    Args:
        q: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        k, v: [S, Hkv, D] and [S, Hkv, V], dtype of q. Hkv divides H; head h of q uses head h * Hkv // H.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        k_offsets: [B+1], int32 or int64, from 0 to S, the offsets of k and v; seq_offsets by default. The last query of
            a sequence has the position of its last key.
        scale: above 0, D ** -0.5 by default.
        causal: whether a query sees no later key.
        window_size: (left, right): t sees from t - left to t + right; -1 for no bound.
        num_targets, target_group_size, num_context, context_sees_all, full_attention_prefix: as for `hstu_attention`;
            they need causal=True and no k_offsets. With any of them, alibi_slopes are multiplied by differences of
            positions, or 0 where these are negative.
        alibi_slopes: [H] or [B, H] fp32.
        dropout: probability of zeroing a weight, 0 <= dropout < 1.
        seed: int64 tensor of one element on q's device; drawn from torch's generator by default. The dropped weights
            depend only on seed, sequence, head and positions: they are the same in triton and reference, and on any
            number of ranks.
        return_lse: also return the log-sum-exp of the scores, [H, T], fp32 (fp64 for fp64), without a gradient.
        backend: "triton", "reference", "cute" or "auto". "cute" is FlashAttention-4 (the extra `cute`): fp16 and bf16,
            compute capability 9.0 to 11.x, D = V a multiple of 8 and at least 24, without alibi_slopes, dropout,
            candidates, context and prefix. "auto" chooses the reference for CPU tensors; for CUDA tensors cute, if it
            is installed, supports the call and was measured to be faster (docs/ring.md), otherwise triton.

    Returns:
        [T, H, V], dtype of q, and the log-sum-exp if requested. Gradients flow to q, k and v; only the reference
        supports second derivatives.

    Examples:
        >>> seq_offsets = torch.tensor([0, 2, 3])  # two sequences, of 2 and 1 tokens
        >>> q, k, v = torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), torch.tensor([1.0, 3, 5]).view(3, 1, 1)
        >>> hstu_sparse.flash_attention(q, k, v, seq_offsets, causal=True).flatten()
        tensor([1., 2., 5.])

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Dao, FlashAttention-2 (arXiv 2307.08691); Press et al., ALiBi (arXiv 2108.12409).
    """
    check_bool("return_lse", return_lse)
    sizes = check_heads(q, k, v, kv_tokens="S" if k_offsets is not None else "T")
    check_jagged(seq_offsets, 2**31 - 1, q=q)
    starts = None
    if k_offsets is None:
        k_offsets = seq_offsets
    else:
        check_jagged(k_offsets, 2**31 - 1, name="k_offsets", k=k, v=v)
        if k_offsets.shape != seq_offsets.shape:
            raise ValueError(f"k_offsets must be {list(seq_offsets.shape)} as seq_offsets, got {list(k_offsets.shape)}")
        starts = (k_offsets.diff() - seq_offsets.diff()).to(torch.int32)
    options = check_options(q, seq_offsets.shape[0] - 1, scale, causal, window_size, alibi_slopes, dropout, seed)
    left = min(options.left, 2**31 - 2)  # longer than any sequence
    mask = check_mask(
        Mask(num_targets, num_context, left + 1, context_sees_all, target_group_size, full_attention_prefix),
        seq_offsets,
    )
    if mask.first_option is not None:
        if not causal or starts is not None:
            unsupported = "k_offsets" if causal else "causal=False"
            raise ValueError(f"{mask.first_option} needs causal=True and no k_offsets, got {unsupported}")
        options = options._replace(left=left, mask=mask)
    size = q.shape[0], seq_offsets.shape[0] - 1
    backend = choose_flash_backend("flash_attention", backend, q, sizes["V"], size, options)
    if backend == "reference":
        out, lse = flash_attention_reference(q, k, v, Layout(seq_offsets, k_offsets, starts), options)
    elif backend == "cute":
        out, lse = flash_cute_operator(
            q, k, v, seq_offsets, k_offsets, options.left, options.right, options.scale
        )  # fmt: skip
    else:
        from hstu_sparse.flash.launch import flash_operator

        out, lse = flash_operator(
            q, k, v, seq_offsets, k_offsets, starts, *options.mask, options.slopes, options.seed, options.left,
            options.right, options.scale, options.dropout,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def check_options(q, num_seqs: int, scale, causal, window_size, alibi_slopes, dropout, seed) -> Options:
    """Return the options in the kernels' form; q: [..., H, D]."""
    heads, size = q.shape[-2:]
    scale = check_scale(None, size) if scale is None else validation.check_number("scale", scale, above=0.0)
    if not (isinstance(window_size, tuple | list) and len(window_size) == 2):
        raise TypeError(f"window_size must be (left, right), got {window_size!r}")
    for bound in window_size:
        if isinstance(bound, bool) or not isinstance(bound, int) or not -1 <= bound <= LARGEST:
            bounds = ", ".join(format_number(x) if isinstance(x, int) else repr(x) for x in window_size)
            raise ValueError(f"window_size must be two whole numbers from -1 (no bound) to {LARGEST}, got ({bounds})")
    check_bool("causal", causal)
    left, right = window_size
    if causal:
        right = 0
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, torch.Tensor) or alibi_slopes.dtype != torch.float32:
            raise TypeError("alibi_slopes must be an fp32 tensor")
        check_storage("alibi_slopes", alibi_slopes)
        if alibi_slopes.shape not in ((heads,), (num_seqs, heads)):
            raise ValueError(
                f"alibi_slopes must be [H={heads}] or [B={num_seqs}, H={heads}], got {list(alibi_slopes.shape)}"
            )
        if alibi_slopes.device != q.device:
            raise ValueError(f"alibi_slopes is on {alibi_slopes.device}, q on {q.device}")
        alibi_slopes = alibi_slopes.detach().contiguous()
    dropout = validation.check_fraction("dropout", dropout)
    if not dropout:
        seed = None
    elif seed is None:
        seed = torch.randint(2**62, (1,), device=q.device)
    else:
        check_seed(seed, q.device)
    return Options(scale, left, right, alibi_slopes, dropout, seed)


def choose_flash_backend(op: str, backend: str, q, value_size: int, size: tuple, options: Options) -> str:
    """Return "triton", "reference" or "cute", after checking that it supports these tensors and options.

    Args:
        q: [T, H, D].
        value_size: V.
        size: (number of tokens, number of sequences), by which "auto" chooses between triton and cute.
    """
    if backend == "cute":
        check_cute(op, q, value_size, options)
        return backend
    chosen = choose_backend(backend, q, op, more=("cute",))
    if chosen == "triton":
        if backend == "auto" and faster_with_cute(q, value_size, size, options):
            return "cute"
        check_kernel(op, q, {"D": q.shape[-1], "V": value_size})
    return chosen
