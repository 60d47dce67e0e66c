"""Softmax loss over a catalogue of items, whole or sampled, without a tensor of logits."""

from hstu_sparse.cross_entropy.api import catalogue_loss

__all__ = ["catalogue_loss"]
