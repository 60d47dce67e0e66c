"""Define ATTENTION, the attention kinds by their names in `model.attention.kind`.

A kind is a module with a subclass of `AttentionKind` (contract.py). A kind that is defined outside this package is
named by its path, `my_package.my_module:MyAttention`.
"""

from data.kinds import Kinds
from models.attention.bsa import BlockSparseAttention
from models.attention.contract import AttentionKind
from models.attention.dense import DenseAttention
from models.attention.htree import HierarchicalTreeAttention
from models.attention.indexer import IndexerAttention
from models.attention.ring import RingAttention
from models.attention.rotatekv import RotateKVAttention
from models.attention.softmax import SoftmaxAttention

ATTENTION: dict[str, type[AttentionKind]] = {
    "dense": DenseAttention,
    "softmax": SoftmaxAttention,
    "bsa": BlockSparseAttention,
    "htree": HierarchicalTreeAttention,
    "indexer": IndexerAttention,
    "rotatekv": RotateKVAttention,
    "ring": RingAttention,
}
ATTENTION_KINDS = Kinds("model.attention", "attention kind", AttentionKind, ATTENTION)
