"""Benchmark dense HSTU attention against softmax attention of the same shape: SDPA (FlashAttention, cuDNN),
flex_attention. On sm_90 without a bias, both of our backends, `triton` and `hopper`, too; `ours` is one of them, as
`auto` chooses.

The standard cases: 131,072 tokens in sequences of one length, 4 heads of 128, bf16, causal. Softmax attention
computes another function with the same matrix products, and is what a user would run instead.
"""

import functools

import torch
from run import Case

from hstu_sparse import RelativeBias, attention_plan, hstu_attention
from hstu_sparse.dense.configs import HOPPER_SIZES
from tests.support.budgets import assert_within_budget, gradients, make_offsets, make_timestamps

LENGTHS = [1024, 4096, 16384, 65536]


def add_arguments(parser):
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--planned", action="store_true", help="make the plan once, as the layers of a model do")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])


def flops(tokens, length, heads, size):
    """Return the operations of two products forward and five backward (seven with a separate dq kernel), over the
    causal half of all pairs.
    """
    product = 2 * tokens * (length / 2) * heads * size
    return {"fwd": 2 * product, "bwd": 5 * product}


def inputs(tokens, length, heads, size, dtype, *, biased):
    lengths = [length] * (tokens // length)
    generator = torch.Generator("cuda").manual_seed(0)
    x = {name: torch.randn(tokens, heads, size, device="cuda", generator=generator).to(dtype) for name in "qkv"}
    x.update(seq_offsets=make_offsets(lengths, device="cuda"), max_seq_len=length)
    if biased:
        generator = torch.Generator().manual_seed(9)
        x["position_bias"] = torch.randn(length, generator=generator).cuda()
        x["time_bias"] = torch.randn(129, generator=generator).cuda()
        x["timestamps"] = make_timestamps(lengths, device="cuda")
    return x


def attention(position_bias=None, time_bias=None, timestamps=None, **arguments):
    """Call hstu_attention with the parts of the bias separate, as `inputs` returns them."""
    return hstu_attention(**arguments, bias=RelativeBias(position_bias, time_bias, timestamps))


def check(heads, size, dtype, biased, backend="auto"):
    """Compare output and gradients with the reference, on a batch that fits into its memory."""
    x = inputs(2048, 1024, heads, size, dtype, biased=biased)
    grad = torch.randn(x["v"].shape, device="cuda")
    reference = functools.partial(attention, backend="reference")
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}
    actual, lossy, exact = (
        gradients(functools.partial(attention, backend=backend), x, grad),
        gradients(reference, x, grad),
        gradients(reference, wide, grad),
    )
    for name in actual:
        assert_within_budget(name, actual[name], lossy[name], exact[name])


def differentiable(x):
    return {n: t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in x.items()}


def parts(function, leaves):
    """Return forward alone, and backward alone on a retained graph."""
    out = function()
    grad = torch.randn_like(out)
    return {
        "fwd": lambda: function(),
        "bwd": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }


def ours(shape, biased, backend="auto", planned=False):
    x = differentiable(inputs(*shape, biased=biased))
    leaves = [t for t in x.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if planned:
        bias = RelativeBias(*(x.get(name) for name in ("position_bias", "time_bias", "timestamps")))
        x["plan"] = attention_plan(x["q"], x["v"], x["seq_offsets"], shape[1], bias=bias, backend=backend)
    return parts(lambda: attention(**x, backend=backend), leaves)


def padded(tokens, length, heads, size, dtype):
    shape = (tokens // length, heads, length, size)
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


def sdpa(shape, backend):
    from torch.nn.attention import sdpa_kernel

    q, k, v = padded(*shape)

    def call():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return parts(call, [q, k, v])


def flex(shape):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = padded(*shape)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return parts(lambda: compiled(q, k, v, block_mask=mask), [q, k, v])


def cases(arguments):
    from torch.nn.attention import SDPBackend

    dtype = getattr(torch, arguments.dtype)
    heads, size = arguments.heads, arguments.head_size
    for length in arguments.lengths or LENGTHS:
        shape = (arguments.tokens, length, heads, size, dtype)
        described = dict(tokens=arguments.tokens, length=length, heads=heads, head_size=size, dtype=arguments.dtype)
        make = functools.partial(Case, shape=described, flops=flops(arguments.tokens, length, heads, size))
        backends = [("ours", False, "auto"), ("ours both biases", True, "auto")]
        if torch.cuda.get_device_capability() == (9, 0) and size in HOPPER_SIZES and dtype != torch.float32:
            backends += [("triton", False, "triton"), ("hopper", False, "hopper")]
        for name, biased, backend in backends:
            yield make(
                name + " planned" * arguments.planned,
                setup=functools.partial(ours, shape, biased, backend, arguments.planned),
                check=functools.partial(check, heads, size, dtype, biased, backend),
            )
        yield make("sdpa-flash", setup=lambda s=shape: sdpa(s, SDPBackend.FLASH_ATTENTION))
        yield make("sdpa-cudnn", setup=lambda s=shape: sdpa(s, SDPBackend.CUDNN_ATTENTION))
        yield make("flex", setup=lambda s=shape: flex(s))
