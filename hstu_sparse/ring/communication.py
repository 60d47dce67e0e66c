"""A ring of processes: blocks of keys and values go round while their attention is computed; errors that name a rank.

Letters: W processes of the group.

In step i a process holds the block of the process i places before it. The next block is on its way, from the
predecessor and to the successor, while the present one is at work. Gradients of a block travel behind it and gather
what every process adds; after W steps they are home.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hstu_sparse import jagged


class Pending:
    """Tensors on their way; `wait` gives those that arrive."""

    def __init__(self, ring: "Ring", works: list, sent: list[torch.Tensor], received: list[torch.Tensor]):
        self.ring, self.works, self.sent, self.received = ring, works, sent, received

    def wait(self) -> list[torch.Tensor]:
        for work, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.ring.lost(peer, error) from error
        self.sent = []
        return self.received


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

    def send_on(self, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> Pending:
        """Sends the tensors to the successor, receives as many of these shapes from the predecessor."""
        tensors = [x.contiguous() for x in tensors]
        received = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
        operations = [dist.P2POp(dist.isend, x, self.next, self.group) for x in tensors if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, self.previous, self.group) for x in received if x.numel()]
        if not operations:
            return Pending(self, [], tensors, received)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.lost(None, error) from error
        # NCCL gives one work for all of them.
        peers = [operation.peer for operation in operations] if len(works) == len(operations) else [None] * len(works)
        return Pending(self, list(zip(works, peers)), tensors, received)

    def blocks(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(rank whose tokens they are, tensors) of every process, the own ones first.

        sizes: first dimension of the tensors on each rank; the other dimensions agree.
        """
        current = list(tensors)
        for step in range(self.world):
            source, pending = (self.rank - step) % self.world, None
            if step + 1 < self.world:
                size = sizes[(source - 1) % self.world]
                pending = self.send_on(current, [(size, *x.shape[1:]) for x in current])
            yield source, current
            if pending is not None:
                current = pending.wait()

    def agree(self, what: str, mine: dict, *, always: bool = False) -> list[dict]:
        """What every rank calls its own, after a check that all agree; only in a group's first call, unless `always`
        or HSTU_SPARSE_DEBUG=1 asks for it in each.

        what: names the function. mine: name -> a small object; those whose name begins with "own" may differ.

        Raises:
            ValueError: on every rank, naming one that differs.
        """
        if self.world == 1:
            return [mine]
        known = _agreed.setdefault(self.group, set())
        if what in known and not (always or jagged.DEBUG):
            return []
        found: list[dict] = [{} for _ in range(self.world)]
        try:
            dist.all_gather_object(found, mine, self.group)
        except RuntimeError as error:
            raise RuntimeError(f"{what}: rank {dist.get_rank()} lost a rank of the group: {error}") from error
        for name in mine:
            if name.startswith("own"):
                continue
            values = [rank.get(name) for rank in found]
            usual = max(values, key=values.count)
            for rank, value in enumerate(values):
                if value != usual:
                    other = values.index(usual)
                    raise ValueError(f"{what}: rank {rank} has {name}={value}, rank {other} has {name}={usual}")
        known.add(what)
        return found

    def lost(self, peer: int | None, error: Exception) -> RuntimeError:
        """The error of a communication that failed, naming the ranks that it was with."""
        ranks = f"rank {peer}" if peer is not None else f"rank {self.previous} or rank {self.next}"
        return RuntimeError(f"ring attention: rank {dist.get_rank()} lost {ranks}: {error}")


# Process group -> the functions in which its ranks have been found to agree.
_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class GradientRing:
    """Gradients of the blocks, fp32 sums that follow them round. Used within a loop over `Ring.blocks`."""

    def __init__(self, ring: Ring, sizes: Sequence[int]):
        self.ring, self.sizes, self.pending = ring, sizes, None

    def add(self, source: int, gradients: list[torch.Tensor]) -> None:
        """What this process adds for the block of rank `source`, from which on the tensors belong to the ring."""
        if self.pending is not None:
            for mine, earlier in zip(gradients, self.pending.wait(), strict=True):
                mine += earlier
        self.result = gradients
        if self.ring.world > 1:
            size = self.sizes[(source - 1) % self.ring.world]
            self.pending = self.ring.send_on(gradients, [(size, *x.shape[1:]) for x in gradients])

    def home(self) -> list[torch.Tensor]:
        """The sums for the own block, after the loop."""
        return self.result if self.pending is None else self.pending.wait()
