"""Check the promises of every operator: autocast, kinds of tensors, switches, numbers that are too large.

The calls are those of `tests/hostile/operators.py`, one for each public function.
"""

import inspect
import itertools

import pytest
import torch

import hstu_sparse
from hstu_sparse import compat
from hstu_sparse.core.launch import INTERPRET
from tests.hostile.operators import VALID, function, random

NAN = float("nan")
HUGE = 10**400
# Functions that are another form of an operator in VALID, and functions that are not operators.
SAME = {name for name in compat.__all__ if "packed" in name} | {
    "TritonHSTUBSAAttention",
    "mustafar_decompress_with_hadamard_inverse",
}


# Argument of a function of `compat` -> its name in the operator.
ALIASES = dict.fromkeys(("cu_seqlens", "q_offsets", "x_offsets"), "seq_offsets") | {"softmax_scale": "scale"}


def flat(result) -> list:
    """Return the tensors and other parts of a result as a flat list."""
    if isinstance(result, hstu_sparse.RotateKVCache):
        return [result.seq_offsets, result.pages, *result.tensors.values()]
    if isinstance(result, tuple | list):
        return [part for x in result for part in flat(x)]
    return [result]


def assert_same(ours, theirs):
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        else:
            assert a == b


def is_floating(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def leaves_of(arguments: dict, dtype: torch.dtype | None = None) -> dict:
    """Return the arguments of a call, floating-point tensors as leaves with gradients, of `dtype`."""
    return {n: x.detach().to(dtype or x.dtype).requires_grad_() if is_floating(x) else x for n, x in arguments.items()}


def parameters(name: str) -> set[str]:
    return set(inspect.signature(function(name)).parameters)


def test_every_operator_is_here():
    public = {name for name in hstu_sparse.__all__ if not name[0].isupper()} | set(compat.__all__)
    assert public - SAME - {"bsa_plan", "tokens_to_heads"} <= VALID.keys()  # these take lists and any number of tensors


@pytest.mark.parametrize("name", VALID)
def test_autocast_changes_nothing(name):
    expected = function(name)(**VALID[name])
    with torch.autocast("cpu", torch.bfloat16):
        actual = function(name)(**VALID[name])
        assert torch.is_autocast_enabled("cpu")
    assert_same(actual, expected)


@pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["catalogue_loss", "lightning_indexer", "norm_gate", "query_gates", "silu_parts"])
def test_autocast_changes_nothing_about_kernels(name):
    leaves = leaves_of(VALID[name])
    differentiable = [x for x in leaves.values() if is_floating(x)]

    def run():
        out = flat(function(name)(**leaves, backend="triton"))
        return out, torch.autograd.grad(sum(x.sin().sum() for x in out if x.requires_grad), differentiable)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(run(), expected)


def test_an_error_leaves_autocast_as_it_was():
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match="x must be a tensor"):
            hstu_sparse.layer_norm(None)
        assert torch.is_autocast_enabled("cpu")


def stored_otherwise(x: torch.Tensor):
    """Yield (kind, the tensor in that form) for tensors that are not plain memory."""
    yield "sparse_coo", x.to_sparse()
    if x.dim() == 2:
        yield "sparse_csr", x.to_sparse_csr()
    if x.dtype == torch.float32 and x.dim():
        yield "mkldnn", x.to_mkldnn()
    if x.dim():
        yield "nested", torch.nested.nested_tensor([x, x])
        yield "nested", torch.nested.nested_tensor([x, x], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:Sparse")
@pytest.mark.parametrize("name", VALID)
def test_tensors_of_another_storage_are_named(name):
    for argument, x in VALID[name].items():
        for kind, stored in stored_otherwise(x) if isinstance(x, torch.Tensor) else ():
            with pytest.raises(TypeError, match=f"must be a strided tensor, got a {kind} one") as error:
                function(name)(**VALID[name] | {argument: stored})
            assert str(error.value).split()[0] in (argument, ALIASES.get(argument))


@pytest.mark.parametrize("name", sorted(VALID.keys() - {"heads_to_tokens"}))  # which reads no values
def test_tensors_without_values_are_named(name):
    arguments = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in VALID[name].items()}
    if any(isinstance(x, torch.Tensor) for x in arguments.values()):
        with pytest.raises((TypeError, ValueError), match=r"meta|must be on") as error:
            function(name)(**arguments)
        assert "\n" not in str(error.value)


