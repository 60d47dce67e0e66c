"""What every launcher of Triton kernels needs on the host: configurations, precision of products, the launch itself.

Imports no triton, so that `import hstu_sparse` works where it is absent.

Two environments run the same kernel source. On CUDA the kernels are compiled; under `TRITON_INTERPRET=1`, which must be
set before triton is first imported, they run on the CPU, in fp32 as a rule: the interpreter is wrong for bf16.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def padded_head(size: int) -> int:
    """Width of the tile that holds a head of `size`: a power of two, at least 16 (the least that tl.dot takes)."""
    return max(16, next_power_of_2(size))


# What CPU tensors pass for: the interpreter's, and those for whose kernels `ahead.py` compiles.
cpu_architecture, cpu_multiprocessors = 90, 2


def architecture(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
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
    """Inside, `device` is the current one, which kernels are launched on."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def allow_descriptors() -> None:
    """Before a launch whose programs make tensor descriptors: they put them on the current device."""
    import triton

    triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def precision(dtype: torch.dtype, parts: str = "ieee") -> str:
    """`input_precision` of tl.dot: the one rule for fp32 products, in every operator (docs/performance.md).

    Products of 16-bit numbers are exact. Products of fp32 are TF32's where the user allowed that for torch's own;
    else each is as good as fp32's, in the way that the kernel names.

    Args:
        dtype: of the operands.
        parts: "ieee", one product outside of the tensor cores; "tf32x3" or "bf16x6", several on them, of parts of each
            number: sums as near to fp32's as a few more roundings, for kernels where that was measured faster.
    """
    if dtype != torch.float32:
        return "ieee"
    # The setting that both of torch's interfaces write: `allow_tf32` itself raises once a user has mixed them.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else parts


class LaunchConfig:
    """How one kernel is launched: the sizes of its tiles with its other constants, and Triton's options.

    `run(kernel, grid, *arguments, **config)` hands all of it to the kernel but `programs`; `config.BLOCK_M` reads one
    setting, `config.replace(BLOCK_M=64)` is another configuration. Cached and shared, so nothing can be assigned.

    Args:
        num_warps, num_stages, maxnreg: Triton's options; None leaves it to Triton.
        programs: the number of programs that a multiprocessor is given at once, for launchers that divide work by it.
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

    def __setattr__(self, name: str, value):
        raise AttributeError(f"a LaunchConfig is not changed: use replace({name}=...)")

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
        given = self._settings | ({} if self.programs is None else {"programs": self.programs})
        return f"LaunchConfig({', '.join(f'{name}={value}' for name, value in given.items())})"


_overrides: dict[Callable, Callable] = {}


def configuration(function: Callable) -> Callable:
    """Decorates a function that chooses how a kernel is launched (a `LaunchConfig`, or one choice between ways).

    It is cached, and `override` changes what it says.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def chosen(*arguments):
        found, change = cached(*arguments), _overrides.get(chosen)
        return found if change is None else change(found, *arguments)

    _overridable.add(chosen)
    return chosen


_overridable: set[Callable] = set()


@contextlib.contextmanager
def override(function: Callable, change: Callable):
    """Inside, the `configuration` `function` gives change(what it gives else, *its arguments).

    The one way in which benchmarks and tests launch kernels otherwise than the library does.

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
    """What `run` knows of one kernel."""

    def __init__(self, kernel):
        self.kernel = kernel  # held, so that no other object gets its id
        self.exempt = tuple((p.do_not_specialize, p.do_not_specialize_on_alignment) for p in kernel.params)
        self.compiled: dict[tuple, tuple] = {}  # key -> compiled kernel, its constants in the order of the signature


# By a kernel's id: a triton.jit function takes a lock and a string to hash itself.
_kernels: dict[int, _Kernel] = {}


def run(kernel, grid: int | tuple[int, ...], *arguments, **settings) -> None:
    """kernel[grid](*arguments, **settings); on a GPU without Triton's dispatch from the second time on.

    The one way in which kernels are launched. Triton finds out in every call what it specialised on, builds strings of
    it and looks them up, which takes longer than a short kernel. Here the key comes from the kernel's own signature
    (`specialization`), so that a call gets the kernel that Triton would have given it.

    Args:
        kernel: a triton.jit function whose constexprs stand behind all other parameters.
        grid: the number of programs, or up to three of them.
        arguments: all that are not constexprs, in their order; the first tensor among them says on which device.
        settings: the constexprs by name, and Triton's options (num_warps, num_stages, maxnreg, enable_fp_fusion).
    """
    grid = (grid,) if isinstance(grid, int) else grid
    device = next(x for x in arguments if isinstance(x, torch.Tensor)).get_device()
    if device < 0:  # interpreted, or compiled ahead of time
        kernel[grid](*arguments, **settings)
        return
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _Kernel(kernel)
    key = (device, *specialization(arguments, known.exempt), *_settings_key(settings))
    found = known.compiled.get(key)
    if found is None:
        constants = _constants(kernel, len(arguments), settings)
        known.compiled[key] = _first(kernel, grid, arguments, settings), constants
    else:
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _settings_key(settings: dict) -> tuple:
    """Names, values and types: 1, 1.0 and True are equal, but not the same constant."""
    values = settings.values()
    return *settings, *values, *map(type, values)


def _constants(kernel, given: int, settings: dict) -> tuple:
    """Values of the parameters behind the first `given`, which a compiled kernel takes with the others.

    Raises:
        TypeError: one of them is not a constexpr, or has no value.
    """
    values = []
    for p in kernel.params[given:]:
        if not p.is_constexpr or (p.name not in settings and not p.has_default):
            what = "has no value" if p.is_constexpr else "must be given by position"
            raise TypeError(f"{kernel.__name__}: {p.name} {what}")
        values.append(settings.get(p.name, p.default))
    return tuple(values)


def specialization(arguments: tuple, exempt: Sequence[tuple[bool, bool]]) -> tuple:
    """What Triton tells calls of a kernel apart by, but for their constexprs.

    exempt: of each argument whether it is in the kernel's do_not_specialize and do_not_specialize_on_alignment.
    """
    return tuple([_kind(x, *e) for x, e in zip(arguments, exempt)])


def _kind(x, value: bool, alignment: bool):
    """What Triton compiles another kernel for where an argument differs in it.

    A tensor's dtype and whether it begins at a multiple of 16 bytes; whether an integer is 1, a multiple of 16, and how
    wide it is; the type of other numbers and of None; a tensor descriptor's dtype, block and layout; the parts of a
    tuple, which no exemption reaches.
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
    """The first launch of a kernel by Triton's dispatch; the compiled kernel.

    Triton does not know of the static shared memory of inline assembly: it asks the driver for more than 48 KB only if
    the dynamic part alone exceeds that. If the sum does, the launch is refused; then it is asked for here.
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
