"""Define the public functions of block-sparse HSTU attention.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D query/key and V value head size, BS block
size, S blocks chosen per query group (block_counts), r tokens per group (selection_group), W window.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.bsa.reference import bsa_attention_reference
from hstu_sparse.core import validation
from hstu_sparse.core.jagged import check_jagged, sequence_ids
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_int, check_kernel, check_plan, check_qkv, check_tensor, choose_backend

if TYPE_CHECKING:
    from hstu_sparse.bsa.plan import BlockPlan

MAX_SIZE = 1 << 20  # the maximum of block_size and block_counts: the reference has tensors of these sizes


@without_autocast
def bsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    gates: tuple[Tensor, Tensor, Tensor | None],
    *,
    block_size: int = 32,
    block_counts: int = 4,
    window_size: int = 0,
    selection_group: int = 1,
    scale: float | None = None,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    backend: str = "auto",
    return_block_indices: bool = False,
    plan: "BlockPlan | None" = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute HSTU attention over block means, chosen blocks and a window: the sum of three gated branches.

    Block j of a sequence of n tokens has the positions j*BS .. min((j+1)*BS, n) - 1, and the mean key kbar_j and mean
    value vbar_j of these tokens.

        o[t] = g_cmp[t] * BS/N * sum over complete past blocks j of SiLU(scale * q[t].kbar_j) vbar_j
             + g_slc[t] * 1/N  * sum over chosen blocks, their tokens s <= t, of SiLU(scale * q[t].k[s]) v[s]
             + g_swa[t] * 1/N  * sum over t - W < s <= t of SiLU(scale * q[t].k[s]) v[s]

    A `bias` is added to every argument of SiLU: b(t, s) for a token, and b(t, m) for a block, where m = j*BS + BS // 2
    is its middle token. This also holds for the choice below.

    The tokens r*g .. r*g + r - 1 of a sequence form a group, whose first token chooses for all of them. For each head
    this token chooses its block and, among the complete blocks before it, the S - 1 with the greatest
    SiLU(scale * q.kbar_j). Ties go to the smaller j. The choice has no gradient.

    Args:
        q, k: [T, H, D], v: [T, H, V]; float16, bfloat16 or float32 (the reference also takes float64), one dtype.
        seq_offsets: [B + 1] int32 or int64, first 0, last T.
        max_seq_len: N, at least the longest sequence.
        gates: (g_cmp, g_slc, g_swa), each [T, H]; g_swa may be None when window_size is 0.
        block_size: BS in tokens. The kernels support 16, 32, 64 and 128.
        block_counts: S, the blocks chosen per group, including the group's own block. The kernels support up to 128.
        window_size: W in tokens, including the query; 0 for no window.
        selection_group: r in tokens; divides block_size.
        scale: factor of the logits; D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N; `max_seq_len` by default.
        bias: b(t, s) by relative position and time, see `RelativeBias`; both tables get gradients.
        backend: "triton", "reference", or "auto": triton for CUDA tensors and the reference for CPU tensors.
        plan: the result of `bsa_plan` for the same batch, block size and bias; computed here if absent. A plan of
            another batch is an error on a CPU, and on a GPU if HSTU_SPARSE_DEBUG is set.
        return_block_indices: also return the chosen blocks [T, H, S] int32: ascending, padded with -1.

    Returns:
        [T, H, V] in the dtype of q, and the block indices if requested.

    Examples:
        >>> seq_offsets = torch.tensor([0, 64])
        >>> q, k, v = torch.randn(3, 64, 2, 16)
        >>> gates = torch.rand(3, 64, 2).unbind()  # of compression, selection and window
        >>> out, blocks = hstu_sparse.bsa_attention(
        ...     q, k, v, seq_offsets, 64, gates, block_size=16, block_counts=2, window_size=8, return_block_indices=True
        ... )
        >>> out.shape, blocks[20, 0].tolist()  # token 20 chooses its own block and the only one before it
        (torch.Size([64, 2, 16]), [0, 1])

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Yuan et al., Native Sparse Attention (arXiv 2502.11089), section 3, with the pointwise SiLU attention of
    Zhai et al. (arXiv 2402.17152), section 3.1, in place of softmax.
    """
    backend = choose_backend(backend, q, "bsa_attention")
    sizes = check_qkv(q, k, v, seq_offsets, max_seq_len)
    sizes_of_blocks = dict(block_size=block_size, block_counts=block_counts, selection_group=selection_group)
    for name, value in sizes_of_blocks.items():
        check_int(name, value, 1, MAX_SIZE)
    check_int("window_size", window_size, 0)
    validation.check_bool("return_block_indices", return_block_indices)
    if block_size % selection_group:
        raise ValueError(f"selection_group must divide block_size={block_size}, got {selection_group}")
    _check_gates(gates, sizes, q.device, window_size)
    bias = check_bias(bias, max_seq_len, sizes["T"], q.device)
    scale, normalizer = validation.check_factors(scale, normalizer, sizes["D"], max_seq_len)
    options = block_size, block_counts, window_size, selection_group, scale, normalizer
    if backend == "reference":
        if plan is not None:
            raise ValueError(f"plan must be None with backend='reference', got {type(plan).__name__}")
        out, indices = bsa_attention_reference(q, k, v, seq_offsets, max_seq_len, gates, *options, bias)
        return (out, indices) if return_block_indices else out

    from hstu_sparse.bsa import launch
    from hstu_sparse.bsa.plan import BlockPlan, make_plan, purpose_of

    check_kernel("bsa_attention", q, {"D": sizes["D"], "V": sizes["V"]})
    _check_supported("bsa_attention", "block_size", block_size, launch.BLOCK_SIZES)
    _check_supported("bsa_attention", "block_counts", block_counts, range(1, launch.MAX_BLOCK_COUNTS + 1))
    purpose = purpose_of(sizes["T"], seq_offsets, max_seq_len, block_size, bias)
    if plan is None:
        plan = make_plan(purpose, seq_offsets, bias)
    else:
        check_plan(plan, BlockPlan, purpose)
    branches = (*gates[:2], gates[2] if window_size > 0 else None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    out, groups, *_ = launch.operator(
        q, k, v, seq_offsets, max_seq_len, *branches, *bias[:2], plan.flat(), *options, deterministic
    )
    if not return_block_indices:
        return out
    # The kernels store one row for each group; the first one of sequence b is offsets[b] // r + b.
    sequence = sequence_ids(seq_offsets, q.shape[0])
    begin = seq_offsets.long()[sequence]
    position = torch.arange(q.shape[0], device=q.device) - begin
    return out, groups[begin // selection_group + sequence + position // selection_group]


@without_autocast
def bsa_plan(
    q: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    *,
    block_size: int = 32,
    bias: RelativeBias | None = None,
    once: Callable[[Hashable, Callable[[], Any]], Any] | None = None,
    backend: str = "auto",
) -> "BlockPlan | None":
    """Compute the part of `bsa_attention` that depends only on a batch's offsets and times, once for several calls.

    All layers of a model can use one plan, forward and backward, if they have the same block size, N and number of time
    buckets; the values of the bias tables may differ. A plan takes 12 bytes per token, or 24 if `query_timestamps`
    differ, and N / BS times 2 bytes for each tile of max(64, BS) queries.

    Args:
        q: [T, H, D], the tensor of one of the calls; only its shape and device are used.
        seq_offsets, max_seq_len, block_size, bias: as for `bsa_attention`; the tables' values are not read.
        once: a cache for one batch, such as `Batch.once` (data/batch.py). once(key, compute) returns the result of
            compute(), which it calls only for a new key. The key has everything else that the plan
            depends on.
        backend: as for `bsa_attention`.

    Returns:
        The argument `plan` of `bsa_attention`; None for the reference.

    Examples:
        >>> seq_offsets, x = torch.tensor([0, 64]), torch.randn(64, 2, 16)
        >>> gates = (torch.ones(64, 2), torch.ones(64, 2), None)
        >>> plan = hstu_sparse.bsa_plan(x, seq_offsets, 64)  # None on a CPU
        >>> for layer in range(2):
        ...     x = hstu_sparse.bsa_attention(x, x, x, seq_offsets, 64, gates, plan=plan)

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    if choose_backend(backend, q, "bsa_plan") == "reference":
        return None
    sizes: dict[str, int] = {}
    check_tensor("q", q, "T H D", sizes)
    check_int("block_size", block_size, 1, MAX_SIZE)
    check_jagged(seq_offsets, max_seq_len, q=q)
    bias = check_bias(bias, max_seq_len, sizes["T"], q.device)
    from hstu_sparse.bsa.launch import BLOCK_SIZES
    from hstu_sparse.bsa.plan import make_plan, purpose_of

    _check_supported("bsa_plan", "block_size", block_size, BLOCK_SIZES)
    purpose = purpose_of(sizes["T"], seq_offsets, max_seq_len, block_size, bias)
    make = lambda: make_plan(purpose, seq_offsets, bias)
    return make() if once is None else once(purpose.key, make)


def _check_supported(function: str, name: str, value: int, supported: Sequence[int]) -> None:
    if value not in supported:
        expected = f"up to {supported[-1]}" if isinstance(supported, range) else " ".join(map(str, supported))
        raise ValueError(f"{function}: the kernels take {name} {expected}, got {value}; use backend='reference'")


def _check_gates(gates, sizes: dict[str, int], device: torch.device, window_size: int) -> None:
    if not isinstance(gates, (tuple, list)) or len(gates) != 3:
        got = f"{len(gates)} entries" if isinstance(gates, (tuple, list)) else type(gates).__name__
        raise ValueError(f"gates must be (g_cmp, g_slc, g_swa), got {got}")
    for name, gate in zip(("g_cmp", "g_slc", "g_swa"), gates):
        if gate is not None:
            check_tensor(name, gate, "T H", sizes, device=device)
        elif name != "g_swa" or window_size > 0:
            raise ValueError(f"{name} must be a tensor [T, H], got None; only g_swa may be None, with window_size=0")
