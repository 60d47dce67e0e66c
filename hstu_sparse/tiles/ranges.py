"""Define the mask in kernels: which pairs are visible, and the ranges of blocks that a tile iterates over.

core/mask.py defines the mask. t and s: the indices of queries and keys in their sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.core.mask import Mask


class Extension(NamedTuple):
    """The options of a mask besides candidates and window, as compile-time constants."""

    CONTEXT: bool
    SEES_ALL: bool
    GROUP: int
    PREFIX: int

    @classmethod
    def of(cls, mask: Mask, used: str | None) -> "Extension | None":
        """Return the extension of a mask; None if `used`, the name of an option in use, is None."""
        if used is None:
            return None
        return cls(mask.num_context is not None, *mask[3:])


class Sequence(NamedTuple):
    """A sequence: its length, the length of its history (the tokens before all candidates) and its window, in tokens.

    Functions that take a sequence also take the kernel's `Extension`, or None.
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
def has_context(extension):
    """Return whether sequences have context."""
    return extension is not None and extension.CONTEXT


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
def token_position(t, sequence, HAS_TARGETS: tl.constexpr, extension: tl.constexpr = None):
    """Return a token's position plus a constant of the sequence, so that the result for an event is its index."""
    history = sequence.history
    if HAS_TARGETS:
        first = t
        t = tl.minimum(t, history)
        if extension is not None:  # noqa: SIM102
            if extension.GROUP > 1:
                t += tl.maximum(first - history, 0) % extension.GROUP
    if has_context(extension):
        t = tl.maximum(t, sequence.context - 1)
    return t


@triton.jit
def prefix_tokens(sequence, extension: tl.constexpr):
    """Return the number of tokens at the sequence's begin that are visible outside the window: context and prefix."""
    tokens = sequence.length * 0
    if extension is not None:
        tokens += extension.PREFIX
        if has_context(extension):
            tokens += sequence.context
    return tokens


@triton.jit
def context_rows(first_key, sequence, BLOCK_M: tl.constexpr, extension: tl.constexpr):
    """Return the end of the context queries, rounded up to BLOCK_M, if SEES_ALL lets them see `first_key`; else 0."""
    rows = sequence.length * 0
    if has_context(extension):  # noqa: SIM102
        if extension.SEES_ALL:
            rows = (sequence.context + BLOCK_M - 1) // BLOCK_M * BLOCK_M
            rows = tl.where(first_key < sequence.history, rows, 0)
    return rows


@triton.jit
def visible(t, s, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, extension: tl.constexpr = None):
    """Return the mask of the pairs (t, s); t and s broadcast against each other."""
    mask = (s <= t) & (t < sequence.length)
    history = sequence.history
    if HAS_TARGETS:
        if extension is not None:
            mask = mask & ((s < history) | (s >= t - tl.maximum(t - history, 0) % extension.GROUP))
        else:
            mask = mask & ((s < history) | (s == t))
    if HAS_WINDOW:
        if extension is not None:
            query = token_position(t, sequence, HAS_TARGETS, extension)
            key = token_position(s, sequence, HAS_TARGETS, extension)
            mask = mask & ((query - key < sequence.window_size) | (s < prefix_tokens(sequence, extension)))
        else:
            mask = mask & (tl.minimum(t, history) - tl.minimum(s, history) < sequence.window_size)
    if has_context(extension):
        seen = history if extension.SEES_ALL else sequence.context
        mask = mask | ((t < sequence.context) & (s < seen))
    return mask


@triton.jit
def key_ranges(
    first_row, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, extension: tl.constexpr = None,
):  # fmt: skip
    """Return (begin, full, diagonal, end) of the keys that a tile of queries sees, multiples of BLOCK_N except `end`.

    Only the keys full .. diagonal need no mask. Keys of `prefix_tokens` may also be visible before `begin`.
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
        if extension is not None:
            last += extension.GROUP - 1
        full = tl.maximum(tl.minimum(end - 1, last) - window_size + 1 + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        diagonal = tl.maximum(diagonal, begin)
        full = tl.minimum(tl.maximum(full, begin), diagonal)
    if has_context(extension):
        # Blocks of context need the mask: without it, loops would use the indices of context tokens as positions.
        full = tl.maximum(full, (sequence.context + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full = tl.minimum(full, diagonal)
        seen = history if extension.SEES_ALL else sequence.context
        end = tl.where(first_row < sequence.context, tl.maximum(end, seen), end)
    return begin, full, diagonal, end


@triton.jit
def query_ranges(
    first_row, sequence, HAS_TARGETS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, extension: tl.constexpr = None,
):  # fmt: skip
    """Return (begin, full, free, end) of the queries that see a tile of keys, multiples of BLOCK_M except `end`.

    Only the queries full .. free need no mask. Context queries that see everything come before `begin`: `context_rows`.
    """
    length, history, window_size = sequence.length, sequence.history, sequence.window_size
    end = length
    last_key = first_row + BLOCK_N - 1
    full = (last_key + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    free = length // BLOCK_M * BLOCK_M
    if HAS_TARGETS:
        if first_row >= history:
            end = tl.minimum(first_row + BLOCK_N, length)
            if extension is not None:
                end = tl.minimum(first_row + BLOCK_N + (extension.GROUP - 1), length)
        if last_key >= history:
            free = 0
    if HAS_WINDOW:
        seen_last = tl.minimum(last_key, history - 1) + window_size
        last = history
        if extension is not None:
            last += extension.GROUP - 1
            # Every later query sees a key of the prefix: both bounds move past the last query.
            prefix = prefix_tokens(sequence, extension)
            seen_last = tl.where(first_row < prefix, length + window_size, seen_last)
            window_size = tl.where(last_key < prefix, length + window_size, window_size)
        if seen_last <= history:
            end = tl.minimum(end, tl.maximum(seen_last, tl.minimum(first_row + BLOCK_N, length)))
        if last - first_row >= window_size:
            free = tl.minimum(free, (first_row + window_size) // BLOCK_M * BLOCK_M)
    if has_context(extension):
        beyond = (sequence.context + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        full = tl.where(first_row < sequence.context, tl.maximum(full, beyond), full)
    full = tl.minimum(full, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    begin = first_row // BLOCK_M * BLOCK_M
    if has_context(extension):
        begin = tl.where(first_row < sequence.context, 0, begin)
    return begin, full, tl.maximum(tl.minimum(free, end), full), end
