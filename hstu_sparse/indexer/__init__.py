"""The lightning indexer, sparse attention over what it chooses, and the loss that it learns from."""

from hstu_sparse.indexer.api import (
    MOST_CHOSEN,
    compute_index_loss_sparse,
    index_scores,
    indexer_loss,
    lightning_indexer,
    sparse_attention,
)

__all__ = [
    "MOST_CHOSEN",
    "compute_index_loss_sparse",
    "index_scores",
    "indexer_loss",
    "lightning_indexer",
    "sparse_attention",
]
