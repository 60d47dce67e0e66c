"""Measure the baselines of retrieval, and compare them with RecTools and implicit.

    python benchmarks/baselines.py time [--events N] [--users N] [--items N] [--ease-items N]
    python benchmarks/baselines.py compare FORMAT PATH      needs: pip install rectools implicit

`time` prints the seconds and the peak memory of fitting the baselines, without the search of settings, for --items
items and then for --ease-items; EASE is fitted only to catalogues of at most 10,000 items.
`compare` prints the greatest differences of scores. The definitions agree except for this:

- item-kNN: implicit weighs each event of a history by 1, here older events weigh less; the comparison sets the decay
  to 1. Which of equally near neighbours are kept is arbitrary; the comparison keeps all neighbours.
- EASE: RecTools adds up the weights of repeated events, here (and in the paper) each item counts once; the comparison
  uses distinct events. RecTools computes in fp64 and rounds to fp32 at the end, as here.
- popularity: no difference.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
from scipy import sparse

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main
from data.datasets import load_dataset
from data.splits import make_splits
from data.types import Dataset
from evaluation.baselines import EASE_PENALTY, ease, events_of, fit, nearest, tf_idf


def random_events(events: int, users: int, items: int, seed: int = 0) -> Dataset:
    """Return a data set whose users and items have lognormal activities and a Zipf-like popularity."""
    rng = np.random.default_rng(seed)
    activity = rng.lognormal(0, 1, users)
    lengths = np.maximum(2, rng.multinomial(events - 2 * users, activity / activity.sum()) + 2)
    popularity = 1 / (10 + np.arange(items)) ** 0.8
    drawn = rng.choice(items, lengths.sum(), p=popularity / popularity.sum()).astype(np.int32)
    offsets = np.append(0, np.cumsum(lengths))
    return Dataset(
        name="random",
        items=drawn,
        timestamps=np.arange(len(drawn), dtype=np.int64),
        actions=None,
        user_offsets=offsets,
        user_ids=np.arange(users),
        item_ids=np.arange(items),
        has_timestamps=True,
        fingerprint="random",
    )


def measure(options: argparse.Namespace) -> None:
    for items, kinds in (
        (options.items, "all but EASE" if options.items > 10_000 else "all"),
        (options.ease_items, "all"),
    ):
        dataset = random_events(options.events, options.users, items)
        splits = make_splits(dataset, "leave_one_out", max_seq_len=100)
        wall, core = time.monotonic(), time.process_time()
        fit(dataset, splits)
        wall, core = time.monotonic() - wall, time.process_time() - core
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{options.events:,} events, {options.users:,} users, {items:,} items, {kinds}: {core:.1f} s of a core, ",
            end="",
        )
        print(f"{wall:.1f} s, {peak:.2f} GiB at most so far, the data included", flush=True)


def compare(options: argparse.Namespace) -> None:
    import pandas as pd
    from implicit.nearest_neighbours import TFIDFRecommender
    from rectools import Columns
    from rectools.dataset import Dataset as Interactions
    from rectools.models import EASEModel, PopularModel

    dataset = load_dataset(format=options.format, path=options.path, cache_dir=None)
    splits = make_splits(dataset, "leave_one_out", max_seq_len=100)
    arrays, events = fit(dataset, splits), events_of(dataset, splits)
    num_items = dataset.num_items
    # item-kNN: implicit's similarities of all items.
    model = TFIDFRecommender(K=num_items, num_threads=1)
    model.fit(events.astype(np.float64), show_progress=False)
    places, values = nearest(tf_idf(events), num_items)
    similar = np.zeros((num_items, num_items), np.float32)
    np.put_along_axis(similar, places.astype(np.int64), values, 1)
    report("item-kNN", events @ similar, (events.astype(np.float64) @ model.similarity).toarray())
    rows = events.tocoo()
    once = pd.DataFrame(
        {Columns.User: rows.row, Columns.Item: rows.col, Columns.Weight: 1.0, Columns.Datetime: "2020-01-01"}
    )
    interactions = Interactions.construct(once)
    item_ids = interactions.item_id_map.convert_to_external(np.arange(interactions.item_id_map.size))
    known = np.zeros((num_items, num_items), np.float32)
    known[np.ix_(item_ids, item_ids)] = EASEModel(regularization=EASE_PENALTY).fit(interactions).weight
    distinct = sparse.csr_array((np.ones_like(events.data), events.indices, events.indptr), events.shape)
    report("EASE", distinct @ ease(events, EASE_PENALTY), distinct @ known)
    repeated = once.loc[once.index.repeat(rows.data.astype(int))].reset_index(drop=True)
    popular = PopularModel(popularity="n_interactions").fit(Interactions.construct(repeated))
    items, scores = popular.popularity_list
    theirs = np.zeros(num_items)
    theirs[Interactions.construct(repeated).item_id_map.convert_to_external(items)] = scores
    report("popularity", arrays["counts"], theirs)


def report(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    difference = np.abs(ours - theirs).max()
    print(f"{name}: greatest difference {difference:.2e}, greatest score {np.abs(theirs).max():.4g}")


def main() -> None:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    timed = commands.add_parser("time")
    timed.add_argument("--events", type=int, default=10_000_000)
    timed.add_argument("--users", type=int, default=100_000)
    timed.add_argument("--items", type=int, default=20_000)
    timed.add_argument("--ease-items", type=int, default=5_000)
    timed.set_defaults(call=measure)
    compared = commands.add_parser("compare")
    compared.add_argument("format")
    compared.add_argument("path")
    compared.set_defaults(call=compare)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    run_main(main)
