"""Embed the items, actions and positions of a batch; torchrec holds the tables.

Letters: T tokens, B sequences, E embedding size.
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
from models.protocols import ItemTable

# torchrec's query to torch.fx would print a warning in every process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


DRAWN_WHOLE = 2**28  # numbers of a sharded table up to which each rank draws all of it, as one process does


class InputEmbedding(nn.Module):
    """Compute x[t] = item embedding * sqrt(E) (+ action embedding) + position embedding, then dropout: [T, E].

    In a ranking batch x[t] is the item's embedding, plus its action's where the token has that, * sqrt(E), + position
    embedding. Positions count from the oldest event of the window. Tables start truncated
    normal, items (and actions) with standard deviation 0.02, positions with E ** -0.5. (The published HSTU then draws
    the positions again, Xavier normal: no gain after 101 epochs, docs/learned.md.)

    With features, the embeddings of the features of the item, the user, the event and its time are added to x[t] before
    * sqrt(E); those of users may be tokens of their own (`user_tokens`). The rows of items without a training event
    then are and stay zero, since no loss includes them. With an `id_dropout` of 1 no item has a row.
    """

    added: Tensor | None  # [M, E], the representations of items that were added

    def __init__(
        self,
        num_items: int,
        num_actions: int,
        embedding_dim: int,
        max_seq_len: int,
        dropout: float,
        table_dtype: str = "float32",
        features: FeatureVocabulary | None = None,
        id_dropout: float = 0.0,
        table: ItemTable | None = None,
        vector_correction: int = 0,
        user_tokens: bool = False,
    ):
        super().__init__()
        self.scale, self.num_items, self.sharded = embedding_dim**0.5, num_items, table
        self.dropout, self.id_dropout = dropout, id_dropout
        self.has_ids = id_dropout < 1  # otherwise an item is its features alone
        sizes = ({"item": num_items} if self.has_ids else {}) | ({"action": num_actions} if num_actions else {})
        if table is not None and num_items * embedding_dim > DRAWN_WHOLE:
            del sizes["item"]
        self.dtype = dtype = getattr(torch, table_dtype)
        trained = None if features is None else features.trained
        self.tables: Any = None  # torchrec's collection of the tables that are not sharded
        if sizes:
            from torchrec import EmbeddingCollection, EmbeddingConfig  # takes as long as all other imports together

            # Items without a training event must not change the random numbers that the others draw.
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
            # torchrec itself would replace bfloat16 by float16.
            convert_parameters(self.tables, dtype)
        if table is not None and "item" in sizes:
            table.fill(lambda begin, end: self.item_weight[begin:end])
            del self.tables.embeddings["item"]
        elif table is not None:
            table.draw(None if trained is None else torch.from_numpy(trained))
        self.position = nn.Parameter(torch.empty(max_seq_len, embedding_dim))
        truncated_normal_(self.position, embedding_dim**-0.5)
        self.items = self.context = None
        if features is not None and features.trained is not None:
            self.items = ItemFeatures(features, embedding_dim, dtype, vector_correction)
            if table is not None:  # the places, among the items with a training event, of those of this rank
                self.local_places = [int(features.trained[:row].sum()) for row in (table.begin[0], table.end[0])]
        self.register_buffer("added", None, persistent=False)
        if features is not None and (features.of("users") or features.of("events") or features.calendar):
            self.context = ContextFeatures(features, embedding_dim, dtype, user_tokens)

    @property
    def item_weight(self) -> Tensor:
        """The item table, [num_items, E], if it is not sharded and there is one."""
        return self.tables.embeddings["item"].weight

    @property
    def action_weight(self) -> Tensor | None:
        """The table of actions, or None."""
        return self.tables.embeddings["action"].weight if self.tables and "action" in self.tables.embeddings else None

    @torch.no_grad()
    def add_items(self, items: NewItems) -> None:
        """Add items that have no row, for evaluation: they are known by their features, and numbered behind all
        others.
        """
        assert self.items is not None and not self.training and self.sharded is None
        rows = self.items.of_new(items).to(self.dtype)
        self.added = rows if self.added is None else torch.cat([self.added, rows])

    def item_rows(self, ids: Tensor | None = None) -> Tensor:
        """Return the representations of the items `ids` [R] int64 as [R, E], or of all, [num_items, E].

        A representation is the sum of the item's row and its features. With features of items, "all" in training are
        only the items with a training event; in evaluation those of `add_items` follow.
        """
        if self.added is None:
            return self._rows_of_catalogue(ids)
        if ids is None:
            return torch.cat([self._rows_of_catalogue(), self.added])
        known = ids < self.num_items
        rows = self._rows_of_catalogue(torch.where(known, ids, 0))
        of_added = F.embedding((ids - self.num_items).clamp(min=0), self.added)
        return torch.where(known[:, None], rows, of_added)

    def _rows_of_catalogue(self, ids: Tensor | None = None) -> Tensor:
        """Return `item_rows` without items that were added."""
        if self.items is None:
            return self.item_weight if ids is None else F.embedding(ids, self.item_weight)
        if ids is not None:
            return self._drawn_rows(ids)
        if not self.has_ids:
            return self.items.of_all().to(self.dtype)
        rows = self.items.rows(self.item_weight)
        return without(rows, self._left_out(len(rows))) + self.items.of_all().to(rows.dtype)

    def items_between(self, begin: int, end: int) -> Tensor:
        """Return the representations of the items begin .. end - 1, for evaluation."""
        if self.sharded is None:
            return self.item_rows()[begin:end]
        return self.with_features(self.sharded.between(begin, end), begin)

    def with_features(self, rows: Tensor, begin: int) -> Tensor:
        """Add the features of items begin, begin + 1, ... to their rows [R, E], for evaluation."""
        if self.items is None:
            return rows
        return rows + self.items.of(torch.arange(begin, begin + len(rows), device=rows.device)).to(rows.dtype)

    def local_items(self) -> tuple[Tensor, int]:
        """Return (representations [R, E] of the loss's items whose rows this rank has, the number of the first one).

        The table is sharded row-wise.
        """
        assert self.sharded is not None
        rows, begin = self.sharded.local_rows(), self.sharded.begin[0]
        if self.items is None:
            return rows, begin
        trained, (first, last) = self.items.trained, self.local_places
        rows = without(rows.index_select(0, trained[first:last] - begin), self._left_out(last - first))
        if first < last:
            rows = rows + self.items.of(torch.arange(first, last, device=rows.device)).to(rows.dtype)
        return rows, first

    def of_looked_up(self, ids: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the representations of items ids[inverse] [T, E] and of all ids [R, E], with one look-up.

        The table is sharded, and all its ranks call this together.
        """
        assert self.sharded is not None
        rows = self.sharded.look_up(ids)
        if self.items is None:
            return F.embedding(inverse, rows), rows
        added = self.items.of(self.items.numbers(ids)).to(rows.dtype)
        inputs = without(F.embedding(inverse, rows), self._left_out(len(inverse)))
        return inputs + F.embedding(inverse, added), without(rows, self._left_out(len(rows))) + added

    def _drawn_rows(self, ids: Tensor) -> Tensor:
        """Compute `item_rows` of some items in the way that sums fewer values of features."""
        assert self.items is not None
        numbers = self.items.numbers(ids)
        if not self.has_ids:
            if self.items.all_is_less(len(ids)):
                return F.embedding(numbers, self.items.of_all()).to(self.dtype)
            return self.items.of(numbers).to(self.dtype)
        left_out = self._left_out(len(ids))
        if not self.items.all_is_less(len(ids)):
            rows = F.embedding(ids, self.item_weight)
            return without(rows, left_out) + self.items.of(numbers).to(rows.dtype)
        rows = self.items.rows(self.item_weight)
        added = self.items.of_all().to(rows.dtype)
        table = rows + added
        if left_out is not None:  # the appended rows have the features alone, so that one look-up serves both
            table, numbers = torch.cat([table, added]), numbers + len(rows) * left_out[:, 0]
        return F.embedding(numbers, table)

    def _left_out(self, count: int) -> Tensor | None:
        """Draw [R, 1] bool: True for those of `count` items without their ids' rows in this training step; None for
        none.
        """
        if not (self.training and self.id_dropout):
            return None
        return torch.rand(count, 1, device=self.position.device) < self.id_dropout

    def _looked_up(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Look up the representations of the batch's items and the rows of its actions, both [T, E]."""
        # In evaluation without torchrec, whose look-up has the same result, and which torch.export does not take.
        if self.sharded is not None or self.items is not None or not self.training:
            if self.sharded is not None:
                ids, inverse = torch.unique(batch.item_ids, return_inverse=True)
                rows, _ = self.of_looked_up(ids, inverse)
            else:
                rows = self.item_rows(batch.item_ids)
            return rows, self._of_actions(batch)
        from torchrec import KeyedJaggedTensor

        features = {"item": batch.item_ids}
        if "action" in self.tables.embeddings and batch.actions is not None:
            features["action"] = batch.actions
        # torchrec takes no batch without sequences: an empty sequence is added.
        lengths = batch.seq_offsets.diff() if batch.num_sequences else batch.seq_offsets.new_zeros(1)
        # Lengths per key and stride are known on the host: passing them saves torchrec from waiting for the device.
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

    def _of_actions(self, batch: Batch) -> Tensor | None:
        """Look up the rows of the batch's actions, [T, E], if both have any."""
        actions = self.action_weight
        return None if actions is None or batch.actions is None else F.embedding(batch.actions, actions)

    def forward(self, batch: Batch, rows: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Embed a batch; rows [T, E]: the representations of the batch's items, if they were looked up before.

        dtype: of the result, by default that of the sum.
        """
        if rows is None:
            rows, more = self._looked_up(batch)
        else:
            more = self._of_actions(batch)
        if self.context is not None:
            rows = rows + self.context(batch).to(rows.dtype)
        if batch.has_action is not None and more is not None:
            rows, more = torch.where(batch.has_action[:, None], more + rows, rows), None
        dropout = self.dropout if self.training else 0.0
        if rows.is_cuda and batch.cut is None:
            # The kernels draw their mask from a seed of their own.
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
        """Embed features of users, `Batch.user_features`, as tokens without a position: [B, F, E]."""
        assert self.context is not None
        return F.dropout(self.context.tokens(rows) * self.scale, self.dropout, self.training)


def without(rows: Tensor, left_out: Tensor | None) -> Tensor:
    """Return rows [R, E] with zeros in the rows that left_out [R, 1] marks."""
    return rows if left_out is None else rows.masked_fill(left_out, 0)
