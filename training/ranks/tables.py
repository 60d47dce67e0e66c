"""The item table sharded over ranks by torchrec's DistributedModelParallel.

Letters: I items, E embedding size, n ids that are looked up; rows and columns are those of a rank's shard.
"""

import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from data.errors import ConfigError
from models.features import truncated_normal_
from models.hstu import SequenceModel
from training.config import RunConfig
from training.ranks.draws import seed_of
from training.ranks.processes import Ranks

if TYPE_CHECKING:
    from torchrec.distributed.model_parallel import DistributedModelParallel

# torchrec logs each of its choices. It is imported inside functions, since this takes seconds.
logging.getLogger("torchrec.distributed").setLevel(logging.ERROR)

BLOCK = 2**22  # elements of the table that are initialised or copied at a time
BAG = 64  # ids that torchrec's kernels handle together; fbgemm takes a thread or a warp for each such bag


class ShardedTable:
    """The item table, of which each rank has some rows or some columns; it is not a submodule of the model.

    kind         row_wise, table_wise or column_wise
    begin, end   (first row, first column) of this rank's shard and the ends of both; equal if the rank has no shard
    weight       [rows, columns], this rank's shard
    parameter    the flattened shard, for the optimiser; None without a shard or with a fused optimiser
    kernel       fbgemm's module of the shard; None without a shard
    """

    def __init__(self, config: RunConfig, num_items: int, ranks: Ranks, device: torch.device):
        p, size = config.parallel, config.model.embedding_dim
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())  # torchrec compares it with devices of shards
        from torchrec.distributed.comm_ops import set_gradient_division

        self.ranks, self.device, self.num_items, self.size, self.fused = ranks, device, num_items, size, p.fused
        self.kind: str = p.embedding
        if self.kind == "auto":
            from training.ranks.sharding import planned  # imports torchrec's planner, which takes a second

            memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 80 * 2**30
            self.kind, _ = planned(config, num_items, ranks.world, memory)
        if self.kind == "column_wise" and size % (4 * ranks.world):
            raise ConfigError(
                f"parallel.embedding: column_wise divides model.embedding_dim={size} into {ranks.world} parts, which "
                "must be multiples of 4"
            )
        set_gradient_division(False)  # gradients are summed, since the loss is the sum of the ranks' shares
        with torch.random.fork_rng(devices=[]):  # torchrec initialises the rows, which `fill` overwrites
            self.module = self._sharded(config)
        # torchrec 1.8 has no public access to the module of a shard.
        modules = [module for lookup in self.module.module._lookups for module in lookup._emb_modules]
        self.begin: tuple[int, int] = (0, 0)
        self.end: tuple[int, int] = (0, 0)
        self.weight, self.parameter, self.kernel = torch.empty(0, size, device=device), None, None
        (spec,) = (one["item"].sharding_spec for one in self.module.plan.plan.values())
        for shard in spec.shards if modules else ():
            if shard.placement.rank() == ranks.rank:
                self.begin = (shard.shard_offsets[0], shard.shard_offsets[1])
                self.end = (self.begin[0] + shard.shard_sizes[0], self.begin[1] + shard.shard_sizes[1])
        if not modules:
            return
        self.kernel, shape = modules[0]._emb_module, [e - b for b, e in zip(self.begin, self.end)]
        if self.fused:
            self.weight = self.kernel.split_embedding_weights()[0]
            if not len(self.weight):  # on a CPU, fbgemm raises an error for a table without rows
                no_rows = torch.empty(0, size, device=device, requires_grad=True)
                modules[0].forward = lambda features: F.embedding(features.values().long(), no_rows)
            return
        self.parameter = self.kernel.weights
        self.weight = self.parameter.detach().view(shape)
        # On a CPU, the dense kernel of fbgemm 1.8 pools rows although no pooling is requested.
        modules[0].forward = lambda features: F.embedding(features.values().long(), self.parameter.view(shape))

    def _sharded(self, config: RunConfig) -> "DistributedModelParallel":
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        table = EmbeddingConfig(
            name="item", embedding_dim=self.size, num_embeddings=self.num_items, feature_names=["item"]
        )
        module, world = EmbeddingCollection(tables=[table], device=torch.device("meta")), self.ranks.world
        kernel = "fused" if self.fused else "dense"
        placed = {
            "row_wise": lambda: row_wise(compute_kernel=kernel),
            "table_wise": lambda: table_wise(rank=0, compute_kernel=kernel),
            "column_wise": lambda: column_wise(ranks=list(range(world)), compute_kernel=kernel),
        }[self.kind]()
        sharder = EmbeddingCollectionSharder(fused_params=fused_options(config, self.device) or None)
        plan = construct_module_sharding_plan(
            module,
            {"item": placed},
            sharder,
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            world_size=world,
            device_type=self.device.type,
        )
        return DistributedModelParallel(
            module,
            env=ShardingEnv.from_process_group(self.ranks.group),
            device=self.device,
            plan=ShardingPlan({"": plan}),
            sharders=[sharder],
            init_data_parallel=False,
            init_parameters=False,
        )

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows [n, E] of the items `ids` [n] int64; all ranks must call this, each with its ids or none."""
        from torchrec import KeyedJaggedTensor

        lengths = ids.new_full((max(1, -(-len(ids) // BAG)),), BAG)
        lengths[-1] -= len(lengths) * BAG - len(ids)
        jagged = KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths, stride=len(lengths))
        return self.module(jagged)["item"].values()

    def local_rows(self) -> Tensor:
        """Return the shard [rows, E] of a row-wise table, with its gradient."""
        return self.weight if self.parameter is None else self.parameter.view(self.weight.shape)

    @torch.no_grad()
    def between(self, begin: int, end: int) -> Tensor:
        """Return the rows begin .. end - 1, [end - begin, E]; all ranks must call this, each with its range."""
        if self.kind == "row_wise" and (begin, end) == (self.begin[0], self.end[0]):
            return self.weight
        return self.look_up(torch.arange(begin, end, device=self.device))

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first item, rows [R, E]) of all items in blocks; on ranks other than the first, R is 0.

        All ranks must iterate over all blocks.
        """
        step = rows_in_a_block(self.size)
        for begin in range(0, self.num_items, step):
            end = min(self.num_items, begin + step) if self.ranks.first else begin
            yield begin, self.look_up(torch.arange(begin, end, device=self.device)).detach()

    @torch.no_grad()
    def fill(self, rows: Callable[[int, int], Tensor]) -> None:
        """Fill the shard block by block; rows(begin, end): returns rows of the whole table, [end - begin, E]."""
        step = rows_in_a_block(self.size)
        for first in range(self.begin[0] // step * step, self.end[0], step):
            last = min(self.num_items, first + step)
            begin, end = max(first, self.begin[0]), min(last, self.end[0])
            part = rows(first, last)[begin - first : end - first, self.begin[1] : self.end[1]]
            self.weight[begin - self.begin[0] : end - self.begin[0]].copy_(part)

    @torch.no_grad()
    def take(self, rows: Callable[[int, int], Tensor], ids: Tensor, places: Tensor) -> None:
        """Copy the rows `places` of another table to the items `ids`, as far as they are in this shard, block by block.

        rows(begin, end): returns rows of the other table, [end - begin, E]. ids, places: [n] int64 on the CPU.
        """
        is_local = (ids >= self.begin[0]) & (ids < self.end[0])
        places, order = places[is_local].sort()
        ids, step = (ids[is_local] - self.begin[0])[order], rows_in_a_block(self.size)
        for first in range(0, int(places.max()) + 1 if len(places) else 0, step):
            low, high = torch.searchsorted(places, torch.tensor([first, first + step])).tolist()
            if low == high:
                continue
            begin, end = int(places[low]), int(places[high - 1]) + 1
            block = rows(begin, end)[places[low:high] - begin, self.begin[1] : self.end[1]]
            self.weight[ids[low:high].to(self.weight.device)] = block.to(self.weight)

    def draw(self, trained: Tensor | None) -> None:
        """Initialise the shard randomly, each block of rows with another seed; an unsharded table has other values.

        trained: [I] bool, whether an item has training events; the rows of other items are zero.
        """

        def rows(begin: int, end: int) -> Tensor:
            torch.manual_seed(seed_of(seed, begin))
            block = truncated_normal_(torch.empty(end - begin, self.size), 0.02)
            return block if trained is None else block * trained[begin:end, None]

        seed = torch.initial_seed()
        with torch.random.fork_rng(devices=[]):
            self.fill(rows)

    def moments(self) -> dict[str, Tensor]:
        """Return the state of a fused optimiser by name: [rows, columns] or [rows] of the shard."""
        if not self.fused or self.kernel is None:
            return {}
        return {f"moment{place}": value for place, value in enumerate(self.kernel.split_optimizer_states()[0])}

    def begin_step(self, lr: float, step: int) -> None:
        """Set the learning rate and the number of completed steps of a fused optimiser."""
        if self.fused and self.kernel is not None:
            self.kernel.set_learning_rate(lr)
            # fbgemm counts every look-up as a step, also in evaluation; adam's bias correction uses this count.
            self.kernel.iter.fill_(step)
            self.kernel.iter_cpu.fill_(step)


def sharded_table(model: SequenceModel) -> ShardedTable | None:
    """Return the model's item table if it is sharded, else None."""
    return cast(ShardedTable | None, model.embedding.sharded)


def rows_in_a_block(size: int) -> int:
    """Return the number of rows of `size` elements in a block."""
    return max(1, BLOCK // size)


def fused_options(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments of fbgemm's optimiser; ConfigError if it does not support the configured one."""
    if config.parallel.fused is None:
        return {}
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    if config.parallel.fused == "rowwise_adagrad":
        return {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": config.train.lr, "eps": 1e-8}
    if device.type == "cpu":
        raise ConfigError("parallel.fused: fbgemm has no adam on a CPU: use rowwise_adagrad")
    beta1, beta2 = config.train.betas
    return {
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": config.train.lr,
        "eps": 1e-8,
        "beta1": beta1,
        "beta2": beta2,
    }
