"""Time a training step by part: embedding, projections, attention, loss, optimizer.

Run it with `python benchmarks/train.py --parts`.

Sequences of one length N, random items; 4 layers, E 256, 4 heads of 64, bf16 autocast, the same number of tokens a step
for every N. The step is timed as training runs it, in CUDA graphs. Its parts come from the profile of a step outside of
graphs: every kernel belongs to the part whose forward or backward pass launched it. `other` has the kernels of no part,
mostly sums of gradients. `ms` is the time of a single step on an idle GPU, with the host's time to launch it.
`queued_ms` is the time per step when steps are queued one after another, as in training.

The bound is the time of the matrix products of forward and backward at 790 TFLOP/s: three for each projection, seven
for causal attention (over the pairs that the kind computes), five for the loss.

Letters: T tokens, N sequence length, E embedding size, I items, K negatives.
"""

import argparse
import collections
import itertools
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.figures import RESULTS, panels, save
from data.batch import Batch
from data.errors import ConfigError
from models.hstu import SequenceModel
from models.tasks import retrieval
from training.config import RunConfig
from training.report import environment
from training.run import set_matmul_precision
from training.step import build_step

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = [200, 2048, 8192, 32768]
# Attention kinds by the name that a record has; --kinds chooses, --attention adds one.
NO_BIAS = {"position_bias": False, "time_bias": False}
BSA = {"kind": "bsa", "block_size": 64, "block_counts": 16}
KINDS = {
    "dense": {"kind": "dense", **NO_BIAS},
    "dense both biases": {"kind": "dense"},
    "bsa 64": {**BSA, "selection_group": 64, **NO_BIAS},
    "bsa 64 both biases": {**BSA, "selection_group": 64},
    "bsa 2": {**BSA, "selection_group": 2, **NO_BIAS},
    "softmax": {"kind": "softmax"},
    "htree": {"kind": "htree"},
    "indexer": {"kind": "indexer"},
    "rotatekv": {"kind": "rotatekv"},
}
PARTS = ("embedding", "projections", "attention", "loss", "optimizer", "other")
PEAK = 790e12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=lambda x: [int(n) for n in x.split(",")], default=LENGTHS)
    parser.add_argument(
        "--kinds", type=lambda x: x.split(","), default=list(KINDS), help=f"names from {', '.join(KINDS)}"
    )
    parser.add_argument("--attention", type=json.loads, help='another kind as JSON, like {"kind": "bsa"}')
    parser.add_argument("--tokens", type=int, default=65_536, help="the number of tokens of a step")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=256, help="the embedding size E")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--loss", type=json.loads, default={"kind": "in_batch"}, help="the section loss as JSON")
    parser.add_argument("--train", type=json.loads, default={}, help="overrides of train, as JSON")
    parser.add_argument("--model", type=json.loads, default={}, help="overrides of model, as JSON")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=0, help="record this many kernels that take most of a step")
    parser.add_argument(
        "--out", type=Path, help="the JSON lines are added to this file, by default results/parts.jsonl"
    )
    parser.add_argument("--plot", type=Path, help="draw this file's lines as stacked bars into --out, measure nothing")
    parser.add_argument("--table", type=Path, help="print this file's lines as a table, measure nothing")


def configuration(options, length: int, attention: dict) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "parts",
            "data": {"format": "synthetic", "protocol": "published"},
            "model": {
                "block": "hstu", "max_seq_len": length, "embedding_dim": options.size, "num_layers": options.layers,
                "num_heads": options.heads, "dropout": 0.2, "attention": attention, **options.model,
            },
            "loss": options.loss,
            "train": {
                "epochs": 1, "batch_size": max(1, options.tokens // length), "autocast": "bf16", **options.train
            },
        }
    )  # fmt: skip


def random_batch(config: RunConfig, items: int, device: torch.device) -> Batch:
    """Return sequences of max_seq_len events, an hour apart on average."""
    length, sequences = config.model.max_seq_len, config.train.batch_size
    generator = torch.Generator().manual_seed(0)
    tokens = length * sequences
    times = 1_500_000_000 + torch.randint(7200, (sequences, length + 1), generator=generator).cumsum(1)
    return Batch(
        item_ids=torch.randint(items, (tokens,), generator=generator),
        timestamps=times[:, :-1].flatten(),
        target_ids=torch.randint(items, (tokens,), generator=generator),
        query_timestamps=times[:, 1:].flatten(),
        seq_offsets=torch.arange(sequences + 1) * length,
        users=torch.arange(sequences),
    ).to(device)


def marked(function, part: str):
    def run(*arguments, **named):
        with record_function(f"part:{part}"):
            return function(*arguments, **named)

    return run


