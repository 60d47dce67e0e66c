"""Load a run's configuration from a YAML file and dotted overrides, and report all errors at once.

An unknown key, a missing key or a wrong type stops the run before anything is loaded; a misspelt key is reported with
the nearest valid one.
"""

import contextlib
import copy
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from data.augment import Augment
from data.config import DataConfig, PathText
from data.errors import ConfigError
from data.explain import explain
from data.kinds import Kinds
from data.options import Options, auto_or
from models.attention import ATTENTION_KINDS
from models.options import LossConfig, ModelConfig
from models.tasks.build import TASK_KINDS, TaskConfig
from models.tasks.retrieval import Retrieval
from training.strict_yaml import _Loader, parse_yaml, read_config  # noqa: F401 (tests use _Loader)


def _as_tuple(value):
    return tuple(value) if isinstance(value, list) else value


Beta = Annotated[float, Field(ge=0, lt=1)]


class UpdateConfig(Options):
    """Options of `train.py --update`."""

    epochs: int = Field(20, ge=1)
    """The number of passes over the events of the update; it becomes `train.epochs` of the updated run."""
    replay: float = Field(1.0, ge=0, le=1000)
    """The number of older events to train on again for each new event."""


class TrainConfig(Options):
    """Training with AdamW."""

    epochs: int = Field(ge=1)
    """The number of passes over the training data."""
    steps: int | None = Field(None, ge=1)
    """The number of steps after which no new epoch starts, a limit in addition to `epochs`; if absent, no limit. The
    same number of steps suits data sets of any size; the same number of epochs does not."""
    batch_size: int = Field(128, ge=1)
    """The number of sequences in a batch."""
    augment: Augment | None = None
    """Random changes to the training sequences, drawn anew in every epoch; if absent, no changes."""
    lr: float = Field(1e-3, gt=0)
    """The learning rate."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)] = (0.9, 0.98)
    """AdamW's coefficients of the running averages of the gradient and its square."""
    weight_decay: float = Field(0.0, ge=0)
    """The weight decay coefficient."""
    warmup_steps: int = Field(0, ge=0)
    """The number of steps over which the learning rate rises linearly to `lr`."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """The schedule of the learning rate after the warm-up: constant, or a linear or cosine decay towards 0 at the
    end."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """The decay of an exponential moving average of the weights, in fp32. If it is set, the average is evaluated in
    place of the weights; if absent, no average."""
    clip_norm: float | None = Field(None, gt=0)
    """The maximum norm of the gradient; if absent, gradients are not clipped."""
    autocast: Literal["none", "bf16"] = "none"
    """Whether layers compute in bf16."""
    residual: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the residual stream in training; `bfloat16` needs `autocast: bf16` and reduces memory traffic."""
    matmul_precision: Literal["default", "highest", "high"] = "default"
    """The precision of fp32 matrix products on a GPU, as in torch.set_float32_matmul_precision: `high` is TF32;
    `default` leaves torch's setting unchanged."""
    compile: bool = False
    """Whether to compile the layers with torch.compile."""
    cuda_graphs: bool = True
    """Whether steps on a GPU are captured and replayed as CUDA graphs; ignored with `compile`."""
    recompute: bool = False
    """Whether the backward pass recomputes each layer's intermediates, with the same bits, instead of saving them. This
    saves memory and runs the layers' forward pass twice; it cannot be combined with `compile`."""
    group_by_length: bool = False
    """Whether a batch has sequences of similar length, which is faster and slightly less random."""
    checkpoint_seconds: float = Field(60.0, ge=0)
    """The seconds between checkpoints, also within an epoch; 0 saves after every step."""
    tracking: Literal["tensorboard", "mlflow", "wandb"] = "tensorboard"
    """The tracker that curves are logged to, in addition to metrics.jsonl; mlflow and wandb need the extra of that
    name."""
    update: UpdateConfig = UpdateConfig()
    """Options of `train.py --update`."""

    def check_run(self, run: "RunConfig") -> None:
        if self.recompute and self.compile:
            raise ValueError("train.recompute: cannot be combined with train.compile, which chooses what to recompute")
        if self.residual == "bfloat16" and self.autocast != "bf16":
            raise ValueError("train.residual=bfloat16: needs train.autocast=bf16")


