from hstu_sparse.rotatekv.api import (
    calibrate,
    hadamard_transform,
    mustafar_attention_with_rope,
    mustafar_decompress_with_hadamard_inverse,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_round_trip,
)
from hstu_sparse.rotatekv.cache import RotateKVCache

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
