"""Search the catalogue for the best items of many users at once, and score candidates.

Letters: B users, E embedding size, k length of a list, M candidates, A kinds of action.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.batch import Batch
from evaluation.item_filters import ItemFilter, limited_lists, stacked_masks
from evaluation.scores import best_items
from hstu_sparse.core.launch import cdiv
from models.heads import normalized
from models.hstu import SequenceModel
from models.repeats import add_terms
from models.tasks.contract import Task
from models.tasks.scoring import normalized_items, output_scorer, repeat_terms
from serving.engine import Engine, UserRequest
from serving.token_batch import MOST_USERS, rounded_up
from serving.tokens import latest_events


class Search:
    """The search for the best items; it is padded and captured as CUDA graphs if the engine's passes are."""

    def __init__(self, engine: Engine, num_items: int):
        self.engine, self.num_items = engine, num_items
        self.scores_of = output_scorer(engine.model)

    def lists(
        self,
        out: Tensor,
        k: int,
        seen: Sequence[np.ndarray],
        filters: Sequence[ItemFilter] = (),
        windows: Callable[[np.ndarray], Batch] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores, rows) [B, up to k] of the best items for outputs [B, E], best first; -inf if none is left.

        seen: the items to leave out for each user, or empty for none; filters: one for each user, or empty for none;
        windows: the result of `windows_of`.
        """
        if not filters:
            return self._best(out, k, seen, None, None if windows is None else windows(np.arange(len(out))))

        def search(length: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            part = out if len(users) == len(out) else out[torch.from_numpy(users).to(out.device)]
            masks = stacked_masks([filters[user] for user in users], self.num_items)
            left_out = [seen[user] for user in users] if seen else []
            return self._best(part, length, left_out, masks, None if windows is None else windows(users))

        return limited_lists(search, k, filters, self.num_items)

    def _best(
        self,
        out: Tensor,
        k: int,
        seen: Sequence[np.ndarray],
        masks: tuple[np.ndarray, np.ndarray] | None,
        windows: Batch | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search like `lists`, with masks of `stacked_masks`; without CUDA graphs if there are windows."""
        users, counts = len(out), [len(items) for items in seen]
        padded = self.engine.padded and users <= MOST_USERS and windows is None
        rows, items = (rounded_up(users), rounded_up(max(1, sum(counts)), 4)) if padded else (users, sum(counts))
        num_masks = 0 if masks is None else rounded_up(len(masks[0])) if padded else len(masks[0])
        # `numbers` has the offsets, the mask of each user, then the seen items, two in each int64. Padding items are -1
        # and belong to the last user.
        key, graphs = ("lists", rows, items if seen else None, k, num_masks), self.engine.graphs if padded else None
        numbers = graphs.staged(key, 1) if graphs else None
        words = graphs.staged(key, 2) if graphs and num_masks else None
        if numbers is None:
            numbers = torch.empty(2 * rows + 1 + cdiv(items, 2), dtype=torch.int64)
        which, seen_items = numbers[rows + 1 : 2 * rows + 1].numpy(), numbers[2 * rows + 1 :].view(torch.int32).numpy()
        which.fill(0)
        if seen:
            offsets = numbers[: rows + 1].numpy()
            offsets[0] = 0
            np.cumsum(counts, out=offsets[1 : users + 1])
            offsets[users:] = items
            np.concatenate(seen, out=seen_items[: sum(counts)])
            seen_items[sum(counts) :] = -1
        inputs = [numbers]
        if masks is not None:
            words = torch.zeros(num_masks, cdiv(self.num_items, 8), dtype=torch.uint8) if words is None else words
            words[: len(masks[0])] = torch.from_numpy(masks[0])
            which[:users] = masks[1]
            inputs.append(words)

        def lists(out: Tensor, numbers: Tensor, *words: Tensor) -> Tensor:
            without = (numbers[2 * rows + 1 :].view(torch.int32)[:items], numbers[: rows + 1]) if seen else None
            passing = (words[0], numbers[rows + 1 : 2 * rows + 1]) if words else None
            values, best = best_items(self.scores_of(normalized(out), windows), k, without, passing)
            return torch.cat([values.float().view(torch.int32), best.int()], 1)

        if rows > users:
            out = F.pad(out, (0, 0, 0, rows - users))
        packed = graphs(key, lists, out, *inputs) if graphs else lists(out, *(x.to(out.device) for x in inputs))
        values, best = np.split(packed[:users].cpu().numpy(), 2, axis=1)
        return values.copy().view(np.float32), best


