"""What test_ring_gpu.py runs under torchrun: each rank's part of every case against one process in fp64, and the errors
of SDPA on one GPU beside it. A few cases that share kernels: each kernel takes a second to compile.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from hstu_sparse.ring import cut_sequences
from tests import ring_cases
from tests.ring_cases import expected, hstu_expected, hstu_inputs

# form, option, dtype: one of each form and of each specialisation of the kernels.
CASES = [
    ("zigzag", "causal", torch.bfloat16),
    ("plain", "full", torch.bfloat16),
    ("varlen", "causal", torch.bfloat16),
    ("zigzag varlen", "all at once", torch.bfloat16),
    ("zigzag varlen", "causal", torch.float32),
]
HSTU_CASES = ["both biases, several sequences", "zigzag"]
# Head size, and how many times as long the sequences are as over gloo: several tiles in every piece.
LARGER = dict(size=128, longer=24)
BOUNDS = {
    torch.bfloat16: {"out": 1e-2, "lse": 1e-2, "dq": 5e-2, "dk": 5e-2, "dv": 5e-2},
    torch.float32: dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 1e-4),
}


def relative(found, right) -> float:
    keep = right.isfinite()
    return ((found.double() - right)[keep].norm() / right[keep].norm()).item()


def sdpa_errors(form, option, world, dtype, whole) -> dict[str, float]:
    """Of torch's attention on one GPU, for sequences of one length."""
    leaves, grad, offsets, keywords = ring_cases.inputs(form, option, world, dtype=dtype, **LARGER)
    batch = (len(offsets) - 1, -1)
    *leaves, grad = (x.cuda().unflatten(0, batch).transpose(1, 2).contiguous() for x in (*leaves, grad))
    leaves = [x.requires_grad_() for x in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=bool(keywords.get("causal")))
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    flat = (x.transpose(1, 2).flatten(0, 1) for x in found)
    return {name: relative(x, whole[name]) for name, x in zip(("out", "dq", "dk", "dv"), flat, strict=True)}


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    wrong = 0
    start = time.monotonic()

    def compare(label, name, error, bound):
        nonlocal wrong
        wrong += not error <= bound
        print(
            f"rank {rank}: {label}, {name}: {error:.2e} of {bound:.2e}{'' if error <= bound else ' WRONG'}", flush=True
        )

    for form, option, dtype in CASES:
        label = f"{time.monotonic() - start:.1f} s {form}, {option}, {dtype}"
        found = ring_cases.of_rank(rank, world, form, option, "auto", "cuda", dtype=dtype, **LARGER)
        offsets = ring_cases.make_offsets(ring_cases.lengths_of(form, world, LARGER["longer"]))
        index, _ = cut_sequences(offsets, rank, world, zigzag="zigzag" in form)
        exact = expected(form, option, world, dtype=dtype, exact="cuda", **LARGER)
        whole = dict(zip(("out", "lse", "dq", "dk", "dv"), exact))
        torch_errors = {} if "varlen" in form else sdpa_errors(form, option, world, dtype, whole)
        for (name, right), value in zip(whole.items(), found, strict=True):
            right = right[:, index] if name == "lse" else right[index]
            bound = min(BOUNDS[dtype][name], 2 * torch_errors.get(name, float("inf")))
            compare(label, name, relative(value, right), bound)
    for case in HSTU_CASES:
        label = f"{time.monotonic() - start:.1f} s hstu {case}"
        found = ring_cases.hstu_of_rank(rank, world, case, "auto", "cuda")
        index, _ = cut_sequences(hstu_inputs(case)[2], rank, world, zigzag=case == "zigzag")
        for place, (value, right) in enumerate(zip(found, hstu_expected(case), strict=True)):
            if place >= 4:
                dist.all_reduce(value)
            compare(label, place, relative(value.cpu(), (right[index] if place < 4 else right).double()), 1e-4)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
