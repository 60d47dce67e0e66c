"""Compute gates from queries: a small network with G outputs in (0, 1) for the query of each token and head.

Letters: T tokens of the batch, H heads, D head size of queries, F size of the hidden layer, G gates, R = T * H rows.

A program has a tile of rows. The hidden layer stays in registers, and backward recomputes it. The gradients of the
weights are sums over all rows. Each program of the backward kernel sums every n-th tile into its row of `parts`, and
torch sums the rows of `parts`: the order is fixed, so that results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from hstu_sparse.core import launch
from hstu_sparse.core.launch import INTERPRET, LaunchConfig, cdiv, next_power_of_2, padded_head, precision, run
from hstu_sparse.core.precision import widened, without_autocast
from hstu_sparse.core.registration import Operator
from hstu_sparse.core.validation import check_kernel, check_not_empty, check_tensor, choose_backend
from hstu_sparse.tiles.rows import as_rows

MAX_SIZE, MAX_HIDDEN, MAX_GATES = 128, 64, 16


def takes_kernel(size: int, hidden: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels support D and F: the padded matrices and a tile of rows must fit into registers."""
    most = 4096 if dtype == torch.float32 else 8192
    return size <= MAX_SIZE and hidden <= MAX_HIDDEN and padded_head(size) * padded_head(hidden) <= most


