"""Plan the placement of the item table on ranks, and the buffers of their communication.

Letters: T tokens of a rank.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from data.errors import ConfigError
from models.losses import block_count
from training.config import RunConfig

# The planner warns in every process about options that are not set here.
logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)

GPUS_OF_A_MACHINE = 8
RESERVED = 0.15  # share of a GPU's memory that the planner does not use for tables
COPIES = 4  # a weight, its gradient and AdamW's two moments


@dataclass(frozen=True)
class Sharded:
    """The placement of the item table on ranks.

    kind: the kind of sharding. buffers: bytes of a rank's communication buffers in a step, by name. lines: a
    description of the placement.
    """

    kind: str
    buffers: dict[str, int] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def data_ranks(config: RunConfig) -> int:
    """Return the number of ranks that share a batch; for `auto`, derived from the processes that torchrun started."""
    if config.parallel.data == "auto":
        return max(1, int(os.environ.get("WORLD_SIZE", 1)) // config.parallel.context)
    return config.parallel.data


def shard(config: RunConfig, num_items: int, ranks: int, tokens: int, gpu_bytes: int) -> Sharded:
    """Plan the placement of the item table on `ranks` ranks; tokens: T; gpu_bytes: the memory of a GPU."""
    p = config.parallel
    lines: tuple[str, ...] = ()
    if not p.sharded:
        return Sharded(p.embedding)
    kind: str = p.embedding
    if kind == "auto":
        kind, lines = planned(config, num_items, ranks, gpu_bytes)
    else:
        lines = tuple(shards(kind, num_items, config.model.embedding_dim, ranks))
    row, num_ids = config.model.embedding_dim * 4, num_looked_up(config, tokens, ranks)
    # Received rows, received gradients, one of the two being sent, and ids while they are sorted and sent.
    buffers = {"rows looked up": 3 * distinct(num_items, num_ids) * row + 5 * 8 * num_ids}
    if config.loss.kind == "cross_entropy":
        # The outputs of all ranks, their sum over ranks, and two gradients of the same size, in fp32.
        buffers["outputs of all ranks"] = 4 * tokens * ranks * row
    return Sharded(kind, buffers, lines)


def shards(kind: str, num_items: int, size: int, ranks: int) -> Iterator[str]:
    """Yield a line about each rank's shard of a table [num_items, size], as torchrec divides it."""
    block = -(-num_items // ranks) if kind == "row_wise" else num_items
    columns = size // ranks if kind == "column_wise" else size
    for rank in range(1 if kind == "table_wise" else ranks):
        begin = min(num_items, rank * block if kind == "row_wise" else 0)
        end, first = min(num_items, begin + block), rank * columns if kind == "column_wise" else 0
        yield f"  item table on rank:{rank}: rows {begin:,} .. {end - 1:,}, {columns:,} columns from {first:,} on"


def distinct(num_items: int, num_draws: int) -> int:
    """Return the expected number of distinct items in uniform draws."""
    return math.ceil(num_items * -math.expm1(-num_draws / num_items))


def num_looked_up(config: RunConfig, tokens: int, ranks: int) -> int:
    """Return the number of ids that a rank looks up in a step: inputs and, in sampled losses, targets and negatives."""
    loss = config.loss
    if not config.task.has_item_loss or loss.kind == "cross_entropy":
        return tokens
    rows = {"shared": 1, "block": block_count(tokens * ranks)}.get(loss.negatives, tokens)
    return 2 * tokens + loss.num_negatives * rows


def planned(config: RunConfig, num_items: int, ranks: int, gpu_bytes: int) -> tuple[str, tuple[str, ...]]:
    """Return (the sharding that torchrec's planner chooses, a line for each shard); ConfigError if nothing fits."""
    kinds = ["row_wise"] if config.loss.kind == "cross_entropy" else ["row_wise", "table_wise", "column_wise"]
    table = EmbeddingConfig(
        name="item", embedding_dim=config.model.embedding_dim, num_embeddings=num_items, feature_names=["item"]
    )
    topology = Topology(ranks, "cuda", hbm_cap=gpu_bytes // COPIES, local_world_size=min(ranks, GPUS_OF_A_MACHINE))
    planner = EmbeddingShardingPlanner(
        topology,
        batch_size=config.train.batch_size // ranks or 1,
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        constraints={
            "item": ParameterConstraints(
                sharding_types=kinds, compute_kernels=["fused"], pooling_factors=[config.model.max_seq_len]
            )
        },
        debug=False,
    )
    module = EmbeddingCollection(tables=[table], device=torch.device("meta"))
    try:
        sharding_plan = planner.plan(module, [EmbeddingCollectionSharder()])
    except PlannerError as error:
        raise ConfigError(f"parallel.embedding=auto: torchrec's planner: {str(error).splitlines()[0]}") from None
    ((_, parameters),) = sharding_plan.plan.items()
    sharding = parameters["item"]
    shards = sharding.sharding_spec.shards if sharding.sharding_spec is not None else []
    lines = tuple(
        f"  item table on {shard.placement}: rows {shard.shard_offsets[0]:,} .. "
        f"{shard.shard_offsets[0] + shard.shard_sizes[0] - 1:,}, {shard.shard_sizes[1]:,} columns"
        for shard in shards
    )
    return sharding.sharding_type, (f"  parallel.embedding=auto: {sharding.sharding_type}", *lines)
