"""Operators: arguments of another type, shape, dtype, device or value, and jagged batches that are none.

Each operator has a valid call, in keywords; a case changes some of them. On a CPU, as here, values of offsets,
candidates, positions and ids are checked in every call; on a GPU, where that would wait, under the debug switch alone.

Letters: T tokens, B sequences, N max_seq_len, H heads, D query/key and V value head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import hstu_sparse
from hstu_sparse import RelativeBias
from tests.campaign.harness import ERROR, WORKS, Case

T, H, D, V, N = 9, 2, 8, 5, 6
NAN, INFINITY = float("nan"), float("inf")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


q, k, v, offsets = random(T, H, D), random(T, H, D) + 1, random(T, H, V), torch.tensor([0, 4, 4, 9])
times, gates = torch.arange(T) * 60, [torch.rand(T, H) for _ in range(3)]
QKV = {"q": q, "k": k, "v": v, "seq_offsets": offsets}
CHOSEN = torch.tensor([[t] for t in (0, 1, 2, 3, 0, 1, 2, 3, 4)], dtype=torch.int32)
# Operator -> a call that works.
VALID: dict[str, dict] = {
    "hstu_attention": QKV | {"max_seq_len": N},
    "bsa_attention": QKV | {"max_seq_len": N, "gates": gates, "block_size": 4, "window_size": 2},
    "htree_attention": QKV | {"max_seq_len": N, "compression_rate": 2, "top_k": 2},
    "lightning_indexer": {"iq": q, "ik": k[:, 0], "w": q[..., 0], "seq_offsets": offsets, "top_k": 2},
    "index_scores": {"iq": q, "ik": k[:, 0], "w": q[..., 0], "indices": CHOSEN, "seq_offsets": offsets},
    "sparse_attention": QKV | {"k": k[:, 0], "v": v[:, 0], "indices": CHOSEN},
    "indexer_loss": {"q": q, "k": k[:, 0], "scores": q[:, 0, :1], "indices": CHOSEN, "seq_offsets": offsets},
    "rotary": {"x": q, "seq_offsets": offsets, "max_seq_len": N, "times": times},
    "rotatekv_round_trip": {"k": k, "v": v, "seq_offsets": offsets},
    "rotatekv_compress": {"k": k, "v": v, "seq_offsets": offsets},
    "hadamard_transform": {"x": q},
    "norm_gate": {"x": random(5, 7), "u": random(5, 7) + 1},
    "layer_norm": {"x": random(5, 7)},
    "catalogue_loss": {
        "out": random(4, 6),
        "items": random(9, 6),
        "targets": torch.tensor([0, 8, -1, 3]),
        "temperature": 0.1,
    },
}
# Every tensor in turn is replaced by these.
BAD_TENSORS: dict[str, Callable] = {
    "None": lambda x: None,
    "list": lambda x: [1],
    "numpy": lambda x: x.numpy(),
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x > 0,
    "a dimension more": lambda x: x[None],
    "no dimension": lambda x: x.flatten()[0],
}
BAD_FLOATING = {"int64": lambda x: x.long(), "fp8": lambda x: x.to(torch.float8_e4m3fn)}
BAD_OFFSETS = {
    "float": offsets.float(),
    "int16": offsets.short(),
    "empty": offsets[:0],
    "2-d": offsets[None],
}
WRONG_OFFSETS = {
    "fall": [0, 6, 4, 9],
    "end before T": [0, 4, 4, 7],
    "end after T": [0, 4, 4, 12],
    "start at 1": [1, 4, 4, 9],
    "negative": [-3, 4, 4, 9],
    "huge": [0, 2**62, 4, 9],
    "of no sequence": [0],
}
NUMBERS = {"max_seq_len": (0, -1, 6.0, True, None, torch.tensor(6), "6"), "backend": ("foo", None, "triton", 1)}
NUMBERS |= {"alpha": ("x", NAN, INFINITY, None, True), "scale": ("x", NAN, INFINITY, True)}
# (operator, what is changed), each refused.
BIASED = {"position": random(N), "time": random(4), "timestamps": times}
SPECIFIC: list[tuple[str, dict]] = [
    *[("hstu_attention", {"window_size": x}) for x in (-1, 1.5, None, True)],
    *[("bsa_attention", {"window_size": x}) for x in (-1, 1.5, None, True)],
    *[("bsa_attention", {"block_size": x}) for x in (0, -1, 2.5, 10**12, True)],
    *[("bsa_attention", {"block_counts": x}) for x in (0, 1.5, True)],
    *[("bsa_attention", {"selection_group": x}) for x in (0, 3, 8, 1.5)],
    *[("bsa_attention", {"gates": x}) for x in (None, gates[:2], [None, *gates[1:]], [*gates[:2], None], [[1]] * 3)],
    *[("bsa_attention", {"gates": [g.to(kind) for g in gates]}) for kind in (torch.int32, torch.complex64, torch.bool)],
    ("bsa_attention", {"gates": [gates[0][:3], *gates[1:]]}),
    ("hstu_attention", {"num_targets": [1, 0, 2]}),
    *[("hstu_attention", {"num_targets": torch.tensor(x)}) for x in ([1.0, 0.0, 2.0], [[1, 0, 2]], [1, 0])],
    *[("hstu_attention", {"num_targets": torch.tensor(x)}) for x in ([9, 9, 9], [-1, 0, 0])],
    *[("hstu_attention", {"bias": RelativeBias(**(BIASED | change))}) for change in (
        {"position": random(3)}, {"position": torch.ones(N, dtype=torch.int32)}, {"position": [1.0] * N},
        {"position": random(1, N)}, {"time": random(0)}, {"timestamps": None}, {"timestamps": times.float()},
        {"timestamps": times[:3]}, {"timestamps": times[:, None]}, {"timestamps": list(range(T))},
        {"query_timestamps": times[:3]}, {"query_timestamps": times.int()[:2]},
    )],
    ("hstu_attention", {"bias": 3}),
    ("hstu_attention", {"plan": 3}),
    *[("htree_attention", {"compression_rate": x}) for x in (0, -1, 1.5, True)],
    *[("htree_attention", {"top_k": x}) for x in (0, -1, 1.5, True)],
    *[("htree_attention", {"rope_base": x}) for x in (0.0, -1.0, NAN, "x")],
    *[("lightning_indexer", {"top_k": x}) for x in (0, -1, 1.5, True, None)],
    *[("rotatekv_compress", {"bits": x}) for x in (0, 5, 2.0, True, None)],
    *[("rotatekv_compress", {"head_group": x}) for x in (0, 3, 4, 1.0)],
    *[("rotatekv_compress", {"quant_group": x}) for x in (0, 24, 16.0)],
    *[("rotatekv_compress", {"sparsity": x}) for x in (-0.1, 1.0, NAN, "x")],
    *[("rotatekv_compress", {"sink_tokens": x}) for x in (-1, 1.5, True)],
    *[("norm_gate", {"dropout": x}) for x in (1.0, NAN, -1.0, "x", None)],
    *[("norm_gate", {"eps": x}) for x in (0.0, NAN, INFINITY, None, -1.0)],
    ("norm_gate", {"u": random(3, 7)}),
    ("layer_norm", {"eps": -1.0}),
    ("rotary", {"times": None, "position": False}),
    *[("catalogue_loss", {"temperature": x}) for x in (0.0, -1.0, NAN, "x", None)],
    *[("catalogue_loss", {"label_smoothing": x}) for x in (-0.1, 1.5, NAN)],
    ("catalogue_loss", {"targets": torch.tensor([0, 9, -1, 3])}),
    ("catalogue_loss", {"targets": torch.tensor([0.0, 8.0, -1.0, 3.0])}),
    ("catalogue_loss", {"items": random(9, 5)}),
]  # fmt: skip


def call(operator: str, changes: dict) -> int:
    try:
        out = getattr(hstu_sparse, operator)(**VALID[operator] | changes)
    except (TypeError, ValueError) as error:
        # A TypeError of Python's own names no argument of ours: `unsupported operand`, `not iterable`.
        print("error:", error)
        assert "\n" not in str(error) and not any(
            word in str(error) for word in ("operand", "iterable", "argument 'other'")
        )
        return 2
    print("returned", type(out).__name__)
    return 0


def _changes() -> Iterator[tuple[str, str, dict, str]]:
    """(operator, name, changed arguments, expected)."""
    for operator, valid in VALID.items():
        yield operator, "valid", {}, WORKS
        for name, value in valid.items():
            if not isinstance(value, torch.Tensor):
                continue
            bad = BAD_TENSORS | (BAD_FLOATING if value.is_floating_point() else {})
            if name == "times":
                bad = {what: change for what, change in bad.items() if what != "None"}
            if operator == "hadamard_transform":  # it takes any number of dimensions
                bad = {what: change for what, change in bad.items() if "dimension" not in what}
            if sum(isinstance(x, torch.Tensor) for x in valid.values()) == 1:  # then all of its tensors are there
                bad = {what: change for what, change in bad.items() if what != "meta"}
            for what, change in bad.items():
                yield operator, f"{name}: {what}", {name: change(value)}, ERROR
        if "seq_offsets" in valid:
            for what, value in BAD_OFFSETS.items():
                yield operator, f"seq_offsets: {what}", {"seq_offsets": value}, ERROR
            for what, values in WRONG_OFFSETS.items():
                yield operator, f"seq_offsets {what}", {"seq_offsets": torch.tensor(values)}, ERROR
            yield operator, "int32 offsets", {"seq_offsets": offsets.int()}, WORKS
        for name in ("k", "v"):
            if name in valid and "q" in valid:
                yield operator, f"{name} of other T", {name: valid[name][:5]}, ERROR
                yield operator, f"{name} of fp64", {name: valid[name].double()}, ERROR
        if "max_seq_len" in valid:
            yield operator, "a sequence longer than N", {"seq_offsets": torch.tensor([0, 9, 9, 9])}, ERROR
        for name, values in NUMBERS.items():
            known = name in inspect.signature(getattr(hstu_sparse, operator)).parameters
            for value in values if known else ():
                if (name, value) != ("alpha", None) and (name, value) != ("scale", None):
                    yield operator, f"{name}={value!r}", {name: value}, ERROR
    for operator, changes in SPECIFIC:
        (name, value) = next(iter(changes.items()))
        yield operator, f"{name} {_short(value)}", changes, ERROR


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {value.flatten()[:4].tolist()}"
    if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
        return "(" + ", ".join(_short(part) for part in value) + ")"
    return repr(value)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of its memory."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def same_strided(operator: str) -> int:
    """Strided arguments give what contiguous ones give."""
    spread = {name: strided(x) for name, x in VALID[operator].items() if isinstance(x, torch.Tensor)}
    ours, theirs = (getattr(hstu_sparse, operator)(**VALID[operator] | more) for more in ({}, spread))
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs))):
        assert torch.allclose(a, b, atol=1e-6, equal_nan=True), f"differs by {(a - b).abs().max()}"
    return 0


def empty(operator: str, sequences: int) -> int:
    """No tokens at all, forward and backward."""
    changes = {"seq_offsets": torch.zeros(sequences + 1, dtype=torch.int64)}
    for name, value in VALID[operator].items():
        if isinstance(value, torch.Tensor) and name != "seq_offsets":
            changes[name] = value[:0].clone().requires_grad_(value.is_floating_point())
        elif name == "gates":
            changes[name] = [gate[:0] for gate in gates]
    out = getattr(hstu_sparse, operator)(**VALID[operator] | changes)
    out = out[0] if isinstance(out, tuple) else out
    if out.requires_grad:
        out.sum().backward()
    return 0


def cases(place: Path) -> list[Case]:
    found = []
    for number, (operator, name, changes, expect) in enumerate(_changes()):
        run = lambda folder, o=operator, c=changes: call(o, c)
        # In CI a few: each takes little, but there are many.
        quick = number % 16 == 0
        found.append(Case("operator", f"operator {operator}: {name}", run, expect, short=quick, seconds=30))
    for operator, valid in VALID.items():
        if operator in ("rotatekv_compress", "catalogue_loss"):
            continue
        found.append(
            Case("operator", f"operator {operator}: strided", lambda f, o=operator: same_strided(o), WORKS, short=False)
        )
        for sequences in (0, 2) if "seq_offsets" in valid else ():
            run = lambda f, o=operator, s=sequences: empty(o, s)
            name = f"operator {operator}: no tokens in {sequences} sequences"
            found.append(Case("operator", name, run, WORKS, short=False))
    return found
