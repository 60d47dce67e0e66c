"""A model's input: rows of tables, a position's row, dropout."""

from hstu_sparse.input_embedding.api import embed_inputs

__all__ = ["embed_inputs"]
