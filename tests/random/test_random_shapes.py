"""The campaign of random shapes: every operator's kernels against its reference, for a given time.

    python -m pytest -m gpu tests/random/test_random_shapes.py --seconds 300 [--campaign-seed 1] [-n 10]

`--seconds` is its time, which operators share equally. With -n every process draws other cases of each operator.
Without a GPU it runs in Triton's interpreter, for some seconds. A failing case is printed in the form that FIXED has.
"""

import os
import random
import time

import pytest
import torch

from tests.random.cases import BATCH, MOST_BYTES, NAMES, draw, operator

# Failures that the campaign found, as it printed them: (operator, case).
FIXED: list[tuple[str, dict]] = [
    ("bsa", {
        "lengths": [556, 1, 899], "max_seq_len": 899, "heads": 3, "head_size": 40, "value_size": 128,
        "dtype": "float16", "block_size": 64, "block_counts": 16, "window_size": 0, "selection_group": 4,
        "contiguous": True, "deterministic": False, "position": True, "buckets": 1, "table_dtype": "float32",
        "spread": 40000.0, "seed": 517278585,
    }),
    ("bsa", {
        "lengths": [1, 4, 611], "max_seq_len": 622, "heads": 1, "head_size": 200, "value_size": 256, "dtype": "float32",
        "block_size": 16, "block_counts": 1, "window_size": 0, "selection_group": 8, "contiguous": False,
        "deterministic": False, "position": True, "buckets": 15, "table_dtype": "float32", "spread": 40000.0,
        "seed": 665090909,
    }),
    ("bsa", {
        "lengths": [281, 608, 1, 563, 234, 193], "max_seq_len": 608, "heads": 3, "head_size": 128, "value_size": 50,
        "dtype": "bfloat16", "block_size": 16, "block_counts": 3, "window_size": 0, "selection_group": 16,
        "contiguous": True, "deterministic": False, "position": True, "buckets": 1, "table_dtype": "float32",
        "spread": 1.0, "seed": 685402465,
    }),
    ("catalogue_loss", {
        "tokens": 1, "items": 2, "size": 64, "sampled": "no", "num_negatives": 1, "corrected": False,
        "normalize": False, "temperature": 4.0, "learned": True, "smoothing": 0.0, "ignored": 0.0, "ids": "int32",
        "strided": True, "dtype": "bfloat16", "seed": 529130903,
    }),
    ("dense", {
        "lengths": [28, 1, 1], "longer": 0, "heads": 1, "d": 50, "v": 50, "window": 1, "targets": True,
        "position": False, "time": True, "query_times": False, "ordered": True, "num_buckets": 1, "gap": 60.0,
        "dtype": "float32", "contiguous": False, "seed": 1328448764,
    }),
    ("dense", {
        "lengths": [1], "longer": 500, "heads": 2, "d": 64, "v": 25, "window": 0, "targets": False, "position": True,
        "time": True, "query_times": True, "ordered": True, "num_buckets": 128, "gap": 40000000.0, "dtype": "float32",
        "contiguous": True, "seed": 1438732260,
    }),
    ("htree", {
        "lengths": [1], "spare": 0, "group": 16, "kv_heads": 2, "head_size": 32, "value_size": 7, "rate": 3, "top_k": 8,
        "scale": None, "dtype": "float32", "offsets": "int32", "contiguous": False, "deterministic": False,
        "seed": 326397,
    }),
    ("htree", {
        "lengths": [256], "spare": 0, "group": 64, "kv_heads": 2, "head_size": 50, "value_size": 256, "rate": 16,
        "top_k": 8, "scale": 0.5, "dtype": "float16", "offsets": "int64", "contiguous": True, "deterministic": True,
        "seed": 604586,
    }),
    ("paged", {
        "lengths": [0, 1687, 1, 674, 1], "query_lengths": [1, 119, 1, 37, 6], "longer": 0, "groups": 1,
        "head_size": 48, "value_size": 128, "dtype": "float16", "stored": "float16", "bits": 4, "head_group": 2,
        "quant_group": 32, "sink_tokens": 0, "clip": 0.75, "candidates": True, "softmax": True, "position": False,
        "timed": True, "splits": 1, "contiguous": False, "seed": 959369742,
    }),
    ("residual", {
        "tokens": 18405, "channels": 2, "dtype": "bfloat16", "added_dtype": "bfloat16", "biased": True, "stride": 2,
        "seed": 2102805495,
    }),
    ("rotatekv", {
        "lengths": [1990, 1353, 271, 1, 0, 1, 1], "query_lengths": [1, 76, 0, 1, 1, 1, 80], "max_seq_len": 1990,
        "groups": 2, "head_size": 128, "value_size": 16, "dtype": "float16", "bits": 3, "head_group": 4,
        "quant_group": 32, "sparsity": 0.18688314056196764, "sink_tokens": 14, "clip": 1.0, "ordered": False,
        "softmax": False, "rope": True, "position": True, "timed": False, "splits": None, "contiguous": False,
        "seed": 634734695,
    }),
    ("rotatekv", {
        "lengths": [1576, 0, 82, 0, 866], "query_lengths": [1, 1, 1, 0, 0], "max_seq_len": 1576, "groups": 2,
        "head_size": 256, "value_size": 96, "dtype": "float16", "bits": 3, "head_group": 2, "quant_group": 64,
        "sparsity": 0.7495120464720532, "sink_tokens": 0, "clip": 1.0, "ordered": False, "softmax": True,
        "rope": True, "position": False, "timed": False, "splits": 1, "contiguous": True, "seed": 451164200,
    }),
    ("rotatekv", {
        "lengths": [311, 0], "query_lengths": [1, 0], "max_seq_len": 311, "groups": 1, "head_size": 128,
        "value_size": 200, "dtype": "float16", "bits": 4, "head_group": 2, "quant_group": 128, "sparsity": 0.0,
        "sink_tokens": 3, "clip": 1.0, "ordered": True, "softmax": True, "rope": False, "position": False,
        "timed": False, "splits": None, "contiguous": True, "seed": 84676258,
    }),
    ("rotatekv", {
        "lengths": [40, 0], "query_lengths": [3, 1], "max_seq_len": 43, "groups": 2, "head_size": 128,
        "value_size": 96, "dtype": "float32", "bits": 4, "head_group": 2, "quant_group": 128, "sparsity": 0.0,
        "sink_tokens": 3, "clip": 1.0, "ordered": False, "softmax": True, "rope": True, "position": True,
        "timed": False, "splits": None, "contiguous": True, "seed": 661592650,
    }),
    ("rotatekv", {
        "lengths": [1323, 1819, 1076, 303, 1], "query_lengths": [6, 61, 0, 126, 0], "max_seq_len": 1819, "groups": 1,
        "head_size": 128, "value_size": 96, "dtype": "float16", "bits": 3, "head_group": 4, "quant_group": 128,
        "sparsity": 0.8105972604593938, "sink_tokens": 0, "clip": 1.0, "ordered": True, "softmax": True,
        "rope": False, "position": True, "timed": False, "splits": 1, "contiguous": True, "seed": 1845854705,
    }),
    ("ring_hstu", {
        "lengths": [1500, 1500, 1, 0, 1], "gap": 0, "heads": 1, "size": 16, "value_size": 128, "dtype": "float32",
        "window": 0, "position": True, "timed": True, "seed": 140267346,
    }),
    ("indexer", {
        "operator": "index_scores", "lengths": [0, 1], "heads": 16, "size": 256, "value_size": 128, "top_k": 64,
        "dtype": "float32", "position": False, "time": False, "exact": False, "strided": False,
        "wide_indices": False, "deterministic": False, "seed": 2093244291,
    }),
    ("indexer", {
        "operator": "compute_index_loss_sparse", "lengths": [1, 0], "heads": 2, "size": 100, "value_size": 32,
        "top_k": 7, "dtype": "bfloat16", "position": False, "time": True, "exact": True, "strided": False,
        "wide_indices": False, "deterministic": False, "seed": 1552576183,
    }),
]  # fmt: skip
# Each process runs every operator once, so that all of them end at the same time.
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
GIB = 1024**3
BATCHES = 4  # checks of each compiled kernel: compiling takes ten times as long as checking
MOST_INTERPRETED = 300  # tokens of a fixed case that the interpreter gets through in seconds


