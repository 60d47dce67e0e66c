"""Define the bias of pairs of new tokens and tokens in a cache, and compute that of candidates once for each position.

Candidates of a sequence have one position and one time, so their bias with a key depends on the key alone. The kernel
of attention reads it, one number a key. If that kernel looked it up in the tables itself, Triton (3.6, 3.7) would have
every thread look up each of its columns of a tile: a load is cheap to repeat where a tensor has fewer elements than
there are threads. PTX for 128 candidates then has 230 loads of 4 bytes in place of 5.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.bias.buckets import device_cells, num_time_buckets
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bias.scores import pair_bias


class PairBias(NamedTuple):
    """The arguments of `pair_bias` as kernels take them; members of an absent bias are None.

    position, positions  the table, and the number of its entries
    time, cells          the table, and its `bucket_cells`
    times, query_times   times of the new tokens in seconds, as keys and as queries
    candidates           the results of `candidate_bias_kernel`, in place of all others
    """

    position: torch.Tensor | None = None
    positions: int = 0
    time: torch.Tensor | None = None
    cells: torch.Tensor | None = None
    times: torch.Tensor | None = None
    query_times: torch.Tensor | None = None
    candidates: torch.Tensor | None = None

    @classmethod
    def of(cls, bias: RelativeBias) -> "PairBias":
        position, time, times, query_times = (None if x is None else x.contiguous() for x in bias)
        buckets = num_time_buckets(time)
        cells = None if time is None or buckets is None else device_cells(buckets, time.device)
        return cls(position, 0 if position is None else len(position), time, cells, times, query_times)


@triton.jit
def biases(distance, seen, query_times, key_times, bias):
    """Return `pair_bias` of a `PairBias`."""
    return pair_bias(distance, seen, query_times, key_times, bias.position, bias.time, bias.cells, bias.positions)


@triton.jit(do_not_specialize=["P"])
def candidate_bias_kernel(
    out, pages, lengths, timestamps, bias, P, PAGE: tl.constexpr, SINKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out[b, s], fp32, the bias of the candidates of sequence b with token s, and with themselves at s =
    lengths[b].

    out: [B, P * PAGE + 1]; entries after lengths[b] are not written. Each program writes BLOCK positions.
    """
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + b).to(tl.int32)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK > length:
        return
    candidate_time = 0
    times = 0
    if bias.time is not None:
        candidate_time = tl.load(bias.query_times + b)
        cached = position < length
        page = tl.load(pages + b * P + (1 if SINKS else 0) + position // PAGE, cached, 0).to(tl.int64)
        times = tl.load(timestamps + page * PAGE + position % PAGE, cached, 0)
        times = tl.where(cached, times, tl.load(bias.times + b))
    inside = position <= length
    values = biases(length - position, inside, candidate_time, times, bias)[0]
    tl.store(out + b * (P * PAGE + 1) + position, values, inside)
