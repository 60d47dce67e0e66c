"""Dense HSTU attention."""

from hstu_sparse.dense.api import attention_plan, hstu_attention

__all__ = ["attention_plan", "hstu_attention"]
