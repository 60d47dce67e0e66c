"""Measure how unevenly ranks share the work of a config's batches, balanced and divided round-robin.

    python benchmarks/balance.py configs/ml-1m-hstu.yaml [key=value ...]
    torchrun --standalone --nproc-per-node 2 benchmarks/balance.py configs/ml-1m-hstu.yaml --time

The sequences have the lengths of data generated in MovieLens 1M's shape, with --own those of the config's data, with
--lengths those in a file. The program prints a JSON line for each number of ranks and each batch size: the work of the
slowest rank divided by the mean over ranks, as mean and maximum over batches.

By default the work is predicted, for the batches of three epochs. With --time it is measured: the GPU time of each
rank's part of a step, the shorter of two, for --steps batches. A step has no exchanges, in which the ranks would wait
for each other. The host queues it while the GPU is busy, so that the host's time does not count. The item table has
3,706 rows.
"""

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.scale import part_of_batch
from cli.command import Parser, run_main
from data.balance import Deal
from models.hstu import SequenceModel
from training.config import RunConfig, load_config
from training.ranks.processes import Ranks
from training.ranks.step import token_work
from training.report import environment
from training.run import open_data, open_device
from training.step import build_step

ITEMS = 3_706
ML_1M = (
    f"data={{format: synthetic, protocol: published, synthetic: {{num_users: 6040, num_items: {ITEMS}, "
    "mean_length: 165.6, min_length: 20, max_length: 2300}}"
)
BUSY = 100_000_000  # clock cycles for which a GPU waits while the host queues a step: 50 ms of an H100
WARM_UP = 3  # batches


def lengths_of(config: RunConfig, file: Path | None) -> np.ndarray:
    """Return the lengths of the training sequences, of the data or in the file."""
    if file is not None:
        return np.minimum(np.load(file), config.model.max_seq_len)
    split = open_data(config).splits.train
    return split.end - split.begin - 1


def drawn(lengths: np.ndarray, size: int, seed: int, epochs: int):
    """Yield the lengths of the sequences of each whole batch."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(lengths))
        for begin in range(0, len(order) - size + 1, size):
            yield lengths[order[begin : begin + size]]


def described(imbalances: list) -> dict:
    """Return the mean and the maximum over batches of imbalances [batches, 2], balanced and divided round-robin."""
    columns = zip(("balanced", "in turn"), np.array(imbalances).T)
    return {name: {"mean": round(values.mean(), 4), "most": round(values.max(), 4)} for name, values in columns}


def measured(config: RunConfig, lengths: np.ndarray, size: int, steps: int, ranks: Ranks, device: torch.device) -> dict:
    """Time each rank's part of some batches."""
    cost, gpu, rng = token_work(config.model), device.type == "cuda", np.random.default_rng(0)
    torch.manual_seed(config.seed)
    model = SequenceModel(config.model, ITEMS).to(device).train()
    with patch.dict(os.environ):
        os.environ.pop("WORLD_SIZE", None)  # the step of one process, uncaptured
        _, step = build_step(config, model, device)

    def seconds(batch) -> float:
        if not gpu:
            began = time.perf_counter()
            step(batch)
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        begin.record()
        step(batch)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    times, predicted = [], []
    for number, part in enumerate(drawn(lengths, size, config.seed, 3)):
        if number == WARM_UP + steps:
            break
        parts, work = [], []
        for even in (True, False):
            local_rows, imbalance = Deal(ranks.rank, ranks.world, cost, even).local(part)
            ranks.greatest(0)
            batch = part_of_batch(part, local_rows, ITEMS, rng).to(device)
            parts.append(min(seconds(batch) for _ in range(2)))
            work.append(imbalance)
        if number >= WARM_UP:
            times.append(parts)
            predicted.append(work)
    rank_times = np.array(ranks.all_gather(times))  # [ranks, batches, 2]
    slowest, mean = rank_times.max(0), rank_times.mean(0)
    record = {"by": "time", "steps": len(times), **described(slowest / mean), "predicted": described(predicted)}
    for name, place in (("balanced", 0), ("in turn", 1)):
        record[name] |= {"slowest_ms": round(1e3 * slowest[:, place].mean(), 3)}
        record[name] |= {"ranks_ms": [round(1e3 * rank[:, place].mean(), 3) for rank in rank_times]}
    return record | environment(device)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--own", action="store_true", help="measure on the data of the config")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="the lengths of the sequences, a npy file")
    parser.add_argument("--time", action="store_true", help="measure times, under torchrun")
    parser.add_argument("--steps", type=int, default=20, help="with --time: the number of batches")
    options = parser.parse_intermixed_args()
    overrides = [*([] if options.own else [ML_1M]), *options.overrides, "train.cuda_graphs=false"]
    config = load_config(options.config, overrides)
    lengths, size = lengths_of(config, options.lengths), config.train.batch_size
    if options.time:
        device, ranks = open_device(config), Ranks(load_config(options.config, [*overrides, "parallel.data=auto"]))
        for batch in (size, size * ranks.world):
            record = {"config": options.config, "overrides": options.overrides, "ranks": ranks.world}
            record |= {"batch_size": batch, **measured(config, lengths, batch, options.steps, ranks, device)}
            if ranks.first:
                print(json.dumps(record), flush=True)
        return
    cost = token_work(config.model)
    for world in (2, 4, 8):
        for batch in (size, size * world):
            imbalances = [
                [Deal(0, world, cost, even).owners(part)[1] for even in (True, False)]
                for part in drawn(lengths, batch, config.seed, 3)
            ]
            record = {"config": options.config, "ranks": world, "batch_size": batch}
            print(json.dumps(record | described(imbalances)), flush=True)


if __name__ == "__main__":
    run_main(main)
