"""Compare two checkouts, before and after a change, on one GPU: their processes take turns, case by case.

    git worktree add /tmp/before COMMIT
    python benchmarks/ab.py /tmp/before . --what dense,biased,planned,bsa,train --lengths 1024,65536

--what dense, biased (by position and time) and planned (biased, with an attention plan that is computed outside of the
timing, if the checkout supports plans): attention of 131,072 tokens, 4 heads of 128, bf16, forward and backward; bsa:
the same with blocks of 64, 16 chosen, groups of 64 and of 2; flash: causal softmax; htree: 4 heads of 64 on one key
head, groups of 16 and of 1; catalogue: the loss of 16,384 outputs of 256 over I items, for each I in --lengths; train:
an epoch of ml-1m-hstu, ml-1m-hstu-large and ml-1m-hstu-best on generated data, the median of five; steps: a training
step, as `benchmarks/train.py --parts` measures it, for each attention kind of --kinds.

Both checkouts compile first, in parallel. Then all cases are measured --rounds times, each with one checkout and right
away with the other. Attention warms up for WARM seconds each time, and has three times, in ms:

    gpu     the GPU's time of one of many calls, all queued by the host before the GPU begins; by CUDA events
    call    the time of a call on an idle GPU, by CUDA events; it includes the host's time to launch all kernels
    host    the host's time until a call returns: the first decile of the calls, since other programs only add to it

The program prints a JSON line for each measurement, then (when interrupted too) a table: each checkout's median
over the rounds, the second median divided by the first, and the second minimum divided by the first. It does not check
results: the tests and benchmarks/run.py do.
"""

import argparse
import functools
import inspect
import json
import math
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS, HEADS, SIZE = 131072, 4, 128
WARM, SPENT = 0.1, 0.1  # seconds of warm-up, and about as many for single calls
WHAT = ("dense", "biased", "planned", "flash", "catalogue", "bsa", "htree", "train", "steps")
NO_GPU = "error: benchmarks need a CUDA GPU; there is none here"
CONFIGS = ("ml-1m-hstu", "ml-1m-hstu-large", "ml-1m-hstu-best")
# The line of benchmarks/train.py that measures epochs, in older and newer checkouts; `serve_epochs` replaces it.
EPOCHS = (
    "tokens, queued, seconds = epoch(3)",
    "epochs = sorted((epoch(number) for number in range(3, 8)), key=lambda measured: measured[-1])",
)


