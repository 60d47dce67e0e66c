"""Divide sequences among the ranks of a ring, and describe the pieces of every rank.

Letters: B sequences, T tokens of this rank, W ranks, P pieces of a sequence on a rank, n tokens of a whole sequence.

Without zigzag a sequence is cut into W chunks, and rank r has chunk r. With zigzag it is cut into 2W chunks, and rank r
has chunks r and 2W-1-r, so that with a causal mask all ranks have the same work. Chunk c of C has the tokens c*n//C to
(c+1)*n//C - 1.
"""

from typing import NamedTuple

import torch

from hstu_sparse.core.jagged import check_jagged, check_offset_values, check_storage, readable
from hstu_sparse.core.registration import cached_constant
from hstu_sparse.core.validation import check_bool, check_int
from hstu_sparse.flash.reference import Layout
from hstu_sparse.ring.communication import Ring

MAX_RANKS = 1 << 16
MAX_LENGTH = 2**31 - 1  # tokens of a sequence


class RingPlan(NamedTuple):
    """The pieces of all ranks; tensors are int32.

    offsets        [W, B*P+1], the offsets of the pieces of every rank
    starts         [W, B*P], the first positions of the pieces in their sequences
    sequences      [W, B+1], the offsets of the sequences of every rank
    begins         [W, P, B+1], the first row of piece p of each sequence, and the number of rows of the rank
    lengths        [W, P, B], the number of rows of piece p of each sequence
    tokens         T of every rank
    pieces         P
    rank           this rank
    piece_ranges   (start, length) of every piece of every rank, if all sequences have the same; None otherwise

    Examples:
        >>> plan = hstu_sparse.whole_plan(torch.tensor([0, 8, 12]), rank=0, world=2)
        >>> plan.rank, plan.tokens, plan.pieces, plan.lengths.tolist()
        (0, (6, 6), 1, [[[4, 2]], [[4, 2]]])
        >>> plan.layout(source=0).pieces
        1
    """

    offsets: torch.Tensor
    starts: torch.Tensor
    sequences: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    tokens: tuple[int, ...]
    pieces: int
    rank: int
    piece_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None

    def layout(self, source: int) -> Layout:
        """Return the layout of the queries of this rank and the keys of rank `source`."""
        queries = self.offsets[self.rank], self.starts[self.rank]
        return Layout(queries[0], self.offsets[source], queries[1], self.starts[source], self.pieces)


def check_plan(plan) -> None:
    """Raise TypeError unless `plan` is a RingPlan or None."""
    if plan is not None and not isinstance(plan, RingPlan):
        raise TypeError(f"plan must be a RingPlan or None, got {type(plan).__name__}")


def check_plan_fits(plan: RingPlan, seq_offsets: torch.Tensor, ring: Ring, pieces: int | None = None) -> None:
    """Raise ValueError if a plan is for another rank or batch, or for another number of pieces (None: any number).

    The values of offsets are compared if they are `readable`.
    """
    if (plan.rank, len(plan.tokens)) != (ring.rank, ring.world):
        raise ValueError(
            f"plan is for rank {plan.rank} of {len(plan.tokens)}, this is rank {ring.rank} of {ring.world}"
        )
    if pieces is not None and plan.pieces != pieces:
        raise ValueError(f"plan is for {plan.pieces} pieces of each sequence, this call needs {pieces}")
    planned = plan.sequences[plan.rank]
    if planned.shape != seq_offsets.shape:
        raise ValueError(f"plan is for B={len(planned) - 1} sequences, got B={len(seq_offsets) - 1}")
    if planned.device != seq_offsets.device:
        raise ValueError(f"plan is on {planned.device}, seq_offsets on {seq_offsets.device}")
    if readable(seq_offsets) and readable(planned) and not torch.equal(planned.long(), seq_offsets.long()):
        where = int((planned.long() != seq_offsets.long()).nonzero()[0])
        raise ValueError(
            f"plan is for another batch: its seq_offsets[{where}] is {int(planned[where])}, "
            f"got {int(seq_offsets[where])}"
        )


def _check_cut(seq_offsets: torch.Tensor, rank: int, world: int, zigzag: bool) -> None:
    check_bool("zigzag", zigzag)
    check_jagged(seq_offsets, MAX_LENGTH)
    check_storage("seq_offsets", seq_offsets, values=True)
    check_offset_values(seq_offsets, MAX_LENGTH, None)  # the following code waits for the device anyway
    check_int("world", world, 1, MAX_RANKS)
    check_int("rank", rank, 0, world - 1)


