"""The lightning indexer, sparse attention and the index loss.

Letters: T tokens, H heads, Hkv key heads, D query/key and V value head size, J index heads, E index head size, K chosen
tokens, R tokens that share a choice (group), G rows of a choice; C queries and S keys of a padded chunk.
"""

import contextlib
import functools
from unittest import mock

import torch

from hstu_sparse import (
    RelativeBias,
    index_scores,
    indexer_loss,
    lightning_indexer,
    sparse_attention,
)
from hstu_sparse.compat import compute_index_loss_sparse
from hstu_sparse.core.launch import next_power_of_2
from hstu_sparse.indexer import reference as indexer_reference
from hstu_sparse.indexer.reference import index_divergence
from tests.random.cases import Launches
from tests.random.terms import FEW_TOKENS, sizes_under_softmax
from tests.support.budgets import compare_with_reference, gradients, make_offsets, make_timestamps

# An entry of a table's gradient sums thousands of fp32 terms of either sign; the reference adds them in fp64.
TABLE_FLOORS = {"grad of position": 1e-5, "grad of time": 1e-5}
# In fp32, where there may be a single pair, on which the reference's error may be small by chance.
SINGLE_FLOORS = {f"grad of {name}": 2e-6 for name in ("iq", "ik", "w")}
OPERATORS = ("lightning_indexer", "index_scores", "sparse_attention", "indexer_loss", "compute_index_loss_sparse")


def draw(random, small):
    most = 24 if small else random.choice([40, 300, 1200])
    heads = random.choice([1, 3, 4] if small else [1, 2, 4, 5, 16, 20, 33])
    size = random.choice([5, 16] if small else [5, 16, 40, 64, 100, 128, 256])
    value_size = random.choice([8, 20] if small else [8, 32, 50, 128, 200])
    divisors = [
        n for n in range(1, heads + 1) if heads % n == 0 and n * next_power_of_2(max(size, value_size, 16)) <= 512
    ]
    return dict(
        operator=random.choice(OPERATORS),
        lengths=[random.choice([0, 1, random.randint(2, most)]) for _ in range(random.randint(0, 3))],
        heads=heads,
        key_heads=random.choice([1, random.choice(divisors)]),
        size=size,
        value_size=value_size,
        top_k=random.choice([1, 3, 9] if small else [1, 7, 64, 100, 300]),
        group=random.choice([1, 1, 2, 3, 8] if small else [1, 1, 2, 3, 4, 8, 16, 50]),
        dtype=random.choice(["float32"] if small else ["float32", "float16", "bfloat16"]),
        position=random.random() < 0.4,
        time=random.random() < 0.4,
        exact=random.random() < 0.5,
        strided=random.random() < 0.3,
        wide_indices=random.random() < 0.3,
        deterministic=random.random() < 0.3,
        seed=random.randrange(2**31),
    )


def reference_bytes(*, operator, lengths, heads, size, value_size, top_k, **_):
    longest = max([1, *lengths])
    if operator == "compute_index_loss_sparse":
        return 96 * len(lengths) * longest * top_k * (heads + size)
    return 96 * (heads * len(lengths) * longest**2 + sum(lengths) * (heads * size + value_size))


@contextlib.contextmanager
def deterministic_algorithms(on: bool):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def any_indices(lengths, top_k, generator):
    """Return [T, K] int64: some repeated, some negative, some after the query."""
    parts = [torch.zeros(0, top_k, dtype=torch.int64)]
    for length in lengths:
        limit = torch.arange(length)[:, None] + 4
        parts.append((torch.rand(length, top_k, generator=generator) * limit).long() - 2)
    return torch.cat(parts)


def group_rows(lengths, group):
    """Map each row of a choice to (first token of the sequence, first position of the group, tokens of the group)."""
    rows, begin = {}, 0
    for b, length in enumerate(lengths):
        for t in range(0, length, group):
            row = begin + t if group == 1 else begin // group + b + t // group
            rows[row] = begin, t, min(group, length - t)
        begin += length
    return rows


