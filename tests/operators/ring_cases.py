"""Define cases of ring attention; compute them on ranks and in a single process.

Letters: B sequences, N tokens of each on a rank, T tokens, H heads of queries, Hkv of keys, D head size, W ranks.
"""

import torch

import hstu_sparse.ring.hstu as ring
from hstu_sparse import RelativeBias, compat, hstu_attention
from hstu_sparse.flash.api import flash_attention
from hstu_sparse.ring.plan import cut_sequences
from tests.support.budgets import make_jagged, make_offsets, make_timestamps

OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "scaled": dict(causal=True, softmax_scale=0.31),
    "window": dict(window_size=(9, 4)),
    "causal window": dict(causal=True, window_size=(7, -1)),
    "narrow window": dict(causal=True, window_size=(0, 0)),
    "right window": dict(window_size=(-1, 5)),
    "alibi": dict(causal=True, alibi_slopes="heads"),
    "alibi by sequence, full": dict(alibi_slopes="sequences"),
    "dropout": dict(causal=True, dropout_p=0.3),
    "shared keys": dict(causal=True, kv_heads=2),
    "all at once": dict(causal=True, window_size=(20, -1), alibi_slopes="sequences", dropout_p=0.2, kv_heads=1),
    "fp64": dict(causal=True, dtype="float64"),
    "bf16": dict(causal=True, dtype="bfloat16"),
}
FORMS = ["plain", "zigzag", "varlen", "zigzag varlen"]
PACKED = [f"{form} {packing}" for form in FORMS for packing in ("kvpacked", "qkvpacked")]

# form, option
CASES = [(form, option) for form in FORMS for option in OPTIONS] + [(form, "causal") for form in PACKED]


def lengths_of(form: str, world: int, longer: int = 1) -> list[int]:
    """Return the lengths of whole sequences: equal and divisible by `world`, or uneven, some less than `world`.

    A form that is also "few" has fewer of them, for the interpreter.
    """
    if "few" in form:
        return [26 * longer, 3, 0]
    return [37 * longer, 3, 0, 26 * longer, 1] if "varlen" in form else [8 * world * longer] * 2


def inputs(
    form: str,
    option: str,
    world: int,
    *,
    heads: int = 4,
    size: int = 16,
    longer: int = 1,
    dtype: torch.dtype | None = None,
):
    """Return whole q, k, v [T, heads, D], the output's gradient, offsets and keywords; dtype: replaces the option's."""
    keywords = {"kv_heads": heads, "dtype": "float32"} | OPTIONS[option]
    kv_heads, own_dtype = keywords.pop("kv_heads"), getattr(torch, keywords.pop("dtype"))
    lengths = lengths_of(form, world, longer)
    q, k, v, grad = (
        make_jagged(lengths, (count, size), dtype=dtype or own_dtype, seed=seed)
        for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
    )
    slopes = torch.rand(len(lengths), heads, generator=torch.Generator().manual_seed(5))
    match keywords.get("alibi_slopes"):
        case "heads":
            keywords["alibi_slopes"] = slopes[0].contiguous()
        case "sequences":
            keywords["alibi_slopes"] = slopes
    if "dropout_p" in keywords:
        keywords["seed"] = torch.tensor([77])
    return [q, k, v], grad, make_offsets(lengths), keywords


def function_of(form: str):
    name = "triton_ring_flash_attn_"
    name = "zigzag_" + name if "zigzag" in form else name
    name += "varlen_" if "varlen" in form else ""
    for packing in ("qkvpacked", "kvpacked"):
        if packing in form:
            return getattr(compat, f"{name}{packing}_func"), packing
    return getattr(compat, f"{name}func"), None


def expected(form: str, option: str, world: int, *, exact: str = "", **sizes) -> list[torch.Tensor]:
    """Compute out, lse [H, T], dq, dk, dv of all tokens in one process; exact: in fp64, on this device."""
    leaves, grad, offsets, keywords = inputs(form, option, world, **sizes)
    if exact:
        *leaves, grad = (x.to(exact, torch.float64) for x in (*leaves, grad))
        offsets = offsets.to(exact)
        keywords = {name: x.to(exact) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    leaves = [x.requires_grad_() for x in leaves]
    keywords = {{"dropout_p": "dropout", "softmax_scale": "scale"}.get(name, name): x for name, x in keywords.items()}
    out, lse = flash_attention(*leaves, offsets, **keywords, return_lse=True, backend="reference")
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]


