"""Replay training steps as CUDA graphs: the host launches one graph instead of hundreds of kernels.

Letters: T tokens of the batch, B sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from data.batch import Batch
from data.errors import ConfigError
from training.config import RunConfig


def captures(config: RunConfig, by_heads: bool) -> bool:
    """Return whether steps on a GPU are captured as CUDA graphs.

    Messages between ranks must have fixed sizes, which those of a ring have not. Rows of a sharded table are looked up
    outside of the graph (training/ranks/staged.py); with such a table, steps of ranks that share sequences are not
    captured, nor is the loss over the whole catalogue: its products take much longer than the launches.
    """
    c, p = config.train, config.parallel
    if not c.cuda_graphs or c.compile:
        return False
    return config.loss.kind != "cross_entropy" and p.context == 1 if p.sharded else p.context == 1 or by_heads


def padded_tokens(tokens: int) -> int:
    """Round T up to one of eight sizes for each power of two, so that few graphs suffice for all batches.

    The result is never 0: with tokens of padding, a rank without sequences has gradients of the same parameters as the
    others.
    """
    return max(1, -(-tokens // _granule(tokens))) * _granule(tokens)


def padded_sequences(batch_size: int, longest: int) -> int:
    """Return B of every padded batch: `batch_size` plus sequences of padding, of `longest` tokens each."""
    return batch_size + -(-_granule(batch_size * longest) // longest)


def _granule(tokens: int) -> int:
    return max(64, 1 << max(0, tokens.bit_length() - 4))


Result = TypeVar("Result")
Losses = dict[str, Tensor]
Step = Callable[[Batch], Losses]


class GraphedStep(Generic[Result]):
    """Capture step(batch) -> result once for each padded size and phase of training, and replay it.

    step: trains on a batch without waiting for the device and returns tensors, such as losses; later calls overwrite
    them.
    batch_size: the maximum number of sequences. longest: the maximum number of tokens of a sequence.

    The first batch of a size is not captured: it compiles kernels and creates the optimiser's state. The second is
    captured. All steps run on a side stream, since a captured backward pass must not use the default stream; callers
    need not synchronise.
    """

    def __init__(self, step: Callable[[Batch], Result], *, batch_size: int, longest: int):
        self.step, self.longest = step, longest
        self.sequences = padded_sequences(batch_size, longest)
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.warmed_up: set[tuple[int, ...]] = set()
        self.captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Batch, Result]] = {}

    def __call__(self, batch: Batch) -> Result:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self._run(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _run(self, batch: Batch) -> Result:
        values = {name: padded_tokens(count) for name, count in batch.num_values.items()}
        key = padded_tokens(batch.num_tokens), batch.phase, *values.values()
        if batch.whole is not None:  # targets are gathered from all ranks
            whole = batch.whole._replace(tokens=padded_tokens(batch.whole.tokens))
            batch, key = replace(batch, whole=whole), (*key, whole.tokens)
        if key in self.captured:
            self.captured[key][1].overwrite(batch, self.longest)
        else:
            padded = batch.padded(key[0], self.sequences, self.longest, values)
            if key not in self.warmed_up:
                self.warmed_up.add(key)
                return self.step(padded)
            self.captured[key] = self._capture(padded)
        graph, _, result = self.captured[key]
        graph.replay()
        return result

    def forget(self) -> None:
        """Delete the captured graphs; sizes of batches are warmed up and captured anew, maybe with other kernels."""
        self.captured.clear()
        self.warmed_up.clear()
        self.pool = torch.cuda.graph_pool_handle()  # torch has freed the pool with the last graph

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, Result]:
        what = "train.cuda_graphs: a step of this model"
        graph, result = captured(lambda: self.step(batch), what, ConfigError, pool=self.pool, stream=self.stream)
        return graph, batch, result


def captured(
    function: Callable[[], Result], what: str, refusal: type[Exception], **options
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a CUDA graph of function(); return the graph and the result.

    what: the start of the error message. refusal: the exception to raise if the function cannot be captured; other
    errors of the function are raised unchanged. options: those of `torch.cuda.graph`.
    """
    graph, failure = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph, **options):
            try:
                result = function()
            except Exception as error:
                failure = error  # the end of the capture fails too, with an error that would hide this one
                raise
    except Exception as error:
        cause = failure or error
        if not means_no_capture(cause):
            raise cause from None
        raise refusal(f"{what} cannot be captured, set the option to false ({cause})") from cause
    return graph, result


def means_no_capture(error: Exception) -> bool:
    """Return whether `error` means that an operation cannot be captured: the messages of CUDA and torch mention it.

    Other errors, such as running out of memory, would also happen without a capture.
    """
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, torch.OutOfMemoryError)
        and "captur" in str(error).lower()
    )
