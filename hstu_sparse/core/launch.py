"""Launch Triton kernels: configurations, the precision of products, and `run`.

Kernels are compiled for CUDA tensors. With TRITON_INTERPRET=1, which must be set before the first import of triton,
they run on the CPU. There products of bf16 raise an error, since the interpreter computes them wrongly.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(0, (n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def padded_head(size: int) -> int:
    """Return the width of the tile for a head of `size`: a power of two, at least 16, the minimum of tl.dot."""
    return max(16, next_power_of_2(size))


# The GPU that CPU tensors stand for, in the interpreter and when tools compile kernels ahead of time.
cpu_architecture, cpu_multiprocessors = 90, 2
_imagined = False


@contextlib.contextmanager
def imagined(multiprocessors: int):
    """Treat fake CPU tensors like tensors of a GPU with this number of multiprocessors; kernels are not launched."""
    global cpu_multiprocessors, _imagined
    before = cpu_multiprocessors, _imagined
    cpu_multiprocessors, _imagined = multiprocessors, True
    try:
        yield
    finally:
        cpu_multiprocessors, _imagined = before


def is_imagined() -> bool:
    """Return whether the code runs inside `imagined`."""
    return _imagined


def architecture(device: torch.device) -> int:
    """Return the compute capability as one number: 90 for 9.0."""
    return _capability(device) if device.type == "cuda" else cpu_architecture


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; for CPU tensors 2, or that of `imagined`."""
    return _multiprocessors(device) if device.type == "cuda" else cpu_multiprocessors


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device):
    """Make `device` the current CUDA device, on which kernels are launched, inside the context."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def allow_descriptors() -> None:
    """Set Triton's allocator, before a launch of a kernel that creates tensor descriptors in global memory."""
    import triton

    triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def precision(dtype: torch.dtype, method: str = "ieee") -> str:
    """Return `input_precision` of tl.dot, by the same rule in every operator (docs/performance.md).

    Products of 16-bit numbers are exact. Products of fp32 numbers are TF32 if torch's setting for matrix products
    allows it, otherwise as accurate as fp32 by `method`.

    Args:
        dtype: the dtype of the operands.
        method: "ieee" computes without tensor cores. "tf32x3" and "bf16x6" split each number and compute several
            products on tensor cores, with a few more roundings; kernels use them where they were measured to be faster.
    """
    if dtype != torch.float32:
        return "ieee"
    # `fp32_precision` reflects both of torch's settings; reading `allow_tf32` raises if a user has set both.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else method


class LaunchConfig:
    """The configuration of a launch: sizes of tiles, other constants of the kernel, and options of Triton. Immutable.

    `run(kernel, grid, *arguments, **config)` passes all settings except `programs` to the kernel. `config.BLOCK_M` is
    one setting; `config.replace(BLOCK_M=64)` is a copy with another value.

    Args:
        num_warps, num_stages, maxnreg: options of Triton; None for Triton's default.
        programs: the number of programs for each multiprocessor, for launchers that divide work by it.
        settings: constants of the kernel by name, and other options of Triton (enable_fp_fusion).
    """

    def __init__(
        self,
        num_warps: int,
        num_stages: int | None = None,
        maxnreg: int | None = None,
        *,
        programs: int | None = None,
        **settings,
    ):
        options = dict(num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)
        settings |= {name: value for name, value in options.items() if value is not None}
        self.__dict__.update(settings, programs=programs)
        self.__dict__["_settings"] = settings

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value):
        raise AttributeError(f"a LaunchConfig is immutable: use replace({name}=...)")

    def keys(self):
        return self._settings.keys()

    def __getitem__(self, name: str):
        return self._settings[name]

    def replace(self, **changes) -> "LaunchConfig":
        return LaunchConfig(**{"programs": self.programs, **self, **changes})

    def __eq__(self, other):
        return isinstance(other, LaunchConfig) and vars(self) == vars(other)

    def __hash__(self):
        return hash((self.programs, *sorted(self._settings.items())))

    def __repr__(self):
        fields = self._settings | ({} if self.programs is None else {"programs": self.programs})
        return f"LaunchConfig({', '.join(f'{name}={value}' for name, value in fields.items())})"


_overrides: dict[Callable, Callable] = {}


