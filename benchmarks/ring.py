"""Benchmark attention over ranks, by a ring and by heads, against one GPU and against a ring of SDPA calls: errors
first, then times.

    torchrun --nproc-per-node 2 benchmarks/ring.py                   errors, then 16,384 and 131,072 tokens
    torchrun --nproc-per-node 2 benchmarks/ring.py --cases ours --trace traces
                                                                     without SDPA; and where the time of a step goes
    torchrun --nproc-per-node 2 benchmarks/ring.py --cases ours --backend cute
                                                                     by FlashAttention-4, against it on one GPU
    torchrun --nproc-per-node 2 benchmarks/ring.py --cases ours --graph
                                                                     replays of a CUDA graph
    torchrun --nproc-per-node 4 benchmarks/ring.py --cases ours --by ring,heads --ranks 2,4
                                                                     by both, over two and over four of the GPUs

One causal sequence, bf16. Errors are measured at --check tokens, against fp64; if one of ours is above its bound in
BOUNDS, or above twice that of SDPA on one GPU, the exit code is 1. Rank 0 prints a JSON line for each case; times are
medians over calls, from a barrier to the end of the slowest rank. `efficiency` is the time of the same attention on
one GPU divided by W times the time of the ring (our attention for ours, SDPA for the ring of SDPA). `extra_memory` is a
rank's peak memory, including inputs, divided by 1/W of the peak of one GPU with the whole sequence, minus 1
(without meaning with --graph, since a graph keeps its memory). Letters: N tokens, W ranks, H heads, D head size.
"""

import functools
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from run import covered, environment, replayed

from cli.command import Parser, run_main
from hstu_sparse import cut_sequences, flash_attention, heads_to_tokens, tokens_to_heads
from hstu_sparse.compat import zigzag_triton_ring_flash_attn_func
from hstu_sparse.ring.communication import Ring, ring_backward

SHOWN = 30  # kernels at each end of a timeline
LONG = 2_000  # milliseconds of a call that is timed twice only
NAMES = ("out", "dq", "dk", "dv")
BOUNDS = {"out": 1e-2, "dq": 5e-2, "dk": 5e-2, "dv": 5e-2}


class SDPARing(torch.autograd.Function):
    """Compute a ring of SDPA's FlashAttention, causal, plain placement; blocks' outputs in bf16 are merged in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, ring):
        out = lse = None
        ctx.saved_state = {}
        for source, (key, value) in ring.blocks([k, v], [k.shape[0]] * ring.world):
            if source > ring.rank:
                continue
            block, block_lse, *saved_state = torch.ops.aten._scaled_dot_product_flash_attention(
                q, key, value, 0.0, source == ring.rank, False
            )
            ctx.saved_state[source] = saved_state[:6]
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

        def compute_dkv(source, block, sums):
            gradients = [torch.zeros_like(x, dtype=torch.float32) for x in block]
            if source <= ring.rank:
                *sizes, seed, offset = ctx.saved_state[source]
                more, *gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                    grad, q, *block, out, lse, *sizes, 0.0, source == ring.rank, seed, offset
                )
                dq.add_(more)
                gradients = [x.float() for x in gradients]
            return gradients if sums is None else [x.add_(y) for x, y in zip(gradients, sums, strict=True)]

        sizes = [k.shape[0]] * ring.world
        dk, dv = ring_backward(ring, [k, v], sizes, lambda source, block: None, compute_dkv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def whole(tokens, heads, size, dtype):
    """Return q, k, v and the output's gradient, [N, H, D], the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(tokens, heads, size, generator=generator, device="cuda").to(dtype) for _ in range(4)]


def sdpa(q, k, v):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def ours(backend, q, k, v):
    offsets = torch.arange(2, device=q.device) * q.shape[0]
    return flash_attention(q, k, v, offsets, causal=True, backend=backend)


def our_ring(backend, ring, q, k, v):
    options = dict(causal=True, backend=backend, group=ring.group)
    return zigzag_triton_ring_flash_attn_func(q[None], k[None], v[None], **options).squeeze(0)


def by_heads(backend, ring, q, k, v):
    return heads_to_tokens(ours(backend, *tokens_to_heads(q, k, v, group=ring.group)), group=ring.group)


# How this project's attention is spread over ranks, and whether a rank holds two chunks of a sequence or one part.
WAYS = {"ring": (our_ring, True), "heads": (by_heads, False)}


def index_of(tokens, ring, zigzag):
    """Return which of N tokens a rank holds."""
    return cut_sequences(torch.tensor([0, tokens]), ring.rank, ring.world, zigzag=zigzag)[0].cuda()


def sdpa_ring(ring, q, k, v):
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    return SDPARing.apply(q, k, v, ring)[0].transpose(0, 1)


