"""Attention over sequences that are distributed over several devices, and the flash attention that it is built from."""

from hstu_sparse.flash import flash_attention
from hstu_sparse.ring.api import ring_flash_attention
from hstu_sparse.ring.hstu import ring_hstu_attention
from hstu_sparse.ring.plan import RingPlan, cut_sequences, ring_plan, whole_plan

__all__ = [
    "RingPlan",
    "cut_sequences",
    "flash_attention",
    "ring_flash_attention",
    "ring_hstu_attention",
    "ring_plan",
    "whole_plan",
]
