"""Measure a training step over ranks that share batches and the item table: time and memory, on random sequences.

    python benchmarks/scale.py configs/ml-1m-hstu-large.yaml --items 10000000            the plain step of one GPU
    torchrun --standalone --nproc-per-node 2 benchmarks/scale.py CONFIG --items 10000000 parallel.data=auto \\
        parallel.embedding=row_wise                                                      weak scaling: a batch for each
    python benchmarks/scale.py CONFIG --items 50000000 parallel.embedding=row_wise parallel.fused=rowwise_adagrad

train.batch_size sequences for each rank, their lengths about as MovieLens 1M has them, cut at model.max_seq_len
(--longest: all have that length). The program prints one JSON line: milliseconds of a step on the slowest rank (median
of --steps, after a warm-up), the imbalance by predicted work, peak memory of the first rank, versions.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from data.batch import Batch, Whole
from models import embedding
from models.config import RunConfig, load_config
from models.data_parallel.step import deal_of
from models.hstu import SequenceModel
from models.parallel.ranks import Ranks
from models.parallel.tables import ShardedTable
from models.report import environment
from models.run import open_device


def random_batch(config: RunConfig, items: int, ranks: Ranks, step: int, longest: bool, device) -> Batch:
    """Return this rank's part of a random batch, which has train.batch_size sequences for each rank."""
    rng, most = np.random.default_rng([config.seed, step]), config.model.max_seq_len
    lengths = np.full(config.train.batch_size * ranks.data, most)
    if not longest:
        lengths = np.minimum(most, np.maximum(19, rng.lognormal(4.6, 0.9, len(lengths)).astype(int)))
    deal, starts = deal_of(config, ranks), np.cumsum(lengths) - lengths
    mine, imbalance = (np.arange(len(lengths)), 1.0) if deal is None else deal.mine(lengths)
    rows = np.concatenate([np.arange(starts[sequence], starts[sequence] + lengths[sequence]) for sequence in mine])
    ids = torch.from_numpy(rng.integers(0, items, (2, lengths.sum()))[:, rows])
    times = torch.from_numpy(rows * 3600)
    batch = Batch(
        item_ids=ids[0],
        timestamps=times,
        target_ids=ids[1],
        query_timestamps=times + 3600,
        seq_offsets=torch.from_numpy(np.append(0, np.cumsum(lengths[mine]))),
        users=torch.from_numpy(mine),
        rows=torch.from_numpy(rows) if ranks.engine else None,
    ).to(device)
    batch.whole = Whole(step, int(lengths.sum()), imbalance) if ranks.engine else None
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--longest", action="store_true")
    options = parser.parse_intermixed_args()
    config = load_config(options.config, options.overrides)
    ranks, device = Ranks(config), open_device(config)
    torch.manual_seed(config.seed)
    table = ShardedTable(config, options.items, ranks, device) if config.parallel.sharded else None
    began = time.monotonic()
    # The initial rows of tables do not affect the time, and drawing them on the host takes a minute.
    with patch.object(ShardedTable, "draw"), patch.object(embedding, "truncated_normal_"):
        model = SequenceModel(config.model, options.items, table=table).to(device).train()
    tables = model.embedding.parameters() if table is None else [*model.embedding.parameters(), table.weight]
    with torch.no_grad():
        for weight in tables:
            weight.normal_(std=0.02)
    _, step = train.build_step(config, model, device, ranks=ranks)
    built = time.monotonic() - began
    batches = [random_batch(config, options.items, ranks, n, options.longest, device) for n in range(options.steps)]
    seconds, losses, gpu = [], [], device.type == "cuda"
    # Each padded size is run, captured and replayed.
    for number, batch in enumerate(batches * (3 if gpu else 2)):
        if number == len(batches) and gpu:
            torch.cuda.reset_peak_memory_stats()
        if gpu:
            torch.cuda.synchronize()
        began = time.monotonic()
        losses.append(float(step(batch)["loss"]))  # waits for the device
        seconds.append(time.monotonic() - began)
    slowest = float(ranks.max(torch.tensor(statistics.median(seconds[-options.steps :]))))
    record = {
        "config": options.config,
        "overrides": options.overrides,
        "items": options.items,
        "ranks": ranks.world,
        "ms": 1e3 * slowest,
        "tokens": batches[-1].num_tokens if batches[-1].whole is None else batches[-1].whole.tokens,
        "losses": [losses[0], losses[-1]],
        "imbalance": statistics.mean(1.0 if batch.whole is None else batch.whole.imbalance for batch in batches),
        "build_seconds": built,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        **environment(device),
    }
    if ranks.first:
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
