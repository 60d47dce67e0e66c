"""Hierarchical tree attention. Letters: T tokens, N max_seq_len, D query/key and V value head size, r compression_rate.

Rounding may decide between nodes of nearly equal importance. So outputs and gradients are compared with the reference
at the kernel's choice, and the choice is checked by the reference's importances.
"""

import torch

from hstu_sparse import htree_attention
from hstu_sparse.htree import reference
from hstu_sparse.htree.reference import (
    Tree,
    attend_queries,
    group_leaders,
    htree_attention_reference,
    queries_at_once,
)
from tests.random.cases import Launches
from tests.random.terms import sizes_under_softmax
from tests.support.budgets import assert_within_budget, gradients, make_jagged, make_offsets
from tests.support.htree_compare import chosen_nodes, misplaced


def make_inputs(lengths, heads, kv_heads, head_size, value_size, device="cpu", dtype=torch.float32, **options):
    shapes = {"q": (heads, head_size), "k": (kv_heads, head_size), "v": (kv_heads, value_size)}
    seed = options.pop("seed", 0)
    return {
        name: make_jagged(lengths, shape, seed=3 * seed + i, device=device, dtype=dtype, **options)
        for i, (name, shape) in enumerate(shapes.items())
    }


def kernel_choices(inputs, offsets, N, rate, top_k, scale, rope_base=10000.0, selection_group=1):
    """Return the kernel's choice at every token, after a check."""
    options = dict(
        compression_rate=rate, top_k=top_k, scale=scale, rope_base=rope_base, selection_group=selection_group
    )
    rows = torch.arange(inputs["q"].shape[0], device=offsets.device)
    if not len(rows):
        return []
    dtype = inputs["q"].dtype
    # The error of an importance: a sort key has bits for the candidate's position, and queries and keys are rounded.
    bound = 2.0 * 2.0 ** ((rate * top_k - 1).bit_length() - 23) + (64 if dtype == torch.float32 else 16) * torch.finfo(
        dtype
    ).eps * max(1.0, abs(scale) * inputs["q"].shape[2] ** 0.5)
    with torch.no_grad():
        choices = chosen_nodes(**inputs, seq_offsets=offsets, max_seq_len=N, **options)
        tree = Tree(inputs["k"].double(), inputs["v"].double(), offsets, N, rate, top_k)
        leaders = inputs["q"][group_leaders(tree.offsets, len(rows), selection_group)]
        for some in rows.split(queries_at_once(tree, inputs["q"].shape[1] // inputs["k"].shape[1])):
            chosen = [x[some] for x in choices]
            led = leaders[some].double() if selection_group > 1 else None
            _, walk = attend_queries(
                inputs["q"][some].double(), some, tree, scale, rope_base, leaders=led, choices=chosen
            )
            right_choice(chosen, walk, top_k, bound)
    return choices


def right_choice(choices, walk, top_k, bound):
    """Assert what must hold of the kernel's choice at some tokens; importances may be off by `bound`."""
    for layer in walk:
        if layer.number:
            chosen = choices[layer.number - 1]
            expected = (layer.nodes >= 0).sum(-1).clamp(max=top_k)
            assert torch.equal((chosen >= 0).sum(-1), expected), f"layer {layer.number}: wrong number of chosen nodes"
            is_chosen = layer.enters.logical_not() & (layer.nodes >= 0)
            assert torch.equal(is_chosen.sum(-1), expected), (
                f"layer {layer.number}: chosen nodes that are no candidates"
            )
            last = layer.nodes.amax(-1)
            last_is_chosen = ((chosen == last[..., None]) & (last >= 0)[..., None]).any(-1)
            assert torch.equal(last_is_chosen, last >= 0), f"layer {layer.number}: the last candidate is not chosen"
            wrong = misplaced(layer).max().item()
            assert wrong <= bound, f"layer {layer.number}: a node {wrong:.1e} more important than a chosen one is not"


def agree(inputs, offsets, N, rate, top_k, *, scale=None, factor=3.0, rope_base=10000.0, selection_group=1):
    width = inputs["q"].shape[2] ** -0.5 if scale is None else scale
    choices = kernel_choices(inputs, offsets, N, rate, top_k, width, rope_base, selection_group)

    def kernel(q, k, v):
        return htree_attention(
            q, k, v, offsets, N, compression_rate=rate, top_k=top_k, selection_group=selection_group, scale=scale,
            rope_base=rope_base, backend="triton",
        )  # fmt: skip

    def reference(q, k, v):
        # The choices are passed in, so no query chooses.
        options = dict(compression_rate=rate, top_k=top_k, scale=width, rope_base=rope_base)
        return htree_attention_reference(q, k, v, offsets, N, **options, choices=choices or None)

    # The gradient of a pooled node is a sum over queries in fp32, on a GPU in any order.
    floor = {f"grad of {name}": 1e-6 for name in "kv"} if inputs["q"].dtype == torch.float32 else None
    grad = torch.randn(*inputs["q"].shape[:2], inputs["v"].shape[2], generator=torch.Generator().manual_seed(1))
    grad = grad.to(inputs["q"])
    actual, lossy = gradients(kernel, inputs, grad), gradients(reference, inputs, grad)
    exact = gradients(reference, {name: x.double() for name, x in inputs.items()}, grad)
    terms = first_terms(**inputs, grad=grad, offsets=offsets, scale=width)
    terms |= sizes_under_softmax(**inputs, grad=grad, scale=width)
    for name in actual:
        assert_within_budget(
            name, actual[name], lossy[name], exact[name],
            factor=factor, floor=(floor or {}).get(name), terms=lambda name=name: terms.get(name),
        )  # fmt: skip


def first_terms(q, k, v, grad, offsets, scale):
    """Return the size of the terms that cancel at first tokens, which see only themselves.

    There p (do.v - do.o) is 0, with p = 1 and o = v.
    """
    group = q.shape[1] // k.shape[1]
    first = torch.zeros(q.shape[0], 1, 1, dtype=torch.float64, device=q.device)
    first[offsets[:-1][offsets.diff() > 0].long()] = abs(scale)
    keys, values = (x.double().abs().repeat_interleave(group, 1) for x in (k, v))
    slope = first * (grad.double().abs() * values).sum(-1, keepdim=True)
    key_terms = (slope * q.double().abs()).unflatten(1, (k.shape[1], group)).sum(2)
    return {"grad of q": slope * keys, "grad of k": key_terms}


def draw(random, small):
    rate = random.choice([2, 3, 4, 16] if small else [2, 3, 4, 7, 16, 16, 32, 64])
    top_k = random.choice([1, 2, 4] if small else [1, 2, 4, 8, 13, 64])
    kv_heads = random.choice([1, 1, 2])
    most = 24 if small else random.choice([300, 3000])
    powers = [rate**i + d for i in range(1, 8) for d in (-1, 0, 1) if rate**i + d <= most]
    lengths = [random.choice([0, 1, random.randint(2, most), *powers[-6:]]) for _ in range(random.choice([1, 1, 2]))]
    even = [16, 20, 32] if small else [2, 16, 24, 32, 50, 64, 96, 128, 200, 256]
    return dict(
        lengths=lengths,
        spare=random.choice([0, 0, 100]),
        group=random.choice([1, 2, 4] if small else [1, 2, 4, 5, 16, 16, 24, 64]),
        kv_heads=kv_heads,
        head_size=random.choice(even),
        value_size=random.choice([*even, 7]),
        rate=rate,
        top_k=top_k,
        selection_group=random.choice([1, *(size for size in range(2, rate + 1) if rate % size == 0)]),
        scale=random.choice([None, None, 0.5, -0.2]),
        dtype="float32" if small else random.choice(["float32", "float16", "bfloat16"]),
        offsets=random.choice(["int32", "int64"]),
        contiguous=random.random() < 0.7,
        deterministic=random.random() < 0.3,
        seed=random.randrange(2**20),
    )


def reference_bytes(*, lengths, group, kv_heads, head_size, value_size, **_):
    # Inputs, output, gradients and terms, in fp64 and others, and a chunk of what queries gather.
    heads = kv_heads * (group + 2)
    return sum(lengths) * heads * (head_size + value_size) * 8 * 5 + reference.CHUNK["cuda"] * 8


def check(
    device, *, lengths, spare, group, kv_heads, head_size, value_size, rate, top_k, scale, dtype, offsets, contiguous,
    deterministic, seed, selection_group=1,
):  # fmt: skip
    inputs = make_inputs(
        lengths, group * kv_heads, kv_heads, head_size, value_size, device, getattr(torch, dtype),
        seed=seed, contiguous=contiguous,
    )  # fmt: skip
    places = make_offsets(lengths, device=device, dtype=getattr(torch, offsets))
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        N = max(1, *lengths) + spare
        agree(inputs, places, N, rate, top_k, scale=scale, factor=4.0, selection_group=selection_group)
    finally:
        torch.use_deterministic_algorithms(False)


def launches():
    from hstu_sparse.htree.launch import launch_backward, launch_forward

    def case(dtype, heads, kv_heads, D, V, rate, top_k, N, fixed=False, local_bytes=160, selection_group=1):
        def call():
            q, k, v = (torch.zeros(64, h, size, dtype=dtype) for h, size in ((heads, D), (kv_heads, D), (kv_heads, V)))
            options = (q, k, v, torch.tensor([0, 64]), N, rate, top_k, selection_group, D**-0.5, 10000.0)
            saved = launch_forward(*options)
            torch.use_deterministic_algorithms(fixed)
            launch_backward(saved[0], *options, *saved)
            torch.use_deterministic_algorithms(False)

        label = f"{dtype} heads={heads}/{kv_heads} D={D} V={V} r={rate} top_k={top_k} fixed={fixed} R={selection_group}"
        return Launches(label, call, local_bytes)

    return [
        case(torch.bfloat16, 64, 4, 32, 32, 16, 64, 65536),
        case(torch.float16, 4, 1, 128, 100, 16, 512, 65536, fixed=True),
        case(torch.float32, 2, 2, 50, 50, 4, 8, 200),
        case(torch.float16, 5, 1, 24, 16, 7, 1, 200),
        # Tiles of 64 rows, which take wgmma, where ptxas has left registers unset.
        case(torch.float16, 64, 1, 50, 256, 16, 8, 256, local_bytes=320),
        case(torch.bfloat16, 4, 1, 64, 64, 16, 32, 8192, selection_group=16),
        case(torch.bfloat16, 4, 1, 64, 64, 16, 32, 8192, fixed=True, selection_group=16, local_bytes=224),
        case(torch.bfloat16, 4, 1, 64, 64, 8, 16, 200, selection_group=8),
        case(torch.float16, 4, 1, 64, 64, 4, 16, 200, fixed=True, selection_group=4),
        case(torch.float32, 4, 2, 50, 50, 4, 8, 200, selection_group=4),
        case(torch.bfloat16, 8, 1, 128, 100, 16, 16, 4096, selection_group=16),
        case(torch.float16, 2, 1, 256, 256, 16, 16, 4096, selection_group=16),
        case(torch.float32, 2, 1, 256, 256, 16, 16, 4096, selection_group=16, local_bytes=320),
    ]
