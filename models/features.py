"""Hold the tables of features of items, users and events; torchrec holds the tables.

A feature of an item, user or event is the mean of the rows of its values; features are added up. A missing value adds
nothing. Letters: R rows (tokens, items or users), F features, L greatest number of values of a row, S values, I items,
W items with a training event, E embedding size, T tokens, B sequences.
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
    """Give a module new parameters of this dtype, which `module.to` cannot do for fake tensors (`train.py --plan`)."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(weight.detach().to(dtype)))


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fill `weight` from a normal distribution of deviation `std`, truncated at two deviations (then 0.88 * std)."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class Bags(NamedTuple):
    """The values of one feature of R rows: indices into its table [S], their weights [S], and the number of each row
    [R].
    """

    values: Tensor
    weights: Tensor
    lengths: Tensor

    @classmethod
    def of_padded(cls, rows: Tensor) -> "Bags":
        """Build bags of rows [R, L] int64, -1 for a missing value: each bag has L values, missing ones have weight
        0.
        """
        present = rows >= 0
        weights = present / present.sum(1, keepdim=True).clamp(min=1)
        lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int64, device=rows.device)
        return cls(rows.clamp(min=0).flatten(), weights.flatten(), lengths)


class FeatureTables(nn.Module):
    """A table for each feature; its first row, the unknown one, starts at zero, the others truncated normal."""

    def __init__(self, sizes: dict[str, int], embedding_dim: int, dtype: torch.dtype):
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType  # see models/embedding.py

        super().__init__()
        self.names, self.embedding_dim, self.dtype = list(sizes), embedding_dim, dtype

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
                    pooling=PoolingType.SUM,  # the weights turn the sum into a mean
                    init_fn=start,
                )
                for name, size in sizes.items()
            ],
            is_weighted=True,
        )
        convert_parameters(self.tables, dtype)

    def whole(self) -> Tensor:
        """Concatenate all tables: [sum of their rows, E]."""
        return torch.cat([self.tables.embedding_bags[name].weight for name in self.names])

    def forward(self, bags: list[Bags], count: int) -> Tensor:
        """Look up the sum [R, E] of the bags of all features; count: R."""
        return self.each(bags, count).sum(1)

    def each(self, bags: list[Bags], count: int) -> Tensor:
        """Look up [R, F, E] for the bags of each feature; count: R."""
        if not count:  # torchrec takes no batch without rows
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
    """The values of the features of some items: a constant CSR on the device, so that captured steps have fixed shapes.

    item_rows: for each feature (offsets [n+1], rows of its table [S]); sizes: the number of rows of each table; items:
    the items' indices, [M] int64. The tables are concatenated, [sum of sizes, E]; both ways of summing give the same
    bits.
    """

    def __init__(self, item_rows: Sequence[tuple[np.ndarray, np.ndarray]], sizes: Sequence[int], items: np.ndarray):
        super().__init__()
        holders, rows, weights = [], [], []  # for each entry the item, the row of the tables, the weight in the mean
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

    def of_all(self, tables: Tensor) -> Tensor:
        """Return [M, E] fp32, the sum of the features of every item."""
        return self.product(tables)

    def of(self, numbers: Tensor, tables: Tensor) -> Tensor:
        """Return [R, E] fp32, the same for the items at `numbers` [R] int64, each padded to the longest list."""
        if not self.num_values:
            return tables.new_zeros(len(numbers), tables.shape[1], dtype=torch.float32)
        offsets, rows, weights = self.product.entries
        begin, end = (offsets.index_select(0, numbers + more)[:, None] for more in (0, 1))
        places = begin + torch.arange(self.longest, device=numbers.device)
        inside, places = places < end, places.clamp(max=len(rows) - 1)
        return F.embedding_bag(rows[places], tables.float(), mode="sum", per_sample_weights=weights[places] * inside)