class EvalConfig(Options):
    """Evaluation during and after training."""

    every: int = Field(1, ge=0)
    """The number of epochs between evaluations during training; 0 for none. They use the validation split. Without
    one they use the test split, and nothing is chosen by their results."""
    batch_size: int = Field(512, ge=1)
    """The number of sequences in a batch."""
    filter_seen: Literal["auto", "history", "window", "none"] = "auto"
    """The user's earlier items that are removed from the ranking: those of the whole history, those in the model's
    window (as in the published figures), or none. A target that is removed counts as a miss. `auto` is `none` if more
    than 1% of the validation targets (without a validation split, of the users' last training events) repeat an earlier
    item of the user, otherwise `history`; the run's `config.yaml` has the chosen value."""
    same_time: Literal["seen", "hidden"] = "seen"
    """Whether a target's history includes the user's other events at the time of the target. With `hidden` these are
    left out, and the user's targets at one time (a basket) are one ranking with several relevant items."""
    metrics: list[str] | None = Field(None, min_length=1)
    """The metrics of retrieval, with any k: `HR@5`, `NDCG@10`, `Recall@20`, `Precision@10`, `MAP@10`, `MRR@10`, `MRR`
    or `MAP`; if absent, HR and NDCG at 1, 5, 10, 50, 100 and 200, and MRR. `best_metric` is always computed too."""
    best_metric: str | None = None
    """The metric that chooses the best weights: those with the greatest value or, for losses such as log_loss, the
    smallest; if absent, the task's first metric (retrieval: NDCG@10)."""
    patience: int | None = Field(None, ge=1)
    """The number of evaluations in a row without an improvement of best_metric after which training stops; if absent,
    training never stops early. Evaluations during an attention's warm-up do not count."""
    test: bool = True
    """Whether the finished run is evaluated on the test split."""

    def check_run(self, run: "RunConfig") -> None:
        named = [("best_metric", run.best_metric), *(("metrics", name) for name in self.metrics or ())]
        for option, name in named:
            if not run.task.has_metric(name):
                raise ValueError(f"eval.{option}: {name} is none of {', '.join(run.task.metric_names())}")
        if self.patience and (run.data.protocol in ("published", "all") or run.data.train_on_valid):
            why = "data.train_on_valid" if run.data.train_on_valid else f"protocol {run.data.protocol}"
            raise ValueError(
                f"eval.patience: {why} leaves no validation split; set eval.patience=null, and train.epochs to the "
                "best epoch of a run with validation"
            )
        if self.patience and not self.every:
            raise ValueError("eval.patience needs eval.every >= 1")


class ParallelConfig(Options):
    """The distribution of a run over the processes that torchrun starts."""

    data: Annotated[int | Literal["auto"], BeforeValidator(auto_or(1))] = 1
    """The number of ranks that share each batch; `auto` is the number of processes divided by `context`."""
    embedding: Literal["replicated", "row_wise", "table_wise", "column_wise", "auto"] = "replicated"
    """How the item table is divided among all ranks; `auto` is the choice of torchrec's planner."""
    context: int = Field(1, ge=1)
    """The number of ranks that share each sequence."""
    context_by: Literal["auto", "ring", "heads"] = "auto"
    """How ranks share a sequence: with `heads` each rank computes attention for some of the heads and all tokens; with
    `ring` keys and values are sent from rank to rank (`model.attention.kind: ring` only). `auto` is `heads` if the
    heads can be divided among the ranks, otherwise `ring`."""
    fused: Literal["rowwise_adagrad", "adam"] | None = None
    """The optimiser of the item table, in place of AdamW. It runs in the backward pass and updates only the rows that
    the step uses."""
    balance: bool = True
    """Whether to divide a batch so that ranks have equal predicted work; `false` assigns sequences round-robin."""

    @property
    def sharded(self) -> bool:
        """Whether the item table is divided among the ranks."""
        return self.embedding != "replicated"

    @property
    def distributed_step(self) -> bool:
        """Whether batches or the item table are distributed over ranks, even over a single one."""
        return self.data != 1 or self.sharded

    def check_run(self, run: "RunConfig") -> None:
        if self == ParallelConfig():
            return
        whole_catalogue = run.loss.kind == "cross_entropy"
        if run.loss.exclude != "none":
            raise ValueError("loss.exclude: cannot be combined with parallel")
        if run.model.head.repeats:
            raise ValueError("model.head.repeats: cannot be combined with parallel")
        if whole_catalogue and self.embedding in ("table_wise", "column_wise"):
            raise ValueError(
                f"parallel.embedding={self.embedding}: expected replicated or row_wise with loss.kind=cross_entropy, "
                "which needs whole rows on each rank"
            )
        if self.sharded and run.loss.label_smoothing:
            raise ValueError(f"parallel.embedding={self.embedding}: expected replicated with loss.label_smoothing")
        if self.sharded and run.model.table_dtype != "float32":
            raise ValueError(f"parallel.embedding={self.embedding}: model.table_dtype must be float32")
        if self.fused is None:
            return
        if run.model.embedding_dim % 4:
            raise ValueError(f"parallel.fused: model.embedding_dim={run.model.embedding_dim} must be a multiple of 4")
        if not self.sharded:
            raise ValueError("parallel.fused: needs a sharded table, such as parallel.embedding=row_wise")
        if whole_catalogue:
            raise ValueError(
                "parallel.fused: cannot be combined with loss.kind=cross_entropy, whose gradient changes every row of "
                "the table: use a sampled loss"
            )
        if run.train.clip_norm is not None or run.train.weight_decay:
            raise ValueError(
                "parallel.fused: cannot be combined with train.clip_norm and train.weight_decay, since it updates rows "
                "before the norm of the gradient is known"
            )


