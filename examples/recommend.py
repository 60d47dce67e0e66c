"""Recommend the next items for each user in a CSV of new events (user, item, timestamp), with a run.

python examples/recommend.py RUN EVENTS.csv
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("events", help="a CSV file with the columns user, item and timestamp")
    options = parser.parse_args()
    import polars as pl

    from serving import Recommender

    recommender = Recommender.load(options.run, device="cpu")
    try:
        new = pl.read_csv(options.events, columns=["user", "item", "timestamp"])
    except pl.exceptions.PolarsError as error:
        parser.error(f"{options.events}: {str(error).splitlines()[0]}")
    recommender.append(*(new[name].to_numpy() for name in ("user", "item", "timestamp")))
    users = new["user"].unique(maintain_order=True).to_list()
    items, _ = recommender.recommend(users, k=10)
    for user, row in zip(users, items):
        print(f"{user}: {', '.join(map(str, row))}")


if __name__ == "__main__":
    run_main(main)
