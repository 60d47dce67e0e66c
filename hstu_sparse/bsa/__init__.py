"""Block-sparse HSTU attention (BSA): compression, block selection and sliding window, mixed by gates."""

from hstu_sparse.bsa.api import bsa_attention, bsa_plan
from hstu_sparse.bsa.reference import bsa_attention_reference

__all__ = [
    "bsa_attention",
    "bsa_attention_reference",
    "bsa_plan",
]
