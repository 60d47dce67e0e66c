"""Define cases of operators: arguments of wrong type, shape, dtype, device or value, and invalid jagged batches.

Each operator has a valid call with keywords, of which a case changes some. On a CPU, as here, values of offsets,
candidates, positions and ids are checked in every call; on a GPU, where that would synchronise, only in debug mode.

Letters: T tokens, B sequences, N max_seq_len, H heads, D query/key and V value head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import hstu_sparse
from hstu_sparse import RelativeBias, compat
from tests.hostile.harness import ERROR, WORKS, Case

T, H, D, V, N = 9, 2, 8, 5, 6
NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**400


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def two_gates(q: torch.Tensor) -> list[torch.Tensor]:
    return gates[:2]


def no_gates(q: torch.Tensor) -> None:
    return None


q, k, v, offsets = random(T, H, D), random(T, H, D) + 1, random(T, H, V), torch.tensor([0, 4, 4, 9])
times, gates = torch.arange(T) * 60, [torch.rand(T, H) for _ in range(3)]
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
QKV = {"q": q, "k": k, "v": v, "seq_offsets": offsets}
FIXED = {name: random(2, 4, H, D) + i for i, name in enumerate("qkv")}  # for the ring functions without offsets
CACHE = hstu_sparse.rotatekv_compress(k, v, offsets)
POOL = hstu_sparse.PagePool(hstu_sparse.PageFormat(H, D, V), 3)
PAGES, NONE = POOL.table([POOL.reserve([], N) for _ in range(3)]), torch.zeros(3, dtype=torch.int64)
POOL.write(0, k, v, offsets, PAGES, NONE)
CHOSEN = torch.tensor([[t] for t in (0, 1, 2, 3, 0, 1, 2, 3, 4)], dtype=torch.int32)
# Operator -> a valid call.
VALID: dict[str, dict] = {
    "hstu_attention": QKV | {"max_seq_len": N},
    "bsa_attention": QKV | {"max_seq_len": N, "gates": gates, "block_size": 4, "window_size": 2},
    "htree_attention": QKV | {"max_seq_len": N, "compression_rate": 2, "top_k": 2},
    "lightning_indexer": {"iq": q, "ik": k[:, 0], "w": q[..., 0], "seq_offsets": offsets, "top_k": 2},
    "index_scores": {"iq": q, "ik": k[:, 0], "w": q[..., 0], "indices": CHOSEN, "seq_offsets": offsets},
    "sparse_attention": QKV | {"k": k[:, 0], "v": v[:, 0], "indices": CHOSEN},
    "indexer_loss": {"q": q, "k": k[:, 0], "scores": q[:, 0, :1], "indices": CHOSEN, "seq_offsets": offsets},
    "compute_index_loss_sparse": {
        "query": random(2, H, 3, D),
        "key": random(2, 5, D),
        "index_score": random(2, 3, 2),
        "indices": torch.tensor([[[0, -1], [0, 1], [1, 2]]] * 2),
        "scaling": 0.3,
    },
    "flash_attention": QKV,
    "ring_flash_attention": QKV,
    "triton_ring_flash_attn_func": FIXED,
    "zigzag_triton_ring_flash_attn_func": FIXED,
    "triton_ring_flash_attn_varlen_func": {"q": q, "k": k, "v": v, "cu_seqlens": offsets},
    "zigzag_triton_ring_flash_attn_varlen_func": {"q": q, "k": k, "v": v, "cu_seqlens": offsets},
    "triton_ring_flash_attn_kvpacked_func": {"q": FIXED["q"], "kv": random(2, 4, 2, H, D)},
    "triton_ring_flash_attn_qkvpacked_func": {"qkv": random(2, 4, 3, H, D)},
    "triton_ring_flash_attn_varlen_kvpacked_func": {"q": q, "kv": random(T, 2, H, D), "cu_seqlens": offsets},
    "triton_ring_flash_attn_varlen_qkvpacked_func": {"qkv": random(T, 3, H, D), "cu_seqlens": offsets},
    "ring_hstu_attention": QKV | {"positions": POSITIONS, "max_seq_len": N},
    "ring_plan": {"cu_seqlens": offsets},
    "whole_plan": {"seq_offsets": offsets, "rank": 0, "world": 2},
    "heads_to_tokens": {"x": q},
    "cut_sequences": {"seq_offsets": offsets, "rank": 0, "world": 2},
    "rotary": {"x": q, "seq_offsets": offsets, "max_seq_len": N, "times": times},
    "rotatekv_round_trip": {"k": k, "v": v, "seq_offsets": offsets},
    "rotatekv_self_attention": QKV | {"max_seq_len": N},
    "rotatekv_compress": {"k": k, "v": v, "seq_offsets": offsets},
    "rotatekv_attention": {"q": q, "q_offsets": offsets, "cache": CACHE, "max_seq_len": N},
    "rotatekv_decompress": {"cache": CACHE},
    "paged_attention": {"q": q, "k": k, "v": v, "q_offsets": offsets, "pool": POOL, "pages": PAGES, "lengths": NONE}
    | {"max_seq_len": N},
    "mustafar_attention_with_rope": QKV | {"q_offsets": offsets, "max_seq_len": N},
    "calibrate": {"k": k},
    "attention_plan": {"q": q, "v": v, "seq_offsets": offsets, "max_seq_len": N},
    "triton_block_sparse_attn": {name: random(2, 8, H, D) + i for i, name in enumerate("qkv")}
    | {"u": None, "g_cmp": random(2, 8, H), "g_slc": random(2, 8, H), "g_swa": random(2, 8, H)}
    | {"block_counts": 2, "block_size": 4, "window_size": 2},
    "triton_hstu_attention_with_bsa": {name: random(T, H * size) for name, size in zip("qkvu", (D, D, V, V))}
    | {"num_heads": H, "attention_dim": D, "linear_dim": V, "x_offsets": offsets, "gate_model": lambda q: gates}
    | {"invalid_attn_mask": torch.ones(N, N), "block_size": 4, "window_size": 2},
    "hadamard_transform": {"x": q},
    "norm_gate": {"x": random(5, 7), "u": random(5, 7) + 1},
    "layer_norm": {"x": random(5, 7)},
    "residual_norm": {"x": random(5, 7)},
    "residual_add": {"x": random(5, 7), "added": random(5, 7), "bias": random(7)},
    "embed_inputs": {"rows": random(T, 6), "position": random(N, 6), "seq_offsets": offsets, "more": random(T, 6)},
    "silu_parts": {"x": random(5, 7), "sizes": [1, 2, 3, 1]},
    "query_gates": {"q": q, "w1": random(8, D), "b1": random(8), "w2": random(3, 8), "b2": random(3)},
    "catalogue_loss": {
        "out": random(4, 6),
        "items": random(9, 6),
        "targets": torch.tensor([0, 8, -1, 3]),
        "temperature": 0.1,
    },
}
# Replacements for each tensor of a call.
BAD_TENSORS: dict[str, Callable] = {
    "None": lambda x: None,
    "list": lambda x: [1],
    "numpy": lambda x: x.numpy(),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
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
OFFSETS = ("seq_offsets", "cu_seqlens", "q_offsets", "x_offsets")
# Faults that a plan cannot detect, since it has offsets but no tokens.
NEED_TOKENS = ("end before T", "end after T", "of no sequence")
PLANS = ("ring_plan", "whole_plan", "cut_sequences")
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
NUMBERS |= {"scale": ("x", NAN, INFINITY, True), "normalizer": ("x", NAN, INFINITY, True, 0, -1.0)}
DROPOUTS = (
    ("flash_attention", "dropout"),
    ("ring_flash_attention", "dropout"),
    ("triton_ring_flash_attn_func", "dropout_p"),
    ("zigzag_triton_ring_flash_attn_varlen_func", "dropout_p"),
)
FLASH = tuple(operator for operator, _ in DROPOUTS)
ON_CACHE = ("rotatekv_attention", "mustafar_attention_with_rope")
# (operator, changes) that must be refused.
BIASED = {"position": random(N), "time": random(4), "timestamps": times}
CACHED = {"position": random(N + 1), "time": random(4), "timestamps": times, "query_timestamps": times}
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
    *[(op, {name: HUGE}) for op, name in (
        ("hstu_attention", "scale"), ("hstu_attention", "max_seq_len"), ("hstu_attention", "window_size"),
        ("ring_hstu_attention", "max_seq_len"), ("htree_attention", "rope_base"), ("norm_gate", "eps"),
        ("catalogue_loss", "temperature"), ("rotatekv_attention", "max_seq_len"),
        ("compute_index_loss_sparse", "scaling"),
    )],
    ("flash_attention", {"window_size": (HUGE, 0)}),
    *[(op, {name: x}) for op, name in (
        ("flash_attention", "causal"), ("flash_attention", "return_lse"), ("ring_flash_attention", "zigzag"),
        ("catalogue_loss", "normalize"), ("rotary", "position"), ("rotatekv_attention", "return_lse"),
        ("bsa_attention", "return_block_indices"), ("triton_ring_flash_attn_func", "return_attn_probs"),
        *((plan, "zigzag") for plan in PLANS),
    ) for x in ("no", 1, None)],
    *[("catalogue_loss", {"temperature": torch.tensor(x)}) for x in (0.0, -1.0, NAN, INFINITY)],
    *[(op, {"plan": hstu_sparse.ring_plan(torch.tensor(x))}) for op in ("ring_flash_attention", "ring_hstu_attention")
      for x in ([0, 3, 5, 9], [0, 4, 9], [0, 4, 4, 8])],
    *[(op, {name: x * size, "bits": 8}) for op in ("rotatekv_compress", "rotatekv_round_trip")
      for name, x in (("k", k), ("v", v)) for size in (1e6, 1e-7)],
    ("hstu_attention", {"bias": 3}),
    *[(op, {"plan": 3}) for op in ("hstu_attention", "rotatekv_self_attention")],
    *[("htree_attention", {"compression_rate": x}) for x in (0, -1, 1.5, True)],
    *[("htree_attention", {"top_k": x}) for x in (0, -1, 1.5, True)],
    *[("htree_attention", {"rope_base": x}) for x in (0.0, -1.0, NAN, "x")],
    *[("lightning_indexer", {"top_k": x}) for x in (0, -1, 1.5, True, None)],
    *[("rotatekv_compress", {"bits": x}) for x in (0, 5, 2.0, True, None)],
    *[("rotatekv_compress", {"head_group": x}) for x in (0, 3, 4, 1.0)],
    *[("rotatekv_compress", {"quant_group": x}) for x in (0, 24, 16.0)],
    *[("rotatekv_compress", {"sparsity": x}) for x in (-0.1, 1.0, NAN, "x")],
    *[("rotatekv_compress", {"clip": x}) for x in (0.0, 1.1, NAN, "x")],
    *[("rotatekv_compress", {"sink_tokens": x}) for x in (-1, 1.5, True)],
    *[("norm_gate", {"dropout": x}) for x in (1.0, NAN, -1.0, "x", None)],
    *[("norm_gate", {"eps": x}) for x in (0.0, NAN, INFINITY, None, -1.0)],
    ("norm_gate", {"u": random(3, 7)}),
    ("layer_norm", {"eps": -1.0}),
    *[("catalogue_loss", {"temperature": x}) for x in (0.0, -1.0, NAN, "x", None)],
    *[("catalogue_loss", {"label_smoothing": x}) for x in (-0.1, 1.5, NAN)],
    ("catalogue_loss", {"targets": torch.tensor([0, 9, -1, 3])}),
    ("catalogue_loss", {"targets": torch.tensor([0.0, 8.0, -1.0, 3.0])}),
    ("catalogue_loss", {"items": random(9, 5)}),
    *[("catalogue_loss", {"negatives": torch.tensor(x)}) for x in ([0.5], [9], [[1, 9]] * 4, [[1]], [[[1]]], 3)],
    *[("catalogue_loss", {"temperature": torch.tensor(x)}) for x in ([0.1], 1)],
    ("catalogue_loss", {"log_q": random(9)}),
    *[("catalogue_loss", {"log_q": x, "negatives": torch.tensor([1])}) for x in (random(8), random(9).long(), [1.0])],
    ("catalogue_loss", {"label_smoothing": 0.1, "negatives": torch.tensor([1])}),
    *[("lightning_indexer", {"bias": RelativeBias(**(BIASED | change))}) for change in (
        {"position": random(4)}, {"time": random(0)}, {"timestamps": None}, {"timestamps": times[:3]},
    )],
    *[("sparse_attention", {"bias": x}) for x in (3, RelativeBias(random(4)), RelativeBias(random(1, 9)))],
    *[("indexer_loss", {"valid": x}) for x in ([True] * T, torch.ones(T), torch.ones(3, dtype=torch.bool))],
    *[(f"{op}", {"eps": x}) for op in ("indexer_loss", "compute_index_loss_sparse") for x in (0.0, NAN, "x", None)],
    *[("compute_index_loss_sparse", {"chunk_offset": x}) for x in (-1, 1.5, None, True)],
    *[("compute_index_loss_sparse", {"scaling": x}) for x in (NAN, INFINITY, "x", None)],
    ("compute_index_loss_sparse", {"key": random(2, 0, D)}),
    ("lightning_indexer", {"top_k": 10**12}),
    *[("flash_attention", {"scale": x}) for x in (0.0, -1.0)],
    *[("flash_attention", {"k_offsets": torch.tensor(x)}) for x in ([0, 9], [0.0, 4.0, 4.0, 9.0], [0, 6, 4, 9])],
    ("flash_attention", {"k_offsets": [0, 4, 4, 9]}),
    *[(op, {"window_size": x}) for op in FLASH for x in (3, None, (1,), (1, 2, 3), (-2, 0), (1.5, 0), (True, 0), "ab")],
    *[(op, {"alibi_slopes": x}) for op in FLASH for x in ([1.0] * H, random(H).double(), random(3), 0.5)],
    *[(op, {name: x}) for op, name in DROPOUTS for x in (1.0, -0.1, NAN, "x")],
    *[(op, {"seed": x, name: 0.5}) for op, name in DROPOUTS for x in (
        3, torch.tensor([1.0]), torch.tensor([1, 2]), torch.tensor([1], device="meta"),
    )],
    *[("ring_flash_attention", {"scale": x}) for x in (0.0, -1.0)],
    *[("triton_ring_flash_attn_func", {"softmax_scale": x}) for x in (0.0, -1.0, NAN, INFINITY, "x", True)],
    *[("triton_ring_flash_attn_func", {"group": x}) for x in (3, "world")],
    *[(op, {"plan": x}) for op in ("ring_flash_attention", "ring_hstu_attention") for x in (3, (1, 2))],
    ("triton_ring_flash_attn_kvpacked_func", {"kv": random(2, 4, 3, H, D)}),
    ("triton_ring_flash_attn_qkvpacked_func", {"qkv": random(2, 4, 2, H, D)}),
    *[("ring_hstu_attention", {"positions": POSITIONS + x}) for x in (-1, N, 2**40)],
    *[("ring_hstu_attention", {"positions": x}) for x in (POSITIONS.float(), POSITIONS[:3], POSITIONS.tolist())],
    *[("ring_hstu_attention", {"window_size": x}) for x in (-1, 1.5, None, True)],
    *[("ring_hstu_attention", {"bias": x}) for x in (3, RelativeBias(random(3)), RelativeBias(None, random(4)))],
    *[(op, {"rank": x}) for op in PLANS[1:] for x in (-1, 2, 0.5, True, None, "0")],
    *[(op, {"world": x}) for op in PLANS[1:] for x in (0, -1, 1.5, None, 10**12)],
    *[("rotatekv_attention", {"cache": x}) for x in (None, 3, {}, k)],
    ("rotatekv_attention", {"max_seq_len": 4}),
    *[(op, {"activation": x}) for op in ON_CACHE for x in ("relu", None, 3)],
    *[(op, {"rope_base": x}) for op in ON_CACHE for x in (0.0, -1.0, NAN, "x", True)],
    *[(op, {"return_lse": True}) for op in ON_CACHE],
    *[(op, {"bias": RelativeBias(**(CACHED | change))}) for op in ON_CACHE for change in (
        {"position": random(N)}, {"timestamps": times[:4]}, {"timestamps": None}, {"query_timestamps": times[:4]},
        {"query_timestamps": None}, {"time": random(0)}, {"timestamps": times.int()},
    )],
    ("rotatekv_decompress", {"cache": None}),
    *[(op, {"sink_tokens": 10**12}) for op in ("rotatekv_compress", "rotatekv_round_trip")],
    *[("rotatekv_compress", {"channel_order": x}) for x in (
        [0], torch.zeros(1, 16, dtype=torch.int64), torch.arange(16)[None] + 1, torch.arange(16), random(1, 16),
    )],
    *[("rotatekv_round_trip", {"channel_order": x}) for x in (torch.zeros(1, 16, dtype=torch.int64), random(1, 16))],
    *[("calibrate", {"head_group": x}) for x in (0, 3, 4, 1.0, None)],
    *[("calibrate", {"quant_group": x}) for x in (0, 24, 16.0, None)],
    ("calibrate", {"k": k[:0]}),
    *[("attention_plan", {"num_targets": torch.tensor(x)}) for x in ([9, 9, 9], [1.0, 0.0, 2.0])],
    *[("attention_plan", {"window_size": x}) for x in (-1, 1.5, None)],
    *[("rotary", {"origins": x}) for x in ([1, 2, 3], times[:2], times[:3].int(), times[:3].to("meta"))],
    *[("rotary", {"x": random(T, 2)}), ("rotary", {"position": False, "times": None})],
    *[("triton_block_sparse_attn", {"block_size": x}) for x in (0, 2.5, None)],
    *[("triton_hstu_attention_with_bsa", {"gate_model": x}) for x in (None, two_gates, no_gates)],
    *[("triton_hstu_attention_with_bsa", {name: 3}) for name in ("num_heads", "attention_dim", "linear_dim")],
]  # fmt: skip


EXTREME = RelativeBias(None, random(5), torch.tensor([-(2**63)] * 4 + [2**63 - 1] * 5))
# Accepted on purpose, with the reasons in accepted.py: (operator, name) -> changes.
LARGE = {
    ("htree_attention", "compression_rate 10^12"): {"compression_rate": 10**12},
    ("htree_attention", "top_k 10^12"): {"top_k": 10**12},
    ("hstu_attention", "window_size 10^12"): {"window_size": 10**12},
    ("hstu_attention", "max_seq_len 10^12"): {"max_seq_len": 10**12},
    ("hstu_attention", "timestamps from end to end of int64"): {"bias": EXTREME},
    ("bsa_attention", "block_counts 10^6"): {"block_counts": 10**6},
    ("bsa_attention", "block_size 2^20"): {"block_size": 2**20, "selection_group": 2**20},
    ("rotatekv_compress", "quant_group 2^40"): {"quant_group": 2**40},
    ("flash_attention", "window_size (10^12, 10^12)"): {"window_size": (10**12, 10**12)},
    ("ring_hstu_attention", "max_seq_len 10^12"): {"max_seq_len": 10**12},
}


def function(operator: str) -> Callable:
    return getattr(hstu_sparse, operator, None) or getattr(compat, operator)


def call(operator: str, changes: dict) -> int:
    try:
        out = function(operator)(**VALID[operator] | changes)
    except (TypeError, ValueError) as error:
        # A TypeError of Python (`unsupported operand`, `not iterable`) does not name an argument.
        print("error:", error)
        assert "\n" not in str(error) and not any(
            word in str(error) for word in ("operand", "iterable", "argument 'other'", "object ")
        )
        return 2
    print("returned", type(out).__name__)
    return 0


def _changes() -> Iterator[tuple[str, str, dict, str]]:
    """Yield (operator, name, changed arguments, expected)."""
    for operator, valid in VALID.items():
        yield operator, "valid", {}, WORKS
        for name, value in valid.items():
            if not isinstance(value, torch.Tensor):
                continue
            bad = BAD_TENSORS | (BAD_FLOATING if value.is_floating_point() else {})
            if name == "invalid_attn_mask":  # only its last size is read
                bad = {what: BAD_TENSORS[what] for what in ("None", "list", "numpy", "no dimension", "nested")}
            if name in ("times", "g_swa", "more", "bias"):
                bad = {what: change for what, change in bad.items() if what != "None"}
            if operator == "hadamard_transform":  # it takes any number of dimensions
                bad = {what: change for what, change in bad.items() if "dimension" not in what}
            for what, change in bad.items():
                yield operator, f"{name}: {what}", {name: change(value)}, ERROR
        for name in OFFSETS:
            if name not in valid:
                continue
            for what, value in BAD_OFFSETS.items():
                yield operator, f"{name}: {what}", {name: value}, ERROR
            for what, values in WRONG_OFFSETS.items():
                if not (operator in PLANS and what in NEED_TOKENS):
                    yield operator, f"{name} {what}", {name: torch.tensor(values)}, ERROR
            yield operator, f"{name} in int32", {name: offsets.int()}, WORKS
        for name in ("k", "v"):
            if name in valid and "q" in valid and len(valid[name]) == T:
                yield operator, f"{name} of other T", {name: valid[name][:5]}, ERROR
                yield operator, f"{name} of fp64", {name: valid[name].double()}, ERROR
        for letter, axis in {"H": 1, "D": 2, "V": 2}.items():
            names = {"H": "qkv", "D": "qk", "V": "v"}[letter]
            heads = {x: valid[x].narrow(axis, 0, 0) for x in names if x in valid and valid[x].dim() == 3}
            if heads:
                yield operator, f"{letter} is 0", heads, ERROR
        if "max_seq_len" in valid and "seq_offsets" in valid:
            yield operator, "a sequence longer than N", {"seq_offsets": torch.tensor([0, 9, 9, 9])}, ERROR
        for name, values in NUMBERS.items():
            known = name in inspect.signature(function(operator)).parameters
            for value in values if known else ():
                yield operator, f"{name}={value!r}", {name: value}, ERROR
    for operator, changes in SPECIFIC:
        (name, value) = next(iter(changes.items()))
        yield operator, f"{name} {_short(value)}", changes, ERROR
    for (operator, name), changes in LARGE.items():
        yield operator, name, changes, WORKS


def _short(value: object) -> str:
    if value is HUGE:
        return "10^400"
    if isinstance(value, torch.Tensor):
        shown = "meta" if value.is_meta else value.flatten()[:4].tolist()
        return f"{value.dtype} {list(value.shape)} {shown}"
    if inspect.isfunction(value):
        return value.__name__
    if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) or part is HUGE for part in value):
        return "(" + ", ".join(_short(part) for part in value) + ")"
    return repr(value)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values that takes every other element of its memory."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def same_strided(operator: str) -> int:
    """Assert that strided arguments give the results of contiguous ones."""
    spread = {name: strided(x) for name, x in VALID[operator].items() if isinstance(x, torch.Tensor)}
    ours, theirs = (function(operator)(**VALID[operator] | more) for more in ({}, spread))
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs))):
        assert torch.allclose(a, b, atol=1e-6, equal_nan=True), f"differs by {(a - b).abs().max()}"
    return 0


def same_under_autocast(operator: str) -> int:
    """Assert that torch.autocast changes neither a bit nor a dtype."""
    ours = function(operator)(**VALID[operator])
    with torch.autocast("cpu", torch.bfloat16):
        theirs = function(operator)(**VALID[operator])
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs))):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()), "differs under autocast"
    return 0


def empty(operator: str, sequences: int) -> int:
    """Run the operator forward and backward without tokens."""
    changes = {name: torch.zeros(sequences + 1, dtype=torch.int64) for name in OFFSETS if name in VALID[operator]}
    for name, value in VALID[operator].items():
        if isinstance(value, torch.Tensor) and name not in OFFSETS and len(value) == T:
            changes[name] = value[:0].clone().requires_grad_(value.is_floating_point())
        elif name == "gates":
            changes[name] = [gate[:0] for gate in gates]
    out = function(operator)(**VALID[operator] | changes)
    out = out[0] if isinstance(out, tuple) else out
    if out.requires_grad:
        out.sum().backward()
    return 0


def cases(place: Path) -> list[Case]:
    listed = []
    for number, (operator, name, changes, expect) in enumerate(_changes()):
        run = lambda folder, o=operator, c=changes: call(o, c)
        # The short campaign has a sample: each case is fast, but there are many.
        quick = number % 20 == 0
        listed.append(Case("operator", f"operator {operator}: {name}", run, expect, short=quick, seconds=30))
    for operator, valid in VALID.items():
        if operator in (*PLANS, "rotatekv_compress", "catalogue_loss", "attention_plan"):
            continue
        listed.append(
            Case("operator", f"operator {operator}: strided", lambda f, o=operator: same_strided(o), WORKS, short=False)
        )
        name = f"operator {operator}: under autocast"
        listed.append(Case("operator", name, lambda f, o=operator: same_under_autocast(o), WORKS, short=False))
        for sequences in (0, 2) if "seq_offsets" in valid else ():
            run = lambda f, o=operator, s=sequences: empty(o, s)
            name = f"operator {operator}: no tokens in {sequences} sequences"
            listed.append(Case("operator", name, run, WORKS, short=False))
    return listed
