"""The lightning indexer, sparse attention over its choice, and the loss that trains it."""

from hstu_sparse.indexer.api import (
    MOST_CHOSEN,
    MOST_KEY_CHANNELS,
    MOST_SHARING,
    index_scores,
    indexer_loss,
    lightning_indexer,
    padded_indexer_loss,
    sparse_attention,
)

__all__ = [
    "MOST_CHOSEN",
    "MOST_KEY_CHANNELS",
    "MOST_SHARING",
    "index_scores",
    "indexer_loss",
    "lightning_indexer",
    "padded_indexer_loss",
    "sparse_attention",
]
