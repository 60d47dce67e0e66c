"""Kernel times of one variant: python benchmarks/bsa_cuts.py NAME BARRIER_DIR COUNT [group]; environment BSA_CUT."""
import fcntl, json, os, pathlib, statistics, sys, time
import torch
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent)); sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
name, barrier, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
group = int(os.environ.get("BSA_GROUP", "64"))
import bsa
from hstu_sparse.bsa import launch, bias as bias_module
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.testing import make_timestamps
events = []
def wrap(module):
    plain = module.run
    def run(kernel, grid, *args, **options):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); found = plain(kernel, grid, *args, **options); b.record()
        events.append((kernel.fn.__name__ if hasattr(kernel, "fn") else str(kernel), a, b))
        return found
    module.run = run
kind = os.environ.get("BSA_KIND", "biased")
def make_bias(tokens, length):
    found = original(tokens, length)
    if kind == "flat":
        found = RelativeBias(found[0], found[1], torch.zeros_like(found[2]))
    if kind == "position":
        found = RelativeBias(found[0])
    if kind == "time":
        found = RelativeBias(None, found[1], found[2])
    return found
original, bsa.make_bias = bsa.make_bias, make_bias
def parts(call, leaves):
    leaves = [x for x in leaves if x is not None]
    grad = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad)
bsa.parts = parts
def prepare(tokens, length):
    options = dict(block_size=64, block_counts=16, window_size=0, selection_group=group)
    return bsa.run_bsa((tokens, length, 4, 128, torch.bfloat16), options, False, kind != "plain")
begin = time.time()
prepare(8192, 4096)()
torch.cuda.synchronize()
took = time.time() - begin
(barrier / name).touch()
while len(list(barrier.iterdir())) < count and time.time() - begin < 105:
    time.sleep(0.2)
with open(barrier.parent / (barrier.name + ".lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    for length in map(int, os.environ.get("BSA_LENGTHS", "4096").split(",")):
        function = prepare(131072, length)
        for _ in range(2): function()
        torch.cuda.synchronize()
        whole = []
        torch.cuda._sleep(30_000_000)
        for _ in range(9):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); function(); b.record(); whole.append((a, b))
        torch.cuda.synchronize()
        total = statistics.median(a.elapsed_time(b) for a, b in whole)
        restore = launch.run, bias_module.run
        wrap(launch); wrap(bias_module)
        seen = {}
        for _ in range(7):
            events.clear(); torch.cuda._sleep(30_000_000); function(); torch.cuda.synchronize()
            for kernel, a, b in events: seen.setdefault(kernel, []).append(a.elapsed_time(b) * 1e3)
        launch.run, bias_module.run = restore
        short = {k.removeprefix("bsa_").removesuffix("_kernel"): round(statistics.median(v)) for k, v in seen.items()}
        print(name, length, f"{total:.3f}", json.dumps(short), f"compiled {took:.0f}", flush=True)
        del function
        torch.cuda.empty_cache()
