"""Benchmark block-sparse HSTU attention against the project's dense kernel and SDPA's cuDNN backend (dense softmax).

    python benchmarks/run.py --op bsa     the standard cases
    python benchmarks/bsa.py benchmarks/results/bsa.jsonl     from which length each group size beats the dense kernel

The standard cases: 131,072 tokens in sequences of one length, 4 heads of 128, bf16, blocks of 64, 16 of them chosen, no
window; query groups of 1, 2, 16 and 64 tokens, without and with both biases; groups of 2 and 64 also deterministic.
"""

import functools
import json
import math
import pathlib

import torch
from run import Case, parts

from cli.command import Parser, run_main

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
GROUPS = [1, 2, 16, 64]
MODES = {"plain": "", "biased": ", both biases", "deterministic": ", deterministic"}
DENSE, DENSE_BIASED = "dense", "dense, both biases"


def add_arguments(parser):
    parser.add_argument("--groups", type=lambda x: [int(n) for n in x.split(",")], default=GROUPS)
    parser.add_argument("--modes", type=lambda x: x.split(","), default=list(MODES), help=" ".join(MODES))
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--block-counts", type=int, default=16)
    parser.add_argument("--window-size", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="do not time the dense kernels")
    parser.add_argument(
        "--planned", action="store_true", help="make the plan of biases once, as the layers of a model do"
    )


