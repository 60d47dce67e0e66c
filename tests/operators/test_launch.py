"""Test `launch.run`: its keys against what Triton specialises on, and that nothing else launches a kernel."""

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hstu_sparse.core import launch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
ROOT = Path(__file__).parents[2]


class Pair(NamedTuple):
    """An argument with two parts."""

    first: object
    second: object


class OnGPU(torch.Tensor):
    """A CPU tensor that says that it is on GPU 0."""

    def get_device(self):
        return 0


def tensor(dtype=torch.float32, offset=0):
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(OnGPU)


def kernel_function(x, plain, value, alignment, A, B=3):
    """Have the signature of a kernel, and no body."""


kernel_function.__annotations__ = {"A": "tl.constexpr", "B": "tl.constexpr"}


class Recorded(JITFunction):
    """A kernel whose dispatch compiles nothing: it keeps Triton's own key of each call."""

    def __init__(self):
        super().__init__(
            kernel_function, do_not_specialize=["value"], do_not_specialize_on_alignment=["alignment"]
        )  # fmt: skip
        self.binder = create_function_from_signature(self.signature, self.params, BACKEND)
        self.dispatched, self.launched = [], []

    def key_of(self, *arguments, **settings) -> str:
        bound, kinds, options = self.binder(*arguments, **settings)
        # As `JITFunction.run` and `compute_cache_key` do it, constants with their types.
        constants = {name: bound[name] for name in ("A", "B")}
        return repr((kinds, sorted(options.items()), constants))

    def run(self, *arguments, grid, warmup, **settings):
        key = self.key_of(*arguments, **settings)
        self.dispatched.append(key)
        return Compiled(self, key)


class Compiled(NamedTuple):
    """A compiled kernel whose launches are recorded."""

    kernel: Recorded
    key: str

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, self.key, arguments))


VALUES = {
    "fp32": tensor(),
    "fp32 again": tensor(),
    "fp32, 4 bytes on": tensor(offset=1),
    "fp32, 16 bytes on": tensor(offset=4),
    "parameter": torch.nn.Parameter(torch.zeros(64)),
    "fp16": tensor(torch.float16),
    "fp64": tensor(torch.float64),
    "int32": tensor(torch.int32),
    "int64": tensor(torch.int64),
    "int64, 8 bytes on": tensor(torch.int64, 1),
    "uint8": tensor(torch.uint8),
    "None": None,
    "True": True,
    "False": False,
    **{str(n): n for n in (0, 1, 2, 3, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63)},
    **{str(n): n for n in (-(2**31), -(2**40))},
    "0.0": 0.0,
    "1.0": 1.0,
    "2.5": 2.5,
    "tuple": (tensor(), 16, None),
    "tuple, another number": (tensor(), 32, None),
    "tuple, an odd number": (tensor(), 17, None),
    "tuple, 4 bytes on": (tensor(offset=1), 16, None),
    "tuple of one more": (tensor(), 16, None, 1),
    "named tuple": Pair(tensor(), 16),
    "named tuple with None": Pair(tensor(), None),
    "named tuple of a tuple": Pair(tensor(), (1, 2)),
    "descriptor": TensorDescriptor(torch.zeros(8, 16), [8, 16], [16, 1], [4, 16]),
    "descriptor of another shape": TensorDescriptor(torch.zeros(16, 16), [16, 16], [16, 1], [4, 16]),
    "descriptor of another block": TensorDescriptor(torch.zeros(8, 16), [8, 16], [16, 1], [8, 16]),
    "descriptor of fp16": TensorDescriptor(torch.zeros(8, 16).half(), [8, 16], [16, 1], [4, 16]),
}  # fmt: skip


@pytest.mark.parametrize("parameter", ["plain", "value", "alignment"])
def test_keys_differ_exactly_where_triton_s_do(parameter):
    """Keys differ for two values of a parameter exactly where Triton's do, with and without its exemptions."""
    kernel = Recorded()
    flags = {p.name: (p.do_not_specialize, p.do_not_specialize_on_alignment) for p in kernel.params}
    place = list(flags).index(parameter)
    keys = {}
    for name, value in VALUES.items():
        arguments = [tensor(), 7, 7, 7]
        arguments[place] = value
        ours = launch.specialization(tuple(arguments), tuple(flags.values()))
        keys[name] = ours, kernel.key_of(*arguments, A=1)
    assert len({theirs for _, theirs in keys.values()}) > 20
    for (a, (ours, theirs)), (b, (our_other, their_other)) in itertools.combinations(keys.items(), 2):
        assert (ours == our_other) == (theirs == their_other), (parameter, a, b)