def kernel_times(step, batch: Batch, device: torch.device) -> list[tuple[str, str, float]]:
    """Return (part, kernel, milliseconds) of each kernel launched in one step; on a CPU those of torch's operators."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities) as profiler:
        step(batch)
        if cuda:
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]

    def ancestor(event, prefix: str):
        while event is not None and not event.name.startswith(prefix):
            event = event.cpu_parent
        return event

    backward = "autograd::engine::evaluate_function"
    by_number = {}
    for event in events:
        mark = ancestor(event, "part:")
        if mark and event.sequence_nr >= 0 and not ancestor(event, backward):
            by_number.setdefault(event.sequence_nr, mark.name)
    times = []
    for event in events:
        spent = [(kernel.name, kernel.duration) for kernel in event.kernels] if cuda else []
        if not cuda and event.self_cpu_time_total:
            spent = [(event.name, event.self_cpu_time_total)]
        if not spent:
            continue
        mark, node = ancestor(event, "part:"), ancestor(event, backward)
        name = mark.name if mark else by_number.get(node.sequence_nr, "part:other") if node else "part:other"
        times += [(name.removeprefix("part:"), kernel, duration / 1e3) for kernel, duration in spent]
    return times


def longest(times: list[tuple[str, str, float]], count: int) -> list[dict]:
    """Return the `count` kernels that take most of a step, each with its part, launches and milliseconds."""
    sums: dict[tuple[str, str], list[float]] = {}
    for part, kernel, ms in times:
        sums.setdefault((part, kernel[:80]), []).append(ms)
    order = sorted(sums.items(), key=lambda entry: -sum(entry[1]))[:count]
    return [{"part": part, "kernel": name, "launches": len(ms), "ms": sum(ms)} for (part, name), ms in order]


def bound(config: RunConfig, tokens: int, items: int) -> float | None:
    """Return the milliseconds of a step's products at PEAK; None for kinds whose pairs are not counted here."""
    m, loss, attention = config.model, config.loss, config.model.attention[0]
    width, heads = m.embedding_dim, m.num_heads
    inner = heads * m.layer_sizes.attention_dim
    pairs = {
        "dense": m.max_seq_len / 2,
        "softmax": m.max_seq_len / 2,
        "bsa": min(
            m.max_seq_len / 2,
            getattr(attention, "block_size", 1) * getattr(attention, "block_counts", 0)
            + m.max_seq_len / 2 / getattr(attention, "block_size", 1),
        ),
    }.get(attention.kind)
    if pairs is None:
        return None
    competing = items if loss.kind == "cross_entropy" else loss.num_negatives
    products = m.num_layers * (3 * 5 * width * inner + 7 * pairs * inner) + 5 * competing * width
    return 2 * tokens * products / PEAK * 1e3


def predicted_memory(config: RunConfig, tokens: int, items: int) -> int:
    """Return the bytes at the peak of a step if the catalogue dominates.

    There are five tables: the weights, the optimiser's two, and two gradients, the loss's and the inputs', before their
    sum. Norms take four bytes an item. Activations take about 32 bytes for a token, a layer and a channel.
    """
    m = config.model
    table = items * m.embedding_dim * (2 if m.table_dtype == "bfloat16" else 4)
    if m.table_dtype == "float32" and config.train.autocast == "bf16":
        table = table * 6 // 5  # the loss's copy in bf16, and that one's gradient
    return 5 * table + 4 * items + 32 * tokens * m.num_layers * m.embedding_dim


