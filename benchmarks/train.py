"""Time one training epoch and one full evaluation of a config, on generated data of MovieLens 1M's shape.

    python benchmarks/train.py configs/ml-1m-hstu.yaml [key=value ...]
    python benchmarks/train.py configs/ml-1m-sasrec.yaml --padded   and the same with softmax attention over padded rows
    python benchmarks/train.py configs/ml-1m-hstu.yaml --features   with three made-up features of each item
    python benchmarks/train.py --step RUN/config.yaml           a few steps on the config's own data, as compare.py does
    python benchmarks/train.py --parts [--help]     a step by part, by attention kind and sequence length: parts.py

The program prints one JSON line, with --padded two: seconds of an epoch (the median of five) and of an evaluation, the
host's seconds until the last step is queued, peak memory, versions. With --profile it also prints the kernels and the
functions of the host that take most time.
"""

import cProfile
import itertools
import json
import math
import pstats
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main
from data.features.features import feature_of
from data.features.options import Features, ItemFile
from models.attention import SoftmaxAttention
from training import run
from training.config import RunConfig, load_config
from training.folder import write_file
from training.ranks.processes import Ranks
from training.report import environment
from training.run import build_model, open_data
from training.step import build_step, phase_at, train_batches

STEPS = 20
ML_1M = (
    "data={format: synthetic, protocol: published, synthetic: {num_users: 6040, num_items: 3706, mean_length: 165.6, "
    "min_length: 20, max_length: 2300}}"
)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    if "--parts" in sys.argv:
        import parts

        parser.add_argument("--parts", action="store_true")
        parts.add_arguments(parser)
        parts.main(parser.parse_args())
        return
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--step", action="store_true", help="time a few steps on the config's data, as compare.py does")
    parser.add_argument("--out", type=Path, help="with --step: write into this JSON file instead of standard output")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--features", action="store_true", help="give each item three made-up features")
    parser.add_argument("--padded", action="store_true", help="time softmax attention over padded rows too")
    options = parser.parse_intermixed_args(arguments)
    if options.step:
        record = json.dumps(measure_step(load_config(options.config, options.overrides)), indent=1)
        write_file(options.out, record) if options.out else print(record)
        return
    config = load_config(options.config, [ML_1M, *options.overrides])
    if options.features:
        config = with_features(config)
    measure(config, options.profile, **{"features": 3} if options.features else {})
    if options.padded:
        if any(attention.kind != "softmax" for attention in config.model.attention):
            raise SystemExit("--padded is about model.attention.kind=softmax")
        SoftmaxAttention.forward = lambda self, x, q, k, v, batch: (self.padded(q, k, v, batch), {})
        measure(config, options.profile, padded=True)


def with_features(config: RunConfig) -> RunConfig:
    """Return the configuration with three made-up features of each item: two categories, a list of up to six."""
    kinds = {"brand": "category", "shop": "category", "genres": "list"}
    items = ItemFile(format="csv", path="none", columns={name: {"kind": kind} for name, kind in kinds.items()})
    without, load = config, run.load_data

    def load_data(config: RunConfig, **options):
        dataset = load(without, **options)
        rng, count = np.random.default_rng(0), dataset.num_items
        features = []
        for (name, kind), size in zip(kinds.items(), (300, 20, 18)):
            lengths = rng.integers(1, 7, count) if kind == "list" else np.ones(count, np.int64)
            rows = np.repeat(np.arange(count), lengths)
            features.append(
                feature_of("items", name, kind, count, rows, rng.integers(size, size=len(rows)).astype(str))
            )
        return replace(dataset, features=tuple(features))

    run.load_data = load_data
    return config.model_copy(update={"data": config.data.model_copy(update={"features": Features(items=items)})})


def measure_step(config) -> dict:
    """Return events a second of STEPS steps of training, and the peak memory of their process.

    On a GPU the steps run twice before the timing, to compile and to capture them. The attention is in its last phase.
    """
    data = open_data(config)
    config = data.config
    torch.manual_seed(config.seed)
    model = build_model(config, data.vocabulary, data.device).train()
    _, step = build_step(config, model, data.device)
    phase, gpu = phase_at(config, math.inf), data.device.type == "cuda"
    batches = list(itertools.islice(train_batches(config, data, Ranks(config)).epoch(0), STEPS))
    for batch in 2 * batches if gpu else batches[:1]:
        step(replace(batch, phase=phase))
    wait = torch.cuda.synchronize if gpu else lambda: None
    wait()
    started = time.perf_counter()
    for batch in batches:
        step(replace(batch, phase=phase))
    wait()
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    served = config.task.served()
    tokens_per_event = 1 if served is None else served.tokens_per_event
    return {
        "events_per_second": sum(batch.num_tokens for batch in batches) / tokens_per_event / seconds,
        "step_seconds": seconds / len(batches),
        "tokens_per_step": sum(batch.num_tokens for batch in batches) / len(batches),
        "peak_memory_bytes": memory,
        "steps": len(batches),
        "environment": environment(data.device),
    }


def measure(config, profiled: bool, **described) -> None:
    """Print the record of one configuration."""
    torch.manual_seed(config.seed)
    data = open_data(config)
    model = build_model(data.config, data.vocabulary, data.device)
    _, step = build_step(config, model, data.device)
    batches = data.batches("train", batch_size=config.train.batch_size, seed=config.seed)
    evaluation = data.eval_batches("test")
    wait = torch.cuda.synchronize if data.device.type == "cuda" else lambda: None

    def epoch(number: int) -> tuple[int, float, float]:
        model.train()
        tokens, started = 0, time.perf_counter()
        for batch in batches.epoch(number):
            step(batch)
            tokens += batch.num_tokens
        queued = time.perf_counter() - started
        wait()
        return tokens, queued, time.perf_counter() - started

    for number in range(3):  # compiles, captures
        epoch(number)
    epochs = sorted((epoch(number) for number in range(3, 8)), key=lambda measured: measured[-1])
    tokens, queued, seconds = epochs[2]
    data.task.evaluate(model, evaluation)
    started = time.perf_counter()
    data.task.evaluate(model, evaluation)
    record = {
        "config": config.name,
        **described,
        "events": data.dataset.num_events,
        "tokens": tokens,
        "steps": len(batches),
        "epoch_seconds": seconds,
        "epoch_seconds_of_five": [epochs[0][-1], epochs[-1][-1]],
        "host_seconds": queued,
        "evaluation_seconds": time.perf_counter() - started,
        "environment": environment(data.device),
    }
    if data.device.type == "cuda":
        record["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(record))
    if profiled:
        with torch.profiler.profile() as profile:
            for _, batch in zip(range(4), batches.epoch(4)):
                step(batch)
            wait()
        by = "self_cuda_time_total" if data.device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))
        host = cProfile.Profile()
        host.runcall(epoch, 5)
        pstats.Stats(host).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    run_main(main)
