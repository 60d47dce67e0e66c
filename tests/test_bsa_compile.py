"""Every block-sparse kernel compiles ahead of time for sm_80 and sm_90, as the launcher would run it, without spills.

Needs no GPU. Where there is none the tests run in Triton's interpreter, which compiles nothing, so this file runs
itself as a program with the interpreter off: `python -m tests.test_bsa_compile 90` prints one JSON line per kernel.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


from hstu_sparse._triton import compile_ahead, next_power_of_2, padded_head
from hstu_sparse.bsa import blocks, key_major, query_major
from hstu_sparse.bsa.triton import launches

ROOT = Path(__file__).parents[1]
# Bytes of local memory per thread that a kernel may use for registers that do not fit. The key-major backward holds two
# accumulators of 64 x 128; with fewer rows, or more warps, nothing spills, and it is slower (docs/bsa.md).
SPILL_BOUND = 320
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
FLOAT32 = {"dkbar", "dvbar", "dg_cmp", "dg_slc", "dg_swa", "parts"}
INT32 = {"indices", "ranks", "counts", "list_start", "chunk_start", "part_start", "chunk_list", "lists"}
ACTIVATIONS = {"q", "k", "v", "do", "kbar", "kbar_low", "vbar", "g_cmp", "g_slc", "g_swa", "dk", "dv"}
KERNELS = {
    "pool": blocks.bsa_pool_fwd_kernel,
    "choose": blocks.bsa_choose_fwd_kernel,
    "rank": blocks.bsa_rank_kernel,
    "plan": blocks.bsa_plan_kernel,
    "chunks": blocks.bsa_chunks_kernel,
    "fill": blocks.bsa_fill_kernel,
    "query_fwd": query_major.bsa_query_fwd_kernel,
    "query_dq": query_major.bsa_query_bwd_dq_kernel,
    "select_fwd": key_major.bsa_select_fwd_kernel,
    "select_dq": key_major.bsa_select_bwd_dq_kernel,
    "select_dkv": key_major.bsa_select_bwd_dkv_kernel,
    "merge": key_major.bsa_merge_bwd_dkv_kernel,
    "compress_dkv": key_major.bsa_compress_bwd_dkv_kernel,
}


def compile_kernel(name, *, arch=90, dtype=torch.bfloat16, D=128, V=128, BS=64, S=16, R=2, window=True, tma=()):
    """compile_ahead of one kernel with the launcher's constants; `tma` names the inputs that come as descriptors."""
    kernel = KERNELS[name]
    BD, BV = padded_head(D), padded_head(V)
    select = R >= 32
    group_tile = 64 if R < 8 or name in ("rank", "fill") else 16
    width = max(2, next_power_of_2(S))
    launch = launches(dtype, max(BD, BV), BS, R).get(name)
    constants = dict(D=D, V=V, BD=BD, BV=BV, BS=BS, R=R, BG=group_tile, P=width, BC=max(64, width))
    constants |= dict(
        SPLIT=dtype != torch.float32, SELECT=select, WINDOW=window, ATOMIC=True, DQ=not select, TMA=bool(tma)
    )
    constants |= dict(FAST=dtype != torch.float32, PRECISION="tf32x3", SIZE=256 if name == "chunks" else 1024)
    constants |= dict(BM=launch.BM, BN=launch.BN) if launch else dict(BM=16, BN=16)
    names = kernel.arg_names
    signature = {}
    for argument in names:
        if argument in constants:
            continue
        if argument in tma:
            rows = launch.BM if argument in ("q", "do") else launch.BN
            size = V if argument in ("v", "vbar", "do") else D
            signature[argument] = f"tensordesc<{NAMES[dtype]}[{rows}, {size}]>"
            continue
        if argument in ACTIVATIONS or (argument in ("out", "dq") and select):
            signature[argument] = "*" + NAMES[dtype]
        elif argument in FLOAT32 or argument in ("out", "dq"):
            signature[argument] = "*fp32"
        elif argument in INT32:
            signature[argument] = "*i32"
        elif argument == "offsets":
            signature[argument] = "*i64"
        else:
            signature[argument] = "fp32" if argument in ("alpha", "inv_n") else "i32"
    return compile_ahead(
        kernel,
        signature,
        {n: c for n, c in constants.items() if n in names},
        arch=arch,
        num_warps=launch.num_warps if launch else 4,
        num_stages=launch.num_stages if launch else 2,
    )


def cases(arch: int):
    for name in KERNELS:
        yield name, dict(R=2)
    for name in ("query_fwd", "query_dq", "select_dkv"):
        yield name, dict(R=64, window=False)
    if arch == 90:
        for group in (2, 64):
            for name in ("query_fwd", "query_dq"):
                yield name, dict(R=group, window=False, tma=("k", "v", "kbar", "vbar"))
        yield "select_dkv", dict(R=64, window=False, tma=("q", "do"))
        yield "compress_dkv", dict(R=2, tma=("q", "do"))
        yield "select_dkv", dict(R=2, dtype=torch.float32, D=64, V=64)
        yield "query_dq", dict(R=64, dtype=torch.float32, D=64, V=64)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles_without_spilling(arch):
    command = [sys.executable, "-m", f"tests.{Path(__file__).stem}", str(arch)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    report = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(report) == len(list(cases(arch)))
    spilled = [usage for usage in report if usage["local_bytes"] > SPILL_BOUND]
    assert not spilled, "\n".join(map(str, spilled))
    assert all(usage["shared_bytes"] <= (227 if arch == 90 else 163) * 1024 for usage in report)


if __name__ == "__main__":
    for kernel_name, case in cases(int(sys.argv[1])):
        found = compile_kernel(kernel_name, arch=int(sys.argv[1]), **case)
        found.pop("asm")
        print(json.dumps(found | {n: str(x) for n, x in case.items()}), flush=True)
