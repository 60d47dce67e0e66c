"""What test_ring_gpu.py runs under torchrun: each rank's part of every case against one process in fp64."""

import os
import sys

import torch
import torch.distributed as dist

from hstu_sparse.ring import cut_sequences
from tests import ring_cases
from tests.ring_cases import CASES, HSTU_CASES, OPTIONS, expected, hstu_expected, hstu_inputs


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    wrong = 0

    def compare(label, found, right, tolerance):
        nonlocal wrong
        # Of tensors that are 0 but for rounding (a window of one key), the absolute error.
        error = (found.cpu().double() - right.double()).norm() / max(1.0, right.double().norm().item())
        if not error <= tolerance:
            wrong += 1
            print(f"rank {rank}: {label}: relative error {error:.2e}", flush=True)

    for form, option in CASES:
        if option == "fp64":
            continue
        found = ring_cases.of_rank(rank, world, form, option, "auto", "cuda")
        offsets = ring_cases.make_offsets(ring_cases.lengths_of(form, world))
        index, _ = cut_sequences(offsets, rank, world, zigzag="zigzag" in form)
        tolerance = 5e-2 if OPTIONS[option].get("dtype") else 1e-4
        for name, value, whole in zip(("out", "lse", "dq", "dk", "dv"), found, expected(form, option, world)):
            right = whole[:, index] if name == "lse" else whole[index]
            keep = right.isfinite()
            compare(f"{form}, {option}, {name}", value.cpu()[keep], right[keep], 1e-2 if name == "out" else tolerance)
    for case in HSTU_CASES:
        if case == "fp64":
            continue
        found = ring_cases.hstu_of_rank(rank, world, case, "auto", "cuda")
        index, _ = cut_sequences(hstu_inputs(case)[2], rank, world, zigzag=case == "zigzag")
        for place, (value, whole) in enumerate(zip(found, hstu_expected(case))):
            if place >= 4:
                dist.all_reduce(value)
            compare(f"hstu {case}, {place}", value, whole[index] if place < 4 else whole, 1e-4)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