def windows_of(engine: Engine, requests: Sequence[UserRequest]) -> Callable[[np.ndarray], Batch] | None:
    """Return a function from indices of requests to a batch of their users' latest events.

    The scores of a model with a repeat term need it; None for other models.
    """
    if engine.model.repeats is None:
        return None

    def windows(users: np.ndarray) -> Batch:
        chosen = [requests[user] for user in users]
        histories, times = [one.history for one in chosen], [one.at for one in chosen]
        return latest_events(histories, times, engine.window.capacity).to(engine.device)

    return windows


def candidate_scores(
    engine: Engine,
    task: Task,
    requests: Sequence[UserRequest],
    candidates: Sequence[np.ndarray],
    out: Tensor | None = None,
) -> list[np.ndarray]:
    """Return the scores of the candidates of each request.

    candidates: rows of the item table for each request; out: the outputs of the requests if they are already computed,
    for tasks other than ranking.
    """
    # Sorted and distinct, so that the order of candidates does not change the rounding of their scores.
    unique = [np.unique(rows, return_inverse=True) for rows in candidates]
    distinct = [rows for rows, _ in unique]
    if engine.ranking:
        requests = [request._replace(candidates=rows) for request, rows in zip(requests, distinct)]
        scores = probabilities(engine.model, task, engine.answer(requests))
    else:
        out, windows_for = engine.answer([*requests]) if out is None else out, windows_of(engine, requests)
        windows = None if windows_for is None else windows_for(np.arange(len(requests)))
        scores = item_scores(engine.model, normalized(out), distinct, windows)
    parts = np.split(scores, np.cumsum([len(rows) for rows in distinct])[:-1])
    return [values[place] for values, (_, place) in zip(parts, unique)] if distinct else []


@torch.no_grad()
def probabilities(model: SequenceModel, task: Task, out: Tensor) -> np.ndarray:
    """Return the probabilities of actions for outputs [M, E] of a ranking run: [M], or [M, A] if A > 1."""
    scores = task.candidate_scores(model, out).float().cpu().numpy()
    return scores[:, 0] if scores.shape[1] == 1 else scores


@torch.no_grad()
def item_scores(
    model: SequenceModel, out: Tensor, candidates: Sequence[np.ndarray], windows: Batch | None = None
) -> np.ndarray:
    """Return the scores of all users' candidates, user by user: [sum of M].

    out: [B, E]; candidates: distinct ascending rows of the item table for each user; windows: the latest events of all
    users, for a model with a repeat term.
    """
    terms = None if windows is None else repeat_terms(model, out, windows)
    scores = []
    for user, (one, rows) in enumerate(zip(out[:, None], candidates)):
        items = torch.from_numpy(rows).to(out.device)
        vectors = model.item_rows(items)
        if model.head is not None:
            scores.append(model.head.scores_of_all(one, model.head.items(vectors))[0])
            continue
        cosines = one @ normalized_items(vectors).T
        if terms is not None and len(rows):
            window_items, added = terms[0][user], terms[1][user]
            places = torch.searchsorted(items, window_items).clamp(max=len(rows) - 1)
            add_terms(cosines, torch.where(items[places] == window_items, places, -1)[None], added[None])
        scores.append(cosines[0])
    return torch.cat(scores).float().cpu().numpy() if scores else np.zeros(0, np.float32)
