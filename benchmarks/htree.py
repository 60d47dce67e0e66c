"""Benchmark hierarchical tree attention against SDPA's backends (dense causal softmax), one sequence.

    python benchmarks/run.py --op htree --repeats 5 --warmup 1 --sdpa-up-to 65536
    python benchmarks/run.py --op htree --lengths 262144 --repeats 1 --warmup 0 --only sdpa-cudnn
    python benchmarks/run.py --op htree --lengths 65536 --repeats 5 --sweep    other launch options

The standard cases: 64 query heads on 4 key/value heads, D = V = 32, bf16, compression_rate 16, top_k 64. SDPA gets keys
and values repeated for all heads, outside of the timing, or (gqa) repeats them itself. `beyond_mb` is the memory beyond
inputs and outputs. It should be below 2 kv_mb in forward and below half of kv_mb + 2 qo_mb in backward, with `kv_mb`
the size of k and v together and `qo_mb` that of q, which is also that of the output.
"""

import functools

import torch
from run import Case, parts

LENGTHS = [8192, 16384, 32768, 65536, 131072, 262144]
# Name -> SDPA's backend, and whether it repeats keys and values itself.
BACKENDS = {
    "sdpa-flash": ("FLASH_ATTENTION", False),
    "sdpa-flash gqa": ("FLASH_ATTENTION", True),
    "sdpa-cudnn": ("CUDNN_ATTENTION", False),
    "sdpa-cudnn gqa": ("CUDNN_ATTENTION", True),
    "sdpa-efficient": ("EFFICIENT_ATTENTION", False),
}
# A length with three layers for which the fp64 reference fits into memory.
CHECKED = 18000


def add_arguments(parser):
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--compression-rate", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument(
        "--sdpa-up-to", type=int, default=262144, help="the longest sequence that competitors are timed on"
    )
    parser.add_argument("--sweep", action="store_true", help="time our kernels alone, with other launch options")


def inputs(length, heads, kv_heads, size, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(length, h, size, device="cuda", dtype=dtype, generator=generator).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def run_ours(shape, options, deterministic=False, config=None):
    from hstu_sparse import htree_attention
    from hstu_sparse.core.launch import override
    from hstu_sparse.htree import launch
    from tests.support.budgets import make_offsets

    q, k, v = inputs(*shape)
    offsets = make_offsets([shape[0]], device="cuda")

    def call():
        torch.use_deterministic_algorithms(deterministic)
        # PyTorch would fill each new buffer with NaN to find reads of unwritten memory: a check, not part of the mode.
        torch.utils.deterministic.fill_uninitialized_memory = False
        return htree_attention(q, k, v, offsets, shape[0], **options)

    def within(function):
        def run():
            with override(launch.attend_config, lambda default, *_: default.replace(**config or {})):
                return function()

        return run

    return {name: within(function) for name, function in parts(within(call), [q, k, v]).items()}


@functools.cache
def check(sizes, *items):
    """Compare output and gradients with the reference, given the kernel's choice, at a length that fits into memory."""
    from hstu_sparse import htree_attention
    from hstu_sparse.htree.reference import htree_attention_reference
    from tests.support.budgets import assert_within_budget, gradients, make_offsets
    from tests.support.htree_compare import chosen_nodes

    options = dict(items)
    full = options | dict(scale=sizes[2] ** -0.5, rope_base=10000.0)
    torch.use_deterministic_algorithms(False)
    q, k, v = (x.detach() for x in inputs(CHECKED, *sizes))
    offsets = make_offsets([CHECKED], device="cuda")
    chosen = chosen_nodes(q, k, v, offsets, CHECKED, **full)
    named = dict(q=q, k=k, v=v)

    def kernel(q, k, v):
        return htree_attention(q, k, v, offsets, CHECKED, **options)

    def reference(q, k, v):
        return htree_attention_reference(q, k, v, offsets, CHECKED, **full, choices=chosen)

    grad = torch.randn(q.shape, device="cuda")
    actual, lossy = gradients(kernel, named, grad), gradients(reference, named, grad)
    exact = gradients(reference, {n: x.double() for n, x in named.items()}, grad)
    for name in actual:
        assert_within_budget(name, actual[name], lossy[name], exact[name], factor=4)


def run_sdpa(shape, backend, gqa):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.use_deterministic_algorithms(False)
    q, k, v = (x.detach() for x in inputs(*shape))
    if not gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v))

    def call():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

    return parts(call, [q, k, v])


def sweep():
    """Return promising launch options of the two kernels that attend."""
    for warps, stages, registers in [(1, 2, 128), (1, 3, 128), (1, 4, 128), (1, 3, 168), (1, 3, 96), (2, 3, 128)]:
        yield dict(num_warps=warps, num_stages=stages, maxnreg=registers)


def cases(arguments):
    dtype = getattr(torch, arguments.dtype)
    options = dict(compression_rate=arguments.compression_rate, top_k=arguments.top_k)
    for length in arguments.lengths or LENGTHS:
        shape = (length, arguments.heads, arguments.kv_heads, arguments.head_size, dtype)
        head_mb = length * arguments.head_size * dtype.itemsize / 2**20
        described = dict(
            length=length, heads=arguments.heads, kv_heads=arguments.kv_heads, head_size=arguments.head_size,
            dtype=arguments.dtype, **options, qo_mb=head_mb * arguments.heads, kv_mb=2 * head_mb * arguments.kv_heads,
        )  # fmt: skip
        kv, qo = described["kv_mb"], described["qo_mb"]
        sizes = {"fwd": qo, "bwd": qo + kv, "fwd+bwd": 2 * qo + kv}
        checked = functools.partial(check, shape[1:], *options.items())
        if arguments.sweep:
            for config in sweep():
                setup = functools.partial(run_ours, shape, options, config=config)
                yield Case(f"htree {config}", described, setup, checked)
            continue
        for deterministic in (False, True):
            yield Case(
                "htree" + " deterministic" * deterministic,
                described,
                functools.partial(run_ours, shape, options, deterministic),
                checked,
                outputs_mb=sizes,
            )
        for name, backend in BACKENDS.items() if length <= arguments.sdpa_up_to else ():
            yield Case(name, described, functools.partial(run_sdpa, shape, *backend))
