"""Define the online softmax: the running maximum and sum of rows whose scores, in units of log 2, come in blocks."""

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(most):
    """Return what to subtract from scores with maximum `most`: 0 if that is -inf, since a difference would be NaN."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def add_scores(most, total, scores):
    """Return (the rows' new maxima, new sums, weights of a block of scores, factor of what was summed before).

    most, total: [rows], at first -inf and 0; scores: [rows, keys], -inf where masked. Weights are relative to the
    maximum; a row without a key has weights of 0.
    """
    higher = tl.maximum(most, tl.max(scores, 1))
    base = finite_or_zero(higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    return higher, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def log_sum(most, total):
    """Return the logarithm of the sum of rows' exponentials, 0 for a row without a key."""
    return tl.where(total == 0.0, 0.0, most + tl.log2(total))
