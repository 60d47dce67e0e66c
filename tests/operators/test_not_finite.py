"""Check what NaN and infinity in an input reach: no output before their token, and no result that looks sound.

Letters: T tokens, N max_seq_len, H heads, D query/key and V value head size.
"""

import functools

import pytest
import torch

import hstu_sparse as hs
from hstu_sparse.core import launch

NAN, INFINITY = float("nan"), float("inf")
OFFSETS, N = torch.tensor([0, 15, 15, 20]), 18
GATES = [torch.rand(20, 2, generator=torch.Generator().manual_seed(i)) for i in range(3)]
TARGETS = torch.tensor([1, 0, 3])
CHOSEN = torch.arange(15).sub(6).clamp(min=0).repeat(2)[:20, None] + torch.arange(8)  # later ones are masked
POSITIONS = torch.cat([torch.arange(15), torch.arange(5)])
TREE = {"compression_rate": 4, "top_k": 2}
BSA = {"block_size": 16, "block_counts": 2, "window_size": 3}
# (q [T, H, D], k [T, H, D], v [T, H, V]) -> [T, H, V].
CAUSAL = {
    "dense": lambda q, k, v, **o: hs.hstu_attention(q, k, v, OFFSETS, N, **o),
    "dense, candidates": lambda q, k, v, **o: hs.hstu_attention(q, k, v, OFFSETS, N, num_targets=TARGETS, **o),
    "dense, window": lambda q, k, v, **o: hs.hstu_attention(q, k, v, OFFSETS, N, window_size=5, **o),
    "bsa": lambda q, k, v, **o: hs.bsa_attention(q, k, v, OFFSETS, N, GATES, **(BSA | o)),
    "bsa, blocks of 4": lambda q, k, v, **o: hs.bsa_attention(q, k, v, OFFSETS, N, GATES, **BSA | {"block_size": 4}),
    "htree": lambda q, k, v, **o: hs.htree_attention(q, k, v, OFFSETS, N, **o, **TREE),
    "htree, groups": lambda q, k, v, **o: hs.htree_attention(q, k, v, OFFSETS, N, selection_group=4, **o, **TREE),
    "indexer": lambda q, k, v, **o: hs.sparse_attention(q, k[:, 0], v[:, 0], CHOSEN, OFFSETS, **o),
    "flash": lambda q, k, v, **o: hs.flash_attention(q, k, v, OFFSETS, causal=True, **o),
    "ring": lambda q, k, v, **o: hs.ring_hstu_attention(q, k, v, POSITIONS, N, seq_offsets=OFFSETS, **o),
}
# Kernels for which this holds, by input; the others multiply a tile of values by weights of 0.
KERNELS = [("dense", "k"), ("flash", "k"), ("ring", "k"), ("indexer", "k"), ("indexer", "v")]
CASES = [(kind, x, "reference", value) for kind in CAUSAL for x in "kv" for value in (NAN, INFINITY)]
CASES += [(*case, "triton", NAN) for case in KERNELS]
# The interpreter takes seconds for htree, which test_htree_triton.py checks on fewer tokens.
CASES += [pytest.param("htree", x, "triton", NAN, marks=pytest.mark.slow) for x in "kv"]
CASES += [pytest.param("htree, groups", "k", "triton", NAN, marks=pytest.mark.slow)]
interpreter = pytest.mark.skipif(not launch.INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")


def finite_inputs():
    numbers = torch.Generator().manual_seed(3)
    return {x: torch.randn(20, 2, 16, generator=numbers) for x in "qkv"}


@functools.cache
def finite_output(kind, backend):
    return CAUSAL[kind](**finite_inputs(), backend=backend)


@pytest.mark.parametrize(("kind", "name", "backend", "value"), CASES)
def test_not_finite_values_reach_no_earlier_output(kind, name, backend, value):
    """The output of token 10 is not finite; those of earlier tokens and of the other sequence do not change."""
    if backend == "triton" and not launch.INTERPRET:
        pytest.skip("kernels on a CPU need TRITON_INTERPRET=1")
    before, inputs = finite_output(kind, backend), finite_inputs()
    inputs[name][10] = value
    after = CAUSAL[kind](**inputs, backend=backend)
    assert not after[10].isfinite().all()
    rest = [t for t in range(20) if not 10 <= t < 15]
    assert torch.equal(after[rest], before[rest])


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("negatives", [None, torch.tensor([5, 1]), torch.tensor([[5, 1]] * 4)], ids=["all", "K", "TK"])
@pytest.mark.parametrize(("which", "row"), [("out", 0), ("items", 0), ("items", 5)])
def test_catalogue_loss_is_nan(which, row, negatives, backend):
    inputs = {"out": torch.randn(4, 16), "items": torch.randn(9, 16), "targets": torch.tensor([0, 8, -1, 3])}
    inputs[which][row] = NAN
    assert hs.catalogue_loss(**inputs, temperature=0.1, negatives=negatives, backend=backend).isnan()


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("name", ["q", "k", "scores"])
def test_indexer_loss_is_nan(name, backend):
    inputs = {"q": torch.randn(5, 2, 16), "k": torch.randn(5, 16), "scores": torch.randn(5, 2)}
    inputs[name][0] = NAN
    chosen = torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [2, 4]])
    assert hs.indexer_loss(**inputs, indices=chosen, seq_offsets=torch.tensor([0, 5]), backend=backend).isnan()


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreter)])
def test_cache_attention_is_nan(backend):
    k, v, offsets = torch.randn(5, 2, 16), torch.randn(5, 2, 16), torch.tensor([0, 5])
    k[1] = NAN
    cache = hs.rotatekv_compress(k, v, offsets, sink_tokens=2, backend=backend)
    call = {"activation": "softmax", "return_lse": True, "backend": backend}
    for output in hs.rotatekv_attention(torch.randn(1, 2, 16), torch.tensor([0, 1]), cache, 8, **call):
        assert output.isnan().all()


BY_HEAD = {
    "flash": lambda q, k, v, **o: hs.flash_attention(q, k, v, OFFSETS, causal=True, **o),
    "htree": lambda q, k, v, **o: hs.htree_attention(q, k, v, OFFSETS, N, **o, **TREE),
    "htree, siblings": lambda q, k, v, **o: hs.htree_attention(q, k, v, OFFSETS, N, compression_rate=16, top_k=1, **o),
    "htree, groups": lambda q, k, v, **o: hs.htree_attention(q, k, v, OFFSETS, N, selection_group=4, **o, **TREE),
    "indexer": lambda q, k, v, **o: hs.sparse_attention(q, k, v, CHOSEN, OFFSETS, **o),
}


HEAD_CASES = [(kind, "reference") for kind in BY_HEAD]
HEAD_CASES += [pytest.param(kind, "triton", marks=interpreter) for kind in ("flash", "htree, groups", "indexer")]
HEAD_CASES += [
    pytest.param(kind, "triton", marks=[interpreter, pytest.mark.slow]) for kind in ("htree", "htree, siblings")
]


@pytest.mark.parametrize(("kind", "backend"), HEAD_CASES)
def test_nan_stays_in_its_key_head(kind, backend):
    inputs = finite_inputs()
    inputs["q"] = inputs["q"].repeat(1, 2, 1)
    before = BY_HEAD[kind](**inputs, backend=backend)
    for names in ("kv",) if backend == "triton" else ("k", "v"):
        changed = {x: value.clone() for x, value in inputs.items()}
        for name in names:
            changed[name][10, 1] = NAN
        after = BY_HEAD[kind](**changed, backend=backend)
        assert after[10:, 2:].isnan().any()
        assert torch.equal(after[:, :2], before[:, :2])
