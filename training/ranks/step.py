"""Build a training step for several ranks, each with a part of the batch.

Gradients are summed over ranks, not averaged: the loss is the sum of the ranks' shares. In a captured step a single
message has the gradients of all weights; otherwise DDP sends them during the backward pass. With a sharded item table
the look-up of rows and the optimiser are outside of the captured part.
"""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.balance import Deal
from data.batch import Batch
from models.attention.contract import AuxLoss, AuxLosses
from models.hstu import SequenceModel
from models.options import ModelConfig
from models.tasks.build import build_task
from training.average import WeightAverage
from training.config import RunConfig
from training.graph import GraphedStep, Losses, Step, captures
from training.optimizer import build_optimizer
from training.ranks.draws import CALLS, seed_of, write_bases
from training.ranks.losses import Prepared, catalogue_share, prepare
from training.ranks.processes import Ranks
from training.ranks.staged import StagedStep
from training.ranks.tables import sharded_table


class Shares(nn.Module):
    """Map a batch to (this rank's share of the loss, its shares of the auxiliary losses by name).

    Model and loss are one module's forward pass, so that DDP synchronises all weights that the loss uses. bases: see
    `Draws`.
    """

    def __init__(self, config: RunConfig, model: SequenceModel, ranks: Ranks, bases: Tensor, graphed: bool):
        super().__init__()
        self.model, self.config, self.ranks, self.task = model, config, ranks, build_task(config)
        self.bases, self.graphed = bases, graphed

    def prepare(self, batch: Batch) -> Prepared:
        """Draw negatives and look up rows of a sharded table."""
        c = self.config
        return prepare(self.model, c.loss if c.task.has_item_loss else None, self.bases, batch, self.ranks)

    def forward(self, batch: Batch, prepared: Prepared | None = None) -> tuple[Tensor, AuxLosses]:
        c, device = self.config, batch.item_ids.device.type
        share, rows = self.prepare(batch) if prepared is None else prepared
        inputs = None
        if rows is not None:
            inputs, items = self.model.embedding.represent(*rows)
            share = share if share.drawn is None else share._replace(items=items)
        bf16 = c.train.autocast == "bf16"
        real = batch.real.sum()
        part_of_tokens = real / self.ranks.sum(real).clamp(min=1)

        def shared(loss: AuxLoss) -> AuxLoss:
            part = part_of_tokens
            if loss.num_terms is not None:
                part = loss.num_terms / self.ranks.sum(loss.num_terms).clamp(min=1)
            return AuxLoss(part * loss.value, part * loss.weighted)

        # In a captured step, autocast's cache of cast weights would outlive the step.
        with torch.autocast(device, torch.bfloat16, enabled=bf16, cache_enabled=not self.graphed):
            out, shares = self.model.raw_output(batch, inputs, shared)
        dtype = torch.bfloat16 if bf16 else None
        if inputs is not None and c.task.has_item_loss and share.drawn is None:
            loss, task_losses = catalogue_share(self.model, c.loss, out, batch, self.ranks, dtype)
        else:
            loss, task_losses = self.task.loss(self.model, out, batch, share)
        return loss, shares | task_losses


