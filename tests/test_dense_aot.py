"""The dense kernels compile ahead of time for sm_90, and spill no more than stated; test_dense_aot_sm80.py: for sm_80.

In a process of its own, since the interpreter, once chosen, replaces the compiler.
"""

import json
import os
import subprocess
import sys

import pytest

# Bytes of local memory per thread that a kernel with a bias, and one without, may spill. Without, the tile of dk and dv
# that spills 32 bytes was measured 7% faster than the largest one that spills none.
SPILLS = 192
SPILLS_UNBIASED = 32

SCRIPT = """
import json, sys
import torch
from hstu_sparse._triton import compile_ahead, padded_head
from hstu_sparse.dense import triton as dense

POINTERS = {"steps": "*i64", "cells": "*i32", "seq_offsets": "*i64", "num_targets": "*i64", "tiles": "*i32",
            "q_offset": "*i32", "k_offset": "*i32", "tile_buckets": "*i16", "runs": "*i32", "near": "*u8"}
FLOATS = {"half_alpha", "inverse_n", "half_inverse_n", "alpha"}
SIDE = {"position_bias", "time_bias", "greatest", "q_times", "k_times"}
GRADS = {"position_grad", "time_grad"}
POSITION = {"position_bias", "position_grad"}
TIMES = {"q_times", "q_offset", "k_times", "k_offset"}
TIME = TIMES | {"time_bias", "time_grad", "cells", "steps", "near", "runs", "tile_buckets"}


def build(part, dtype, d, v, features, arch):
    kernel, config = {
        "fwd": (dense.dense_attention_fwd_kernel, dense.fwd_config),
        "dq": (dense.dense_attention_bwd_dq_kernel, dense.bwd_dq_config),
        "dkv": (dense.dense_attention_bwd_dkv_kernel, dense.bwd_dkv_config),
    }[part]
    biased = "position" in features or "time" in features
    chosen = config(padded_head(d), padded_head(v), getattr(torch, dtype), set(features), arch)
    options = {name: chosen.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in chosen}
    short = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    constants = dict(
        H=2, D=d, V=v, D_OUT=d, V_OUT=v, HAS_TARGETS="targets" in features, HAS_WINDOW="window" in features,
        HAS_POSITION="position" in features, HAS_TIME="time" in features,
        TABLE=133, COPIES=64, FAST=dtype != "float32",
        PRECISION="ieee", PAD_D=padded_head(d), PAD_V=padded_head(v), **chosen,
    )
    absent = set()
    absent |= set() if "targets" in features else {"num_targets"}
    absent |= set() if "position" in features else POSITION
    absent |= set() if "time" in features else TIME
    absent |= set() if biased and dtype != "float32" else {"greatest"}
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            continue
        if name in absent:
            constants[name] = None
        elif name in ("q", "k", "v", "do", "dq", "dk", "dv", "out"):
            signature[name] = short
        elif name in SIDE:
            signature[name] = "*fp32"
        elif name in GRADS:
            signature[name] = "*fp32" if dtype == "float32" else "*i64"
        else:
            signature[name] = POINTERS.get(name, "fp32" if name in FLOATS else "i32")
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    found = compile_ahead(kernel, signature, constants, arch=arch, divisible=d % 16 == 0, **options)
    return {name: x for name, x in found.items() if name != "asm"}


def build_small(arch):
    one = dict(arch=arch, num_warps=4, num_stages=1)
    i64 = {"seq_offsets": "*i64"}
    yield compile_ahead(dense.dense_attention_schedule_kernel,
        dict(**i64, tiles="*i32", num_seqs="i32", num_slots="i32"), dict(BLOCK=128, CHUNK=256), **one)
    map = dict(**i64, num_seqs="i32", num_slots="i32", num_targets="*i64", window_size="i32", k_times="*i64",
               q_times="*i64", cells="*i32", tile_buckets="*i16", runs="*i32", near="*u8", row="i32",
               table_programs="i32", total="i32")
    shared = dict(tiles="*i32", position="*fp32", time="*bf16", half_position="*fp32", half_time="*fp32",
                  k_split="*fp32", k_offset="*i32", q_split="*fp32", q_offset="*i32")
    sizes = dict(HAS_TARGETS=True, HAS_WINDOW=True, OWN=64, OTHER=32, HIDDEN=133, N=211, TIMES=129, MARGIN=1024,
                 CHUNK=16)
    eight = {**one, "num_warps": 8}
    yield compile_ahead(dense.dense_attention_map_kernel, {**map, **shared}, dict(OWN_IS_QUERY=True, **sizes), **eight)
    yield compile_ahead(dense.dense_attention_map_kernel, map,
        dict(OWN_IS_QUERY=False, **sizes, **dict.fromkeys(shared)), **eight)
    yield compile_ahead(dense.dense_attention_gradients_kernel,
        dict(position="*i64", time="*i64", position_grad="*fp32", time_grad="*bf16", greatest="*fp32", scale="fp32"),
        dict(N=211, TIMES=129, ALL=129, TABLE=133, COPIES=64, BLOCK=128), **one)


arch, jobs = json.loads(sys.argv[1])
for job in jobs:
    print(json.dumps(build(*job, arch)), flush=True)
if not jobs:
    for found in build_small(arch):
        found.pop("asm")
        print(json.dumps(found), flush=True)
"""


def compile_in_a_process(arch, jobs):
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([".", *environment.get("PYTHONPATH", "").split(os.pathsep)])
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([arch, jobs])], capture_output=True, text=True, env=environment
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


ALL = ["targets", "window", "position", "time"]
SHARED = {80: 163 * 1024, 90: 227 * 1024}
STATIC = 36 * 1024  # of the dq kernel: the histogram and the ring


def check_kernel(arch, part, features):
    (found,) = compile_in_a_process(arch, [[part, "bfloat16", 128, 128, features]])
    assert found["local_bytes"] <= (SPILLS if features else SPILLS_UNBIASED), found
    assert not found["unset_registers"], found
    assert found["shared_bytes"] + (STATIC if part == "dq" and features else 0) <= SHARED[arch], found


def check_small_kernels(arch):
    found = compile_in_a_process(arch, [])
    assert len(found) == 4
    assert all(x["local_bytes"] == 0 for x in found), found


@pytest.mark.parametrize("part", ["fwd", "dq", "dkv"])
@pytest.mark.parametrize("features", [ALL, []])
def test_kernels(part, features):
    check_kernel(90, part, features)


def test_small_kernels():
    check_small_kernels(90)
