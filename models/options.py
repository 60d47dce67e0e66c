"""Define the options of a model and of its loss, `model:` and `loss:` in a run's configuration."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from data.explain import OPTION
from data.kinds import located
from data.options import Options
from models.attention import ATTENTION_KINDS
from models.attention.contract import AttentionKind, LayerSizes
from models.attention.spread import context_by
from models.heads import DotConfig, HeadConfig
from models.protocols import RunOptions


def _as_list(value):
    return value if isinstance(value, list) else [value]


AttentionConfig = Annotated[SerializeAsAny[AttentionKind.Config], BeforeValidator(ATTENTION_KINDS.read)]


class RotaryConfig(Options):
    """Rotary embedding of queries and keys in every layer (`hstu_sparse.rotary`)."""

    position: bool = False
    """Whether pairs of channels are rotated by position."""
    time: bool = False
    """Whether pairs of channels are rotated by time."""

    @model_validator(mode="after")
    def _something(self):
        if not (self.position or self.time):
            raise ValueError("set position or time to true, or leave rotary out")
        return self


class ModelConfig(Options):
    """The model."""

    block: Literal["hstu", "transformer", "pre_norm"]
    """The layer: HSTU's, SASRec's transformer, or a pre-norm transformer with SwiGLU."""
    max_seq_len: int = Field(ge=1)
    """The length of the longest sequence in tokens; a prediction uses only the latest events of a longer history."""
    embedding_dim: int = Field(ge=1)
    """The size of an item's embedding and of a layer's output."""
    num_layers: int = Field(ge=1, le=1000)
    """The number of layers."""
    num_heads: int = Field(1, ge=1)
    """The number of attention heads."""
    attention_dim: int | None = Field(None, ge=1)
    """The size of a head's queries and keys; if absent, embedding_dim / num_heads."""
    linear_dim: int | None = Field(None, ge=1)
    """The size of a head's values; if absent, embedding_dim / num_heads."""
    feed_forward_dim: int | None = Field(None, ge=1)
    """The hidden size of the feed-forward network; `transformer` and `pre_norm` blocks require it. With it, an `hstu`
    block ends with a SwiGLU."""
    rotary: RotaryConfig | None = None
    """Rotary embedding of queries and keys; if absent, none."""
    head: HeadConfig = DotConfig()
    """How outputs are scored against items."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The dropout of the input and inside each layer."""
    input_dropout: float | None = Field(None, ge=0, lt=1)
    """The dropout of the input; if absent, `dropout`."""
    action_embedding: bool = False
    """Whether an event's action is embedded and added to its item."""
    id_dropout: float = Field(0.0, ge=0, le=1)
    """The probability with which a training step drops an item's row, so that its features alone represent it; with 1
    items have no rows."""
    vector_correction: int = Field(0, ge=0, le=1024)
    """The number of trained parameters per item that correct each of its vectors, which are not trained; 0: none."""
    table_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the tables of items and actions and of their gradients. Training takes 12 bytes per weight with
    bfloat16 and 16 with float32, since moments are float32. With bfloat16, updates below 1/512 of a weight are lost."""
    attention: Annotated[list[AttentionConfig], BeforeValidator(_as_list)]
    """The attention: one mapping for all layers, or a list of one for each layer."""

    @model_validator(mode="after")
    def _consistent(self):
        if len(self.attention) not in (1, self.num_layers):
            raise ValueError(f"attention lists {len(self.attention)} mappings for num_layers={self.num_layers}")
        for name in ("attention_dim", "linear_dim"):
            if getattr(self, name) is None and self.embedding_dim % self.num_heads:
                raise ValueError(
                    f"embedding_dim={self.embedding_dim} is not divisible by num_heads={self.num_heads}: give {name}"
                )
        if self.block != "hstu" and self.feed_forward_dim is None:
            raise ValueError(f"block={self.block} needs feed_forward_dim")
        attentions = [attention.for_model(self.layer_sizes) for attention in self.attention]
        faults = []
        for layer, attention in enumerate(attentions):
            try:
                attention.check_model(self.layer_sizes)
            except ValueError as error:
                faults.append((("attention", layer), str(error)))
        if faults:
            raise located(faults, OPTION)
        # In place, since `ModelConfig(...)` ignores another object that a validator returns.
        object.__setattr__(self, "attention", attentions)
        return self

    def check_run(self, run: RunOptions) -> None:
        for part in (*self.attention, self.head):
            part.check_run(run)
        if run.parallel.context > 1 and context_by(run) == "ring" and run.data.features:
            raise ValueError("data.features: not supported with parallel.context_by=ring")
        items = run.data.features.items if run.data.features else None
        if run.data.features and run.data.features.user_tokens:
            for kind in (attention.kind for attention in self.attention):
                if not ATTENTION_KINDS.class_of(kind).context:
                    raise ValueError(
                        f"data.features.users.as=tokens: model.attention.kind={kind} does not support tokens to which "
                        "all others attend: use dense or softmax, or as=sum"
                    )
        if self.id_dropout and items is None:
            raise ValueError("model.id_dropout: needs data.features.items, which represent items without an id")
        if self.id_dropout == 1 and run.parallel.sharded:
            raise ValueError(
                "model.id_dropout=1: not supported with parallel.embedding, since there is no item table to divide"
            )
        if self.vector_correction and not (items and items.vectors):
            raise ValueError("model.vector_correction: needs a column of kind vector in data.features.items.columns")

    @property
    def layer_sizes(self) -> LayerSizes:
        """The sizes of every layer; D and V are by default embedding_dim / num_heads."""
        default = self.embedding_dim // self.num_heads
        return LayerSizes(
            num_heads=self.num_heads,
            attention_dim=self.attention_dim or default,
            linear_dim=self.linear_dim or default,
            embedding_dim=self.embedding_dim,
            max_seq_len=self.max_seq_len,
            block=self.block,
        )


class LossConfig(Options):
    """The loss of retrieval."""

    kind: Literal["sampled_softmax", "cross_entropy", "bce", "in_batch", "mixed_negatives"] = "sampled_softmax"
    """The items that compete with a target: all for `cross_entropy`, otherwise negatives from the batch's targets
    (`in_batch`), uniform ones (`sampled_softmax`, `bce`) or both (`mixed_negatives`)."""
    num_negatives: int = Field(128, ge=1)
    """The number of negatives per position."""
    negatives: Literal["per_position", "block", "shared"] = "per_position"
    """Which positions share negatives: none, blocks of 128 to 1,024 from the whole batch, or all. Sharing is faster."""
    in_batch_share: float = Field(0.5, gt=0, lt=1)
    """With `mixed_negatives`, the share of negatives drawn from the batch's targets; the others are uniform."""
    temperature: float = Field(0.05, ge=1e-4, le=1e4)
    """The divisor of the scores."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """With `cross_entropy`, the share of the target's probability that is spread over all competing items."""
    exclude: Literal["none", "history", "sequence", "auto"] = "none"
    """With `cross_entropy`, items of the user that do not compete with a target: `history`, the items before it (as in
    rankings without seen items); `sequence`, all items of the training sequence. `auto` is `none` if seen items are
    ranked (`eval.filter_seen: none`), otherwise `history`."""

    @property
    def num_in_batch(self) -> int:
        """The number of negatives of `mixed_negatives` that are drawn from the batch's targets."""
        return round(self.in_batch_share * self.num_negatives)

    @model_validator(mode="after")
    def _consistent(self):
        if self.label_smoothing and self.kind != "cross_entropy":
            raise ValueError(f"label_smoothing is for kind=cross_entropy, got kind={self.kind}")
        if self.exclude != "none" and self.kind != "cross_entropy":
            raise ValueError(f"exclude is for kind=cross_entropy, got kind={self.kind}")
        if self.kind == "mixed_negatives" and not 0 < self.num_in_batch < self.num_negatives:
            raise ValueError(
                f"in_batch_share={self.in_batch_share} of num_negatives={self.num_negatives} must leave at least one "
                "in-batch and one uniform negative"
            )
        return self
