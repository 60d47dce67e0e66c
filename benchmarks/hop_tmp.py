"""Branch only: variants of hopper.py in one process."""
import cProfile, functools, importlib.util, io, json, os, pathlib, pstats, sys, time
import torch
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rotatekv as bench
from hstu_sparse import launch, rotatekv_compress
from hstu_sparse.rotatekv import launch_attention, reference
from hstu_sparse.relative_bias import RelativeBias

ROOT = pathlib.Path(__file__).resolve().parent.parent / "hstu_sparse" / "rotatekv"
KEYS = ("HOP_LAZY", "HOP_SKIP", "HOP_ORDER", "HOP_A", "HOP_B", "HOP_C", "HOP_D")

def load(name, file="hopper.py", **env):
    for k in KEYS:
        os.environ.pop(k, None)
    os.environ.update({k: str(v) for k, v in env.items()})
    spec = importlib.util.spec_from_file_location("hopper_" + name, ROOT / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hopper_" + name] = module
    spec.loader.exec_module(module)
    return module.rotatekv_hopper_fwd_kernel

CACHES = []


def use(kernel):
    for cache in CACHES:
        cache.__dict__.pop("kept", None)
    launch.compiled_kernels.clear()
    launch_attention.hopper_kernel = lambda: kernel

@functools.cache
def small(group, T, Q):
    q, qo, k, v, o = bench.inputs(2, T, 8, 128, Q)
    cache = rotatekv_compress(k, v, o, head_group=group)
    CACHES.append(cache)
    call = dict(activation="softmax", alpha=128**-0.5, bias=RelativeBias(), rope_base=None)
    high = reference.attention_reference(q.double(), qo, *reference.decompress_reference(cache, torch.float64), o, T, **call)[0]
    return q, qo, cache, T, high

def error(group=2, T=1000, Q=128):
    q, qo, cache, T, high = small(group, T, Q)
    out = bench.attend("fused", q, qo, cache, T).double()
    return ((out - high).norm() / high.norm()).item(), ((out - high).abs().max() / high.abs().max()).item()

@functools.cache
def small_jagged(group):
    from hstu_sparse.testing import make_jagged, make_offsets
    lengths, asked = [700, 0, 129, 1, 64, 128, 1500], [128, 64, 100, 1, 130, 300, 129]
    made = dict(dtype=torch.bfloat16, device="cuda")
    k, v = (make_jagged(lengths, (8, 128), seed=i, **made) for i in range(2))
    q = make_jagged(asked, (8, 128), seed=3, **made)
    o, qo = make_offsets(lengths, device="cuda"), make_offsets(asked, device="cuda")
    cache = rotatekv_compress(k, v, o, head_group=group, sink_tokens=0)
    CACHES.append(cache)
    call = dict(activation="softmax", alpha=128**-0.5, bias=RelativeBias(), rope_base=None)
    high = reference.attention_reference(q.double(), qo, *reference.decompress_reference(cache, torch.float64), o, 1510, **call)
    return q, qo, cache, high


def jagged(group):
    from hstu_sparse import rotatekv_attention
    q, qo, cache, high = small_jagged(group)
    out, lse = rotatekv_attention(q, qo, cache, 1510, activation="softmax", return_lse=True)
    finite = high[1].isfinite()
    assert torch.equal(finite, lse.isfinite())
    return ((out.double() - high[0]).norm() / high[0].norm()).item(), (lse[finite].double() - high[1][finite]).abs().max().item()


def rising(group, sinks=0):
    """Keys that grow along the history: the maximum rises again and again."""
    from hstu_sparse import rotatekv_attention
    q, qo, k, v, o = bench.inputs(2, 3000, 8, 128, 128)
    k = (k.view(2, 3000, 8, 128) * torch.linspace(0, 6, 3000, device="cuda")[None, :, None, None]).to(k.dtype).flatten(0, 1)
    cache = rotatekv_compress(k, v, o, head_group=group, sink_tokens=sinks)
    CACHES.append(cache)
    call = dict(activation="softmax", alpha=128**-0.5, bias=RelativeBias(), rope_base=None)
    high = reference.attention_reference(q.double(), qo, *reference.decompress_reference(cache, torch.float64), o, 3000, **call)
    out, lse = rotatekv_attention(q, qo, cache, 3000, activation="softmax", return_lse=True)
    return ((out.double() - high[0]).norm() / high[0].norm()).item(), (lse.double() - high[1]).abs().max().item()


def times(f, n=60):
    torch.cuda.synchronize()
    time.sleep(float(os.environ.get("HOP_SLEEP", "0")))
    for _ in range(5): f()
    torch.cuda.synchronize()
    t = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); b.synchronize(); t.append(a.elapsed_time(b))
    return torch.tensor(t).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()

