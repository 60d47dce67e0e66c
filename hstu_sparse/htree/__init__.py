"""Hierarchical tree attention: softmax attention over nodes of a tree of pooled keys and values."""

from hstu_sparse.htree.api import htree_attention

__all__ = ["htree_attention"]
