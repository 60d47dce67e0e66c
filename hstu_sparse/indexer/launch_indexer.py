"""Launch the lightning indexer's kernels; register them as torch.ops.hstu_sparse.lightning_indexer_fwd and _bwd,
index_scores_fwd and _bwd.

Letters: T tokens of the batch, B sequences, J index heads, E index head size, K chosen tokens per query, G rows of a
choice and R tokens that share one (see choices.py).
"""

import torch
from torch import Tensor

from hstu_sparse.core.launch import (
    INTERPRET,
    LaunchConfig,
    cdiv,
    configuration,
    next_power_of_2,
    padded_head,
    precision,
    run,
)
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.rows import as_rows
from hstu_sparse.indexer import topk
from hstu_sparse.indexer.choices import choice_rows, num_rows, rows_shape
from hstu_sparse.indexer.launch import (
    POSITION_COPIES,
    TIME_COPIES,
    by_lists,
    kernel_bias,
    key_block,
    pairs_by_key,
    table_sums,
)
from hstu_sparse.indexer.scores import index_scores_bwd_dik_kernel, index_scores_bwd_kernel, index_scores_fwd_kernel
from hstu_sparse.tiles.assembly import proven

# Bytes of candidates that are in memory at a time.
SCRATCH = 2**31
# Candidates of a query for each warp of the program that selects the greatest of them.
PER_WARP = 1024


@configuration
def sample_config(top_k: int) -> tuple[int, int]:
    """Return (capacity for candidates of a query, keys in a query's sample): see topk.py."""
    # Capacity for the keys above a threshold from the sample of 65,536 keys, by several standard deviations.
    return 1024 if top_k <= 192 else max(3 * top_k, top_k + 1024), 1024 if INTERPRET else 4096


@configuration
def choice_config(heads: int, width: int, dtype: torch.dtype, group: int) -> LaunchConfig:
    """Return the configuration of the kernels that score tiles of ROWS queries and BLOCK keys, for index heads padded
    to `width`. HEADS: index heads whose queries stay in registers; others are read again for every block of keys.
    """
    resident_heads = heads if heads <= 4 else 2
    if INTERPRET:
        return LaunchConfig(4, 3, ROWS=32, BLOCK=32, HEADS=resident_heads)
    if dtype.itemsize == 4:
        return LaunchConfig(4, 3, ROWS=32, BLOCK=32, HEADS=1)
    # Groups have fewer queries: smaller tiles give every multiprocessor some.
    return LaunchConfig(4, 3, ROWS=64 if group < 4 else 32, BLOCK=64 if width <= 128 else 32, HEADS=resident_heads)


