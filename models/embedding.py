"""Embed the items, actions and positions of a batch with torchrec's tables.

Letters: T tokens, B sequences, E embedding size, R items, F features of a user.
"""

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hstu_sparse
from data.batch import Batch
from data.features.new_items import NewItems
from data.features.vocabulary import FeatureVocabulary
from models.features import ContextFeatures, ItemFeatures, convert_parameters, truncated_normal_
from models.options import ModelConfig
from models.protocols import ItemTable

# Importing torchrec would print a warning of torch.fx in every process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

# A sharded table of at most this many elements starts with the values of an unsharded one, which each rank draws.
DRAWN_WHOLE = 2**28


class InputEmbedding(nn.Module):
    """Compute the input of layers, x [T, E] = sqrt(E) * (item + features) + action + position, then dropout.

    In a ranking batch the action of a token that has one is multiplied by sqrt(E), too. Features are those of the item,
    the user, the event and its time; those of the user may be separate tokens instead (`user_tokens`). Positions count
    from the oldest event of the window.

    Tables are initialised truncated normal, with a standard deviation of 0.02 for items and actions and of E ** -0.5
    for positions. (The published HSTU then draws positions again, as Xavier normal; no better: docs/learned.md.)
    With features of items, rows of items without a training event are zero and not trained. With an `id_dropout` of 1
    items have no rows.
    """

    added: Tensor | None  # [M, E], the representations of items that `add_items` added

    def __init__(
        self,
        config: ModelConfig,
        num_items: int,
        num_actions: int = 0,
        features: FeatureVocabulary | None = None,
        table: ItemTable | None = None,
        user_tokens: bool = False,
    ):
        super().__init__()
        embedding_dim = config.embedding_dim
        self.scale, self.num_items, self.sharded = embedding_dim**0.5, num_items, table
        self.dropout = config.dropout if config.input_dropout is None else config.input_dropout
        self.id_dropout = config.id_dropout
        self.has_ids = config.id_dropout < 1  # otherwise items are represented by features alone
        sizes = ({"item": num_items} if self.has_ids else {}) | ({"action": num_actions} if num_actions else {})
        if table is not None and num_items * embedding_dim > DRAWN_WHOLE:
            del sizes["item"]
        self.dtype = dtype = getattr(torch, config.table_dtype)
        trained = None if features is None else features.trained
        self.tables: Any = None  # the EmbeddingCollection of tables that are not sharded
        if sizes:
            from torchrec import EmbeddingCollection, EmbeddingConfig  # takes as long as all other imports together

            # Items without a training event must not change the random numbers of other rows.
            with nullcontext() if trained is None else torch.random.fork_rng(devices=[]):
                self.tables = EmbeddingCollection(
                    tables=[
                        EmbeddingConfig(
                            name=name,
                            embedding_dim=embedding_dim,
                            num_embeddings=size,
                            feature_names=[name],
                            init_fn=lambda weight: truncated_normal_(weight, 0.02),
                        )
                        for name, size in sizes.items()
                    ]
                )
            if trained is not None:
                for name, module in self.tables.embeddings.items():
                    weight = module.weight
                    trained_rows = np.flatnonzero(trained) if name == "item" else np.arange(len(weight))
                    rows = truncated_normal_(weight.new_empty(len(trained_rows), embedding_dim), 0.02)
                    weight.data.zero_()[torch.from_numpy(trained_rows)] = rows
            # torchrec's data type for bfloat16 gives float16.
            convert_parameters(self.tables, dtype)
        if table is not None and "item" in sizes:
            table.fill(lambda begin, end: self.item_weight[begin:end])
            del self.tables.embeddings["item"]
        elif table is not None:
            table.draw(None if trained is None else torch.from_numpy(trained))
        self.position = nn.Parameter(torch.empty(config.max_seq_len, embedding_dim))
        truncated_normal_(self.position, embedding_dim**-0.5)
        self.items = self.context = None
        if features is not None and features.trained is not None:
            self.items = ItemFeatures(features, embedding_dim, dtype, config.vector_correction)
            if table is not None:  # this rank's range among the items with a training event
                self.local_places = [int(features.trained[:row].sum()) for row in (table.begin[0], table.end[0])]
        self.register_buffer("added", None, persistent=False)
        if features is not None and (features.of("users") or features.of("events") or features.calendar):
            self.context = ContextFeatures(features, embedding_dim, dtype, user_tokens)

    @property
    def item_weight(self) -> Tensor:
        """The item table, [num_items, E], unless it is sharded or items have no rows."""
        return self.tables.embeddings["item"].weight

    @torch.no_grad()
    def add_items(self, items: NewItems) -> None:
        """Add items without a row for evaluation; they are represented by features and have the next ids."""
        assert self.items is not None and not self.training and self.sharded is None
        rows = self.items.embed_new(items).to(self.dtype)
        self.added = rows if self.added is None else torch.cat([self.added, rows])

    def item_rows(self, ids: Tensor | None = None) -> Tensor:
        """Return the representations of the items `ids` [R] int64 as [R, E], or of all items, [num_items, E].

        A representation is the sum of the item's row and its features. With features of items, "all items" are those
        with a training event (in training), or the catalogue followed by the items of `add_items` (in evaluation).
        """
        if self.added is None:
            return self._catalogue_rows(ids)
        if ids is None:
            return torch.cat([self._catalogue_rows(), self.added])
        known = ids < self.num_items
        rows = self._catalogue_rows(torch.where(known, ids, 0))
        return torch.where(known[:, None], rows, F.embedding((ids - self.num_items).clamp(min=0), self.added))

    def _catalogue_rows(self, ids: Tensor | None = None) -> Tensor:
        """Compute `item_rows` for items of the catalogue."""
        if self.items is None:
            return self.item_weight if ids is None else F.embedding(ids, self.item_weight)
        if ids is not None:
            return self._selected_rows(ids)
        if not self.has_ids:
            return self.items().to(self.dtype)
        rows = self.items.rows(self.item_weight)
        return without(rows, self._dropped_ids(len(rows))) + self.items().to(rows.dtype)

    def items_between(self, begin: int, end: int) -> Tensor:
        """Return the representations of the items begin .. end - 1, for evaluation."""
        if self.sharded is None:
            return self.item_rows()[begin:end]
        return self.with_features(self.sharded.between(begin, end), begin)

    def with_features(self, rows: Tensor, begin: int) -> Tensor:
        """Add the features of items begin, begin + 1, ... to their rows [R, E], for evaluation."""
        if self.items is None:
            return rows
        return rows + self.items(torch.arange(begin, begin + len(rows), device=rows.device)).to(rows.dtype)

    def local_items(self) -> tuple[Tensor, int]:
        """Return (the representations [R, E] of this rank's items in the loss, the index of the first one in the loss).

        The table is sharded by rows.
        """
        assert self.sharded is not None
        rows, begin = self.sharded.local_rows(), self.sharded.begin[0]
        if self.items is None:
            return rows, begin
        trained, (first, last) = self.items.trained, self.local_places
        rows = without(rows.index_select(0, trained[first:last] - begin), self._dropped_ids(last - first))
        if first < last:
            rows = rows + self.items(torch.arange(first, last, device=rows.device)).to(rows.dtype)
        return rows, first

    def represent(self, rows: Tensor, ids: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the representations of the items ids[inverse], [T, E], and of the items ids, [R, E].

        rows [R, E]: the rows of the items `ids` of a sharded table.
        """
        if self.items is None:
            return F.embedding(inverse, rows), rows
        added = self.items(self.items.numbers(ids)).to(rows.dtype)
        inputs = without(F.embedding(inverse, rows), self._dropped_ids(len(inverse)))
        return inputs + F.embedding(inverse, added), without(rows, self._dropped_ids(len(rows))) + added

    def _selected_rows(self, ids: Tensor) -> Tensor:
        """Compute `item_rows` of `ids`, from the features of all items if that sums fewer values."""
        assert self.items is not None
        numbers, all_items = self.items.numbers(ids), self.items.all_is_less(len(ids))
        if not self.has_ids:
            features = F.embedding(numbers, self.items()) if all_items else self.items(numbers)
            return features.to(self.dtype)
        dropped = self._dropped_ids(len(ids))
        if not all_items:
            rows = F.embedding(ids, self.item_weight)
            return without(rows, dropped) + self.items(numbers).to(rows.dtype)
        rows = self.items.rows(self.item_weight)
        added = self.items().to(rows.dtype)
        table = rows + added
        if dropped is not None:  # append the representations without ids, so that one look-up suffices
            table, numbers = torch.cat([table, added]), numbers + len(rows) * dropped[:, 0]
        return F.embedding(numbers, table)

    def _dropped_ids(self, count: int) -> Tensor | None:
        """Draw [count, 1] bool, True for items whose rows `id_dropout` drops in this training step, or return None."""
        if not (self.training and self.id_dropout):
            return None
        return torch.rand(count, 1, device=self.position.device) < self.id_dropout

    def _looked_up(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Look up the representations of the batch's items and the rows of its actions, both [T, E]."""
        # Evaluation computes the same without torchrec, which torch.export does not support.
        if self.sharded is not None or self.items is not None or not self.training:
            if self.sharded is not None:
                ids, inverse = torch.unique(batch.item_ids, return_inverse=True)
                rows, _ = self.represent(self.sharded.look_up(ids), ids, inverse)
            else:
                rows = self.item_rows(batch.item_ids)
            return rows, self._action_rows(batch)
        from torchrec import KeyedJaggedTensor

        features = {"item": batch.item_ids}
        if "action" in self.tables.embeddings and batch.actions is not None:
            features["action"] = batch.actions
        # torchrec needs at least one sequence.
        lengths = batch.seq_offsets.diff() if batch.num_sequences else batch.seq_offsets.new_zeros(1)
        # Without length_per_key and stride torchrec would wait for the device.
        looked_up = self.tables(
            KeyedJaggedTensor(
                keys=list(features),
                values=torch.cat(list(features.values())),
                lengths=lengths.repeat(len(features)),
                stride=max(1, batch.num_sequences),
                length_per_key=[batch.num_tokens] * len(features),
            )
        )
        return looked_up["item"].values(), looked_up["action"].values() if "action" in features else None

    def _action_rows(self, batch: Batch) -> Tensor | None:
        """Look up the rows of the batch's actions, [T, E]; None without an action table or without actions."""
        if batch.actions is None or self.tables is None or "action" not in self.tables.embeddings:
            return None
        return F.embedding(batch.actions, self.tables.embeddings["action"].weight)

    def forward(self, batch: Batch, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Embed a batch.

        Args:
            batch: the batch.
            rows: [T, E], the representations of the batch's items, if they were looked up before.
            dtype: the dtype of the result; by default that of the sum.
        """
        if rows is None:
            rows, more = self._looked_up(batch)
        else:
            more = self._action_rows(batch)
        if self.context is not None:
            rows = rows + self.context(batch).to(rows.dtype)
        if batch.has_action is not None and more is not None:
            rows, more = torch.where(batch.has_action[:, None], more + rows, rows), None
        dropout = self.dropout if self.training else 0.0
        if rows.is_cuda and batch.cut is None:
            # The kernels draw their dropout mask from this seed.
            seed = torch.randint(2**62, (1,), device=rows.device) if dropout else None
            options: dict[str, Any] = {"num_targets": batch.num_targets, "more": more, "dropout": dropout, "seed": seed}
            options |= {"scale": self.scale, "dtype": dtype}
            return hstu_sparse.embed_inputs(rows, self.position, batch.seq_offsets, **options)
        x = rows * self.scale + self.position.index_select(0, batch.positions)
        if more is not None:
            x = x + more
        x = F.dropout(x, self.dropout, self.training)
        return x if dtype is None else x.to(dtype)

    def user_tokens(self, rows: Tensor | None) -> Tensor:
        """Embed features of users, `Batch.user_features`, as tokens without positions: [B, F, E]."""
        assert self.context is not None
        return F.dropout(self.context.tokens(rows) * self.scale, self.dropout, self.training)


def without(rows: Tensor, dropped: Tensor | None) -> Tensor:
    """Return rows [R, E] with zeros where `dropped` [R, 1] is True."""
    return rows if dropped is None else rows.masked_fill(dropped, 0)
