"""Softmax attention over jagged sequences without padding: FlashAttention forward and backward, and its options."""

from hstu_sparse.flash.api import flash_attention

__all__ = ["flash_attention"]
