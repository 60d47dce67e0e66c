"""A ring of processes: blocks of keys and values go round while their attention is computed; errors that name a rank.

Letters: W processes of the group.

In step i a process holds the block of the process i places before it. The next block is on its way, from the
predecessor and to the successor, while the present one is at work. Gradients of a block travel behind it, from step 1
on, and gather what every process adds; its owner adds its own part last, when they are home.
"""

import functools
import json
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hstu_sparse import jagged


class Transfer:
    """Tensors for the successor, and as many of these shapes from the predecessor.

    `post` sets it going, once; it waits for what the device had been given when the transfer was made, not for what it
    has been given since. `wait` gives what arrives.
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
        # NCCL gives one work for all of them.
        peers = [operation.peer for operation in operations] if len(works) == len(operations) else [None] * len(works)
        self.works = list(zip(works, peers))

    def wait(self) -> list[torch.Tensor]:
        for work, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.ring.lost(peer, error) from error
        self.sent = self.works = []
        return self.received


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """What transfers are posted from: they wait for the stream that is current then."""
    return torch.cuda.Stream(device)


class Ring:
    """This process's place in a group: `rank` of `world` W. Without a process group W is 1.

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
        """(rank whose tokens they are, tensors) of every process, the own ones first.

        On a GPU the next block is sent for after the kernels for this one were launched: the host takes longer for the
        former, and would keep the GPU waiting.

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

    def agree(self, what: str, mine: dict, *, always: bool = False) -> list[dict]:
        """What every rank calls its own, after a check that all agree; only in a group's first call with this `mine`,
        unless `always` or HSTU_SPARSE_DEBUG=1 asks for it in each.

        Goes by the process group's store, which knows who is late; neither gloo nor NCCL says.

        what: names the function. mine: name -> what JSON can hold; those whose name begins with "own" may differ.

        Raises:
            ValueError: on every rank, naming one that differs.
            RuntimeError: a rank did not come within the process group's timeout; it is named.
        """
        if self.world == 1:
            return [mine]
        calls, known = _agreed.setdefault(self.group, ({}, set()))
        text = json.dumps(mine)
        if (what, text) in known and not (always or jagged.DEBUG):
            return []
        call = calls[what] = calls.get(what, 0) + 1
        store = dist.PrefixStore(f"{self.group.group_name}/{what}", dist.distributed_c10d._get_default_store())
        store.set(f"{call}/{self.rank}", text)
        found = []
        for rank in range(self.world):
            try:
                found.append(json.loads(store.get(f"{call}/{rank}")))
            except RuntimeError as error:
                late = dist.get_global_rank(self.group, rank)
                raise RuntimeError(f"{what}: rank {dist.get_rank()} lost rank {late}: {error}") from error
        # All have come to this call, and so have read those of the one before.
        store.delete_key(f"{call - 1}/{self.rank}")
        for name in mine:
            if name.startswith("own"):
                continue
            values = [rank.get(name) for rank in found]
            usual = max(values, key=values.count)
            for rank, value in enumerate(values):
                if value != usual:
                    other = values.index(usual)
                    raise ValueError(f"{what}: rank {rank} has {name}={value}, rank {other} has {name}={usual}")
        known.add((what, text))
        return found

    def lost(self, peer: int | None, error: Exception) -> RuntimeError:
        """The error of a communication that failed, naming the ranks that it was with."""
        ranks = f"rank {peer}" if peer is not None else f"rank {self.previous} or rank {self.next}"
        return RuntimeError(f"ring attention: rank {dist.get_rank()} lost {ranks}: {error}")


# Process group -> (function -> how often its ranks were compared, what they were found to agree in).
_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def backward_round(ring: Ring, tensors: Sequence[torch.Tensor], sizes: Sequence[int], add_dq, find_dkv):
    """The backward pass of a ring: W rounds of dq and of the gradients of keys and values, which gather on their way.

    The own block's dq covers the way of the first block, and the dq of a block the way of its other gradients.

    Args:
        tensors, sizes: as for `Ring.blocks`.
        add_dq: (rank whose block it is, its tensors) -> None.
        find_dkv: (rank, tensors, sums so far or None) -> list of the sums, fp32 for fp16 and bf16. May write into those
            that it is given.

    Returns:
        The sums of the own block.
    """
    pending = None
    for source, block in ring.blocks(tensors, sizes):
        if source != ring.rank:
            found = find_dkv(source, block, None if pending is None else pending.wait())
            size = sizes[(source - 1) % ring.world]
            pending = Transfer(ring, found, [(size, *x.shape[1:]) for x in found]).post()
            del found
        add_dq(source, block)
    return find_dkv(ring.rank, list(tensors), None if pending is None else pending.wait())