class ItemFeatures(nn.Module):
    """The features' part of the representations of items.

    Items are numbered: in training among those with a training event, else by their ids.

    trained  [W] int64, the items with a training event, ascending
    place    [I] int64, the number of each item among them, -1 for others
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
            # Separate lists for training: the features of other items must not change a sum of training, not even its
            # rounding.
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
        """Whether the numbers are those of a part of the items."""
        return self.training and self.has_untrained

    def numbers(self, ids: Tensor) -> Tensor:
        """Return the numbers of the items `ids`; in training, an item without training events (padding) gets number
        0.
        """
        return self.place[ids].clamp(min=0) if self.training else ids

    def rows(self, item_weight: Tensor) -> Tensor:
        """Return the rows of an item table [I, E] by number: in training those of the trained items, [W, E]."""
        return item_weight.index_select(0, self.trained) if self.only_trained else item_weight

    def of_all(self) -> Tensor:
        """Sum the features of every number: [I, E], in training [W, E], in fp32."""
        parts = [] if self.tables is None or self.lists is None else [self.lists.of_all(self.tables.whole())]
        items = self.trained if self.only_trained else None
        return functools.reduce(operator.add, [*parts, *(vectors(items) for vectors in self.vectors)])

    def of(self, numbers: Tensor) -> Tensor:
        """Sum the features of `numbers` [R]: [R, E], in fp32, with the bits of `of_all` but for vectors."""
        parts = [] if self.tables is None or self.lists is None else [self.lists.of(numbers, self.tables.whole())]
        items = self.trained[numbers] if self.only_trained else numbers
        return functools.reduce(operator.add, [*parts, *(vectors(items) for vectors in self.vectors)])

    def of_new(self, items: NewItems) -> Tensor:
        """Sum the features of items that are not in the catalogue: [M, E], in fp32."""
        device = self.place.device
        parts = []
        if self.tables is not None:
            whole = self.tables.whole()
            sizes = [len(self.tables.tables.embedding_bags[name].weight) for name in self.tables.names]
            parts.append(ValueLists(items.item_rows, sizes, np.arange(items.count)).to(device).of_all(whole))
        for module, vectors in zip(self.vectors, items.vectors):
            parts.append(module.of_new(torch.from_numpy(vectors).to(device)))
        return functools.reduce(operator.add, parts)

    def all_is_less(self, count: int) -> bool:
        """Return whether the features of all items have fewer values to sum than those of `count` drawn ones."""
        longest, values = (0, 0) if self.lists is None else (self.lists.longest, self.lists.num_values)
        width = sum(vectors.width for vectors in self.vectors)
        of_all = width * (len(self.trained) if self.only_trained else len(self.place))
        return count * (longest + width) > values + of_all + count


class ContextFeatures(nn.Module):
    """Sum the features of a token's user, event and time: [T, E].

    as_tokens: features of users are not in the sum, but tokens of their own.
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
        # Events' features that are known before the user acts.
        self.register_buffer("before", torch.tensor([one.known == "before" for one in events]), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        added = torch.zeros((), device=batch.item_ids.device)
        if self.users is not None and not self.as_tokens:
            of_users = self.users(self._bags_of_users(batch.user_features), batch.num_sequences)
            added = added + F.embedding(sequence_ids(batch.seq_offsets, batch.num_tokens), of_users)
        if self.events is not None:
            parts: list[Tensor] = []
            if self.num_events:
                rows = checked_rows(batch.event_features, self.num_events, "events")
                if batch.has_action is not None:  # the item token comes before the action
                    rows = torch.where((batch.has_action[:, None] | self.before)[:, :, None], rows, -1)
                parts += rows.unbind(1)
            clock = self.clock(batch.timestamps) if self.calendar else batch.timestamps
            parts += [calendar_rows(name, clock)[:, None] for name in self.calendar]
            added = added + self.events([Bags.of_padded(part) for part in parts], batch.num_tokens)
        return added

    def tokens(self, rows: Tensor | None) -> Tensor:
        """Look up the features of users, one by one: [B, F, E]. rows: `Batch.user_features`."""
        bags = self._bags_of_users(rows)
        assert self.users is not None and rows is not None
        return self.users.each(bags, len(rows))

    def _bags_of_users(self, rows: Tensor | None) -> list[Bags]:
        rows = checked_rows(rows, self.num_users, "users")
        return [Bags.of_padded(part) for part in rows.unbind(1)]

    def clock(self, timestamps: Tensor) -> Tensor:
        """Return times [T] as the clocks of the calendar's zone show them, in seconds since 1970 there."""
        if not self.zoned:
            return timestamps
        place = torch.searchsorted(self.zone_starts, timestamps, right=True) - 1
        return timestamps + self.zone_offsets[place.clamp(min=0)]


def sizes_of(features: list[KnownFeature]) -> dict[str, int]:
    """Map the name of each table to its number of rows."""
    return {f"{feature.entity}_{feature.name}": feature.num_rows for feature in features}


def checked_rows(rows: Tensor | None, count: int, entity: str) -> Tensor:
    """Return the rows [R, F, L] of a batch; ValueError if the batch is without features of the model."""
    if rows is None or rows.shape[1] != count:
        raise ValueError(
            f"the model has {count} features of {entity}, the batch {0 if rows is None else rows.shape[1]}"
        )
    return rows