def cut_sequences(
    seq_offsets: torch.Tensor, rank: int, world: int, *, zigzag: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a rank of a ring, for sequences that are divided among all ranks.

    Args:
        seq_offsets: [B+1] integers, the offsets of the whole sequences.
        rank: 0 <= rank < world.
        world: the number of ranks.
        zigzag: the rank has two chunks of each sequence, see `ring_flash_attention`; by default one.

    Returns:
        index [T] int64, the tokens of the rank, so that x[index] are its rows; and the offsets [B+1] of these rows,
        with dtype and device of seq_offsets. Waits for the device.

    Examples:
        >>> seq_offsets = torch.tensor([0, 8, 12])
        >>> index, offsets = hstu_sparse.cut_sequences(seq_offsets, rank=0, world=2, zigzag=True)
        >>> index.tolist(), offsets.tolist()  # the first and the last quarter of each sequence
        ([0, 1, 6, 7, 8, 11], [0, 4, 6])
    """
    _check_cut(seq_offsets, rank, world, zigzag)
    offsets = seq_offsets.detach().cpu().long()
    starts, lengths = _chunks(offsets.diff(), world, zigzag)
    begins = (offsets[:-1, None] + starts[rank]).flatten()
    sizes = lengths[rank].flatten()
    index = torch.repeat_interleave(begins - (sizes.cumsum(0) - sizes), sizes)
    index = index + torch.arange(len(index), device="cpu")
    local = torch.nn.functional.pad(lengths[rank].sum(1).cumsum(0), (1, 0))
    return index.to(seq_offsets.device), local.to(seq_offsets)


def _chunks(lengths: torch.Tensor, world: int, zigzag: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (start, length) [W, B, P] of the pieces of every rank. lengths: [B], of the whole sequences."""
    count = 2 * world if zigzag else world
    bounds = torch.arange(count + 1, device="cpu")[:, None] * lengths // count
    rank = torch.arange(world, device="cpu")
    chunk = torch.stack([rank, count - 1 - rank], 1) if zigzag else rank[:, None]  # [W, P]
    starts = bounds[chunk].transpose(1, 2)
    return starts, bounds[chunk + 1].transpose(1, 2) - starts


def _plan(starts: torch.Tensor, lengths: torch.Tensor, rank: int, device: torch.device) -> RingPlan:
    check_storage("seq_offsets", lengths, values=True)
    offsets = torch.nn.functional.pad(lengths.flatten(1).cumsum(1), (1, 0))
    pieces = lengths.shape[2]
    ends = offsets[:, -1:, None].expand(-1, pieces, 1)
    begins = torch.cat([offsets[:, :-1].unflatten(1, (-1, pieces)).transpose(1, 2), ends], 2)
    tensors = offsets, starts.flatten(1), offsets[:, ::pieces], begins, lengths.transpose(1, 2)
    piece_ranges, ranges = None, torch.stack([starts, lengths], -1)
    if (ranges == ranges[:, :1]).all():
        piece_ranges = tuple(tuple(map(tuple, rank)) for rank in ranges[:, :1].flatten(1, 2).tolist())
    # A view's last stride is 1 even in a dimension of size 1, as FlashAttention-4 requires.
    on_device = [x.int().flatten().view(x.shape).to(device) for x in tensors]
    return RingPlan(*on_device, tuple(offsets[:, -1].tolist()), pieces, rank, piece_ranges)


@cached_constant
def fixed_plan(num_seqs: int, tokens: int, rank: int, world: int, zigzag: bool, device: torch.device) -> RingPlan:
    """Return the plan for `num_seqs` sequences with `tokens` tokens of each on every rank."""
    starts, lengths = _chunks(torch.full((num_seqs,), tokens * world, device="cpu"), world, zigzag)
    return _plan(starts, lengths, rank, device)


def whole_plan(seq_offsets: torch.Tensor, rank: int, world: int, *, zigzag: bool = False) -> RingPlan:
    """Return the `ring_plan` of the parts of `cut_sequences`, from the offsets [B+1] of the whole sequences.

    There is no communication between ranks. Waits for the device.

    Examples:
        >>> hstu_sparse.whole_plan(torch.tensor([0, 8, 12]), rank=0, world=2).tokens  # of each rank
        (6, 6)
    """
    _check_cut(seq_offsets, rank, world, zigzag)
    starts, lengths = _chunks(seq_offsets.detach().cpu().long().diff(), world, zigzag)
    return _plan(starts, lengths, rank, seq_offsets.device)


def ring_plan(cu_seqlens: torch.Tensor, *, zigzag: bool = False, group=None) -> RingPlan:
    """Collect the offsets of all ranks, once a batch, for the argument `plan` of the ring functions.

    All ranks of the group must call this function. Waits for the device.

    Args:
        cu_seqlens: [B+1] integers, the offsets of this rank's parts of B sequences, whose lengths may differ between
            ranks. With `zigzag` they must equal the offsets that `cut_sequences` returns.
        zigzag: see `cut_sequences`.
        group: a torch.distributed process group, by default all processes.

    Examples:
        >>> hstu_sparse.ring_plan(torch.tensor([0, 8, 12])).tokens  # without torch.distributed: one rank
        (12,)

    Raises:
        ValueError: the offsets of a rank are wrong; the message, on every rank, names it.
    """
    check_jagged(cu_seqlens, MAX_LENGTH, name="cu_seqlens")
    check_bool("zigzag", zigzag)
    check_storage("cu_seqlens", cu_seqlens, values=True)
    ring = Ring(group)
    local_offsets = cu_seqlens.tolist()
    all_ranks = ring.check_agreement(
        "ring_plan",
        {"sequences": len(local_offsets) - 1, "zigzag": zigzag, "local_offsets": local_offsets},
        always=True,
    )
    local = torch.tensor([rank["local_offsets"] for rank in all_ranks], device="cpu").diff()  # [W, B]
    if (local < 0).any():
        wrong_rank = int((local < 0).any(1).nonzero()[0])
        raise ValueError(f"ring_plan: the offsets of rank {wrong_rank} must not decrease")
    if not zigzag:
        return _plan((local.cumsum(0) - local)[..., None], local[..., None], ring.rank, cu_seqlens.device)
    starts, lengths = _chunks(local.sum(0), ring.world, True)
    wrong = (lengths.sum(2) != local).nonzero()
    if len(wrong):
        rank, b = wrong[0].tolist()
        raise ValueError(
            f"ring_plan: rank {rank} must have {int(lengths[rank, b].sum())} tokens of sequence {b}, chunks {rank} and "
            f"{2 * ring.world - 1 - rank} of {2 * ring.world}, got {int(local[rank, b])} (see cut_sequences)"
        )
    return _plan(starts, lengths, ring.rank, cu_seqlens.device)
