"""AdamW for models whose parameters are not all fp32."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from training.config import TrainConfig

CHUNK = 2**24  # elements of a 16-bit parameter updated at a time, with 128 MiB of fp32 weights and gradients


def state_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight's moments and average: the weight's dtype, but at least fp32.

    In bfloat16 an addition of less than 1/512 of a number is lost, and updates of averages are that small.
    """
    return torch.promote_types(weight.dtype, torch.float32)


def bytes_in_training(weight: Tensor, averaged: bool) -> int:
    """Return the bytes of a weight, its gradient, its two moments and, if `averaged`, its moving average."""
    return weight.numel() * (2 * weight.element_size() + (2 + averaged) * state_dtype(weight).itemsize)


class AdamW(torch.optim.AdamW):
    """Fused AdamW of torch, with fp32 moments for 16-bit parameters, whose steps are computed in fp32 and rounded."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        narrow = [(p, p.grad, group) for group, p in self._narrow() if p.grad is not None]
        for p, _, _ in narrow:
            p.grad = None  # torch's step skips a parameter without a gradient
        super().step()
        for p, grad, group in narrow:
            p.grad = grad
            self._step_in_fp32(p, grad, group)

    def _narrow(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Return the 16-bit parameters with their groups."""
        return [(group, p) for group in self.param_groups for p in group["params"] if p.dtype != state_dtype(p)]

    def _step_in_fp32(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=state_dtype(p), requires_grad=False)
        tensors = (p.view(-1), grad.reshape(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        for weight, g, first, second in zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True):
            wide = weight.float()
            adamw(
                [wide],
                [g.float()],
                [first],
                [second],
                [],
                [state["step"].clone()],  # adamw adds 1 to it
                fused=True,
                capturable=group["capturable"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            weight.copy_(wide)
        state["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`; moments of 16-bit parameters may be saved in 16 bits."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if p.dtype != state_dtype(p) and number in saved:  # torch has cast them to the parameter's dtype
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = saved[number][name].to(p.device, state_dtype(p), copy=True)


def build_optimizer(c: TrainConfig, weights: Iterable[Tensor], device: torch.device, captured: bool) -> AdamW:
    """Build the optimiser of a run; a captured step reads the learning rate from a tensor on the device."""
    lr = torch.tensor(c.lr, device=device) if captured else c.lr
    return AdamW(weights, lr=lr, betas=c.betas, weight_decay=c.weight_decay, capturable=captured)
