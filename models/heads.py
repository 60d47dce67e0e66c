"""Score outputs against items: `dot`, the cosine, or `mol`, a mixture of logits.

Letters: T tokens, R rows of a chunk of tokens, E embedding size, I items, K items to score for each row, P_q query and
P_x item components, P = P_q * P_x pairs of components, C component size.
"""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.nn import functional as F

from data.options import Options, auto_or, chosen
from models.attention.contract import AuxLoss, AuxLosses
from models.chunks import CHUNK, ChunkedSum, chunk_size
from models.protocols import RankGroup, RunOptions
from models.repeats import RepeatTerm

NORM_EPS = 1e-6


class Head(Options):
    """Base of the heads' options.

    has_item_vectors  whether a score is the inner product of an output and a vector of the item
    """

    kind: str

    @property
    def has_item_vectors(self) -> bool:
        return False

    def module(self, embedding_dim: int) -> "MixtureOfLogits | None":
        """Return the trained network that scores items; None if the score is the cosine."""
        return None

    def repeat_term(self, embedding_dim: int) -> RepeatTerm | None:
        """Return the term that is added to the cosines of the items in a user's window, or None."""
        return None


Patterns = Annotated[int | Literal["auto"], BeforeValidator(auto_or(0))]


class DotConfig(Head):
    """Score an item by its cosine with the model's output."""

    kind: Literal["dot"] = "dot"
    """The head."""
    learned_temperature: bool = False
    """Whether the temperature is trained, with `loss.temperature` as its initial value."""
    item_dropout: float = Field(0.0, ge=0, lt=1)
    """The dropout of item embeddings when outputs are scored against them."""
    separate_targets: bool = False
    """Whether outputs are scored against a separate item table instead of the table of the inputs."""
    repeats: Patterns = 0
    """The number of patterns of a learned term, which depends on how long ago, how often and after which items an item
    occurred, and is added to the scores of the items in a user's window (models/repeats.py); 0: no term. `auto` is
    8 if seen items are ranked (`eval.filter_seen: none`), otherwise 0. It needs `loss.kind: cross_entropy`."""

    @property
    def has_item_vectors(self) -> bool:
        return not self.repeats

    def repeat_term(self, embedding_dim: int) -> RepeatTerm | None:
        return RepeatTerm(embedding_dim, chosen(self.repeats)) if self.repeats else None

    def check_run(self, run: RunOptions) -> None:
        if self.repeats and run.loss.kind != "cross_entropy":
            raise ValueError(f"model.head.repeats: needs loss.kind=cross_entropy, got {run.loss.kind}")
        if self.repeats and self.learned_temperature:
            raise ValueError("model.head.repeats: not supported with learned_temperature")
        features = run.data.features is not None and run.data.features.items
        if self.separate_targets and (features or run.parallel.sharded):
            raise ValueError("model.head.separate_targets: not supported with data.features.items or a sharded table")


class MoLConfig(Head):
    """Score an item by a mixture of logits.

    The published sizes for MovieLens and Amazon are 8 x 4 components of size 64, gates of 128, dropout 0.2 and
    item_dropout 0.1; docs/recipes.md compares 4 x 4 components of 64 with gates of 64. Quality is lower with
    components that are smaller than embeddings.
    """

    learned_temperature: ClassVar[bool] = False
    separate_targets: ClassVar[bool] = False
    repeats: ClassVar[int] = 0

    kind: Literal["mol"]
    """The head."""
    query_components: int = Field(8, ge=1)
    """The number of components of an output."""
    item_components: int = Field(4, ge=1)
    """The number of components of an item."""
    component_dim: int = Field(64, ge=1)
    """The size of a component."""
    gate_hidden_dim: int = Field(128, ge=1)
    """The hidden size of the networks that compute the weights of pairs of components."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """The dropout of the mixture's weights, which are then normalised again."""
    item_dropout: float = Field(0.2, ge=0, lt=1)
    """The dropout of items before their components are computed."""
    temperature: float = Field(0.05, ge=1e-4, le=1e4)
    """The divisor of the components' cosines; `loss.temperature` is for the head `dot`."""
    balance_weight: float = Field(0.001, ge=0)
    """The weight of the auxiliary loss that keeps all pairs of components in use."""

    def module(self, embedding_dim: int) -> "MixtureOfLogits":
        return MixtureOfLogits(self, embedding_dim)

    def check_run(self, run: RunOptions) -> None:
        loss = run.loss
        unsupported = {
            f"loss.kind={loss.kind}": loss.kind in ("bce", "mixed_negatives"),
            "model.table_dtype=bfloat16": run.model.table_dtype != "float32",
            "loss.label_smoothing": bool(loss.label_smoothing),
            "loss.exclude": loss.exclude != "none",
            f"parallel.context={run.parallel.context}": run.parallel.context > 1,
        }
        if names := [name for name, wrong in unsupported.items() if wrong]:
            raise ValueError(f"{names[0]} is not supported by model.head.kind=mol: change it or use kind=dot")


