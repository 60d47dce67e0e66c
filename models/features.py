"""Embed features of items, users and events with torchrec's tables.

The embedding of a feature is the mean of the rows of its values, zero if it has none; features are added up.

Letters: R rows (tokens, items or users), F features, L greatest number of values of a row, S values, I items, W items
with a training event, E embedding size, T tokens, B sequences.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.batch import Batch
from data.features.new_items import NewItems
from data.features.vocabulary import CALENDAR, FeatureVocabulary, KnownFeature
from data.features.zones import calendar_rows, offsets_of
from hstu_sparse.core.jagged import sequence_ids
from hstu_sparse.layer.sparse_product import SparseProduct
from models.vectors import ItemVectors


def convert_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters to a dtype, fake tensors included (`train.py --plan`), for which `module.to` fails."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(weight.detach().to(dtype)))


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fill `weight` from a normal distribution with standard deviation `std` that is truncated at 2 * std."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class Bags(NamedTuple):
    """The values of a feature of R rows: indices into its table [S], weights [S], the number of values per row [R]."""

    values: Tensor
    weights: Tensor
    lengths: Tensor

    @classmethod
    def from_padded(cls, rows: Tensor) -> "Bags":
        """Build bags from rows [R, L] int64, padded with -1: each bag has L values, those of padding with weight 0."""
        present = rows >= 0
        weights = present / present.sum(1, keepdim=True).clamp(min=1)
        lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int64, device=rows.device)
        return cls(rows.clamp(min=0).flatten(), weights.flatten(), lengths)


class FeatureTables(nn.Module):
    """A table for each feature. Row 0, for unknown values, starts as zeros; other rows are drawn truncated normal."""

    def __init__(self, sizes: dict[str, int], embedding_dim: int, dtype: torch.dtype):
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType  # see models/embedding.py

        super().__init__()
        self.names, self.embedding_dim = list(sizes), embedding_dim

        def start(weight: Tensor) -> None:
            with torch.no_grad():
                truncated_normal_(weight, 0.02)[0] = 0

        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=embedding_dim,
                    num_embeddings=size,
                    feature_names=[name],
                    pooling=PoolingType.SUM,  # the weights make it a mean
                    init_fn=start,
                )
                for name, size in sizes.items()
            ],
            is_weighted=True,
        )
        convert_parameters(self.tables, dtype)

    def whole(self) -> Tensor:
        """Concatenate all tables: [rows of all tables, E]."""
        return torch.cat([self.tables.embedding_bags[name].weight for name in self.names])

    def forward(self, bags: list[Bags], count: int) -> Tensor:
        """Return the sum over features, [R, E]; bags: one for each feature; count: R."""
        return self.each(bags, count).sum(1)

    def each(self, bags: list[Bags], count: int) -> Tensor:
        """Return the embedding of each feature, [R, F, E]; arguments as for `forward`."""
        if not count:  # torchrec needs at least one row
            return next(self.parameters()).new_zeros(0, len(bags), self.embedding_dim)
        from torchrec import KeyedJaggedTensor

        looked_up = self.tables(
            KeyedJaggedTensor(
                keys=self.names,
                values=torch.cat([bag.values for bag in bags]),
                weights=torch.cat([bag.weights for bag in bags]).to(next(self.parameters()).dtype),
                lengths=torch.cat([bag.lengths for bag in bags]),
                stride=count,
                length_per_key=[len(bag.values) for bag in bags],
            )
        )
        return looked_up.values().unflatten(1, (len(bags), self.embedding_dim))


class ValueLists(nn.Module):
    """The values of the features of M items: a constant sparse matrix, so that captured steps have fixed shapes.

    item_rows: (offsets [I+1], rows of its table [S]) of each feature; sizes: the number of rows of each table; items:
    [M] int64, the items' indices.
    """

    def __init__(self, item_rows: Sequence[tuple[np.ndarray, np.ndarray]], sizes: Sequence[int], items: np.ndarray):
        super().__init__()
        holders, rows, weights = [], [], []  # of each entry: the item, the row of the tables, the weight in the mean
        begins = np.append(0, np.cumsum(sizes))
        for begin, (offsets, values) in zip(begins, item_rows):
            lengths = np.diff(offsets)[items]
            ends = np.append(0, np.cumsum(lengths))
            holders.append(np.repeat(np.arange(len(items)), lengths))
            rows.append(begin + values[np.repeat(offsets[items] - ends[:-1], lengths) + np.arange(ends[-1])])
            weights.append(np.repeat(1 / np.maximum(1, lengths), lengths))
        holder, row, weight = (np.concatenate(parts) for parts in (holders, rows, weights))
        self.product = SparseProduct(holder, row, weight, (len(items), begins[-1]))
        self.num_values = len(row)
        self.longest = max(1, int(np.bincount(holder).max(initial=0)))

    def forward(self, tables: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return the sum over features of all items, [M, E] fp32, or of the items at `numbers` [R] int64, [R, E].

        tables: the concatenated tables. The two cases have the same bits.
        """
        if numbers is None:
            return self.product(tables)
        if not self.num_values:
            return tables.new_zeros(len(numbers), tables.shape[1], dtype=torch.float32)
        offsets, rows, weights = self.product.entries
        begin, end = (offsets.index_select(0, numbers + more)[:, None] for more in (0, 1))
        places = begin + torch.arange(self.longest, device=numbers.device)
        inside, places = places < end, places.clamp(max=len(rows) - 1)
        return F.embedding_bag(rows[places], tables.float(), mode="sum", per_sample_weights=weights[places] * inside)