def main(variants, rounds=3, groups=(2,)):
    t0 = time.time()
    if not rounds:
        for name, variant in variants.items():
            use(load(name, **variant))
            if len(groups) > 1:
                print("MORE", name, *(("jagged", g, jagged(g), "rising", rising(g), rising(g, 5)) for g in groups), f"{time.time()-t0:.0f}s", flush=True)
                continue
            print("ERRORS", name, error(), error(2, 4100, 100), error(2, 127, 65), jagged(2), f"{time.time()-t0:.0f}s", flush=True)
        return
    for group in groups:
        q, qo, k, v, o = bench.inputs(64, 8192, 8, 128, 128)
        cache = rotatekv_compress(k, v, o, head_group=group)
        del k, v
        CACHES.append(cache)
        run = {}
        for name, variant in variants.items():
            try:
                kernel = load(name, **variant)
                use(kernel)
                errors = error(group), jagged(group)
                call = functools.partial(bench.attend, "fused", q, qo, cache, 8192)
                parts = bench.with_replay(call)
                run[name] = kernel, dict(launch.compiled_kernels), parts
                print("LOADED", group, name, variant, "errors", [f"{a:.2e} {b:.2e}" for a, b in errors], f"{time.time()-t0:.0f}s", flush=True)
            except Exception as e:
                import traceback; traceback.print_exc()
                print("FAILED", name, type(e), str(e)[:300], flush=True)
        sdpa = bench.run_sdpa("CUDNN_ATTENTION", 64, 8192, 8, 128, 128)
        for r in range(rounds):
            for name in ["cudnn", *run, "cudnn"]:
                if name == "cudnn":
                    parts = sdpa
                else:
                    kernel, compiled, parts = run[name]
                    use(kernel); launch.compiled_kernels.update(compiled)
                found = {p: [round(x, 4) for x in times(f)] for p, f in parts.items()}
                print(json.dumps(dict(group=group, round=r, name=name, **found)), f"{time.time()-t0:.0f}s", flush=True)
        if group == groups[0]:
            for name, f in (("ours", lambda: bench.attend("fused", q, qo, cache, 8192)), ("sdpa", sdpa["fwd"])):
                for _ in range(3):
                    torch.cuda.synchronize()
                    a = time.perf_counter()
                    for _ in range(100): f()
                    b = time.perf_counter()
                    torch.cuda.synchronize()
                    print("HOST us a call, not waited for", name, round((b - a) * 1e4, 1), flush=True)
        if 0:
            profile = cProfile.Profile(); profile.enable()
            for _ in range(200): bench.attend("fused", q, qo, cache, 8192)
            profile.disable(); torch.cuda.synchronize()
            s = io.StringIO(); pstats.Stats(profile, stream=s).sort_stats("cumtime").print_stats(45)
            pathlib.Path(os.environ.get("OUT", "/tmp"), "hopper_profile.txt").write_text(s.getvalue())
        del q, qo, cache, run, sdpa
        torch.cuda.empty_cache()

if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3, [int(x) for x in (sys.argv[3] if len(sys.argv) > 3 else "2").split(",")])
