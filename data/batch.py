"""Define `Batch`, the input of models: concatenated sequences, and the layout of its fields.

Letters: T tokens of the batch, B sequences, S values of a jagged field.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.ring.plan import RingPlan


class Layout(NamedTuple):
    """The layout of a tensor of a batch.

    kind     the first dimension: tokens (T), sequences (B), values (S) or offsets (B+1)
    padding  the value of padding
    offsets  for values, the name of the field with their offsets
    """

    kind: Literal["token", "sequence", "values", "offsets"]
    padding: float = 0
    offsets: str | None = None


def per_token(padding: float = 0) -> dict[str, Layout]:
    """Return the metadata of a field [T, ...]: `field(metadata=per_token(padding=-1))`."""
    return {"layout": Layout("token", padding)}


def per_sequence(padding: float = 0) -> dict[str, Layout]:
    """Return the metadata of a field [B, ...]."""
    return {"layout": Layout("sequence", padding)}


def jagged(offsets: str, padding: float = 0) -> dict[str, Layout]:
    """Return the metadata of a field [S, ...] that is jagged by the field named `offsets`."""
    return {"layout": Layout("values", padding, offsets)}


OFFSETS = {"layout": Layout("offsets")}  # the metadata of a field [B+1], first 0, not descending


class Cut(NamedTuple):
    """Facts about the whole batch, for a rank that has only some tokens of each sequence (training/ranks/processes.py).

    index      [T] int64, the index of each token of this rank in the whole batch
    positions  [T] int64, the position of each token in its whole sequence
    origins    [B] int64, the time of the first event of each whole sequence
    plan       the placement of tokens on the ranks of a ring; None if ranks divide heads
    group      the process group of the ranks
    targets    the targets of the whole batch; None in a service
    uncut      the whole batch, for attention, if ranks divide heads; None in a ring
    tokens     the number of consecutive tokens of each rank, if ranks divide heads
    """

    index: Tensor  # type: ignore[assignment]  # a tuple has a method of that name
    positions: Tensor
    origins: Tensor
    plan: RingPlan | None
    group: Any
    targets: Tensor = None  # type: ignore[assignment]
    uncut: Batch | None = None
    tokens: tuple[int, ...] = ()


class Whole(NamedTuple):
    """Facts about the batch of all ranks, for a rank that has only some of its sequences.

    step       the training step of the batch, from 0
    tokens     the number of tokens on all ranks
    imbalance  the greatest predicted work of a rank divided by the mean over ranks
    """

    step: int
    tokens: int
    imbalance: float


@dataclass
class Batch:
    """B sequences, concatenated.

    item_ids          [T] int64, the inputs
    timestamps        [T] int64, the times of the inputs in seconds (zeros if the data have none)
    target_ids        [T] int64, the item after each input; -1 for tokens without a target and for padding
    query_timestamps  [T] int64, the times of the targets in seconds
    seq_offsets       [B+1] int64, first 0, last T
    users             [B] int64, user index
    actions           [T] int64, the actions of the inputs, or None
    seen_items        [S] int64 or None: the items of each user's whole history before the target of the last position,
                      including those before the window, with duplicates
    seen_offsets      [B+1] int64 or None
    relevant_items    [R] int64 or None: the items to rank at the last position of each sequence; None: the target of
                      that position
    relevant_offsets  [B+1] int64 or None
    real              [T] bool: True for tokens of the data, False for padding; by default all True
    user_features     [B, F, L] int64 or None: the table rows of each feature of users, padded with -1
    event_features    [T, F, L] int64 or None: the same for events
    rows              [T] int64 or None: the index of each token in the batch of all ranks (see `whole`)
    has_action        [T] bool or None: whether a token includes its event's action; None: the model includes the action
                      of all tokens or of none
    num_targets       [B] int64 or None: the number of candidates, the last tokens of each sequence. They all have the
                      position of the first one, and each attends to the tokens before the candidates and to itself
    num_context       int, the number of tokens at the front of each sequence that are features of its user
                      (`with_context`)
    phase             int on the host, the training step at which the current phase of training began; by default
                      greater than any step. Modules whose behaviour changes at a certain step compare that step
                      with `phase`
    cut               a `Cut` if the batch has this rank's tokens of sequences that ranks share, else None
    heads             the process group of the ranks that divide attention's heads; None if this rank has all heads
    whole             a `Whole` if the batch has some of the sequences of a larger batch, else None

    The metadata of each tensor field is its layout, which moving, padding, overwriting and cutting use, also for fields
    of subclasses.

    Examples:
        >>> ids, times = torch.tensor([3, 1, 2, 0, 1]), torch.tensor([10, 20, 30, 5, 7])
        >>> batch = Batch(ids, times, ids, times, seq_offsets=torch.tensor([0, 3, 5]), users=torch.tensor([4, 6]))
        >>> batch.num_tokens, batch.num_sequences, batch.longest(50)  # 50 on a GPU
        (5, 2, 3)
        >>> batch.positions.tolist(), batch.origins.tolist()
        ([0, 1, 2, 0, 1], [10, 5])
        >>> batch.sequences(1, 2).item_ids.tolist(), batch.to("cpu").users.tolist()
        ([0, 1], [4, 6])
        >>> padded = batch.padded(tokens=8, sequences=3, longest=4)
        >>> padded.seq_offsets.tolist(), padded.real.tolist()
        ([0, 3, 5, 8], [True, True, True, True, True, False, False, False])
        >>> batch.once("lengths", lambda: batch.seq_offsets.diff()).tolist()
        [3, 2]
    """

    item_ids: Tensor = field(metadata=per_token())
    timestamps: Tensor = field(metadata=per_token())
    target_ids: Tensor = field(metadata=per_token(padding=-1))
    query_timestamps: Tensor = field(metadata=per_token())
    seq_offsets: Tensor = field(metadata=OFFSETS)
    users: Tensor = field(metadata=per_sequence())
    actions: Tensor | None = field(default=None, metadata=per_token())
    seen_items: Tensor | None = field(default=None, metadata=jagged("seen_offsets"))
    seen_offsets: Tensor | None = field(default=None, metadata=OFFSETS)
    relevant_items: Tensor | None = field(default=None, metadata=jagged("relevant_offsets"))
    relevant_offsets: Tensor | None = field(default=None, metadata=OFFSETS)
    real: Tensor = field(default=None, metadata=per_token(padding=False))  # type: ignore[assignment]
    user_features: Tensor | None = field(default=None, metadata=per_sequence(padding=-1))
    event_features: Tensor | None = field(default=None, metadata=per_token(padding=-1))
    rows: Tensor | None = field(default=None, metadata=per_token())
    has_action: Tensor | None = field(default=None, metadata=per_token(padding=False))
    num_targets: Tensor | None = field(default=None, metadata=per_sequence())
    num_context: int = 0
    phase: int = sys.maxsize
    cut: Cut | None = None
    heads: Any = None
    whole: Whole | None = None
    # Results of `once`. A copy of the batch has none, so that they live for one forward pass.
    _shared: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.real is None:
            self.real = torch.ones(self.num_tokens, dtype=torch.bool, device=self.item_ids.device)

    def once(self, key: Hashable, compute: Callable[[], object]) -> object:
        """Return compute(), which depends only on the batch and `key`; it is called once and its result is stored."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens, padding included."""
        return self.item_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return self.users.shape[0]

    def longest(self, most: int) -> int:
        """Return the greatest number of tokens of a sequence, or on a GPU `most`, so as not to wait for the device."""
        if self.seq_offsets.is_cuda:
            return most
        if self.num_sequences == 1:  # torch.export cannot read lengths
            return self.num_tokens
        return int(self.seq_offsets.diff().max()) if self.num_sequences else 0

    @property
    def positions(self) -> Tensor:
        """The position of each token in its (whole) sequence, [T] int64.

        If there are context tokens, they have position 0, and the first event has position 1.
        """
        if self.cut is not None:
            return self.cut.positions
        sequences = sequence_ids(self.seq_offsets, self.num_tokens)
        places = torch.arange(self.num_tokens, device=sequences.device) - self.seq_offsets[sequences]
        if self.num_targets is not None:
            places = torch.minimum(places, (self.seq_offsets.diff() - self.num_targets)[sequences])
        return (places - self.num_context + 1).clamp(min=0) if self.num_context else places

    @property
    def with_event_positions(self) -> Batch:
        """The batch with positions that do not count context tokens, for embeddings.

        Only a rank's part of a batch changes: other batches get context tokens after their events are embedded.
        """
        if self.cut is None or not self.num_context:
            return self
        return dataclasses.replace(self, cut=self.cut._replace(positions=(self.cut.positions - 1).clamp(min=0)))

    @property
    def moved(self) -> bool:
        """Whether `positions` differ from the indices of tokens in the batch's sequences."""
        return self.cut is not None or self.num_targets is not None or self.num_context > 0

    @property
    def context_counts(self) -> Tensor | None:
        """The number of context tokens of each sequence, [B] int64; None if there are none."""
        return torch.full_like(self.users, self.num_context) if self.num_context else None

    @property
    def origins(self) -> Tensor:
        """The time of the first event of each (whole) sequence, [B] int64; arbitrary for an empty one."""
        if self.cut is not None:
            return self.cut.origins
        starts = self.seq_offsets[:-1].clamp(max=max(self.num_tokens - 1, 0))
        return self.timestamps[starts] if self.num_tokens else self.timestamps.new_zeros(starts.shape)

    @property
    def num_values(self) -> dict[str, int]:
        """The size S of each jagged field, by the name of its offsets."""
        return {layout.offsets: len(x) for _, x, layout in self._tensors() if layout.offsets is not None}

    def _tensors(self) -> Iterator[tuple[str, Tensor, Layout]]:
        """Yield (name, value, layout) of each tensor field; TypeError for a field without a layout."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, Tensor):
                if "layout" not in spec.metadata:
                    raise TypeError(f"{type(self).__name__}.{spec.name} is a tensor, but its field has no layout")
                yield spec.name, value, spec.metadata["layout"]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        if self.cut is not None:
            raise ValueError(
                "a rank's part of a batch cannot be moved or padded: move or pad the whole batch before cutting it"
            )
        mapped: dict[str, Any] = {name: function(value) for name, value, _ in self._tensors()}
        return dataclasses.replace(self, **mapped)

    def to(self, device, non_blocking: bool = False) -> Batch:
        """Return the same batch on another device; asynchronous from pinned memory with `non_blocking`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the same batch in pinned memory."""
        return self._map(Tensor.pin_memory)

    def part(self, index: Tensor, seq_offsets: Tensor) -> Batch:
        """Return the same sequences with only the tokens `index` [T'], jagged by `seq_offsets` [B+1]."""
        chosen: dict[str, Any] = {
            name: value.index_select(0, index) for name, value, layout in self._tensors() if layout.kind == "token"
        }
        return dataclasses.replace(self, **chosen | {"seq_offsets": seq_offsets})

    def with_context(self, count: int) -> tuple[Batch, Tensor]:
        """Return (the batch with `count` context tokens before each sequence, the new indices [T] of its tokens).

        Context tokens have the time of the sequence's first event, and values of padding otherwise.
        """
        sequences = sequence_ids(self.seq_offsets, self.num_tokens)
        places = torch.arange(self.num_tokens, device=sequences.device) + count * (sequences + 1)
        total = self.num_tokens + count * self.num_sequences
        wider: dict[str, Any] = {
            name: x.new_full((total, *x.shape[1:]), layout.padding).index_copy_(0, places, x)
            for name, x, layout in self._tensors()
            if layout.kind == "token"
        }
        number = torch.arange(self.num_sequences + 1, device=places.device)
        wider["seq_offsets"] = offsets = self.seq_offsets + count * number
        front = (offsets[:-1, None] + number.new_tensor(range(count))).flatten()
        for name in ("timestamps", "query_timestamps"):
            wider[name].index_copy_(0, front, self.origins.repeat_interleave(count, output_size=len(front)))
        return dataclasses.replace(self, num_context=count, **wider), places

    def as_padding(self) -> Batch:
        """Return the same tokens as padding: not real and without targets, so that they do not count in any loss."""
        cleared = {"real"} | {name for name, _, layout in self._tensors() if layout == Layout("token", -1)}
        filled: dict[str, Any] = {
            name: torch.full_like(x, layout.padding) for name, x, layout in self._tensors() if name in cleared
        }
        return dataclasses.replace(self, **filled)

    def sequences(self, begin: int, end: int) -> Batch:
        """Return the sequences begin .. end - 1. Synchronises with the device."""
        parts = {"sequence": slice(begin, end), "offsets": slice(begin, end + 1)}
        parts["token"] = slice(*self.seq_offsets[[begin, end]].tolist())
        chosen: dict[str, Any] = {}
        for name, x, layout in self._tensors():
            part = parts.get(layout.kind)
            if part is None:
                part = slice(*getattr(self, str(layout.offsets))[[begin, end]].tolist())
            chosen[name] = x[part] - x[begin] if layout.kind == "offsets" else x[part]
        return dataclasses.replace(self, **chosen)

    def padded(self, tokens: int, sequences: int, longest: int, values: Mapping[str, int] | None = None) -> Batch:
        """Return the batch padded to the fixed sizes T = `tokens`, B = `sequences` and `values` (as `num_values`).

        Sequences of at most `longest` tokens of padding are added, then empty ones. The first added sequence gets the
        padding of the other jagged fields. Fields that are not in `values` keep their size. ValueError if the batch
        does not fit.
        """
        sizes = self.num_values | dict(values or {}) | {"seq_offsets": tokens}
        more, rows = tokens - self.num_tokens, sequences - self.num_sequences
        if more < 0 or rows < 0 or more > rows * longest:
            raise ValueError(
                f"cannot pad {self.num_tokens} tokens in {self.num_sequences} sequences to {tokens} in {sequences}, at "
                f"most {longest} each"
            )
        for name, count in self.num_values.items():
            if sizes[name] < count or (sizes[name] > count and not rows):
                raise ValueError(f"cannot pad {count} values of {name} to {sizes[name]} with {rows} more sequences")
        # `overwrite` writes the values.
        filled: dict[str, Any] = {}
        for name, x, layout in self._tensors():
            length = {"token": tokens, "sequence": sequences, "offsets": sequences + 1}.get(layout.kind)
            filled[name] = x.new_zeros(sizes[layout.offsets or ""] if length is None else length, *x.shape[1:])
        batch = dataclasses.replace(self, **filled)
        batch.overwrite(self, longest)
        return batch

    def overwrite(self, other: Batch, longest: int) -> None:
        """Write `other`, padded to this batch's sizes, into this batch in place."""
        sizes = self.num_values | {"seq_offsets": self.num_tokens}
        for name, target, layout in self._tensors():
            source = getattr(other, name)
            target[: len(source)].copy_(source)
            padding = target[len(source) :]
            if layout.kind != "offsets":
                padding.fill_(layout.padding)
            elif name != "seq_offsets":
                padding.fill_(sizes[name])
            elif len(padding):
                first = other.num_tokens + longest
                torch.arange(first, first + longest * len(padding), longest, out=padding).clamp_(max=self.num_tokens)
        self.phase = other.phase
