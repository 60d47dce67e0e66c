"""Provide what every launcher of Triton kernels needs: configurations, precision of products, the launch itself.

Two environments run the same kernel source. On CUDA the kernels are compiled; under `TRITON_INTERPRET=1`, which must be
set before triton is first imported, they run on the CPU, in fp32 as a rule: the interpreter is wrong for bf16.
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
    """Return the width of the tile for a head of `size`: a power of two, at least 16 (the least that tl.dot takes)."""
    return max(16, next_power_of_2(size))


# The properties of CPU tensors: the interpreter's, and those for which `ahead.py` compiles kernels.
cpu_architecture, cpu_multiprocessors = 90, 2
_imagined = False


@contextlib.contextmanager
def imagined(multiprocessors: int):
    """Run operators on fake CPU tensors as a GPU with so many multiprocessors runs them, without launching a kernel."""
    global cpu_multiprocessors, _imagined
    before = cpu_multiprocessors, _imagined
    cpu_multiprocessors, _imagined = multiprocessors, True
    try:
        yield
    finally:
        cpu_multiprocessors, _imagined = before


def is_imagined() -> bool:
    """Return whether this is inside `imagined`."""
    return _imagined


def architecture(device: torch.device) -> int:
    """Return the compute capability as one number, 90 for 9.0."""
    return _capability(device) if device.type == "cuda" else cpu_architecture


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU (2 in the interpreter)."""
    return _multiprocessors(device) if device.type == "cuda" else cpu_multiprocessors


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device):
    """Make `device` the current one inside, since kernels are launched on the current device."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def allow_descriptors() -> None:
    """Prepare a launch whose programs create tensor descriptors, which are stored on the current device."""
    import triton

    triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def precision(dtype: torch.dtype, parts: str = "ieee") -> str:
    """Return `input_precision` of tl.dot: the one rule for fp32 products, in every operator (docs/performance.md).

    Products of 16-bit numbers are exact. fp32 products are TF32 if the user allowed that for torch's own; otherwise
    each is as accurate as fp32, by the method that the kernel names.

    Args:
        dtype: the dtype of the operands.
        parts: "ieee", one product outside of the tensor cores; "tf32x3" or "bf16x6", several products on them, of parts
            of each number: sums accurate to fp32 plus a few roundings, for kernels where that was measured to be
            faster.
    """
    if dtype != torch.float32:
        return "ieee"
    # This setting reflects both of torch's interfaces: `allow_tf32` itself raises once a user has mixed them.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else parts


class LaunchConfig:
    """The configuration of a kernel's launch: the sizes of its tiles with its other constants, and Triton's options.

    `run(kernel, grid, *arguments, **config)` passes everything except `programs` to the kernel; `config.BLOCK_M` reads
    one setting, `config.replace(BLOCK_M=64)` is another configuration. It is cached and shared, so it is immutable.

    Args:
        num_warps, num_stages, maxnreg: Triton's options; None leaves it to Triton.
        programs: the number of programs for each multiprocessor, for launchers that divide work by it.
        settings: constants of the kernel by name, and Triton's other options (enable_fp_fusion).
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
    """Decorate a function that chooses how a kernel is launched (a `LaunchConfig`, or one choice between ways).

    The result is cached, and `override` changes it.
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
    """Make the `configuration` `function` return change(its result, *its arguments) inside.

    This is the only way in which benchmarks and tests change the library's launches.

    Raises:
        TypeError: the function is no `configuration`.
    """
    if function not in _overridable:
        raise TypeError(f"{function} is no configuration of launches")
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
    """The launches of one kernel."""

    def __init__(self, kernel):
        self.kernel = kernel  # a reference, so that no other object gets its id
        self.exempt = tuple((p.do_not_specialize, p.do_not_specialize_on_alignment) for p in kernel.params)
        self.compiled: dict[tuple, tuple] = {}  # key -> compiled kernel, its constants in the order of the signature


# Indexed by a kernel's id: hashing a triton.jit function takes a lock and a string.
_kernels: dict[int, _Kernel] = {}


def run(kernel, grid: int | tuple[int, ...], *arguments, **settings) -> None:
    """Launch kernel[grid](*arguments, **settings); on a GPU without Triton's dispatch from the second time on.

    This is the one way in which kernels are launched. Triton determines the specialisation in every call, builds
    strings from it and looks them up, which takes longer than a short kernel. Here the key is computed from the
    kernel's own signature (`specialization`), so that a call gets the kernel that Triton would have chosen.

    Args:
        kernel: a triton.jit function whose constexprs follow all other parameters.
        grid: the number of programs, or up to three of them.
        arguments: all non-constexpr arguments, in their order, named tuples of them included; the device is that of the
            first tensor among them.
        settings: the constexprs by name, which may be named tuples too, and Triton's options (num_warps, num_stages,
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
        state.compiled[key] = _first(kernel, grid, arguments, settings), constants
    else:
        compiled, constants = cached_launch
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _device(arguments: tuple) -> int:
    """Return the device's index of the first tensor, -1 for a CPU."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            return x.get_device()
        if isinstance(x, tuple) and any(isinstance(part, (torch.Tensor, tuple)) for part in x):
            return _device(x)
    raise TypeError("no argument of the kernel is a tensor")


def _settings_key(settings: dict) -> tuple:
    """Return names, values and types: 1, 1.0 and True are equal, but not the same constant."""
    values = settings.values()
    return *settings, *values, *map(_types, values)


def _types(value) -> type | tuple:
    return (type(value), *map(_types, value)) if isinstance(value, tuple) else type(value)


def _constants(kernel, count: int, settings: dict) -> tuple:
    """Return the values of the parameters behind the first `count`, which a compiled kernel takes with the others.

    Raises:
        TypeError: one of them is not a constexpr, or has no value.
    """
    values = []
    for p in kernel.params[count:]:
        if not p.is_constexpr or (p.name not in settings and not p.has_default):
            fault = "has no value" if p.is_constexpr else "must be given by position"
            raise TypeError(f"{kernel.__name__}: {p.name} {fault}")
        values.append(settings.get(p.name, p.default))
    return tuple(values)


def specialization(arguments: tuple, exempt: Sequence[tuple[bool, bool]]) -> tuple:
    """Return everything on which Triton specialises a kernel, except its constexprs.

    exempt: whether each argument is in the kernel's do_not_specialize and do_not_specialize_on_alignment.
    """
    return tuple([_kind(x, *e) for x, e in zip(arguments, exempt)])


def _kind(x, value: bool, alignment: bool):
    """Return the properties of an argument for which Triton compiles another kernel.

    These are a tensor's dtype and whether it begins at a multiple of 16 bytes; whether an integer is 1, a multiple of
    16, and its width; the type of other numbers and of None; a tensor descriptor's dtype, block and layout; the parts
    of a tuple, to which no exemption applies.
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
        return kind, *[_kind(part, False, False) for part in x]
    return kind, x.base.dtype, *x.block_shape, getattr(x, "layout", None)


def _first(kernel, grid: tuple[int, ...], arguments: tuple, settings: dict):
    """Launch a kernel for the first time by Triton's dispatch; return the compiled kernel.

    Triton does not know of the static shared memory of inline assembly: it requests more than 48 KB from the driver
    only if the dynamic part alone exceeds that. If the sum does, the launch is refused; then it is requested here.
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
