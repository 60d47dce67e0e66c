"""Benchmark index loss, sparse attention and lightning indexer against torch.compile of the reference and dense SDPA.

    python benchmarks/run.py --op indexer      the standard cases
    python benchmarks/run.py --op indexer --only "gather"          the rate of gathering rows alone, a bound
    python benchmarks/run.py --op indexer --tune                   other tile sizes and options of the kernels

Standard cases, bf16. Loss: B = 1, H = 16, C = 4,096, S = 8,192, D = 128, K = 512 and 2,048, chunk_offset 4,096, indices
uniform over what is visible; B sequences, H heads, C queries and S keys of a chunk, K chosen tokens, D and V head
sizes. Attention and indexer: 131,072 tokens in sequences of 65,536, H = 16, D = V = 128,
K = 1,024, indices uniform; J = 4 index heads of 64.

In the records of `gather` and of the loss, `tflops` is TB/s of gathered rows; the loss gathers its keys once, in
forward. The loss takes about 0.1 ms on the GPU, as long as the call on the host. It is therefore also timed as a
replayed CUDA graph, as training runs it, and so is the compiled reference.
"""

import functools

import torch
import triton
import triton.language as tl
from run import Case, replayed

from hstu_sparse.core.launch import LaunchConfig, override

ROWS, KEYS, OFFSET, HEADS, SIZE = 4096, 8192, 4096, 16, 128
TOKENS, LENGTH, TOP_K, INDEX_HEADS, INDEX_SIZE = 131072, 65536, 1024, 4, 64


def add_arguments(parser):
    parser.add_argument("--tune", action="store_true", help="time other launch options instead")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--length", type=int, default=LENGTH)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)


# The loss.


def loss_inputs(top_k):
    generator = torch.Generator("cuda").manual_seed(1)
    limit = torch.arange(OFFSET + 1, OFFSET + ROWS + 1, device="cuda")[:, None]
    indices = (torch.rand(1, ROWS, top_k, device="cuda", generator=generator) * limit).int()
    return dict(
        query=normal(1, HEADS, ROWS, SIZE),
        key=normal(1, KEYS, SIZE, seed=2),
        index_score=normal(1, ROWS, top_k, seed=3, dtype=torch.float32).requires_grad_(),
        indices=indices,
        scaling=SIZE**-0.5,
        chunk_offset=OFFSET,
    )


def run_loss(top_k, backend, compiled):
    from hstu_sparse.compat import compute_index_loss_sparse

    arguments = loss_inputs(top_k)

    def call():
        return compute_index_loss_sparse(**arguments, backend=backend)

    if compiled:
        call = torch.compile(call)

    def forward():
        with torch.no_grad():
            return call()

    def forward_backward():
        return torch.autograd.grad(call(), arguments["index_score"])

    return {
        "fwd": forward,
        "fwd+bwd": forward_backward,
        "fwd graph": replayed(forward),
        "fwd+bwd graph": replayed(forward_backward),
    }


def check_loss(top_k):
    from hstu_sparse.compat import compute_index_loss_sparse
    from tests.support.budgets import assert_within_budget, gradients

    arguments = loss_inputs(top_k)
    arguments = arguments | {
        n: arguments[n][:, :, :300] if n == "query" else arguments[n][:, :300]
        for n in ("query", "index_score", "indices")
    }
    fixed = {n: arguments.pop(n) for n in ("indices", "scaling", "chunk_offset")}
    upstream = torch.ones((), device="cuda")
    run = lambda backend, **inputs: gradients(
        functools.partial(compute_index_loss_sparse, **fixed, backend=backend), inputs, upstream
    )
    actual, lossy = run("triton", **arguments), run("reference", **arguments)
    exact = run("reference", **{n: x.double() for n, x in arguments.items()})
    for name in ("output", "grad of index_score"):
        assert_within_budget(name, actual[name], lossy[name], exact[name], factor=4.0, floor=2e-6)


# Gathering alone is a lower bound of the loss's and attention's time.