# The options that may be `auto`, and their values until training/sizes.py chooses them from the data.
AUTO_DEFAULTS: dict[str, Any] = {
    "model.max_seq_len": 200,
    "model.embedding_dim": 256,
    "model.num_layers": 3,
    "model.num_heads": 4,
    "model.feed_forward_dim": 512,
    "model.dropout": 0.5,
    "loss.temperature": 0.07,
    "train.batch_size": 128,
    "train.augment.drop": 0.1,
    "train.augment.window": 0.0,
    "eval.every": 2,
}


def at_path(tree: dict, path: str) -> tuple[dict, str]:
    """Return (the mapping that contains the last key of a dotted path, or an empty one; the last key)."""
    *parents, last = path.split(".")
    node: Any = tree
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}, last


class RunConfig(Options):
    """The configuration of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)
    """The run's name, and the name of its folder in run_dir."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The random seed of initial weights, batches, dropout and negatives."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device; `auto` is the GPU if there is one."""
    threads: int | None = Field(None, ge=1, le=4096)
    """The number of CPU threads; if absent, torch's default."""
    run_dir: PathText = "runs"
    """The folder for all runs."""
    data: DataConfig
    """The events and their splits."""
    task: TaskConfig = Retrieval.Config()
    """The prediction task."""
    model: ModelConfig
    """The model."""
    loss: LossConfig = LossConfig()
    """The loss of retrieval."""
    train: TrainConfig
    """How the model is trained."""
    eval: EvalConfig = EvalConfig()
    """How the model is evaluated."""
    parallel: ParallelConfig = ParallelConfig()
    """How the run is distributed over processes."""
    auto: list[str] = Field(default_factory=list)
    """The options to choose from the data. Setting an option to `auto` adds it to this list. These options may be
    `auto`: model.max_seq_len, embedding_dim, num_layers, num_heads, feed_forward_dim and dropout, loss.temperature,
    train.batch_size, train.augment.drop and window, and eval.every. The run's `config.yaml` has the chosen values;
    docs/recipes.md has the rule."""

    @model_validator(mode="before")
    @classmethod
    def _replace_auto(cls, tree):
        if not isinstance(tree, dict) or not isinstance(listed := tree.get("auto", []), list):
            return tree
        for path in listed:
            if path not in list(AUTO_DEFAULTS):
                raise ValueError(f"auto: {path!r} is none of {', '.join(AUTO_DEFAULTS)}")
        tree, auto = copy.deepcopy(tree), []
        for path, value in AUTO_DEFAULTS.items():
            parent, last = at_path(tree, path)
            if parent.get(last) == "auto" or (path in listed and parent.get(last) == value):
                parent[last] = value
                auto.append(path)
        return tree | {"auto": auto}

    @property
    def embeds_actions(self) -> bool:
        """Whether the model reads the actions of events."""
        return self.model.action_embedding or self.task.embeds_actions

    @property
    def best_metric(self) -> str:
        """The metric that chooses the best weights."""
        return self.eval.best_metric or self.task.metric_names()[0]

    def is_better(self, value: float | None, best: float | None) -> bool:
        """Return whether a value of `best_metric` is finite and better than the best so far (None: there is none)."""
        if value is None or not math.isfinite(value):
            return False
        return best is None or (value < best if self.task.less_is_better(self.best_metric) else value > best)

    @model_validator(mode="after")
    def _consistent(self):
        for name in type(self).model_fields:
            if isinstance(part := getattr(self, name), Options):
                part.check_run(self)
        return self


def _kinds_at(path: list) -> Kinds | None:
    """Return the possible kinds of the mapping at this path of a configuration; None if it has no kinds."""
    if path[:2] == ["model", "attention"] and len(path) <= 3:
        return ATTENTION_KINDS
    return TASK_KINDS if path == ["task"] else None


