"""Rank items without a network, from training events only: the baselines of every retrieval report.

popularity         the number of training events of an item
recent popularity  the same number in the last tenth of the training events, then popularity; needs timestamps
again              the items of the user's history, latest first, then popularity; only if repeats may be ranked
markov             items that followed the history's items in training, smoothed by popularity, plus the history's items
                   with the weight `owned`; older items of the history weigh less
item-kNN           items similar to the history's by the cosine of tf-idf weights; older items weigh less
EASE               a linear autoencoder in closed form (Steck, WWW 2019), up to EASE_ITEMS items

Like the model, each of them scores a batch from the histories before its targets. Their SETTINGS are chosen on the
validation split.

Letters: U users, I items, B users of a batch, S events of their histories, N neighbours of an item.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from data.batch import Batch
from data.splits import Splits, train_events
from data.types import Dataset
from evaluation.scores import Scores

RECENT = 0.1  # fraction of the training events that recent popularity counts
SMOOTHING = 1.0  # events, distributed as popularity, that are added to the successors of an item
NEIGHBOURS = 200  # neighbours stored for an item, including the item
EASE_ITEMS, NEIGHBOUR_ITEMS = 10_000, 100_000  # largest catalogues for EASE and item-kNN, which are slow for more
EASE_PENALTY = 500.0
FADED = 1e-4  # smaller weights in a history are left out
BLOCK = 2**25  # similarities computed at a time
OWNED_DECAY = 0.9  # factor of the weight `owned` for each later event
PARTS = "data", "indices", "indptr"  # arrays of a sparse matrix
VERSION = 1  # increase it when the result of `fit` changes
# The values to choose from; the first ones are used without a validation split. decay: the factor of an event's weight
# for each later event, 0 for the last event only; owned: the weight of the history's items; neighbours: the number of
# neighbours of each item.
SETTINGS: dict[str, dict[str, tuple]] = {
    "markov": {"decay": (0.5, 0.0, 0.8), "owned": (0.0, 0.1, 0.3)},
    "item-kNN": {"decay": (0.9, 1.0, 0.7, 0.4), "neighbours": (200, 50)},
}
Known: TypeAlias = sparse.csr_array | np.ndarray  # scores [B, I]


def fit(dataset: Dataset, splits: Splits) -> dict[str, np.ndarray]:
    """Compute the arrays of `Baselines` from the training events."""
    mask = train_events(dataset, splits.train_end)
    items, num_items = np.asarray(dataset.items)[mask], dataset.num_items
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))[mask]
    counts = np.bincount(items, minlength=num_items).astype(np.float32)
    arrays = {"counts": counts}
    if dataset.has_timestamps and len(items):
        times = np.asarray(dataset.timestamps)[mask]
        cut = np.partition(times, place := int((1 - RECENT) * (len(times) - 1)))[place]
        recent = np.bincount(items[times >= cut], minlength=num_items)
        arrays["recent"] = (recent + counts / (1 + counts.sum())).astype(np.float32)
    follows = users[1:] == users[:-1]
    pairs = (np.ones(follows.sum(), np.float32), (items[:-1][follows], items[1:][follows]))
    successors = sparse.coo_array(pairs, (num_items, num_items)).tocsr()
    arrays |= {f"successors_{part}": getattr(successors, part) for part in PARTS}
    events = events_of(dataset, splits)
    if num_items <= NEIGHBOUR_ITEMS:
        arrays |= dict(zip(("neighbours", "similarities"), nearest(tf_idf(events), NEIGHBOURS)))
    if num_items <= EASE_ITEMS:
        arrays["ease"] = ease(events, EASE_PENALTY)
    return arrays


def events_of(dataset: Dataset, splits: Splits) -> sparse.csr_array:
    """Return how often each user had each item in training: [U, I] fp32."""
    mask = train_events(dataset, splits.train_end)
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))[mask]
    events = np.ones(len(users), np.float32), (users, np.asarray(dataset.items)[mask])
    return sparse.coo_array(events, (dataset.num_users, dataset.num_items)).tocsr()


def tf_idf(events: sparse.csr_array) -> sparse.csr_array:
    """Return tf-idf rows of items, of Euclidean length one: [I, U].

    They are the square roots of the counts `events` [U, I] times log(I / (1 + n)) for a user with n different items, as
    in the package implicit.
    """
    num_items, items_per_user = events.shape[1], np.diff(events.indptr)
    weight = np.log(num_items) - np.log1p(items_per_user)
    weighted = sparse.diags_array(weight.astype(np.float32)) @ events.sqrt()
    items = weighted.T.tocsr()
    length = np.sqrt(items.multiply(items).sum(1))
    return sparse.diags_array((1 / np.maximum(length, 1e-12)).astype(np.float32)) @ items


def nearest(items: sparse.csr_array, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the nearest items of each item, their similarities): [I, N] each, greatest first; 0 if no user has both.

    items: rows [I, U] of length one, whose products are the similarities; count: N, or I if that is less.
    """
    num_items, by_user = items.shape[0], items.T.tocsr()
    count, rows = min(count, num_items), max(1, BLOCK // num_items)
    parts = []
    for begin in range(0, num_items, rows):
        products = (items[begin : begin + rows] @ by_user).toarray()
        values, places = torch.from_numpy(products).topk(count, dim=1)
        parts.append((places.to(torch.int32).numpy(), values.clamp(min=0).numpy()))
    neighbours, similarities = (np.concatenate(part) for part in zip(*parts))
    return neighbours, similarities


def ease(events: sparse.csr_array, penalty: float) -> np.ndarray:
    """Return EASE's weights [I, I]; events: counts [U, I]; only whether a count is 0 matters."""
    once = events.copy()
    once.data[:] = 1
    gram, by_item = torch.zeros(events.shape[1], events.shape[1], dtype=torch.float64), once.T.tocsr()
    rows = max(1, BLOCK // events.shape[1])
    for begin in range(0, events.shape[1], rows):
        gram[begin : begin + rows] = torch.from_numpy((by_item[begin : begin + rows] @ once).toarray())
    gram.diagonal().add_(penalty)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    del gram
    weights = inverse.div_(-inverse.diagonal()).float()
    weights.fill_diagonal_(0)
    return weights.numpy()


def left_out(num_items: int) -> list[str]:
    """Return a sentence about each baseline that is not computed for a catalogue of this size."""
    limits = {"EASE": EASE_ITEMS, "item-kNN": NEIGHBOUR_ITEMS}
    return [f"{name} is left out: it is for up to {most:,} items." for name, most in limits.items() if num_items > most]


class Baselines:
    """The baselines, fitted to training events.

    Args:
        arrays: the result of `fit`.
        again: whether items of the history may be ranked.

    Attributes:
        names: the baselines that can be computed from these data.
        settings: name -> the values chosen from SETTINGS; the first ones before `choose`.
    """

    def __init__(self, arrays: dict[str, np.ndarray], again: bool):
        self.counts, self.share = arrays["counts"], arrays["counts"] / max(1, arrays["counts"].sum())
        self.recent, self.ease = arrays.get("recent"), arrays.get("ease")
        self.shape = len(self.counts), len(self.counts)
        data, indices, indptr = (arrays[f"successors_{part}"] for part in PARTS)
        self.successors = sparse.csr_array((data, indices, indptr), self.shape)
        self.followed = self.successors.sum(1)  # [I]: the number of events after an event of the item
        self.neighbours, self.similarities = arrays.get("neighbours"), arrays.get("similarities")
        self._similar: dict[int, sparse.csr_array] = {}
        self.settings: dict[str, dict[str, Any]] = {
            name: {option: values[0] for option, values in options.items()} for name, options in SETTINGS.items()
        }
        possible = {
            "popularity": True,
            "recent popularity": self.recent is not None,
            "again": again,
            "markov": True,
            "item-kNN": self.neighbours is not None,
            "EASE": self.ease is not None,
        }
        self.names = [name for name, is_possible in possible.items() if is_possible]

    def choose(self, judge: Callable[[Callable[[Batch], Scores]], float]) -> None:
        """Choose the settings with the greatest `judge(scorer)`, the first of equal ones."""
        for name, options in ((name, SETTINGS[name]) for name in self.names if name in SETTINGS):
            choices = [dict(zip(options, values)) for values in product(*options.values())]
            self.settings[name] = max(choices, key=lambda chosen: judge(self._scorer(name, chosen)))

    def scorer(self, name: str) -> Callable[[Batch], Scores]:
        """Return a function that scores every item for each history of a batch."""
        return self._scorer(name, self.settings.get(name, {}))

    def _scorer(self, name: str, chosen: dict[str, Any]) -> Callable[[Batch], Scores]:
        """Return the scorer of a baseline with the settings `chosen`.

        The scorer adds up two parts, each of which may be None: the scores [B, I] that `score` returns, and the product
        of the weights [B] (None: 1) that `score` returns and `item_scores` [I].
        """
        score, item_scores = {
            "popularity": (None, self.counts),
            "recent popularity": (None, self.recent),
            "again": (self._again, self.counts / (1 + self.counts.max(initial=0))),
            "markov": (partial(self._markov, **chosen), self.share),
            "item-kNN": (partial(self._similar_items, **chosen), None),
            "EASE": (self._ease, None),
        }[name]

        def scores(batch: Batch) -> Scores:
            known, weights = (None, None) if score is None else score(batch)
            return _added(batch, len(self.counts), known, weights, item_scores)

        return scores

    def _again(self, batch: Batch) -> tuple[Known, None]:
        """Score an item by the position of its last event in the history, from 1."""
        items, offsets = _history(batch)
        places = np.arange(1, 1 + len(items), dtype=np.float32) - np.repeat(offsets[:-1], np.diff(offsets))
        # Only the last event of an item counts.
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        order = np.lexsort((places, items, rows))
        last = np.append((np.diff(items[order]) != 0) | (np.diff(rows[order]) != 0), True)[: len(items)]
        chosen = order[last]
        shape = len(offsets) - 1, len(self.counts)
        return sparse.coo_array((places[chosen], (rows[chosen], items[chosen])), shape).tocsr(), None

    def _markov(self, batch: Batch, decay: float, owned: float) -> tuple[Known, np.ndarray]:
        weights = _fading(batch, len(self.counts), decay)
        repeated = owned * _fading(batch, len(self.counts), OWNED_DECAY) if owned else 0 * weights
        weights.data /= self.followed[weights.indices] + SMOOTHING
        return weights @ self.successors + repeated, SMOOTHING * weights.sum(1)

    def _similar_items(self, batch: Batch, decay: float, neighbours: int) -> tuple[Known, None]:
        if neighbours not in self._similar:
            assert self.neighbours is not None and self.similarities is not None
            places, values = (array[:, :neighbours] for array in (self.neighbours, self.similarities))
            offsets = np.arange(len(places) + 1, dtype=places.dtype) * places.shape[1]
            self._similar[neighbours] = sparse.csr_array((values.ravel(), places.ravel(), offsets), self.shape)
        return _fading(batch, len(self.counts), decay) @ self._similar[neighbours], None

    def _ease(self, batch: Batch) -> tuple[Known, None]:
        once = _fading(batch, len(self.counts), 1.0)
        once.data[:] = 1
        return once @ self.ease, None


def _history(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the items [S] before the targets of a batch, and their offsets [B + 1]."""
    assert batch.seen_items is not None and batch.seen_offsets is not None
    return batch.seen_items.cpu().numpy(), batch.seen_offsets.cpu().numpy()


def _fading(batch: Batch, num_items: int, decay: float) -> sparse.csr_array:
    """Return the weights of items in the histories [B, I]: an event adds decay ** (the number of later events)."""
    items, offsets = _history(batch)
    ages = np.repeat(offsets[1:], np.diff(offsets)) - 1 - np.arange(len(items))
    weights = np.power(np.float32(decay), ages, dtype=np.float32)
    counted = weights >= FADED
    offsets = np.append(0, np.cumsum(counted))[offsets]
    matrix = sparse.csr_array((weights[counted], items[counted], offsets), (len(offsets) - 1, num_items))
    matrix.sum_duplicates()
    return matrix


def _added(
    batch: Batch, num_items: int, known: Known | None, weights: np.ndarray | None, item_scores: np.ndarray | None
) -> Scores:
    """Return the scores known [B, I], if any, plus weights [B] (1 if None) times item_scores [I], if any."""
    users, device = batch.num_sequences, batch.item_ids.device
    by_column: Any = known.tocsc() if isinstance(known, sparse.csr_array) else known

    def tile(begin: int, end: int) -> Tensor:
        if by_column is None:
            scores = np.zeros((users, end - begin), np.float32)
        else:
            part = by_column[:, begin:end]
            scores = part.toarray() if sparse.issparse(part) else part.copy()
        if item_scores is not None:
            scores += item_scores[begin:end] if weights is None else np.outer(weights, item_scores[begin:end])
        return torch.from_numpy(scores).to(device, torch.float32)

    return Scores(users, num_items, tile)
