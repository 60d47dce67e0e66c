"""Define the mask of HSTU attention, and the positions of tokens in it.

Letters: B sequences; n tokens of a sequence: c context tokens, then events, then m candidates; h = n - m; W window
size, G candidates of a group, P events of the prefix.

Positions: 0 for all context tokens, then 1, 2, ... for events. Each group of candidates continues after the last event.

Query t attends to key s
    if t < c:   if s < c; with `context_sees_all` if s < h
    if t >= c:  if s <= t, s is not a candidate of another group, and at least one holds: s < c + P, the positions of s
                and t differ by less than W, or there is no window

Source: the contextual sequences of Meta's generative-recommenders, the target groups of NVIDIA's recsys-examples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.core.jagged import readable, sequence_ids
from hstu_sparse.core.validation import INTEGER, check_bool, check_int, check_targets, check_tensor


class Mask(NamedTuple):
    """The options of the mask, which are arguments of the public functions."""

    num_targets: Tensor | None = None  # [B], m of each sequence
    num_context: Tensor | None = None  # [B], c of each sequence
    window_size: int = 0  # W, 0 for none
    context_sees_all: bool = False
    target_group_size: int = 1  # G
    full_attention_prefix: int = 0  # P

    @property
    def extension(self) -> str | None:
        """The name of the first option in use besides `num_targets` and `window_size`, or None."""
        used = self.num_context is not None, self.target_group_size > 1, self.full_attention_prefix > 0
        names = "num_context", "target_group_size", "full_attention_prefix"
        return next((name for name, use in zip(names, used) if use), None)

    @property
    def first_option(self) -> str | None:
        """The name of the first option in use besides `window_size`, or None."""
        return self.extension if self.num_targets is None else "num_targets"

    def for_sequences(self, sequences: Tensor | int) -> "Mask":
        """Return the mask of the sequences with these indices; an int removes the dimension."""
        numbers = (None if x is None else x[sequences] for x in self[:2])
        return Mask(*numbers, *self[2:])


# The torch.library schema of a Mask.
MASK = (
    "Tensor? num_targets, Tensor? num_context, SymInt window_size, bool context_sees_all, int target_group_size, "
    "int full_attention_prefix"
)


def check_mask(mask: Mask, seq_offsets: Tensor) -> Mask:
    """Validate the options, and the values of `readable` tensors; reset options that have no effect."""
    check_int("window_size", mask.window_size, 0)
    check_bool("context_sees_all", mask.context_sees_all)
    check_int("target_group_size", mask.target_group_size, 1, 2**31 - 1)
    check_int("full_attention_prefix", mask.full_attention_prefix, 0, 2**31 - 1)
    check_targets(mask.num_targets, seq_offsets)
    context, targets = mask.num_context, mask.num_targets
    if context is not None:
        sizes = {"B": seq_offsets.shape[0] - 1}
        check_tensor("num_context", context, "B", sizes, dtype=INTEGER, device=seq_offsets.device)
        if readable(context) and readable(seq_offsets) and (targets is None or readable(targets)):
            history = seq_offsets.diff() if targets is None else seq_offsets.diff() - targets
            for b, (number, most) in enumerate(zip(context.tolist(), history.tolist())):
                if not 0 <= number <= most:
                    bound = "its length" if targets is None else "its length minus num_targets"
                    raise ValueError(f"num_context of sequence {b} must be from 0 to {most}, {bound}, got {number}")
    if mask.context_sees_all and mask.num_context is None:
        raise ValueError("context_sees_all=True needs num_context [B], got None")
    if mask.target_group_size > 1 and mask.num_targets is None:
        raise ValueError(f"target_group_size={mask.target_group_size} needs num_targets [B], got None")
    return mask if mask.window_size else mask._replace(full_attention_prefix=0)


def visible_pairs(mask: Mask, token: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the position of t minus that of s, whether t attends to s) of all pairs of tokens: [B, n, n].

    Tokens of a sequence do not attend to tokens past its end.

    Args:
        token: 0 to n - 1.
        lengths: [B], or [] with mask tensors []; the results are then [n, n].
    """
    position, history, first = token, lengths[..., None], token
    if mask.num_targets is not None:
        history = history - mask.num_targets[..., None]
        in_group = (token - history).clamp(min=0) % mask.target_group_size
        position, first = torch.minimum(token, history) + in_group, token - in_group
    context = None if mask.num_context is None else mask.num_context[..., None]
    if context is not None:
        position = torch.maximum(position, context - 1)  # the position plus a constant
    distance = position[..., :, None] - position[..., None, :]
    visible = token[:, None] >= token
    if mask.num_targets is not None:
        visible = visible & ((token < history)[..., None, :] | (token >= first[..., :, None]))
    if mask.window_size > 0:
        near, prefix = distance < mask.window_size, mask.full_attention_prefix
        if context is not None or prefix:
            near = near | (token < prefix + (0 if context is None else context))[..., None, :]
        visible = visible & near
    if context is not None:
        seen = token < (history if mask.context_sees_all else context)
        visible = visible | ((token < context)[..., :, None] & seen[..., None, :])
    return distance, visible


def context_times(bias: RelativeBias, num_context: Tensor | None, seq_offsets: Tensor) -> RelativeBias:
    """Return the bias with the time of the first event as both timestamps of context tokens.

    A sequence without events uses the time of its first candidate or, without candidates, its last token.
    """
    times, query_times = bias.timestamps, bias.query_timestamps
    if num_context is None or times is None or query_times is None:
        return bias
    sequence = sequence_ids(seq_offsets, times.shape[0])
    first_event = (seq_offsets[:-1] + num_context)[sequence]
    time = times[torch.minimum(first_event, seq_offsets[1:][sequence] - 1)]
    is_context = torch.arange(times.shape[0], device=times.device) < first_event
    return bias._replace(
        timestamps=torch.where(is_context, time, times), query_timestamps=torch.where(is_context, time, query_times)
    )
