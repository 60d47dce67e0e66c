"""Define the gates of queries: the public function, its validation, the choice of backend.

Letters: T tokens of the batch, H heads, D size of a query, F size of the hidden layer, G gates.
"""

import torch

from hstu_sparse.core.launch import padded_head
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import check_kernel, check_some, check_tensor, choose_backend
from hstu_sparse.gate_mlp.reference import query_gates_reference

MAX_SIZE, MAX_HIDDEN, MAX_GATES = 128, 64, 16


def takes_kernel(size: int, hidden: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels support D and F: both products' padded matrices have to fit, with a tile of rows."""
    room = 4096 if dtype == torch.float32 else 8192
    return size <= MAX_SIZE and hidden <= MAX_HIDDEN and padded_head(size) * padded_head(hidden) <= room


@without_autocast
def query_gates(
    q: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Compute sigmoid(w2 relu(w1 q + b1) + b2): G gates for each token and head, by one network that the heads share.

    In Triton this is one kernel forward, which saves only its inputs, and two backward; products are in q's dtype, sums
    in fp32. Gradients have the same bits in every run.

    Args:
        q: [T, H, D], fp16, bf16 or fp32 (the reference also fp64). Tokens and heads need not be adjacent.
        w1, b1: [F, D] and [F], any floating dtype; weights are rounded to q's.
        w2, b2: [G, F] and [G], likewise.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [G, T, H], contiguous, of q's dtype. Gradients flow to q and the weights; the kernels have no second
        derivatives.

    Examples:
        >>> q, w1, b1 = torch.randn(5, 2, 16), torch.randn(32, 16), torch.zeros(32)
        >>> w2, b2 = torch.zeros(3, 32), torch.zeros(3)
        >>> gates = hstu_sparse.query_gates(q, w1, b1, w2, b2)
        >>> gates.shape, gates[0, 0, 0]
        (torch.Size([3, 5, 2]), tensor(0.5000))

    Raises:
        TypeError, ValueError: with the expected and the actual value. The kernels take D up to 128 with F up to 64, in
            fp32 D up to 64 or F up to 32, and G up to 16.
    """
    backend = choose_backend(backend, q, "query_gates")
    sizes: dict[str, int] = {}
    check_tensor("q", q, "T H D", sizes)
    for name, x, shape in (("w1", w1, "F D"), ("b1", b1, "F"), ("w2", w2, "G F"), ("b2", b2, "G")):
        check_tensor(name, x, shape, sizes, device=q.device)
    check_some(sizes, "H", "D", "F", "G")
    if backend == "reference":
        return query_gates_reference(q, w1, b1, w2, b2)
    check_kernel("query_gates", q, {"G": sizes["G"]}, most=MAX_GATES)
    if not takes_kernel(sizes["D"], sizes["F"], q.dtype):
        raise ValueError(
            f"query_gates: the kernels take D up to {MAX_SIZE} with F up to {MAX_HIDDEN}, in fp32 half as much, got "
            f"D={sizes['D']}, F={sizes['F']}; use backend='reference'"
        )
    from hstu_sparse.gate_mlp.kernels import query_gates_operator

    return query_gates_operator(q, w1, b1, w2, b2)
