"""Send blocks of keys and values around a ring of ranks while attention is computed; errors name a rank.

Letters: W ranks of the group.

In step i, rank r computes with the block of rank r - i. During the computation it receives the next block from its
predecessor and sends the current one to its successor. In the backward pass, sums of a block's gradients follow the
block from step 1 on. They return to the block's rank, which adds its part last.
"""

import functools
import json
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hstu_sparse.core import jagged


class Transfer:
    """Send tensors to the successor, and receive tensors of these shapes from the predecessor.

    Call `post` once to start the transfer, and `wait` for the received tensors. On a GPU the transfer waits for work
    that was launched before it was created, not for later work.
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
            # A CUDA graph must end in the stream in which it began.
            torch.cuda.current_stream(self.device).wait_stream(_stream(self.device))
        self.sent = self.works = []
        return self.received


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which transfers are posted."""
    return torch.cuda.Stream(device)


class Ring:
    """The ranks of a process group: this `rank`, the `next` and the `previous` one, and `world` W (1 without a group).

    group: a torch.distributed process group, None for the default group.
    """

    def __init__(self, group=None):
        self.group, self.rank, self.world = group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD if group is None else group
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError("ring attention: this process is not a member of `group`")
            self.next, self.previous = (
                dist.get_global_rank(self.group, (self.rank + step) % self.world) for step in (1, -1)
            )
        elif group is not None:
            raise ValueError("ring attention: `group` needs torch.distributed, which is not initialised")

    def blocks(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield (rank, its tensors) for every rank, this one first.

        On a GPU the transfer of the next block is posted after the caller has launched its kernels for this block:
        posting takes longer than launching, and the GPU would be idle.

        sizes: the first dimension of the tensors on each rank; the other dimensions are equal.
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

    def check_agreement(self, function: str, local_values: dict, *, always: bool = False) -> list[dict]:
        """Check that all ranks call a function with equal values; return the values of all ranks.

        Only a group's first call with these values communicates and returns values, unless `always` is true or
        HSTU_SPARSE_DEBUG=1 is set; other calls return []. The ranks communicate by the store of the process group,
        which names a rank that does not respond, unlike gloo and NCCL.

        Args:
            function: the name of the function.
            local_values: name -> JSON value. Values whose names begin with "local" may differ.
            always: see above.

        Raises:
            ValueError: ranks differ; the message, on every rank, names one.
            RuntimeError: a rank did not respond within the timeout of the default process group; the message names it.
        """
        if self.world == 1:
            return [local_values]
        calls, agreed = _agreed.setdefault(self.group, ({}, set()))
        text = json.dumps(local_values)
        if (function, text) in agreed and not (always or jagged.DEBUG):
            return []
        call = calls[function] = calls.get(function, 0) + 1
        store = dist.PrefixStore(f"{self.group.group_name}/{function}", dist.distributed_c10d._get_default_store())
        store.set(f"{call}/{self.rank}", text)
        all_values = []
        for rank in range(self.world):
            try:
                all_values.append(json.loads(store.get(f"{call}/{rank}")))
            except RuntimeError as error:
                late = dist.get_global_rank(self.group, rank)
                raise RuntimeError(f"{function}: rank {dist.get_rank()} lost rank {late}: {error}") from error
        # All ranks are in this call. They have read the values of the previous call, which can be deleted.
        store.delete_key(f"{call - 1}/{self.rank}")
        for name in local_values:
            if name.startswith("local"):
                continue
            values = [rank.get(name) for rank in all_values]
            most_common = max(values, key=values.count)
            for rank, value in enumerate(values):
                if value != most_common:
                    other = values.index(most_common)
                    raise ValueError(
                        f"{function}: rank {rank} has {name}={value}, rank {other} has {name}={most_common}"
                    )
        agreed.add((function, text))
        return all_values

    def lost(self, peer: int | None, error: Exception) -> RuntimeError:
        """Return the error for a failed communication. peer: the rank, or None if it may be either neighbour."""
        ranks = f"rank {peer}" if peer is not None else f"rank {self.previous} or rank {self.next}"
        return RuntimeError(f"ring attention: rank {dist.get_rank()} lost {ranks}: {error}")


# Process group -> (function -> the number of comparisons, {(function, values on which the ranks agreed)}).
_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def ring_backward(ring: Ring, tensors: Sequence[torch.Tensor], sizes: Sequence[int], add_dq, compute_dkv):
    """Run the backward pass of a ring: in each of W steps, dq, dk and dv of a block.

    While dq is computed, data are transferred: the next block in step 0, the block's gradients in later steps.

    Args:
        ring: the ranks.
        tensors, sizes: as for `Ring.blocks`.
        add_dq: (rank, its tensors) -> None; adds the contribution of the block to dq.
        compute_dkv: (rank, its tensors, earlier sums or None) -> list of the sums of the block's gradients, fp32 for
            fp16 and bf16. It may overwrite the earlier sums.

    Returns:
        The sums of this rank's block.
    """
    pending = None
    for source, block in ring.blocks(tensors, sizes):
        if source != ring.rank:
            sums = compute_dkv(source, block, None if pending is None else pending.wait())
            size = sizes[(source - 1) % ring.world]
            pending = Transfer(ring, sums, [(size, *x.shape[1:]) for x in sums]).post()
            del sums
        add_dq(source, block)
    return compute_dkv(ring.rank, list(tensors), None if pending is None else pending.wait())
