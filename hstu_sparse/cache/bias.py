"""Compute the bias of candidates once for each position.

Candidates of a sequence have one position and one time, so their bias with a key depends on the key alone. The kernel
of attention reads it, one number a key. If that kernel looked it up in the tables itself, Triton (3.6, 3.7) would have
every thread look up each of its columns of a tile: a load is cheap to repeat where a tensor has fewer elements than
there are threads. PTX for 128 candidates then has 230 loads of 4 bytes in place of 5.
"""

import triton
import triton.language as tl

from hstu_sparse.bias.scores import table_bias


@triton.jit(do_not_specialize=["P"])
def candidate_bias_kernel(
    out, pages, lengths, timestamps, bias, P, PAGE: tl.constexpr, SINKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out[b, s], fp32: the candidates' bias with token s of sequence b, at s = lengths[b] with themselves.

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
        times = tl.where(cached, times, tl.load(bias.key_times + b))
    inside = position <= length
    values = table_bias(bias, length - position, inside, candidate_time, times)[0]
    tl.store(out + b * (P * PAGE + 1) + position, values, inside)