SWITCHES = ("causal", "normalize", "return_lse", "position", "zigzag", "return_block_indices", "return_attn_probs")
SWITCHED = [(name, switch) for name in VALID for switch in SWITCHES if switch in parameters(name)]


@pytest.mark.parametrize(("name", "switch"), [case for case in SWITCHED if case != ("embed_inputs", "position")])
@pytest.mark.parametrize("value", ["no", 1, None, torch.tensor(True)], ids=repr)
def test_switches_are_true_or_false(name, switch, value):
    with pytest.raises(TypeError, match=f"{switch} must be True or False, got"):
        function(name)(**VALID[name] | {switch: value})


# These also round in between: a cache to its few bits, and a layer between its two operators.
ROUNDING = (
    *("rotatekv_compress", "rotatekv_attention", "rotatekv_decompress", "rotatekv_self_attention"),
    "triton_hstu_attention_with_bsa",
)
ROUNDED_ONCE = [
    name
    for name, arguments in VALID.items()
    if name not in ROUNDING and "ring_flash_attn" not in name and any(map(is_floating, arguments.values()))
]


def with_gradients(name: str, arguments: dict, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Results and gradients of a call whose results have gradients; with `dtype` in fp32, rounded to it at the end."""
    working = torch.float32 if dtype else None
    leaves = {n: x.to(working or x.dtype).detach().requires_grad_() for n, x in arguments.items() if is_floating(x)}
    if "gates" in arguments:
        arguments = arguments | {"gates": [gate.to(working or gate.dtype) for gate in arguments["gates"]]}
    out = [x for x in flat(function(name)(**arguments | leaves)) if is_floating(x)]
    results = [x.detach() for x in out]
    graded = [x for x in out if x.requires_grad]
    if graded:
        ones = [torch.ones_like(x) for x in graded]
        results += [
            x for x in torch.autograd.grad(graded, [*leaves.values()], ones, allow_unused=True) if x is not None
        ]
    return results


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_16_bits_are_computed_with_in_fp32(name, dtype):
    """Results and gradients are those of fp32, rounded at the end, so that finite ones are finite in fp16, too."""
    arguments = {n: (100 * x).to(dtype) if is_floating(x) else x for n, x in VALID[name].items()}
    if "gates" in arguments:
        arguments["gates"] = [gate.to(dtype) for gate in arguments["gates"]]
    narrow, wide = with_gradients(name, arguments), with_gradients(name, arguments, dtype)
    for x, y in zip(narrow, wide, strict=True):
        assert x.dtype in (dtype, torch.float32)
        assert torch.equal(x.nan_to_num(), y.to(x.dtype).nan_to_num())


def test_ordinary_inputs_overflow_nowhere():
    """Test fp16 inputs with scores, sums of a block or squares beyond 65504."""
    half = torch.float16
    large, v, offsets = (
        torch.full((9, 2, 8), 200.0, dtype=half),
        torch.full((9, 2, 8), 0.5, dtype=half),
        torch.tensor([0, 9]),
    )
    keys, chosen = torch.full((9, 2, 8), 3e3, dtype=half), torch.arange(9)[:, None].int()
    gates = [torch.full((9, 2), 0.5, dtype=half)] * 3
    options = {"block_size": 4, "window_size": 2}
    results = {
        "flash": hstu_sparse.flash_attention(large, large, v, offsets),
        "sparse": hstu_sparse.sparse_attention(large, large[:, 0], v[:, 0], chosen, offsets),
        "dense": hstu_sparse.hstu_attention(large, large, v, offsets, 2**16),
        "ring": hstu_sparse.ring_hstu_attention(large, large, v, torch.arange(9), 2**16, seq_offsets=offsets),
        "cache": compat.mustafar_attention_with_rope(large, offsets, large, v, offsets, 9, activation="softmax"),
        "bsa, keys": hstu_sparse.bsa_attention(v / 100, keys, v, offsets, 16, gates, block_size=128, window_size=2),
        "bsa, values": hstu_sparse.bsa_attention(v, v, v * 1200, offsets, 64, gates, **options),
        "gates": hstu_sparse.query_gates(large, *(torch.full(size, -1.0, dtype=half) * s for size, s in (
            ((8, 8), 200), ((8,), 1), ((3, 8), 200), ((3,), 1),
        ))),
        "hadamard": hstu_sparse.hadamard_transform(torch.full((2, 8), 2e4, dtype=half)),
    }  # fmt: skip
    for name, x in results.items():
        assert x.dtype == half
        assert x.isfinite().all(), name


def test_a_residual_is_summed_in_fp32():
    x, added = (torch.full((2, 3), value, dtype=torch.bfloat16) for value in (256.0, 1.0))
    for bias in (added[0], added[0].float()):
        assert torch.equal(hstu_sparse.residual_add(x, added, bias), torch.full_like(x, 258.0))


CONTIGUOUS = ("norm_gate", "layer_norm", "residual_add", "embed_inputs", "rotary", "hadamard_transform", "query_gates")


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_results_are_contiguous_as_promised(name):
    """Whatever the strides of inputs are."""
    arguments = {n: x.mT.contiguous().mT if is_floating(x) and x.dim() > 1 else x for n, x in VALID[name].items()}
    assert not all(x.is_contiguous() for x in arguments.values() if isinstance(x, torch.Tensor))
    assert function(name)(**arguments).is_contiguous()


NUMBERS = ("scale", "scaling", "softmax_scale", "max_seq_len", "window_size", "eps", "rope_base", "temperature", "clip")
NUMBERS += ("top_k", "block_size", "block_counts", "compression_rate", "chunk_offset", "sink_tokens", "quant_group")


@pytest.mark.parametrize(("name", "number"), [x for x in itertools.product(VALID, NUMBERS) if x[1] in parameters(x[0])])
def test_numbers_beyond_every_type(name, number):
    for value in (HUGE, -HUGE):
        pair = number == "window_size" and "causal" in parameters(name)
        with pytest.raises(ValueError, match=rf"{ALIASES.get(number, number)}.* must be .*2\^1328 or more") as error:
            function(name)(**VALID[name] | {number: (value, 0) if pair else value})
        assert len(str(error.value)) < 200


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, float("inf")])
def test_a_temperature_in_a_tensor_is_above_0(value):
    with pytest.raises(ValueError, match="temperature must be a finite number above 0"):
        hstu_sparse.catalogue_loss(**VALID["catalogue_loss"] | {"temperature": torch.tensor(value)})


LAYER = {"embedding_dim": 8, "linear_hidden_dim": 4, "attention_dim": 4, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_heads", 0),
        ("attention_dim", 0),
        ("block_size", 0),
        ("window_size", -1),
        ("dropout", 2.0),
        ("dropout", NAN),
    ],
)
def test_the_research_layer_checks_its_sizes(name, value):
    compat.TritonHSTUBSAAttention(**LAYER)
    with pytest.raises(ValueError, match=name):
        compat.TritonHSTUBSAAttention(**LAYER | {name: value})


# Left out of the second derivatives below: functions whose results have no gradient, and the one whose gradients pass
# straight through codes, which no difference of results shows.
GRADED = [
    name
    for name, arguments in VALID.items()
    if "ring_flash_attn" not in name
    and name != "rotatekv_self_attention"
    and any(x.requires_grad for x in flat(function(name)(**leaves_of(arguments))) if is_floating(x))
]


@pytest.mark.parametrize("name", GRADED)
def test_second_derivatives_are_right_or_refused(name):
    """No second derivative is silently 0. Operators that take biases get them."""
    arguments = leaves_of(VALID[name], torch.float64)
    names = [n for n, x in arguments.items() if is_floating(x)]
    tables = ()
    if "bias" in parameters(name) and name != "residual_add":
        tokens = len(arguments["seq_offsets"]) and int(arguments["seq_offsets"][-1])
        tables = (
            random(arguments.get("max_seq_len", tokens)).double().requires_grad_(),
            random(3).double().requires_grad_(),
        )

    def slope(leaves: list, along: list) -> torch.Tensor:
        """Compute the derivative in a direction."""
        changed = dict(zip(names, leaves))
        if tables:
            changed["bias"] = hstu_sparse.RelativeBias(*leaves[len(names) :], torch.arange(tokens) * 60)
        outputs = flat(function(name)(**arguments | changed))
        total = sum(torch.tanh(x.nan_to_num(neginf=0.0)).sum() for x in outputs if x.requires_grad)
        first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        return sum((x * u).sum() for x, u in zip(first, along) if x is not None)

    leaves = [arguments[n] for n in names] + list(tables)
    generator = torch.Generator().manual_seed(0)
    u, w = ([torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in leaves] for _ in "uw")
    if name in ("indexer_loss", "compute_index_loss_sparse", "ring_hstu_attention"):
        with pytest.raises(RuntimeError, match="has no second derivative"):
            slope(leaves, u)
        return
    second = torch.autograd.grad(slope(leaves, u), leaves, allow_unused=True)
    outputs = sum((x * y).sum() for x, y in zip(second, w) if x is not None)
    step = 1e-5
    ahead, behind = (slope([x + sign * step * y for x, y in zip(leaves, w)], u) for sign in (1, -1))
    torch.testing.assert_close(outputs, ((ahead - behind) / (2 * step)).detach(), rtol=1e-4, atol=1e-6)


QKV = {name: VALID["hstu_attention"][name] for name in ("q", "k", "v")}
OFFSETS, OTHER = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 3, 5, 9])  # as many sequences and tokens


@pytest.mark.parametrize("name", ["ring_hstu_attention", "ring_flash_attention"])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (OTHER, r"plan is for another batch: its seq_offsets\[1\] is 3, got 4"),
        (OTHER[[0, 1, 3]], "plan is for B=2 sequences, got B=3"),
    ],
)
def test_a_rings_plan_is_for_one_batch(name, offsets, message):
    arguments = VALID[name] | {"plan": hstu_sparse.ring_plan(OFFSETS)}
    assert_same(function(name)(**arguments), function(name)(**VALID[name]))
    with pytest.raises(ValueError, match=message):
        function(name)(**VALID[name] | {"plan": hstu_sparse.ring_plan(offsets)})
    with pytest.raises(ValueError, match="plan is for rank 1 of 2, this is rank 0 of 1"):
        function(name)(**VALID[name] | {"plan": hstu_sparse.whole_plan(2 * OFFSETS, 1, 2)})


@pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["hstu_attention", "bsa_attention"])
def test_a_kernels_plan_is_for_one_batch(name):
    bsa = name == "bsa_attention"
    more = {"block_size": 16} if bsa else {}
    times = torch.arange(9) * 60
    candidates = {} if bsa else {"num_targets": torch.tensor([1, 0, 2])}

    def bias(timestamps):
        return hstu_sparse.RelativeBias(time=random(4), timestamps=timestamps)

    def make_plan(offsets, timestamps, **changed):
        where = dict(seq_offsets=offsets, max_seq_len=6, bias=bias(timestamps), backend="triton") | more
        if bsa:
            return hstu_sparse.bsa_plan(QKV["q"], **where)
        return hstu_sparse.attention_plan(QKV["q"], QKV["v"], **where | candidates | changed)

    arguments = dict(seq_offsets=OFFSETS, max_seq_len=6, bias=bias(times), backend="triton") | QKV | more | candidates
    if bsa:
        arguments["gates"] = VALID[name]["gates"]
    right = make_plan(OFFSETS.clone(), times.clone())
    assert_same(function(name)(**arguments, plan=right), function(name)(**arguments))
    wrong = [make_plan(OTHER, times), make_plan(OFFSETS, times * 2), hstu_sparse.ring_plan(OFFSETS)]
    if not bsa:
        wrong.append(make_plan(OFFSETS, times, num_targets=torch.tensor([0, 0, 2])))
    for plan in wrong:
        with pytest.raises((TypeError, ValueError), match=r"plan was made for|plan must be (Attention|Block)Plan"):
            function(name)(**arguments, plan=plan)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("selection_group", [1, 4, 2**16])
def test_a_block_beyond_every_sequence_takes_no_memory(selection_group, timed):
    """Check that nine tokens need no 2^16 squared scores, which would take 100 GB; a block of 16 gives the same."""
    bias = hstu_sparse.RelativeBias(random(6), random(4) if timed else None, torch.arange(9) * 60 if timed else None)
    call = VALID["bsa_attention"] | {"bias": bias, "return_block_indices": True}
    actual, expected = (
        hstu_sparse.bsa_attention(**call | {"block_size": size, "selection_group": min(size, selection_group)})
        for size in (2**16, 16)
    )
    torch.testing.assert_close(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
