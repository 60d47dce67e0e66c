"""Compute a softmax loss over a catalogue of items, whole or sampled, without a tensor of logits."""

from hstu_sparse.catalogue.api import BLOCK, catalogue_loss
from hstu_sparse.catalogue.parts import CatalogueShard

__all__ = ["BLOCK", "CatalogueShard", "catalogue_loss"]
