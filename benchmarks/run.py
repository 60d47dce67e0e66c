"""Run benchmarks of the operators: check the result first, then time; a JSON line for each part of a case.

    python benchmarks/run.py --op dense      the standard cases, added to benchmarks/results/dense.jsonl
    python benchmarks/run.py --op dense --lengths 4096 --only ours,sdpa-flash --out /tmp/dense.jsonl
    python benchmarks/run.py --op dense --only sdpa-cudnn,triton,hopper --queued --rounds 3 --repeats 7    in turns
    python benchmarks/run.py --plot benchmarks/results/dense.jsonl --out docs/dense.png    a picture of it

Times are medians of CUDA-event timings, with the spread between the 10th and the 90th percentile; memory is the peak
during the call beyond what was allocated before. Competitors run in the same process on the same shapes.

An operator is a module of this folder, named as the operator, with `cases(arguments)`, which yields `Case`s, and
optionally `add_arguments(parser)`. `Case` below describes them.
"""

import argparse
import dataclasses
import importlib
import json
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.figures import RESULTS, panels, save
from cli.command import Parser, run_main


@dataclasses.dataclass
class Case:
    """A case: what is measured, how it is checked, and what its record says.

    setup() returns {part: function}, e.g. {"fwd": f, "bwd": g}; each function is one timed call, and is free to keep
    references to its inputs. It is called right before the timing, so that only one case's tensors are alive.
    check() raises if the result is wrong; None for competitors, whose results are not ours to check.
    """

    name: str
    shape: dict
    setup: Callable[[], dict[str, Callable[[], object]]]
    check: Callable[[], None] | None = None
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    outputs_mb: dict[str, float] = dataclasses.field(default_factory=dict)  # by part: beyond_mb = peak_mb - outputs_mb
    note: str = ""


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def parts(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return forward alone, backward alone on a retained graph, and both together as in training."""
    out = function()
    grad = torch.randn_like(out)
    return {
        "fwd": function,
        "bwd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        "fwd+bwd": lambda: torch.autograd.grad(function(), leaves, grad),
    }


def time_call(function: Callable[[], object], *, warmup: int, repeats: int, queued: bool = False) -> dict:
    """Return {"ms", "ms_p10", "ms_p90", "peak_mb"} of one function.

    queued: the GPU sleeps until the host has queued all calls, so that none waits for the host.
    """
    for _ in range(warmup):
        function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    events = []
    if queued:
        torch.cuda._sleep(int(4e9 * repeats * host))  # clocks: some 2 GHz, so twice as long as the host takes
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        if not queued:
            end.synchronize()
        events.append((start, end))
    torch.cuda.synchronize()
    times = torch.tensor([start.elapsed_time(end) for start, end in events])
    quantiles = times.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    return dict(zip(("ms_p10", "ms", "ms_p90"), (round(q, 4) for q in quantiles)), peak_mb=round(peak / 2**20, 1))


def replayed(call: Callable) -> Callable:
    """Return a function that replays a CUDA graph of a call: the GPU's time, without the host's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def with_replay(call: Callable) -> dict[str, Callable]:
    """Return the parts of a case: the call, and its replay."""
    return {"fwd": call, "replay": replayed(call)}


def environment() -> dict:
    """Return the versions and hardware that the numbers depend on."""
    import triton

    root = pathlib.Path(__file__).resolve().parent.parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return {
        "commit": git.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def measure(
    op: str, cases, *, emit: Callable[[dict], None], parts=None, checked: bool = True, rounds: int = 1, **timing
) -> None:
    """Measure cases, one after another in each of the rounds.

    parts: names of those to time, None for all; timing: `time_call`'s options.
    """
    described = environment() | ({"queued": True} if timing.get("queued") else {})
    cases = list(cases)
    for number, case in [(number, case) for number in range(rounds) for case in cases]:
        record = {"op": op, "name": case.name, **case.shape, **described}
        if rounds > 1:
            record["round"] = number
        if case.note:
            record["note"] = case.note
        try:
            if case.check is not None and checked and number == 0:
                case.check()
                record["checked"] = True
            torch.cuda.empty_cache()
            for part, function in case.setup().items():
                if parts and part not in parts:
                    continue
                result = time_call(function, **timing)
                if part in case.flops:
                    result["tflops"] = round(case.flops[part] / result["ms"] / 1e9, 1)
                if part in case.outputs_mb:
                    result["beyond_mb"] = round(result["peak_mb"] - case.outputs_mb[part], 1)
                emit({**record, "part": part, **result})
        except AssertionError:
            raise
        except Exception as error:  # a competitor may not support a shape: report it and continue
            emit({**record, "error": f"{type(error).__name__}: {error}"[:300]})


def plot(source: pathlib.Path, target: pathlib.Path) -> None:
    """Plot one panel per part; sequence length against time, a line per name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in source.read_text().splitlines() if line.strip()]
    records = [r for r in records if "ms" in r]
    if not records:
        raise SystemExit(f"{source}: no timings in it")
    parts = list(dict.fromkeys(r["part"] for r in records))
    figure, axes = panels(plt, len(parts), (6, 4.5))
    for axis, part in zip(axes, parts):
        for name in dict.fromkeys(r["name"] for r in records):
            points = sorted((r["length"], r["ms"], r["ms_p10"], r["ms_p90"]) for r in records if r["name"] == name
                            and r["part"] == part)  # fmt: skip
            if points:
                lengths, times, low, high = zip(*points)
                axis.plot(lengths, times, marker="o", label=name)
                axis.fill_between(lengths, low, high, alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="ms", title=part)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    first = records[0]
    figure.suptitle(f"{first['op']}, {first['gpu']}, torch {first['torch']}, triton {first['triton']}", fontsize=10)
    figure.tight_layout()
    save(figure, target)


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--op")
    chosen = first.parse_known_args()[0].op
    parser = Parser(description=__doc__)
    parser.add_argument("--op", help="the operator, a module of this folder")
    parser.add_argument("--lengths", type=lambda x: [int(n) for n in x.split(",")], help="sequence lengths")
    parser.add_argument("--only", type=lambda x: x.split(","), help="names of the cases to run")
    parser.add_argument(
        "--parts", type=lambda x: x.split(","), help="the parts of each case to time, like fwd+bwd; by default all"
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--queued", action="store_true", help="queue the calls one after another, so that the host's time is hidden"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all cases are timed, in turns")
    parser.add_argument("--unchecked", action="store_true", help="time without checking first")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="the JSON lines are added to this file, by default results/OP.jsonl; --plot: the PNG",
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw this file's JSON lines, measure nothing")
    module = None
    if chosen:
        folder = pathlib.Path(__file__).resolve().parent
        names = sorted(path.stem for path in folder.glob("*.py") if "\ndef cases(" in path.read_text(encoding="utf-8"))
        if chosen not in names:
            parser.error(f"--op: {chosen} is none of {', '.join(names)}")
        sys.path.insert(0, str(folder))
        module = importlib.import_module(chosen)
        if hasattr(module, "add_arguments"):
            module.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot, arguments.out or arguments.plot.with_suffix(".png"))
        return
    if module is None:
        parser.error("--op or --plot is needed")
    if not torch.cuda.is_available():
        raise SystemExit("error: benchmarks need a CUDA GPU; there is none here")
    out = arguments.out or RESULTS / f"{chosen}.jsonl"

    def emit(record):
        line = json.dumps(record)
        print(line, flush=True)
        with out.open("a") as file:
            file.write(line + "\n")

    cases = (c for c in module.cases(arguments) if not arguments.only or c.name in arguments.only)
    timing = dict(warmup=arguments.warmup, repeats=arguments.repeats, queued=arguments.queued)
    timing |= dict(rounds=arguments.rounds)
    measure(chosen, cases, emit=emit, parts=arguments.parts, checked=not arguments.unchecked, **timing)


if __name__ == "__main__":
    run_main(main)
