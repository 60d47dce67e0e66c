"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bsa import (
    TritonHSTUBSAAttention,
    bsa_attention,
    triton_block_sparse_attn,
    triton_hstu_attention_with_bsa,
)
from hstu_sparse.catalogue_loss import catalogue_loss
from hstu_sparse.dense import hstu_attention
from hstu_sparse.gated_norm import layer_norm, norm_gate
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.rotary import rotary

__all__ = [
    "RelativeBias",
    "TritonHSTUBSAAttention",
    "bsa_attention",
    "catalogue_loss",
    "hstu_attention",
    "layer_norm",
    "norm_gate",
    "rotary",
    "triton_block_sparse_attn",
    "triton_hstu_attention_with_bsa",
]
