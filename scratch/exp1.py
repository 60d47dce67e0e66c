import sys, time, json, os
sys.path.insert(0, "."); sys.path.insert(0, "benchmarks")
t0 = time.time()
import torch
import rotatekv as bench
from run import time_call
from hstu_sparse import rotatekv_compress
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.rotatekv import reference, launchers
print("import", round(time.time() - t0, 1), flush=True)

def call(q, qo, cache, N, rope=None, splits=None, few=None, softmax=True):
    return launchers.attention(q, qo, cache, N, softmax=softmax, alpha=q.shape[2] ** -0.5, bias=RelativeBias(), rope_base=rope, return_lse=False, splits=splits, few=few)[0]

def errors(rope, softmax=True, **few):
    q, qo, k, v, off = bench.inputs(2, 1000, 8, 128, 1)
    cache = rotatekv_compress(k, v, off)
    ref = [reference.attention_reference(q.to(t), qo, *reference.decompress_reference(cache, t), off, 1000, activation="softmax" if softmax else "silu", alpha=128**-0.5, bias=RelativeBias(), rope_base=rope)[0].double() for t in (torch.float64, torch.bfloat16)]
    got = call(q, qo, cache, 1000, rope, None, few, softmax).double()
    return [round(float((x - ref[0]).norm() / ref[0].norm()), 5) for x in (got, ref[1])]

part, flag = sys.argv[1], sys.argv[2]
if part == "B":
    while not os.path.exists(flag):
        time.sleep(0.05)
    t0 = time.time()
q, qo, k, v, off = bench.inputs(64, 8192, 8, 128, 1)
cache = rotatekv_compress(k, v, off)
del k, v
def show(name, f):
    t = time.time()
    try:
        r = time_call(f, warmup=3, repeats=15)
        print(f"{name}: {r['ms']} ({r['ms_p10']}-{r['ms_p90']})  [{time.time()-t:.1f}s, {time.time()-t0:.0f}]", flush=True)
    except Exception as e:
        print(name, type(e).__name__, str(e)[:200], flush=True)
if part == "A":
    D = dict(maxnreg=168, lazy=True, prefetch=False)
    print("errors (ours, bf16 reference)", errors(None, **D), flush=True)
    for s in (4, 6, 8, 12, 24):
        show(f"few 168 lazy splits {s}", lambda: call(q, qo, cache, 8192, splits=s, few=D))
    print("rope errors", errors(1e4, **(D | dict(maxnreg=None))), flush=True)
    for m in (None,):
        for s in (4, 6, 8):
            show(f"rope {m} splits {s}", lambda: call(q, qo, cache, 8192, rope=1e4, splits=s, few=D | dict(maxnreg=m)))
    for over in (dict(maxnreg=None), dict(maxnreg=128), dict(maxnreg=None, prefetch=True)):
        for s in (4, 8, 16):
            show(f"few {over} splits {s}", lambda: call(q, qo, cache, 8192, splits=s, few=D | over))
else:
    M = dict(BQ=128, maxnreg=128)
    q1, qo1 = q, qo
    gen = torch.Generator("cuda").manual_seed(9)
    from hstu_sparse.testing import make_offsets
    q = torch.randn(64 * 128, 8, 128, device="cuda", dtype=torch.bfloat16, generator=gen)
    qo = make_offsets([128] * 64, device="cuda")
    old_inputs = bench.inputs
    try:
        def err_many(softmax, **few):
            q, qo, k, v, off = bench.inputs(2, 1000, 8, 128, 100)
            cache = rotatekv_compress(k, v, off)
            ref = [reference.attention_reference(q.to(t), qo, *reference.decompress_reference(cache, t), off, 1000, activation="softmax" if softmax else "silu", alpha=128**-0.5, bias=RelativeBias(), rope_base=None)[0].double() for t in (torch.float64, torch.bfloat16)]
            got = call(q, qo, cache, 1000, None, None, few, softmax).double()
            return [round(float((x - ref[0]).norm() / ref[0].norm()), 5) for x in (got, ref[1])]
        print("many errors", err_many(True, **M), flush=True)
        for over in (dict(), dict(maxnreg=None), dict(prefetch=True), dict(lazy=False)):
            show(f"many {over}", lambda: call(q, qo, cache, 8192, splits=1, few=M | over))
        show("many rope", lambda: call(q, qo, cache, 8192, rope=1e4, splits=1, few=M | dict(maxnreg=None)))
    except Exception as e:
        print("many", type(e).__name__, str(e)[:300], flush=True)
    q, qo = q1, qo1
    del cache
    torch.cuda.empty_cache()
    show("copy", bench.run_copy(64, 8192, 8, 128)["compress"])
    for over in (dict(), dict(R=64, num_warps=8), dict(R=16, num_warps=1), dict(R=16, num_warps=2), dict(R=32, num_warps=2), dict(R=64, maxnreg=168)):
        launch = launchers.compress
        launchers.compress = lambda *a: launch(*a, **over)
        f = bench.run_compress(64, 8192, 8, 128, 2, 0.0)["compress"]
        show(f"compress {over}", f)
        launchers.compress = launch
        del f
    for name in ("CUDNN_ATTENTION",):
        f = bench.run_sdpa(name, 64, 8192, 8, 128, 1)["fwd"]
        show("sdpa " + name, f)
