"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bsa import (
    TritonHSTUBSAAttention,
    bsa_attention,
    triton_block_sparse_attn,
    triton_hstu_attention_with_bsa,
)
from hstu_sparse.dense import hstu_attention
from hstu_sparse.gated_norm import layer_norm, norm_gate
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.rotary import rotary
from hstu_sparse.rotatekv import (
    RotateKVCache,
    calibrate,
    hadamard_transform,
    mustafar_attention_with_rope,
    mustafar_decompress_with_hadamard_inverse,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_round_trip,
)

__all__ = [
    "RelativeBias",
    "RotateKVCache",
    "TritonHSTUBSAAttention",
    "bsa_attention",
    "calibrate",
    "hadamard_transform",
    "hstu_attention",
    "layer_norm",
    "mustafar_attention_with_rope",
    "mustafar_decompress_with_hadamard_inverse",
    "norm_gate",
    "rotary",
    "rotatekv_attention",
    "rotatekv_compress",
    "rotatekv_decompress",
    "rotatekv_round_trip",
    "triton_block_sparse_attn",
    "triton_hstu_attention_with_bsa",
]
