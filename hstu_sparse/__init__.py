"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bsa import bsa_attention

__all__ = ["bsa_attention"]
