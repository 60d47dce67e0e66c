"""A ring whose ranks do not agree, or one of which dies, ends everywhere, with an error that names a rank."""

import os
import re
import time

import torch

from hstu_sparse import jagged
from hstu_sparse.ring import (
    ring_hstu_attention,
    triton_ring_flash_attn_func,
    zigzag_triton_ring_flash_attn_varlen_func,
)
from tests.distributed import run_ranks


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
    found = [message(triton_ring_flash_attn_func, *tensors(8 if odd else 4))]
    found.append(message(triton_ring_flash_attn_func, *tensors(4), causal=odd))
    found.append(message(triton_ring_flash_attn_func, *tensors(4)))
    jagged.DEBUG = True
    found.append(message(triton_ring_flash_attn_func, *tensors(6 if odd else 4)))
    q, k, v = (x[0] for x in tensors(7 if odd else 4))
    offsets = torch.tensor([0, len(q)])
    found.append(message(zigzag_triton_ring_flash_attn_varlen_func, q, k, v, offsets))
    found.append(message(ring_hstu_attention, q, k, v, torch.arange(len(q)), 40 if odd else 50))
    return found


def test_ranks_that_do_not_agree():
    for found in run_ranks(disagreements, 2):
        shape, option, fine, later, cut, normaliser = found
        assert re.match(
            r"ValueError: triton_ring\w+: rank 1 has q=\[1, 8, 2, 16\], rank 0 has q=\[1, 4, 2, 16\]", shape
        )
        assert re.search(r"rank 1 has options=.*rank 0 has options=", option)
        assert fine == "no error"
        assert "rank 1 has q=[1, 6, 2, 16]" in later
        assert re.search(r"rank [01] has [47] tokens of sequence 0, but chunks", cut)
        assert re.search(r"rank 1 has options=\[40,", normaliser)


def dying(rank, place):
    """(seconds until the error, its message); rank 2 dies before its second call, or between its passes."""
    leaves = [x.requires_grad_() for x in tensors(4)]
    out = triton_ring_flash_attn_func(*leaves, causal=True)
    if place == "forward":
        call = lambda: triton_ring_flash_attn_func(*leaves, causal=True)
    else:
        call = lambda: out.sum().backward()
    if rank == 2:
        os._exit(1)
    start = time.monotonic()
    found = message(call)
    return time.monotonic() - start, found


def check_death(place):
    ranks = run_ranks(dying, 4, place, timeout=20, seconds=60)
    assert ranks[2] is None
    for rank in (0, 1, 3):
        seconds, found = ranks[rank]
        assert re.match(rf"RuntimeError: ring attention: rank {rank} lost rank \d", found), found
        assert seconds < 20
    # The neighbours of the dead rank see it first; what they do about it is what rank 0 sees.
    assert any("lost rank 2" in ranks[rank][1] for rank in (1, 3))


def test_a_rank_that_dies_in_the_forward_pass():
    check_death("forward")


def test_a_rank_that_dies_in_the_backward_pass():
    check_death("backward")
