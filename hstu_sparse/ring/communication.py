"""Pass blocks of keys and values round a ring of processes while their attention is computed; errors name a rank.

Letters: W processes of the group.

In step i a process holds the block of the process i places before it. The next block is transferred, from the
predecessor and to the successor, during the computation on the present one. Gradients of a block follow it, from step 1
on, and accumulate what every process adds; its owner adds its own part last, when they have returned.
"""

import functools
import json
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hstu_sparse.core import jagged


class Transfer:
    """Send tensors to the successor, and receive as many of the given shapes from the predecessor.

    `post` starts it, once; it waits for the work that the device had been given when the transfer was created, not for
    later work. `wait` returns the received tensors.
    """

    def __init__(self, ring: "Ring", tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]):
        self.ring, self.works = ring, []
        self.sent = [x.contiguous() for x in tensors]
        self.received = [x.new_empty(shape) for x, shape in zip(self.sent, shapes, strict=True)]
        self.device = self.sent[0].device
        if self.device.type == "cuda":
            self.ready = torch.cuda.current_stream(self.device).record_event()

    def post(self) -> "Transfer":
        if self.device.type != "cuda":
            self._post()
            return self
        stream = _stream(self.device)
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            self._post()
        return self

    def _post(self) -> None:
        ring = self.ring
        operations = [dist.P2POp(dist.isend, x, ring.next, ring.group) for x in self.sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, ring.previous, ring.group) for x in self.received if x.numel()]
        if not operations:
            return
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise ring.lost(None, error) from error
        # NCCL returns one work object for all of them.
        peers = [operation.peer for operation in operations] if len(works) == len(operations) else [None] * len(works)
        self.works = list(zip(works, peers))

    def wait(self) -> list[torch.Tensor]:
        for work, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.ring.lost(peer, error) from error
        if self.works and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A CUDA graph has to end in the stream in which it began.
            torch.cuda.current_stream(self.device).wait_stream(_stream(self.device))
        self.sent = self.works = []
        return self.received


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which transfers are posted: they wait for the stream that is current at that time."""
    return torch.cuda.Stream(device)


class Ring:
    """The place of this process in a group: `rank` of `world` W. Without a process group W is 1.

    group: a torch.distributed process group, None for the default one.
    """

    def __init__(self, group=None):
        self.group, self.rank, self.world = group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD if group is None else group
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError("ring attention: this process is not in the group that it was given")
            self.next, self.previous = (
                dist.get_global_rank(self.group, (self.rank + step) % self.world) for step in (1, -1)
            )
        elif group is not None:
            raise ValueError("ring attention: a group was given, but torch.distributed is not initialised")

    def blocks(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield (rank whose tokens they are, tensors) of every process, its own first.

        On a GPU the next block is requested after the kernels for this one are launched: the request takes longer on
        the host, and the GPU would wait for the launch.

        sizes: first dimension of the tensors on each rank; the other dimensions agree.
        """
        current = list(tensors)
        for step in range(self.world):
            source, following = (self.rank - step) % self.world, None
            if step + 1 < self.world:
                size = sizes[(source - 1) % self.world]
                following = Transfer(self, current, [(size, *x.shape[1:]) for x in current])
                if following.device.type != "cuda":
                    following.post()
            yield source, current
            if following is not None:
                if following.device.type == "cuda":
                    following.post()
                current = following.wait()

    def agree(self, what: str, own_values: dict, *, always: bool = False) -> list[dict]:
        """Return every rank's values, after a check that all agree; it communicates only in a group's first call with
        these values, unless `always` or HSTU_SPARSE_DEBUG=1 is set.

        It uses the process group's store, which knows which rank is late; neither gloo nor NCCL reports that.

        what: the name of the function. values: name -> a JSON value; those whose name begins with "own" may differ.

        Raises:
            ValueError: on every rank, naming one that differs.
            RuntimeError: a rank did not respond within the process group's timeout; the message names it.
        """
        if self.world == 1:
            return [own_values]
        calls, agreed = _agreed.setdefault(self.group, ({}, set()))
        text = json.dumps(own_values)
        if (what, text) in agreed and not (always or jagged.DEBUG):
            return []
        call = calls[what] = calls.get(what, 0) + 1
        store = dist.PrefixStore(f"{self.group.group_name}/{what}", dist.distributed_c10d._get_default_store())
        store.set(f"{call}/{self.rank}", text)
        all_values = []
        for rank in range(self.world):
            try:
                all_values.append(json.loads(store.get(f"{call}/{rank}")))
            except RuntimeError as error:
                late = dist.get_global_rank(self.group, rank)
                raise RuntimeError(f"{what}: rank {dist.get_rank()} lost rank {late}: {error}") from error
        # All ranks have reached this call, and have therefore read the values of the previous one.
        store.delete_key(f"{call - 1}/{self.rank}")
        for name in own_values:
            if name.startswith("own"):
                continue
            values = [rank.get(name) for rank in all_values]
            usual = max(values, key=values.count)
            for rank, value in enumerate(values):
                if value != usual:
                    other = values.index(usual)
                    raise ValueError(f"{what}: rank {rank} has {name}={value}, rank {other} has {name}={usual}")
        agreed.add((what, text))
        return all_values

    def lost(self, peer: int | None, error: Exception) -> RuntimeError:
        """Return the error of a failed communication, naming the ranks that it was with."""
        ranks = f"rank {peer}" if peer is not None else f"rank {self.previous} or rank {self.next}"
        return RuntimeError(f"ring attention: rank {dist.get_rank()} lost {ranks}: {error}")


# Process group -> (function -> how often its ranks were compared, the values in which they agreed).
_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def backward_round(ring: Ring, tensors: Sequence[torch.Tensor], sizes: Sequence[int], add_dq, find_dkv):
    """Run a ring's backward pass: W rounds of dq and of keys' and values' gradients, which add up on their way.

    Computing dq of the own block hides the first transfer, and dq of a later block hides the transfer of its gradients.

    Args:
        tensors, sizes: as for `Ring.blocks`.
        add_dq: (rank whose block it is, its tensors) -> None.
        find_dkv: (rank, tensors, sums so far or None) -> list of the sums, fp32 for fp16 and bf16. May write into the
            given sums.

    Returns:
        The sums of this rank's own block.
    """
    pending = None
    for source, block in ring.blocks(tensors, sizes):
        if source != ring.rank:
            sums = find_dkv(source, block, None if pending is None else pending.wait())
            size = sizes[(source - 1) % ring.world]
            pending = Transfer(ring, sums, [(size, *x.shape[1:]) for x in sums]).post()
            del sums
        add_dq(source, block)
    return find_dkv(ring.rank, list(tensors), None if pending is None else pending.wait())