def build_shared_step(
    config: RunConfig, model: SequenceModel, device: torch.device, average: WeightAverage | None, ranks: Ranks
) -> tuple[torch.optim.Optimizer, Step]:
    """Return the optimiser and the step, like training.step.build_step, for this rank's part of a batch.

    The step returns the losses of the whole batch, and `imbalance` (see data/balance.py).
    """
    c, gpu = config.train, device.type == "cuda"
    graphed, table = gpu and captures(config, ranks.by_heads), sharded_table(model)
    staged = graphed and table is not None
    shards = [] if table is None or table.parameter is None else [table.parameter]
    weights = [*model.parameters(), *shards]
    optimizer = build_optimizer(c, weights, device, graphed and not staged)
    if c.compile:
        for layer in model.layers:
            layer.compile(dynamic=True)
    bases = torch.zeros(CALLS, dtype=torch.int64, device=device)
    module = Shares(config, model, ranks, bases, graphed)
    shares = module if graphed else in_ddp(module, config, ranks, device)

    def gradients(batch: Batch, prepared: Prepared | None = None) -> Losses:
        loss, aux = shares(ranks.cut(batch, model.num_context), prepared)
        optimizer.zero_grad(set_to_none=True)
        (loss + sum(one.weighted for one in aux.values())).backward()
        whole = loss.detach() + sum(one.weighted.detach() for one in aux.values())
        values = {"loss": whole} | {name: one.value.detach() for name, one in aux.items()}
        sums = torch.stack([value.float() for value in values.values()])
        sums = ranks.sum_gradients(model.parameters(), sums, padded=True) if graphed else ranks.sum(sums)
        return dict(zip(values, sums))

    def update(losses: Losses) -> Losses:
        if c.clip_norm is not None or not graphed:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if table is not None:  # with a fused optimiser the table has no gradient, and is not in the norm
                norm = (norm**2 + ranks.sum(sum((p.grad.norm() ** 2 for p in shards), torch.zeros_like(norm)))).sqrt()
            if c.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(weights, c.clip_norm, norm)
            losses = losses | {"grad_norm": norm.detach()}
        optimizer.step()
        if average is not None:
            average.update()
        return losses

    def train(batch: Batch) -> Losses:
        return update(gradients(batch))

    run: Step = train
    sizes = {"batch_size": c.batch_size, "longest": config.model.max_seq_len}
    if staged:
        run = StagedStep(module.prepare, gradients, update, weights, **sizes)
    elif graphed:
        run = GraphedStep(train, **sizes)

    def step(batch: Batch) -> Losses:
        assert batch.whole is not None
        # Dropout masks depend on the step and the rank, so that checkpoints need no generator's state.
        seed = seed_of(config.seed, batch.whole.step, ranks.rank)
        torch.default_generator.manual_seed(seed)
        if gpu:  # on a CPU, torch.manual_seed would store a call for CUDA, with a traceback
            torch.cuda.manual_seed(seed)
        write_bases(bases, config.seed, batch.whole.step)
        if table is not None:
            table.begin_step(optimizer.param_groups[0]["lr"], batch.whole.step)
        return run(batch) | {"imbalance": torch.tensor(batch.whole.imbalance)}

    return optimizer, step


def in_ddp(module: Shares, config: RunConfig, ranks: Ranks, device: torch.device) -> nn.Module:
    """Return the module in DistributedDataParallel, which sums gradients over the ranks."""
    with warnings.catch_warnings():
        # Torch 2.13 deprecates broadcast_buffers, and torch 2.11 has no other name for it.
        warnings.simplefilter("ignore", FutureWarning)
        shares = ranks.data_parallel(
            module,
            device_ids=None if device.type == "cpu" else [torch.cuda.current_device()],
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            # In an earlier phase of training a layer may not use all of its weights.
            find_unused_parameters=any(attention.phase_ends() for attention in config.model.attention),
        )
    shares.register_comm_hook(ranks.group, summed)
    return shares


def summed(group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients over ranks: a communication hook of DDP, which would otherwise average them."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def deal_of(config: RunConfig, ranks: Ranks) -> Deal | None:
    """Return how batches are divided among the ranks; None if each rank has whole batches."""
    if not ranks.distributed_step:
        return None
    return Deal(ranks.place, ranks.data, token_work(config.model), config.parallel.balance)


def token_work(model: ModelConfig) -> float:
    """Return the work of a layer's linear maps for a token, relative to that of attention for a pair of tokens."""
    sizes, size = model.layer_sizes, model.embedding_dim
    pair = sizes.num_heads * (sizes.attention_dim + sizes.linear_dim) / 2  # half of the pairs are masked
    linear = size * sizes.num_heads * (2 * sizes.attention_dim + 3 * sizes.linear_dim)
    linear += (2 if model.block == "transformer" else 3) * size * (model.feed_forward_dim or 0)
    return linear / pair
