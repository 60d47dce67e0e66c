"""Dense HSTU attention over jagged tensors: public functions, validation, choice of the backend.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key head size, V value head size.
"""

import typing
from collections.abc import Callable, Hashable

import torch

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.core import validation
from hstu_sparse.core.jagged import check_jagged
from hstu_sparse.core.mask import Mask, check_mask
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_kernel, check_qkv, check_tensor, choose_backend
from hstu_sparse.dense.reference import hstu_attention_reference

if typing.TYPE_CHECKING:
    from hstu_sparse.dense.plan import AttentionPlan

Once = Callable[[Hashable, Callable[[], typing.Any]], typing.Any]


@without_autocast
def hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    scale: float | None = None,
    normalizer: float | None = None,
    num_targets: torch.Tensor | None = None,
    target_group_size: int = 1,
    num_context: torch.Tensor | None = None,
    context_sees_all: bool = False,
    window_size: int = 0,
    full_attention_prefix: int = 0,
    bias: RelativeBias | None = None,
    plan: "AttentionPlan | None" = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute causal attention with a relative bias, and with SiLU and the factor 1/N instead of softmax.

        o[t] = (1/N) * sum over visible s of SiLU(scale * q[t].k[s] + b(t, s)) * v[s]

    Token t sees s <= t of its own sequence; with `window_size` W > 0 only t - s < W.

    With `num_targets` the last m_b tokens of sequence b are candidates. A candidate sees itself and the history, which
    are the tokens before all candidates; for window and bias all candidates have the first candidate's position.

    With `num_context` the first c_b tokens are context, such as a user's features. They see one another, and all other
    tokens see them regardless of the window. They have position 0; the first event has position 1.

    Args:
        q, k: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        v: [T, H, V], dtype of q.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        max_seq_len: N, at least the longest sequence.
        scale: factor of the scores, D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N; `max_seq_len` by default.
        num_targets: [B] int32 or int64, the number of candidates at each sequence's end, 0 <= m_b <= n_b.
        target_group_size: G. Candidates form groups of G; the last group may be smaller. A candidate also sees the
            earlier candidates of its group, and the positions of every group follow those of the history.
        num_context: [B] int32 or int64, the number of context tokens at each sequence's begin, 0 <= c_b <= n_b - m_b.
            As queries and as keys they have the first event's time. They count towards N.
        context_sees_all: context tokens also see the whole history, regardless of the window, with distance 0 in the
            position bias.
        window_size: W in tokens; 0 for no window.
        full_attention_prefix: the number of events after the context that later tokens see regardless of the window.
        bias: b(t, s) by relative position and time, see `RelativeBias`; its tables get gradients.
        plan: the result of `attention_plan` for the same batch, mask and bias; computed here if absent. A plan of
            another batch is an error on a CPU, and on a GPU if HSTU_SPARSE_DEBUG is set.
        backend: "triton", "reference", "hopper" or "auto". "hopper" has kernels for sm_90, for fp16 and bf16 heads with
            D = V = 64, 128 or 256, without bias, context, prefix and groups above 1. "auto" chooses the reference for
            CPU tensors; for CUDA tensors hopper, if it supports the call and sequences have at least 1,024 tokens on
            average, otherwise triton.

    Returns:
        [T, H, V], dtype of q. Gradients flow to q, k, v and both tables. On CUDA they have the same bits in every run,
        except for the tables with fp32 inputs, where the last bits depend on the order of additions.

    Examples:
        >>> seq_offsets = torch.tensor([0, 2, 5])  # two sequences, of 2 and 3 tokens
        >>> q, k = torch.zeros(5, 1, 4), torch.ones(5, 1, 4)
        >>> v = torch.ones(5, 1, 4)
        >>> bias = hstu_sparse.RelativeBias(position=torch.full((3,), 2.0))
        >>> out = hstu_sparse.hstu_attention(q, k, v, seq_offsets, max_seq_len=3, normalizer=1.0, bias=bias)
        >>> out[:, 0, 0]  # SiLU(2) times the number of visible tokens
        tensor([1.7616, 3.5232, 1.7616, 3.5232, 5.2848])

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Zhai et al., Actions Speak Louder than Words, ICML 2024, section 3.2 (arXiv 2402.17152); context: Meta's
    generative-recommenders; groups of candidates: NVIDIA's recsys-examples.
    """
    hopper, backend = _choose_backend(backend, q, "hstu_attention")
    sizes = check_qkv(q, k, v, seq_offsets, max_seq_len)
    scale, normalizer = validation.check_factors(scale, normalizer, sizes["D"], max_seq_len)
    bias = check_bias(bias, max_seq_len, sizes["T"], seq_offsets.device)
    mask = check_mask(
        Mask(num_targets, num_context, window_size, context_sees_all, target_group_size, full_attention_prefix),
        seq_offsets,
    )
    if backend == "reference":
        if plan is not None:
            raise ValueError(f"plan must be None with backend='reference', got {type(plan).__name__}")
        return hstu_attention_reference(q, k, v, seq_offsets, scale=scale, normalizer=normalizer, mask=mask, bias=bias)
    check_kernel("hstu_attention", q, {"D": sizes["D"], "V": sizes["V"]})
    if hopper:
        _check_hopper(q, v, bias, mask)
    from hstu_sparse.dense import plan as planning
    from hstu_sparse.dense.launch import dense_operator

    purpose = planning.purpose_of(q, v, seq_offsets, mask, bias, max_seq_len, hopper)
    if plan is None:
        plan = planning.make_plan(purpose, seq_offsets, mask, bias, backward=False)
    else:
        validation.check_plan(plan, planning.AttentionPlan, purpose)
    return dense_operator(q, k, v, seq_offsets, *mask, *bias, plan.flat(), max_seq_len, scale, normalizer, hopper)[0]


@without_autocast
def attention_plan(
    q: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    num_targets: torch.Tensor | None = None,
    target_group_size: int = 1,
    num_context: torch.Tensor | None = None,
    context_sees_all: bool = False,
    window_size: int = 0,
    full_attention_prefix: int = 0,
    bias: RelativeBias | None = None,
    once: Once | None = None,
    backend: str = "auto",
) -> "AttentionPlan | None":
    """Compute the part of `hstu_attention` that depends only on a batch's offsets and times, once for several calls.

    All layers of a model can use one plan, forward and backward, if they have the same dtype, head sizes, N, mask,
    kinds of bias and number of time buckets; the values of the bias tables may differ. With a time bias the plan holds
    the time buckets of each token's nearest neighbours, about 1 KB per token for both passes.

    Args:
        q, v: tensors of one of the calls; only their shapes, dtype and device are used.
        seq_offsets, max_seq_len, num_targets, target_group_size, num_context: as for `hstu_attention`.
        context_sees_all, window_size, full_attention_prefix, bias: as for `hstu_attention`.
        once: a cache for one batch, such as `Batch.once` (data/batch.py). once(key, compute) returns the result of
            compute(), which it calls only for a new key. The key has everything else that the plan
            depends on.
        backend: as for `hstu_attention`.

    Returns:
        The argument `plan` of `hstu_attention`; None for the reference. A plan made under `torch.no_grad` has no part
        for the backward pass, which then computes that part.

    Examples:
        >>> seq_offsets, x = torch.tensor([0, 2, 5]), torch.randn(5, 1, 16)
        >>> plan = hstu_sparse.attention_plan(x, x, seq_offsets, max_seq_len=3)  # None on a CPU
        >>> for layer in range(2):
        ...     x = hstu_sparse.hstu_attention(x, x, x, seq_offsets, max_seq_len=3, plan=plan)
    """
    hopper, backend = _choose_backend(backend, q, "attention_plan")
    sizes: dict[str, int] = {}
    check_tensor("q", q, "T H D", sizes)
    check_tensor("v", v, "T H V", sizes, dtype=q.dtype, device=q.device)
    check_jagged(seq_offsets, max_seq_len, q=q, v=v)
    validation.check_not_empty(sizes, "H", "D", "V")
    bias = check_bias(bias, max_seq_len, sizes["T"], seq_offsets.device)
    mask = check_mask(
        Mask(num_targets, num_context, window_size, context_sees_all, target_group_size, full_attention_prefix),
        seq_offsets,
    )
    if backend == "reference":
        return None
    check_kernel("attention_plan", q, {"D": sizes["D"], "V": sizes["V"]})
    if hopper:
        _check_hopper(q, v, bias, mask)
    from hstu_sparse.dense.plan import make_plan, purpose_of

    purpose = purpose_of(q, v, seq_offsets, mask, bias, max_seq_len, hopper)
    make = lambda: make_plan(purpose, seq_offsets, mask, bias, backward=torch.is_grad_enabled())
    return make() if once is None else once(purpose.key, make)


def _choose_backend(backend: str, q: torch.Tensor, op: str) -> tuple[bool | None, str]:
    """Return (whether "hopper" was requested, or None for "auto"; "triton" or "reference")."""
    hopper = None if backend == "auto" else backend == "hopper"
    return hopper, choose_backend("triton" if hopper else backend, q, op, ("hopper",))


def _check_hopper(q: torch.Tensor, v: torch.Tensor, bias: RelativeBias, mask: Mask) -> None:
    from hstu_sparse.core.launch import architecture
    from hstu_sparse.dense.configs import hopper_available, hopper_supports
    from hstu_sparse.tiles.assembly import PROVEN_TRITON

    if bias.position is not None or bias.time is not None:
        raise ValueError("backend='hopper' takes no bias: use backend='triton'")
    if (option := mask.extension) is not None:
        raise ValueError(f"backend='hopper' takes no {option}: use backend='triton'")
    if not hopper_supports(q, v):
        got = f"{q.dtype}, D = {q.shape[2]}, V = {v.shape[2]}"
        raise ValueError(f"backend='hopper' takes fp16 or bf16 heads, D = V = 64, 128 or 256, got {got}")
    if not hopper_available(q.device):
        got = str(q.device)
        if q.is_cuda:
            import triton

            got = f"sm_{architecture(q.device)} and Triton {triton.__version__}"
        raise ValueError(f"backend='hopper' needs sm_90 and Triton {' or '.join(PROVEN_TRITON)}, got {got}")
