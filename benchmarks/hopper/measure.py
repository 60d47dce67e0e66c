"""Checks and times the kernels of this folder on a GPU with sm_90, in so many seconds each:

    export PYTHONPATH=$PWD
    python benchmarks/hopper/measure.py checks 60 /tmp/right.json
    python benchmarks/hopper/measure.py times 45 /tmp/right.json

They are prototypes, which no GPU has run (docs/notes/2026-11-23-hopper.md). Each is held against the reference in fp64,
and timed with the Triton kernels and cuDNN's softmax attention queued, in turns in one process: medians of three.

A variant is checked by a process of its own, so that one that hangs or faults spoils no other, and compiles meanwhile.
"""

import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from dkv import dense_attention_bwd_dkv_hopper_kernel
from dq import dense_attention_bwd_dq_hopper_kernel
from forward import dense_attention_fwd_hopper_kernel
from shared import descriptor

from hstu_sparse import attention_plan, hstu_attention
from hstu_sparse.launch import multiprocessors
from hstu_sparse.testing import assert_within_budget, make_jagged, make_offsets

# Per kernel and head size: settings of its blocks. BLOCK_M are rows of queries, BLOCK_N of keys.
QUERIES = dict(BLOCK_M=128)
VARIANTS = [
    *((128, "forward", QUERIES | dict(BLOCK_N=128, STAGES=2, TURNS=turns)) for turns in (False, True)),
    *((64, "forward", QUERIES | dict(BLOCK_N=128, STAGES=3, TURNS=turns)) for turns in (False, True)),
    (128, "dq", QUERIES | dict(BLOCK_N=64, STAGES=3)),
    (64, "dq", QUERIES | dict(BLOCK_N=64, STAGES=4)),
    (64, "dq", QUERIES | dict(BLOCK_N=128, STAGES=3)),
    (128, "dkv", dict(BLOCK_M=64, BLOCK_N=128, STAGES=3)),
    (128, "dkv", dict(BLOCK_M=32, BLOCK_N=128, STAGES=4)),
    (64, "dkv", dict(BLOCK_M=64, BLOCK_N=128, STAGES=4)),
]
# Lengths, N, candidates, window, dtype.
CASES = [
    ((300, 0, 701, 1, 217, 128, 256), 1024, None, 0, torch.bfloat16),
    ((5000, 3000), 5000, None, 0, torch.bfloat16),
    ((300, 0, 701, 1, 217, 64, 65, 63), 1024, (20, 0, 300, 1, 7, 64, 1, 0), 0, torch.float16),
    ((900, 1300, 5), 1300, None, 100, torch.bfloat16),
    ((900, 1300, 130), 1300, (5, 200, 0), 300, torch.bfloat16),
    (tuple(37 * i % 600 for i in range(300)), 600, None, 0, torch.bfloat16),
]
TOKENS, HEADS, DEVICE = 131072, 4, "cuda"


