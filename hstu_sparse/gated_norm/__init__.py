"""Layer norm without affine, alone or times a gate with dropout."""

from hstu_sparse.gated_norm.api import layer_norm, norm_gate

__all__ = ["layer_norm", "norm_gate"]
