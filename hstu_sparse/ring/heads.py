"""Exchange tokens for heads among the ranks of a group, before and after attention.

Between the exchanges each rank has all tokens of a part of the heads, so that any attention whose heads are independent
runs unchanged.

Letters: T tokens of this rank, N tokens of all ranks, H heads, D channels of a head, W ranks of the group.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hstu_sparse.core.validation import check_tensor
from hstu_sparse.ring.communication import Ring


class Exchange(NamedTuple):
    """An all-to-all exchange of several tensors, or its `inverse`. tokens: the numbers of tokens of all ranks.

    All sizes are known on the host, so that a CUDA graph can capture it.
    """

    ring: Ring
    tokens: tuple[int, ...]
    inverse: bool = False

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Map each [T, H, D] to [N, H/W, D]; the inverse maps [N, H/W, D] to [T, H, D]."""
        world, T, N = self.ring.world, self.tokens[self.ring.rank], sum(self.tokens)
        heads = [x.shape[1] // (1 if self.inverse else world) for x in tensors]
        widths = [n * x.shape[2] for n, x in zip(heads, tensors)]
        if self.inverse:
            parts = [x.reshape(N, width) for x, width in zip(tensors, widths)]
        else:
            parts = [x.reshape(T, world, width).transpose(0, 1) for x, width in zip(tensors, widths)]
        sent = (parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, -1)).view(-1, sum(widths))
        received = sent.new_empty(world * T if self.inverse else N, sum(widths))
        if N:
            self._exchange(received, sent)
        if self.inverse:
            received = received.view(world, T, sum(widths)).transpose(0, 1)
        split = zip(received.split(widths, -1), heads, tensors)
        if self.inverse:
            return tuple(y.reshape(T, world * n, x.shape[2]) for y, n, x in split)
        return tuple(y.unflatten(1, (n, x.shape[2])) for y, n, x in split)

    def _exchange(self, received: Tensor, sent: Tensor) -> None:
        counts = [*self.tokens], [self.tokens[self.ring.rank]] * self.ring.world
        try:
            dist.all_to_all_single(received, sent, *(counts[::-1] if self.inverse else counts), group=self.ring.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"attention by heads: rank {dist.get_rank()} lost another of the {self.ring.world} ranks: {error}"
            ) from error


class _ExchangeFunction(torch.autograd.Function):
    """Apply an exchange; its gradient is the inverse exchange. Differentiable any number of times."""

    @staticmethod
    def forward(ctx, exchange: Exchange, *tensors):
        ctx.exchange = exchange._replace(inverse=not exchange.inverse)
        return exchange(tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, *_ExchangeFunction.apply(ctx.exchange, *grads)


def tokens_to_heads(*tensors: Tensor, tokens: Sequence[int] | None = None, group=None) -> tuple[Tensor, ...]:
    """Exchange tensors so that each rank has the tokens of all ranks for a part of the heads.

    Rank r of W gets the heads r*H/W to (r+1)*H/W - 1 of each tensor, with the tokens of all ranks in the order of the
    ranks. `heads_to_tokens` is the inverse.

    All ranks must call the function, with tensors whose shapes differ in T only. It does not wait for the device, and a
    CUDA graph can capture it. With one process, or without torch.distributed, it returns `tensors`.

    Args:
        tensors: [T, H, D] each, such as queries, keys and values; of the same dtype, any strides. W divides each H.
        tokens: T of each rank; by default T of this rank on every rank.
        group: a torch.distributed process group, by default all processes.

    Returns:
        [N, H/W, D] each, N the sum of `tokens`; views of one tensor. Differentiable.

    Examples:
        >>> q, k, v = torch.randn(3, 12, 4, 16)  # without torch.distributed: one rank with all heads
        >>> [tuple(x.shape) for x in hstu_sparse.tokens_to_heads(q, k, v)]
        [(12, 4, 16), (12, 4, 16), (12, 4, 16)]

    Raises:
        TypeError, ValueError: with the expected and the actual value; on every rank if ranks disagree.
        RuntimeError: a rank does not respond.

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
    """
    name = "tokens_to_heads"
    if not tensors:
        raise ValueError(f"{name}: expected at least one tensor, got none")
    sizes: dict[str, int] = {}
    for i, x in enumerate(tensors):
        check_tensor(f"tensors[{i}]", x, f"T H{i} D{i}", sizes)
        if x.dtype != tensors[0].dtype or x.device != tensors[0].device:
            expected, actual = (f"{y.dtype} on {y.device}" for y in (tensors[0], x))
            raise ValueError(f"tensors[{i}] must be {expected}, as tensors[0], got {actual}")
    exchange = _exchange(name, tensors, tokens, group)
    world, count = exchange.ring.world, exchange.tokens[exchange.ring.rank]
    if sizes["T"] != count:
        raise ValueError(f"tokens has T={count} for this rank, got tensors with {sizes['T']}")
    for i, x in enumerate(tensors):
        if x.shape[1] % world:
            raise ValueError(f"the {world} ranks must divide the heads of tensors[{i}], got H={x.shape[1]}")
    return tensors if world == 1 else _ExchangeFunction.apply(exchange, *tensors)


def heads_to_tokens(x: Tensor, tokens: Sequence[int] | None = None, group=None) -> Tensor:
    """Exchange a tensor so that each rank has all heads of its tokens: the inverse of `tokens_to_heads`.

    Args:
        x: [N, H/W, D], the tokens of all ranks for this rank's heads; any strides.
        tokens: T of each rank, whose sum is N; N/W each by default.
        group: a torch.distributed process group, by default all processes.

    Returns:
        [T, H, D]. Differentiable.

    Examples:
        >>> out = torch.randn(12, 4, 16)  # without torch.distributed: one rank with all heads
        >>> torch.equal(hstu_sparse.heads_to_tokens(out), out)
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value; on every rank if ranks disagree.
        RuntimeError: a rank does not respond.

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
    """
    name = "heads_to_tokens"
    check_tensor("x", x, "N H D", {})
    exchange = _exchange(name, [x], tokens, group, inverse=True)
    if sum(exchange.tokens) != x.shape[0]:
        raise ValueError(f"x must have the N={sum(exchange.tokens)} tokens of all ranks, got {x.shape[0]}")
    return x if exchange.ring.world == 1 else _ExchangeFunction.apply(exchange, x)[0]


def _exchange(
    name: str, tensors: Sequence[Tensor], tokens: Sequence[int] | None, group, inverse: bool = False
) -> Exchange:
    """Return the exchange over a group, after a check that all ranks called `name` with tensors of the same shapes."""
    ring = Ring(group)
    if tokens is None:
        tokens = [tensors[0].shape[0] // (ring.world if inverse else 1)] * ring.world
    if len(tokens) != ring.world:
        raise ValueError(f"tokens must have a number for each of {ring.world} ranks, got {len(tokens)}")
    ring.check_agreement(name, {"tensors": [list(x.shape[1:]) for x in tensors], "dtype": str(tensors[0].dtype)})
    return Exchange(ring, tuple(tokens), inverse)
