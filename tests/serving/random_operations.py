"""Run random operations on many users, and compare each answer with a model that recomputes everything (`Plain`).

python -m tests.serving.random_operations --operations 30000 --users 2000     minutes; watches memory too
"""

import argparse
import gc
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests.serving.plain import DENSE, NUM_ACTIONS, NUM_ITEMS, Plain, item_ids, make_config, make_model, serve

WEIGHTS = {"append": 40, "recommend": 20, "score": 20, "pin": 4, "unpin": 4, "evict": 6, "history": 3, "save": 1,
           "forget": 2}  # fmt: skip


class Campaign:
    """A recommender and a plain model that get the same events and requests."""

    def __init__(self, config, seed: int, users: int, resident: int, folder: Path, **options):
        self.rng, self.users, self.folder = np.random.default_rng(seed), users, folder
        self.config, self.model = config, make_model(config, seed)
        tokens = (2 if config.task.kind == "ranking" else 1) * config.model.max_seq_len + self.model.num_context
        heads, size = config.model.num_heads, config.model.layer_sizes.attention_dim
        layers = config.model.num_layers
        self.options = options | {"cache_bytes": resident * (tokens + 16) * (layers * heads * size * 2 * 4 + 8)}
        self.served = serve(config, self.model, **self.options)
        self.plain = Plain(config, self.model, options.get("slide"))
        self.pinned: set[int] = set()
        self.worst = 0.0
        self.now = self.ahead = 0

    def run(self, operations: int) -> None:
        chosen = WEIGHTS | ({} if self.config.data.features is None else {"describe": 10})
        names, weights = list(chosen), np.array(list(chosen.values()), float)
        for name in self.rng.choice(names, operations, p=weights / weights.sum()):
            getattr(self, name)()
            pool = self.served.statistics
            assert pool["pages_in_use"] <= pool["pages"] and pool["page_bytes"] <= self.options["cache_bytes"]

    def some(self) -> list[int]:
        """Draw a few users who have events."""
        known = [int(user) for user in self.plain.users]
        return [known[i] for i in self.rng.integers(0, len(known), self.rng.integers(1, 4))] if known else []

    def append(self) -> None:
        count = int(self.rng.integers(1, 9))
        users = self.rng.integers(0, self.users, count)
        if self.rng.random() < 0.3:
            users[:] = users[0]
        times = self.now + np.cumsum(self.rng.integers(0, 20_000, count))
        self.now = int(times[-1])
        late = self.rng.random(count) < 0.1
        times = np.where(late, self.rng.integers(0, self.now + 1, count), times)
        items = item_ids()[self.rng.integers(0, NUM_ITEMS, count)]
        reads = self.config.task.kind == "ranking" or self.config.model.action_embedding
        actions = self.rng.integers(0, NUM_ACTIONS, count) if reads else None
        self.served.append(users, items, times, actions, encode=bool(self.rng.random() < 0.8))
        for tokens in self.rng.integers(1, 20, self.rng.integers(0, 4)).tolist():
            self.ahead += self.served.encode_ahead(tokens)
        self.plain.append(users, items, times, actions)

    def at(self, user: int) -> int:
        return self.plain.users[str(user)][-1][0] + int(self.rng.integers(0, 50_000))

    def recommend(self) -> None:
        users = self.some()
        if self.config.task.kind == "ranking" or not users:
            return self.score()
        at, k = [self.at(user) for user in users], int(self.rng.integers(1, NUM_ITEMS + 3))
        seen = bool(self.rng.random() < 0.7)
        items, scores = self.served.recommend(users, k, at, seen)
        for user, time_, row, values in zip(users, at, items, scores):
            expected = self.plain.recommend(user, k, time_, seen).numpy()
            best = -np.sort(-expected)[:k]
            self.compare(values[: len(best)], best)
            some = np.isfinite(values)
            assert (row[~some] == -1).all() and len(set(row[some])) == some.sum()
            self.compare(expected[(row[some] - 100) // 3], values[some])

    def score(self) -> None:
        if not (users := self.some()):
            return
        at = [self.at(user) for user in users]
        candidates = item_ids()[self.rng.integers(0, NUM_ITEMS, (len(users), int(self.rng.integers(1, 6))))]
        scores = self.served.score(users, candidates, at)
        for user, time_, row, values in zip(users, at, candidates, scores):
            self.compare(values, self.plain.score(user, row, time_).numpy())

    def compare(self, actual, expected) -> None:
        both = np.isfinite(expected)
        assert (np.isfinite(actual) == both).all()
        worst = float(np.abs(np.asarray(actual)[both] - expected[both]).max(initial=0))
        self.worst = max(self.worst, worst)
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=1e-4)

    def pin(self) -> None:
        if len(self.pinned) < 3:
            users = self.some()[:1]
            self.served.pin(users)
            self.pinned |= set(users)

    def unpin(self) -> None:
        self.served.unpin(sorted(self.pinned))
        self.pinned.clear()

    def evict(self) -> None:
        self.served.evict(self.some())

    def history(self) -> None:
        for user in self.some():
            actual, expected = self.served.history(user), self.plain.window(user)
            assert actual.timestamps.tolist() == [time_ for time_, *_ in expected]
            assert actual.items.tolist() == [item for _, item, _ in expected]
            assert actual.count == len(self.plain.users[str(user)])

    def save(self) -> None:
        """Save the store, and continue with another recommender that restores it."""
        self.served.save(self.folder / "store")
        before = self.served.statistics
        self.served = serve(self.config, self.model, **self.options)
        self.served.restore(self.folder / "store")
        after = self.served.statistics
        same = ("users", "users_with_pages", "users_pinned", "pages_in_use")
        # A user whose pages have no token has no pages after a restore.
        assert all(after[name] <= before[name] for name in same) and after["users"] == before["users"]

    def forget(self) -> None:
        for user in set(self.some()[:1]):
            assert self.served.forget(user) and not self.served.forget(user)
            del self.plain.users[str(user)]
            self.plain.features.pop(str(user), None)
            self.pinned.discard(user)

    def describe(self) -> None:
        """Change the features of some users, with or without events."""
        for user in self.rng.integers(0, self.users, 2).tolist():
            country = [None, "de", "fr", "xx"][self.rng.integers(0, 4)]
            tags = self.rng.choice(list("abcz"), self.rng.integers(0, 3)).tolist()
            self.served.add_users([user], {"country": [country], "tags": [tags]})
            self.plain.describe(user, country, tags)


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=30_000)
    parser.add_argument("--users", type=int, default=2_000)
    parser.add_argument("--resident", type=int, default=100, help="users whose pages fit")
    parser.add_argument("--task", choices=("retrieval", "ranking"), default="retrieval")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = make_config(DENSE, task=options.task)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(config, options.seed, options.users, options.resident, Path(folder))
        began, parts = time.monotonic(), 10
        for part in range(parts):
            campaign.run(options.operations // parts)
            print(
                f"{(part + 1) * options.operations // parts:,} operations, {time.monotonic() - began:.0f} s, worst "
                f"difference {campaign.worst:.1e}, {resident_bytes() / 2**20:.0f} MiB, {campaign.served.statistics}",
                flush=True,
            )
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
