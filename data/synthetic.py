"""Generate a seeded data set with a structure that needs a sequence model. Requires only numpy and pydantic.

The structure:
- items are in clusters; each item has a few likely successors in its cluster (a Markov chain), so that the last item
  is informative about the next one;
- events are in sessions: minutes between events of a session, days between sessions;
- each user has a few home clusters and visits them in turn, one in each session: after a long gap the next item is from
  the next home cluster, not a successor of the last item, so that time gaps are informative, too;
- popularity is skewed (Zipf) in all draws, including home clusters, and some events are drawn by popularity only;
- users rarely repeat an item, as in ratings data: an item that was already drawn is replaced if possible;
- with `actions`, each event is liked (1) or not (0): users differ in how much they like each cluster and in how much
  they like items in general, and items differ in quality.

Letters: E events, U users, I items, C clusters, K successors.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from data.options import SyntheticOptions, parse_options
from data.types import Dataset

GENERATOR_VERSION = 1  # part of the fingerprint: increase it when the same options give other data
DAY = 86_400
START = 1_577_836_800  # 2020-01-01 00:00:00 UTC
TRIES = 6  # draws of each kind (successor, cluster, popularity) before a seen item is accepted
CHUNK_CELLS = 1 << 27  # users at a time * items, so that the table of seen items has at most 128 MiB


def generate(**options) -> Dataset:
    """Generate the data set with these SyntheticOptions; the same options and numpy version give the same data.

    Every user has at least min_length events. All num_items items are in the catalogue, even without an event.
    DataError for wrong options (see `options.parse_options`).
    """
    o = parse_options(SyntheticOptions, options, "data.synthetic")
    rng = np.random.default_rng(o.seed)
    weight = np.arange(1, o.num_items + 1) ** -float(o.zipf)  # weights of the items in order of popularity
    cluster = rng.permutation(np.arange(o.num_items) % o.num_clusters)  # [I]
    # Items by cluster, the most popular first, and the cumulative sums of their weights, to draw from.
    members = np.argsort(cluster, kind="stable")
    start = np.searchsorted(cluster[members], np.arange(o.num_clusters + 1))  # [C+1]
    running = np.cumsum(weight[members])
    before = np.append(0.0, running)[start]  # [C+1]

    def from_cluster(c: np.ndarray) -> np.ndarray:
        """Draw one item of each of these clusters, by popularity."""
        x = before[c] + rng.random(c.shape) * (before[c + 1] - before[c])
        return members[np.clip(np.searchsorted(running, x, side="right"), start[c], start[c + 1] - 1)]

    total = np.cumsum(weight)

    def by_popularity(n: int) -> np.ndarray:
        return np.minimum(np.searchsorted(total, rng.random(n) * total[-1], side="right"), o.num_items - 1)

    successors = from_cluster(np.repeat(cluster[:, None], o.num_successors, axis=1))  # [I, K]
    share = np.cumsum(0.6 ** np.arange(o.num_successors))  # the first successor is the likeliest
    share /= share[-1]

    lengths = np.clip(
        o.min_length + rng.exponential(o.mean_length - o.min_length, o.num_users), o.min_length, o.max_length
    ).astype(np.int64)
    offsets = np.append(0, np.cumsum(lengths))
    items = np.empty(offsets[-1], np.int64)
    times = np.empty(offsets[-1], np.int64)
    chunk = max(1, CHUNK_CELLS // o.num_items)
    for first in range(0, o.num_users, chunk):
        users = np.arange(first, min(first + chunk, o.num_users))
        users = users[np.argsort(-lengths[users], kind="stable")]  # users with remaining events are a prefix
        homes = cluster[by_popularity(len(users) * o.num_homes)].reshape(len(users), o.num_homes)
        session = np.zeros(len(users), np.int64)
        seen = np.zeros((len(users), o.num_items), bool)
        now = START + rng.integers(0, 365 * DAY, len(users))
        last = np.zeros(len(users), np.int64)
        for step in range(int(lengths[users[0]])):
            n = int(np.count_nonzero(lengths[users] > step))
            rows = np.arange(n)
            new_session = (rng.random(n) < 1 / o.session_length) | (step == 0)
            session[:n] += new_session
            gap = np.where(
                new_session, DAY * (1 + rng.exponential(4.0, n)), 20 + rng.exponential(180.0, n)
            )  # seconds: days between sessions, minutes within one
            now[:n] += gap.astype(np.int64) * (step > 0)
            home = homes[rows, session[:n] % o.num_homes]
            noisy = rng.random(n) < o.noise
            choice = np.zeros(n, np.int64)
            open_rows = rows
            for _ in range(TRIES):
                r = open_rows
                k = np.searchsorted(share, rng.random(len(r)), side="right").clip(max=o.num_successors - 1)
                drawn = np.where(new_session[r], from_cluster(home[r]), successors[last[r], k])
                choice[r] = np.where(noisy[r], by_popularity(len(r)), drawn)
                open_rows = r[seen[r, choice[r]]]
            # All successors are seen: draw another item of the user's current cluster, then one by popularity.
            for attempt in range(2 * TRIES):
                r = open_rows
                choice[r] = from_cluster(cluster[last[r]]) if attempt < TRIES else by_popularity(len(r))
                open_rows = r[seen[r, choice[r]]]
            seen[rows, choice] = True
            last[:n] = choice
            at = offsets[users[:n]] + step
            items[at], times[at] = choice, now[:n]
    actions = None
    if o.actions:
        chance = like_probabilities(o, np.repeat(np.arange(o.num_users), lengths), items, cluster[items])
        actions = (np.random.default_rng([o.seed, 1]).random(len(items)) < chance).astype(np.int32)
    # So far, numbers are in order of popularity, which the final ids must not reveal.
    items = rng.permutation(o.num_items)[items]
    options = o.model_dump(exclude=None if o.actions else {"actions"})
    recipe = json.dumps([GENERATOR_VERSION, options], sort_keys=True)
    return Dataset(
        name="synthetic",
        items=items.astype(np.int32),
        timestamps=times,
        actions=actions,
        user_offsets=offsets,
        user_ids=np.arange(1, o.num_users + 1),
        item_ids=np.arange(1, o.num_items + 1),
        has_timestamps=True,
        fingerprint=hashlib.sha256(recipe.encode()).hexdigest(),
    )


def like_probabilities(o: SyntheticOptions, users: np.ndarray, items: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the probability that each event is liked: [E]. users, items, clusters: [E] int.

    The log-odds are a user's general leaning, plus the item's quality, plus the user's taste for the item's cluster. No
    model can predict the actions better than these probabilities.
    """
    rng = np.random.default_rng([o.seed, 2])
    leaning, quality = rng.normal(0, 0.5, o.num_users), rng.normal(0, 0.5, o.num_items)
    taste = rng.normal(0, 3.0, (o.num_users, o.num_clusters))
    return 1 / (1 + np.exp(-(leaning[users] + quality[items] + taste[users, clusters])))
