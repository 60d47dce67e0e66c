"""warm NAME: compiles one thing; time OUT: figures."""
import json, os, sys, time
sys.path.insert(0, "."); sys.path.insert(0, "benchmarks")
t0 = time.time()
import torch
import rotatekv as bench
from run import environment, time_call
from hstu_sparse.rotatekv import launch_attention as la, launchers
from hstu_sparse import rotatekv_compress

VARIANTS = {
    "few": {"none": None, "168": 168, "128": 128},
    "few rope": {"none": None, "168": 168},
    "many": {"128": 128, "none": None},
    "many rope": {"none": None, "128": 128},
}
COMPRESS = {"64x4": (64, 4), "64x8": (64, 8), "16x1": (16, 1), "16x2": (16, 2), "32x2": (32, 2)}
PLAIN = ("two stages", "two stages rope")

def settle(name, variant):
    if name == "compress":
        launchers.COMPRESS = COMPRESS[variant]
        return
    la.REGISTERS[(name.split()[0], "rope" in name)] = VARIANTS[name][variant]

def asked(name):
    return 128 if name.startswith("many") else 1

def case(name):
    return "fused rope" if "rope" in name else "fused"

def checked(name, queries):
    bench.check.cache_clear()
    try:
        bench.check(case(name) if name in VARIANTS else name, 8, 128, queries, 2, 0.0)
        return True
    except AssertionError as e:
        print("WRONG", name, queries, str(e)[:300], flush=True)
        return False

if sys.argv[1] == "warm":
    name, variant = sys.argv[2].split("/")
    if name == "compress":
        settle(name, variant)
        bench.run_compress(2, 1024, 8, 128, 2, 0.0)["compress"]()
    elif name in VARIANTS:
        settle(name, variant)
        print(name, variant, checked(name, asked(name)), round(time.time() - t0, 1), flush=True)
        # the figures' own shape, whose offsets and splits may be specialised otherwise
        q, qo, k, v, off = bench.inputs(4, 8192, 8, 128, asked(name))
        bench.attend(case(name), q, qo, rotatekv_compress(k, v, off), 8192)
    else:
        print(name, variant, checked(name, int(variant)), round(time.time() - t0, 1), flush=True)
    torch.cuda.synchronize()
    sys.exit()

out = open(sys.argv[2], "a")
env = environment()
SHAPE = dict(users=64, length=8192, heads=8, head_size=128)

def figure(name, f, **more):
    try:
        r = time_call(f, warmup=3, repeats=15)
    except Exception as e:
        print(name, more, type(e).__name__, str(e)[:200], flush=True)
        return
    line = {"op": "rotatekv", "name": name, **SHAPE, **more, **env, "checked": True, "part": "fwd", **r}
    out.write(json.dumps(line) + "\n"); out.flush()
    print(f"{name} {more}: {r['ms']} ({r['ms_p10']}-{r['ms_p90']}) {r['peak_mb']} MB  [{time.time()-t0:.0f}]", flush=True)

def vary(name, f, **more):
    first = None
    for variant in VARIANTS[name]:
        settle(name, variant)
        figure(case(name), f, variant=variant, **more)
    settle(name, next(iter(VARIANTS[name])))

kept = {}
for queries in (1, 128):
    q, qo, k, v, off = bench.inputs(64, 8192, 8, 128, queries)
    if queries == 1:
        cache = rotatekv_compress(k, v, off)
        print("cache share", cache.nbytes / (k.nbytes + v.nbytes), flush=True)
    del k, v
    kept[queries] = q, qo
    kind = "few" if queries == 1 else "many"
    more = dict(bits=2, sparsity=0.0, queries=queries)
    vary(kind, lambda: bench.attend("fused", q, qo, cache, 8192), **more)
    figure("two stages", lambda: bench.attend("two stages", q, qo, cache, 8192), **more)
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        torch.cuda.empty_cache()
        f = bench.run_sdpa(name, 64, 8192, 8, 128, queries)["fwd"]
        figure("sdpa-" + name.split("_")[0].lower(), f, queries=queries)
        del f
from hstu_sparse import rotatekv_decompress
figure("decompress", lambda: rotatekv_decompress(cache), bits=2, sparsity=0.0)
torch.cuda.empty_cache()
f = bench.run_copy(64, 8192, 8, 128)["compress"]
figure("copy", f, gb=2.147483648)
del f
for variant in COMPRESS:
    settle("compress", variant)
    torch.cuda.empty_cache()
    f = bench.run_compress(64, 8192, 8, 128, 2, 0.0)["compress"]
    figure("compress", f, variant=variant, bits=2, sparsity=0.0, gb=2.147483648)
    del f
for queries in (1, 128):
    q, qo = kept[queries]
    more = dict(bits=2, sparsity=0.0, queries=queries)
    vary(("few" if queries == 1 else "many") + " rope", lambda: bench.attend("fused rope", q, qo, cache, 8192), **more)
    figure("two stages rope", lambda: bench.attend("two stages rope", q, qo, cache, 8192), **more)
