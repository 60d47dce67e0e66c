"""Every operator in torch's modes: forward-mode AD, torch.func, fake tensors, the default device.

The calls are those of `tests/hostile/operators.py`, one for each public function.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import hstu_sparse
from hstu_sparse import RelativeBias
from hstu_sparse.core.launch import INTERPRET
from tests.hostile.operators import VALID, N, T, function, random
from tests.operators.test_robustness import flat, is_floating

interpreter = pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")
TIMES = torch.arange(T) * 60
BIAS = RelativeBias(random(N), random(5), TIMES, TIMES)
BIASED = ("hstu_attention", "bsa_attention", "ring_hstu_attention")
# These read their inputs' values, since they return no tensor, or a tensor whose size depends on the values.
READ_VALUES = ("ring_plan", "whole_plan", "cut_sequences", "calibrate")
CACHES = ("rotatekv", "paged", "mustafar")
# References that pad sequences to their lengths, and rings, whose plans are Python numbers, read the offsets.
READ_OFFSETS = ("hstu_attention", "lightning_indexer", "index_scores", "sparse_attention", "indexer_loss")
READ_OFFSETS += ("ring_hstu_attention", *(name for name in VALID if "ring_flash_attn" in name and "varlen" not in name))


def call(name: str, arguments: dict, **options):
    return function(name)(**arguments | options)


def with_bias(name: str) -> dict:
    """Return the operator's valid arguments, with both biases where it has them."""
    return VALID[name] | ({"bias": BIAS} if name in BIASED else {})


def converted(value, convert):
    """Apply `convert` to every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, RelativeBias):
        return RelativeBias(*(None if x is None else convert(x) for x in value))
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [convert(x) for x in value]
    return value


FAKE = [name for name in VALID if name not in READ_VALUES and not name.startswith((*CACHES, "triton_hstu"))]


@pytest.mark.parametrize("name", FAKE)
def test_references_take_fake_tensors_or_say_why_not(name):
    arguments = with_bias(name)
    expected = call(name, arguments)
    with FakeTensorMode() as mode:
        fakes = {n: converted(x, mode.from_tensor) for n, x in arguments.items()}
        if name in READ_OFFSETS:
            with pytest.raises(TypeError, match="seq_offsets must be a tensor with values, got a fake tensor"):
                call(name, fakes)
            return
        actual = call(name, fakes)
    for ours, theirs in zip(flat(actual), flat(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("name", BIASED[:2])
def test_torch_func_differentiates_references_with_a_bias(name):
    arguments = with_bias(name)

    def loss(q, position, time):
        bias = BIAS._replace(position=position, time=time)
        return call(name, arguments, q=q, bias=bias).square().sum()

    inputs = arguments["q"], BIAS.position, BIAS.time
    actual = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for x, y in zip(actual, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(x, y)


# Every operator with kernels that differentiates, and the argument that has a tangent.
KERNELS = [name for name, arguments in VALID.items() if name in hstu_sparse.__all__ and name not in READ_VALUES]
KERNELS = [name for name in KERNELS if not name.startswith((*CACHES, "attention_plan", "heads_to"))]


# Without gradients, the calls of these operators differ from the others only in the kernels, which take seconds.
LONG = ("htree_attention", "bsa_attention", "lightning_indexer")
UNGRADED = [pytest.param(name, False, marks=pytest.mark.slow if name in LONG else []) for name in KERNELS]


@interpreter
@pytest.mark.parametrize(("name", "graded"), [*((name, True) for name in KERNELS), *UNGRADED])
def test_kernels_refuse_tangents(name, graded):
    """A kernel has no forward-mode derivative, so the tangent would be lost without an error."""
    arguments = dict(with_bias(name), **({"block_size": 16} if name == "bsa_attention" else {}))
    first = next(n for n, x in arguments.items() if is_floating(x))
    with forward_ad.dual_level(), torch.set_grad_enabled(graded):
        dual = forward_ad.make_dual(arguments[first], torch.ones_like(arguments[first]))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            call(name, arguments | {first: dual}, backend="triton")


@interpreter
@pytest.mark.parametrize("name", [name for name in KERNELS if "q" in VALID[name] or name == "catalogue_loss"])
def test_the_interpreter_multiplies_no_bf16(name):
    """The interpreter would multiply the numbers' bits: hstu_attention returned 7e8 for .02."""
    narrow = lambda x: x.bfloat16() if is_floating(x) else x
    arguments = {n: converted(x, narrow) for n, x in VALID[name].items()}
    with pytest.raises(
        TypeError, match=f"{name.removeprefix('ring_flash')}.*: Triton's interpreter cannot multiply bf16"
    ):
        call(name, arguments, backend="triton", **({"block_size": 16} if name == "bsa_attention" else {}))


@interpreter
def test_the_interpreter_transforms_no_long_rows_of_16_bits():
    """The second product of long rows is in bf16."""
    x = random(2, 256)
    with pytest.raises(TypeError, match="Triton's interpreter cannot multiply bf16"):
        hstu_sparse.hadamard_transform(x.half(), backend="triton")
    expected = hstu_sparse.hadamard_transform(x)
    torch.testing.assert_close(hstu_sparse.hadamard_transform(x, backend="triton"), expected)


def test_constants_are_on_the_device_that_is_asked_for():
    """Constants are stored, so a first call under another default device must not decide; the sizes are new."""
    from hstu_sparse.bias.buckets import bucket_starts, device_cells
    from hstu_sparse.bias.relative import _edges_on
    from hstu_sparse.cache.rotatekv.launch import angles, frequencies
    from hstu_sparse.layer.rotary import frequencies_of_pairs
    from hstu_sparse.ring.plan import fixed_plan

    cpu = torch.device("cpu")
    calls = {
        device_cells: (61, cpu),
        bucket_starts: (61, cpu),
        _edges_on: (61, cpu),
        angles: (9.0, 3, 2, 5, cpu),
        frequencies: (9.0, 3, cpu),
        frequencies_of_pairs: (7, 3, 61, cpu),
        fixed_plan: (3, 61, 1, 2, True, cpu),
    }
    for make, arguments in calls.items():
        torch.func.grad(lambda x, make=make, arguments=arguments: [x.sum(), make(*arguments)][0])(torch.ones(2))
        with torch.device("meta"), torch.inference_mode():
            first = flat(make(*arguments))
        again = flat(make(*arguments))
        assert all(x is y for x, y in zip(first, again, strict=True)), make
        tensors = [x for x in first if isinstance(x, torch.Tensor)]
        assert tensors and all(x.device == cpu and not x.is_inference() for x in tensors), make
        assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors), make
        if make is not fixed_plan:
            with FakeTensorMode():
                assert flat(make(*arguments))[0] is not first[0], make
