"""What every launcher of Triton kernels needs on the host: sizes of tiles, precision of products, layout of rows.

Imports no triton, so that `import hstu_sparse` works where it is absent.

Two environments run the same kernel source. On CUDA the kernels are compiled; under `TRITON_INTERPRET=1`, which must be
set before triton is first imported, they run on the CPU, in fp32 as a rule: the interpreter is wrong for bf16.
"""

import contextlib
import functools
import os
from collections.abc import Sequence

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
cpu_architecture = 90


def architecture(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
    return _capability(device) if device.type == "cuda" else cpu_architecture


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 2 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


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


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: fp32 products are exact unless the user allowed TF32 for torch's own.

    Asks the setting that both of torch's interfaces write: `allow_tf32` itself raises once a user has mixed them.
    """
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def close_precision(dtype: torch.dtype) -> str:
    """As `precision`, but fp32 products as three of TF32, which lose next to nothing and run on tensor cores."""
    return "tf32x3" if dtype == torch.float32 and precision(dtype) == "ieee" else precision(dtype)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with rows that can be read 16 bytes at a time: x itself, or a copy, heads padded with zeros.

    The views of a fused projection pass as they are. The copy costs less than reading a head of, say, 25 two bytes at a
    time, once for every block; zeros change no sum.
    """
    size = x.shape[-1]
    if size % 16:
        return torch.nn.functional.pad(x, (0, 16 - size % 16))
    *strides, last = x.stride()
    whole = last == 1 and not any([stride % 16 for stride in strides]) and x.data_ptr() % 16 == 0
    return x if whole else x.clone(memory_format=torch.contiguous_format)


# (kernel's name, key) -> compiled kernel, and its constants in the order of its signature.
compiled_kernels: dict[tuple, tuple] = {}


def start(kernel, grid: int | tuple[int, ...], arguments: tuple, constants: dict, options: dict, key: tuple) -> None:
    """kernel[grid](*arguments, **constants, **options), on a GPU without Triton's dispatch from the second time on.

    Triton finds out in every call what it specialised on, which takes longer than a short kernel.

    Args:
        kernel: a triton.jit function whose constexprs come last.
        arguments: all others, in their order; one at least is a tensor.
        constants: name -> value, of the constexprs.
        options: num_warps and the like.
        key: with constants and options everything that Triton would tell calls apart by: dtypes, which arguments are
            None, and of pointers and integers that the kernel does not exempt whether they are multiples of 16.
    """
    grid = (grid,) if isinstance(grid, int) else grid
    device = next(x for x in arguments if isinstance(x, torch.Tensor)).get_device()
    if device < 0:
        kernel[grid](*arguments, **constants, **options)
        return
    key = (kernel.__name__, device, key, *constants.values(), *options.values())
    found = compiled_kernels.get(key)
    if found is None:
        compiled = _first(kernel, grid, arguments, constants | options)
        compiled_kernels[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    else:
        compiled, values = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *values)


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


def run(kernel, grid: tuple[int, ...], *arguments, **settings) -> None:
    """`start` with constants and options together, and a key of all that Triton looks at."""
    if all(x.get_device() < 0 for x in arguments if isinstance(x, torch.Tensor)):
        kernel[grid](*arguments, **settings)
        return
    options = {name: settings.pop(name) for name in _OPTIONS if name in settings}
    start(kernel, grid, arguments, settings, options, specialization(arguments, kernel.params))


_OPTIONS = "num_warps", "num_stages", "maxnreg"


def specialization(arguments: tuple, parameters: Sequence | None = None) -> tuple:
    """What Triton tells calls of a kernel apart by: the key of `start`. parameters: a kernel's, with its exemptions."""
    if parameters is None:
        kinds = [
            (x.dtype, x.data_ptr() % 16 == 0)
            if isinstance(x, torch.Tensor)
            else (-(2**31) <= x < 2**31, x == 1, x % 16 == 0)
            if isinstance(x, int)
            else _kind(x)
            for x in arguments
        ]
        return tuple(kinds)
    return tuple(_kind(x, p.do_not_specialize, p.do_not_specialize_on_alignment) for x, p in zip(arguments, parameters))


def _kind(x, exempt: bool = False, unaligned: bool = False):
    """What Triton would compile another kernel for, if an argument differed in it."""
    if isinstance(x, torch.Tensor):
        return x.dtype, exempt or unaligned or x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return -(2**31) <= x < 2**31, exempt or x == 1, exempt or unaligned or x % 16 == 0
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    if x is None or isinstance(x, float):
        return type(x)
    return x.base.dtype, x.base.dim(), *x.block_shape  # a tensor descriptor
