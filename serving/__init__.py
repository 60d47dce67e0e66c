"""Serve a trained run: `Recommender` takes events and returns recommendations and scores."""

import hstu_sparse_checkout  # noqa: F401  # raises ImportError if another module hides one of these packages
from serving.errors import (
    CacheFull,
    InvalidRequest,
    LimitReached,
    MissingActions,
    NoHistory,
    RequestError,
    ServingError,
    StoreError,
    TooEarly,
    UnknownFilter,
    UnknownItem,
)
from serving.filters import Filter
from serving.histories import UserHistory
from serving.inspection import Explanation
from serving.options import ServingOptions
from serving.recommender import Recommender

__all__ = [
    "CacheFull",
    "Explanation",
    "Filter",
    "InvalidRequest",
    "LimitReached",
    "MissingActions",
    "NoHistory",
    "Recommender",
    "RequestError",
    "ServingError",
    "ServingOptions",
    "StoreError",
    "TooEarly",
    "UnknownFilter",
    "UnknownItem",
    "UserHistory",
]
