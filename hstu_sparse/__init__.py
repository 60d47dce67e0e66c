"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bsa import bsa_attention
from hstu_sparse.dense import hstu_attention

__all__ = ["bsa_attention", "hstu_attention"]