def prepare(options, attention: dict, length: int, device: torch.device) -> tuple:
    """Return (config, model, batch, step, peak memory in bytes) of a step that has been compiled and captured."""
    config = configuration(options, length, attention)
    torch.manual_seed(0)
    set_matmul_precision(config.train.matmul_precision)
    cuda, before = device.type == "cuda", 0
    if cuda:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    with device:  # copying a table of gigabytes from the CPU takes long
        model = SequenceModel(config.model, options.items).train()
    model.residual_dtype = torch.bfloat16 if config.train.residual == "bfloat16" else None
    batch = random_batch(config, options.items, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    _, step = build_step(config, model, device)
    for _ in range(3):
        step(batch)
    return config, model, batch, step, torch.cuda.max_memory_allocated() - before if cuda else None


def finish(options, config: RunConfig, model, batch: Batch, step, peak: int | None) -> dict:
    """Return the record of the result of `prepare`."""
    device = batch.item_ids.device
    times = [timed(step, batch, device.type == "cuda") for _ in range(options.steps)]
    following = queued(step, batch, options.steps) if device.type == "cuda" else times

    model.embedding.forward = marked(model.embedding.forward, "embedding")
    for layer in model.layers:
        layer.attention.forward = marked(layer.attention.forward, "attention")
        layer.forward = marked(layer.forward, "projections")
    head_loss = retrieval.head_loss
    retrieval.head_loss = marked(head_loss, "loss")
    try:
        eager = config.model_copy(update={"train": config.train.model_copy(update={"cuda_graphs": False})})
        optimizer, step = build_step(eager, model, device)
        optimizer.step = marked(optimizer.step, "optimizer")
        step(batch)
        times_of_kernels = kernel_times(step, batch, device)
    finally:
        retrieval.head_loss = head_loss
    parts = dict.fromkeys(PARTS, 0.0)
    for part, _, spent in times_of_kernels:
        parts[part] += spent
    ms = statistics.median(times)
    least = bound(config, batch.num_tokens, options.items)
    return {
        "ms": ms,
        "queued_ms": statistics.median(following),
        "tokens_per_second": batch.num_tokens / ms * 1e3,
        "peak_memory_bytes": peak,
        "predicted_memory_bytes": predicted_memory(config, batch.num_tokens, options.items),
        "parts_ms": parts,
        **({"kernels": longest(times_of_kernels, options.kernels)} if options.kernels else {}),
        "bound_ms": least,
        "fraction_of_bound": least and least / ms,
    }


def described(options, name: str, length: int, device: torch.device) -> dict:
    """Return the settings and versions of a measurement."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {"attention": name, "length": length}
    record |= {part: getattr(options, part) for part in ("tokens", "items", "size", "loss", "model", "train")}
    return record | {"commit": git.stdout.strip() or "unknown", "environment": environment(device)}


def timed(step, batch: Batch, cuda: bool) -> float:
    """Measure milliseconds of one step."""
    if not cuda:
        started = time.perf_counter()
        step(batch)
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(batch)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def queued(step, batch: Batch, steps: int) -> list[float]:
    """Measure milliseconds of steps that are queued one after another, without the host's time to launch the first."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step(batch)
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def read(source: Path) -> list[dict]:
    """Read the records with timings in a file of JSON lines."""
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    records = [record for record in records if "ms" in record]
    if not records:
        raise SystemExit(f"{source}: no timings in it")
    return records


def table(source: Path) -> None:
    """Print a Markdown table: a row for each record, milliseconds."""
    heads = ["N", "attention", "step", *PARTS, "tokens/s", "of the bound", "peak memory"]
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for record in sorted(read(source), key=lambda record: record["length"]):
        cells = [f"{record['length']:,}", record["attention"], f"{record['ms']:.1f}"]
        cells += [f"{record['parts_ms'][part]:.2f}" for part in PARTS]
        share, peak = record["fraction_of_bound"], record["peak_memory_bytes"]
        cells += [f"{record['tokens_per_second'] / 1e6:.2f} M", "" if share is None else f"{share:.0%}"]
        cells += ["" if peak is None else f"{peak / 2**30:.1f} GiB"]
        print("| " + " | ".join(cells) + " |")


def plot(source: Path, target: Path) -> None:
    """Plot a group of stacked bars for each N, one bar a kind; the line above is the step's time.

    Records with a `note` were disturbed: no line. Bars of over three times the median are cut, their time in them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = read(source)
    groups = collections.defaultdict(list)
    for record in records:
        groups[record["length"]].append(record)
    figure, axes = panels(plt, len(groups), (6, 4.5), layout="constrained")
    for axis, (length, group) in zip(axes, sorted(groups.items())):
        names, below = [record["attention"] for record in group], [0.0] * len(group)
        for part in PARTS:
            heights = [record["parts_ms"][part] for record in group]
            axis.bar(names, heights, bottom=below, label=part)
            below = [a + b for a, b in zip(below, heights)]
        undisturbed = [record for record in group if "note" not in record]
        if undisturbed:
            steps = [record["ms"] for record in undisturbed]
            axis.scatter(
                [record["attention"] for record in undisturbed], steps, marker="_", s=300, color="black", label="step"
            )
        middle = statistics.median(record["ms"] for record in group)
        top = 1.1 * max(max(record["ms"], height) for record, height in zip(group, below) if record["ms"] <= 3 * middle)
        for place, record in enumerate(group):
            if record["ms"] > top and "note" not in record:
                axis.text(place, 0.98 * top, f"{record['ms']:.0f}", ha="center", va="top", color="white")
        axis.set(title=f"N = {length:,}", ylabel="ms", ylim=(0, top))
        axis.tick_params(axis="x", rotation=90)
        axis.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=8)
    first = records[0]
    figure.suptitle(f"A step of {first['tokens']:,} tokens, {first['environment']['device']}", fontsize=10)
    save(figure, target)


def main(options) -> None:
    if options.plot:
        plot(options.plot, options.out or options.plot.with_suffix(".png"))
        return
    if options.table:
        table(options.table)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if unknown := [name for name in options.kinds if name not in KINDS]:
        raise ConfigError(f"--kinds: {unknown[0]} is none of {', '.join(KINDS)}")
    kinds = {"given": options.attention} if options.attention else {name: KINDS[name] for name in options.kinds}
    for length in options.lengths:
        for name, attention in kinds.items():
            record = described(options, name, length, device)
            try:
                record |= finish(options, *prepare(options, attention, length, device))
            except Exception as error:  # a kind may not support such sizes, or not be installed: report it and continue
                record["error"] = f"{type(error).__name__}: {error}"[:300]
            line = json.dumps(record)
            print(line, flush=True)
            with (options.out or RESULTS / "parts.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
