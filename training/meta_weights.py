"""Load the checkpoints of Meta's research code (generative_recommenders/research: HSTU and SASRec) into our models.

Names of parameters are those of facebookresearch/generative-recommenders at commit 44b62c6. Meta's HSTU is our model
with `model.block: hstu` and `attention: {kind: dense}` with both biases; Meta's SASRec is ours with `block:
transformer`, `attention: {kind: softmax}` and ReLU. `configs/ml-1m-hstu.yaml` and `configs/ml-1m-sasrec.yaml` have the
published sizes. Meta's models have tables of max_seq_len + 11 positions, and HSTU divides by that number.

The buckets of the time bias differ slightly. A bucket is floor(ln(seconds) / 0.301). Meta rounds the logarithm and the
quotient to fp32; we use the exact edges. Buckets are equal below 417,901 seconds (4.8 days). From there to 2**24
seconds (194 days), Meta puts 44 integers into the next bucket: they are below its edge by less than one part in
500,000. Greater times are rounded to fp32 by both; a time that near to an edge may be in either bucket.

Letters: I items, E embedding size, H heads, D query/key and V value head size, N max_seq_len, F feed-forward size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.errors import ConfigError
from data.types import shown
from models.hstu import HSTULayer, SequenceModel, TransformerLayer
from training.folder import access
from training.saved import CheckpointError

ITEMS, POSITIONS = "_embedding_module._item_emb.weight", "_input_features_preproc._pos_emb.weight"
MASK = "_attn_mask"  # a buffer with the causal mask, not loaded


def read_meta_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Read the model's tensors by name from a checkpoint of Meta's trainer; CheckpointError for other files.

    Examples:
        >>> torch.save({"model_state_dict": {"_embedding_module._item_emb.weight": torch.zeros(4, 50)}}, "checkpoint")
        >>> {name: value.shape for name, value in read_meta_checkpoint("checkpoint").items()}
        {'_embedding_module._item_emb.weight': torch.Size([4, 50])}
    """
    path = Path(path)
    with access(path, "read"):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch.load raises exceptions of many types for invalid files
            raise CheckpointError(
                f"{shown(path, 200)}: torch.load(weights_only=True) fails ({shown(error, 200)})"
            ) from None
    state = content.get("model_state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{shown(path, 200)}: expected a state dict, or one under the key model_state_dict")
    return state


@torch.no_grad()
def load_meta_weights(
    model: SequenceModel, state: Mapping[str, Tensor], item_ids: Sequence[int] | np.ndarray | None = None
) -> None:
    """Replace all weights of a model by Meta's; both models then have the same outputs.

    Args:
        model: a model of the same sizes, without features, actions and a head with parameters.
        state: Meta's tensors by name, with or without the prefix `module.` of DistributedDataParallel.
        item_ids: [I] the row of Meta's table, its item id, for each row of the model's table: `vocabulary.item_ids` if
            the data are the same; by default 1 .. I. Row 0 of Meta's table is padding.

    Raises ConfigError, with the model unchanged, for a tensor that is missing, unexpected or of another shape.

    Examples:
        >>> from training.config import load_config
        >>> from models.hstu import SequenceModel
        >>> model = SequenceModel(load_config("configs/ml-1m-sasrec.yaml").model, num_items=3)
        >>> load_meta_weights(model, {"_embedding_module._item_emb.weight": torch.zeros(4, 50)})
        Traceback (most recent call last):
        data.errors.ConfigError: Meta's weights: no _input_features_preproc._pos_emb.weight
    """
    tensors = _Tensors({name.removeprefix("module."): value for name, value in state.items() if MASK not in name})
    ids = torch.as_tensor(np.arange(1, len(model.item_weight) + 1) if item_ids is None else np.asarray(item_ids))
    new: dict[str, Tensor] = {}
    items = tensors.take(ITEMS, (None, model.item_weight.shape[1]))
    if len(ids) != len(model.item_weight) or int(ids.min()) < 1 or int(ids.max()) >= len(items):
        raise ConfigError(
            f"item_ids: expected {len(model.item_weight)} ids from 1 to {len(items) - 1}, got {len(ids)} from "
            f"{int(ids.min())} to {int(ids.max())}"
        )
    new["embedding.tables.embeddings.item.weight"] = items[ids]
    longest, size = model.embedding.position.shape
    positions = tensors.take(POSITIONS, (None, size))
    if len(positions) < longest:
        raise ConfigError(f"Meta's weights: expected {longest} positions (model.max_seq_len), got {len(positions)}")
    new["embedding.position"] = positions[:longest]
    for place, layer in enumerate(model.layers):
        convert = CONVERT.get(type(layer))
        if convert is None:
            raise ConfigError("model.block: expected hstu or transformer for Meta's weights")
        new |= {f"layers.{place}.{name}": value for name, value in convert(layer, tensors, place).items()}
    if tensors.rest:
        raise ConfigError(f"Meta's weights: the model has no place for {', '.join(sorted(tensors.rest))}")
    parameters = dict(model.named_parameters())
    if others := parameters.keys() - new.keys():
        raise ConfigError(f"Meta's weights: no tensors for {', '.join(sorted(others))}")
    for name, value in new.items():
        parameters[name].copy_(value)


