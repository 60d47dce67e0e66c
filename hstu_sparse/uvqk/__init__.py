"""SiLU of a product's columns, in parts that stand each by itself."""

from hstu_sparse.uvqk.api import silu_parts

__all__ = ["silu_parts"]