@triton.jit
def gather_kernel(rows, indices, out, K, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the K rows, of SIZE elements each, that `indices` names."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK, SIZE], tl.float32)
    for start in range(0, K, BLOCK):
        s = tl.load(indices + program * K + start + tl.arange(0, BLOCK)).to(tl.int64)
        total += tl.load(rows + s[:, None] * SIZE + tl.arange(0, SIZE)[None, :]).to(tl.float32)
    tl.store(out + program * SIZE + tl.arange(0, SIZE), tl.sum(total, 0))


def run_gather(keys, size, programs, top_k):
    rows, out = normal(keys, size), torch.empty(programs, size, device="cuda")
    indices = torch.randint(0, keys, (programs, top_k), device="cuda", dtype=torch.int32)

    def call():
        gather_kernel[(programs,)](rows, indices, out, top_k, SIZE=size, BLOCK=32, num_warps=4, num_stages=4)

    return {"gather": replayed(call)}


# Attention and indexer.


def uniform_indices(tokens, length):
    generator = torch.Generator("cuda").manual_seed(1)
    t = torch.arange(tokens, device="cuda")[:, None] % length
    indices = torch.empty(tokens, TOP_K, device="cuda", dtype=torch.int32)
    for begin in range(0, tokens, 16384):
        part = slice(begin, begin + 16384)
        drawn = torch.rand(len(t[part]), TOP_K, device="cuda", generator=generator) * (t[part] + 1)
        indices[part] = drawn.int().sort(1).values
    return indices


def sparse_inputs(tokens, length):
    from tests.support.budgets import make_offsets

    q = normal(tokens, HEADS, SIZE).requires_grad_()
    k, v = (normal(tokens, SIZE, seed=seed).requires_grad_() for seed in (2, 3))
    return q, k, v, uniform_indices(tokens, length), make_offsets([length] * (tokens // length), device="cuda")


def step_parts(call, leaves, determinism=False, backward=True):
    def forward():
        with torch.no_grad():
            return call()

    if not backward:
        return {"fwd": forward}
    grad = torch.randn_like(forward())
    return {"fwd": forward, "fwd+bwd": lambda: torch.autograd.grad(call(), leaves, grad)}


def run_sparse(tokens, length, deterministic=False, backward=True):
    from hstu_sparse import sparse_attention

    q, k, v, indices, offsets = sparse_inputs(tokens, length)
    parts = step_parts(lambda: sparse_attention(q, k, v, indices, offsets), [q, k, v], backward=backward)
    return {part: with_algorithms(deterministic, function) for part, function in parts.items()}


def with_algorithms(deterministic, function):
    def run():
        torch.use_deterministic_algorithms(deterministic)
        try:
            return function()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def check_sparse(tokens, length, deterministic):
    """Compare some tokens' output, and all gradients, with plain attention over their chosen keys."""
    from hstu_sparse import sparse_attention

    length = min(length, 8192)
    q, k, v, indices, offsets = sparse_inputs(2 * length, length)
    out = sparse_attention(q, k, v, indices, offsets)
    some = torch.arange(5, 2 * length, 97, device="cuda")
    places = (some // length * length)[:, None] + indices[some]
    keys, values = k.float()[places], v.float()[places]
    weights = (torch.einsum("thd,tkd->thk", q.float()[some], keys) * SIZE**-0.5).softmax(-1)
    expected = weights @ values
    assert (out[some] - expected).norm() < 5e-3 * expected.norm(), "sparse attention: wrong output"
    # Only those tokens' outputs get a gradient.
    grad = torch.zeros_like(out)
    grad[some] = torch.randn_like(grad[some])
    dq, dk, dv = with_algorithms(deterministic, lambda: torch.autograd.grad(out, (q, k, v), grad))()
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad[some].float())
    for name, a, b in zip("qkv", (dq, dk, dv), expected_grads):
        assert (a - b).float().norm() < 2e-2 * b.float().norm(), f"sparse attention: wrong gradient of {name}"


def run_sdpa(tokens, length, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (normal(tokens // length, HEADS, length, SIZE, seed=seed).requires_grad_() for seed in (1, 2, 3))

    def call():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return step_parts(call, [q, k, v])


def indexer_inputs(tokens, length):
    from tests.support.budgets import make_offsets

    shapes = (tokens, INDEX_HEADS, INDEX_SIZE), (tokens, INDEX_SIZE), (tokens, INDEX_HEADS)
    tensors = [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    return *tensors, make_offsets([length] * (tokens // length), device="cuda")


def run_indexer(tokens, length, backward=True):
    from hstu_sparse import lightning_indexer

    arguments = indexer_inputs(tokens, length)
    return step_parts(lambda: lightning_indexer(*arguments, TOP_K)[0], arguments[:3], backward=backward)


def check_indexer(tokens, length):
    """Compare some tokens' choice with all of their scores, in fp32."""
    from hstu_sparse import lightning_indexer

    iq, ik, w, offsets = (x.detach() for x in indexer_inputs(tokens, length))
    scores, indices = lightning_indexer(iq, ik, w, offsets, TOP_K)
    for token in range(tokens - 1, 0, -(tokens // 40)):
        begin = token // length * length
        all_scores = ((ik[begin : token + 1].float() @ iq[token].float().T).relu() * w[token].float()).sum(1)
        number = min(TOP_K, token + 1 - begin)
        best, chosen = all_scores.topk(number).values, indices[token, :number].long()
        assert (chosen.diff() > 0).all() and (indices[token, number:] == -1).all(), "not ascending"
        assert torch.allclose(all_scores[chosen].sort(descending=True).values, best, rtol=1e-4, atol=1e-4), (
            "a wrong choice"
        )
        assert torch.allclose(scores[token, :number], all_scores[chosen], rtol=1e-4, atol=1e-4), "wrong scores"


# Launch options for --tune; the constants in the launchers were chosen from them.


def tuned(configuration, change, setup):
    """Return a form of `setup` whose parts run with `change` applied to a launch configuration."""

    def run():
        with override(configuration, change):
            parts = setup()

        def within(function):
            with override(configuration, change):
                return function()

        return {part: functools.partial(within, function) for part, function in parts.items()}

    return run


def tuning(tokens, length):
    from hstu_sparse.indexer import attention, launch_indexer, loss

    for top_k, block, held_blocks, warps, stages in (
        (512, 128, 4, 4, 4), (512, 128, 4, 8, 4), (512, 64, 8, 4, 4), (512, 64, 8, 4, 5), (512, 64, 0, 4, 5),
        (2048, 256, 8, 8, 5), (2048, 256, 8, 8, 4), (2048, 256, 8, 16, 5), (2048, 128, 16, 8, 5), (2048, 64, 0, 4, 5),
        (2048, 128, 0, 4, 5),
    ):  # fmt: skip
        config = LaunchConfig(warps, stages, BLOCK=block, HELD=held_blocks)
        setup = functools.partial(run_loss, top_k, "triton", False)
        change = lambda *_, config=config: config
        yield Case(f"loss {config}", {"top_k": top_k}, tuned(loss.loss_config, change, setup))
    shape = dict(tokens=tokens, length=length)
    for block, warps, stages in ((64, 4, 3), (64, 4, 5), (64, 4, 7), (32, 4, 5), (32, 2, 5), (32, 4, 7), (128, 8, 5)):
        config = LaunchConfig(warps, stages, TOKENS=1, BLOCK=block, GROUP_BLOCK=16)
        setup = functools.partial(run_sparse, tokens, length, backward=False)
        change = lambda *_, config=config: config
        yield Case(f"attention fwd {config}", shape, tuned(attention.attention_config, change, setup))
    for block, warps, stages in ((64, 4, 2), (64, 4, 5), (64, 8, 5), (32, 4, 3), (32, 4, 5), (16, 4, 3)):
        config = LaunchConfig(warps, stages, TOKENS=1, BLOCK=block, GROUP_BLOCK=16)
        setup = functools.partial(run_sparse, tokens, length)
        change = lambda default, kernel, *_, config=config: config if kernel == "bwd" else default
        yield Case(f"attention bwd {config}", shape, tuned(attention.attention_config, change, setup))
    for capacity, sample, rows, block, warps, stages in (
        (3072, 4096, 64, 64, 4, 3), (3072, 2048, 64, 64, 4, 3), (4096, 2048, 64, 64, 4, 3), (3072, 4096, 64, 64, 4, 4),
        (3072, 4096, 64, 32, 4, 3), (3072, 4096, 128, 32, 8, 3),
    ):  # fmt: skip
        config = LaunchConfig(warps, stages, ROWS=rows, BLOCK=block, HEADS=INDEX_HEADS)
        setup = functools.partial(run_indexer, tokens, length, backward=False)
        change, sampled = lambda *_, config=config: config, lambda *_, sizes=(capacity, sample): sizes
        setup = tuned(launch_indexer.choice_config, change, setup)
        label = f"indexer {capacity} of {sample}, {config}"
        yield Case(label, shape, tuned(launch_indexer.sample_config, sampled, setup))


def cases(arguments):
    tokens, length = arguments.tokens, arguments.length
    if arguments.tune:
        yield from tuning(tokens, length)
        return
    for top_k in (512, 2048):
        shape = dict(
            rows=ROWS, keys=KEYS, heads=HEADS, head_size=SIZE, top_k=top_k, bound_mb=round(ROWS * top_k * 4 / 2**20, 1)
        )
        gathered = 2.0 * ROWS * top_k * SIZE
        yield Case(
            "loss",
            shape,
            functools.partial(run_loss, top_k, "triton", False),
            functools.partial(check_loss, top_k),
            {"fwd graph": gathered, "fwd+bwd graph": gathered},
        )
        yield Case("loss reference compiled", shape, functools.partial(run_loss, top_k, "reference", True))
        setup = functools.partial(run_gather, KEYS, SIZE, ROWS, top_k)
        yield Case("gather", shape, setup, None, {"gather": gathered})
    shape = dict(tokens=tokens, length=length, heads=HEADS, head_size=SIZE, top_k=TOP_K)
    gathered = 4.0 * tokens * TOP_K * SIZE
    setup = functools.partial(run_gather, length, 2 * SIZE, tokens, TOP_K)
    yield Case("gather", shape, setup, None, {"gather": gathered})
    for deterministic in (False, True):
        yield Case(
            "sparse attention" + (" deterministic" if deterministic else ""),
            shape,
            functools.partial(run_sparse, tokens, length, deterministic),
            functools.partial(check_sparse, tokens, length, deterministic),
        )
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        yield Case(f"sdpa {backend.lower()}", shape, functools.partial(run_sdpa, tokens, length, backend))
    shape = shape | dict(index_heads=INDEX_HEADS, index_size=INDEX_SIZE)
    yield Case(
        "indexer",
        shape,
        functools.partial(run_indexer, tokens, length),
        functools.partial(check_indexer, tokens, length),
        {"fwd": INDEX_HEADS * INDEX_SIZE * tokens * (length + 1.0)},
    )
