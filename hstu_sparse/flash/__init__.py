"""Softmax attention over jagged sequences without padding."""

from hstu_sparse.flash.api import flash_attention

__all__ = ["flash_attention"]
