"""Measure the imbalance of a config's batches by predicted work, balanced and dealt in turn, over sharing ranks.

    python benchmarks/balance.py configs/ml-1m-hstu.yaml [key=value ...]

The data are generated in MovieLens 1M's shape, or with --own the config's. The program prints a JSON line for each
number of ranks and each batch size: the slowest rank's work over the ranks' mean, as mean and maximum over the batches
of three epochs.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.balance import Deal
from models.config import load_config
from models.data_parallel.step import token_work
from models.run import open_data

ML_1M = (
    "data={format: synthetic, protocol: published, synthetic: {num_users: 6040, num_items: 3706, mean_length: 165.6, "
    "min_length: 20, max_length: 2300}}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--own", action="store_true", help="measure on the data of the config")
    options = parser.parse_intermixed_args()
    config = load_config(options.config, [*([] if options.own else [ML_1M]), *options.overrides])
    split, size, cost = open_data(config).splits.train, config.train.batch_size, token_work(config.model)
    lengths = split.end - split.begin - 1
    for ranks in (2, 4, 8):
        for batch in (size, size * ranks):
            rng, imbalances = np.random.default_rng(config.seed), []
            for _ in range(3):
                order = rng.permutation(len(lengths))
                for begin in range(0, len(order) - batch + 1, batch):
                    part = lengths[order[begin : begin + batch]]
                    imbalances.append([Deal(0, ranks, cost, even).owners(part)[1] for even in (True, False)])
            record = {"config": options.config, "ranks": ranks, "batch_size": batch}
            for name, values in zip(("balanced", "in turn"), np.array(imbalances).T):
                record[name] = {"mean": round(values.mean(), 4), "most": round(values.max(), 4)}
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
