"""Attention over sequences that are spread over several devices, and the flash attention that it is made of."""

from hstu_sparse.ring.flash import flash_attention

__all__ = ["flash_attention"]
