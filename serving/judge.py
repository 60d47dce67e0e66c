"""Evaluate a recommender like a model, so that the metrics are those of a service's answers.

Letters: T tokens, B sequences, E embedding size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.ranking import RankingBatch
from data.types import Dataset
from models.attention.contract import AuxLoss
from serving.recommender import Recommender


class ServedModel:
    """A model for evaluation whose outputs are computed by a recommender.

    Each sequence has a user without earlier events. For retrieval, the history before the target is appended in two
    portions, the second one being the last event; the last output is requested at the time of the target, and the other
    outputs are 0. For ranking, each scored event is requested as a candidate at its time and then appended; a user's
    first event cannot be scored (NoHistory).
    """

    def __init__(self, recommender: Recommender, dataset: Dataset):
        self.recommender, self.dataset = recommender, dataset
        self.model = recommender.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def eval(self) -> "ServedModel":
        return self

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, AuxLoss]]:
        """Return (outputs [T, E] of length one at the last token of each sequence, no auxiliary losses)."""
        users = batch.users.cpu().numpy()
        assert batch.seen_offsets is not None
        ends = self.dataset.user_offsets[users] + batch.seen_offsets.diff().cpu().numpy()
        keys = [f"{row}" for row in range(len(users))]  # a user may have several sequences
        self._describe(keys, users)
        for portion in ((None, 1), (1, 0)):
            self._append(keys, users, ends, *portion)
        last = batch.seq_offsets[1:] - 1
        at = batch.query_timestamps[last].cpu().numpy()
        user_outputs = self.recommender.outputs(keys, at)
        self._forget(keys)
        out = torch.zeros(batch.num_tokens, user_outputs.shape[1], device=user_outputs.device)
        return out.index_copy_(0, last, user_outputs), {}

    def _append(self, keys: list[str], users: np.ndarray, ends: np.ndarray, start: int | None, stop: int) -> None:
        """Append the events of each user from `ends - start` (None: the first) to `ends - stop`."""
        begins = self.dataset.user_offsets[users] if start is None else ends - start
        counts = ends - stop - begins
        events = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        self._add(np.repeat(np.array(keys), counts).tolist(), events)

    def _add(self, keys: list[str], events: np.ndarray) -> None:
        data = self.dataset
        self.recommender.append_rows(
            keys,
            data.items[events].astype(np.int64),
            data.timestamps[events],
            self._codes(events, data.actions),
        )

    def _codes(self, events: np.ndarray, actions: np.ndarray | None) -> np.ndarray | None:
        """Return the recommender's codes of events."""
        rows, contexts = self.dataset.event_rows, self.recommender.contexts
        action_codes = None if actions is None or contexts.actions is None else actions[events]
        return contexts.joined(action_codes, None if rows is None else rows[events])

    def _describe(self, keys: list[str], users: np.ndarray) -> None:
        """Store the features of the data set's users for the recommender's users `keys`."""
        rows = self.dataset.user_rows
        self.recommender.put_users(keys, None if rows is None else rows[users])

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            self.recommender.forget(key)

    def raw_output(self, batch: RankingBatch) -> tuple[Tensor, dict[str, AuxLoss]]:
        """Return (outputs [T, E] before normalisation at the scored item tokens of a ranking batch, no auxiliary
        losses).
        """
        tokens = (batch.labels[:, 0] >= 0).nonzero()[:, 0]
        events = batch.events[tokens].cpu().numpy()
        users = self.dataset.users_of(events)
        # The scored events of each user in order; round i scores the i-th event of each user.
        order = np.lexsort((events, users))
        starts = np.flatnonzero(np.diff(users[order], prepend=-1))
        counts = np.diff(np.append(starts, len(order)))
        first = events[order[starts]]
        keys = np.array([f"{user}" for user in users[order[starts]].tolist()])
        everyone = np.arange(len(starts))
        self._describe(keys.tolist(), users[order[starts]])
        self._append(keys.tolist(), users[order[starts]], first, None, 0)
        out = torch.zeros(batch.num_tokens, self.model.embedding.position.shape[1], device=tokens.device)
        for place in range(int(counts.max(initial=0))):
            active = everyone[counts > place]
            current = order[starts[active] + place]
            candidates = list(self.dataset.items[events[current], None].astype(np.int64))
            candidate_outputs = self.recommender.candidate_outputs(
                keys[active].tolist(),
                candidates,
                self.dataset.timestamps[events[current]],
                self._codes(events[current], None) if self.dataset.event_rows is not None else None,
            )
            out[tokens[torch.from_numpy(current).to(tokens.device)]] = candidate_outputs
            self._add(keys[active].tolist(), events[current])
        self._forget(keys.tolist())
        return out, {}
