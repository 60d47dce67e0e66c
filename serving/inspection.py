"""Define the part of `Recommender` that explains the model: item vectors, similar items, effects of events.

Letters: I items, E embedding size, M items of a call, k length of a list, n events of a user's window.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from data.batch import Batch
from models.heads import normalized
from models.tasks.scoring import normalized_items
from serving.engine import UserRequest
from serving.errors import InvalidRequest
from serving.ids import user_keys
from serving.search import item_scores
from serving.served import ServedRun

MOST_TOKENS = 2**15  # most tokens of one pass


class Explanation(NamedTuple):
    """The effects of a user's events on the score of an item, in time order; see `Recommender.explain`.

    score: the item's score; items [n] original ids; timestamps [n] int64, seconds; effects [n] float32

    Examples:
        >>> explanation = recommender.explain("c3", "s1")
        >>> explanation.items.shape, explanation.effects.dtype
        ((7,), dtype('float32'))
    """

    score: float
    items: np.ndarray
    timestamps: np.ndarray
    effects: np.ndarray

    def frame(self):
        """Return the events as a polars frame (item, timestamp, effect), greatest effect first.

        Examples:
            >>> recommender.explain("c3", "s1").frame().columns
            ['item', 'timestamp', 'effect']
        """
        import polars as pl

        columns = {"item": self.items, "timestamp": self.timestamps, "effect": self.effects}
        return pl.DataFrame(columns).sort("effect", descending=True, nulls_last=True)


def list_frame(name: str, listed: str, ids: Any, items: np.ndarray, scores: np.ndarray) -> Any:
    """Return lists [B, k] as a polars frame (`name`, rank from 1, `listed`, score), without padding."""
    import polars as pl

    count, k = items.shape
    columns = {
        name: np.repeat(np.asarray(ids), k),
        "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), count),
        listed: items.ravel(),
        "score": scores.ravel(),
    }
    return pl.DataFrame(columns).filter(pl.col("score").is_finite())


class Inspection(ServedRun):
    """Item vectors, similar items and explanations."""

    @torch.no_grad()
    def item_vectors(self, as_frame: bool = False) -> tuple[np.ndarray, np.ndarray] | Any:
        """Return (ids [I], vectors [I, E] float32 of length one), or a polars frame (item, vector).

        A vector is the item's representation that outputs are scored against: for the head `dot` without repeats, a
        score is its dot product with the output. Only compare vectors of the same run: a single number of a vector has
        no meaning, and the axes differ between runs.

        Examples:
            >>> ids, vectors = recommender.item_vectors()
            >>> vectors.shape == (len(ids), 8), bool(abs((vectors**2).sum(1) - 1).max() < 1e-5)
            (True, True)
        """
        with self._lock:
            vectors = normalized_items(self.model.item_table).cpu().numpy()
        if not as_frame:
            return self.items.ids, vectors
        import polars as pl

        return pl.DataFrame({"item": self.items.ids, "vector": vectors})

    @torch.no_grad()
    def similar(self, items: Any, k: int = 10, *, as_frame: bool = False) -> tuple[np.ndarray, np.ndarray] | Any:
        """Return the k most similar other items of each item: (items [M, k] original ids, cosines [M, k] float32).

        Items are similar if the cosine of their vectors (`item_vectors`) is large: they occur at similar places of
        users' histories. This does not mean that one often follows the other.

        Args:
            items: [M] ids.
            k: at least 1. If there are fewer other items, the rest is filled with -1 or the empty text, cosine -inf.
            as_frame: return a polars frame (item, rank, similar, score) in place of arrays.

        Raises UnknownItem, InvalidRequest.

        Examples:
            >>> neighbours, cosines = recommender.similar(["s1", "s2"], k=3)
            >>> neighbours.shape, "s1" in neighbours[0]
            ((2, 3), False)
        """
        check_length(k)
        rows = self.items.rows("items", items)
        with self._lock:
            table = normalized_items(self.model.item_table)
            chosen = torch.from_numpy(rows).to(table.device)
            cosines = table[chosen] @ table.T
            cosines.scatter_(1, chosen[:, None], -torch.inf)
            best, places = cosines.topk(min(k, len(table)), dim=1)
        values, near = np.full((len(rows), k), -np.inf, np.float32), np.full((len(rows), k), -1)
        values[:, : best.shape[1]], near[:, : best.shape[1]] = best.cpu().numpy(), places.cpu().numpy()
        neighbours = self.items.original(np.where(np.isinf(values), -1, near))
        if not as_frame:
            return neighbours, values
        return list_frame("item", "similar", self.items.original(rows), neighbours, values)

    @torch.no_grad()
    def explain(self, user: Any, item: Any, at: int | None = None) -> Explanation:
        """Return the effect of each event of a user's window on the score of an item.

        The effect of an event is the score with all events minus the score without this event. It describes the model,
        not the reasons of the user. Effects do not add up to the score: the removal of one of two similar events
        may change nothing. Without an event, the events around it become neighbours, and this change is a part of the
        effect. The effect of a user's only event is NaN, since the model cannot score without events.

        Args:
            user: an id; the user needs an event. The model runs on n sequences of n - 1 events each.
            item: the id of the item whose score is explained.
            at: as in `Recommender.recommend`.

        Raises NoHistory, UnknownItem, TooEarly; InvalidRequest for a run that ranks given candidates.

        Examples:
            >>> explanation = recommender.explain("c3", "s1")
            >>> len(explanation.items) == len(explanation.effects) == 7
            True
            >>> explanation.frame().columns
            ['item', 'timestamp', 'effect']
        """
        if self.ranking:
            raise InvalidRequest("explain: the run ranks given candidates, expected a retrieval run")
        row = self.items.rows("item", [item])
        with self._lock:
            (request,) = self.check_requests(user_keys([user]), at)
            h = request.history
            cut = self.window.begin(h.count) - h.first
            items, times = h.items[cut:].astype(np.int64), h.timestamps[cut:].copy()
            codes = np.zeros(len(items), np.int64) if h.actions is None else h.actions[cut:].astype(np.int64)
            columns = items, times, codes, request
            score = self._scores(*columns, np.arange(len(items))[None], row).item()
            effects = np.full(len(items), np.nan, np.float32)
            if len(items) > 1:
                step = np.arange(len(items) - 1)
                others = step + (step >= np.arange(len(items))[:, None])  # [n, n - 1]
                effects[:] = score - self._scores(*columns, others, row)
        return Explanation(score, self.items.original(items), times, effects)

    def _scores(
        self,
        items: np.ndarray,
        times: np.ndarray,
        codes: np.ndarray,
        request: UserRequest,
        events: np.ndarray,
        row: np.ndarray,
    ) -> np.ndarray:
        """Return the scores [V] of an item for V histories; row v of `events` [V, L] has the events of history v."""
        device, length, scores = self.model.item_weight.device, events.shape[1], []
        for chosen in np.array_split(events, -(-events.size // MOST_TOKENS)):
            count = len(chosen)
            following = np.append(times[chosen[:, 1:]], np.full((count, 1), request.at), axis=1)
            columns = (items[chosen], times[chosen], following, codes[chosen])
            tokens, seconds, queries, event_codes = (torch.from_numpy(column.ravel()).to(device) for column in columns)
            features = torch.full((count,), self.contexts.user_number(request.user), device=device)
            batch = Batch(
                item_ids=tokens,
                timestamps=seconds,
                target_ids=torch.full_like(tokens, -1),
                query_timestamps=queries,
                seq_offsets=torch.arange(0, count * length + 1, length, device=device),
                users=torch.arange(count, device=device),
                **self.contexts.batch_columns(event_codes, features),
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=self.config.train.autocast == "bf16"):
                out, _ = self.model.raw_output(batch)
            last = normalized(out[batch.seq_offsets[1:] - 1])
            windows = None if self.model.repeats is None else batch
            scores.append(item_scores(self.model, last, [row] * count, windows))
        return np.concatenate(scores)


def check_length(k: Any) -> None:
    """Raise InvalidRequest unless a list can have `k` items."""
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise InvalidRequest(f"k: expected a whole number of at least 1, got {k!r}")
