"""Assemble the batches of a split from the flat columns of a data set, without Python loops over rows.

Letters: T tokens of the batch, B sequences, S seen items of the batch, M samples of the split.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from data.augment import Augment, augmented
from data.balance import Deal
from data.batch import Batch, Whole
from data.splits import Split
from data.types import DataError, Dataset

CHUNK_BATCHES = 50  # batches within which group_by_length sorts: similar lengths, but still well shuffled


def _columns(dataset: Dataset) -> dict[str, Tensor | None]:
    """Return the columns as CPU tensors that share the memory or memory map of the data set's arrays."""
    columns = {"items": dataset.items, "timestamps": dataset.timestamps, "actions": dataset.actions}
    columns |= {"user_rows": dataset.user_rows, "event_rows": dataset.event_rows}
    return {name: None if array is None else torch.from_numpy(array) for name, array in columns.items()}


# Training, validation and test share one copy of the columns on each device.
_on_device: WeakKeyDictionary[Dataset, dict[torch.device, dict]] = WeakKeyDictionary()


def _device_columns(dataset: Dataset, device: torch.device) -> dict[str, Tensor | None] | None:
    """Return the columns on a CUDA device, or None if they would take more than a quarter of its free memory."""
    cached = _on_device.setdefault(dataset, {})
    if device not in cached:
        columns = _columns(dataset)
        size = sum(8 * c.numel() for c in columns.values() if c is not None)
        if size > torch.cuda.mem_get_info(device)[0] // 4:
            return None
        # As int64, the type of batches.
        cached[device] = {name: None if c is None else c.to(device).long() for name, c in columns.items()}
    return cached[device]