def measure(function) -> dict[str, float]:
    """Measure the three times of a call."""
    import torch

    def timed(calls: int, pause: float = 0.0) -> tuple[float, float, bool]:
        """Return the milliseconds of the GPU and of the host for these calls, and whether the host was finished before
        the GPU began. pause: the milliseconds for which the GPU waits before it begins.
        """
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if pause:
            torch.cuda._sleep(int(2e6 * pause))  # clocks: some 2 GHz
        start.record()
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        host = time.perf_counter() - begun
        end.record()
        ahead = not start.query()
        end.synchronize()
        return start.elapsed_time(end), 1000 * host, ahead

    started, warmed = time.perf_counter(), 0
    while warmed < 3 or time.perf_counter() - started < WARM:
        timed(1)
        warmed += 1
    each = (time.perf_counter() - started) / warmed
    calls, hosts, _ = zip(*(timed(1) for _ in range(min(50, max(5, math.ceil(SPENT / each))))))
    host = sorted(hosts)[len(hosts) // 10]
    batch_calls = min(10, max(2, math.ceil(0.01 / each)))
    queued, pause = [], 2 * batch_calls * host
    while len(queued) < 5:
        spent, _, ahead = timed(batch_calls, pause)
        if ahead:
            queued.append(spent / batch_calls)
        elif pause > 1000:
            raise RuntimeError("the host waits for the GPU within a call, so that no calls can be queued")
        else:
            pause *= 2
    return {"gpu": statistics.median(queued), "call": statistics.median(calls), "host": host}


@functools.cache
def inputs():
    """Return q, k, v and the gradient of the output."""
    import torch

    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(TOKENS, HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], grad


@functools.cache
def jagged(length):
    """Return (offsets, timestamps) of sequences of one length."""
    from tests.support.budgets import make_offsets, make_timestamps

    lengths = [length] * (TOKENS // length)
    return make_offsets(lengths, device="cuda"), make_timestamps(lengths, device="cuda")


def dense_call(length, biased, planned=False):
    """Return (a forward call, the tensors with gradients); the bias is passed as this checkout's hstu_attention
    expects.
    """
    import torch

    from hstu_sparse import hstu_attention

    (q, k, v), _ = inputs()
    offsets, times = jagged(length)
    if not biased:
        return lambda: hstu_attention(q, k, v, offsets, length), [q, k, v]
    generator = torch.Generator().manual_seed(9)
    position, table = (torch.randn(n, generator=generator).cuda().requires_grad_() for n in (length, 129))
    if "bias" in inspect.signature(hstu_attention).parameters:
        from hstu_sparse import RelativeBias, attention_plan

        options = dict(bias=RelativeBias(position, table, times))
        if planned:
            options["plan"] = attention_plan(q, v, offsets, length, **options)
    else:
        options = dict(position_bias=position, time_bias=table, timestamps=times)
    return lambda: hstu_attention(q, k, v, offsets, length, **options), [q, k, v, position, table]


def bsa_call(length, group):
    import torch

    from hstu_sparse import bsa_attention

    (q, k, v), _ = inputs()
    offsets, _ = jagged(length)
    gates = [torch.rand(TOKENS, HEADS, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    options = dict(block_size=64, block_counts=16, selection_group=group)
    return lambda: bsa_attention(q, k, v, offsets, length, (*gates, None), **options), [q, k, v, *gates]


def flash_call(length):
    from hstu_sparse import flash_attention

    (q, k, v), _ = inputs()
    offsets, _ = jagged(length)
    return lambda: flash_attention(q, k, v, offsets, causal=True, backend="triton"), [q, k, v]


def htree_call(length, group):
    from hstu_sparse import htree_attention

    tensors, grad = inputs()
    q, k, v, grad = (x.detach()[:, :heads, :64].contiguous() for x, heads in zip((*tensors, grad), (4, 1, 1, 4)))
    leaves, (offsets, _) = [x.requires_grad_() for x in (q, k, v)], jagged(length)
    options = dict(compression_rate=16, top_k=32, selection_group=group)
    return lambda: htree_attention(*leaves, offsets, length, **options), leaves, grad


def catalogue_call(items):
    import torch

    from hstu_sparse import catalogue_loss

    out, table = (torch.randn(n, 256, device="cuda").bfloat16().requires_grad_() for n in (16384, items))
    targets = torch.randint(items, (16384,), device="cuda")
    return lambda: catalogue_loss(out, table, targets, temperature=0.05), [out, table], None


def attention_cases(selected, lengths) -> dict:
    """Map each name to the function that builds its case."""
    kinds = {
        "dense": ("dense", lambda n: dense_call(n, False)),
        "biased": ("dense, both biases", lambda n: dense_call(n, True)),
        "planned": ("dense, both biases, planned", lambda n: dense_call(n, True, True)),
        "flash": ("flash", flash_call),
        "catalogue": ("catalogue loss", catalogue_call),
    }
    cases = {}
    for n in lengths:
        for key, (name, make) in kinds.items():
            if key in selected:
                cases[f"{name} {n:,}"] = functools.partial(make, n)
        for key, make, groups in (("bsa", bsa_call, (64, 2)), ("htree", htree_call, (16, 1))):
            for group in groups if key in selected else ():
                cases[f"{key}, groups of {group} {n:,}"] = functools.partial(make, n, group)
    return cases


def serve_attention(checkout: str, kinds: str, lengths: str) -> None:
    """Measure the attention of one checkout in a process: a case for each name read from standard input."""
    sys.path.insert(0, checkout)
    import torch

    cases = attention_cases(kinds.split(","), [int(n) for n in lengths.split(",")])

    def parts(name):
        function, leaves, *own_inputs = cases[name]()
        out, grad = function(), own_inputs[0] if own_inputs else inputs()[1]
        yield "forward", function
        yield "backward", lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    for name in cases:
        for _, function in parts(name):
            function()
    serve(lambda name: {f"{name} {part}": measure(function) for part, function in parts(name)})


def serve_epochs(checkout: str, config: str) -> None:
    """Measure an epoch for each config read from standard input, by the checkout's benchmarks/train.py."""
    path = Path(checkout) / "benchmarks" / "train.py"
    source = path.read_text()
    (line,) = (line for line in EPOCHS if line in source)
    five = "sorted(1000 * epoch(number)[-1] for number in range(3, 8))[2]"
    source = source.replace(line, f"serve(lambda name: {{name: dict(epoch={five})}}); sys.exit()")
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), f"configs/{config}.yaml"]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source.replace("__file__", repr(str(path))))
        file.flush()
        runpy.run_path(file.name, {"serve": serve}, "__main__")


def serve_steps(checkout: str, kind: str, lengths: str) -> None:
    """Measure training steps of one attention kind, the median of ten, by the checkout's parts.py."""
    sys.path[:0] = [checkout, str(Path(checkout) / "benchmarks")]
    import torch

    from benchmarks import parts

    parser, device = argparse.ArgumentParser(), torch.device("cuda")
    parts.add_arguments(parser)
    options, prepared = parser.parse_args([]), {}
    for length in map(int, lengths.split(",")):
        prepared[step_name(kind, length)] = parts.prepare(options, parts.KINDS[kind], length, device)

    def measured(name):
        _, _, batch, step, _ = prepared[name]
        times = [parts.timed(step, batch, True) for _ in range(13)]
        return {name: {"step": statistics.median(times[3:])}}

    serve(measured)


def step_name(kind: str, length: int) -> str:
    return f"step, {kind} {length:,}"


def serve(measured) -> None:
    """Print {} when reading begins, then for each name read `measured(name)`, a JSON object part -> times."""
    print("{}", flush=True)
    for name in sys.stdin:
        print(json.dumps(measured(name.strip())), flush=True)


class Server:
    """A process of this script that measures one checkout."""

    def __init__(self, checkout: Path, *serving: str):
        command = [sys.executable, __file__, "--serve", str(checkout), *serving]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.checkout, self.process = checkout, subprocess.Popen(command, cwd=checkout, **pipes)

    def answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.checkout} failed, see above")

    def request(self, name: str) -> dict:
        print(name, file=self.process.stdin, flush=True)
        return self.answer()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        checkout, what, *arguments = sys.argv[2:]
        {"attention": serve_attention, "epochs": serve_epochs, "steps": serve_steps}[what](checkout, *arguments)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not above: other processes use their own checkout
    from cli.command import run_main

    run_main(compare)


