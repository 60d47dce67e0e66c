"""Validate jagged tensors, and convert them to and from padded tensors.

Letters: T tokens of the batch, B sequences, N max_seq_len, n the padded length (the longest sequence, or N).

A jagged tensor `[T, ...]` is the concatenation of B sequences; sequence b has the tokens from seq_offsets[b] to
seq_offsets[b + 1] - 1.
"""

import hashlib
import importlib.util
import itertools
import os

import torch

from hstu_sparse.core.registration import plain

# Reading values of a CUDA tensor waits for the device. Checks do so only if this switch is set.
DEBUG = os.environ.get("HSTU_SPARSE_DEBUG", "0") not in ("", "0")

LARGEST = 2**63 - 1  # of int64
_INSTALLED = importlib.util.find_spec("fbgemm_gpu") is not None
_FBGEMM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def concrete(x) -> bool:
    """Return whether x is a tensor with values, outside of torch.compile, torch.func and dispatch modes."""
    if torch.compiler.is_compiling() or not plain(x) or x.is_meta:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def readable(x: torch.Tensor) -> bool:
    """Return whether checks may read the values of x: on a CPU, and with the debug switch on any device.

    False if x is not `concrete`: it has no values, or a transform would record the reads.
    """
    return concrete(x) and (DEBUG or x.device.type == "cpu")