CALLS = [
    *[((tensor(), value, 7, 7), {"A": 1}) for value in VALUES.values()],
    *[((tensor(), 7, value, 7), {"A": 1}) for value in VALUES.values()],
    *[((tensor(), 7, 7, value), {"A": 1}) for value in VALUES.values()],
    *[((tensor(), 7, 7, 7), {"A": a}) for a in (1, 2, True, 1.0, "x", None, torch.float32, (1, 2), (1, True))],
    *[((tensor(), 7, 7, 7), {"A": Pair(1, a)}) for a in (1, True, 1.0, "x", (1, 1), (1, 1.0))],
    *[((tensor(), 7, 7, 7), {"A": 1, "B": b}) for b in (1, 2, 3, False, 0)],
    *[((tensor(), 7, 7, 7), {"A": 1, "num_warps": n}) for n in (1, 4, 8)],
    ((tensor(), 7, 7, 7), {"A": 1, "num_stages": 4}),
]


def test_every_call_gets_the_kernel_that_triton_would_give_it():
    kernel = Recorded()
    for _ in range(2):
        for arguments, settings in CALLS:
            launch.run(kernel, (5, 2), *arguments, **settings)
    keys = [kernel.key_of(*arguments, **settings) for arguments, settings in CALLS]
    # Each kernel is dispatched once (twice if a default is also written out). Later calls launch it directly and pass
    # all parameters.
    assert set(kernel.dispatched) == set(keys) and len(kernel.dispatched) <= len(set(keys)) + 1
    assert len(kernel.dispatched) + len(kernel.launched) == 2 * len(CALLS)
    for (arguments, settings), (grid, key, passed) in zip(CALLS, kernel.launched[-len(CALLS) :], strict=True):
        assert grid == (5, 2, 1) and key == kernel.key_of(*arguments, **settings)
        assert all(x is y for x, y in zip(passed, arguments)) and passed[4:] == (settings["A"], settings.get("B", 3))


def test_the_device_is_that_of_the_first_tensor_also_in_a_tuple():
    kernel = Recorded()
    for first in (Pair(3, Pair(None, tensor())), Pair(tensor(), 3)):
        for _ in range(2):
            launch.run(kernel, 1, first, 7, 7, 7, A=1)
    assert len(kernel.dispatched) == len(kernel.launched) == 2
    with pytest.raises(TypeError, match="no argument of the kernel is a tensor"):
        launch.run(kernel, 1, Pair(3, None), 7, 7, 7, A=1)


def test_kernels_of_one_name_are_told_apart():
    kernels = Recorded(), Recorded()
    for _ in range(2):
        for kernel in kernels:
            launch.run(kernel, 1, tensor(), 7, 7, 7, A=1)
    assert [len(kernel.dispatched) for kernel in kernels] == [len(kernel.launched) for kernel in kernels] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [((7, 7), dict(alignment=7, A=1), "alignment must be given by position"), ((7, 7, 7), {}, "A has no value")],
)
def test_refused(arguments, settings, message):
    with pytest.raises(TypeError, match=message):
        launch.run(Recorded(), 1, tensor(), *arguments, **settings)