def schedule(lengths_of, rows: int) -> torch.Tensor:
    """[slots, 2] int32: (sequence, tile), sequences with most tiles first. Tiles are counted as each kernel wants."""
    tiles = sorted(((-(-n // rows), b) for b, n in enumerate(lengths_of)), reverse=True)
    return torch.tensor([(b, i) for count, b in tiles for i in range(count)], dtype=torch.int32, device=DEVICE)


def kernel_call(name, q, k, v, do, offsets, n, targets=None, window=0, **settings):
    """A function without arguments that launches a kernel and returns what it wrote."""
    size, scale = q.shape[2], q.shape[2] ** -0.5
    own = settings["BLOCK_N" if name == "dkv" else "BLOCK_M"]
    work = schedule(offsets.diff().tolist(), own)
    rows = [settings[f"BLOCK_{x}"] for x in "MNNM"]
    if name == "forward":
        kernel, given, outputs = dense_attention_fwd_hopper_kernel, (q, k, v), [torch.empty_like(v)]
        numbers = 0.5 * scale, 1 / n
    elif name == "dq":
        kernel, given, outputs = dense_attention_bwd_dq_hopper_kernel, (q, k, v, do), [torch.empty_like(q)]
        numbers = 0.5 * scale, 0.5 * scale / n
    else:
        kernel, given = dense_attention_bwd_dkv_hopper_kernel, (q, k, v, do)
        outputs = [torch.empty_like(k), torch.empty_like(v)]
        numbers = 0.5 * scale, 0.5 / n, scale
    for x in outputs:
        x.fill_(float("nan"))
    sources = [descriptor(x, r) for x, r in zip(given, rows)]
    strides = [x.base.stride(1) for x in sources] + [s for x in outputs for s in x.stride()[:2]]
    heads, slots = q.shape[1], work.shape[0]
    grid = min(multiprocessors(q.device), slots * heads)
    assert size in (64, 128)

    def call():
        taken = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        kernel[(grid,)](
            *sources, *outputs, *strides, offsets, targets, window, *numbers, work, slots, taken, H=heads,
            HAS_TARGETS=targets is not None, HAS_WINDOW=window > 0, num_warps=4, **settings,
        )  # fmt: skip
        return outputs

    return call


def inputs(lengths, size, dtype):
    tensors = [make_jagged(lengths, (HEADS, size), dtype=dtype, device=DEVICE, seed=i) for i in range(4)]
    return *tensors, make_offsets(lengths, device=DEVICE)


def check(size, name, settings):
    """Prints what is wrong; exits with 1 if something is. After a fault of the GPU nothing more can be checked."""
    wrong = 0
    for case in CASES:
        try:
            check_case(size, name, settings, *case)
        except Exception as error:
            wrong += 1
            print("wrong:", size, name, settings, case[1:], str(error)[:400].replace("\n", " "), flush=True)
            if "CUDA" in str(error):
                break
    sys.exit(wrong > 0)


def check_case(size, name, settings, lengths, n, targets, window, dtype):
    """Raises AssertionError where a result is wrong, or differs between two runs."""
    q, k, v, do, offsets = inputs(lengths, size, dtype)
    targets = None if targets is None else torch.tensor(targets, device=DEVICE)
    call = kernel_call(name, q, k, v, do, offsets, n, targets, window, **settings)
    found = [x.clone() for x in call()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(found, call())), "two runs differ"

    def expected(q, k, v, do):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = dict(num_targets=targets, window_size=window, backend="reference")
        out = hstu_attention(*leaves, offsets, n, **options)
        if name == "forward":
            return [out.detach()]
        grads = torch.autograd.grad(out, leaves, do)
        return grads[:1] if name == "dq" else grads[1:]

    low, exact = expected(q, k, v, do), expected(*(x.double() for x in (q, k, v, do)))
    for actual, lossy, reference in zip(found, low, exact):
        assert_within_budget(f"{name} of {lengths}", actual, lossy, reference)


def milliseconds(call, least=12.0):
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    times = max(3, min(60, int(least / start.elapsed_time(end))))
    torch.cuda._sleep(2_000_000)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def cudnn(length, size):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = TOKENS // length, HEADS, length, size
    leaves = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)

    out = forward()
    return forward, functools.partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)


def measure(variants, until):
    for size in (128, 64):
        for length in (16384, 4096, 1024, 65536):
            if time.time() > until:
                return
            q, k, v, do, offsets = inputs([length] * (TOKENS // length), size, torch.bfloat16)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            plan = attention_plan(q, v, offsets, length)
            attention = functools.partial(hstu_attention, *leaves, offsets, length, plan=plan)
            backward = functools.partial(torch.autograd.grad, attention(), leaves, do, retain_graph=True)
            forward_there, backward_there = cudnn(length, size)
            calls = {"cuDNN forward": forward_there, "cuDNN backward": backward_there}
            calls |= {"triton forward": attention, "triton backward": backward}
            calls["hopper forward, library"] = functools.partial(attention, backend="hopper")
            for own_size, name, settings in variants:
                if own_size == size:
                    tensors = [x.detach() for x in (q, k, v, do)]
                    calls[f"{name} {settings}"] = kernel_call(name, *tensors, offsets, length, **settings)
            found: dict[str, list[float]] = {label: [] for label in calls}
            for _ in range(3):
                for label in list(found):
                    try:
                        found[label].append(milliseconds(calls[label]))
                    except Exception as error:
                        print("no time:", label, str(error)[:400], flush=True)
                        del found[label]
            for label, values in found.items():
                middle = statistics.median(values)
                print(f"D {size} {length:6} {middle:8.3f} ms [{min(values):.3f} {max(values):.3f}] {label}", flush=True)


def check_all(until):
    """The variants that are right."""
    start = [sys.executable, __file__, "check"]
    running = [subprocess.Popen([*start, json.dumps(variant)]) for variant in VARIANTS]
    right = []
    for variant, process in zip(VARIANTS, running):
        try:
            process.wait(timeout=max(1, until - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            print("no end:", *variant, flush=True)
        if process.returncode == 0:
            right.append(variant)
            print("right:", *variant, flush=True)
    print("right:", len(right), "of", len(VARIANTS), flush=True)
    return right


def main():
    if sys.argv[1] == "check":
        check(*json.loads(sys.argv[2]))
    until, file = time.time() + float(sys.argv[2]), Path(sys.argv[3])
    if sys.argv[1] == "checks":
        file.write_text(json.dumps(check_all(until)))
    else:
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
        measure(json.loads(file.read_text()) if file.exists() else [], until)


if __name__ == "__main__":
    main()
