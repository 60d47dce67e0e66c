"""Measure training steps over ranks that share batches and the item table: time and memory, on random sequences.

    python benchmarks/scale.py large long                    the plain step of one GPU, captured and uncaptured
    python benchmarks/scale.py large long --shared           the step of several ranks, on one
    torchrun --standalone --nproc-per-node 2 benchmarks/scale.py large long whole fused
                                                             weak scaling: a batch for each rank
    torchrun --standalone --nproc-per-node 4 benchmarks/scale.py long-replicated parallel.context=2
                                                             two by two: ranks that share batches, and sequences
    torchrun --standalone --nproc-per-node 4 benchmarks/scale.py long-replicated parallel.context=4 parallel.data=1
                                                             one batch by heads over four, in CUDA graphs
    python benchmarks/scale.py --config configs/ml-1m-hstu.yaml --items 1000000 parallel.embedding=row_wise

The names are cases of CASES, each with its options; --config measures another configuration. Each rank has
train.batch_size sequences, with lengths about as in MovieLens 1M, cut at model.max_seq_len, or all of that length. The
program prints a JSON line for each case: milliseconds of a step on the slowest rank (`queued`: the shorter of two means
of --steps in a row; `median`: of single steps, each of which the host waits for), tokens of a step, the imbalance by
predicted work, peak memory, versions. --profile adds where the GPU's time goes in a step. The line of a case that fails
has its traceback, and the exit code is 1. benchmarks/scale_tables.py makes tables of the lines.
"""

import faulthandler
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.run import covered
from cli.command import Parser, run_main
from data.batch import Batch, Whole
from models import embedding
from models.hstu import SequenceModel
from training.config import RunConfig, load_config
from training.graph import Step, captures
from training.ranks.processes import Ranks
from training.ranks.step import deal_of
from training.ranks.tables import ShardedTable
from training.report import environment
from training.run import open_device
from training.step import build_step

ROOT = Path(__file__).resolve().parents[1]
LARGE, SMALL = str(ROOT / "configs/ml-1m-hstu-large.yaml"), str(ROOT / "configs/ml-1m-hstu.yaml")
LONG = "model={block: hstu, max_seq_len: 4096, embedding_dim: 256, num_layers: 4, num_heads: 4, dropout: 0.2, "
LONG += "attention: {kind: dense}}"
BF16, ROWS = "train.autocast=bf16", "parallel.embedding=row_wise"


# (Whether several ranks share a step, whether it is captured in CUDA graphs) -> the title of this kind of step.
HOW = {
    (False, False): "uncaptured",
    (False, True): "captured",
    (True, False): "shared",
    (True, True): "shared, captured",
}


class Case(NamedTuple):
    """A configuration to measure.

    overrides  for all steps
    shared     further overrides for a step that ranks share
    items      the number of items
    longest    whether all sequences have the length model.max_seq_len
    """

    config: str
    overrides: tuple[str, ...]
    shared: tuple[str, ...]
    items: int
    longest: bool = False


CASES = {
    "large": Case(LARGE, (), (ROWS,), 10_000_000),
    "long": Case(SMALL, (LONG, BF16, "loss.kind=in_batch", "train.batch_size=16"), (ROWS,), 100_000, True),
    "large-replicated": Case(LARGE, (), (), 3_706),
    "long-replicated": Case(SMALL, (LONG, BF16, "loss.kind=in_batch", "train.batch_size=16"), (), 10_000, True),
    "whole": Case(
        *(SMALL, ("model.embedding_dim=128", BF16, "loss={kind: cross_entropy}", "train.batch_size=16")),
        *((ROWS,), 10_000_000),
    ),
    "fused": Case(
        *(SMALL, ("model.embedding_dim=128", BF16)),
        *((ROWS, "parallel.fused=rowwise_adagrad"), 50_000_000),
    ),
    "table": Case(SMALL, ("model.embedding_dim=64",), ("parallel.embedding=table_wise",), 1_000_000),
    "column": Case(SMALL, ("model.embedding_dim=64",), ("parallel.embedding=column_wise",), 1_000_000),
}


