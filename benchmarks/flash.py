"""Benchmark flash attention over jagged sequences against SDPA (FlashAttention, cuDNN) and FlashAttention-4.

    python benchmarks/run.py --op flash                 131,072 tokens, 16 heads of 128, bf16, causal
    python benchmarks/run.py --op flash --only ours,cute,fa4,fa4-unordered
                                                        both backends, and FlashAttention-4 called directly: with a
                                                        deterministic backward pass, as in ours, and without
    python benchmarks/run.py --op flash --sweep         single kernels with several tile sizes, for flash/launch.py
    python benchmarks/run.py --op flash --sasrec        ml-1m-sasrec's batches in fp32, against padded batches

T tokens, H heads, D head size.
"""

import functools

import torch
from run import Case

from hstu_sparse import flash_attention
from hstu_sparse.core.jagged import jagged_to_padded, padded_to_jagged
from hstu_sparse.core.launch import LaunchConfig, override
from hstu_sparse.flash.cute import INSTALLED
from tests.support.budgets import assert_within_budget, gradients, make_jagged, make_offsets

LENGTHS = [4096, 16384]


def tiles(m: int, n: int, warps: int, stages: int, **more) -> LaunchConfig:
    return LaunchConfig(warps, stages, **{"BLOCK_M": m, "BLOCK_N": n, "TMA": True, **more})


SWEEP = {
    "fwd of bounded scores": [tiles(128, 32, 8, 3, maxnreg=128)],
    "fwd": [
        tiles(128, 32, 8, 3, maxnreg=128),
        tiles(64, 32, 4, 3, maxnreg=168),
        tiles(64, 64, 4, 2),
        tiles(128, 128, 8, 2),
        tiles(128, 128, 8, 2, TMA=False),
    ],
    "dq": [
        tiles(64, 64, 4, 3, WGMMA=True),
        tiles(64, 64, 4, 2, WGMMA=True),
        tiles(64, 32, 4, 3, WGMMA=True),
        tiles(64, 32, 4, 3, WGMMA=True, TMA=False),
        tiles(64, 64, 4, 2, WGMMA=False),
        tiles(128, 64, 8, 2, WGMMA=True),
    ],
    "dkv": [tiles(64, 64, 4, 2), tiles(64, 64, 4, 3), tiles(64, 128, 8, 2), tiles(32, 64, 4, 2), tiles(32, 64, 4, 3)],
}


def add_arguments(parser):
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, help="the number of key/value heads; by default that of query heads")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--sweep", action="store_true", help="time single kernels with several tile sizes")
    parser.add_argument("--sasrec", action="store_true", help="short sequences of many lengths, fp32")


def flops(tokens, length, heads, size):
    """Return the operations of two products forward and five backward (seven with a separate dq kernel), over the
    causal half of all pairs.
    """
    product = 2 * tokens * (length / 2) * heads * size
    return {"fwd": 2 * product, "bwd": 5 * product}


def inputs(lengths, heads, size, dtype, kv_heads=None):
    return [
        make_jagged(lengths, (n, size), dtype=dtype, device="cuda", seed=seed).requires_grad_()
        for seed, n in enumerate((heads, kv_heads or heads, kv_heads or heads))
    ]


def check(heads, size, dtype, kv_heads=None, backend="triton"):
    """Compare output and gradients with the reference, on a batch that fits into its memory."""
    lengths = [1024, 700, 1]
    x = dict(zip("qkv", (t.detach() for t in inputs(lengths, heads, size, dtype, kv_heads))))
    grad = torch.randn(x["q"].shape, device="cuda")
    attend, reference = (
        functools.partial(flash_attention, seq_offsets=make_offsets(lengths, device="cuda"), causal=True, backend=b)
        for b in (backend, "reference")
    )
    wide = {name: t.double() for name, t in x.items()}
    actual, lossy, exact = (
        gradients(attend, x, grad),
        gradients(reference, x, grad),
        gradients(reference, wide, grad),
    )
    for name in actual:
        assert_within_budget(name, actual[name], lossy[name], exact[name], factor=4.0)


def parts(function, leaves):
    """Return forward alone, and backward alone on a retained graph."""
    out = function()
    grad = torch.randn_like(out)
    return {"fwd": function, "bwd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)}


def ours(lengths, heads, size, dtype, kv_heads=None, backend="triton"):
    leaves, offsets = inputs(lengths, heads, size, dtype, kv_heads), make_offsets(lengths, device="cuda")
    return parts(lambda: flash_attention(*leaves, offsets, causal=True, backend=backend), leaves)


def fa4(lengths, heads, size, dtype, kv_heads, deterministic):
    """Call FlashAttention-4's public function."""
    from flash_attn.cute import flash_attn_varlen_func

    leaves = inputs(lengths, heads, size, dtype, kv_heads)
    offsets = make_offsets(lengths, device="cuda", dtype=torch.int32)
    options = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, deterministic=deterministic)

    def call():
        return flash_attn_varlen_func(*leaves, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths), **options)[0]

    return parts(call, leaves)


