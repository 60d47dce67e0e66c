"""Layer norm without affine, alone, beside a residual or times a gate with dropout."""

from hstu_sparse.layer_norm_gate.api import layer_norm, norm_gate, residual_add, residual_norm

__all__ = ["layer_norm", "norm_gate", "residual_add", "residual_norm"]