def campaign(name: str, device: str, seconds: float, seed: str) -> tuple[int, float]:
    """Check random cases of an operator until the time is up; return (their number, most GiB that one took)."""
    module, numbers, cases, most = operator(name), random.Random(f"{name} {seed}"), 0, 0.0
    end = time.monotonic() + seconds
    failed, case = [], None
    while not cases or time.monotonic() < end:
        again = device == "cuda" and cases % BATCHES and "lengths" in case
        case = draw(module, numbers, device == "cpu", case if again else None)
        cases += 1
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if error := attempt(module, device, case):
            failed.append(f"({name!r}, {case!r}),  # {error}")
            print(failed[-1], flush=True)  # for whoever ends it early, with -s
            if "CUDA error" in error:  # the process can compute nothing more, see conftest.py
                raise RuntimeError("\n".join(failed))
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() / GIB
            most = max(most, peak)
            if peak > 3 * MOST_BYTES / GIB:
                failed.append(f"({name!r}, {case!r}),  # took {peak:.1f} GiB: its reference_bytes expects less")
            torch.cuda.empty_cache()  # other processes run beside this one
    assert not failed, f"{len(failed)} failures in {cases} cases:\n" + "\n".join(failed[:20])
    return cases, most


def attempt(module, device: str, case: dict) -> str:
    """Return the fault of a case in a line, or the empty text. No tensor of the case stays on the device."""
    try:
        try:
            module.check(device, **case)
        finally:
            if device == "cuda":
                torch.cuda.synchronize()  # a kernel's error belongs to this case, also if a later call reports it
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
    return ""


