"""Two checkouts against each other, before and after a change, in processes that take turns on one GPU.

    git worktree add /tmp/before COMMIT
    python benchmarks/ab.py /tmp/before . --what dense,biased,bsa,train --lengths 1024,65536

dense and biased (position and time): attention of 131,072 tokens, 4 heads of 128, bf16, forward and backward; bsa: the
same with blocks of 64, 16 chosen, groups of 64 and of 2; train: an epoch of ml-1m-hstu and ml-1m-hstu-large on
generated data. Prints a JSON line for each measurement, then a table: the median over the rounds of each process's
median, and the second checkout's time over the first one's. Results are not checked here: the tests and
benchmarks/run.py do.
"""

import argparse
import inspect
import json
import statistics
import subprocess
import sys
from pathlib import Path

TOKENS, HEADS, SIZE, REPEATS = 131072, 4, 128, 20
CONFIGS = ("ml-1m-hstu", "ml-1m-hstu-large")
# How checkouts measure an epoch: once, until some commit, and as the median of five since; here all by the latter.
EPOCH = "tokens, queued, seconds = epoch(3)"
FIVE_EPOCHS = "epochs = sorted((epoch(number) for number in range(3, 8)), key=lambda measured: measured[-1])"
MEDIAN = f"{FIVE_EPOCHS}; tokens, queued, seconds = epochs[2]"


def measure(function) -> float:
    """Milliseconds of a call, the median of CUDA-event timings."""
    import torch

    for _ in range(3):
        function()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def inputs(length):
    import torch

    from hstu_sparse.testing import make_jagged, make_offsets

    lengths = [length] * (TOKENS // length)
    q, k, v = (
        make_jagged(lengths, (HEADS, SIZE), dtype=torch.bfloat16, device="cuda", seed=seed).requires_grad_()
        for seed in range(3)
    )
    return (q, k, v, make_offsets(lengths, device="cuda"), length), lengths


def dense_call(length, biased):
    """(a forward call, what gets gradients); the bias is passed as this checkout's hstu_attention wants it."""
    import torch

    from hstu_sparse import hstu_attention
    from hstu_sparse.testing import make_timestamps

    arguments, lengths = inputs(length)
    if not biased:
        return lambda: hstu_attention(*arguments), list(arguments[:3])
    generator = torch.Generator().manual_seed(9)
    position, time = (torch.randn(n, generator=generator).cuda().requires_grad_() for n in (length, 129))
    times = make_timestamps(lengths, device="cuda")
    if "bias" in inspect.signature(hstu_attention).parameters:
        from hstu_sparse import RelativeBias

        options = dict(bias=RelativeBias(position, time, times))
    else:
        options = dict(position_bias=position, time_bias=time, timestamps=times)
    return lambda: hstu_attention(*arguments, **options), [*arguments[:3], position, time]


def bsa_call(length, group):
    import torch

    from hstu_sparse import bsa_attention

    arguments, _ = inputs(length)
    gates = [torch.rand(TOKENS, HEADS, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    options = dict(block_size=64, block_counts=16, selection_group=group)
    return lambda: bsa_attention(*arguments, (*gates, None), **options), [*arguments[:3], *gates]


def attention_cases(what, lengths):
    for length in lengths:
        if "dense" in what:
            yield f"dense {length:,}", lambda n=length: dense_call(n, False)
        if "biased" in what:
            yield f"dense, both biases {length:,}", lambda n=length: dense_call(n, True)
        for group in (64, 2):
            if "bsa" in what:
                yield f"bsa, groups of {group} {length:,}", lambda n=length, r=group: bsa_call(n, r)


def child(checkout: Path, what: list[str], lengths: list[int]) -> None:
    """Measures one checkout; a JSON line for each part of each case."""
    sys.path.insert(0, str(checkout))
    import torch

    for name, make in attention_cases(what, lengths):
        function, leaves = make()
        out = function()
        grad = torch.randn_like(out)
        emit(f"{name} forward", measure(function))
        emit(
            f"{name} backward", measure(lambda o=out, w=leaves, g=grad: torch.autograd.grad(o, w, g, retain_graph=True))
        )
        del function, leaves, out, grad
        torch.cuda.empty_cache()
    if "train" in what:
        for config in CONFIGS:
            emit(f"epoch of {config}", epoch_of(checkout, config))


def emit(name: str, milliseconds: float) -> None:
    print(json.dumps({"case": name, "ms": milliseconds}), flush=True)


def epoch_of(checkout: Path, config: str) -> float:
    """Milliseconds of an epoch as the checkout's own benchmarks/train.py measures it, the median of five."""
    path = checkout / "benchmarks" / "train.py"
    source = path.read_text()
    if (EPOCH in source) == (FIVE_EPOCHS in source):
        raise SystemExit(f"{path} measures an epoch in another way than this script knows")
    program = f"import sys; sys.argv = ['train.py', 'configs/{config}.yaml']; __file__ = {str(path)!r}\n"
    run = subprocess.run(
        [sys.executable, "-c", program + source.replace(EPOCH, MEDIAN)],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])
    record = next(json.loads(line) for line in reversed(run.stdout.splitlines()) if line.startswith("{"))
    return 1000 * record["epoch_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path, nargs="?")
    parser.add_argument("--what", type=lambda x: x.split(","), default=["dense", "biased", "bsa", "train"])
    parser.add_argument("--lengths", type=lambda x: [int(n) for n in x.split(",")], default=[1024, 4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=2, help="how often each checkout has its turn")
    options = parser.parse_args()
    if options.second is None:
        child(options.first.resolve(), options.what, options.lengths)
        return
    sides = [options.first.resolve(), options.second.resolve()]
    found: list[dict[str, list[float]]] = [{}, {}]
    for turn in range(2 * options.rounds):
        side = turn % 2
        lengths = ",".join(map(str, options.lengths))
        command = [sys.executable, __file__, str(sides[side]), "--what", ",".join(options.what), "--lengths", lengths]
        with subprocess.Popen(command, cwd=sides[side], stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                record = json.loads(line)
                print(json.dumps({"checkout": str(sides[side]), **record}), flush=True)
                found[side].setdefault(record["case"], []).append(record["ms"])
        if process.returncode:
            raise SystemExit(f"{sides[side]} failed, see above")
    print(f"\n{'case':<44}{'first':>10}{'second':>10}{'ratio':>8}")
    for case, times in found[0].items():
        first, second = statistics.median(times), statistics.median(found[1][case])
        print(f"{case:<44}{first:>10.3f}{second:>10.3f}{second / first:>8.3f}")


if __name__ == "__main__":
    main()
