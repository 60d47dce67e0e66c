"""The attention kinds that `model.attention.kind` names: a file and an entry in ATTENTION for each.

A kind is one module with a class and its Config that satisfy `AttentionKind` in contract.py. A kind may also be defined
outside this package: it is then named by its path, `my_package.my_module:MyAttention`.
"""

import functools
from importlib import import_module
from typing import Literal

from pydantic import create_model

from data.types import shown
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


def attention_kind(name: str) -> type[AttentionKind]:
    """Return the class that `model.attention.kind` names: an entry of ATTENTION, or the class at `module:Class`.

    Raises:
        ValueError: there is no such class, in one line.
        ImportError: the module is there, but importing it failed.
    """
    return ATTENTION[name] if name in ATTENTION else _class_at(name)


def attention_config(name: str) -> type[AttentionKind.Config]:
    """Return the Config of the kind with this name; the Config of an outside kind takes its path as `kind`.

    Raises:
        ValueError, ImportError: as `attention_kind`.
    """
    kind = attention_kind(name)
    return kind.Config if name in ATTENTION else _config_at(name, kind)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _class_at(path: str) -> type[AttentionKind]:
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        known = ", ".join(ATTENTION)
        raise ValueError(f"unknown attention kind {shown(path)}, known: {known}, or a path like my_module:MyAttention")
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ImportError(f"model.attention.kind: importing {module} failed: {error}") from error
        raise ValueError(f"{shown(path)}: no module {shown(error.name)}; its folder must be in PYTHONPATH") from None
    except Exception as error:  # any type, because a ValueError would look like a fault of the configuration
        raise ImportError(f"model.attention.kind: importing {module} failed: {error!r}") from error
    kind = getattr(loaded, name, None)
    if not isinstance(kind, type):
        raise ValueError(f"{shown(path)}: module {shown(module)} has no class {shown(name)}")
    for value, base in ((kind, AttentionKind), (getattr(kind, "Config", None), AttentionKind.Config)):
        if not isinstance(value, type) or not issubclass(value, base):
            noun = "class" if base is AttentionKind else "Config"
            raise ValueError(
                f"{shown(path)}: its {noun} does not derive from {base.__qualname__} (models.attention.contract)"
            )
    return kind


@functools.cache
def _config_at(path: str, kind: type[AttentionKind]) -> type[AttentionKind.Config]:
    """Return the kind's Config with `path` as the value of `kind`, overriding the class's own declaration."""
    return create_model(kind.Config.__name__, __base__=kind.Config, kind=(Literal[path], ...))  # type: ignore[arg-type]
