"""A ring whose ranks do not agree, or one of which dies, ends everywhere, with an error that names a rank."""

import os
import re
import signal

import pytest
import torch

from hstu_sparse.compat import triton_ring_flash_attn_func
from hstu_sparse.core import jagged
from hstu_sparse.ring.api import ring_flash_attention
from hstu_sparse.ring.hstu import ring_hstu_attention
from tests.operators.distributed import run_ranks


def tensors(tokens, heads=2):
    return [torch.randn(1, tokens, heads, 16) for _ in range(3)]


def message(function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank):
    """Messages of calls in which rank 1 is different."""
    odd = rank == 1
    messages = [message(triton_ring_flash_attn_func, *tensors(8 if odd else 4))]
    messages.append(message(triton_ring_flash_attn_func, *tensors(4), causal=odd))
    messages.append(message(triton_ring_flash_attn_func, *tensors(4)))
    jagged.DEBUG = True
    messages.append(message(triton_ring_flash_attn_func, *tensors(6 if odd else 4)))
    q, k, v = (x[0] for x in tensors(7 if odd else 4))
    offsets = torch.tensor([0, len(q)])
    messages.append(message(ring_flash_attention, q, k, v, offsets, zigzag=True))
    messages.append(message(ring_hstu_attention, q, k, v, torch.arange(len(q)), 40 if odd else 50))
    return messages


def test_ranks_that_do_not_agree():
    for messages in run_ranks(disagreements, 2):
        shape, option, fine, later, cut, normaliser = messages
        assert re.match(
            r"ValueError: triton_ring\w+: rank 1 has q=\[1, 8, 2, 16\], rank 0 has q=\[1, 4, 2, 16\]", shape
        )
        assert re.search(r"rank 1 has options=.*rank 0 has options=", option)
        assert fine == "no error"
        assert "rank 1 has q=[1, 6, 2, 16]" in later
        assert re.search(r"rank [01] must have [56] tokens of sequence 0, chunks .*, got [47]", cut)
        assert re.search(r"rank 1 has options=\[40,", normaliser)


def lost(rank, when, how):
    """Check the message of the error if rank 2 ends before its first call, its second, or between passes."""
    leaves = [x.requires_grad_() for x in tensors(4)]
    call = lambda: triton_ring_flash_attn_func(*leaves, causal=True)
    if when != "first call":
        out = call()
    if when == "backward":
        call = lambda: out.sum().backward()
    if rank == 2:
        if how == "dies":
            os._exit(1)
        signal.pause()
    return message(call)


# Timeouts of the process group in seconds, for waits that nothing else ends: for a rank that hangs, that ended before
# it was connected to, or that sends another length. A working rank may also be later than TIMEOUT on a busy machine, so
# a failed check is repeated with LONG.
TIMEOUT, LONG = 2, 60


def expect(check, *arguments, waits=True, **options):
    """Assert that `check` holds for what the ranks return, if need be only with the longer timeout."""
    try:
        return check(run_ranks(*arguments, **options, **({"timeout": TIMEOUT} if waits else {})))
    except AssertionError:
        if not waits:
            raise
    return check(run_ranks(*arguments, **options, timeout=LONG))


@pytest.mark.parametrize(
    ("when", "how"),
    [
        *((when, "dies") for when in ("first call", "second call", "backward")),
        ("backward", "hangs"),
        *(pytest.param(when, "hangs", marks=pytest.mark.slow) for when in ("first call", "second call")),
    ],
)
def test_a_lost_rank_is_named(when, how):

    def check(ranks):
        assert ranks[2] is None
        for rank in (0, 1, 3):
            text = ranks[rank]
            named = rf"RuntimeError: (ring attention|(triton_)?ring_\w+): rank {rank} lost rank \d"
            assert re.match(named, text), text
        # The neighbours of the lost rank see it first; what they do about it is what rank 0 sees.
        assert any("lost rank 2" in ranks[rank] for rank in (1, 3))
        if when == "first call":
            assert all("lost rank 2" in ranks[rank] for rank in (0, 1, 3))

    expect(check, lost, 4, when, how, hanging=2, waits=how == "hangs" or when == "first call")


def other_shapes(rank):
    """Rank 1 calls with another length after a right first call, when shapes are no longer compared."""
    first = message(triton_ring_flash_attn_func, *tensors(4), causal=True)
    later = message(triton_ring_flash_attn_func, *tensors(6 if rank == 1 else 4), causal=True)
    return first, later


def test_other_shapes_in_a_later_call():
    def check(ranks):
        for rank, (first, later) in enumerate(ranks):
            assert first == "no error"
            assert f"rank {rank} lost rank {1 - rank}" in later

    expect(check, other_shapes, 2)
