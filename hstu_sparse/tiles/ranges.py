"""Define what tokens see in the dense kernels: the mask of pairs, and the ranges that a tile walks over.

core/mask.py has the definition. t and s: the positions of queries and keys in their sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.core.mask import Mask


class Extension(NamedTuple):
    """The options of a mask besides candidates and window, which kernels are compiled for."""

    CONTEXT: bool
    SEES_ALL: bool
    GROUP: int
    PREFIX: int

    @classmethod
    def of(cls, mask: Mask, used: str | None) -> "Extension | None":
        """Return the extension, None if no option is `used`."""
        if used is None:
            return None
        return cls(mask.num_context is not None, *mask[3:])


class Sequence(NamedTuple):
    """One sequence: its number of tokens, of tokens before all candidates, and the window (in tokens).

    Functions take the kernel's `Extension`, or None, as `more`.
    """

    length: tl.tensor
    history: tl.tensor
    window_size: tl.tensor


class ContextSequence(NamedTuple):
    """A `Sequence` with the number of its context tokens."""

    length: tl.tensor
    history: tl.tensor
    window_size: tl.tensor
    context: tl.tensor


@triton.constexpr_function
def has_context(more):
    """Return whether sequences have context."""
    return more is not None and more.CONTEXT


@triton.jit
def find_sequence(b, seq_offsets, num_targets, window_size, num_context=None):
    """Return (first token, Sequence) of sequence b; it has no candidates if `num_targets` is None."""
    begin = tl.load(seq_offsets + b).to(tl.int64)
    length = (tl.load(seq_offsets + b + 1) - begin).to(tl.int32)
    history = length
    if num_targets is not None:
        history = length - tl.load(num_targets + b).to(tl.int32)
    if num_context is not None:
        return begin, ContextSequence(length, history, window_size, tl.load(num_context + b).to(tl.int32))
    else:
        return begin, Sequence(length, history, window_size)


@triton.jit
def place(t, sequence, HAS_TARGETS: tl.constexpr, more: tl.constexpr = None):
    """Return a token's position, but for a constant of the sequence: its number, if it is an event."""
    history = sequence.history
    if HAS_TARGETS:
        first = t
        t = tl.minimum(t, history)
        if more is not None:  # noqa: SIM102
            if more.GROUP > 1:
                t += tl.maximum(first - history, 0) % more.GROUP
    if has_context(more):
        t = tl.maximum(t, sequence.context - 1)
    return t


@triton.jit
def prefix_tokens(sequence, more: tl.constexpr):
    """Return how many tokens at the sequence's begin are seen whatever the window, if there is a prefix or context."""
    tokens = sequence.length * 0
    if more is not None:
        tokens += more.PREFIX
        if has_context(more):
            tokens += sequence.context
    return tokens


@triton.jit
def front_rows(first_key, sequence, BLOCK_M: tl.constexpr, more: tl.constexpr):
    """Return the end, a multiple of BLOCK_M, of the context that sees keys from `first_key` on because it sees all."""
    rows = sequence.length * 0
    if has_context(more):  # noqa: SIM102
        if more.SEES_ALL:
            rows = (sequence.context + BLOCK_M - 1) // BLOCK_M * BLOCK_M
            rows = tl.where(first_key < sequence.history, rows, 0)
    return rows


@triton.jit
def visible(t, s, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, more: tl.constexpr = None):
    """Return the mask of the pairs (t, s), two tensors that broadcast against each other."""
    mask = (s <= t) & (t < sequence.length)
    history = sequence.history
    if HAS_TARGETS:
        if more is not None:
            mask = mask & ((s < history) | (s >= t - tl.maximum(t - history, 0) % more.GROUP))
        else:
            mask = mask & ((s < history) | (s == t))
    if HAS_WINDOW:
        if more is not None:
            near = place(t, sequence, HAS_TARGETS, more) - place(s, sequence, HAS_TARGETS, more) < sequence.window_size
            mask = mask & (near | (s < prefix_tokens(sequence, more)))
        else:
            mask = mask & (tl.minimum(t, history) - tl.minimum(s, history) < sequence.window_size)
    if has_context(more):
        seen = history if more.SEES_ALL else sequence.context
        mask = mask | ((t < sequence.context) & (s < seen))
    return mask


@triton.jit
def key_ranges(
    first_row, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, more: tl.constexpr = None,
):  # fmt: skip
    """Return (begin, full, diagonal, end), multiples of BLOCK_N: only the keys in full .. diagonal need no mask.

    Keys of `prefix_tokens` may be seen before `begin`, too.
    """
    length, history, window_size = sequence.length, sequence.history, sequence.window_size
    end = tl.minimum(first_row + BLOCK_M, length)
    diagonal = first_row + 1
    if HAS_TARGETS:
        diagonal = tl.minimum(diagonal, history)
    diagonal = diagonal // BLOCK_N * BLOCK_N
    begin = 0
    full = 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.minimum(first_row, history) - window_size + 1, 0) // BLOCK_N * BLOCK_N
        last = history
        if more is not None:
            last += more.GROUP - 1
        full = tl.maximum(tl.minimum(end - 1, last) - window_size + 1 + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum(diagonal, begin)
        full = tl.minimum(tl.maximum(full, begin), diagonal)
    if has_context(more):
        # Blocks with context need no mask for most queries, but its positions are not its numbers.
        full = tl.maximum(full, (sequence.context + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full = tl.minimum(full, diagonal)
        seen = history if more.SEES_ALL else sequence.context
        end = tl.where(first_row < sequence.context, tl.maximum(end, seen), end)
    return begin, full, diagonal, end


@triton.jit
def query_ranges(
    first_row, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, more: tl.constexpr = None,
):  # fmt: skip
    """Return (begin, full, free, end), multiples of BLOCK_M except `end`: only queries in full .. free need no mask.

    Context that sees all comes before `begin`.
    """
    length, history, window_size = sequence.length, sequence.history, sequence.window_size
    end = length
    last_key = first_row + BLOCK_N - 1
    full = (last_key + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    free = length // BLOCK_M * BLOCK_M
    if HAS_TARGETS:
        if first_row >= history:
            end = tl.minimum(first_row + BLOCK_N, length)
            if more is not None:
                end = tl.minimum(first_row + BLOCK_N + (more.GROUP - 1), length)
        if last_key >= history:
            free = 0
    if HAS_WINDOW:
        seen_last = tl.minimum(last_key, history - 1) + window_size
        last = history
        if more is not None:
            last += more.GROUP - 1
            # For tiles with keys of the prefix, `seen_last` and `window_size` are beyond every query.
            prefix = prefix_tokens(sequence, more)
            seen_last = tl.where(first_row < prefix, length + window_size, seen_last)
            window_size = tl.where(last_key < prefix, length + window_size, window_size)
        if seen_last <= history:
            end = tl.minimum(end, tl.maximum(seen_last, tl.minimum(first_row + BLOCK_N, length)))
        if last - first_row >= window_size:
            free = tl.minimum(free, (first_row + window_size) // BLOCK_M * BLOCK_M)
    if has_context(more):
        beyond = (sequence.context + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        full = tl.where(first_row < sequence.context, tl.maximum(full, beyond), full)
    full = tl.minimum(full, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    begin = first_row // BLOCK_M * BLOCK_M
    if has_context(more):
        begin = tl.where(first_row < sequence.context, 0, begin)
    return begin, full, tl.maximum(tl.minimum(free, end), full), end