def rank_results(
    rank: int, world: int, form: str, option: str, backend: str, device="cpu", **sizes
) -> list[torch.Tensor]:
    """Return the output and gradients of this rank's tokens, computed by the ring."""
    tensors, grad, offsets, keywords = inputs(form, option, world, **sizes)
    *tensors, grad, offsets = (x.to(device) for x in (*tensors, grad, offsets))
    keywords = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    index, local = cut_sequences(offsets, rank, world, zigzag="zigzag" in form)
    *tensors, grad = (x[index] for x in (*tensors, grad))
    function, packing = function_of(form)
    varlen = "varlen" in form
    if not varlen:
        *tensors, grad = (x.unflatten(0, (len(offsets) - 1, -1)) for x in (*tensors, grad))
    if packing == "qkvpacked":
        leaves = [torch.stack(tensors, -3)]
    elif packing == "kvpacked":
        leaves = [tensors[0], torch.stack(tensors[1:], -3)]
    else:
        leaves = tensors
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    more = [local, int(local.diff().max())] if varlen else []
    out, lse, _ = function(*leaves, *more, **keywords, return_attn_probs=True, backend=backend)
    gradients = torch.autograd.grad(out, leaves, grad)
    assert all(x.dtype == leaves[0].dtype for x in (out, *gradients))
    if packing == "qkvpacked":
        gradients = gradients[0].unbind(-3)
    elif packing == "kvpacked":
        gradients = (gradients[0], *gradients[1].unbind(-3))
    if not varlen:
        out, *gradients = (x.flatten(0, 1) for x in (out, *gradients))
        lse = lse.transpose(0, 1).flatten(1)
    return [out.detach(), lse, *gradients]


def all_results(rank: int, world: int, cases, backend: str, heads: int = 4) -> dict:
    return {(form, option): rank_results(rank, world, form, option, backend, heads=heads) for form, option in cases}


HSTU_CASES = [
    "one sequence",
    "window",
    "position bias",
    "time bias",
    "both biases, several sequences",
    "zigzag",
    "fp64",
]


def hstu_inputs(case: str):
    """Whole q, k, v, tables, gradient, offsets, timestamps, window, dtype."""
    lengths = [37, 3, 0, 26, 1] if "several" in case or case == "zigzag" else [61]
    if "few" in case:
        lengths = [26, 3, 0]
    dtype = torch.float64 if case == "fp64" else torch.float32
    q, k, v, grad = (make_jagged(lengths, (2, size), dtype=dtype, seed=i) for i, size in enumerate((16, 16, 8, 8)))
    generator = torch.Generator().manual_seed(3)
    position = torch.randn(64, generator=generator, dtype=dtype) if case not in ("one sequence", "time bias") else None
    time = torch.randn(33, generator=generator, dtype=dtype) if "bias" in case and case[0] != "p" else None
    times = make_timestamps(lengths), make_timestamps(lengths) + 1000
    return [q, k, v, position, time], grad, make_offsets(lengths), times, 11 if case == "window" else 0


def hstu_expected(case: str) -> list:
    """Return out, dq, dk, dv and the tables' gradients."""
    leaves, grad, offsets, times, window = hstu_inputs(case)
    differentiable = [x.requires_grad_() for x in leaves if x is not None]
    bias = RelativeBias(*leaves[3:], *times)
    out = hstu_attention(*leaves[:3], offsets, 64, scale=0.3, window_size=window, bias=bias, backend="reference")
    return [out.detach(), *torch.autograd.grad(out, differentiable, grad)]


def hstu_rank_results(rank: int, world: int, case: str, backend: str, device="cpu") -> list:
    leaves, grad, offsets, times, window = hstu_inputs(case)
    leaves = [None if x is None else x.to(device) for x in leaves]
    grad, offsets, *times = (x.to(device) for x in (grad, offsets, *times))
    index, local = cut_sequences(offsets, rank, world, zigzag=case == "zigzag")
    positions = torch.cat([torch.arange(n) for n in offsets.diff().tolist()]).to(device)[index]
    leaves = [x[index] for x in leaves[:3]] + leaves[3:]
    differentiable = [x.requires_grad_() for x in leaves if x is not None]
    out = ring.ring_hstu_attention(
        *leaves[:3],
        positions,
        64,
        seq_offsets=local if len(offsets) > 2 else None,
        scale=0.3,
        window_size=window,
        bias=RelativeBias(*leaves[3:], *(x[index] for x in times)),
        backend=backend,
    )
    return [out.detach(), *torch.autograd.grad(out, differentiable, grad[index])]


def all_hstu_results(rank: int, world: int, cases, backend: str) -> dict:
    return {case: hstu_rank_results(rank, world, case, backend) for case in cases}
