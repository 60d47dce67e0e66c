"""Benchmark the catalogue loss against a computation in chunks of rows, and against cut-cross-entropy's kernel.

    python benchmarks/run.py --op catalogue_loss --repeats 5 --warmup 2 [--cce FOLDER]
    python benchmarks/run.py --op catalogue_loss --tune --items 100000 --repeats 5 --warmup 2

Parts: `fwd`, and `step`, forward and backward together. TFLOP/s count one product forward and four backward (logits are
computed anew for each of the two gradients), against a bound of 790 in bf16 on an H200; gradient_mb is the part of
peak_mb that is the gradients themselves. --cce: a folder with the package cut_cross_entropy (pip install --no-deps
--target FOLDER cut-cross-entropy), where it is not installed. --tune measures other tile sizes, without a check.

Letters: T tokens, I items, E embedding size, K negatives.
"""

import functools
import sys

import torch
from run import Case
from torch.nn import functional as F

from hstu_sparse import catalogue_loss
from tests.support.budgets import compare_with_reference

TEMPERATURE = 0.05
ITEMS = [10_000, 100_000, 1_000_000]
# Tile sizes for --tune at E = 256: part of the step, then its options in the order of NAMES.
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "BLOCK_E", "REGISTERS", "programs")
TUNE = [
    ("fwd", 128, 128, 8, 2, 256, False, 1),
    ("fwd", 128, 64, 8, 3, 256, False, 1),
    ("fwd", 128, 64, 8, 3, 256, True, 1),
    ("fwd", 64, 64, 4, 2, 256, False, 2),
    ("fwd", 64, 128, 4, 2, 256, False, 1),
    ("fwd", 256, 64, 8, 2, 256, False, 1),
    ("fwd", 64, 64, 4, 3, 256, True, 2),
    ("dout", 64, 64, 4, 2, 128, False, 2),
    ("dout", 64, 64, 4, 2, 256, False, 2),
    ("dout", 128, 64, 8, 3, 256, False, 1),
    ("dout", 128, 64, 8, 2, 128, False, 1),
    ("dout", 64, 32, 4, 3, 256, False, 2),
    ("dout", 64, 128, 8, 2, 256, False, 1),
    ("ditems", 64, 64, 4, 2, 128, False, 2),
    ("ditems", 64, 64, 4, 2, 256, False, 2),
    ("ditems", 128, 64, 8, 3, 256, False, 1),
    ("ditems", 128, 64, 8, 2, 128, False, 1),
    ("ditems", 64, 32, 4, 3, 256, False, 2),
    ("ditems", 64, 128, 8, 2, 256, False, 1),
]


def add_arguments(parser):
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--items", type=lambda x: [int(n) for n in x.split(",")], default=ITEMS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--negatives", type=int, default=128, help="the number of negatives of sampled losses")
    parser.add_argument("--cce", help="the folder that holds the package cut_cross_entropy")
    parser.add_argument("--tune", action="store_true")


def inputs(tokens, items, size, dtype):
    """Return out [T, E], items [I, E], targets [T]."""
    generator = torch.Generator("cuda").manual_seed(0)
    out, table = (torch.randn(n, size, device="cuda", generator=generator).to(dtype) for n in (tokens, items))
    targets = torch.randint(items, (tokens,), device="cuda", generator=generator)
    return out.requires_grad_(), table.requires_grad_(), targets


def check(size, dtype, form):
    out, items, targets = inputs(2000, 5000, size, dtype)
    negatives = {"shared": (400,), "per token": (2000, 60)}.get(form)
    if negatives is not None:
        negatives = torch.randint(5000, negatives, device="cuda")
    run = functools.partial(catalogue_loss, targets=targets, temperature=TEMPERATURE, negatives=negatives)
    eps = max(1e-6, 2 * torch.finfo(dtype).eps)
    compare_with_reference(
        functools.partial(run, backend="triton"),
        functools.partial(run, backend="reference"),
        {"out": out, "items": items},
        factor=4.0,
        floor={"output": 4e-6, "grad of out": eps, "grad of items": eps},
    )


def parts(loss, leaves):
    def forward():
        with torch.no_grad():
            return loss()

    return {"fwd": forward, "step": lambda: torch.autograd.grad(loss(), leaves)}


