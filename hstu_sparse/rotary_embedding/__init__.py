"""Rotation of queries and keys by position and time."""

from hstu_sparse.rotary_embedding.api import rotary

__all__ = ["rotary"]
