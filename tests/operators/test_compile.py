"""Every kernel of every operator is lowered to Triton's GPU dialect; slow: every case compiles as it should."""

from importlib import metadata

import pytest

from tests.operators.compiling import compiled, launches_of
from tests.random.cases import NAMES

pytest.importorskip("triton")

# Operators that take long are compiled in two parts, so that two workers share them; those that take seconds, in one.
LONG = ("bsa", "catalogue_loss", "dense", "indexer")
SHORT = ("embed_inputs", "norm_gate", "residual", "rotary", "silu_parts")
PARTS = [
    *(((name,), architectures) for name in LONG for architectures in ((80, 90), (100, 120))),
    *(((name,), (80, 90, 100, 120)) for name in NAMES if name not in LONG + SHORT),
    (SHORT, (80, 90, 100, 120)),
]
# Bytes of shared memory that a program may have, with the driver's 1 KB.
SHARED = {80: 163 * 1024, 90: 228 * 1024}


# Triton's version -> architecture -> kernel -> bytes that a thread may spill, if more than a case allows.
SPILLED = {
    "3.8": {
        80: {
            "bsa_choose_fwd_kernel": 8,
            "catalogue_loss_fwd_kernel": 760,
            "flash_attention_bwd_dkv_kernel": 8,
        },
        90: {
            "bsa_query_bwd_dq_kernel": 680,
            "bsa_query_fwd_kernel": 528,
            "dense_attention_bwd_dkv_hopper_kernel": 8,
            "dense_attention_bwd_dkv_kernel": 464,
            "dense_attention_bwd_dq_hopper_kernel": 104,
            "dense_attention_bwd_dq_kernel": 616,
            "dense_attention_fwd_hopper_kernel": 200,
            "dense_attention_fwd_kernel": 640,
            "flash_attention_bwd_dkv_kernel": 184,
            "flash_attention_bwd_dq_kernel": 72,
            "hadamard_transform_fwd_kernel": 3808,
            "htree_attend_bwd_kernel": 424,
            "index_scores_bwd_kernel": 8,
            "lightning_indexer_refill_kernel": 48,
            "paged_attention_fwd_kernel": 472,
            "query_gates_fwd_kernel": 328,
        },
        100: {
            "flash_attention_fwd_kernel": 368,
        },
        120: {
            "query_gates_bwd_kernel": 104,
        },
    }
}.get(".".join(metadata.version("triton").split(".")[:2]), {})


def test_every_kernel_is_lowered():
    """Triton's front end takes every kernel, and its passes find layouts; what LLVM and ptxas make of it is slow."""
    kernels = compiled(NAMES, (90,), lowered=True)
    for name in NAMES:
        used = any(90 in case.architectures for case in launches_of(name))
        assert used == any(kernel["operator"] == name for kernel in kernels)
    wrong = [kernel for kernel in kernels if kernel["added_twice"] or kernel["memory_assembly"]]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "architectures"), PARTS, ids=[f"{' '.join(names)}-{'-'.join(map(str, archs))}" for names, archs in PARTS]
)
def test_every_case_compiles(names, architectures):
    check(names, architectures, compiled(names, architectures))


def check(names, architectures, kernels):
    for name in names:
        used = {arch for case in launches_of(name) for arch in case.architectures}
        assert {k["arch"] for k in kernels if k["operator"] == name} == used.intersection(architectures)
    wrong = [
        k
        for k in kernels
        if k["local_bytes"] > max(k["allowed"], SPILLED.get(k["arch"], {}).get(k["name"], 0))
        or k["shared_bytes"] > SHARED.get(k["arch"], k["shared_bytes"])
        or k["unset_registers"]
        or k["early_reloads"]
        or k["added_twice"]
        or k["memory_assembly"]
    ]
    assert not wrong, "\n".join(map(str, wrong))
