"""Training steps replayed as CUDA graphs: the host queues one launch where it queued hundreds.

Letters: T tokens of the batch, B sequences.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from data.batch import Batch
from models.config import ConfigError


def padded_tokens(tokens: int) -> int:
    """T rounded up to one of eight sizes an octave, so that few graphs serve all batches."""
    return -(-tokens // _granule(tokens)) * _granule(tokens)


def padded_sequences(batch_size: int, longest: int) -> int:
    """B of every padded batch: `batch_size`, and sequences for all padding of at most `longest` tokens each."""
    return batch_size + -(-_granule(batch_size * longest) // longest)


def _granule(tokens: int) -> int:
    return max(64, 1 << max(0, tokens.bit_length() - 4))


Losses = dict[str, Tensor]
Step = Callable[[Batch], Losses]


class GraphedStep:
    """step(batch) -> losses, captured once for each padded size and phase of training, and replayed.

    step: trains on a batch and returns losses by name, 0-d, without ever waiting for the device; what it returns is
    overwritten by later calls.
    batch_size: most sequences of a batch. longest: most tokens of a sequence.

    The first batch of a size runs as it is, which compiles kernels and makes the optimiser's state; the second is
    captured. All of it happens on a stream of its own, since a captured backward pass may not meet the default stream;
    callers need not know.
    """

    def __init__(self, step: Step, *, batch_size: int, longest: int):
        self.step, self.longest = step, longest
        self.sequences = padded_sequences(batch_size, longest)
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.met: set[tuple[int, ...]] = set()
        self.captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Batch, Losses]] = {}

    def __call__(self, batch: Batch) -> Losses:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            losses = self._run(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return losses

    def _run(self, batch: Batch) -> Losses:
        values = {name: padded_tokens(count) for name, count in batch.num_values.items()}
        key = padded_tokens(batch.num_tokens), batch.phase, *values.values()
        if key in self.captured:
            self.captured[key][1].overwrite(batch, self.longest)
        else:
            padded = batch.padded(key[0], self.sequences, self.longest, values)
            if key not in self.met:
                self.met.add(key)
                return self.step(padded)
            self.captured[key] = self._capture(padded)
        graph, _, losses = self.captured[key]
        graph.replay()
        return losses

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, Losses]:
        graph, failure = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                try:
                    losses = self.step(batch)
                except Exception as error:
                    failure = error  # ending the capture fails after it, and would hide it
                    raise
        except Exception as error:
            cause = failure or error
            if not means_no_capture(cause):
                raise cause from None
            raise ConfigError(
                f"train.cuda_graphs: a step of this model cannot be captured, set it to false ({cause})"
            ) from cause
        return graph, batch, losses


def means_no_capture(error: Exception) -> bool:
    """Whether `error` says that something cannot be part of a CUDA graph: CUDA's and torch's own such errors all name
    the capture. Out of memory and others would meet a step that is not captured as well."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, torch.OutOfMemoryError)
        and "captur" in str(error).lower()
    )