def fingerprint(*tensors: torch.Tensor | None) -> str | None:
    """Return a digest of integer tensors, by which a plan identifies its batch; None if they are not `readable`."""
    present = [x for x in tensors if x is not None]
    if not all(readable(x) for x in present):
        return None
    digest = hashlib.sha256()
    for x in present:
        digest.update(f"{x.shape}".encode() + x.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_storage(name: str, x: torch.Tensor, *, values: bool = False) -> None:
    """Raise TypeError for a tensor without strided memory: sparse, nested or mkldnn.

    values: raise it for meta and fake tensors, too, since the caller reads values.
    """
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").removeprefix("_")
        raise TypeError(f"{name} must be a strided tensor, got a {kind} one")
    if values and ((x.is_meta and plain(x)) or type(x).__name__ == "FakeTensor"):
        raise TypeError(f"{name} must be a tensor with values, got a {'meta' if plain(x) else 'fake'} tensor")


def format_number(value: float) -> str:
    """Format a number for an error message; an integer of more than 128 bits by its power of two."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"{'-' * (value < 0)}2^{value.bit_length() - 1} or more"
    return str(value)


def check_jagged(
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    name: str = "seq_offsets",
    limit: str = "max_seq_len",
    **tensors: torch.Tensor | None,
) -> None:
    """Validate jagged tensors that share `seq_offsets`.

    The function checks types, shapes, dtypes and devices, and the values of `readable` offsets: they must begin at 0,
    not decrease, end at T, and no sequence may have more than N tokens.

    HSTU_SPARSE_DEBUG=1 in the environment (or `jagged.DEBUG = True`) makes CUDA tensors readable, which waits for the
    device, and checks the tensors for NaN and infinity. Kernels mask by multiplying by 0, and 0 times NaN is NaN: a
    NaN at token t may reach the outputs of earlier tokens in the same tile.

    Args:
        seq_offsets: [B+1], int32 or int64.
        max_seq_len: N, at least 1.
        name, limit: what errors call `seq_offsets` and `max_seq_len`.
        tensors: name -> [T, ...], all on the device of `seq_offsets` and with the same T. None is skipped.

    Raises:
        TypeError: wrong type or dtype.
        ValueError: wrong shape, device or value.
    """
    if not isinstance(seq_offsets, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(seq_offsets).__name__}")
    check_storage(name, seq_offsets)
    if seq_offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {seq_offsets.dtype}")
    if seq_offsets.dim() != 1 or seq_offsets.shape[0] < 1:
        raise ValueError(f"{name} must be [B+1], got shape {list(seq_offsets.shape)}")
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, (int, torch.SymInt)):
        raise TypeError(f"{limit} must be an int, got {type(max_seq_len).__name__}")
    if not 1 <= max_seq_len <= LARGEST:
        bound = "at least 1" if max_seq_len < 1 else f"at most {LARGEST}"
        raise ValueError(f"{limit} must be {bound}, got {format_number(max_seq_len)}")
    first, total = None, None
    for key, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != seq_offsets.device:
            raise ValueError(f"{key} is on {tensor.device}, {name} on {seq_offsets.device}")
        if total is None:
            first, total = key, tensor.shape[0]
        elif tensor.shape[0] != total:
            raise ValueError(f"{key} must have T={total} tokens, as {first}, got {tensor.shape[0]}")
    if readable(seq_offsets):
        check_offset_values(seq_offsets, max_seq_len, total, name, limit)
    if DEBUG and readable(seq_offsets):
        for key, tensor in tensors.items():
            if tensor is not None and tensor.is_floating_point():
                check_finite(key, tensor)


def check_offset_values(
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    total: int | None,
    name: str = "seq_offsets",
    limit: str = "max_seq_len",
) -> None:
    """Raise ValueError for wrong values of offsets; see `check_jagged`. total: T, or None if any is valid."""
    values = seq_offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must begin at 0, got {values[0]}")
    if total is not None and values[-1] != total:
        raise ValueError(f"{name} must end at T={total}, got {values[-1]}")
    for b, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(f"{name} must not decrease: sequence {b} goes from {begin} to {end}")
        if end - begin > max_seq_len:
            raise ValueError(f"sequence {b} has {end - begin} tokens, more than {limit}={max_seq_len}")


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if the tensor [T, ...] has NaN or infinity; the message names the first such token."""
    wrong = ~torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
    if wrong.any():
        raise ValueError(f"{name} has NaN or infinity, first at token {int(wrong.nonzero()[0, 0])}")


def masked_product(weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute weights [..., n, m] @ values [..., m, V]. hidden: bool, broadcasts to weights, which are 0 there.

    0 times NaN is NaN. If values are `readable`, a non-finite value reaches only the rows in which it is not hidden.
    """
    bmm = weights.dim() == values.dim() == 3 and weights.shape[0] == values.shape[0]
    out = torch.bmm(weights, values) if bmm else weights @ values  # see `_attend` in dense/reference.py
    if not readable(values) or values.detach().sum().isfinite():  # a finite sum has finite terms
        return out
    wrong = ~values.isfinite()
    sees_nonfinite = (~hidden).to(values.dtype) @ wrong.to(values.dtype) > 0
    return torch.where(sees_nonfinite, out, weights @ values.masked_fill(wrong, 0))


def longest_sequence(seq_offsets: torch.Tensor, bound: int) -> int:
    """Return the length of the longest sequence; `bound` if offsets are not `concrete`. Waits for the device."""
    if not concrete(seq_offsets):
        return bound
    return int(seq_offsets.diff().max()) if len(seq_offsets) > 1 else 0


def offsets_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Convert lengths [B] to seq_offsets [B+1] of the same dtype and device.

    Examples:
        >>> offsets_from_lengths(torch.tensor([2, 3]))
        tensor([0, 2, 5])
    """
    offsets = lengths.new_zeros(lengths.shape[0] + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def padded_index(seq_offsets: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index int64, valid bool) [B, length]: the index in the jagged tensor of each cell of the padded one.

    Cells past a sequence's end have index 0 and valid False.
    """
    position = torch.arange(length, device=seq_offsets.device)
    index = seq_offsets[:-1, None].long() + position
    valid = index < seq_offsets[1:, None]
    return index.masked_fill(~valid, 0), valid


def sequence_ids(seq_offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Return the sequence of each token, [T] int64, without device sync. total: T.

    Examples:
        >>> sequence_ids(torch.tensor([0, 2, 5]), 5)
        tensor([0, 0, 1, 1, 1])
    """
    token = torch.arange(total, device=seq_offsets.device)
    return torch.searchsorted(seq_offsets[1:].long().contiguous(), token, right=True)


def jagged_to_padded(values: torch.Tensor, seq_offsets: torch.Tensor, length: int) -> torch.Tensor:
    """Pad [T, ...] with zeros to [B, length, ...]; tokens past `length` are dropped. Differentiable.

    fp32, fp16 and bf16 use fbgemm's operator if it is installed.
    """
    batch, inner = seq_offsets.shape[0] - 1, values.shape[1:]
    if values.dtype in _FBGEMM_DTYPES and values.numel() and batch and (ops := _fbgemm()):
        flat = ops.jagged_to_padded_dense(values.flatten(1) if inner else values[:, None], [seq_offsets], [length], 0.0)
        return flat.view(batch, length, *inner)
    if values.shape[0] == 0:
        return values.new_zeros(batch, length, *inner)
    index, valid = padded_index(seq_offsets, length)
    padded = values.index_select(0, index.flatten()).view(batch, length, *inner)
    return padded.masked_fill(~valid.view(batch, length, *[1] * len(inner)), 0)


def padded_to_jagged(padded: torch.Tensor, seq_offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Convert [B, length, ...] to [T, ...], the inverse of `jagged_to_padded`, without device sync. total: T.

    Tokens past `length` are zero. fbgemm's operator is not used, since on a GPU it does not write these.
    """
    batch, length, inner = padded.shape[0], padded.shape[1], padded.shape[2:]
    if total == 0 or batch == 0 or length == 0:
        return padded.new_zeros(total, *inner)
    sequence = sequence_ids(seq_offsets, total)
    position = torch.arange(total, device=padded.device) - seq_offsets.long()[sequence]
    index = sequence * length + position.clamp(max=length - 1)
    dropped = (position >= length).view(total, *[1] * len(inner))
    return padded.flatten(0, 1).index_select(0, index).masked_fill(dropped, 0)


def _fbgemm():
    """Return torch.ops.fbgemm, or None if fbgemm is not installed."""
    if not _INSTALLED:
        return None
    import fbgemm_gpu.sparse_ops  # noqa: F401  registers torch.ops.fbgemm, fakes and autograd

    return torch.ops.fbgemm