def random_batch(config: RunConfig, items: int, ranks: Ranks, step: int, longest: bool, device) -> Batch:
    """Return this rank's part of a random batch, which has train.batch_size sequences for each rank."""
    rng, most = np.random.default_rng([config.seed, step]), config.model.max_seq_len
    lengths = np.full(config.train.batch_size * ranks.data, most)
    if not longest:
        lengths = np.minimum(most, np.maximum(19, rng.lognormal(4.6, 0.9, len(lengths)).astype(int)))
    deal = deal_of(config, ranks)
    local, imbalance = (np.arange(len(lengths)), 1.0) if deal is None else deal.local(lengths)
    batch = part_of_batch(lengths, local, items, rng)
    if deal is None:
        batch.rows = None
    else:
        batch.whole = Whole(step, int(lengths.sum()), imbalance)
    return batch.to(device)


def part_of_batch(lengths: np.ndarray, local: np.ndarray, items: int, rng: np.random.Generator) -> Batch:
    """Return a rank's part of a batch of random items. lengths: of all its sequences; local: the rank's sequences."""
    starts = np.cumsum(lengths) - lengths
    rows = np.concatenate([np.arange(starts[sequence], starts[sequence] + lengths[sequence]) for sequence in local])
    ids = torch.from_numpy(rng.integers(0, items, (2, lengths.sum()))[:, rows])
    times = torch.from_numpy(rows * 3600)
    return Batch(
        item_ids=ids[0],
        timestamps=times,
        target_ids=ids[1],
        query_timestamps=times + 3600,
        seq_offsets=torch.from_numpy(np.append(0, np.cumsum(lengths[local]))),
        users=torch.from_numpy(local),
        rows=torch.from_numpy(rows),
    )