def configuration(function: Callable) -> Callable:
    """Decorate a function that returns a `LaunchConfig`, or chooses between kernels. `override` can change its result.

    The result is cached by the arguments.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def chosen(*arguments):
        default, change = cached(*arguments), _overrides.get(chosen)
        return default if change is None else change(default, *arguments)

    _overridable.add(chosen)
    return chosen


_overridable: set[Callable] = set()


@contextlib.contextmanager
def override(function: Callable, change: Callable):
    """Make `function` return change(result, *arguments) inside the context.

    Benchmarks and tests use no other way to change the launches of the library.

    Raises:
        TypeError: the function is not decorated by `configuration`.
    """
    if function not in _overridable:
        raise TypeError(f"expected a function decorated by `configuration`, got {function}")
    before = _overrides.get(function)
    _overrides[function] = change
    try:
        yield
    finally:
        if before is None:
            del _overrides[function]
        else:
            _overrides[function] = before


class _Kernel:
    """The compiled forms of one kernel."""

    def __init__(self, kernel):
        self.kernel = kernel  # keeps the kernel alive, so that its id stays unique
        self.exempt = tuple((p.do_not_specialize, p.do_not_specialize_on_alignment) for p in kernel.params)
        self.compiled: dict[tuple, tuple] = {}  # key -> compiled kernel, its constants in the order of the signature


# Indexed by a kernel's id: hashing a triton.jit function acquires a lock and builds a string.
_kernels: dict[int, _Kernel] = {}


def run(kernel, grid: int | tuple[int, ...], *arguments, **settings) -> None:
    """Launch kernel[grid](*arguments, **settings); on a GPU from the second launch on without Triton's dispatch.

    All kernels are launched by this function. Triton's dispatch takes longer than a short kernel: it builds strings in
    every call. `specialization` is a cheaper key, with which a call gets the kernel that Triton would choose.

    Args:
        kernel: a triton.jit function whose constexprs follow all other parameters.
        grid: the number of programs, or a tuple of up to three numbers.
        arguments: all non-constexpr arguments in order; they may be named tuples. The kernel runs on the device of the
            first tensor.
        settings: the constexprs by name, which may be named tuples, and options of Triton (num_warps, num_stages,
            maxnreg, enable_fp_fusion).
    """
    grid = (grid,) if isinstance(grid, int) else grid
    device = _device(arguments)
    if device < 0:  # interpreted, compiled ahead of time, or imagined
        if not _imagined:
            kernel[grid](*arguments, **settings)
        return
    state = _kernels.get(id(kernel))
    if state is None:
        state = _kernels[id(kernel)] = _Kernel(kernel)
    key = (device, *specialization(arguments, state.exempt), *_settings_key(settings))
    cached_launch = state.compiled.get(key)
    if cached_launch is None:
        constants = _constants(kernel, len(arguments), settings)
        state.compiled[key] = _first_launch(kernel, grid, arguments, settings), constants
    else:
        compiled, constants = cached_launch
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _device(arguments: tuple) -> int:
    """Return the device index of the first tensor, -1 for a CPU."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            return x.get_device()
        if isinstance(x, tuple) and any(isinstance(part, (torch.Tensor, tuple)) for part in x):
            return _device(x)
    raise TypeError("no argument of the kernel is a tensor")


def _settings_key(settings: dict) -> tuple:
    """Return names, values and types: 1, 1.0 and True are equal, but different constants."""
    values = settings.values()
    return *settings, *values, *map(_nested_types, values)


def _nested_types(value) -> type | tuple:
    return (type(value), *map(_nested_types, value)) if isinstance(value, tuple) else type(value)


def _constants(kernel, count: int, settings: dict) -> tuple:
    """Return the values of the constexprs, which are the parameters after the first `count`.

    Raises:
        TypeError: such a parameter is not a constexpr, or has no value.
    """
    values = []
    for p in kernel.params[count:]:
        if not p.is_constexpr or (p.name not in settings and not p.has_default):
            fault = "has no value" if p.is_constexpr else "must be given by position"
            raise TypeError(f"{kernel.__name__}: {p.name} {fault}")
        values.append(settings.get(p.name, p.default))
    return tuple(values)


def specialization(arguments: tuple, exempt: Sequence[tuple[bool, bool]]) -> tuple:
    """Return the properties of the arguments on which Triton specialises a kernel.

    exempt: (do_not_specialize, do_not_specialize_on_alignment) of each argument.
    """
    return tuple([_specialization(x, *e) for x, e in zip(arguments, exempt)])


def _specialization(x, value: bool, alignment: bool):
    """Return the properties of an argument on which Triton specialises a kernel.

    Tensor: dtype, aligned to 16 bytes. Integer: equal to 1, multiple of 16, width. Other number or None: type. Tensor
    descriptor: dtype, block, layout. Tuple: its members, without exemptions.
    """
    kind = type(x)
    if isinstance(x, torch.Tensor):
        return x.dtype, value or alignment or x.data_ptr() % 16 == 0
    if kind is int:
        if x == 1 and not value:
            return 1
        width = 32 if -(2**31) <= x < 2**31 else 64 if x < 2**63 else 65
        return width, value or alignment or x % 16 == 0
    if x is None or kind is float or kind is bool:
        return kind
    if isinstance(x, tuple):
        return kind, *[_specialization(part, False, False) for part in x]
    return kind, x.base.dtype, *x.block_shape, getattr(x, "layout", None)


def _first_launch(kernel, grid: tuple[int, ...], arguments: tuple, settings: dict):
    """Launch a kernel by Triton's dispatch; return the compiled kernel.

    Triton requests more than 48 KB of shared memory from the driver only if dynamic shared memory exceeds 48 KB. If
    it exceeds 48 KB only together with the static shared memory of inline assembly, the launch fails. This function
    then makes the request and launches again.
    """
    try:
        return kernel[grid](*arguments, **settings)
    except RuntimeError as error:
        if "invalid argument" not in str(error):
            raise
    import ctypes

    compiled = kernel.warmup(*arguments, grid=grid, **settings)
    compiled._init_handles()
    max_dynamic_shared_size = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(compiled.function), max_dynamic_shared_size, compiled.metadata.shared
    )
    if status:
        raise RuntimeError(f"cuFuncSetAttribute failed with CUDA error {status} for {kernel.__name__}")
    return kernel[grid](*arguments, **settings)
