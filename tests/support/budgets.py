"""Support the tests and benchmarks of every operator: jagged inputs, and the assertion on a kernel's error budget.

Letters: T tokens of the batch, B sequences, N max_seq_len.
"""

import functools
from collections.abc import Callable, Sequence

import torch

# Name -> (lengths of the sequences of a batch, N), small enough for the interpreter.
EDGE_CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "empty batch": ((), 16),
    "all sequences empty": ((0, 0), 16),
    "an empty sequence in the middle": ((20, 0, 33), 40),
    "length 1": ((1, 1, 5), 8),
    "lengths that divide nothing": ((19, 7, 33), 33),
    "one sequence only": ((71,), 71),
    "N far above every length": ((9, 30), 1000),
}


def make_offsets(lengths: Sequence[int], *, device="cpu", dtype=torch.int64) -> torch.Tensor:
    """Return seq_offsets [B+1] of sequences with these lengths."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return offsets.to(device=device, dtype=dtype)


def make_jagged(
    lengths: Sequence[int],
    inner: Sequence[int],
    *,
    dtype=torch.float32,
    device="cpu",
    seed: int = 0,
    requires_grad: bool = False,
    contiguous: bool = True,
) -> torch.Tensor:
    """Return [T, *inner] ~ N(0, 1), drawn on the CPU so that a seed gives the same numbers on every device.

    `contiguous=False` gives a view into a wider tensor (rows are not adjacent, last stride 1), as from a fused
    projection that is split into u, v, q, k.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), *inner, generator=generator).to(device=device, dtype=dtype)
    if not contiguous:
        wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1] + 8), float("nan"))
        wide[..., 8 : 8 + values.shape[-1]] = values
        values = wide[..., 8 : 8 + values.shape[-1]]
    return values.requires_grad_(requires_grad)


def make_timestamps(lengths: Sequence[int], *, device="cpu", seed: int = 0, scale: float = 4e4) -> torch.Tensor:
    """Return [T] int64 seconds, ascending within each sequence, gaps log-distributed from 1 to `scale` seconds."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.zeros(0, dtype=torch.int64)]
    for length in lengths:
        gaps = torch.exp(torch.rand(length, generator=generator) * torch.log(torch.tensor(scale))).long()
        parts.append(1_500_000_000 + gaps.cumsum(0))
    return torch.cat(parts).to(device)


def gradients(
    function: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    grad: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return {"output": function(**inputs), "grad of q": ...} for every floating-point input; `grad` is the
    output's, or a function of the output that returns it.
    """
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }
    output = function(**leaves)
    grad = grad if isinstance(grad, torch.Tensor) else grad(output.detach())
    differentiable = {n: x for n, x in leaves.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    grads = torch.autograd.grad(output, list(differentiable.values()), grad.to(output), allow_unused=True)
    result = {"output": output.detach()}
    for (name, leaf), value in zip(differentiable.items(), grads):
        result[f"grad of {name}"] = torch.zeros_like(leaf) if value is None else value.detach()
    return result


def compare_with_reference(
    kernel: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    *,
    seed: int = 1,
    factor: float = 2.0,
    floor: dict[str, float] | None = None,
    terms: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None,
) -> None:
    """Compare the kernel with the reference in the inputs' dtype and in fp64, forward and every gradient.

    `kernel` and `reference` take the inputs as keywords and return one tensor. The kernel is called first, and once, so
    that the reference may use the kernel's choices. Floating-point inputs get gradients; the others (None, integers)
    are passed unchanged. See `assert_within_budget`; its `terms` come by name from a function of the output's gradient,
    which is called once and only if needed.
    """

    def wide(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    drawn: list[torch.Tensor] = []

    def grad(output):
        """Draw the gradient for the first output, in its dtype; the other outputs get the same rounded numbers."""
        if not drawn:
            drawn.append(torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output))
        return drawn[0]

    actual = gradients(kernel, inputs, grad)
    lossy = gradients(reference, inputs, grad)
    exact = gradients(reference, {name: wide(x) for name, x in inputs.items()}, grad)
    sizes = functools.cache(lambda: terms(drawn[0]) if terms else {})
    for name in actual:
        assert_within_budget(
            name, actual[name], lossy[name], exact[name], factor=factor, floor=(floor or {}).get(name),
            terms=lambda name=name: sizes().get(name),
        )  # fmt: skip


def assert_within_budget(
    name: str,
    actual: torch.Tensor,
    lossy: torch.Tensor,
    exact: torch.Tensor,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    terms: Callable[[], torch.Tensor | None] = lambda: None,
) -> None:
    """Assert that the kernel's error is at most `factor` times that of the reference in this dtype.

    Args:
        actual: the kernel's result.
        lossy: the reference's result for the same inputs in the same dtype.
        exact: the reference's result in fp64.
        floor: an error relative to the size of `exact` that is always allowed; defaults to two roundings of the dtype.
            Few numbers need a larger floor: the reference's error, estimated from n numbers, has a relative uncertainty
            of 1/sqrt(n), and on a single one it may be 0 by chance.
        terms: a function that returns the size of the terms that cancel in `exact`, if nearly all may: a tensor with
            its shape, or one number. The floor is relative to this size if it is larger than that of `exact`. The
            function is only called if the error is over the budget without it.

    Two errors are compared with the budget: the norm of the difference, and its largest element (with twice the
    allowance, since a maximum varies more).
    """
    assert actual.shape == exact.shape, f"{name}: shape {list(actual.shape)}, expected {list(exact.shape)}"
    assert actual.dtype == lossy.dtype, f"{name}: dtype {actual.dtype}, expected {lossy.dtype}"
    if exact.numel() == 0:
        return
    if floor is None:
        floor = 2 * torch.finfo(actual.dtype).eps
    actual, lossy, exact = (x.detach().cpu().double() for x in (actual, lossy, exact))
    assert torch.isfinite(actual).all(), f"{name}: {int((~torch.isfinite(actual)).sum())} elements are not finite"
    error, reference_error = actual - exact, lossy - exact
    floor *= 1 + 3 / exact.numel() ** 0.5
    for kind, measure, allowance in (
        ("norm", lambda x: x.norm().item(), factor),
        ("largest element", lambda x: x.abs().max().item(), 2 * factor),
    ):
        size, got = measure(exact), measure(error)
        if got > allowance * max(measure(reference_error), floor * size) and (cancels := terms()) is not None:
            size = max(size, measure(cancels.detach().cpu().double()))
        budget = allowance * max(measure(reference_error), floor * size)
        where = int(error.abs().argmax())
        assert got <= budget, (
            f"{name}: {kind} of the error is {got:.3e}, the budget {budget:.3e} ({allowance:g} times the reference's "
            f"own {measure(reference_error):.3e} or {floor:.1e} of {size:.3e}); worst at flat index {where}: "
            f"got {actual.flatten()[where].item():.6e}, expected {exact.flatten()[where].item():.6e}"
        )
