"""Ring attention against SDPA on one GPU and against a ring of SDPA calls: errors first, then times.

    torchrun --nproc-per-node 2 benchmarks/ring.py                       errors, then 16,384 and 131,072 tokens
    torchrun --nproc-per-node 2 benchmarks/ring.py --trace ring.json     and a trace of one step, with its overlap

One causal sequence, bf16. Errors at --check tokens against fp64; those of the ring may be at most BOUNDS, and twice
those of SDPA on one GPU, else the exit code is 1. Rank 0 prints a JSON line for each case; times are medians of whole
calls over which all ranks wait for each other. `efficiency` is the time of the same attention on one GPU over W times
that of the ring: of ours for ours, of SDPA for the ring of SDPA. Letters: N tokens, W ranks, H heads, D head size.
"""

import argparse
import functools
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from run import environment

from hstu_sparse import cut_sequences, flash_attention, zigzag_triton_ring_flash_attn_func
from hstu_sparse.ring.communication import Ring, backward_round

NAMES = ("out", "lse", "dq", "dk", "dv")
BOUNDS = {"out": 1e-2, "lse": 1e-2, "dq": 5e-2, "dk": 5e-2, "dv": 5e-2}


class SDPARing(torch.autograd.Function):
    """A ring of SDPA's FlashAttention, causal, plain placement; blocks' outputs in bf16 are merged in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out = lse = None
        ctx.kept = {}
        for source, (key, value) in ring.blocks([k, v], [k.shape[0]] * ring.world):
            if source > ring.rank:
                continue
            block, block_lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
                q, key, value, 0.0, source == ring.rank, False
            )
            ctx.kept[source] = rest[:6]
            if out is None:
                out, lse = block.float(), block_lse
                continue
            total = torch.logaddexp(lse, block_lse)
            out = out * (lse - total).exp()[..., None] + block * (block_lse - total).exp()[..., None]
            lse = total
        ctx.ring = ring
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        ring, dq = ctx.ring, torch.zeros_like(q, dtype=torch.float32)

        def find_dkv(source, block, sums):
            found = [torch.zeros_like(x, dtype=torch.float32) for x in block]
            if source <= ring.rank:
                *sizes, seed, offset = ctx.kept[source]
                more, *found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                    grad, q, *block, out, lse, *sizes, 0.0, source == ring.rank, seed, offset
                )
                dq.add_(more)
                found = [x.float() for x in found]
            return found if sums is None else [x.add_(y) for x, y in zip(found, sums, strict=True)]

        sizes = [k.shape[0]] * ring.world
        dk, dv = backward_round(ring, [k, v], sizes, lambda source, block: None, find_dkv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def whole(tokens, heads, size, dtype):
    """q, k, v and the output's gradient, [N, H, D], the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(tokens, heads, size, generator=generator, device="cuda").to(dtype) for _ in range(4)]


def sdpa(q, k, v):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def ours(q, k, v):
    offsets = torch.arange(2, device=q.device) * q.shape[0]
    return flash_attention(q, k, v, offsets, causal=True)


def our_ring(q, k, v):
    return zigzag_triton_ring_flash_attn_func(q[None], k[None], v[None], causal=True)[0]


def sdpa_ring(ring, q, k, v):
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    return SDPARing.apply(q, k, v, ring)[0].transpose(0, 1)