class ItemFeatures(nn.Module):
    """The part of items' representations that is computed from features.

    The number of an item is its id in evaluation, and its index in `trained` in training.

    trained  [W] int64, the items with a training event, ascending
    place    [I] int64, the index of each item in `trained`, -1 for other items
    """

    trained: Tensor
    place: Tensor

    def __init__(self, known: FeatureVocabulary, embedding_dim: int, dtype: torch.dtype, correction: int = 0):
        super().__init__()
        assert known.trained is not None
        sizes = sizes_of(known.of("items"))
        self.tables = FeatureTables(sizes, embedding_dim, dtype) if sizes else None
        trained, items = np.flatnonzero(known.trained), np.arange(len(known.trained))
        self.has_untrained = len(trained) < len(items)
        self.all = self.seen = None
        if sizes:
            self.all = ValueLists(known.item_rows, [*sizes.values()], items)
            # Training has separate lists, so that the features of other items do not change the rounding of its sums.
            self.seen = ValueLists(known.item_rows, [*sizes.values()], trained) if self.has_untrained else self.all
        self.vectors: Any = nn.ModuleList(ItemVectors(one, embedding_dim, correction) for one in known.vectors)
        place = np.where(known.trained, np.cumsum(known.trained) - 1, -1)
        for name, value in (("trained", trained), ("place", place)):
            self.register_buffer(name, torch.from_numpy(value), persistent=False)

    @property
    def lists(self) -> ValueLists | None:
        return self.seen if self.training else self.all

    @property
    def only_trained(self) -> bool:
        """Whether some items have no number."""
        return self.training and self.has_untrained

    def numbers(self, ids: Tensor) -> Tensor:
        """Return the numbers of the items `ids`, in training 0 for an item without a training event (padding)."""
        return self.place[ids].clamp(min=0) if self.training else ids

    def rows(self, item_weight: Tensor) -> Tensor:
        """Return the rows of an item table [I, E] that have numbers: in training [W, E]."""
        return item_weight.index_select(0, self.trained) if self.only_trained else item_weight

    def forward(self, numbers: Tensor | None = None) -> Tensor:
        """Sum the features of all items, [I, E] (in training [W, E]) fp32, or of the items with `numbers` [R], [R, E].

        Except for vectors, the two cases have the same bits.
        """
        parts = [] if self.tables is None or self.lists is None else [self.lists(self.tables.whole(), numbers)]
        items = numbers
        if self.only_trained:
            items = self.trained if numbers is None else self.trained[numbers]
        return functools.reduce(operator.add, [*parts, *(vectors(items) for vectors in self.vectors)])

    def embed_new(self, items: NewItems) -> Tensor:
        """Sum the features of M items that are not in the catalogue: [M, E] fp32."""
        device = self.place.device
        parts = []
        if self.tables is not None:
            whole = self.tables.whole()
            sizes = [len(self.tables.tables.embedding_bags[name].weight) for name in self.tables.names]
            parts.append(ValueLists(items.item_rows, sizes, np.arange(items.count)).to(device)(whole))
        for module, vectors in zip(self.vectors, items.vectors):
            parts.append(module.project(torch.from_numpy(vectors).to(device)))
        return functools.reduce(operator.add, parts)

    def all_is_less(self, count: int) -> bool:
        """Return whether the features of all items have fewer values than the padded features of `count` items."""
        longest, values = (0, 0) if self.lists is None else (self.lists.longest, self.lists.num_values)
        width = sum(vectors.width for vectors in self.vectors)
        items = len(self.trained) if self.only_trained else len(self.place)
        return count * (longest + width) > values + width * items + count


