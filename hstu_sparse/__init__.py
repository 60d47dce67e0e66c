"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bsa import (
    TritonHSTUBSAAttention,
    bsa_attention,
    bsa_plan,
    triton_block_sparse_attn,
    triton_hstu_attention_with_bsa,
)
from hstu_sparse.cross_entropy import catalogue_loss
from hstu_sparse.dense import attention_plan, hstu_attention
from hstu_sparse.gate_mlp import query_gates
from hstu_sparse.htree import htree_attention
from hstu_sparse.indexer import (
    compute_index_loss_sparse,
    index_scores,
    indexer_loss,
    lightning_indexer,
    sparse_attention,
)
from hstu_sparse.input_embedding import embed_inputs
from hstu_sparse.layer_norm_gate import layer_norm, norm_gate, residual_add, residual_norm
from hstu_sparse.relative_bias import RelativeBias
from hstu_sparse.ring import (
    RingPlan,
    cut_sequences,
    flash_attention,
    ring_hstu_attention,
    ring_plan,
    triton_ring_flash_attn_func,
    triton_ring_flash_attn_kvpacked_func,
    triton_ring_flash_attn_qkvpacked_func,
    triton_ring_flash_attn_varlen_func,
    triton_ring_flash_attn_varlen_kvpacked_func,
    triton_ring_flash_attn_varlen_qkvpacked_func,
    whole_plan,
    zigzag_triton_ring_flash_attn_func,
    zigzag_triton_ring_flash_attn_kvpacked_func,
    zigzag_triton_ring_flash_attn_qkvpacked_func,
    zigzag_triton_ring_flash_attn_varlen_func,
    zigzag_triton_ring_flash_attn_varlen_kvpacked_func,
    zigzag_triton_ring_flash_attn_varlen_qkvpacked_func,
)
from hstu_sparse.rotary_embedding import rotary
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
from hstu_sparse.uvqk import silu_parts

__all__ = [
    "RelativeBias",
    "RingPlan",
    "RotateKVCache",
    "TritonHSTUBSAAttention",
    "attention_plan",
    "bsa_attention",
    "bsa_plan",
    "calibrate",
    "catalogue_loss",
    "compute_index_loss_sparse",
    "cut_sequences",
    "embed_inputs",
    "flash_attention",
    "hadamard_transform",
    "hstu_attention",
    "htree_attention",
    "index_scores",
    "indexer_loss",
    "layer_norm",
    "lightning_indexer",
    "mustafar_attention_with_rope",
    "mustafar_decompress_with_hadamard_inverse",
    "norm_gate",
    "query_gates",
    "residual_add",
    "residual_norm",
    "ring_hstu_attention",
    "ring_plan",
    "rotary",
    "rotatekv_attention",
    "rotatekv_compress",
    "rotatekv_decompress",
    "rotatekv_round_trip",
    "silu_parts",
    "sparse_attention",
    "triton_block_sparse_attn",
    "triton_hstu_attention_with_bsa",
    "triton_ring_flash_attn_func",
    "triton_ring_flash_attn_kvpacked_func",
    "triton_ring_flash_attn_qkvpacked_func",
    "triton_ring_flash_attn_varlen_func",
    "triton_ring_flash_attn_varlen_kvpacked_func",
    "triton_ring_flash_attn_varlen_qkvpacked_func",
    "whole_plan",
    "zigzag_triton_ring_flash_attn_func",
    "zigzag_triton_ring_flash_attn_kvpacked_func",
    "zigzag_triton_ring_flash_attn_qkvpacked_func",
    "zigzag_triton_ring_flash_attn_varlen_func",
    "zigzag_triton_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_triton_ring_flash_attn_varlen_qkvpacked_func",
]
