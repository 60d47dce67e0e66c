"""Hierarchical tree attention: a softmax over a few nodes of a tree of pooled keys and values."""

from hstu_sparse.htree.api import htree_attention

__all__ = ["htree_attention"]
