"""Compare each rank's part of a case with one process in fp64, and its errors with those of SDPA on one GPU.

Attention by heads is compared with one process and the same kernels. test_ring_gpu.py starts this by torchrun. The
command line names the case, and may name a backend in place of auto.
"""

import os
import sys

import torch
import torch.distributed as dist

from hstu_sparse.ring import softmax
from hstu_sparse.ring.plan import cut_sequences
from tests.operators import heads_cases, ring_cases
from tests.operators.ring_cases import expected, hstu_expected, hstu_inputs

# name -> form, option, dtype: one of each form and of each specialisation of the kernels.
CASES = {
    "zigzag": ("zigzag", "causal", torch.bfloat16),
    "plain": ("plain", "full", torch.bfloat16),
    "varlen": ("varlen", "causal", torch.bfloat16),
    "all options": ("zigzag varlen", "all at once", torch.bfloat16),
    "heads in turn": ("zigzag varlen", "shared keys", torch.bfloat16),
    "fp32": ("zigzag varlen", "causal", torch.float32),
}
HSTU_CASES = {"hstu": "both biases, several sequences", "hstu zigzag": "zigzag"}
# LONGER: the sequences are so many times as long as in the tests over gloo, so that every piece has several tiles.
# SMALLER: the head sizes of kernels that would compile for a minute at 128.
LONGER = 24
SMALLER = {"all options": 32, "fp32": 32}
BOUNDS = {
    torch.bfloat16: {"out": 1e-2, "lse": 1e-2, "dq": 5e-2, "dk": 5e-2, "dv": 5e-2},
    torch.float32: dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 1e-4),
}


def relative(actual, right) -> float:
    keep = right.isfinite()
    return ((actual.double() - right)[keep].norm() / right[keep].norm()).item()


def sdpa_errors(form, option, world, dtype, whole, larger) -> dict[str, float]:
    """Return the results of torch's attention on one GPU, for sequences of one length."""
    leaves, grad, offsets, keywords = ring_cases.inputs(form, option, world, dtype=dtype, **larger)
    batch = (len(offsets) - 1, -1)
    *leaves, grad = (x.cuda().unflatten(0, batch).transpose(1, 2).contiguous() for x in (*leaves, grad))
    leaves = [x.requires_grad_() for x in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=bool(keywords.get("causal")))
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    flat = (x.transpose(1, 2).flatten(0, 1) for x in results)
    return {name: relative(x, whole[name]) for name, x in zip(("out", "dq", "dk", "dv"), flat, strict=True)}


def capture(step):
    """Return (a CUDA graph of `step`, the tensors that it returned and each replay writes)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def captured(rank: int, world: int, backend: str) -> bool:
    """Return whether a CUDA graph of both passes gives, for new inputs, the bits of a call."""
    sizes = dict(size=64, longer=LONGER, dtype=torch.bfloat16)
    tensors, grad, offsets, _ = ring_cases.inputs("zigzag", "causal", world, **sizes)
    index, _ = cut_sequences(offsets, rank, world, zigzag=True)
    *leaves, grad = (x[index].cuda().unflatten(0, (len(offsets) - 1, -1)) for x in (*tensors, grad))
    function, _ = ring_cases.function_of("zigzag")
    return replays(lambda *leaves: function(*leaves, causal=True, backend=backend), leaves, grad)


def heads_captured(rank: int, world: int) -> bool:
    """Return the same of attention by heads, whose ranks hold different numbers of tokens."""
    tensors, offsets = heads_cases.inputs("bf16", longer=LONGER, size=64)
    tokens, offsets = heads_cases.tokens_of_ranks(len(tensors[0]), world), offsets.cuda()
    *leaves, grad = (x.split(tokens)[rank].cuda() for x in tensors)
    return replays(lambda *leaves: heads_cases.by_heads(*leaves, offsets, tokens), leaves, grad)


def replays(attend, leaves, grad) -> bool:
    """Return whether a CUDA graph of both passes gives, for new inputs, the bits of a call."""
    leaves = [x.requires_grad_() for x in leaves]

    def step():
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad)

    graph, replayed = capture(step)
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    graph.replay()
    return all(torch.equal(x, y) for x, y in zip(replayed, step(), strict=True))


def main(name: str, backend: str = "auto") -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    wrong = 0

    def compare(tensor, error, bound):
        nonlocal wrong
        wrong += not error <= bound
        print(
            f"rank {rank}: {name}, {tensor}: {error:.2e} of {bound:.2e}{'' if error <= bound else ' WRONG'}", flush=True
        )

    if name == "captured":
        compare("other bits", 1.0 - captured(rank, world, backend), 0.0)
        compare("other bits by heads", 1.0 - heads_captured(rank, world), 0.0)
    elif name == "heads":
        sizes = dict(device="cuda", longer=LONGER, size=64)
        actual, whole = heads_cases.rank_results(rank, world, "bf16", **sizes), heads_cases.expected("bf16", **sizes)
        tokens = heads_cases.tokens_of_ranks(len(whole[0]), world)
        for tensor, value, right in zip(("out", "dq", "dk", "dv"), actual, whole, strict=True):
            compare(tensor, relative(value, right.split(tokens)[rank].double()), BOUNDS[torch.bfloat16][tensor])
    elif name in HSTU_CASES:
        case = HSTU_CASES[name]
        actual = ring_cases.hstu_rank_results(rank, world, case, backend, "cuda")
        index, _ = cut_sequences(hstu_inputs(case)[2], rank, world, zigzag=case == "zigzag")
        for place, (value, right) in enumerate(zip(actual, hstu_expected(case), strict=True)):
            if place >= 4:
                dist.all_reduce(value)
            compare(place, relative(value.cpu(), (right[index] if place < 4 else right).double()), 1e-4)
    else:
        form, option, dtype = CASES[name]
        larger = dict(size=SMALLER.get(name, 128), longer=LONGER)
        if name == "heads in turn":
            softmax.TILES = 1
        actual = ring_cases.rank_results(rank, world, form, option, backend, "cuda", dtype=dtype, **larger)
        offsets = ring_cases.make_offsets(ring_cases.lengths_of(form, world, LONGER))
        index, _ = cut_sequences(offsets, rank, world, zigzag="zigzag" in form)
        exact = expected(form, option, world, dtype=dtype, exact="cuda", **larger)
        whole = dict(zip(("out", "lse", "dq", "dk", "dv"), exact))
        torch_errors = {} if "varlen" in form else sdpa_errors(form, option, world, dtype, whole, larger)
        for (tensor, right), value in zip(whole.items(), actual, strict=True):
            right = right[:, index] if tensor == "lse" else right[index]
            bound = min(BOUNDS[dtype][tensor], 2 * torch_errors.get(tensor, float("inf")))
            compare(tensor, relative(value, right), bound)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
