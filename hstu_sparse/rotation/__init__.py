"""Rotation of queries and keys by position and time."""

from hstu_sparse.rotation.api import rotary

__all__ = ["rotary"]
