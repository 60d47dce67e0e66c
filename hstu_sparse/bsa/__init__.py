"""Block-sparse HSTU attention (BSA): compression, block selection and sliding window, mixed by gates."""

from hstu_sparse.bsa.api import bsa_attention, bsa_plan
from hstu_sparse.bsa.reference import bsa_attention_reference
from hstu_sparse.bsa.research_interface import (
    TritonHSTUBSAAttention,
    triton_block_sparse_attn,
    triton_hstu_attention_with_bsa,
)

__all__ = [
    "TritonHSTUBSAAttention",
    "bsa_attention",
    "bsa_attention_reference",
    "bsa_plan",
    "triton_block_sparse_attn",
    "triton_hstu_attention_with_bsa",
]