def _override(tree: dict, assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ConfigError(f"{assignment}: expected key=value, like train.lr=3e-4")
    try:
        value = parse_yaml(text, assignment)
    except ConfigError as error:
        raise ConfigError(f"{error}; values are YAML: quote text with special characters: '{path}=\"...\"'") from None
    put(tree, path.split("."), value)


def put(tree: dict, keys: Sequence[str], value: Any) -> None:
    """Set the value at nested keys of a configuration's tree; ConfigError unless all parents are mappings or lists."""
    *parents, last = keys
    path, node = ".".join(keys), tree
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            raise ConfigError(f"{path}: no such key ({part} is not in a mapping or list)")
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif not isinstance(node, dict):
        raise ConfigError(f"{path}: no such key ({last} is not in a mapping)")
    else:
        if last == "kind" and node.get("kind") != value and (kinds := _kinds_at(parents)) is not None:
            # Options of the previous kind that the new one does not have are removed. An unknown kind is reported when
            # the whole configuration is validated.
            with contextlib.suppress(ValueError):
                known = kinds.config_of(str(value)).model_fields
                for key in [key for key in node if key not in known]:
                    del node[key]
        if parents == ["model", "head"] and last == "kind" and node.get("kind") != value:
            node.clear()
        node[last] = value


def merge(tree: dict, changes: Mapping[str, Any], within: Sequence[str] = ()) -> None:
    """Merge nested mappings, whose outermost keys may be dotted, into a configuration's tree.

    Examples:
        >>> tree = {"model": {"num_layers": 2}}
        >>> merge(tree, {"model": {"num_heads": 4}, "train.lr": 0.01})
        >>> tree
        {'model': {'num_layers': 2, 'num_heads': 4}, 'train': {'lr': 0.01}}
    """
    for key in sorted(changes, key=lambda key: key != "kind"):  # `kind` first: a new one removes options of the old
        value, keys = changes[key], [*within, *([key] if within else key.split("."))]
        if isinstance(value, Mapping) and value:
            merge(tree, value, keys)
        else:
            put(tree, keys, str(value) if isinstance(value, Path) else value)


def load_tree(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration's tree from a YAML file, or copy a mapping; ConfigError if the file is not a mapping."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    tree = parse_yaml(read_config(Path(source)), str(source))
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping with data, model and train")
    return tree


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a configuration from a YAML file or a mapping, with dotted overrides; ConfigError names all errors.

    Examples:
        >>> config = load_config("configs/small.yaml", ["data.path=orders.csv", "model.embedding_dim=32"])
        >>> config.model.embedding_dim, config.best_metric
        (32, 'NDCG@10')
        >>> load_config("configs/small.yaml", ["model.embeding_dim=32"])
        Traceback (most recent call last):
        data.errors.ConfigError: configs/small.yaml: model.embeding_dim: unknown key, did you mean embedding_dim?...
    """
    tree = load_tree(source)
    for assignment in overrides:
        _override(tree, assignment)
    return checked(tree, "config" if isinstance(source, Mapping) else str(source))


def checked(tree: dict, where: str) -> RunConfig:
    """Validate a configuration's tree; ConfigError names all errors, each prefixed with `where`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item, tree) for item in error.errors()]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def as_yaml(config: RunConfig) -> str:
    """Format a configuration as YAML.

    Examples:
        >>> print(as_yaml(load_config("configs/small.yaml")).splitlines()[1])
        seed: 1
    """
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _explain(item: ErrorDetails, tree: dict) -> str:
    """Format a pydantic error with its location in the configuration."""
    location = list(item["loc"])
    if location[:3] == ["model", "attention", 0] and not isinstance(tree["model"]["attention"], list):
        del location[2]  # the user gave one mapping, which a validator put into a list
    if location[:2] == ["model", "head"] and location[2:3] in (["dot"], ["mol"]):
        del location[2]  # the kind of head, which pydantic inserts
    return explain(item, lambda place: _keys_at(place, tree), location)


def _keys_at(location: Sequence[int | str], tree: dict) -> list[str]:
    """Return the valid keys of the mapping at a location in `tree`."""
    model: Any = RunConfig
    path, mapping = list(location), tree
    for place, part in enumerate(location):
        mapping = mapping[part]
        if isinstance(mapping, dict) and (kinds := _kinds_at(list(location[: place + 1]))) is not None:
            model, path = kinds.config_of(mapping["kind"]), list(location[place + 1 :])
    for part in path:
        if part in model.model_fields:
            annotation = model.model_fields[part].annotation
            options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
            models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
            if part == "head":
                kind = tree["model"]["head"].get("kind")
                models = [o for o in models if kind in typing.get_args(o.model_fields["kind"].annotation)]
            model = next(iter(models), model)
    return [field.alias or name for name, field in model.model_fields.items()]
