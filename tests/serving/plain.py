"""Define a recommender without a cache, which recomputes everything: the reference for `Recommender`.

It knows the window rule and the model, and nothing of how serving works.
"""

import bisect
import math
from dataclasses import replace

import numpy as np
import torch

from data.batch import Batch
from data.features.vocabulary import FeatureVocabulary, KnownFeature
from data.ranking import RankingBatch
from data.vocabulary import Vocabulary
from models.tasks.scoring import output_scorer
from serving import Recommender, ServingOptions
from training.config import RunConfig
from training.run import build_model

NUM_ITEMS, NUM_ACTIONS = 40, 6
DENSE = {"kind": "dense"}
RANKING = {
    "task": {"kind": "ranking", "actions": [{"name": "liked", "at_least": 4}]},
    "data": {"format": "ml-100k", "protocol": "last_tenth"},
}
USER_FEATURES = FeatureVocabulary(
    (
        KnownFeature("users", "country", "category", np.array(["de", "fr"])),
        KnownFeature("users", "tags", "list", np.array(["a", "b", "c"])),
    )
)
TASKS = {
    "retrieval": {},
    "ranking": RANKING,
    "targets": RANKING | {"task": RANKING["task"] | {"layout": "targets", "num_targets": 3}},
}


def make_config(attention=DENSE, *, max_seq_len=24, task="retrieval", loss=None, tokens=False, **model) -> RunConfig:
    """Return a small run with this attention; model: more options of the model.

    tokens: whether users have features, which are tokens.
    """
    sizes = dict(block="hstu", max_seq_len=max_seq_len, embedding_dim=32, num_layers=2, num_heads=2)
    tree = {
        "name": "small",
        "data": {"format": "ml-100k", "protocol": "leave_one_out"},
        "model": sizes | {"attention": attention} | model,
        "train": {"epochs": 1},
    } | ({"loss": loss} if loss else {})
    tree |= TASKS[task]
    if tokens:
        users = {"format": "csv", "path": "users.csv", "columns": dict(country="category", tags="list"), "as": "tokens"}
        tree |= {"data": tree["data"] | {"features": {"users": users}}}
    return RunConfig.model_validate(tree)


def make_model(config: RunConfig, seed=0):
    torch.manual_seed(seed)
    model = build_model(config, vocabulary(config), torch.device("cpu")).eval()
    with torch.no_grad():
        for layer in model.layers:
            if hasattr(layer, "uvqk"):
                layer.uvqk.mul_(10)  # so that attention changes the scores
            for name in ("position_bias", "time_bias"):
                if getattr(layer.attention, name, None) is not None:
                    getattr(layer.attention, name).mul_(20)
        if model.num_context:
            for weight in model.embedding.context.parameters():
                weight.mul_(20)
    return model


def item_ids():
    return np.arange(NUM_ITEMS) * 3 + 100


def vocabulary(config):
    actions = config.task.kind == "ranking" or config.model.action_embedding
    known = Vocabulary(item_ids(), NUM_ACTIONS if actions else None)
    return replace(known, features=USER_FEATURES) if config.data.features else known


def serve(config, model, clock=lambda: 0, **options) -> Recommender:
    options = {"cache_bytes": 2**24} | options  # the default of 1 GiB takes a second to clear
    return Recommender(model, config, vocabulary(config), options=ServingOptions(**options), clock=clock)


def window_begin(count: int, capacity: int, slide: int) -> int:
    return slide * math.ceil(max(0, count - capacity) / slide)


class Plain:
    """A recommender with users' events as lists; each answer runs the model on the whole sequence."""

    def __init__(self, config, model, slide=None):
        self.config, self.model = config, model
        self.ranking = config.task.kind == "ranking"
        self.targets = self.ranking and config.task.layout == "targets"
        longest = config.model.max_seq_len
        self.capacity = (longest - 1) // 2 if self.ranking else longest
        if self.targets:
            self.capacity = longest - config.task.num_targets
        self.slide = slide or max(1, self.capacity // 4)
        self.users: dict[str, list[tuple[int, int, int]]] = {}
        self.features: dict[str, list[list[int]]] = {}  # user -> the row of the country, the rows of up to two tags

    def append(self, users, items, timestamps, actions=None):
        actions = [0] * len(users) if actions is None else actions
        for user, item, time, action in zip(users, items, timestamps, actions):
            events = self.users.setdefault(str(user), [])
            bisect.insort(events, (int(time), int(item), int(action)), key=lambda event: event[0])

    def window(self, user):
        events = self.users[str(user)]
        return events[window_begin(len(events), self.capacity, self.slide) :]

    def describe(self, user, country, tags):
        rows = (None if country is None else ["xx", "de", "fr"].index(country)), [["z", *"abc"].index(x) for x in tags]
        self.features[str(user)] = [[-1 if rows[0] is None else rows[0], -1], (rows[1] + [-1, -1])[:2]]

    def user_features(self, user):
        if self.config.data.features is None:
            return None
        return torch.tensor([self.features.get(str(user), [[-1, -1], [-1, -1]])])

    @torch.no_grad()
    def output(self, user, at):
        """Return the output [E] of a retrieval model, of Euclidean length one."""
        times, items, actions = (torch.tensor(x) for x in zip(*self.window(user)))
        items = (items - 100) // 3
        batch = Batch(
            item_ids=items,
            timestamps=times,
            target_ids=torch.full_like(items, -1),
            query_timestamps=torch.cat([times[1:], torch.tensor([at])]),
            seq_offsets=torch.tensor([0, len(items)]),
            users=torch.zeros(1, dtype=torch.int64),
            actions=actions if self.config.model.action_embedding else None,
            user_features=self.user_features(user),
        )
        return self.model(batch)[0][-1]

    def recommend(self, user, k, at, exclude_seen=True):
        scores = torch.cat([tile for *_, tile in output_scorer(self.model)(self.output(user, at)[None]).tiles()], 1)[0]
        if exclude_seen:
            seen = sorted({(item - 100) // 3 for _, item, _ in self.users[str(user)]})
            scores[seen] = -math.inf
        return scores

    @torch.no_grad()
    def score(self, user, candidates, at):
        candidates = torch.as_tensor(candidates)
        if not self.ranking:
            return self.recommend(user, None, at, False)[(candidates - 100) // 3]
        return torch.stack([self.probability(user, int(item), at) for item in candidates])

    def probability(self, user, candidate, at):
        times, items, actions = (torch.tensor(x) for x in zip(*self.window(user), (at, candidate, 0)))
        following = torch.cat([times[1:], times[-1:]])
        each, count = (1, len(items)) if self.targets else (2, 2 * len(items) - 1)
        both = lambda x: x.repeat_interleave(each)[:count]
        batch = RankingBatch(
            item_ids=both((items - 100) // 3),
            timestamps=both(times),
            target_ids=torch.full((count,), -1),
            query_timestamps=following if self.targets else torch.stack([times, following], 1).flatten()[:-1],
            seq_offsets=torch.tensor([0, count]),
            users=torch.zeros(1, dtype=torch.int64),
            actions=both(actions),
            has_action=torch.arange(count) < count - 1 if self.targets else torch.arange(count) % 2 == 1,
            num_targets=torch.ones(1, dtype=torch.int64) if self.targets else None,
            user_features=self.user_features(user),
        )
        return self.model.task_head(self.model.raw_output(batch)[0][-1:])[0, 0].sigmoid()
