"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bsa import (
    TritonHSTUBSAAttention,
    bsa_attention,
    triton_block_sparse_attn,
    triton_hstu_attention_with_bsa,
)
from hstu_sparse.dense import attention_plan, hstu_attention
from hstu_sparse.gated_norm import layer_norm, norm_gate
from hstu_sparse.htree import htree_attention
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.rotary import rotary

__all__ = [
    "RelativeBias",
    "TritonHSTUBSAAttention",
    "attention_plan",
    "bsa_attention",
    "hstu_attention",
    "htree_attention",
    "layer_norm",
    "norm_gate",
    "rotary",
    "triton_block_sparse_attn",
    "triton_hstu_attention_with_bsa",
]
