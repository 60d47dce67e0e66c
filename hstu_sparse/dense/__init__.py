"""Dense HSTU attention."""

from hstu_sparse.dense.api import hstu_attention

__all__ = ["hstu_attention"]