def _forward(iq, ik, w, seq_offsets, position, time, timestamps, query_timestamps, top_k, group):
    T, J, _ = iq.shape
    G = num_rows(T, seq_offsets, group)
    scores = torch.empty(G, top_k, dtype=torch.float32, device=iq.device)
    indices = torch.empty(G, top_k, dtype=torch.int32, device=iq.device)
    if group > 1:  # some rows belong to no group
        scores.fill_(float("-inf"))
        indices.fill_(-1)
    if T == 0:
        return scores, indices, choice_rows(seq_offsets, T, group)
    iq, ik = as_rows(iq, ik)
    E, BE, B = iq.shape[2], padded_head(iq.shape[2]), seq_offsets.shape[0] - 1
    bias = kernel_bias(position, time, timestamps, query_timestamps)
    capacity, sample = sample_config(top_k)
    config = choice_config(J, BE, iq.dtype, group)
    ROWS = config.ROWS
    SIZE = next_power_of_2(capacity)
    all_slots = T // (ROWS * group) + B
    # A row first holds its sample (fp32), then its candidates.
    room = max(capacity, sample // 2)
    slots = min(all_slots, max(1, SCRATCH // (8 * room * ROWS)))
    rows = slots * ROWS
    # A tile's queries have adjacent rows of candidates, including positions past a sequence's end, which are -1.
    rounds = cdiv(all_slots, slots)
    queries = torch.empty(3, rounds, rows, dtype=torch.int64, device=iq.device)
    number = dict(ROWS=ROWS, R=group, num_warps=1)
    run(topk.lightning_indexer_rows_kernel, rounds * slots, seq_offsets, *queries, B, **number)
    candidates = torch.empty(rows * room, dtype=torch.int64, device=iq.device)
    sampled = candidates.view(torch.float32)
    thresholds = torch.full((rows,), float("-inf"), dtype=torch.float32, device=iq.device)
    counts = torch.empty(rows, dtype=torch.int32, device=iq.device)
    strides = (*iq.stride()[:2], ik.stride(0), *w.stride())
    heads = dict(J=J, E=E, BE=BE, R=group, PRECISION=precision(iq.dtype))
    asm = proven(iq.device)
    refill = heads | dict(BJ=padded_head(J), ROWS=ROWS, BLOCK=key_block(iq.dtype, BE), SIZE=SIZE)
    # Most rows have far fewer candidates than capacity; a program for the full capacity has fewer registers.
    some = dict(BLOCK=min(1024, next_power_of_2(top_k)))
    parts = [some | dict(LEAST=0, SIZE=SIZE // 2), some | dict(LEAST=SIZE // 2 + 1, SIZE=SIZE)]
    for tokens, begins, targets, first in zip(*queries, range(0, all_slots, slots)):
        if capacity < T:
            run(
                topk.lightning_indexer_sample_kernel, slots,
                iq, ik, w, seq_offsets, sampled, *bias, *strides, B, first, capacity, **heads, SAMPLE=sample,
                ASM=asm, **config.replace(num_stages=2),
            )  # fmt: skip
            run(
                topk.lightning_indexer_threshold_kernel, rows, sampled, begins, tokens, thresholds, capacity, top_k,
                SAMPLE=sample, R=group, num_warps=4,
            )  # fmt: skip
        run(
            topk.lightning_indexer_collect_kernel, slots,
            iq, ik, w, seq_offsets, thresholds, candidates, counts, *bias, *strides, B, first, slots, top_k,
            **heads, CAPACITY=capacity, ASM=asm, **config,
        )  # fmt: skip
        if capacity < T:
            run(
                topk.lightning_indexer_refill_kernel, slots,
                iq, ik, w, begins, tokens, candidates, counts, *bias, *strides, capacity, top_k, **refill,
                num_warps=max(4, min(16, SIZE // 512)), num_stages=2,
            )  # fmt: skip
        arguments = (tokens, targets, candidates, counts, scores, indices, capacity, top_k)
        for part in parts:
            warps = max(1, min(16, part["SIZE"] // PER_WARP))
            run(topk.lightning_indexer_finish_kernel, rows, *arguments, **part, num_warps=warps)
    return scores, indices, choice_rows(seq_offsets, T, group)


def _scores_forward(iq, ik, w, indices, seq_offsets, position, time, timestamps, query_timestamps, group):
    T, (G, K) = iq.shape[0], indices.shape
    rows = choice_rows(seq_offsets, T, group)
    if T == 0 or K == 0:
        return torch.full(indices.shape, float("-inf"), dtype=torch.float32, device=iq.device), rows
    scores = torch.empty(indices.shape, dtype=torch.float32, device=iq.device)
    iq, ik = as_rows(iq, ik)
    arguments = (
        iq, ik, w, indices, rows, scores, *kernel_bias(position, time, timestamps, query_timestamps),
        *iq.stride()[:2], ik.stride(0), *w.stride(), K, G,
    )  # fmt: skip
    run(index_scores_fwd_kernel, G, *arguments, **_tiles(iq), R=group, num_warps=4, num_stages=3)
    return scores, rows


def _scores_backward(
    grad, iq, ik, w, indices, seq_offsets, position, time, timestamps, query_timestamps, group, rows
):  # fmt: skip
    (T, J, E), (G, K) = iq.shape, indices.shape
    deterministic = torch.are_deterministic_algorithms_enabled()
    lists = by_lists(deterministic)
    # A group's other tokens do not take part in its choice.
    make = torch.empty if group == 1 else torch.zeros
    diq = make(iq.shape, dtype=iq.dtype, device=iq.device)
    dw = make(w.shape, dtype=w.dtype, device=w.device)
    make, dtype = (torch.empty, ik.dtype) if lists else (torch.zeros, torch.float32)
    dik = make(ik.shape, dtype=dtype, device=ik.device)
    if T == 0:
        return [diq, dik.to(ik.dtype), dw, *(torch.zeros_like(x) for x in (position, time) if x is not None)]
    iq, ik = as_rows(iq, ik)
    bias = kernel_bias(position, time, timestamps, query_timestamps)
    # The kernels do not read a masked slot's gradient; it only loosens this bound.
    tables = table_sums(
        position, time, T, deterministic, lambda: grad.nan_to_num().abs().sum(1, dtype=torch.float32).amax()
    )
    strides = (*grad.stride(), *iq.stride()[:2], ik.stride(0), *w.stride())
    arguments = (
        grad, iq, ik, w, indices, rows, diq, dik, dw, tables.position, tables.time, tables.unit, *bias[2:],
        0 if bias.time is None else bias.time.shape[0], *strides, K, G,
    )  # fmt: skip
    constants = dict(OUT_E=E, POSITION_COPIES=POSITION_COPIES, TIME_COPIES=TIME_COPIES, ATOMIC=not lists, R=group)
    run(index_scores_bwd_kernel, G, *arguments, **_tiles(iq), **constants, num_warps=4, num_stages=2)
    if lists:
        heads, width = next_power_of_2(J), padded_head(iq.shape[2])
        pairs, starts, _ = pairs_by_key(indices, rows, T, group, local=False)
        arguments = (grad, iq, ik, w, rows, pairs, starts, dik, *strides, K, G)
        queries = max(1, 4096 // (heads * width))
        constants = dict(J=J, E=iq.shape[2], OUT_E=E, BJ=heads, BE=width, QUERIES=queries, R=group)
        run(index_scores_bwd_dik_kernel, T, *arguments, **constants, num_warps=4, num_stages=2)
    return [diq, dik.to(ik.dtype), dw, *tables.gradients()]


def _backward(
    grad, iq, ik, w, seq_offsets, position, time, timestamps, query_timestamps, top_k, group, indices, rows
):  # fmt: skip
    tables = position, time, timestamps, query_timestamps
    return _scores_backward(grad, iq, ik, w, indices, seq_offsets, *tables, group, rows)


def _fake(iq, ik, w, seq_offsets, position, time, timestamps, query_timestamps, top_k, group):
    T = iq.shape[0]
    G = num_rows(T, seq_offsets, group)
    shapes = ((G, top_k), torch.float32), ((G, top_k), torch.int32), (rows_shape(T, seq_offsets, group), torch.int64)
    return tuple(iq.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _fake_scores(iq, ik, w, indices, seq_offsets, *bias_and_options):
    rows = iq.new_empty(rows_shape(iq.shape[0], seq_offsets, bias_and_options[-1]), dtype=torch.int64)
    return iq.new_empty(indices.shape, dtype=torch.float32), rows


def _tiles(iq: Tensor) -> dict:
    width = padded_head(iq.shape[2])
    return dict(
        J=iq.shape[1], E=iq.shape[2], BJ=padded_head(iq.shape[1]), BE=width, BLOCK=key_block(iq.dtype, width),
        PRECISION=precision(iq.dtype),
    )  # fmt: skip


_TABLES = "Tensor? position, Tensor? time, Tensor? timestamps, Tensor? query_timestamps"

lightning_indexer_jagged = Operator(
    "lightning_indexer",
    f"Tensor iq, Tensor ik, Tensor w, Tensor seq_offsets, {_TABLES}, SymInt top_k, SymInt group",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiable=("iq", "ik", "w", "position", "time"),
    outputs=3,
)

index_scores_jagged = Operator(
    "index_scores",
    f"Tensor iq, Tensor ik, Tensor w, Tensor indices, Tensor seq_offsets, {_TABLES}, SymInt group",
    forward=_scores_forward,
    backward=_scores_backward,
    fake=_fake_scores,
    differentiable=("iq", "ik", "w", "position", "time"),
    outputs=2,
)


def lightning_indexer_operator(*arguments) -> tuple[Tensor, Tensor]:
    """Call the registered operator and return the scores and the indices."""
    return lightning_indexer_jagged(*arguments)[:2]


def index_scores_operator(*arguments) -> Tensor:
    """Call the registered operator and return the scores alone."""
    return index_scores_jagged(*arguments)[0]