def sdpa(tokens, length, heads, size, dtype, backend):
    from torch.nn.attention import sdpa_kernel

    shape = (tokens // length, heads, length, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))

    def call():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return parts(call, [q, k, v])


def padded(lengths, longest, heads, size, dtype):
    """Pad, call SDPA and cut the padding off: softmax attention without kernels for jagged sequences."""
    leaves, offsets = inputs(lengths, heads, size, dtype), make_offsets(lengths, device="cuda")

    def call():
        q, k, v = (
            jagged_to_padded(x.flatten(1), offsets, longest).unflatten(-1, x.shape[1:]).transpose(1, 2) for x in leaves
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return padded_to_jagged(out.transpose(1, 2).flatten(2), offsets, sum(lengths)).unflatten(-1, (heads, size))

    return parts(call, leaves)


def kernel(part, config, tokens, length, heads, size, dtype):
    """Return {part: one kernel with these tile sizes}."""
    from hstu_sparse.flash.launch import Launch, bwd_dkv_config, bwd_dq_config, fwd_config, uses_score_bounds
    from hstu_sparse.flash.reference import Layout, Options

    q, k, v = (x.detach() for x in inputs([length] * (tokens // length), heads, size, dtype))
    offsets = make_offsets([length] * (tokens // length), device="cuda")
    launch = Launch(q, k, v, Layout(offsets, offsets), Options(size**-0.5, -1, 0))
    out, lse = torch.empty_like(q), torch.empty(heads, tokens, device="cuda")
    launch.forward(out, lse)
    grad, dq, dk, dv = torch.randn_like(q), torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    rows = launch.rows(out, grad, lse)
    configuration, call = {
        "fwd of bounded scores": (fwd_config, lambda: launch.forward(out, lse)),
        "fwd": (fwd_config, lambda: launch.forward(out, lse)),
        "dq": (bwd_dq_config, lambda: launch.dq(grad, rows, dq)),
        "dkv": (bwd_dkv_config, lambda: launch.dkv(grad, rows, dk, dv)),
    }[part]

    def run():
        bounded = part == "fwd of bounded scores"
        with override(configuration, lambda *_: config), override(uses_score_bounds, lambda *_: bounded):
            call()

    return {part: run}


def cases(arguments):
    from torch.nn.attention import SDPBackend

    dtype = getattr(torch, arguments.dtype)
    heads, size, tokens = arguments.heads, arguments.head_size, arguments.tokens
    shape = heads, size, dtype, arguments.kv_heads
    if arguments.sasrec:
        lengths = torch.randint(20, 201, (128,), generator=torch.Generator().manual_seed(1)).clamp(max=200).tolist()
        lengths = [200 if n > 150 else n for n in lengths]
        described = dict(tokens=sum(lengths), length=200, heads=1, head_size=50, dtype="float32")
        yield Case("ours", described, lambda: ours(lengths, 1, 50, torch.float32), lambda: check(1, 50, torch.float32))
        yield Case("padded sdpa", described, lambda: padded(lengths, 200, 1, 50, torch.float32))
        return
    for length in arguments.lengths or LENGTHS:
        described = dict(tokens=tokens, length=length, heads=heads, head_size=size, dtype=arguments.dtype)
        described |= {"kv_heads": arguments.kv_heads} if arguments.kv_heads else {}
        all_flops = flops(tokens, length, heads, size)
        if arguments.sweep:
            forward = dict.fromkeys(("fwd", "fwd of bounded scores"), all_flops["fwd"])
            flops_done = forward | {"dq": all_flops["fwd"] * 1.5, "dkv": all_flops["fwd"] * 2}
            for part, configs in SWEEP.items():
                for config in configs:
                    make = functools.partial(kernel, part, config, tokens, length, heads, size, dtype)
                    yield Case(f"{part} {config}", described, make, flops=flops_done)
            continue
        make = functools.partial(Case, shape=described, flops=all_flops)
        lengths = [length] * (tokens // length)
        for name, backend in (("ours", "triton"), ("cute", "cute")):
            if backend == "triton" or INSTALLED:
                yield make(
                    name,
                    setup=lambda n=lengths, b=backend: ours(n, *shape, b),
                    check=lambda b=backend: check(*shape, b),
                )
        for name, ordered in (("fa4", True), ("fa4-unordered", False)) if INSTALLED else ():
            yield make(name, setup=lambda n=lengths, o=ordered: fa4(n, *shape, o))
        if arguments.kv_heads:
            continue
        for name, backend in (("sdpa-flash", SDPBackend.FLASH_ATTENTION), ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION)):
            yield make(name, setup=lambda n=length, b=backend: sdpa(tokens, n, heads, size, dtype, b))
