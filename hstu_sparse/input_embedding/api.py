"""Define a model's input embedding: the public function, its validation, the choice of backend.

Letters: T tokens of the batch, B sequences, N max_seq_len, E embedding size.
"""

import torch

from hstu_sparse.core.jagged import check_jagged
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import (
    check_dropout,
    check_kernel,
    check_number,
    check_seed,
    check_some,
    check_tensor,
    choose_backend,
)
from hstu_sparse.input_embedding.reference import embed_inputs_reference

MAX_SIZE = 4096


@without_autocast
def embed_inputs(
    rows: torch.Tensor,
    position: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    scale: float = 1.0,
    more: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute dropout(rows * scale + position[t] + more), t being the position of each token in its sequence.

    In Triton this is one kernel forward and two backward, for the tokens and for the positions, which save only their
    inputs. Gradients have the same bits in every run: a position's is summed over the sequences in a fixed order.

    Args:
        rows: [T, E], fp16, bf16 or fp32 (the reference also fp64), the looked-up row of each token.
        position: [N, E], a row for each position, of any floating dtype.
        seq_offsets: [B+1], int32 or int64, from 0 to T; no sequence is longer than N.
        scale: factor of rows.
        more: [T, E], added without a factor, or None.
        dropout, seed: as `norm_gate`'s.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [T, E], contiguous, of the dtype that rows + position (+ more) has. Gradients flow to rows, position and more;
        the kernels have no second derivatives.

    Examples:
        >>> rows, position = torch.ones(3, 2), torch.tensor([[0.0, 0], [10, 20]])
        >>> hstu_sparse.embed_inputs(rows, position, torch.tensor([0, 1, 3]), scale=2.0)
        tensor([[ 2.,  2.],
                [ 2.,  2.],
                [12., 22.]])

    Raises:
        TypeError, ValueError: with the expected and the actual value. The kernels take E up to 4,096.
    """
    backend = choose_backend(backend, rows, "embed_inputs")
    sizes: dict[str, int] = {}
    check_tensor("rows", rows, "T E", sizes)
    check_tensor("position", position, "N E", sizes, device=rows.device)
    if more is not None:
        check_tensor("more", more, "T E", sizes, device=rows.device)
    check_some(sizes, "E", "N")
    check_jagged(seq_offsets, sizes["N"], rows=rows)
    scale, dropout = check_number("scale", scale), check_dropout(dropout)
    if backend == "reference":
        return embed_inputs_reference(rows, position, seq_offsets, scale=scale, more=more, dropout=dropout)
    check_kernel("embed_inputs", rows, {"E": sizes["E"]}, most=MAX_SIZE)
    if dropout:
        if seed is None:
            raise ValueError("dropout > 0 needs a seed: an int64 tensor of one element on the rows' device")
        check_seed(seed, rows.device)
    from hstu_sparse.input_embedding.kernels import embed_inputs_operator

    return embed_inputs_operator(rows, position, seq_offsets, more, seed if dropout else None, scale, dropout)