def fixed(name):
    return [case for operator_name, case in FIXED if operator_name == name]


@pytest.mark.gpu
@pytest.mark.big_gpu
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PROCESSES))
@pytest.mark.parametrize("name", NAMES)
def test_random_shapes_on_gpu(name, part, request, record_property):
    for case in fixed(name) if part == 0 else ():
        operator(name).check("cuda", **case)
    seconds, seed = request.config.getoption("--seconds"), request.config.getoption("--campaign-seed")
    cases, most = campaign(name, "cuda", seconds / len(NAMES), f"{seed} {part}")
    record_property("campaign", (name, cases, most))


interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in FIXED}))
def test_fixed_cases_in_the_interpreter(name):
    pytest.importorskip("triton")
    for case in fixed(name):
        if case.get("dtype", "float32") == "float32" and sum(case.get("lengths", [])) <= MOST_INTERPRETED:
            operator(name).check("cpu", **case)


@interpreter
@pytest.mark.parametrize("name", NAMES)
def test_random_shapes_in_the_interpreter(name, request):
    pytest.importorskip("triton")
    seconds, seed = request.config.getoption("--seconds"), request.config.getoption("--campaign-seed")
    campaign(name, "cpu", seconds / len(NAMES), str(seed))


@pytest.mark.parametrize("name", NAMES)
def test_another_batch_keeps_the_kernels(name):
    module, numbers = operator(name), random.Random(3)
    case = draw(module, numbers, False)
    others = [draw(module, numbers, False, case) for _ in range(5)]
    assert all(other.keys() == case.keys() for other in others)
    changed = {key for other in others for key in case if other[key] != case[key]}
    assert "seed" in changed and changed <= BATCH


def test_a_failure_is_printed_as_a_case(monkeypatch):
    module = operator("norm_gate")
    wrong = module.draw(random.Random(0), True)

    def check(device, **case):
        if case == wrong:
            raise AssertionError("two numbers\ndiffer")

    monkeypatch.setattr(module, "check", check)
    cases = iter([module.draw(random.Random(1), True), wrong])
    monkeypatch.setattr(module, "draw", lambda *_: next(cases))
    clock = iter([0.0, 0.0, 2.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(AssertionError) as raised:
        campaign("norm_gate", "cpu", 1.0, "0")
    printed = str(raised.value).splitlines()[1]
    assert printed.endswith("# AssertionError: two numbers differ")
    assert eval(printed) == (("norm_gate", wrong),)
