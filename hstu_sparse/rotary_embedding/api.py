"""Define the rotation of queries and keys by position and time, after which a score depends on the distance of two
tokens.

Letters: T tokens of the batch, B sequences, N max_seq_len, H heads, D head size, n = D // 2 pairs of channels.
"""

import torch

from hstu_sparse.core.jagged import check_jagged
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_bool, check_kernel, check_tensor, choose_backend
from hstu_sparse.rotary_embedding.reference import first_times, rotary_reference


@without_autocast
def rotary(
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    times: torch.Tensor | None = None,
    origins: torch.Tensor | None = None,
    position: bool = True,
    positions: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Rotate pairs of channels of x by angles that grow with the token's position and time.

    Channel i is paired with channel i + D // 2; an odd last channel is unchanged. With position and times the first
    ceil(n / 2) of the n pairs rotate by position and the others by time, otherwise all by the given one. Pair i of m
    rotates by

        position * 2 pi / (4 * (N / 4) ** (i / (m - 1)))
        (time - origin) * 2 pi / (60 * (1.3e8 / 60) ** (i / (m - 1)))    times in seconds

    (the first period if m is 1). Turns are counted in fp64, so that years of seconds lose no precision.

    Args:
        x: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        max_seq_len: N, the longest period of positions.
        times: [T] int64, in seconds; by default nothing rotates by time. Pass query times for queries, and for keys the
            times of their events.
        origins: [B] int64, the time 0 of each sequence; by default the first of its `times`. Queries and keys need the
            same, so that the angles depend on the difference of their times.
        position: whether pairs rotate by position.
        positions: [T] int64, the tokens' positions, if x has parts of sequences; by default they count from 0.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, H, D], contiguous, dtype of x. The gradient flows to x.

    Examples:
        >>> x, seq_offsets = torch.ones(3, 1, 4), torch.tensor([0, 3])
        >>> turned = hstu_sparse.rotary(x, seq_offsets, max_seq_len=16)
        >>> torch.equal(turned[0], x[0]), turned.norm(dim=-1).flatten().round()  # position 0 and all lengths stay
        (True, tensor([2., 2., 2.]))

    Raises:
        TypeError, ValueError: with the expected and the actual value.

    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2; half-split pairs and the periods are this package's.
    """
    sizes: dict[str, int] = {}
    check_tensor("x", x, "T H D", sizes)
    if times is not None:
        check_tensor("times", times, "T", sizes, dtype=torch.int64)
    if positions is not None:
        check_tensor("positions", positions, "T", sizes, dtype=torch.int64, device=x.device)
    check_jagged(seq_offsets, max_seq_len, x=x, times=times)
    if origins is not None:
        sizes["B"] = seq_offsets.shape[0] - 1
        check_tensor("origins", origins, "B", sizes, dtype=torch.int64, device=x.device)
    check_bool("position", position)
    if times is None and not position:
        raise ValueError("rotary needs position=True or times [T]")
    if choose_backend(backend, x, "rotary") == "reference":
        return rotary_reference(
            x, seq_offsets, max_seq_len, times=times, origins=origins, position=position, positions=positions
        )
    check_kernel("rotary", x, {"D": sizes["D"]})
    from hstu_sparse.rotary_embedding.kernels import rotary_operator

    if times is not None and origins is None:
        origins = first_times(times, seq_offsets)
    return rotary_operator(x, seq_offsets, times, origins, positions, max_seq_len, position)