class ContextFeatures(nn.Module):
    """Sum the features of a token's user, event and time: [T, E].

    as_tokens: features of users are separate tokens (`tokens`) and not in the sum.
    """

    before: Tensor
    zone_starts: Tensor
    zone_offsets: Tensor

    def __init__(self, known: FeatureVocabulary, embedding_dim: int, dtype: torch.dtype, as_tokens: bool = False):
        super().__init__()
        self.as_tokens = as_tokens
        users, events = known.of("users"), known.of("events")
        self.calendar = known.calendar
        self.zoned = known.time_zone is not None
        if known.time_zone is not None:
            starts, offsets = offsets_of(known.time_zone)
            self.register_buffer("zone_starts", torch.from_numpy(starts), persistent=False)
            self.register_buffer("zone_offsets", torch.from_numpy(offsets), persistent=False)
        self.num_users, self.num_events = len(users), len(events)
        self.users = FeatureTables(sizes_of(users), embedding_dim, dtype) if users else None
        sizes = sizes_of(events) | {f"calendar_{name}": CALENDAR[name] for name in known.calendar}
        self.events = FeatureTables(sizes, embedding_dim, dtype) if sizes else None
        # Which features of events are known before the user acts.
        self.register_buffer("before", torch.tensor([one.known == "before" for one in events]), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        added = torch.zeros((), device=batch.item_ids.device)
        if self.users is not None and not self.as_tokens:
            users = self.users(self._user_bags(batch.user_features), batch.num_sequences)
            added = added + F.embedding(sequence_ids(batch.seq_offsets, batch.num_tokens), users)
        if self.events is not None:
            parts: list[Tensor] = []
            if self.num_events:
                rows = checked_rows(batch.event_features, self.num_events, "events")
                if batch.has_action is not None:  # at an item's token the user has not acted
                    rows = torch.where((batch.has_action[:, None] | self.before)[:, :, None], rows, -1)
                parts += rows.unbind(1)
            clock = self.clock(batch.timestamps) if self.calendar else batch.timestamps
            parts += [calendar_rows(name, clock)[:, None] for name in self.calendar]
            added = added + self.events([Bags.from_padded(part) for part in parts], batch.num_tokens)
        return added

    def tokens(self, rows: Tensor | None) -> Tensor:
        """Embed each feature of users: [B, F, E]. rows: `Batch.user_features`."""
        bags = self._user_bags(rows)
        assert self.users is not None and rows is not None
        return self.users.each(bags, len(rows))

    def _user_bags(self, rows: Tensor | None) -> list[Bags]:
        return [Bags.from_padded(part) for part in checked_rows(rows, self.num_users, "users").unbind(1)]

    def clock(self, timestamps: Tensor) -> Tensor:
        """Return times [T] as local times of the calendar's time zone, in seconds since 1970."""
        if not self.zoned:
            return timestamps
        place = torch.searchsorted(self.zone_starts, timestamps, right=True) - 1
        return timestamps + self.zone_offsets[place.clamp(min=0)]


def sizes_of(features: list[KnownFeature]) -> dict[str, int]:
    """Return the number of rows of each table by its name."""
    return {f"{feature.entity}_{feature.name}": feature.num_rows for feature in features}


def checked_rows(rows: Tensor | None, count: int, entity: str) -> Tensor:
    """Return the rows [R, F, L] of a batch; ValueError unless F, the number of features, is `count`."""
    if rows is None or rows.shape[1] != count:
        got = 0 if rows is None else rows.shape[1]
        raise ValueError(f"the model expects {count} features of {entity}, got a batch with {got}")
    return rows
