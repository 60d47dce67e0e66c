"""From a run's folder and a CSV of new events (user, item, timestamp) to what comes next for each user.

python examples/recommend.py RUN EVENTS.csv
"""

import sys
from pathlib import Path

import polars as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving import Recommender

run, events = sys.argv[1:]
recommender = Recommender.load(run, device="cpu")
new = pl.read_csv(events)
recommender.append(*(new[name].to_numpy() for name in ("user", "item", "timestamp")))
users = new["user"].unique(maintain_order=True).to_list()
items, scores = recommender.recommend(users, k=10)
for user, row in zip(users, items):
    print(f"{user}: {', '.join(map(str, row))}")
