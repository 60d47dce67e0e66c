"""Define the options of a served run: the format of the pages, their budget, the window's slide, limits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

import hstu_sparse
from models.hstu import SequenceModel
from models.tasks.contract import Served
from serving.errors import ServingError
from serving.histories import Window
from training.config import RunConfig

CACHES = ("auto", "fp32", "bf16", "fp16", "8bit", "4bit", "2bit")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {"8bit": 8, "4bit": 4, "2bit": 2}
CLIPS = {2: 0.75}  # bits -> the default of clip: the value that loses the least, see docs/rotatekv.md


@dataclass(frozen=True)
class ServingOptions:
    """The options of a served run.

    cache        one of CACHES: keys and values as they are, or RotateKV codes of so many bits; auto is fp32, or the
                 codes that the run was trained for (rotatekv)
    sink_tokens  with codes: the first tokens of a window that are kept as they are, in fp32
    clip         with codes: see `hstu_sparse.rotatekv_compress`; by default .75 at 2 bits, else 1
    head_group   with codes: heads that are coded together; by default 2, or 1 where heads are odd
    quant_group  with codes: channels that share a scale
    cache_bytes  for the pages of all users
    slide        events that leave a window at a time; by default a quarter of what it holds
    most_users   users that the store holds
    most_events  events that a user may have
    popular_days  an event counts half as much for the popular items as one that is so many days later
    cuda_graphs  on a GPU: pad passes of few tokens to a few sizes, capture them as CUDA graphs and replay them

    Examples:
        >>> ServingOptions(cache="4bit", cache_bytes=2**30, popular_days=30).sink_tokens
        0
        >>> ServingOptions(cache="5bit")
        Traceback (most recent call last):
        serving.errors.ServingError: cache: expected one of auto, fp32, bf16, fp16, 8bit, 4bit, 2bit, got '5bit'
    """

    cache: str = "auto"
    sink_tokens: int = 0
    clip: float | None = None
    head_group: int | None = None
    quant_group: int = 64
    cache_bytes: int = 2**30
    slide: int | None = None
    most_users: int = 10_000_000
    most_events: int = 1_000_000
    popular_days: float = 7.0
    cuda_graphs: bool = True

    def __post_init__(self):
        if self.cache not in CACHES:
            raise ServingError(f"cache: expected one of {', '.join(CACHES)}, got {self.cache!r}")
        if self.cache not in BITS and self.sink_tokens:
            raise ServingError(f"sink_tokens={self.sink_tokens} is for codes, cache={self.cache}")
        for name in ("cache_bytes", "most_users", "most_events"):
            if getattr(self, name) < 1:
                raise ServingError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.popular_days > 0:
            raise ServingError(f"popular_days: expected a number above 0, got {self.popular_days}")


def served_form(config: RunConfig) -> Served:
    """Return how the run's task is served; ServingError if it cannot be."""
    form = config.task.served()
    if form is None:
        raise ServingError(f"task.kind={config.task.kind} cannot be served: retrieval and ranking can")
    return form


def window_of(config: RunConfig, slide: int | None) -> Window:
    """Return the window of a run; ServingError for a slide that does not fit."""
    longest, form = config.model.max_seq_len, served_form(config)
    capacity = (longest - form.candidates) // form.tokens_per_event
    if capacity < 1:
        raise ServingError(
            f"model.max_seq_len={longest}: {config.task.kind} is served from {form.tokens_per_event + form.candidates} "
            "tokens on, an event and a candidate"
        )
    if slide is None:
        slide = max(1, capacity // 4)
    if not 1 <= slide <= capacity:
        raise ServingError(f"slide: expected 1 to {capacity}, the events that a window holds, got {slide}")
    return Window(capacity, slide)


def page_format(model: SequenceModel, options: ServingOptions) -> hstu_sparse.PageFormat:
    """Return the format of the pages of all layers; ServingError if there is none.

    A model of kind rotatekv was trained for its own codes, and cannot be served from others.
    """
    layers = list(cast(Iterable[Any], model.layers))
    sizes = layers[0].attention.sizes
    heads, bits = sizes.num_heads, BITS.get(options.cache)
    chosen: dict = {"dtype": DTYPES.get(options.cache, torch.float32)}
    if bits:
        chosen |= {
            "bits": bits,
            "head_group": options.head_group or (2 if heads % 2 == 0 else 1),
            "quant_group": options.quant_group,
            "sink_tokens": options.sink_tokens,
            "clip": options.clip or CLIPS.get(bits, 1.0),
        }
    trained: dict[str, Any] = {}
    for place, layer in enumerate(layers):
        layer_codes, kind = layer.attention.paged().codes or {}, layer.attention.config.kind
        if layer_codes and trained and layer_codes != trained:
            raise ServingError(f"layer {place} has other codes than the layers before, pages have one format")
        if layer_codes and options.cache != "auto" and layer_codes != chosen:
            raise ServingError(f"cache={options.cache}: the run was trained for its own codes, leave the cache out")
        if (layer_codes or trained) and place and bool(layer_codes) != bool(trained):
            raise ServingError(f"layer {place} ({kind}): some layers are of kind rotatekv and some not")
        trained = layer_codes or trained
    try:
        return hstu_sparse.PageFormat(heads, sizes.attention_dim, sizes.linear_dim, **(trained or chosen))
    except (TypeError, ValueError) as error:
        raise ServingError(f"cache: {error}") from None
