"""RotateKV: a rotated, low-bit, optionally pruned cache of keys and values."""

from hstu_sparse.rotatekv.api import (
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
    "RotateKVCache",
    "calibrate",
    "hadamard_transform",
    "mustafar_attention_with_rope",
    "mustafar_decompress_with_hadamard_inverse",
    "rotatekv_attention",
    "rotatekv_compress",
    "rotatekv_decompress",
    "rotatekv_round_trip",
]