class _Tensors:
    """Meta's tensors; rest: those that `take` has not returned yet."""

    def __init__(self, state: dict[str, Tensor]):
        self.rest = state

    def take(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """Return a tensor and check its shape, in which None matches any size."""
        tensor = self.rest.pop(name, None)
        if tensor is None:
            raise ConfigError(f"Meta's weights: no {name}")
        if len(shape) != tensor.dim() or any(size not in (None, got) for size, got in zip(shape, tensor.shape)):
            expected = [size if size is not None else "any" for size in shape]
            raise ConfigError(f"Meta's weights: {name}: expected {expected}, got {list(tensor.shape)}")
        return tensor


def _hstu(layer: Any, tensors: _Tensors, place: int) -> dict[str, Tensor]:
    """Return the weights of an HSTU layer.

    Meta's table of positions has an entry for each (key - query) from 1 - P to P - 1, where P is N + 11.
    """
    prefix, attention = f"_hstu._attention_layers.{place}.", layer.attention
    biases = (attention.position_bias, attention.time_bias)
    if any(bias is None for bias in biases) or layer.feed_forward is not None:
        raise ConfigError("Meta's HSTU has position_bias and time_bias, and no model.feed_forward_dim")
    positions, buckets = (len(bias) for bias in biases)
    weights = {
        "uvqk": tensors.take(f"{prefix}_uvqk", tuple(layer.uvqk.shape)),
        "output.weight": tensors.take(f"{prefix}_o.weight", tuple(layer.output.weight.shape)),
        "output.bias": tensors.take(f"{prefix}_o.bias", tuple(layer.output.bias.shape)),
        "attention.time_bias": tensors.take(f"{prefix}_rel_attn_bias._ts_w", (buckets,)),
    }
    by_distance = tensors.take(f"{prefix}_rel_attn_bias._pos_w", (2 * positions - 1,))
    return weights | {"attention.position_bias": by_distance[:positions].flip(0)}


def _sasrec(layer: Any, tensors: _Tensors, place: int) -> dict[str, Tensor]:
    """Return the weights of a SASRec block; its norms, which have no weights in Meta's code, get ones and zeros."""
    size, hidden = layer.expand.weight.shape[1], layer.expand.weight.shape[0]
    attention, forward = f"attention_layers.{place}.", f"forward_layers.{place}._conv1d."
    queries, keys, values = tensors.take(f"{attention}in_proj_weight", (3 * size, size)).chunk(3)
    query, key, value = tensors.take(f"{attention}in_proj_bias", (3 * size,)).chunk(3)
    one, zero = torch.ones(size), torch.zeros(size)
    weights = {
        "query.weight": queries,
        "key.weight": keys,
        "value.weight": values,
        "query.bias": query,
        "key.bias": key,
        "value.bias": value,
        "output.weight": tensors.take(f"{attention}out_proj.weight", (size, size)),
        "output.bias": tensors.take(f"{attention}out_proj.bias", (size,)),
        "expand.weight": tensors.take(f"{forward}0.weight", (hidden, size, 1))[..., 0],
        "expand.bias": tensors.take(f"{forward}0.bias", (hidden,)),
        "contract.weight": tensors.take(f"{forward}3.weight", (size, hidden, 1))[..., 0],
        "contract.bias": tensors.take(f"{forward}3.bias", (size,)),
    }
    norms = (f"{name}_norm" for name in ("attention", "feed_forward"))
    return weights | {f"{norm}.{part}": value for norm in norms for part, value in (("weight", one), ("bias", zero))}


CONVERT: dict[type, Any] = {HSTULayer: _hstu, TransformerLayer: _sasrec}
