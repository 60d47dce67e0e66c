"""Operators of HSTU-style sequence recommenders: tensors in, tensors out."""

from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bsa import bsa_attention, bsa_plan
from hstu_sparse.cache import PageFormat, PagePool, PoolFull
from hstu_sparse.cache.paged import paged_attention
from hstu_sparse.cache.rotatekv.api import (
    calibrate,
    hadamard_transform,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_round_trip,
    rotatekv_self_attention,
)
from hstu_sparse.cache.rotatekv.cache import RotateKVCache
from hstu_sparse.catalogue import catalogue_loss
from hstu_sparse.dense import attention_plan, hstu_attention
from hstu_sparse.flash.api import flash_attention
from hstu_sparse.htree import htree_attention
from hstu_sparse.indexer.api import index_scores, indexer_loss, lightning_indexer, sparse_attention
from hstu_sparse.layer.embed_inputs import embed_inputs
from hstu_sparse.layer.norm_gate import layer_norm, norm_gate
from hstu_sparse.layer.query_gates import query_gates
from hstu_sparse.layer.residual import residual_add, residual_norm
from hstu_sparse.layer.rotary import rotary
from hstu_sparse.layer.silu_parts import silu_parts
from hstu_sparse.ring.api import ring_flash_attention
from hstu_sparse.ring.heads import heads_to_tokens, tokens_to_heads
from hstu_sparse.ring.hstu import ring_hstu_attention
from hstu_sparse.ring.plan import RingPlan, cut_sequences, ring_plan, whole_plan

__version__ = "0.3.0"

__all__ = [
    "PageFormat",
    "PagePool",
    "PoolFull",
    "RelativeBias",
    "RingPlan",
    "RotateKVCache",
    "attention_plan",
    "bsa_attention",
    "bsa_plan",
    "calibrate",
    "catalogue_loss",
    "cut_sequences",
    "embed_inputs",
    "flash_attention",
    "hadamard_transform",
    "heads_to_tokens",
    "hstu_attention",
    "htree_attention",
    "index_scores",
    "indexer_loss",
    "layer_norm",
    "lightning_indexer",
    "norm_gate",
    "paged_attention",
    "query_gates",
    "residual_add",
    "residual_norm",
    "ring_flash_attention",
    "ring_hstu_attention",
    "ring_plan",
    "rotary",
    "rotatekv_attention",
    "rotatekv_compress",
    "rotatekv_decompress",
    "rotatekv_round_trip",
    "rotatekv_self_attention",
    "silu_parts",
    "sparse_attention",
    "tokens_to_heads",
    "whole_plan",
]