def compare() -> None:
    import torch

    from cli.command import Parser

    parser = Parser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--what", default="dense,biased,bsa,train")
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument(
        "--kinds",
        default="dense both biases,softmax,bsa 64 both biases",
        help="the attention kinds whose steps are timed",
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often all cases are measured")
    options = parser.parse_args()
    what, lengths = options.what.split(","), [int(n) for n in options.lengths.split(",")]
    if unknown := [name for name in what if name not in WHAT]:
        parser.error(f"--what: {unknown[0]} is none of {', '.join(WHAT)}")
    for side in (options.first, options.second):
        if not (side / "benchmarks" / "train.py").is_file():
            parser.error(f"{side}: no checkout of the project")
    if not torch.cuda.is_available():
        raise SystemExit(NO_GPU)
    arguments_of = {(f"epoch of {config}",): ("epochs", config) for config in CONFIGS} if "train" in what else {}
    for kind in options.kinds.split(",") if "steps" in what else ():
        arguments_of[tuple(step_name(kind, n) for n in lengths)] = "steps", kind, options.lengths
    arguments_of[tuple(attention_cases(what, lengths))] = "attention", options.what, options.lengths
    sides = [options.first.resolve(), options.second.resolve()]
    pairs = [(cases, [Server(side, *serving) for side in sides]) for cases, serving in arguments_of.items() if cases]
    for _, servers in pairs:
        for server in servers:
            server.answer()
    measured: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    try:
        for _ in range(options.rounds):
            for case, servers in [(case, servers) for cases, servers in pairs for case in cases]:
                for side, server in enumerate(servers):
                    for part, times in server.request(case).items():
                        print(json.dumps({"checkout": str(sides[side]), "case": part, **times}), flush=True)
                        for kind, ms in times.items():
                            measured.setdefault((part, kind), ([], []))[side].append(ms)
    finally:
        print(f"\n{'ms':<54}{'first':>10}{'second':>10}{'ratio':>8}{'fastest':>8}")
        for (part, kind), times in measured.items():
            if all(times):
                first, second = map(statistics.median, times)
                fastest = min(times[1]) / min(times[0])
                print(f"{part + ' ' + kind:<54}{first:>10.3f}{second:>10.3f}{second / first:>8.3f}{fastest:>8.3f}")


if __name__ == "__main__":
    main()
