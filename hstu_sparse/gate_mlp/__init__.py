"""Gates of queries: a small network that computes a few numbers in (0, 1) from each head's query."""

from hstu_sparse.gate_mlp.api import query_gates

__all__ = ["query_gates"]
