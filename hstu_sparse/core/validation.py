"""Validate the arguments of operators: shapes, dtypes and devices of tensors, options, backends.

The checks do not wait for a device unless HSTU_SPARSE_DEBUG is set. They raise TypeError or ValueError with the
expected and the actual value. `jagged.py` checks offsets.

Letters: T tokens, H heads, D query/key and V value head size, N max_seq_len.
"""

import math
from typing import Any, NamedTuple

import torch

from hstu_sparse.core.jagged import LARGEST, check_jagged, check_storage, format_number, readable
from hstu_sparse.core.launch import INTERPRET, is_imagined
from hstu_sparse.core.registration import plain

BACKENDS = ("auto", "triton", "reference")
FLOATING, INTEGER = "floating point", "int32 or int64"
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOATING_DTYPES = (*KERNEL_DTYPES, torch.float64)  # few of torch's functions support its smaller dtypes


def choose_backend(backend: str, x: torch.Tensor, op: str, more: tuple[str, ...] = ()) -> str:
    """Return "triton" or "reference"; "auto" is triton for CUDA tensors and reference for CPU tensors.

    Raise ValueError if triton is requested and cannot run on x. more: further backends of `op`, for the message.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op} takes tensors, got {type(x).__name__}")
    if x.is_meta and plain(x):
        raise TypeError(f"{op} takes tensors with values, got a meta tensor")
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(BACKENDS + more)}, got {backend!r}")
    if backend == "auto":
        backend = "triton" if x.is_cuda else "reference"
    if backend == "triton":
        if x.is_cuda and INTERPRET:
            raise ValueError(f"{op}: TRITON_INTERPRET=1 is set, unset it to run on {x.device}")
        if not x.is_cuda and not (x.device.type == "cpu" and INTERPRET):
            raise ValueError(
                f"{op}: backend='triton' needs CUDA tensors, got {x.device}; use backend='reference', or set "
                "TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter"
            )
    return backend


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: str,
    sizes: dict[str, int],
    *,
    dtype: str | torch.dtype = FLOATING,
    device: torch.device | None = None,
) -> None:
    """Check the shape, dtype and device of a tensor.

    Args:
        shape: a letter for each dimension, like "T H D".
        sizes: letter -> size. A letter that is already in `sizes` must have this size; new letters are added.
        dtype: FLOATING, INTEGER, or a dtype.
        device: the required device; by default any.
    """
    letters = shape.split()
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor [{', '.join(letters)}], got {type(x).__name__}")
    check_storage(name, x)
    fits = x.dim() == len(letters)
    for letter, size in zip(letters, x.shape):
        fits = fits and sizes.get(letter, size) == size
    if not fits:
        expected = (f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in letters)
        raise ValueError(f"{name} must be [{', '.join(expected)}], got shape {list(x.shape)}")
    for letter, size in zip(letters, x.shape):
        sizes.setdefault(letter, size)
    if dtype == FLOATING:
        right = x.dtype in FLOATING_DTYPES
    elif dtype == INTEGER:
        right = x.dtype in (torch.int32, torch.int64)
    else:
        right = x.dtype == dtype
    if not right:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected on {device}")


def check_targets(num_targets: torch.Tensor | None, seq_offsets: torch.Tensor) -> None:
    """Check that `num_targets` is None or an integer tensor [B], each from 0 to the length of its sequence."""
    if num_targets is None:
        return
    num_seqs = seq_offsets.shape[0] - 1
    check_tensor("num_targets", num_targets, "B", {"B": num_seqs}, dtype=INTEGER, device=seq_offsets.device)
    if readable(num_targets) and readable(seq_offsets):
        for b, (targets, length) in enumerate(zip(num_targets.tolist(), seq_offsets.diff().tolist())):
            if not 0 <= targets <= length:
                raise ValueError(f"num_targets of sequence {b} must be from 0 to its length {length}, got {targets}")


def check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int, *, kv_heads="H"
) -> dict[str, int]:
    """Check q [T, H, D], k [T, kv_heads, D], v [T, kv_heads, V] and the offsets; return letter -> size."""
    sizes = check_heads(q, k, v, kv_heads)
    check_jagged(seq_offsets, max_seq_len, q=q, k=k, v=v)
    return sizes


def check_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: str = "Hkv", kv_tokens: str = "T"
) -> dict[str, int]:
    """Check q [T, H, D], k [kv_tokens, kv_heads, D] and v [kv_tokens, kv_heads, V]; return letter -> size.

    kv_heads: "H" if keys have as many heads as queries; "Hkv" if groups of query heads share a head, and Hkv divides H.
    """
    sizes: dict[str, int] = {}
    check_tensor("q", q, "T H D", sizes)
    check_tensor("k", k, f"{kv_tokens} {kv_heads} D", sizes, dtype=q.dtype, device=q.device)
    check_tensor("v", v, f"{kv_tokens} {kv_heads} V", sizes, dtype=q.dtype, device=q.device)
    if kv_heads != "H" and (sizes[kv_heads] == 0 or sizes["H"] % sizes[kv_heads]):
        raise ValueError(f"the heads of k must divide the {sizes['H']} heads of q, got {sizes[kv_heads]}")
    check_not_empty(sizes, "H", "D", "V")
    return sizes


def check_not_empty(sizes: dict[str, int], *letters: str) -> None:
    """Check that the sizes of these letters are at least 1."""
    for letter in letters:
        if sizes[letter] < 1:
            raise ValueError(f"{letter} must be at least 1, got {letter}={sizes[letter]}")


def check_int(name: str, value: int, least: int, most: int = LARGEST) -> None:
    """Check that `value` is an int, not a bool, from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {format_number(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {format_number(value)}")


def check_bool(name: str, value: bool) -> None:
    """Check that `value` is True or False: the truth value of "no" would be True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_number(name: str, value: float, *, above: float = -math.inf, below: float = math.inf) -> float:
    """Check that `value` is a finite number and above < value < below; return it as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not above < value < below:  # false for NaN; infinite bounds exclude infinity
        bounds = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
        expected = " ".join(["a finite number", " and ".join(bounds)]).rstrip()
        raise ValueError(f"{name} must be {expected}, got {format_number(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be in the range of a float, got {format_number(value)}") from None


def check_plan(plan: object, kind: type, purpose: NamedTuple) -> None:
    """Check that `plan` is of class `kind` and made for `purpose`; compare batches if both purposes have a digest."""
    if not isinstance(plan, kind):
        raise TypeError(f"plan must be {kind.__name__} or None, got {type(plan).__name__}")
    planned: Any = plan.purpose  # type: ignore[attr-defined]  # every class of plans has a purpose
    needed: Any = purpose
    if planned.batch is None or needed.batch is None:
        planned, needed = planned._replace(batch=None), needed._replace(batch=None)
    if planned != needed:
        raise ValueError(f"plan was made for {planned}, this call needs a plan for {needed}")


def check_fraction(name: str, value: float) -> float:
    """Check that `value` is at least 0 and less than 1; return it as a float."""
    value = check_number(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {value}")
    return value


def check_seed(seed: torch.Tensor | None, device: torch.device) -> None:
    """Check the seed of dropout: an int64 tensor of one element, so that drawing it does not wait for the device."""
    if seed is None:
        raise ValueError(f"dropout > 0 needs a seed: an int64 tensor of one element on {device}")
    if not isinstance(seed, torch.Tensor):
        raise TypeError(f"seed must be an int64 tensor of one element, got {type(seed).__name__}")
    check_storage("seed", seed)
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
        raise ValueError(
            f"seed must be an int64 tensor of one element on {device}, got {seed.dtype} of shape {list(seed.shape)} on "
            f"{seed.device}"
        )


def check_scale(scale: float | None, head_size: int, name: str = "scale") -> float:
    """Return the scale of the scores, head_size ** -0.5 by default."""
    check_not_empty({"D": head_size}, "D")
    return head_size**-0.5 if scale is None else check_number(name, scale)


def check_factors(
    scale: float | None, normalizer: float | None, head_size: int, max_seq_len: int
) -> tuple[float, float]:
    """Return (the scale of the scores, the divisor of the outputs), head_size ** -0.5 and N by default."""
    scale = check_scale(scale, head_size)
    return scale, float(max_seq_len) if normalizer is None else check_number("normalizer", normalizer, above=0.0)


def check_products(op: str, dtype: torch.dtype) -> None:
    """Raise TypeError for matrix products of bf16 in Triton's interpreter.

    tl.dot of ones [16, 16] returns 4e9 instead of 16 in Triton 3.6 to 3.8, which multiply the bits as integers.
    """
    if dtype == torch.bfloat16 and INTERPRET and not is_imagined():
        raise TypeError(f"{op}: Triton's interpreter cannot multiply bf16; use fp32 or backend='reference'")


def check_kernel(
    op: str, x: torch.Tensor, heads: dict[str, int], most: int = 256, *, products: bool = True
) -> None:  # fmt: skip
    """Raise an error for a dtype of x or head sizes (letter -> size) that only the reference supports.

    products: the kernels multiply matrices of the dtype of x.
    """
    if x.dtype not in KERNEL_DTYPES:
        raise TypeError(f"{op}: the kernels take fp16, bf16 and fp32, got {x.dtype}; use backend='reference'")
    if products:
        check_products(op, x.dtype)
    for letter, size in heads.items():
        if not 1 <= size <= most:
            raise ValueError(
                f"{op}: the kernels take {letter} from 1 to {most}, got {letter}={size}; use backend='reference'"
            )
