"""Training steps replayed as CUDA graphs: the host queues one launch where it queued hundreds.

Letters: T tokens of the batch, B sequences.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from data.batches import Batch
from models.config import ConfigError


def padded_tokens(tokens: int) -> int:
    """T rounded up to one of eight sizes an octave, so that few graphs serve all batches."""
    return -(-tokens // _granule(tokens)) * _granule(tokens)


def _granule(tokens: int) -> int:
    return max(64, 1 << max(0, tokens.bit_length() - 4))


class GraphedStep:
    """step(batch) -> loss, captured once for each padded T and replayed.

    step: trains on a batch and returns the loss, without ever waiting for the device; its tensors may not outlive it.
    batch_size: most sequences of a batch. longest: most tokens of a sequence.

    The first batch of a size runs as it is, which compiles kernels and makes the optimiser's state; the second is
    captured. All of it happens on a stream of its own, since a captured backward pass may not meet the default stream;
    callers need not know.
    """

    def __init__(self, step: Callable[[Batch], Tensor], *, batch_size: int, longest: int):
        self.step, self.longest = step, longest
        self.sequences = batch_size + -(-_granule(batch_size * longest) // longest)
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.met: set[int] = set()
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        tokens = padded_tokens(batch.num_tokens)
        batch = batch.padded(tokens, self.sequences, self.longest)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self._run(tokens, batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _run(self, tokens: int, batch: Batch) -> Tensor:
        if tokens not in self.met:
            self.met.add(tokens)
            return self.step(batch)
        if tokens not in self.captured:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                    loss = self.step(batch)
            except RuntimeError as error:
                raise ConfigError(
                    f"train.cuda_graphs: a step of this model cannot be captured, set it to false ({error})"
                ) from error
            self.captured[tokens] = graph, batch, loss
        graph, static, loss = self.captured[tokens]
        if static is not batch:
            static.copy_(batch)
        graph.replay()
        return loss