HeadConfig = Annotated[DotConfig | MoLConfig, Field(discriminator="kind")]


def normalized(x: Tensor) -> Tensor:
    """Return rows [..., E] scaled to length one."""
    return F.normalize(x, dim=-1, eps=NORM_EPS)


class Side(NamedTuple):
    """Components [..., P_q or P_x, C] of length one and gates [..., P] of queries or of items."""

    components: Tensor
    gates: Tensor

    def rows(self, begin: int, end: int) -> "Side":
        return Side(self.components[begin:end], self.gates[begin:end])


class MixtureOfLogits(nn.Module):
    """Score with a mixture of logits: score(o, e) = sum over pairs of components of pi * l.

    l = cos(Q_a(o), X_b(e)) / temperature, pi = softmax(z * sigmoid(z)), z = g_q(o) * g_x(e) + g_l(l).

    All Q_a and X_b are initialised with the same orthogonal projection, so that the mixture starts as the cosine (in a
    subspace if component_dim < E). With independent initial values, as published, NDCG@10 on Beauty was a quarter
    lower, since inputs and targets share one table (docs/learned.md).

    Source: Zhai et al., Revisiting Neural Retrieval on Accelerators, KDD 2023 (arXiv 2306.04039); Ding and Zhai,
    Retrieval with Learned Similarities (arXiv 2407.13218).
    """

    def __init__(self, config: MoLConfig, embedding_dim: int):
        super().__init__()
        self.config = config
        pairs = config.query_components * config.item_components
        self.query = nn.Linear(embedding_dim, config.query_components * config.component_dim)
        self.item = nn.Linear(embedding_dim, config.item_components * config.component_dim)

        def gate(size: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(size, config.gate_hidden_dim), nn.SiLU(), nn.Linear(config.gate_hidden_dim, pairs)
            )

        self.query_gate, self.item_gate, self.pair_gate = gate(embedding_dim), gate(embedding_dim), gate(pairs)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        start = nn.init.orthogonal_(torch.empty(config.component_dim, embedding_dim))
        for linear, count in ((self.query, config.query_components), (self.item, config.item_components)):
            linear.weight.data = start.repeat(count, 1)

    def forward(self, method: str, *arguments):
        """Call a method by its name, for torch.func.functional_call."""
        return getattr(self, method)(*arguments)

    def queries(self, out: Tensor) -> Side:
        """Return the components and gates of outputs [..., E] of length one."""
        # The layers are initialised for inputs with a variance of one.
        out = out * math.sqrt(out.shape[-1])
        return Side(self._components(self.query(out)), self.query_gate(out))

    def items(self, item_weight: Tensor) -> Side:
        """Return the components and gates of rows [..., E] of the item table."""
        rows = normalized(item_weight) * math.sqrt(item_weight.shape[-1])
        dropped = F.dropout(rows, self.config.item_dropout, self.training)
        return Side(self._components(self.item(dropped)), self.item_gate(rows))

    def _components(self, x: Tensor) -> Tensor:
        return normalized(x.unflatten(-1, (-1, self.config.component_dim)))

    def scores(self, queries: Side, items: Side) -> tuple[Tensor, Tensor]:
        """Return (scores [R, K], pi [R, K, P] before dropout) of queries [R, ...] and items [R, K, ...] or [K, ...]."""
        shared = items.components.dim() == 3
        logits = torch.einsum(
            "rqc,kxc->rkqx" if shared else "rqc,rkxc->rkqx", queries.components, items.components
        ).flatten(-2)
        logits = logits / self.config.temperature
        z = queries.gates[:, None] * items.gates + self.pair_gate(logits)
        pi = F.softmax(F.silu(z).float(), dim=-1)
        mixed = pi
        if self.training and self.config.dropout:
            mixed = F.dropout(pi, self.config.dropout)
            mixed = mixed / mixed.sum(-1, keepdim=True).clamp(min=NORM_EPS)
        return (mixed * logits).sum(-1), pi

    @torch.no_grad()
    def scores_of_all(self, out: Tensor, items: Side) -> Tensor:
        """Return the scores [R, I] of outputs [R, E], computed in tiles of items."""
        queries = self.queries(out)
        pairs = self.config.query_components * self.config.item_components + self.config.gate_hidden_dim
        width = max(1, CHUNK["cuda"] // (pairs * max(1, len(out))))
        tiles = [
            self.scores(queries, Side(*(part[begin : begin + width] for part in items)))[0].float()
            for begin in range(0, len(items.gates), width)
        ]
        return torch.cat(tiles, 1) if tiles else out.new_zeros(len(out), 0)


class CataloguePart(NamedTuple):
    """A rank's part of the catalogue: the items from `first` on, at most `most` on each rank.

    merge: (log-sum-exp [R], logit of the target [R] or 0 if another rank has it) -> both over the whole catalogue.
    """

    first: int
    most: int
    merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def mol_loss(
    head: MixtureOfLogits,
    out: Tensor,
    item_weight: Tensor,
    targets: Tensor,
    negatives: Tensor | None,
    ranks: RankGroup | None = None,
    part: CataloguePart | None = None,
) -> tuple[Tensor, AuxLosses]:
    """Return (softmax loss, mean over targets >= 0; the balance of the mixture as an auxiliary loss).

    Targets compete with `negatives` [T, K], or with the whole catalogue if that is None; a negative equal to the target
    does not count. The loss is a `ChunkedSum` over rows, without a second derivative. The balance is computed from the
    weights of each output's target.

    ranks: given if the outputs are a rank's part of a batch; the results are then its shares.
    part: given if item_weight is a rank's part of the catalogue; outputs and targets are then those of the whole batch.
    """
    if part is not None and not len(item_weight):  # add an item, whose logit `_chunk_loss` masks
        item_weight = torch.cat([item_weight, item_weight.new_zeros(1, out.shape[1])])
        part = part._replace(first=-2)
    names, parameters = zip(*head.named_parameters())
    c = head.config
    width = c.query_components * c.item_components + c.gate_hidden_dim
    competing = len(item_weight) if part is None else part.most  # the same chunks on all ranks
    if negatives is not None:
        competing = negatives.shape[1] + 1
        width += c.item_components * c.component_dim
    rows = max(1, chunk_size(out) // (competing * width))

    # All items are prepared once, unless fewer are drawn.
    once = negatives is None or len(item_weight) <= negatives.numel()
    source = head.items(item_weight) if once else (item_weight,)

    def chunk(out, targets, negatives, *rest):
        head_parameters = dict(zip(names, rest[len(source) :]))
        return _chunk_loss(head, head_parameters, out, targets, negatives, rest[: len(source)], part)

    total = ChunkedSum.apply(chunk, rows, 3, out, targets, negatives, *source, *parameters)
    scored, chosen = targets >= 0, targets.clamp(min=0)
    count = (scored.sum() if ranks is None or part is not None else ranks.sum(scored.sum())).clamp(min=1)
    if part is not None and ranks is not None:  # each rank handles its targets
        total = as_share(total, ranks.world)
        chosen, scored = _local_rows(targets, part.first, len(item_weight))
    target_rows = F.embedding(chosen, item_weight)
    _, pi = head.scores(head.queries(out), head.items(target_rows[:, None]))
    mean = (pi[:, 0] * scored[:, None]).sum(0) / count
    if ranks is not None:  # the mean over ranks, with the gradient of this rank's part
        mean = mean + (ranks.sum(mean) - mean).detach()
    balance = (_entropy(pi[:, 0]) * scored).sum() / count
    balance = balance - (_entropy(mean) if ranks is None else as_share(_entropy(mean), ranks.world))
    return total / count, {"mol_balance": AuxLoss.of(balance, head.config.balance_weight)}


def _local_rows(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (targets as indices into the `count` items from `first` on, 0 for others; whether they are among them)."""
    inside = (targets >= max(0, first)) & (targets < first + count)
    return torch.where(inside, targets - first, 0), inside


def as_share(x: Tensor, world: int) -> Tensor:
    """Return x / world with the gradient of x: a rank's share of a value that all ranks have."""
    return x - (x * (1 - 1 / world)).detach()


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy over the last dimension; probabilities of 0 add nothing to it or to the gradient."""
    return -(p * p.clamp(min=1e-30).log()).sum(-1)


def _chunk_loss(head, parameters, out, targets, negatives, source, part: CataloguePart | None = None) -> Tensor:
    """Return the sum of the losses of a chunk of rows; parameters: the head's, by name.

    source: the catalogue's `Side`, or (table,), from which the negatives are prepared. part: if given, the
    loss is over the whole catalogue, with the gradients of this part.
    """

    def call(method: str, *arguments):
        return torch.func.functional_call(head, parameters, (method, *arguments))

    queries, chosen = call("queries", out), targets.clamp(min=0)
    if part is not None:
        logits, _ = call("scores", queries, Side(*source))
        if part.first < 0:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool), -1e30)
        row, inside = _local_rows(targets, part.first, logits.shape[1])
        lse, logit = logits.logsumexp(1), logits.gather(1, row[:, None])[:, 0].masked_fill(~inside, 0)
        whole, positive = part.merge(lse.detach(), logit.detach())
        local = (lse.detach() - whole).exp() * lse - logit
        losses = local + (whole - positive - local).detach()
    elif negatives is None:
        logits, _ = call("scores", queries, Side(*source))
        losses = logits.logsumexp(1) - logits.gather(1, chosen[:, None])[:, 0]
    else:
        ids = torch.cat([chosen[:, None], negatives], 1)
        drawn = [F.embedding(ids, x.flatten(1)).unflatten(-1, x.shape[1:]) for x in source]
        items = Side(*drawn) if len(drawn) > 1 else call("items", *drawn)
        logits, _ = call("scores", queries, items)
        same = F.pad(negatives == targets[:, None], (1, 0))
        logits = logits.masked_fill(same, float("-inf"))
        losses = logits.logsumexp(1) - logits[:, 0]
    return losses.masked_fill(targets < 0, 0).sum()
