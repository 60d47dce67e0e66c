"""Attention over sequences that are spread over several devices, and the flash attention that it is made of."""

from hstu_sparse.ring.api import (
    triton_ring_flash_attn_func,
    triton_ring_flash_attn_kvpacked_func,
    triton_ring_flash_attn_qkvpacked_func,
    triton_ring_flash_attn_varlen_func,
    triton_ring_flash_attn_varlen_kvpacked_func,
    triton_ring_flash_attn_varlen_qkvpacked_func,
    zigzag_triton_ring_flash_attn_func,
    zigzag_triton_ring_flash_attn_kvpacked_func,
    zigzag_triton_ring_flash_attn_qkvpacked_func,
    zigzag_triton_ring_flash_attn_varlen_func,
    zigzag_triton_ring_flash_attn_varlen_kvpacked_func,
    zigzag_triton_ring_flash_attn_varlen_qkvpacked_func,
)
from hstu_sparse.ring.flash import flash_attention
from hstu_sparse.ring.hstu import ring_hstu_attention
from hstu_sparse.ring.plan import RingPlan, cut_sequences, ring_plan, whole_plan

__all__ = [
    "RingPlan",
    "cut_sequences",
    "flash_attention",
    "ring_hstu_attention",
    "ring_plan",
    "triton_ring_flash_attn_func",
    "triton_ring_flash_attn_kvpacked_func",
    "triton_ring_flash_attn_qkvpacked_func",
    "triton_ring_flash_attn_varlen_func",
    "triton_ring_flash_attn_varlen_kvpacked_func",
    "triton_ring_flash_attn_varlen_qkvpacked_func",
    "whole_plan",
    "zigzag_triton_ring_flash_attn_func",
    "zigzag_triton_ring_flash_attn_kvpacked_func",
    "zigzag_triton_ring_flash_attn_qkvpacked_func",
    "zigzag_triton_ring_flash_attn_varlen_func",
    "zigzag_triton_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_triton_ring_flash_attn_varlen_qkvpacked_func",
]
