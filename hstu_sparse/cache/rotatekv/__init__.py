"""RotateKV: a rotated, low-bit, optionally pruned cache of keys and values."""

from hstu_sparse.cache.rotatekv.api import (
    RotateKVCache,
    calibrate,
    hadamard_transform,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_round_trip,
    rotatekv_self_attention,
    unpacked_attention,
)

__all__ = [
    "RotateKVCache",
    "calibrate",
    "hadamard_transform",
    "rotatekv_attention",
    "rotatekv_compress",
    "rotatekv_decompress",
    "rotatekv_round_trip",
    "rotatekv_self_attention",
    "unpacked_attention",
]
