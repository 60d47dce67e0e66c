"""Tables of features, held by torchrec: what is known of items, users and events beside their ids.

A feature of an item, user or event is the mean of the rows of its values; features are added up. A missing value adds
nothing. Letters: R rows (tokens, items or users), F features, L most values of a row, S values, I items, W items that
training saw, E embedding size, T tokens, B sequences.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from data.batch import Batch
from data.feature_vocabulary import CALENDAR, FeatureVocabulary, KnownFeature
from data.ranking import RankingBatch
from hstu_sparse.jagged import sequence_ids

DAY, HOUR, THURSDAY = 86_400, 3_600, 3  # seconds; what 1970 began with, Monday being 0


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fills `weight` from a normal distribution of deviation `std`, cut off at two deviations (then 0.88 * std)."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class Bags(NamedTuple):
    """The values of one feature of R rows: places in its table [S], their weights [S], and how many of each row [R]."""

    values: Tensor
    weights: Tensor
    lengths: Tensor

    @classmethod
    def of_padded(cls, rows: Tensor) -> "Bags":
        """Bags of rows [R, L] int64, -1 where there is no value: all of L values, the missing ones without weight."""
        present = rows >= 0
        weights = present / present.sum(1, keepdim=True).clamp(min=1)
        lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int64, device=rows.device)
        return cls(rows.clamp(min=0).flatten(), weights.flatten(), lengths)


class FeatureTables(nn.Module):
    """A table for each feature; its first row, the unknown one, starts at zero, the others truncated normal."""

    def __init__(self, sizes: dict[str, int], embedding_dim: int, dtype: torch.dtype):
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
                    pooling=PoolingType.SUM,  # of rows weighted to be their mean
                    init_fn=start,
                )
                for name, size in sizes.items()
            ],
            is_weighted=True,
        ).to(dtype)

    def forward(self, bags: list[Bags], count: int) -> Tensor:
        """[R, E], of the bags of each feature; count: R."""
        if not count:  # torchrec takes no batch without rows
            return next(self.parameters()).new_zeros(0, self.embedding_dim)
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
        return looked_up.values().unflatten(1, (len(bags), self.embedding_dim)).sum(1)


class ValueLists(nn.Module):
    """The values of the features of some items: a constant CSR on the device, so that captured steps keep their shapes.

    item_rows: for each feature (offsets [n+1], rows of its table [S]); items: which of them, [M] int64.
    """

    def __init__(self, item_rows: Sequence[tuple[np.ndarray, np.ndarray]], items: np.ndarray):
        super().__init__()
        self.num_items, self.num_values = len(items), 0
        self.longest: list[int] = []
        for number, (offsets, rows) in enumerate(item_rows):
            lengths = np.diff(offsets)[items]
            ends = np.append(0, np.cumsum(lengths))
            places = np.repeat(offsets[items] - ends[:-1], lengths) + np.arange(ends[-1])
            self.longest.append(max(1, int(lengths.max(initial=0))))
            self.num_values += len(places)
            # One row more, for places behind the last list.
            self._keep(f"rows_{number}", np.append(rows[places], 0))
            self._keep(f"offsets_{number}", ends.astype(np.int64))
            self._keep(f"weights_{number}", np.repeat(1 / np.maximum(1, lengths), lengths).astype(np.float32))

    def _keep(self, name: str, value: np.ndarray) -> None:
        self.register_buffer(name, torch.from_numpy(value), persistent=False)  # the run's vocabulary has them

    def every(self) -> list[Bags]:
        """The bags of all items, for each feature."""
        bags = []
        for number in range(len(self.longest)):
            rows, weights, offsets = (getattr(self, f"{name}_{number}") for name in ("rows", "weights", "offsets"))
            bags.append(Bags(rows[:-1], weights, offsets.diff()))
        return bags

    def of(self, ids: Tensor) -> list[Bags]:
        """The bags of the items at `ids` [R] int64, of as many values each as the longest list has."""
        bags = []
        for number, longest in enumerate(self.longest):
            rows, offsets = getattr(self, f"rows_{number}"), getattr(self, f"offsets_{number}")
            begin, end = (offsets.index_select(0, ids + more)[:, None] for more in (0, 1))
            places = begin + torch.arange(longest, device=ids.device)
            bags.append(Bags.of_padded(torch.where(places < end, rows[places.clamp(max=len(rows) - 1)], -1)))
        return bags


class ItemFeatures(nn.Module):
    """What features add to the representations of items.

    trained  [W] int64, the items that a training event has, ascending
    place    [I] int64, the place of each item among them, -1 for others
    """

    def __init__(self, known: FeatureVocabulary, embedding_dim: int, dtype: torch.dtype):
        super().__init__()
        assert known.trained is not None
        self.tables = FeatureTables(sizes_of(known.of("items")), embedding_dim, dtype)
        trained = np.flatnonzero(known.trained)
        self.all = ValueLists(known.item_rows, np.arange(len(known.trained)))
        # A list of their own: what other items have must not change a sum of training, not even its rounding.
        self.seen = ValueLists(known.item_rows, trained) if len(trained) < len(known.trained) else self.all
        place = np.where(known.trained, np.cumsum(known.trained) - 1, -1)
        for name, value in (("trained", trained), ("place", place)):
            self.register_buffer(name, torch.from_numpy(value), persistent=False)

    def forward(self, ids: Tensor | None = None) -> Tensor:
        """[R, E], what features add to the items `ids` [R] int64, or to every item. In training, to trained ones."""
        if self.training:
            return self._sums(self.seen, None if ids is None else self.place[ids])
        return self._sums(self.all, ids)

    def _sums(self, lists: ValueLists, ids: Tensor | None) -> Tensor:
        """Takes whichever way sums fewer rows: those of each item asked for, or those of the catalogue."""
        if ids is None:
            return self.tables(lists.every(), lists.num_items)
        if len(ids) * sum(lists.longest) > lists.num_values + len(ids):
            return F.embedding(ids, self._sums(lists, None))
        return self.tables(lists.of(ids), len(ids))


class ContextFeatures(nn.Module):
    """What the features of its user, its event and its time add to a token: [T, E]."""

    def __init__(self, known: FeatureVocabulary, embedding_dim: int, dtype: torch.dtype):
        super().__init__()
        users, events = known.of("users"), known.of("events")
        self.calendar = known.calendar
        self.num_users, self.num_events = len(users), len(events)
        self.users = FeatureTables(sizes_of(users), embedding_dim, dtype) if users else None
        sizes = sizes_of(events) | {f"calendar_{name}": CALENDAR[name] for name in known.calendar}
        self.events = FeatureTables(sizes, embedding_dim, dtype) if sizes else None
        # Which features of an event are known before the user acts.
        self.register_buffer("before", torch.tensor([one.known == "before" for one in events]), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        added = torch.zeros((), device=batch.item_ids.device)
        if self.users is not None:
            rows = given(batch.user_features, self.num_users, "users")
            of_users = self.users([Bags.of_padded(part) for part in rows.unbind(1)], batch.num_sequences)
            added = added + F.embedding(sequence_ids(batch.seq_offsets, batch.num_tokens), of_users)
        if self.events is not None:
            parts = []
            if self.num_events:
                rows = given(batch.event_features, self.num_events, "events")
                if isinstance(batch, RankingBatch):  # the item token comes before the action
                    rows = torch.where((batch.is_action[:, None] | self.before)[:, :, None], rows, -1)
                parts += rows.unbind(1)
            parts += [calendar_rows(name, batch.timestamps)[:, None] for name in self.calendar]
            added = added + self.events([Bags.of_padded(part) for part in parts], batch.num_tokens)
        return added


def sizes_of(features: list[KnownFeature]) -> dict[str, int]:
    """name of a table -> its rows."""
    return {f"{feature.entity}_{feature.name}": feature.num_rows for feature in features}


def given(rows: Tensor | None, count: int, entity: str) -> Tensor:
    """The rows [R, F, L] of a batch; ValueError without those of the features that the model has."""
    if rows is None or rows.shape[1] != count:
        raise ValueError(
            f"the model has {count} features of {entity}, the batch {0 if rows is None else rows.shape[1]}"
        )
    return rows


def calendar_rows(name: str, timestamps: Tensor) -> Tensor:
    """[T] int64: the hour (0 to 23) or the weekday (0 to 6, Monday 0) of times in seconds, in UTC."""
    if name == "hour":
        return timestamps // HOUR % CALENDAR["hour"]
    return (timestamps // DAY + THURSDAY) % CALENDAR["weekday"]