def launched_without_run(code: str) -> list[int]:
    """Lines that launch a kernel by Triton's own interface: kernel[grid](...), kernel.run(...), kernel.warmup(...)."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        function, name = node.func, ""
        if isinstance(function, ast.Subscript):
            value = function.value.func if isinstance(function.value, ast.Call) else function.value
            name = getattr(value, "attr", getattr(value, "id", ""))
            if isinstance(function.slice, ast.Tuple) or "kernel" in name or name == "compiled":
                lines.append(node.lineno)
        elif isinstance(function, ast.Attribute) and function.attr in ("run", "warmup"):
            name = getattr(function.value, "attr", getattr(function.value, "id", ""))
            if "kernel" in name:
                lines.append(node.lineno)
    return lines


def test_what_launches_without_run_is_found():
    code = "a_kernel[(3,)](x)\nm.a_kernel[grid](x)\nhopper_kernel()[3](x)\nf[1, 2](x)\na_kernel.run(x)\nPLANS[way](x)"
    assert launched_without_run(code) == [1, 2, 3, 4, 5]


def test_kernels_are_launched_only_by_run():
    files = [
        file for file in (ROOT / "hstu_sparse").rglob("*.py") if file.name != "launch.py" or file.parent.name != "core"
    ]
    launches = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in launched_without_run(file.read_text())]
    assert len(files) > 80 and not launches, launches


def test_a_launch_config():
    config = launch.LaunchConfig(4, maxnreg=128, programs=2, BLOCK_M=64, TMA=True)
    assert dict(**config) == dict(num_warps=4, maxnreg=128, BLOCK_M=64, TMA=True)
    assert (config.BLOCK_M, config.num_warps, config.programs) == (64, 4, 2)
    smaller = config.replace(BLOCK_M=32, num_stages=1)
    assert smaller == launch.LaunchConfig(4, 1, 128, programs=2, BLOCK_M=32, TMA=True) != config
    assert config.replace() == config and hash(config.replace()) == hash(config) and config.BLOCK_M == 64
    assert repr(smaller) == "LaunchConfig(BLOCK_M=32, TMA=True, num_warps=4, num_stages=1, maxnreg=128, programs=2)"
    with pytest.raises(AttributeError, match=r"replace\(BLOCK_M=...\)"):
        config.BLOCK_M = 32
    with pytest.raises(AttributeError, match="BLOCK_N"):
        _ = config.BLOCK_N


def test_configurations_are_cached_and_overridden():
    calls = []

    @launch.configuration
    def config(width, arch):
        calls.append(width)
        return launch.LaunchConfig(4, BLOCK=width)

    assert config(16, 90) is config(16, 90) and calls == [16]
    with launch.override(config, lambda chosen, width, arch: chosen.replace(ARCH=arch)):
        assert config(16, 90) == launch.LaunchConfig(4, BLOCK=16, ARCH=90)
        with launch.override(config, lambda *_: 3):
            assert config(16, 90) == 3
        assert config(16, 90) == launch.LaunchConfig(4, BLOCK=16, ARCH=90)
    with pytest.raises(ZeroDivisionError), launch.override(config, lambda *_: 1 / 0):
        config(16, 90)
    assert config(16, 90) == launch.LaunchConfig(4, BLOCK=16)
    with pytest.raises(TypeError, match="decorated by `configuration`"), launch.override(print, lambda *_: None):
        pass


def test_an_override_reaches_the_launch():
    from hstu_sparse import flash_attention
    from hstu_sparse.flash.launch import fwd_config
    from tests.support.budgets import make_jagged, make_offsets

    q, configs = make_jagged((40, 3), (2, 16)), []
    right = flash_attention(q, q, q, make_offsets((40, 3)), causal=True, backend="triton")

    def change(chosen, *_):
        configs.append(chosen)
        return chosen.replace(BLOCK_M=16, BLOCK_N=16)

    with launch.override(fwd_config, change):
        actual = flash_attention(q, q, q, make_offsets((40, 3)), causal=True, backend="triton")
    assert len(configs) == 1 and configs[0].BLOCK_M != 16
    torch.testing.assert_close(actual, right)


# Every kernel of every operator, without a compiler: what `run` would ask of its signature on a GPU.
EVERY_LAUNCH = """
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from tools import ahead
from hstu_sparse.core import launch
from tests.random.cases import NAMES, operator

launched = set()

def check(self, *arguments, grid, warmup, **settings):
    launched.add(self.fn.__name__)
    launch._constants(self, len(arguments), settings)
    unknown = set(settings) - set(self.arg_names) - {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}
    assert not unknown and not any(p.is_constexpr for p in self.params[: len(arguments)]), (self.fn.__name__, unknown)
    tuples = [type(x) for x in settings.values() if isinstance(x, tuple)]
    # Triton 3.8 passes the fields of a constant named tuple to functions, without its properties.
    assert not any(isinstance(member, property) for one in tuples for member in vars(one).values()), self.fn.__name__
    hash((launch.specialization(arguments, launch._Kernel(self).exempt), launch._settings_key(settings)))

JITFunction.run, launch.cpu_architecture = check, 90
driver.set_active(ahead._Driver(90))
for name in NAMES:
    for case in operator(name).launches():
        case.call()
assert len(launched) > 70, launched
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors pass for a GPU's where there is none")
def test_every_kernel_can_be_launched_by_its_signature():
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EVERY_LAUNCH], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