def group_indices(lengths, top_k, group, generator):
    """Return `any_indices` of a choice that `group` tokens share; rows without a group have indices too."""
    tokens = any_indices(lengths, top_k, generator)
    if group == 1:
        return tokens
    indices = torch.zeros(sum(lengths) // group + len(lengths), top_k, dtype=torch.int64)
    for row, (begin, t, _) in group_rows(lengths, group).items():
        indices[row] = tokens[begin + t]
    return indices


def biased(function, device, lengths, **options):
    """Wrap `function` so that tables are keywords, and get gradients."""
    times = make_timestamps(lengths, device=device)

    def call(backend, *, position=None, time=None, **tensors):
        bias = None
        if position is not None or time is not None:
            bias = RelativeBias(position, time, times, times + 30)
        return function(**tensors, **options, bias=bias, backend=backend)

    return call


def check(
    device, *, operator, lengths, heads, size, value_size, top_k, dtype, position, time, exact, strided, wide_indices,
    deterministic, seed, group=1, key_heads=1,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    dtype, tokens = getattr(torch, dtype), sum(lengths)

    def normal(*shape, dtype=dtype):
        values = torch.randn(*shape[:-1], shape[-1] * (2 if strided else 1), generator=generator)
        return values.to(device, dtype)[..., : shape[-1]]

    def whole(*shape):  # numbers whose sums of products are exact
        return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)

    tables = {"position": normal(max([*lengths, 1]) + 3, dtype=torch.float32)} if position else {}
    tables |= {"time": normal(30, dtype=torch.float32)} if time else {}
    offsets = make_offsets(lengths, device=device)
    indices = group_indices(lengths, top_k, group, generator)
    indices = indices.to(device, torch.int64 if wide_indices else torch.int32)
    visible = visible_slots(indices, lengths, group)
    shared = dict(seq_offsets=offsets, selection_group=group)
    make = whole if exact else normal
    indexer = {"iq": make(tokens, heads, size), "ik": make(tokens, size), "w": make(tokens, heads)}
    if not exact and operator in ("lightning_indexer", "index_scores"):
        indexer["w"] = indexer["w"].masked_fill(near_kink(indexer["iq"], indexer["ik"], lengths), 0)
    key_shape = (tokens,) if key_heads == 1 else (tokens, key_heads)
    attention = {"q": normal(tokens, heads, size), "k": normal(*key_shape, size)}
    with deterministic_algorithms(deterministic):
        if operator == "lightning_indexer":
            tables = {name: x.round() if exact else x for name, x in tables.items()}
            check_choice(device, indexer, tables, lengths, top_k, group, exact)
        elif operator == "index_scores":
            function = biased(index_scores, device, lengths, indices=indices, **shared)
            compare(lambda **inputs: function(**inputs).masked_fill(~visible, 0), indexer | tables, repeated=True)
        elif operator == "sparse_attention":
            function = biased(sparse_attention, device, lengths, indices=indices, **shared)
            # If no query sees two tokens, only v has a gradient; the others are zero up to rounding.
            first, last = indices.masked_fill(~visible, 2**30).amin(1), indices.masked_fill(~visible, -1).amax(1)
            several = (first < last).any()
            if group > 1:
                several = visible.any() or any(size > 1 for _, _, size in group_rows(lengths, group).values())
            inputs = {"v": normal(*key_shape, value_size)} | attention | tables
            if several:
                compare(function, inputs)
            else:
                fixed = {name: inputs.pop(name) for name in (*attention, *tables)}
                compare(
                    lambda v, backend: function(backend, v=v, **{name: x.to(v.dtype) for name, x in fixed.items()}),
                    inputs,
                )
        elif operator == "indexer_loss":
            valid = (torch.rand(tokens, generator=generator) < 0.7).to(device) if exact else None
            function = biased(indexer_loss, device, lengths, indices=indices, valid=valid, **shared)
            compare(function, attention | {"scores": normal(len(indices), top_k, dtype=torch.float32)} | tables)
        else:
            batch, rows, keys = len(lengths), max([*lengths, 1]), max([*lengths, 1]) + 5
            chunk = {"query": normal(batch, heads, rows, size), "key": normal(batch, keys, size)}
            chunk |= {"index_score": normal(batch, rows, top_k, dtype=torch.float32)}
            chosen = torch.randint(-1, keys, (batch, rows, top_k), generator=generator).to(indices)
            function = functools.partial(
                compute_index_loss_sparse, indices=chosen, scaling=size**-0.5, chunk_offset=seed % 6
            )
            compare(function, chunk)


def near_kink(iq, ik, lengths):
    """Return the mask [T, H] of queries whose product with some key may round to either side of 0, ReLU's kink."""
    near = []
    for q, k in zip(iq.double().split(lengths), ik.double().split(lengths)):
        product, size = (torch.einsum("the,se->ths", a, b) for a, b in ((q, k), (q.abs(), k.abs())))
        near.append((product.abs() < 2**-17 * size).any(-1))
    return torch.cat(near) if near else torch.zeros(iq.shape[:2], dtype=torch.bool, device=iq.device)


def scores_terms(reference, inputs, grad):
    """Return the size of the terms that cancel: in scores the index heads; with few tokens also all products."""
    if grad.shape[0] <= FEW_TOKENS:  # scores are fp32 whatever the inputs are
        return gradients(reference, {name: x.abs() for name, x in inputs.items()}, grad.abs())
    with torch.no_grad():
        return {"output": reference(**(inputs | {"w": inputs["w"].abs()}))}


def divergence_terms(reference, inputs, grad):
    """Return the size of the terms that cancel: logarithms of about 1 in the loss, pi and p in scores' gradients."""

    def divergence_of_sum(scores, p, *rest):  # its gradient is pi + p
        return index_divergence(scores, -p, *rest)

    with mock.patch.object(indexer_reference, "index_divergence", divergence_of_sum):
        return gradients(reference, inputs, grad) | {"output": torch.tensor(0.02)}


def compare(function, inputs, repeated=False):
    """Compare with the reference. repeated: slots of a token have rounded gradients, whose sum may cancel."""
    # Kernels save a log-sum-exp, whose rounding changes all weights of a query; the tables' gradients sum these
    # changes. They also sum the error of do . out, which is subtracted for each pair: two roundings of the inputs'
    # dtype, since the output is rounded.
    floors = dict(TABLE_FLOORS)
    q = inputs.get("q")
    if q is not None:
        floors |= {f"grad of {name}": 2e-6 for name in "qkv"} if q.dtype == torch.float32 else {}
        floors |= {name: max(floor, 2 * torch.finfo(q.dtype).eps) for name, floor in TABLE_FLOORS.items()}
    if "iq" in inputs and inputs["iq"].dtype == torch.float32:
        floors |= SINGLE_FLOORS
    divergence = "scores" in inputs or "index_score" in inputs
    if divergence:
        floors["output"] = 2e-6
    reference = functools.partial(function, backend="reference")

    def terms(grad):
        if divergence:
            return divergence_terms(reference, inputs, grad)
        if repeated:
            return gradients(reference, inputs, grad.abs()) | scores_terms(reference, inputs, grad)
        if "q" not in inputs:
            return {}
        q, k, v = (x[:, None] if x.dim() == 2 else x for x in (inputs[name] for name in "qkv"))
        sizes = sizes_under_softmax(q, k, v, grad, q.shape[2] ** -0.5)
        if not ("position" in inputs or "time" in inputs):
            return sizes
        # Under softmax, the gradients of a query's pairs sum to 0, and so does a table's entry if they share a bucket.
        # Their size is the root of the sum of their squares, about that of q's gradient if keys are normal numbers.
        size = (sizes or gradients(reference, inputs, grad))["grad of q"].double().norm()
        return sizes | {"grad of position": size, "grad of time": size}

    compare_with_reference(
        functools.partial(function, backend="triton"), reference, inputs, factor=4.0, floor=floors, terms=terms
    )


def visible_slots(indices, lengths, group=1):
    """Return [G, K]: which slots of a choice hold a token that the row's query may choose."""
    last = torch.full(indices.shape[:1], -1)
    for row, (_, t, _) in group_rows(lengths, group).items():
        last[row] = t if group == 1 else t - 1
    return (indices >= 0) & (indices <= last.to(indices.device)[:, None])


def check_choice(device, inputs, tables, lengths, top_k, group, exact):
    """Check the choice by its definition, and scores and gradients by the reference at the kernels' choice."""
    shared = dict(seq_offsets=make_offsets(lengths, device=device), selection_group=group)
    function, choices = biased(lightning_indexer, device, lengths, top_k=top_k, **shared), []

    def kernel(**arguments):
        choices.append(function("triton", **arguments))
        scores, indices = choices[0]
        return scores.masked_fill(indices < 0, 0)

    def given_choice(**arguments):
        _, indices = choices[0]
        at = biased(index_scores, device, lengths, indices=indices, **shared)
        return at("reference", **arguments).masked_fill(indices < 0, 0)

    compare_with_reference(
        kernel,
        given_choice,
        inputs | tables,
        factor=4.0,
        floor=TABLE_FLOORS | (SINGLE_FLOORS if inputs["iq"].dtype == torch.float32 else {}),
        terms=functools.partial(scores_terms, given_choice, inputs | tables),
    )
    scores, indices = choices[0]
    with torch.no_grad():
        wide = {name: x.double() for name, x in (inputs | tables).items()}
        if exact:
            expected = function("reference", **wide)
            assert torch.equal(indices, expected[1]), "indices differ"
            assert torch.equal(scores.double(), expected[0]), "scores differ"
        longest = max([*lengths, 1])
        every = torch.arange(longest, device=device).expand(len(indices), longest)
        # [G, n], fp64, -inf after the query
        known = biased(index_scores, device, lengths, indices=every, **shared)("reference", **wide)
    chosen = indices >= 0
    seen = visible_slots(every, lengths, group)
    assert torch.equal(chosen.sum(1), seen.sum(1).clamp(max=top_k)), "a wrong number of tokens"
    assert not (chosen[:, 1:] & ~chosen[:, :-1]).any(), "-1 before the end"
    assert ((indices[:, 1:] > indices[:, :-1]) | ~chosen[:, 1:]).all(), "not ascending, or twice the same"
    assert (scores == -torch.inf)[~chosen].all()
    if sum(lengths) and not exact:
        places = torch.where(chosen, indices.long(), longest)
        chosen_mask = torch.zeros_like(seen[:, :1]).repeat(1, longest + 1).scatter(1, places, True)[:, :longest]
        least = known.masked_fill(~chosen_mask, torch.inf).amin(1)
        missed = known.masked_fill(chosen_mask | ~seen, -torch.inf).amax(1)
        slack = 1e-4 * known.masked_fill(~seen, 0).abs().amax(1)
        assert (missed <= least + slack).all(), "a token was missed"


def launches():
    from hstu_sparse.indexer import attention as attending
    from hstu_sparse.indexer import launch_indexer
    from hstu_sparse.indexer import loss as losses
    from hstu_sparse.indexer.choices import choice_rows

    def case(label, dtype, heads, size, index_heads, top_k, *, bias, deterministic, group=1, key_heads=1):
        def call():
            tokens = max(3 * top_k + 600, 1100)  # more than a query has room for, so that every kernel is launched
            x = torch.zeros(tokens, heads, size, dtype=dtype)
            iq, ik = torch.zeros(tokens, index_heads, 64, dtype=dtype), torch.zeros(tokens, 64, dtype=dtype)
            fp32 = functools.partial(torch.zeros, dtype=torch.float32)
            offsets = make_offsets((tokens - 24, 24))
            rows = choice_rows(offsets, tokens, group)
            G = rows.shape[-1]
            indices = torch.zeros(G, top_k, dtype=torch.int32)
            times = torch.zeros(tokens, dtype=torch.int64)
            tables = (fp32(tokens), fp32(129), times, times) if bias else (None,) * 4
            k, grad = x[:, 0] if key_heads == 1 else x[:, :key_heads], fp32(G, top_k)
            indexer = (iq, ik, iq[:, :, 0], offsets, rows, *tables, top_k, group)
            attention = (x, k, k, indices, rows, *tables, size**-0.5, group)
            valid = torch.ones(tokens, dtype=torch.bool) if bias else None
            loss = (grad, x, k, indices, rows, *tables, valid, size**-0.5, 1e-10, group, True)
            lse = fp32(tokens, heads)
            with deterministic_algorithms(deterministic):
                launch_indexer.lightning_indexer_jagged.forward(*indexer)
                launch_indexer.index_scores_jagged.forward(*indexer[:3], indices, *indexer[4:-2], group)
                launch_indexer.lightning_indexer_jagged.backward(grad, *indexer, indices)
                attending.sparse_attention_jagged.forward(*attention)
                attending.sparse_attention_jagged.backward(x, *attention, x, lse)
                losses.indexer_loss_jagged.forward(*loss)

        return Launches(label, call, spills)

    # Bytes of a thread's registers that ptxas keeps in local memory.
    spills = {
        "lightning_indexer_sample_kernel": 32,
        "lightning_indexer_collect_kernel": 64,  # on sm_100 with groups, half of it elsewhere
        "lightning_indexer_refill_kernel": 32,
        "sparse_attention_bwd_kernel": 96,
        "sparse_attention_fwd_kernel": 32,
    }

    def loss_with_saved_scores():
        """Draw a case of the index loss in which one program fills a multiprocessor."""
        x, tables = torch.zeros(4000, 16, 128, dtype=torch.bfloat16), (torch.zeros(4000), torch.zeros(129))
        times, valid = torch.zeros(4000, dtype=torch.int64), torch.ones(4000, dtype=torch.bool)
        scores, indices = torch.zeros(4000, 2048), torch.zeros(4000, 2048, dtype=torch.int32)
        arguments = (
            scores,
            x,
            x[:, 0],
            indices,
            choice_rows(make_offsets((3976, 24)), 4000, 1),
            *tables,
            times,
            times,
            valid,
            0.1,
            1e-10,
            1,
            True,
        )
        losses.indexer_loss_jagged.forward(*arguments)
        losses.chosen_attention(*arguments[:-1])

    return [
        Launches("loss, 2,048 kept", loss_with_saved_scores, architectures=(80, 90, 100)),
        case("bf16 groups bias", torch.bfloat16, 4, 64, 4, 128, bias=True, deterministic=False, group=16),
        case("bf16 key heads", torch.bfloat16, 4, 64, 4, 32, bias=True, deterministic=False, group=4, key_heads=4),
        case(
            "bf16 three key heads", torch.bfloat16, 6, 64, 4, 32, bias=False, deterministic=False, group=8, key_heads=3
        ),
        case("fp32 key heads", torch.float32, 8, 16, 4, 32, bias=True, deterministic=True, group=8, key_heads=8),
        case(
            "fp16 wide key heads", torch.float16, 4, 256, 4, 64, bias=False, deterministic=False, group=8, key_heads=2
        ),
        case("bf16", torch.bfloat16, 16, 128, 4, 1024, bias=False, deterministic=False),
        case("fp32 bias integers", torch.float32, 4, 64, 2, 64, bias=True, deterministic=True),
        case("fp16 wide", torch.float16, 20, 256, 9, 2048, bias=False, deterministic=False),
        case("fp32 groups integers", torch.float32, 2, 64, 4, 32, bias=True, deterministic=True, group=3),
        case("fp16 wide groups", torch.float16, 20, 256, 4, 512, bias=False, deterministic=False, group=50),
    ]
