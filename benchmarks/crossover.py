"""Find the sequence length from which a sparse attention kind is faster than dense HSTU and softmax attention.

    python benchmarks/crossover.py                      measure, and append to benchmarks/results/crossover.jsonl
    python benchmarks/crossover.py --table              the lengths from which each kind overtakes, and its times
    python benchmarks/crossover.py --plot crossover.png

An interrupted measurement continues when it is started again. Each kind and length has three times, with the same
number of tokens: one attention layer forward, forward and backward with its auxiliary losses, and a whole training step
(parts.py: in CUDA graphs, 4 layers, E 256, 4 heads of 64, bf16). No kind has a bias, since softmax is faster without
one. Times are medians. Quality is not compared; see configs/compare/long-memory.yaml.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import parts
from benchmarks.figures import RESULTS, save
from benchmarks.parts import NO_BIAS, described, prepare, random_batch, timed
from cli.command import Parser, run_main
from models.attention import ATTENTION_KINDS
from training.config import RunConfig

# The middle lengths come first: they matter most if --seconds ends the measurement early.
LENGTHS = [8192, 32768, 2048, 131072, 512, 16384, 65536, 4096, 1024, 256]
OVERTAKEN = ("dense", "softmax")
PARTS = ("forward", "both passes", "step")
HTREE = {"kind": "htree", "compression_rate": 16, "top_k": 32, "num_kv_heads": 1}
INDEXER = {"kind": "indexer", "top_k": 128, "num_kv_heads": 1, "index_position_bias": False, "index_time_bias": False}
KINDS = {
    "dense": {"kind": "dense", **NO_BIAS},
    "softmax": {"kind": "softmax"},
    "bsa": {"kind": "bsa", "block_size": 64, "block_counts": 16, **NO_BIAS},
    "bsa, groups of 64": {"kind": "bsa", "block_size": 64, "block_counts": 16, "selection_group": 64, **NO_BIAS},
    "htree": {**HTREE, "selection_group": 1},
    "htree, groups of 16": {**HTREE, "selection_group": 16},
    "indexer": {**INDEXER, "selection_group": 1, **NO_BIAS},
    "indexer, groups of 16": {**INDEXER, "selection_group": 16, **NO_BIAS},
}


def layer_times(options, config: RunConfig, device: torch.device) -> dict[str, float]:
    """Measure milliseconds of one attention layer: forward alone, and both passes."""
    attention, sizes = config.model.attention[0], config.model.layer_sizes
    kind = ATTENTION_KINDS.class_of(attention.kind)
    torch.manual_seed(0)
    with device:
        module = kind(attention, sizes).train()
    batch = random_batch(config, options.items, device)
    tokens, heads, kv_heads = batch.num_tokens, sizes.num_heads, kind.kv_heads(attention, sizes.num_heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(heads, sizes.attention_dim), (kv_heads, sizes.attention_dim), (kv_heads, sizes.linear_dim)]
    x = torch.randn(tokens, sizes.embedding_dim, device=device, dtype=dtype)
    q, k, v = (torch.randn(tokens, *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    gradient = torch.randn(tokens, heads, sizes.linear_dim, device=device, dtype=dtype)
    leaves = [q, k, v, *module.parameters()]

    def forward():
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return module(x, q, k, v, dataclasses.replace(batch))  # what layers share is computed anew

    def both():
        out, aux = forward()
        weighted = [loss.weighted for loss in aux.values()]
        torch.autograd.grad([out, *weighted], leaves, [gradient.to(out.dtype), *[None] * len(aux)], allow_unused=True)

    def alone():
        with torch.no_grad():
            forward()

    return {name: median(function, options.repeats, device) for name, function in zip(PARTS, (alone, both))}


def median(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median milliseconds of a call, after two calls that compile."""
    for _ in range(2):
        function()
    return statistics.median(timed(lambda _: function(), None, device.type == "cuda") for _ in range(repeats))


def step_time(options, attention: dict, length: int, device: torch.device) -> float:
    """Measure milliseconds of a training step."""
    _, _, batch, step, _ = prepare(options, attention, length, device)
    return statistics.median(timed(step, batch, device.type == "cuda") for _ in range(options.repeats))


