"""The attention kinds that `model.attention.kind` names: a file and an entry in ATTENTION for each.

A kind is one module with its Config; what it must bring: `AttentionKind` in models/contract.py.
"""

from models.attention.bsa import BlockSparseAttention
from models.attention.dense import DenseAttention
from models.attention.htree import HierarchicalTreeAttention
from models.attention.indexer import IndexerAttention
from models.attention.ring import RingAttention
from models.attention.rotatekv import RotateKVAttention
from models.attention.softmax import SoftmaxAttention
from models.contract import AttentionKind

ATTENTION: dict[str, type[AttentionKind]] = {
    "dense": DenseAttention,
    "softmax": SoftmaxAttention,
    "bsa": BlockSparseAttention,
    "htree": HierarchicalTreeAttention,
    "indexer": IndexerAttention,
    "rotatekv": RotateKVAttention,
    "ring": RingAttention,
}