@without_autocast
def query_gates(
    q: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Compute G gates for each token and head: sigmoid(w2 relu(w1 q + b1) + b2). All heads share the weights.

    In Triton, forward is one kernel, which saves its inputs only; backward is one, and a sum for each weight. Products
    are in the dtype of q, sums in fp32. Gradients are deterministic.

    Args:
        q: [T, H, D], fp16, bf16 or fp32 (the reference also fp64). Copied if its channels are not adjacent.
        w1, b1: [F, D] and [F], floating point.
        w2, b2: [G, F] and [G], floating point. w1 and w2 are rounded to the dtype of q, by the reference also b1 and
            b2.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [G, T, H], contiguous, dtype of q. Gradients flow to q and the weights; the kernels have no second derivatives.

    Examples:
        >>> q, w1, b1 = torch.randn(5, 2, 16), torch.randn(32, 16), torch.zeros(32)
        >>> w2, b2 = torch.zeros(3, 32), torch.zeros(3)
        >>> gates = hstu_sparse.query_gates(q, w1, b1, w2, b2)
        >>> gates.shape, gates[0, 0, 0]
        (torch.Size([3, 5, 2]), tensor(0.5000))

    Raises:
        TypeError, ValueError: with the expected and the actual value. The kernels support D up to 128, F up to 64 (in
            fp32 only D up to 64 or F up to 32), and G up to 16.
    """
    backend = choose_backend(backend, q, "query_gates")
    sizes: dict[str, int] = {}
    check_tensor("q", q, "T H D", sizes)
    for name, x, shape in (("w1", w1, "F D"), ("b1", b1, "F"), ("w2", w2, "G F"), ("b2", b2, "G")):
        check_tensor(name, x, shape, sizes, device=q.device)
    check_not_empty(sizes, "H", "D", "F", "G")
    if backend == "reference":
        return query_gates_reference(q, w1, b1, w2, b2)
    check_kernel("query_gates", q, {"G": sizes["G"]}, most=MAX_GATES)
    if not takes_kernel(sizes["D"], sizes["F"], q.dtype):
        raise ValueError(
            f"query_gates: the kernels take D up to {MAX_SIZE} with F up to {MAX_HIDDEN}, in fp32 D to 64 or F to "
            f"32, got D={sizes['D']}, F={sizes['F']}; use backend='reference'"
        )
    return query_gates_operator(q, w1, b1, w2, b2)


def query_gates_reference(q, w1, b1, w2, b2) -> torch.Tensor:
    """Compute sigmoid(w2 relu(w1 q + b1) + b2): [G, T, H], dtype of q."""
    wide, *network = widened(q, *(x.to(q.dtype) for x in (w1, b1, w2, b2)))
    w1, b1, w2, b2 = network
    gates = torch.sigmoid(F.linear(F.relu(F.linear(wide, w1, b1)), w2, b2))
    return gates.to(q.dtype).movedim(-1, 0).contiguous()


# Programs of the backward kernel per multiprocessor.
_PROGRAMS = 2
_GATES = 16  # the minimum of G padded, for tl.dot


@triton.jit
def _rows(r, q, stride_t, stride_h, inside, H: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr):
    """Return (pointers, mask) of rows r of a tensor [T, H, D]."""
    d = tl.arange(0, PAD_D)[None, :]
    pointers = q + ((r // H).to(tl.int64) * stride_t + (r % H) * stride_h)[:, None] + d
    return pointers, inside[:, None] & (d < D)


@triton.jit
def _matrix(w, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAD_R: tl.constexpr, PAD_C: tl.constexpr):
    """Load a contiguous [ROWS, COLUMNS] matrix, padded with zeros."""
    i = tl.arange(0, PAD_R)[:, None]
    j = tl.arange(0, PAD_C)[None, :]
    return tl.load(w + i * COLUMNS + j, (i < ROWS) & (j < COLUMNS), 0.0)


@triton.jit
def _vector(b, SIZE: tl.constexpr, PAD: tl.constexpr):
    i = tl.arange(0, PAD)
    return tl.load(b + i, i < SIZE, 0.0).to(tl.float32)[None, :]


@triton.jit
def _network(x, w1, b1, w2, b2, PRECISION: tl.constexpr):
    """Return (hidden layer [rows, F] in fp32, gates [rows, G]) of rows x."""
    hidden = tl.maximum(tl.dot(x, tl.trans(w1), input_precision=PRECISION) + b1, 0.0)
    logits = tl.dot(hidden.to(x.dtype), tl.trans(w2), input_precision=PRECISION) + b2
    return hidden, 1.0 / (1.0 + tl.exp(-logits))


@triton.jit(do_not_specialize=["R"])
def query_gates_fwd_kernel(
    q, w1, b1, w2, b2, gates, stride_t, stride_h, R, H: tl.constexpr, D: tl.constexpr, F: tl.constexpr, G: tl.constexpr,
    PAD_D: tl.constexpr, PAD_F: tl.constexpr, PAD_G: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gates [G, R] of ROWS rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pointers, inside = _rows(r, q, stride_t, stride_h, r < R, H, D, PAD_D)
    x = tl.load(pointers, inside, 0.0)
    first, second = (_matrix(w1, F, D, PAD_F, PAD_D).to(x.dtype), _matrix(w2, G, F, PAD_G, PAD_F).to(x.dtype))
    _hidden, result = _network(x, first, _vector(b1, F, PAD_F), second, _vector(b2, G, PAD_G), PRECISION)
    g = tl.arange(0, PAD_G)[None, :]
    tl.store(gates + g.to(tl.int64) * R + r[:, None], result.to(gates.dtype.element_ty), (r < R)[:, None] & (g < G))


@triton.jit(do_not_specialize=["R"])
def query_gates_bwd_kernel(
    q, w1, b1, w2, b2, grad, dq, parts, stride_t, stride_h, R, H: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    G: tl.constexpr, PAD_D: tl.constexpr, PAD_F: tl.constexpr, PAD_G: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq [R, D] of every n-th tile, and the tiles' sums of dw1, db1, dw2 and db2 in a row of parts."""
    g = tl.arange(0, PAD_G)[None, :]
    w1 = _matrix(w1, F, D, PAD_F, PAD_D).to(q.dtype.element_ty)
    w2 = _matrix(w2, G, F, PAD_G, PAD_F).to(q.dtype.element_ty)
    b1, b2 = _vector(b1, F, PAD_F), _vector(b2, G, PAD_G)
    dw1 = tl.zeros([PAD_F, PAD_D], tl.float32)
    db1 = tl.zeros([PAD_F], tl.float32)
    dw2 = tl.zeros([PAD_G, PAD_F], tl.float32)
    db2 = tl.zeros([PAD_G], tl.float32)
    for first in range(tl.program_id(0) * ROWS, R, tl.num_programs(0) * ROWS):
        r = first + tl.arange(0, ROWS)
        pointers, inside = _rows(r, q, stride_t, stride_h, r < R, H, D, PAD_D)
        x = tl.load(pointers, inside, 0.0)
        hidden, gates = _network(x, w1, b1, w2, b2, PRECISION)
        upstream = tl.load(grad + g.to(tl.int64) * R + r[:, None], (r < R)[:, None] & (g < G), 0.0).to(tl.float32)
        dlogits = upstream * gates * (1.0 - gates)
        narrow = dlogits.to(x.dtype)
        dhidden = tl.where(hidden > 0.0, tl.dot(narrow, w2, input_precision=PRECISION), 0.0)
        dw2 = tl.dot(tl.trans(narrow), hidden.to(x.dtype), dw2, input_precision=PRECISION)
        db2 += tl.sum(dlogits, 0)
        db1 += tl.sum(dhidden, 0)
        narrow = dhidden.to(x.dtype)
        dw1 = tl.dot(tl.trans(narrow), x, dw1, input_precision=PRECISION)
        dq_pointers, inside = _rows(r, dq, H * D, D, r < R, H, D, PAD_D)
        tl.store(dq_pointers, tl.dot(narrow, w1, input_precision=PRECISION).to(dq.dtype.element_ty), inside)
    f, d = tl.arange(0, PAD_F), tl.arange(0, PAD_D)
    parts += tl.program_id(0) * (F * D + F + G * F + G)
    tl.store(parts + f[:, None] * D + d[None, :], dw1, (f < F)[:, None] & (d < D)[None, :])
    parts += F * D
    tl.store(parts + f, db1, f < F)
    parts += F
    row = tl.arange(0, PAD_G)
    tl.store(parts + row[:, None] * F + f[None, :], dw2, (row < G)[:, None] & (f < F)[None, :])
    tl.store(parts + G * F + row, db2, row < G)


def _config(q, w2, hidden: int) -> LaunchConfig:
    _, H, D = q.shape
    width, inner = padded_head(D), padded_head(hidden)
    # The products and sums of a program must fit into registers.
    small = q.dtype != torch.float32 and width * inner <= 4096
    rows = 16 if INTERPRET else 64 if small else 32
    return LaunchConfig(
        4 if small else 8, H=H, D=D, F=hidden, G=len(w2), PAD_D=width, PAD_F=inner,
        PAD_G=max(_GATES, next_power_of_2(len(w2))), ROWS=rows, PRECISION=precision(q.dtype, "tf32x3"),
    )  # fmt: skip


def _ready(q, *weights):
    """Make the channels of q and the weights contiguous."""
    return *as_rows(q, align=False), *(x.contiguous() for x in weights)


def _forward(*arguments):
    q, w1, b1, w2, b2 = _ready(*arguments)
    config = _config(q, w2, len(w1))
    gates = torch.empty(len(w2), *q.shape[:2], dtype=q.dtype, device=q.device)
    rows = q.shape[0] * q.shape[1]
    if rows:
        run(
            query_gates_fwd_kernel, cdiv(rows, config.ROWS), q, w1, b1, w2, b2, gates, q.stride(0), q.stride(1),
            rows, **config,
        )  # fmt: skip
    return gates


def _backward(grad, *arguments):
    """Return the gradients of q, w1, b1, w2 and b2."""
    q, *weights = _ready(*arguments)
    config = _config(q, weights[2], len(weights[0]))
    rows = q.shape[0] * q.shape[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    programs = min(_PROGRAMS * launch.multiprocessors(q.device), cdiv(rows, config.ROWS))
    parts = torch.empty(programs, sum(x.numel() for x in weights), dtype=torch.float32, device=q.device)
    if rows:
        run(
            query_gates_bwd_kernel, programs, q, *weights, grad.contiguous(), dq, parts, q.stride(0), q.stride(1),
            rows, **config,
        )  # fmt: skip
    gradients, begin = [dq], 0
    for x in weights:
        gradients.append(parts[:, begin : begin + x.numel()].sum(0).view(x.shape).to(x.dtype))
        begin += x.numel()
    return gradients


def _fake(q, w1, b1, w2, b2):
    return q.new_empty(w2.shape[0], *q.shape[:2])


_SCHEMA = "Tensor q, Tensor w1, Tensor b1, Tensor w2, Tensor b2"
query_gates_operator = Operator("query_gates", _SCHEMA, _forward, _backward, _fake, "q w1 b1 w2 b2")