def with_gradients(attend, q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def gathered(part, index, shape, group):
    """Gather the whole tensor from every rank's part [T, ...]."""
    total = torch.zeros(shape, dtype=torch.float64, device="cuda")
    total[index] = part.double()
    dist.all_reduce(total, group=group)
    return total


def errors(arguments, ring) -> list[dict]:
    """Return largest error, RMSE and relative error of every tensor, against fp64."""
    tensors = whole(arguments.check, arguments.heads, arguments.size, torch.bfloat16)
    offsets = torch.arange(2, device="cuda") * arguments.check
    *leaves, grad = (x.double() for x in tensors)
    attend = functools.partial(flash_attention, seq_offsets=offsets, causal=True, backend="reference")
    exact = dict(zip(NAMES, with_gradients(attend, *leaves, grad)))
    results = {"sdpa, one GPU": dict(zip(NAMES, with_gradients(sdpa, *tensors)))}
    for way in arguments.by:
        spread, zigzag = WAYS[way]
        index = index_of(arguments.check, ring, zigzag)
        parts = with_gradients(functools.partial(spread, arguments.backend, ring), *(x[index] for x in tensors))
        results[way] = {n: gathered(x, index, exact[n].shape, ring.group) for n, x in zip(NAMES, parts)}
    records = []
    for name, values in results.items():
        for tensor, x in values.items():
            error = x.double() - exact[tensor]
            record = dict(
                name=name,
                tensor=tensor,
                tokens=arguments.check,
                max_error=error.abs().max().item(),
                rmse=error.square().mean().sqrt().item(),
                relative=(error.norm() / exact[tensor].norm()).item(),
            )
            if name in WAYS:
                bound = min(BOUNDS[tensor], 2 * records[NAMES.index(tensor)]["relative"])
                record |= {"bound": bound, "within": record["relative"] <= bound}
            records.append(record)
    return records


def timed(step, arguments, group=None) -> dict:
    torch.cuda.empty_cache()
    if arguments.graph:
        step = replayed(step)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    while len(times) < (2 if times and times[0] > LONG else arguments.repeats):
        dist.barrier(group)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        slowest = torch.tensor(start.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        times.append(slowest.item())
    low, middle, high = torch.tensor(times).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    peak = torch.cuda.max_memory_allocated() - before
    return dict(ms=middle, ms_p10=low, ms_p90=high, per_second=1e3 / middle, beyond_inputs_mb=peak / 2**20)


def traced(step, path, group) -> tuple[dict, list[str]]:
    """Trace two steps to `path`; return the division of the second one's time, and a line for each of its kernels.

    The parts, in milliseconds: communication (`hidden` is its share during which an attention kernel runs), attention
    kernels, other kernels, idle (no kernel runs), and host, the time until the last kernel is queued.
    """
    wait = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=wait) as profile:
        step()
        torch.cuda.synchronize()
        dist.barrier(group)
        step()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    queued = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]
    }
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels.sort(key=lambda e: e["ts"])
    barrier = max(i for i, e in enumerate(kernels) if "AllReduce" in e["name"])
    kernels = kernels[barrier + 1 :]
    begin = min(queued[e["args"]["correlation"]] for e in kernels)
    spans = {"communication": [], "attention": [], "other": []}
    lines = []
    for e in kernels:
        kind = "communication" if "nccl" in e["name"] else "attention" if "flash_" in e["name"] else "other"
        spans[kind].append((e["ts"], e["ts"] + e["dur"]))
        called = queued[e["args"]["correlation"]] - begin
        lines.append(
            f"{e['ts'] - begin:9.0f} +{e['dur']:7.0f} us, queued at {called:6.0f}, stream {e['args'].get('stream')}: "
            f"{e['name'][:60]}"
        )
    total = {kind: sum(end - start for start, end in intervals) for kind, intervals in spans.items()}
    hidden = sum(
        max(0, min(end, e) - max(start, s)) for start, end in spans["communication"] for s, e in spans["attention"]
    )
    together = [span for intervals in spans.values() for span in intervals]
    record = {f"{kind}_ms": us / 1e3 for kind, us in total.items()}
    record["hidden"] = hidden / total["communication"] if total["communication"] else 1.0
    record["idle_ms"] = (max(end for _, end in together) - begin - covered(together)) / 1e3
    record["host_ms"] = (max(queued[e["args"]["correlation"]] for e in kernels) - begin) / 1e3
    return record, lines


