"""A trained run in use: `Recommender` takes events and answers with recommendations and scores."""

import hstu_sparse_checkout  # noqa: F401  # raises ImportError if another module hides one of our packages
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
    UnknownItem,
)
from serving.options import ServingOptions
from serving.recommender import Recommender, UserHistory

__all__ = [
    "CacheFull",
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
    "UnknownItem",
    "UserHistory",
]