def measure(options, device: torch.device) -> None:
    """Append a JSON line for each kind and length that the file lacks, until the time is up."""
    until = math.inf if options.seconds is None else time.monotonic() + options.seconds
    measured = (
        {(record["attention"], record["length"]) for record in read(options.out)} if options.out.exists() else set()
    )
    for length in options.lengths:
        for name in options.kinds:
            if (name, length) in measured or time.monotonic() > until:
                continue
            record = described(options, name, length, device)
            try:
                config = parts.configuration(options, length, KINDS[name])
                record |= layer_times(options, config, device)
                record["step"] = step_time(options, KINDS[name], length, device)
            except (ValueError, RuntimeError) as error:  # for example out of memory: the other kinds are still measured
                record["error"] = f"{type(error).__name__}: {error}"[:300]
            line = json.dumps(record)
            print(line, flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def read(source: Path) -> list[dict]:
    """Read the records of a file of JSON lines."""
    return [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]


def times(records: list[dict], part: str) -> dict[str, dict[int, float]]:
    """Return kind -> length -> milliseconds of a part, without failed measurements."""
    by_kind: dict[str, dict[int, float]] = {}
    for record in records:
        if part in record:
            by_kind.setdefault(record["attention"], {})[record["length"]] = record[part]
    return {name: dict(sorted(values.items())) for name, values in by_kind.items()}


def overtakes(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    """Return the length from which `ours` stays below `theirs`, both length -> time; None if it is not below at the
    end.

    Between two measured lengths the ratio's logarithm is interpolated linearly in the logarithm of the length.
    """
    lengths = sorted(ours.keys() & theirs.keys())
    ratios = [math.log(ours[length] / theirs[length]) for length in lengths]
    if not ratios or ratios[-1] >= 0:
        return None
    last = max((place for place, ratio in enumerate(ratios) if ratio >= 0), default=None)
    if last is None:
        return float(lengths[0])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share


def table(records: list[dict]) -> list[str]:
    """Format as Markdown the length from which each sparse kind is faster, then the times in ms by length."""
    lines = ["| from N = | " + " | ".join(f"{part} over {other}" for part in PARTS for other in OVERTAKEN) + " |"]
    lines.append("| --- |" + " ---: |" * len(PARTS) * len(OVERTAKEN))
    names = dict.fromkeys(record["attention"] for record in records)
    by_part = {part: times(records, part) for part in PARTS}
    for name in (name for name in names if name not in OVERTAKEN):
        cells = []
        for part in PARTS:
            for other in OVERTAKEN:
                ours, theirs = by_part[part].get(name, {}), by_part[part].get(other, {})
                at, common = overtakes(ours, theirs), sorted(ours.keys() & theirs.keys())
                if not common:
                    cells.append("-")
                elif at is None:
                    cells.append(f"not up to {common[-1]:,}")
                else:
                    cells.append(f"{common[0]:,} or less" if at == common[0] else f"{float(f'{at:.2g}'):,.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for part in PARTS:
        lengths = sorted({length for values in by_part[part].values() for length in values})
        lines += ["", f"| {part}, ms | " + " | ".join(f"{length:,}" for length in lengths) + " |"]
        lines.append("| --- |" + " ---: |" * len(lengths))
        for name, values in by_part[part].items():
            cells = [f"{values[length]:.3g}" if length in values else "-" for length in lengths]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def plot(records: list[dict], target: Path) -> None:
    """Plot a panel for each part: time over that of softmax by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(PARTS), figsize=(4.2 * len(PARTS), 3.6), sharey=True, layout="constrained")
    for axis, part in zip(axes, PARTS):
        by_kind = times(records, part)
        base = by_kind.get("softmax", {})
        for name, values in by_kind.items():
            common = [length for length in values if length in base]
            axis.plot(
                common, [values[length] / base[length] for length in common], marker="o", markersize=3, label=name
            )
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", xlabel="tokens a sequence", title=part)
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(lambda value, _: f"{value:g}" if value in (0.2, 0.3, 0.5, 1, 2, 3, 5) else "")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time over softmax's")
    axes[0].legend(fontsize=8)
    first = records[0]
    figure.suptitle(f"{first['tokens']:,} tokens, {first['environment']['device']}", fontsize=10)
    save(figure, target)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--lengths", type=lambda x: [int(n) for n in x.split(",")], default=LENGTHS)
    add("--kinds", type=lambda x: x.split(";"), default=list(KINDS), help=f"names from {'; '.join(KINDS)}")
    add("--tokens", type=int, default=131_072, help="the number of tokens of a call")
    add("--items", type=int, default=10_000)
    add("--size", type=int, default=256, help="the embedding size E")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--repeats", type=int, default=5)
    add("--seconds", type=float, help="begin no measurement after so many seconds")
    add("--out", type=Path, default=RESULTS / "crossover.jsonl", help="the JSON lines, which are added to")
    add("--table", action="store_true", help="print the tables of --out, measure nothing")
    add("--plot", type=Path, help="draw --out into this PNG, measure nothing")
    parser.set_defaults(loss={"kind": "in_batch"}, train={}, model={})
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.kinds if name not in KINDS]:
        parser.error(f"--kinds: {unknown[0]} is none of {'; '.join(KINDS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.plot:
        plot(read(options.out), options.plot)
    elif options.table:
        print("\n".join(table(read(options.out))))
    else:
        measure(options, device)


if __name__ == "__main__":
    run_main(main)