def ranges(begin: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return the concatenated ranges of offsets[i+1] - offsets[i] numbers from begin[i] on: [total] int64.

    It does not synchronise with the device.
    """
    shift = torch.repeat_interleave(begin - offsets[:-1], offsets[1:] - offsets[:-1], output_size=total)
    return shift + torch.arange(total, device=begin.device)


class Batches:
    """The batches of one split.

    There is no state: `epoch(n)` depends only on (seed, n), so that a resumed run gets the batches of an uninterrupted
    one. The columns are on the device if they take less than a quarter of its free memory; otherwise a batch is
    assembled on the CPU from the memory-mapped file and copied from pinned memory. Neither synchronises with the GPU:
    the order and the lengths are computed on the CPU once an epoch.

    Args:
        batch_size: sequences of a batch; the last batch of an epoch may have fewer.
        group_by_length: put sequences of similar length together, in batches of random order if shuffled.
        with_seen: fill seen_items and seen_offsets.
        augment: options of augmentation; for retrieval only, and not with with_seen.
        deal: the division of batches among ranks; without it, batches have all sequences.

    Examples:
        >>> batches = Batches(dataset, splits.train, batch_size=8, shuffle=False)
        >>> len(batches), [batch.num_sequences for batch in batches.epoch(0)]
        (3, [8, 8, 4])
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        *,
        batch_size: int,
        device: str | torch.device = "cpu",
        seed: int = 0,
        shuffle: bool = True,
        group_by_length: bool = False,
        with_seen: bool = False,
        augment: Augment | None = None,
        deal: Deal | None = None,
    ):
        # A table has num_items rows: another id would later be a cryptic error on a CPU and an abort on a GPU.
        if dataset.num_events and not 0 <= dataset.items.min() <= dataset.items.max() < dataset.num_items:
            raise DataError(
                f"{dataset.name}: item ids must lie in 0..{dataset.num_items - 1}, "
                f"got {dataset.items.min()}..{dataset.items.max()}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.dataset, self.split, self.batch_size, self.seed = dataset, split, batch_size, seed
        self.shuffle, self.group_by_length, self.with_seen = shuffle, group_by_length, with_seen
        self.augment = augment
        self.deal = deal
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        on_device = _device_columns(dataset, self.device) if self.device.type == "cuda" else None
        self._assemble_on = torch.device("cpu") if on_device is None else self.device
        columns = _columns(dataset) if on_device is None else on_device
        counted = None if split.counted is None else torch.from_numpy(split.counted).to(self._assemble_on)
        self._columns = columns | {"counted": counted}
        self._user_begin = dataset.user_offsets[split.users]

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self.split) // self.batch_size)

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (the samples in the order of the epoch [M], the bounds of the batches in it [batches + 1])."""
        samples, size = len(self.split), self.batch_size
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(samples) if self.shuffle else np.arange(samples)
        bounds = np.append(np.arange(0, samples, size), samples)
        if not self.group_by_length or not samples:
            return order, bounds
        chunk = np.arange(samples) // (CHUNK_BATCHES * size)
        order = order[np.lexsort(((self.split.end - self.split.begin)[order], chunk))]
        if not self.shuffle:
            return order, bounds
        batches = rng.permutation(len(bounds) - 1)
        sizes = np.diff(bounds)[batches]
        new_bounds = np.append(0, np.cumsum(sizes))
        rows = np.repeat(bounds[batches] - new_bounds[:-1], sizes) + np.arange(samples)
        return order[rows], new_bounds

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch number `epoch`, from batch number `start` on; skipping batches is free."""
        order, bounds = self._plan(epoch)
        begin, end = self.split.begin[order], self.split.end[order]
        seen_begin, source = self._user_begin[order], self
        if self.augment is not None:
            source, begin, end = self._augmented(self.augment, epoch, seen_begin, begin, end)
        if self.deal is not None:
            yield from source._dealt(epoch, start, order, bounds, begin, end, self.deal)
            return
        # Host copies of the offsets give T and S without a device synchronisation.
        offsets = np.append(0, np.cumsum(self._tokens(begin, end)))
        seen_offsets = np.append(0, np.cumsum(end - 1 - seen_begin)) if self.with_seen else None

        def upload(x):
            return None if x is None else torch.from_numpy(x).to(self._assemble_on)

        scored = None if self.split.scored is None else self.split.scored[order]
        arrays = (self.split.users[order], begin, scored, seen_begin, offsets, seen_offsets)
        on_device = [upload(x) for x in arrays]
        for first, last in zip(bounds[start:-1].tolist(), bounds[start + 1 :].tolist()):
            total = int(offsets[last] - offsets[first])
            seen = 0 if seen_offsets is None else int(seen_offsets[last] - seen_offsets[first])
            batch = source._assemble(first, last, total, seen, *on_device)
            if self.split.targets is not None:
                self._add_targets(batch, order[first:last])
            if self._assemble_on != self.device:
                batch = (batch.pin_memory() if self.device.type == "cuda" else batch).to(self.device, non_blocking=True)
            yield batch

    def _add_targets(self, batch: Batch, samples: np.ndarray) -> None:
        """Fill the relevant items of a batch from the split's targets; samples: [B]."""
        assert self.split.targets is not None and self.split.target_offsets is not None
        begin, end = self.split.target_offsets[samples], self.split.target_offsets[samples + 1]
        offsets = np.append(0, np.cumsum(end - begin))
        events = self.split.targets[np.repeat(begin - offsets[:-1], end - begin) + np.arange(offsets[-1])]
        items = self.dataset.items[events].astype(np.int64)
        device = batch.item_ids.device
        batch.relevant_items, batch.relevant_offsets = (torch.from_numpy(x).to(device) for x in (items, offsets))

    def _augmented(self, augment: Augment, epoch: int, first: np.ndarray, begin: np.ndarray, end: np.ndarray):
        """Return (a copy of these batches with the augmented columns of an epoch, the samples' begins, their ends)."""
        rng = np.random.default_rng([self.seed, epoch, 1])
        *picked, offsets = augmented(augment, rng, first, begin, end)
        events, times = (torch.from_numpy(x).to(self._assemble_on) for x in picked)
        chosen = {"items": events, "actions": events, "event_rows": events, "counted": events, "timestamps": times}
        source = copy.copy(self)
        source._columns = self._columns | {
            name: column.index_select(0, index)
            for name, index in chosen.items()
            if (column := self._columns[name]) is not None
        }
        return source, offsets[:-1], offsets[1:]

    def _dealt(self, epoch: int, start: int, order, bounds, begins, ends, deal: Deal) -> Iterator[Batch]:
        """Yield this rank's parts of the batches from number `start` on.

        begins, ends: [M] the first event of each sample in `order`, and the end of its events.
        """
        for number in range(start, len(bounds) - 1):
            batch_of = slice(bounds[number], bounds[number + 1])
            samples, lengths = order[batch_of], self._tokens(begins[batch_of], ends[batch_of])
            indices, imbalance = deal.local(lengths)
            idle = not len(indices)  # a rank without sequences gets the first one as padding
            indices = np.zeros(1, np.int64) if idle else indices
            starts, samples = np.cumsum(lengths) - lengths, samples[indices]
            offsets = np.append(0, np.cumsum(lengths[indices]))
            begin, end, seen_begin = begins[batch_of][indices], ends[batch_of][indices], self._user_begin[samples]
            seen = np.append(0, np.cumsum(end - 1 - seen_begin)) if self.with_seen else None
            scored = None if self.split.scored is None else self.split.scored[samples]
            arrays = (self.split.users[samples], begin, scored, seen_begin, offsets, seen, starts[indices])
            # Copies from pinned memory are asynchronous.
            pin = self._assemble_on.type == "cuda"
            tensors = [None if x is None else torch.from_numpy(x) for x in arrays]
            moved: Any = (None if x is None else (x.pin_memory() if pin else x).to(self._assemble_on, non_blocking=True)
                     for x in tensors)  # fmt: skip
            *columns, places = moved
            total = int(offsets[-1])
            batch = self._assemble(0, len(indices), total, 0 if seen is None else int(seen[-1]), *columns)
            batch.rows = ranges(places, batch.seq_offsets, total)
            batch = batch.as_padding() if idle else batch
            batch.whole = Whole(epoch * len(self) + number, int(lengths.sum()), imbalance)
            if self._assemble_on != self.device:
                batch = (batch.pin_memory() if self.device.type == "cuda" else batch).to(self.device, non_blocking=True)
            yield batch

    def _tokens(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the number of tokens of samples with the events begin .. end-1, [M]."""
        return end - 1 - begin

    def _assemble(self, first, last, total, seen, users, begin, scored, seen_begin, offsets, seen_offsets) -> Batch:
        columns = self._columns

        def local(offsets):
            return offsets[first : last + 1] - offsets[first]

        def take(name, index):
            column = columns[name]
            return None if column is None else column.index_select(0, index).long()

        seq_offsets = local(offsets)
        now = ranges(begin[first:last], seq_offsets, total)
        targets, counted = take("items", now + 1), columns["counted"]
        if counted is not None:
            targets = torch.where(counted.index_select(0, now + 1), targets, -1)
        batch = Batch(
            item_ids=take("items", now),
            timestamps=take("timestamps", now),
            target_ids=targets,
            query_timestamps=take("timestamps", now + 1),
            seq_offsets=seq_offsets,
            users=users[first:last],
            actions=take("actions", now),
            user_features=take("user_rows", users[first:last]),
            event_features=take("event_rows", now),
        )
        if self.with_seen:
            batch.seen_offsets = local(seen_offsets)
            batch.seen_items = take("items", ranges(seen_begin[first:last], batch.seen_offsets, seen))
        return batch
