"""Functions on a GPU captured as CUDA graphs: the host queues one launch where it queued hundreds."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.errors import ServingError
from training.graph import captured

MOST = 64  # captured graphs


@dataclass
class _Captured:
    """A graph; the tensors that it reads and writes; where its inputs pass through on the host, and when they have."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    staged: list[Tensor]
    copied: torch.cuda.Event
    output: Tensor


class Graphs:
    """Calls of functions whose inputs come in few shapes: captured at a shape's second call, then replayed.

    The first call runs as it is, which compiles kernels and fills caches. Graphs share one pool of memory for what they
    compute between inputs and output, so together they take what the greatest takes, beside inputs and outputs. At most
    `most` are kept; the one that was used least recently goes first. Not safe for threads: the caller's lock holds from
    the call until its result was used.
    """

    def __init__(self, device: torch.device, most: int = MOST):
        self.device, self.most = device, most
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.seen_once: OrderedDict[Hashable, None] = OrderedDict()
        self.captured: OrderedDict[Hashable, _Captured] = OrderedDict()

    def staged(self, key: Hashable, place: int) -> Tensor | None:
        """Return the host memory that input number `place` is copied from, to be filled and passed; or None.

        Other tensors on the CPU are copied there first.
        """
        known = self.captured.get(key)
        if known is None:
            return None
        known.copied.synchronize()
        return known.staged[place]

    def __call__(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs); later calls overwrite the result.

        key: identifies the function and the shapes and dtypes of `inputs`, on the CPU or the device; the function gets
        them on the device, must not wait for it, and must not read other memory that moves.
        """
        known = self.captured.get(key)
        if known is None:
            if key not in self.seen_once:
                self.seen_once[key] = None
                while len(self.seen_once) > 16 * self.most:
                    self.seen_once.popitem(last=False)
                return function(*(x.to(self.device) for x in inputs))
            known = self._capture(function, inputs)
            while len(self.captured) >= self.most:
                self.captured.popitem(last=False)
            self.captured[key] = known
        self.captured.move_to_end(key)
        known.copied.synchronize()
        for mine, staged, value in zip(known.inputs, known.staged, inputs):
            if staged is not mine and staged is not value:
                staged.copy_(value)
                value = staged
            mine.copy_(value, non_blocking=True)
        known.copied.record()
        known.graph.replay()
        return known.output

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Captured:
        mine = [x.to(self.device, copy=True) for x in inputs]
        staged = [y if x.is_cuda else torch.empty_like(x, pin_memory=True) for x, y in zip(inputs, mine)]
        # Run once before the capture: libraries set themselves up at a thread's first call, which a capture forbids.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function(*mine)
        graph, output = captured(
            lambda: function(*mine),
            "cuda_graphs: a request of this model",
            ServingError,
            pool=self.pool,
            stream=self.stream,
            capture_error_mode="thread_local",  # other threads may use the device meanwhile
        )
        return _Captured(graph, mine, staged, torch.cuda.Event(), output)
