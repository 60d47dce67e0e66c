"""Softmax loss over a catalogue of items, whole or sampled, without a tensor of logits."""

from hstu_sparse.cross_entropy.api import catalogue_loss
from hstu_sparse.cross_entropy.parts import Part

__all__ = ["Part", "catalogue_loss"]
