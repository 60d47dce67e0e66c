"""Capture functions on a GPU as CUDA graphs: the host queues one launch in place of hundreds."""

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
    """A captured graph.

    inputs, output  the tensors on the device that the graph reads and writes
    staged          host memory from which the inputs are copied
    copied          an event after the last copy
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    staged: list[Tensor]
    copied: torch.cuda.Event
    output: Tensor


class Graphs:
    """Calls of functions whose inputs come in few shapes: captured at a shape's second call, then replayed.

    The first call runs without a graph, which compiles kernels and fills caches. All graphs share one pool of memory
    for intermediate results, which is as large as the largest graph needs. At most `most` graphs are kept; the least
    recently used one is dropped first. Not thread-safe: the caller holds a lock from the call until the result has been
    used.
    """

    def __init__(self, device: torch.device, most: int = MOST):
        self.device, self.most = device, most
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.seen_once: OrderedDict[Hashable, None] = OrderedDict()
        self.captured: OrderedDict[Hashable, _Captured] = OrderedDict()

    def staged(self, key: Hashable, place: int) -> Tensor | None:
        """Return the host memory from which input `place` is copied; None if nothing is captured for `key`.

        Fill it and pass it as the input, which saves a copy.
        """
        known = self.captured.get(key)
        if known is None:
            return None
        known.copied.synchronize()
        return known.staged[place]

    def __call__(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs); later calls overwrite the result.

        key: identifies the function and the shapes and dtypes of `inputs`, which are on the CPU or the device. The
        function gets them on the device; it must not wait for the device, and other memory that it reads must not move.
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
        for target, staged, value in zip(known.inputs, known.staged, inputs):
            if staged is not target and staged is not value:
                staged.copy_(value)
                value = staged
            target.copy_(value, non_blocking=True)
        known.copied.record()
        known.graph.replay()
        return known.output

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Captured:
        device_inputs = [x.to(self.device, copy=True) for x in inputs]
        staged = [y if x.is_cuda else torch.empty_like(x, pin_memory=True) for x, y in zip(inputs, device_inputs)]
        # Run once before the capture: libraries initialize themselves in a thread's first call, which captures forbid.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function(*device_inputs)
        graph, output = captured(
            lambda: function(*device_inputs),
            "cuda_graphs: a request of this model",
            ServingError,
            pool=self.pool,
            stream=self.stream,
            capture_error_mode="thread_local",  # other threads may use the device meanwhile
        )
        return _Captured(graph, device_inputs, staged, torch.cuda.Event(), output)
