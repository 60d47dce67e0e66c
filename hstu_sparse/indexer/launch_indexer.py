"""Launch the lightning indexer's kernels, and register them as torch operators.

They are torch.ops.hstu_sparse.lightning_indexer_fwd and _bwd, index_scores_fwd and _bwd.

Letters: T tokens of the batch, B sequences, J index heads, E index head size, K chosen tokens per query, G rows of a
choice and R tokens that share one (see choices.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.relative import BIAS, RelativeBias, unflatten_arguments
from hstu_sparse.core import launch
from hstu_sparse.core.launch import INTERPRET, LaunchConfig, cdiv, configuration, padded_head, precision, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.indexer import topk
from hstu_sparse.indexer.choices import kernel_bias, key_block, key_sums, table_sums
from hstu_sparse.indexer.reference import num_rows
from hstu_sparse.indexer.scores import Index, index_scores_bwd_kernel, index_scores_fwd_kernel
from hstu_sparse.tiles.assembly import proven
from hstu_sparse.tiles.rows import Rows, as_rows

# Bytes of candidates that are in memory at a time.
SCRATCH = 2**31
# Candidates for each warp of a program that selects the greatest ones of a query.
PER_WARP = 1024


@configuration
def sample_config(top_k: int) -> tuple[int, int]:
    """Return (capacity for candidates of a query, keys in a query's sample): see topk.py."""
    # Of 65,536 keys, the number that reaches the sample's threshold is several standard deviations below the capacity.
    return 1024 if top_k <= 192 else max(3 * top_k, top_k + 1024), 1024 if INTERPRET else 4096


@configuration
def choice_config(heads: int, width: int, dtype: torch.dtype, group: int) -> LaunchConfig:
    """Return the configuration of the kernels that score tiles of ROWS queries and BLOCK keys.

    width: padded size of an index head. HEADS: index heads whose queries stay in registers; the queries of other heads
    are loaded for every block of keys.
    """
    resident_heads = heads if heads <= 4 else 2
    if INTERPRET:
        return LaunchConfig(4, 3, ROWS=32, BLOCK=32, HEADS=resident_heads)
    if dtype.itemsize == 4:
        return LaunchConfig(4, 3, ROWS=32, BLOCK=32, HEADS=1)
    # With groups there are fewer queries: smaller tiles occupy all multiprocessors.
    return LaunchConfig(4, 3, ROWS=64 if group < 4 else 32, BLOCK=64 if width <= 128 else 32, HEADS=resident_heads)


class Arguments(NamedTuple):
    """The arguments that both operators share, in the order of their schemas."""

    iq: Tensor
    ik: Tensor
    w: Tensor
    bias: RelativeBias
    group: int


class _Search:
    """The values that the kernels of topk.py share in a call."""

    def __init__(self, a: Arguments, seq_offsets: Tensor, top_k: int):
        (T, J, _), group = a.iq.shape, a.group
        iq, ik = as_rows(a.iq, a.ik)
        width = padded_head(iq.shape[2])
        self.index, self.bias, self.offsets, self.top_k = Index.of(iq, ik, a.w), kernel_bias(a.bias), seq_offsets, top_k
        self.B, self.J, self.tokens = seq_offsets.shape[0] - 1, J, T
        self.capacity, self.sample = sample_config(top_k)
        self.size = launch.next_power_of_2(self.capacity)
        self.config = choice_config(J, width, iq.dtype, group)
        self.heads = topk.Heads(J, iq.shape[2], width, group, precision(iq.dtype), proven(iq.device))
        self.block = key_block(iq.dtype, width)
        # A tile's queries have adjacent rows of candidates, also those past a sequence's end, whose token is -1. A row
        # first holds a query's sample (fp32); later its candidates overwrite the sample.
        self.all_slots = T // (self.config.ROWS * group) + self.B
        self.row_size = max(self.capacity, self.sample // 2)
        self.slots = min(self.all_slots, max(1, SCRATCH // (8 * self.row_size * self.config.ROWS)))
        self.rows = self.slots * self.config.ROWS

    def queries(self) -> Tensor:
        """Return [3, rounds, rows]: tokens, first tokens of sequences, rows of the result. SCRATCH limits a round."""
        rounds = cdiv(self.all_slots, self.slots)
        queries = torch.empty(3, rounds, self.rows, dtype=torch.int64, device=self.offsets.device)
        number = dict(ROWS=self.config.ROWS, R=self.heads.R, num_warps=1)
        run(topk.lightning_indexer_rows_kernel, rounds * self.slots, self.offsets, *queries, self.B, **number)
        return queries

    def choose(self, scores: Tensor, indices: Tensor) -> None:
        """Write the choice of every row that has a query."""
        device, capacity, sample, top_k = self.offsets.device, self.capacity, self.sample, self.top_k
        candidates = torch.empty(self.rows * self.row_size, dtype=torch.int64, device=device)
        sampled = candidates.view(torch.float32)
        thresholds = torch.full((self.rows,), float("-inf"), dtype=torch.float32, device=device)
        counts = torch.empty(self.rows, dtype=torch.int32, device=device)
        sizes = dict(heads=self.heads, ROWS=self.config.ROWS, SIZE=self.size)
        refill = sizes | dict(BJ=padded_head(self.J), BLOCK=self.block, num_warps=max(4, min(16, self.size // 512)))
        # Two launches: most rows have far fewer candidates than the capacity, and programs then need fewer registers.
        parts = (0, self.size // 2), (self.size // 2 + 1, self.size)
        for tokens, begins, targets, first in zip(*self.queries(), range(0, self.all_slots, self.slots)):
            if capacity < self.tokens:
                run(
                    topk.lightning_indexer_sample_kernel, self.slots, self.index, self.offsets, sampled, self.bias,
                    self.B, first, capacity, heads=self.heads, SAMPLE=sample, **self.config.replace(num_stages=2),
                )  # fmt: skip
                run(
                    topk.lightning_indexer_threshold_kernel, self.rows, sampled, begins, tokens, thresholds, capacity,
                    top_k, SAMPLE=sample, R=self.heads.R, num_warps=4,
                )  # fmt: skip
            run(
                topk.lightning_indexer_collect_kernel, self.slots, self.index, self.offsets, thresholds, candidates,
                counts, self.bias, self.B, first, self.slots, top_k, heads=self.heads, CAPACITY=capacity,
                **self.config,
            )  # fmt: skip
            if capacity < self.tokens:
                run(
                    topk.lightning_indexer_refill_kernel, self.slots, self.index, begins, tokens, candidates, counts,
                    self.bias, capacity, top_k, **refill, num_stages=2,
                )  # fmt: skip
            arguments = (tokens, targets, candidates, counts, scores, indices, capacity, top_k)
            for least, size in parts:
                run(
                    topk.lightning_indexer_finish_kernel, self.rows, *arguments, LEAST=least, SIZE=size,
                    BLOCK=min(1024, launch.next_power_of_2(top_k)), num_warps=max(1, min(16, size // PER_WARP)),
                )  # fmt: skip


def _forward(iq, ik, w, seq_offsets, rows, *bias_and_options) -> tuple[Tensor, Tensor]:
    *bias, top_k, group = bias_and_options
    scores, indices = _fake(iq, ik, w, seq_offsets, rows, *bias_and_options)
    if group > 1:  # some rows belong to no group
        scores.fill_(float("-inf"))
        indices.fill_(-1)
    if iq.shape[0]:
        _Search(unflatten_arguments(Arguments, (iq, ik, w, *bias, group)), seq_offsets, top_k).choose(scores, indices)
    return scores, indices


def _scores_forward(iq, ik, w, indices, rows, *bias_and_group) -> Tensor:
    a, (G, K) = unflatten_arguments(Arguments, (iq, ik, w, *bias_and_group)), indices.shape
    if iq.shape[0] == 0 or K == 0:
        return torch.full(indices.shape, float("-inf"), dtype=torch.float32, device=iq.device)
    scores = torch.empty(indices.shape, dtype=torch.float32, device=iq.device)
    iq, ik = as_rows(iq, ik)
    arguments = Index.of(iq, ik, w), indices, rows, scores, kernel_bias(a.bias), K, G
    run(index_scores_fwd_kernel, G, *arguments, **_tiles(iq), R=a.group, num_warps=4, num_stages=3)
    return scores


def _scores_backward(grad, iq, ik, w, indices, rows, *bias_and_group) -> list[Tensor]:
    a, (T, J, E), (G, K) = unflatten_arguments(Arguments, (iq, ik, w, *bias_and_group)), iq.shape, indices.shape
    # Only a group's first token affects its choice.
    make = torch.empty if a.group == 1 else torch.zeros
    diq, dw = (make(x.shape, dtype=x.dtype, device=x.device) for x in (iq, w))
    if T == 0:
        return [diq, torch.zeros_like(ik), dw, *(torch.zeros_like(x) for x in a.bias[:2] if x is not None)]

    def sum_of_row() -> Tensor:
        """Bound the sum of a row's gradients; those of masked slots only loosen the bound, since kernels skip them."""
        return grad.nan_to_num().abs().sum(1, dtype=torch.float32).amax()

    tables = table_sums(a.bias, G, sum_of_row)
    dik = key_sums(ik, G, lambda: sum_of_row() * J * w.abs().amax() * iq.abs().amax())
    iq, ik = as_rows(iq, ik)
    arguments = Rows.of(grad), Index.of(iq, ik, w), indices, rows, diq, dik, dw, tables.arguments
    constants = _tiles(iq) | dict(OUT_E=E, R=a.group, num_warps=4, num_stages=2)
    run(index_scores_bwd_kernel, G, *arguments, kernel_bias(a.bias), K, G, **constants)
    return [diq, dik.total(ik.dtype), dw, *tables.gradients()]


def _backward(grad, iq, ik, w, seq_offsets, rows, *bias_options_and_indices) -> list[Tensor]:
    *bias, _, group, indices = bias_options_and_indices
    return _scores_backward(grad, iq, ik, w, indices, rows, *bias, group)


def _fake(iq, ik, w, seq_offsets, rows, *bias_and_options) -> tuple[Tensor, Tensor]:
    *_, top_k, group = bias_and_options
    shape = num_rows(iq.shape[0], seq_offsets, group), top_k
    return iq.new_empty(shape, dtype=torch.float32), iq.new_empty(shape, dtype=torch.int32)


def _fake_scores(iq, ik, w, indices, *_) -> Tensor:
    return iq.new_empty(indices.shape, dtype=torch.float32)


def _tiles(iq: Tensor) -> dict:
    width = padded_head(iq.shape[2])
    return dict(
        J=iq.shape[1], E=iq.shape[2], BJ=padded_head(iq.shape[1]), BE=width, BLOCK=key_block(iq.dtype, width),
        PRECISION=precision(iq.dtype),
    )  # fmt: skip


_LIGHTNING_INDEXER = (
    f"Tensor iq, Tensor ik, Tensor w, Tensor seq_offsets, Tensor rows, {BIAS}, SymInt top_k, SymInt group"
)
lightning_indexer_jagged = Operator(
    "lightning_indexer", _LIGHTNING_INDEXER, _forward, _backward, _fake, "iq ik w position time", outputs=2
)

_INDEX_SCORES = f"Tensor iq, Tensor ik, Tensor w, Tensor indices, Tensor rows, {BIAS}, SymInt group"
index_scores_jagged = Operator(
    "index_scores", _INDEX_SCORES, _scores_forward, _scores_backward, _fake_scores, "iq ik w position time"
)