def inputs(tokens, length, heads, size, dtype, window):
    from tests.support.budgets import make_offsets

    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, device="cuda", dtype=dtype, generator=generator)
    q, k, v = (draw(tokens, heads, size).requires_grad_() for _ in range(3))
    gates = [draw(tokens, heads).sigmoid().requires_grad_() for _ in range(3 if window else 2)]
    return q, k, v, gates, make_offsets([length] * (tokens // length), device="cuda")


def make_bias(tokens, length):
    """Return both tables, with 128 time buckets, and timestamps with gaps of a second to half a day."""
    from hstu_sparse.bias.relative import RelativeBias
    from tests.support.budgets import make_timestamps

    generator = torch.Generator("cuda").manual_seed(1)
    tables = (torch.randn(n, device="cuda", generator=generator).requires_grad_() for n in (length, 129))
    return RelativeBias(*tables, make_timestamps([length] * (tokens // length), device="cuda"))


def run_bsa(shape, options, deterministic, biased, planned=False):
    from hstu_sparse import bsa_attention, bsa_plan

    q, k, v, gates, offsets = inputs(*shape, options["window_size"])
    three = (*gates, None)[:3]
    bias, plan = make_bias(*shape[:2]) if biased else None, None
    if biased and planned:
        plan = bsa_plan(q, offsets, shape[1], block_size=options["block_size"], bias=bias)

    def call():
        torch.use_deterministic_algorithms(deterministic)
        # PyTorch would fill each new buffer with NaN to find reads of unwritten memory: a check, not part of the mode.
        torch.utils.deterministic.fill_uninitialized_memory = False
        return bsa_attention(q, k, v, offsets, shape[1], three, **options, bias=bias, plan=plan)

    return parts(call, [q, k, v, *gates, *(bias[:2] if biased else [])])


@functools.cache
def check(heads, size, dtype, biased, *items):
    """Compare output and gradients with the reference, given the kernel's choice of blocks, at a length that fits."""
    from hstu_sparse import bsa_attention
    from hstu_sparse.bias.relative import RelativeBias
    from hstu_sparse.bsa import bsa_attention_reference
    from tests.support.budgets import assert_within_budget, gradients

    options = dict(items)
    torch.use_deterministic_algorithms(False)
    q, k, v, gates, offsets = inputs(4096, 2048, heads, size, dtype, options["window_size"])
    named = dict(q=q, k=k, v=v, **dict(zip(("g_cmp", "g_slc", "g_swa"), gates)))
    bias = make_bias(4096, 2048) if biased else RelativeBias()
    named |= {n: x for n, x in zip(("position", "time"), bias) if x is not None}
    times = bias.timestamps

    def kernel(q, k, v, g_cmp, g_slc, g_swa=None, position=None, time=None, **more):
        gates, bias = (g_cmp, g_slc, g_swa), RelativeBias(position, time, times)
        return bsa_attention(q, k, v, offsets, 2048, gates, **options, bias=bias, **more)

    with torch.no_grad():
        _, chosen = kernel(**named, return_block_indices=True)

    def reference(q, k, v, g_cmp, g_slc, g_swa=None, position=None, time=None):
        bias = RelativeBias(position, time, times, times)
        fixed = dict(**options, scale=size**-0.5, block_indices=chosen, bias=bias)
        return bsa_attention_reference(q, k, v, offsets, 2048, (g_cmp, g_slc, g_swa), **fixed)[0]

    grad = torch.randn(v.shape, device="cuda")
    actual, lossy = gradients(kernel, named, grad), gradients(reference, named, grad)
    exact = gradients(reference, {n: x.double() for n, x in named.items()}, grad)
    for name in actual:
        # A table's entry is a sum of millions of terms, added in fp32.
        floor = 64 * torch.finfo(torch.float32).eps if name in ("grad of position", "grad of time") else None
        assert_within_budget(name, actual[name], lossy[name], exact[name], factor=3, floor=floor)


def run_dense(shape, biased):
    from hstu_sparse import hstu_attention

    torch.use_deterministic_algorithms(False)
    q, k, v, _, offsets = inputs(*shape, 0)
    bias = make_bias(*shape[:2]) if biased else None
    leaves = [q, k, v, *(bias[:2] if biased else [])]
    return parts(lambda: hstu_attention(q, k, v, offsets, shape[1], bias=bias), leaves)


def run_cudnn(shape):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tokens, length, heads, size, dtype = shape
    torch.use_deterministic_algorithms(False)
    q, k, v = (
        torch.randn(tokens // length, heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return parts(call, [q, k, v])


def cases(arguments):
    dtype = getattr(torch, arguments.dtype)
    for length in arguments.lengths or LENGTHS:
        shape = (arguments.tokens, length, arguments.heads, arguments.head_size, dtype)
        described = dict(
            tokens=arguments.tokens, length=length, heads=arguments.heads, head_size=arguments.head_size,
            dtype=arguments.dtype, block_size=arguments.block_size, block_counts=arguments.block_counts,
            window_size=arguments.window_size,
        )  # fmt: skip
        for group in arguments.groups:
            options = dict(
                block_size=arguments.block_size, block_counts=arguments.block_counts,
                window_size=arguments.window_size, selection_group=group,
            )  # fmt: skip
            for mode in arguments.modes:
                if mode == "deterministic" and group not in (2, 64):
                    continue
                biased = mode == "biased"
                yield Case(
                    f"bsa, groups of {group}" + MODES[mode],
                    described | ({"planned": True} if biased and arguments.planned else {}),
                    functools.partial(run_bsa, shape, options, mode == "deterministic", biased, arguments.planned),
                    functools.partial(check, arguments.heads, arguments.head_size, dtype, biased, *options.items()),
                )
        if arguments.alone:
            continue
        yield Case(DENSE, described, functools.partial(run_dense, shape, False))
        yield Case(DENSE_BIASED, described, functools.partial(run_dense, shape, True))
        yield Case("sdpa-cudnn", described, functools.partial(run_cudnn, shape))


def crossovers(records, part="fwd+bwd") -> dict[str, float | None]:
    """Map each name to the length from which it is faster than the dense kernel with the same biases.

    Between measured lengths the ratio is interpolated on a logarithmic scale.
    """
    times = {}
    for record in records:
        if record.get("part") == part and "ms" in record:
            times.setdefault(record["name"], {})[record["length"]] = record["ms"]
    without, biased = times.pop(DENSE), times.pop(DENSE_BIASED, {})
    by_name = {}
    for name, measured in times.items():
        by_name[name] = None
        dense = biased if "both biases" in name else without
        lengths = sorted(set(measured) & set(dense))
        ratio = [math.log(measured[n] / dense[n]) for n in lengths]
        if ratio and ratio[0] <= 0:
            by_name[name] = lengths[0]
        for (short, above), (long, below) in zip(zip(lengths, ratio), zip(lengths[1:], ratio[1:])):
            if above > 0 >= below:
                by_name[name] = short * (long / short) ** (above / (above - below))
    return by_name


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("file", type=pathlib.Path, help="lines of benchmarks/run.py --op bsa")
    lines = parser.parse_args().file.read_text().splitlines()
    for case, crossing in crossovers([json.loads(line) for line in lines]).items():
        print(f"{case}: {'not within the measured lengths' if crossing is None else f'{crossing:,.0f} tokens'}")


if __name__ == "__main__":
    run_main(main)
