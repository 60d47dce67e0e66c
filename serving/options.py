"""Define the options of a served run: format and bytes of the pages, slide of the windows, limits."""

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
CLIPS = {2: 0.75}  # bits -> the default of clip, which has the smallest loss, see docs/rotatekv.md


@dataclass(frozen=True)
class ServingOptions:
    """The options of a served run.

    cache         one of CACHES: the dtype of keys and values, or the bits of RotateKV codes; auto is fp32, or the codes
                  that the run was trained for (rotatekv)
    sink_tokens   codes only: the first tokens of a window that are stored in fp32
    clip          codes only: see `hstu_sparse.rotatekv_compress`; by default 0.75 for 2 bits, otherwise 1
    head_group    codes only: heads that are coded together; by default 2, or 1 if the number of heads is odd
    quant_group   codes only: channels that share a scale
    cache_bytes   bytes of the pages of all users
    slide         events that leave a window at a time; by default a quarter of the window
    most_users    the most users to store
    most_events   the most events of one user
    popular_days  half-life of an event's weight in the popular items, in days
    cuda_graphs   on a GPU: pad passes of few tokens to a few sizes, capture them as CUDA graphs and replay them

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
            raise ServingError(f"sink_tokens={self.sink_tokens}: expected cache 8bit, 4bit or 2bit, got {self.cache}")
        for name in ("cache_bytes", "most_users", "most_events"):
            if getattr(self, name) < 1:
                raise ServingError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.popular_days > 0:
            raise ServingError(f"popular_days: expected a number above 0, got {self.popular_days}")


def served_form(config: RunConfig) -> Served:
    """Return how the run's task is served; raise ServingError if it cannot be served."""
    form = config.task.served()
    if form is None:
        raise ServingError(f"task.kind={config.task.kind} cannot be served: expected retrieval or ranking")
    return form


def window_of(config: RunConfig, slide: int | None) -> Window:
    """Return the window of a run; raise ServingError if the slide or model.max_seq_len is out of range."""
    longest, form = config.model.max_seq_len, served_form(config)
    capacity = (longest - form.candidates) // form.tokens_per_event
    if capacity < 1:
        raise ServingError(
            f"model.max_seq_len={longest}: serving {config.task.kind} needs at least "
            f"{form.tokens_per_event + form.candidates}, an event and a candidate"
        )
    if slide is None:
        slide = max(1, capacity // 4)
    if not 1 <= slide <= capacity:
        raise ServingError(f"slide: expected 1 to {capacity}, the events of a window, got {slide}")
    return Window(capacity, slide)


def page_format(model: SequenceModel, options: ServingOptions) -> hstu_sparse.PageFormat:
    """Return the common format of the pages of all layers; raise ServingError if there is none.

    A model of kind rotatekv can only be served from the codes that it was trained for.
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
            raise ServingError(f"layer {place}: expected the options of earlier rotatekv layers: pages have one format")
        if layer_codes and options.cache != "auto" and layer_codes != chosen:
            raise ServingError(f"cache={options.cache}: the run was trained for another format, leave this option out")
        if (layer_codes or trained) and place and bool(layer_codes) != bool(trained):
            raise ServingError(f"layer {place} ({kind}): expected all layers or none of kind rotatekv")
        trained = layer_codes or trained
    try:
        return hstu_sparse.PageFormat(heads, sizes.attention_dim, sizes.linear_dim, **(trained or chosen))
    except (TypeError, ValueError) as error:
        raise ServingError(f"cache: {error}") from None