def with_gradients(attend, q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def gathered(part, index, shape):
    """The whole tensor of every rank's part [T, ...]."""
    found = torch.zeros(shape, dtype=torch.float64, device="cuda")
    found[index] = part.double()
    dist.all_reduce(found)
    return found


def errors(arguments, ring) -> list[dict]:
    """Largest error, RMSE and relative error of every tensor, against fp64."""
    tensors = whole(arguments.check, arguments.heads, arguments.size, torch.bfloat16)
    offsets = torch.arange(2, device="cuda") * arguments.check
    q, k, v, grad = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attention(*leaves, offsets, causal=True, return_lse=True, backend="reference")
    exact = dict(zip(NAMES, [out.detach(), lse.T, *torch.autograd.grad(out, leaves, grad)]))

    index, _ = cut_sequences(offsets, ring.rank, ring.world, zigzag=True)
    leaves = [x[index].requires_grad_() for x in tensors[:3]]
    out, lse, _ = zigzag_triton_ring_flash_attn_func(*(x[None] for x in leaves), causal=True, return_attn_probs=True)
    found = [out[0].detach(), lse[0].T, *torch.autograd.grad(out[0], leaves, tensors[3][index])]
    ring_found = {n: gathered(x, index, exact[n].shape) for n, x in zip(NAMES, found)}
    single = dict(zip(("out", "dq", "dk", "dv"), with_gradients(sdpa, *tensors)))
    records = []
    for name, found in (("ours", ring_found), ("sdpa, one GPU", single)):
        for tensor, x in found.items():
            error = x.double() - exact[tensor]
            records.append(
                dict(
                    name=name,
                    tensor=tensor,
                    tokens=arguments.check,
                    max_error=error.abs().max().item(),
                    rmse=error.square().mean().sqrt().item(),
                    relative=(error.norm() / exact[tensor].norm()).item(),
                )
            )
    own = {r["tensor"]: r["relative"] for r in records if r["name"] != "ours"}
    for record in records:
        if record["name"] == "ours":
            bound = min(BOUNDS[record["tensor"]], 2 * own.get(record["tensor"], float("inf")))
            record |= {"bound": bound, "within": record["relative"] <= bound}
    return records


def timed(step, repeats) -> dict:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        slowest = torch.tensor(start.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    low, middle, high = torch.tensor(times).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    peak = torch.cuda.max_memory_allocated() - before
    return dict(ms=middle, ms_p10=low, ms_p90=high, per_second=1e3 / middle, peak_mb=peak / 2**20)


def overlap(step, path) -> dict:
    """Milliseconds of communication in one step, and the part of them in which an attention kernel runs."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    spans: dict[bool, list] = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and ("nccl" in event.name or "flash" in event.name):
            spans["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    total = sum(end - begin for begin, end in spans[True])
    hidden = sum(max(0, min(end, e) - max(begin, b)) for begin, end in spans[True] for b, e in spans[False])
    return {"communication_ms": total / 1e3, "hidden": hidden / total if total else 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda x: [int(n) for n in x.split(",")], default=[16384, 131072])
    parser.add_argument("--check", type=int, default=4096, help="tokens at which errors are measured")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trace", type=pathlib.Path, help="write a trace of the longest case's step here")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ring = Ring()
    described = {"op": "ring", "ranks": ring.world, "heads": arguments.heads, "size": arguments.size, **environment()}

    def emit(record):
        if ring.rank == 0:
            print(json.dumps(described | record), flush=True)

    checked = errors(arguments, ring)
    for record in checked:
        emit(record)
    for tokens in arguments.tokens:
        tensors = whole(tokens, arguments.heads, arguments.size, torch.bfloat16)
        index, _ = cut_sequences(torch.tensor([0, tokens]), ring.rank, ring.world, zigzag=True)
        local = [x[index.cuda()].contiguous() for x in tensors]
        alone: dict[str, float] = {}
        for name, attend, given, baseline in (
            ("sdpa, one GPU", sdpa, tensors, None),
            ("ours, one GPU", ours, tensors, None),
            ("sdpa ring", functools.partial(sdpa_ring, ring), local, "sdpa, one GPU"),
            ("ours", our_ring, local, "ours, one GPU"),
        ):
            step = functools.partial(with_gradients, attend, *given)
            record = {"name": name, "tokens": tokens, "part": "fwd+bwd", **timed(step, arguments.repeats)}
            if baseline:
                record["efficiency"] = alone[baseline] / (ring.world * record["ms"])
            else:
                alone[name] = record["ms"]
            if name == "ours" and arguments.trace and tokens == max(arguments.tokens):
                record |= overlap(step, arguments.trace.with_stem(f"{arguments.trace.stem}-{ring.rank}"))
            emit(record)
    dist.destroy_process_group()
    return 0 if all(record.get("within", True) for record in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