def print_all(ring, lines: list[str]) -> None:
    """Print every rank's lines, rank by rank, on rank 0; long ones without their middle."""
    if len(lines) > 2 * SHOWN:
        lines = [*lines[:SHOWN], f"... {len(lines) - 2 * SHOWN} more", *lines[-SHOWN:]]
    lines_by_rank = [None] * ring.world
    dist.all_gather_object(lines_by_rank, lines, ring.group)
    if ring.rank == 0:
        for rank, rank_lines in enumerate(lines_by_rank):
            print(f"rank {rank}:", *rank_lines, sep="\n  ", flush=True)


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=lambda x: [int(n) for n in x.split(",")], default=[16384, 131072])
    parser.add_argument(
        "--check", type=int, default=4096, help="the length at which errors are measured; 0: measure none"
    )
    parser.add_argument("--cases", choices=["all", "ours", "sdpa"], default="all")
    parser.add_argument("--backend", choices=["triton", "cute"], default="triton", help="the backend of our ring")
    parser.add_argument("--by", type=lambda x: x.split(","), default=["ring"], help="ring, heads, or both with a comma")
    parser.add_argument(
        "--ranks", type=lambda x: [int(n) for n in x.split(",")], help="the numbers of GPUs; all by default"
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--graph", action="store_true", help="time replays of a CUDA graph of both passes")
    parser.add_argument("--trace", type=pathlib.Path, help="trace a step of ours at each length into this folder")
    arguments = parser.parse_args()
    if unknown := set(arguments.by) - WAYS.keys():
        parser.error(f"--by {unknown.pop()}: expected ring or heads")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node NUMBER")
    if not torch.cuda.is_available():
        raise SystemExit("error: benchmarks need a CUDA GPU; there is none here")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    priority = functools.partial(dist.ProcessGroupNCCL.Options, is_high_priority_stream=True)
    dist.init_process_group("nccl", device_id=device, pg_options=priority())
    everyone = Ring()
    described = {"op": "ring", "heads": arguments.heads, "size": arguments.size, **environment()}
    described |= {"backend": arguments.backend, "graph": arguments.graph}

    def emit(record, ranks=1):
        if everyone.rank == 0:
            print(json.dumps(described | {"ranks": ranks} | record), flush=True)

    alone = {"ours": functools.partial(ours, arguments.backend), "sdpa": sdpa}
    cases = [case for case in alone if arguments.cases in ("all", case)]
    single = {}
    for case in cases:
        for tokens in arguments.tokens:
            tensors = whole(tokens, arguments.heads, arguments.size, torch.bfloat16)
            record = timed(functools.partial(with_gradients, alone[case], *tensors), arguments)
            record["inputs_mb"] = sum(x.nbytes for x in tensors) / 2**20
            single[case, tokens] = record
            emit({"name": f"{case}, one GPU", "tokens": tokens, "part": "fwd+bwd"} | record)
    within = True
    for count in arguments.ranks or [everyone.world]:
        group = dist.new_group(range(count), pg_options=priority())
        if everyone.rank < count:
            within &= spread_over(Ring(group), arguments, cases, single, emit)
        dist.barrier()
    dist.destroy_process_group()
    return 0 if within else 1


def spread_over(ring, arguments, cases, single, emit) -> bool:
    """Measure a group of ranks; return whether its errors are within their bounds. single: the records of one GPU."""
    checked = errors(arguments, ring) if arguments.check else []
    for record in checked:
        emit(record, ring.world)
    ways = {"sdpa": [("sdpa ring", sdpa_ring, True)]}
    ways["ours"] = [(way, functools.partial(WAYS[way][0], arguments.backend), WAYS[way][1]) for way in arguments.by]
    for case, tokens in ((case, tokens) for case in cases for tokens in arguments.tokens):
        for name, attend, zigzag in ways[case]:
            index = index_of(tokens, ring, zigzag)
            tensors = [x[index] for x in whole(tokens, arguments.heads, arguments.size, torch.bfloat16)]
            step = functools.partial(with_gradients, functools.partial(attend, ring), *tensors)
            record = {"name": name, "tokens": tokens, "part": "fwd+bwd", **timed(step, arguments, ring.group)}
            one = single[case, tokens]
            record["efficiency"] = one["ms"] / (ring.world * record["ms"])
            inputs = record["inputs_mb"] = one["inputs_mb"] / ring.world
            share = inputs + one["beyond_inputs_mb"] / ring.world
            record["extra_memory"] = (inputs + record["beyond_inputs_mb"]) / share - 1
            lines = []
            if case == "ours" and arguments.trace:
                arguments.trace.mkdir(parents=True, exist_ok=True)
                path = arguments.trace / f"{name}-{tokens}-{ring.world}-{ring.rank}.json"
                more, lines = traced(step, path, ring.group)
                record |= more
            emit(record, ring.world)
            if lines:
                print_all(ring, lines)
    return all(record.get("within", True) for record in checked)


if __name__ == "__main__":
    run_main(main)
