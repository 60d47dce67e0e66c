"""How the item table lies on the ranks, and the buffers of what they send each other.

Letters: I items, E embedding size, T tokens of a rank, K ranks that share a batch, R rows that a rank asks for.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from models.config import ConfigError, RunConfig

# The planner warns of what it is not told here, in every process.
logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)

GPUS_OF_A_MACHINE = 8
RESERVED = 0.15  # share of a GPU that the planner leaves to everything but tables
COPIES = 4  # a weight, its gradient and AdamW's two moments


@dataclass(frozen=True)
class Sharded:
    """kind: how the table lies. rows: [rows, E] is as much of it as the fullest rank has. buffers: bytes by name.
    lines: what to say of the plan."""

    kind: str
    rows: int
    buffers: dict[str, int]
    lines: tuple[str, ...] = ()


def data_ranks(config: RunConfig) -> int:
    """K; `auto` is what torchrun started, or 1."""
    if config.parallel.data == "auto":
        return max(1, int(os.environ.get("WORLD_SIZE", 1)) // config.parallel.context)
    return config.parallel.data


def shard(config: RunConfig, num_items: int, ranks: int, tokens: int, gpu_bytes: int) -> Sharded:
    """How the item table lies; tokens: T."""
    kind: str = config.parallel.embedding
    lines: tuple[str, ...] = ()
    if ranks == 1:
        return Sharded("replicated", num_items, {})
    if kind == "auto":
        kind, lines = planned(config, num_items, ranks, gpu_bytes)
    rows = num_items if kind in ("replicated", "table_wise") else -(-num_items // ranks)
    if kind == "replicated":
        return Sharded(kind, rows, {}, lines)
    size = config.model.embedding_dim * getattr(torch, config.model.table_dtype).itemsize
    asked, outputs = rows_asked(config, tokens), 0
    if config.loss.kind == "cross_entropy":
        # All ranks' outputs, fp32, and the gradients of them.
        outputs = 2 * tokens * ranks * config.model.embedding_dim * 4
    # Rows as they come and as they go, and one gradient of each; ids both ways.
    buffers = {"rows looked up, on their way": 3 * asked * size + 2 * 8 * asked, "outputs of all ranks": outputs}
    return Sharded(kind, rows, {name: value for name, value in buffers.items() if value}, lines)


def rows_asked(config: RunConfig, tokens: int) -> int:
    """R of a step with T tokens: inputs and, for a sampled loss, targets and negatives."""
    loss = config.loss
    if config.task.kind != "retrieval" or loss.kind == "cross_entropy":
        return tokens
    negatives = loss.num_negatives * (1 if loss.negatives == "shared" else tokens)
    return 2 * tokens + negatives


def planned(config: RunConfig, num_items: int, ranks: int, gpu_bytes: int) -> tuple[str, tuple[str, ...]]:
    """(what torchrec's planner chooses for the item table, a line for each shard); ConfigError where nothing fits."""
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
        found = planner.plan(module, [EmbeddingCollectionSharder()])
    except PlannerError as error:
        raise ConfigError(f"parallel.embedding=auto: torchrec's planner: {str(error).splitlines()[0]}") from None
    ((_, parameters),) = found.plan.items()
    sharding = parameters["item"]
    shards = sharding.sharding_spec.shards if sharding.sharding_spec is not None else []
    lines = tuple(
        f"  item table on {shard.placement}: rows {shard.shard_offsets[0]:,} .. "
        f"{shard.shard_offsets[0] + shard.shard_sizes[0] - 1:,}, {shard.shard_sizes[1]:,} columns"
        for shard in shards
    )
    return sharding.sharding_type, (f"  parallel.embedding=auto: {sharding.sharding_type}", *lines)