def ours(shape, form, negatives, **options):
    out, items, targets = inputs(*shape)
    drawn = {"shared": (negatives,), "per token": (len(out), negatives)}.get(form)
    if drawn is not None:
        drawn = torch.randint(len(items), drawn, device="cuda")
    loss = lambda: catalogue_loss(out, items, targets, temperature=TEMPERATURE, negatives=drawn, **options)
    return parts(loss, (out, items))


class _Chunked(torch.autograd.Function):
    """Cross-entropy in chunks of rows, with fp32 gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx, out, items, targets):
        total, out_grad = out.new_zeros(()), torch.empty_like(out)
        rows = max(1, 2**26 // len(items))
        with torch.enable_grad():
            items = items.detach().requires_grad_()
            for begin in range(0, len(out), rows):
                part = slice(begin, begin + rows)
                leaf = out[part].detach().requires_grad_()
                logits = leaf @ items.T / TEMPERATURE
                loss = F.cross_entropy(logits, targets[part], reduction="sum")
                loss.backward()
                out_grad[part] = leaf.grad
                total += loss.detach()
        ctx.save_for_backward(out_grad, items.grad)
        return total / len(out)

    @staticmethod
    def backward(ctx, grad):
        out_grad, items_grad = ctx.saved_tensors
        return out_grad * grad, items_grad * grad, None


def chunked(shape):
    out, items, targets = (x.detach() for x in inputs(*shape))
    out, items = F.normalize(out.float(), dim=1).requires_grad_(), items.float().requires_grad_()
    step = lambda: torch.autograd.grad(_Chunked.apply(out, F.normalize(items, dim=1), targets), (out, items))
    return {"step": step}


def cut_cross_entropy(shape, folder, **options):
    if folder:
        sys.path.insert(0, folder)
    from cut_cross_entropy import linear_cross_entropy

    out, items, targets = (x.detach() for x in inputs(*shape))
    # cut_cross_entropy supports neither norms nor temperature: its inputs are scaled outside of the timing.
    out = (F.normalize(out.float(), dim=1) / TEMPERATURE).to(out.dtype).requires_grad_()
    items = F.normalize(items.float(), dim=1).to(items.dtype).requires_grad_()
    return parts(lambda: linear_cross_entropy(out, items, targets, **options), (out, items))


def tuned(shape, part, config):
    from hstu_sparse.catalogue.launches import product_config
    from hstu_sparse.core.launch import override

    def change(default, product, *_):
        return default.replace(**dict(zip(NAMES, config))) if product == part else default

    def changed(function):
        with override(product_config, change):
            return function()

    out, items, targets = inputs(*shape)
    loss = lambda: catalogue_loss(out, items, targets, temperature=TEMPERATURE)
    if part == "fwd":
        forward = parts(loss, (out, items))["fwd"]
        return {"fwd": lambda: changed(forward)}
    retained_loss = changed(loss)
    return {"bwd": lambda: changed(lambda: torch.autograd.grad(retained_loss, (out, items), retain_graph=True))}


def cases(arguments):
    dtype, T, E = getattr(torch, arguments.dtype), arguments.tokens, arguments.size
    for items in arguments.items:
        shape = (T, items, E, dtype)
        described = dict(tokens=T, items=items, size=E, dtype=arguments.dtype)
        product_flops = 2 * T * items * E
        flops = {"fwd": product_flops, "step": 5 * product_flops, "bwd": 4 * product_flops}
        if arguments.tune:
            for part, *config in TUNE:
                name = f"{part} " + " ".join(f"{n}={x}" for n, x in zip(NAMES, config))
                yield Case(name, described, functools.partial(tuned, shape, part, config), flops=flops)
            continue
        described["gradient_mb"] = round((T + items) * E * dtype.itemsize / 2**20, 1)
        part, K = functools.partial, arguments.negatives
        make = part(Case, shape=described, flops=flops)
        sampled = part(Case, shape=described)
        yield make("ours", setup=part(ours, shape, None, K), check=part(check, E, dtype, None))
        for form in ("shared", "per token"):
            setup = part(ours, shape, form, K)
            yield sampled(f"ours {K} negatives {form}", setup=setup, check=part(check, E, dtype, form))
        yield make("chunked fp32", setup=part(chunked, shape))
        for name, eps in (("exact", None), ("default", "high")):
            setup = part(cut_cross_entropy, shape, arguments.cce, filter_eps=eps)
            yield make(f"cut-cross-entropy {name}", setup=setup)