def time_by_part(step: Step, batches: list[Batch]) -> dict:
    """Profile a step of each batch, and return what the GPU does in one step, in milliseconds.

    span: from the first kernel's begin to the last one's end. compute: a kernel that is not NCCL's runs. messages: a
    kernel of NCCL's runs. messages_alone: only kernels of NCCL's run. idle: no kernel runs. launches: the number of
    kernels and copies. kernels: the 15 that take longest, by name.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in batches:
            step(batch)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    names, steps = Counter[str](), len(batches)
    for event in events:
        begin, took = event["ts"] / 1e3 / steps, event["dur"] / 1e3 / steps
        spans["nccl" in event["name"]].append((begin, begin + took))
        names[event["name"][:80]] += took
    both = spans[True] + spans[False]
    span, compute = max(end for _, end in both) - min(begin for begin, _ in both), covered(spans[False])
    return {
        "span": span,
        "compute": compute,
        "messages": covered(spans[True]),
        "messages_alone": covered(both) - compute,
        "idle": span - covered(both),
        "launches": len(events) / steps,
        "kernels": dict(names.most_common(15)),
    }


def measured(config: RunConfig, items: int, steps: int, longest: bool, profile: bool = False) -> dict:
    """Build the step of a configuration, run it on random batches and return its record."""
    ranks, device = Ranks(config), open_device(config)
    gpu = device.type == "cuda"
    torch.manual_seed(config.seed)
    before = torch.cuda.memory_allocated() if gpu else 0
    began = time.monotonic()
    table = ShardedTable(config, items, ranks, device) if config.parallel.sharded else None
    # The initial rows of tables do not affect the time, and drawing them on the host takes a minute.
    with patch.object(ShardedTable, "draw"), patch.object(embedding, "truncated_normal_"):
        model = SequenceModel(config.model, items, table=table).to(device).train()
    tables = [*model.embedding.parameters(), *([] if table is None else [table.weight])]
    with torch.no_grad():
        for weight in tables:
            weight.normal_(std=0.02)
    _, step = build_step(config, model, device, ranks=ranks)
    built = time.monotonic() - began
    batches = [random_batch(config, items, ranks, n, longest, device) for n in range(steps)]
    losses, seconds, queued = [], [], []

    def wait() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.monotonic()

    # Each padded size is run, captured, and replayed.
    graphed = gpu and captures(config, ranks.by_heads)
    for _ in range(2 if graphed else 1):
        losses.extend(float(step(batch)["loss"]) for batch in batches)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        began = wait()
        losses.append(float(step(batch)["loss"]))  # waits for the device
        seconds.append(time.monotonic() - began)
    for _ in range(2):
        ranks.greatest(0)
        began = wait()
        for batch in batches:
            step(batch)
        queued.append((wait() - began) / steps)
    parts = {}
    if profile and gpu:
        ranks.greatest(0)
        parts = {"profile": time_by_part(step, batches)}
    total = sum(batch.num_tokens if batch.whole is None else batch.whole.tokens for batch in batches)
    largest = max(batches, key=lambda batch: batch.num_tokens)
    return {
        "items": items,
        "steps": steps,
        "longest": longest,
        "ranks": ranks.world,
        "how": HOW[ranks.distributed_step, graphed],
        "queued": 1e3 * float(ranks.max(torch.tensor(min(queued)))),
        "median": 1e3 * float(ranks.max(torch.tensor(statistics.median(seconds)))),
        "tokens": total / steps,
        "losses": [losses[0], losses[-1]],
        "imbalance": statistics.mean(1.0 if batch.whole is None else batch.whole.imbalance for batch in batches),
        "build_seconds": built,
        "largest": [largest.num_tokens, largest.num_sequences],
        "before": before,
        "peaks": ranks.all_gather(torch.cuda.max_memory_allocated() - before if gpu else None),
        "reserved": ranks.all_gather(torch.cuda.max_memory_reserved() if gpu else None),
        **parts,
        **environment(device),
    }


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="CASE or key=value")
    parser.add_argument("--config", help="a configuration in place of cases")
    parser.add_argument("--items", type=int, help="the number of items, in place of a case's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--longest", action="store_true", help="all sequences have max_seq_len tokens")
    parser.add_argument("--shared", action="store_true", help="on one rank: the step of several")
    parser.add_argument("--profile", action="store_true", help="add where the GPU's time goes in a step")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a case ends the program")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    options = parser.parse_intermixed_args()
    overrides = [word for word in options.words if "=" in word]
    names = [word for word in options.words if "=" not in word]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"{unknown[0]} is none of the cases {', '.join(CASES)}")
    if not (names or options.config):
        parser.error(f"give cases ({', '.join(CASES)}) or --config")
    cases = {name: CASES[name] for name in names}
    if options.config:
        cases = {options.config: Case(options.config, (), (), 10_000_000, options.longest)}
    shared = options.shared or "WORLD_SIZE" in os.environ
    rank, failed = int(os.environ.get("RANK", 0)), False
    for name, case in cases.items():
        for graphs in ("true",) if shared or options.config else ("true", "false"):
            words = [*case.overrides, f"train.cuda_graphs={graphs}"]
            words += ["parallel.data=auto", *case.shared] if shared else []
            words += overrides
            record: dict = {"case": name, "overrides": words, "rank": rank}
            faulthandler.dump_traceback_later(options.limit, exit=True)
            try:
                record |= measured(
                    load_config(case.config, words),
                    options.items or case.items,
                    options.steps,
                    case.longest or options.longest,
                    options.profile,
                )
            except Exception:
                record |= {"error": traceback.format_exc()[-4000:]}
                failed = True
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            if torch.cuda.is_available() and "error" not in record:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if rank == 0 or "error" in record:
                line = json.dumps(record)
                print(line, flush=True)
                if options.out:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
            if failed:
                return 1  # other ranks may wait for this one
    return 0


if __name__ == "__main__":
    run_main(main)
