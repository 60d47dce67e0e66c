"""Compute attention of new tokens to keys and values in the pages of a pool."""

from hstu_sparse.cache.paged.api import paged_attention

__all__ = ["paged_attention"]
