"""SiLU of a product's columns, in separate parts."""

from hstu_sparse.uvqk.api import silu_parts

__all__ = ["silu_parts"]
