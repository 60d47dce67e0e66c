"""Train over the ranks of torchrun on GPUs with captured and with other steps, and compare the losses.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.training.ranks.captured_cases [WORD ...]

With words, only cases with one of them in their names run.
"""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from training.config import load_config
from training.graph import captures
from training.ranks.processes import Ranks
from training.run import build_model, open_data
from training.step import build_step, phase_at, set_lr, train_batches

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EPOCHS = 2
TWO_BY_TWO = "parallel.context=2"
CASES = {
    "negatives for each token": ["model.dropout=0"],
    "dropout": ["train.autocast=bf16"],
    "negatives of blocks": ["loss.negatives=block"],
    "shared negatives": ["loss.negatives=shared", "train.clip_norm=1"],
    "in batch": ["loss.kind=in_batch", "model.dropout=0"],
    "mixed negatives": ["loss={kind: mixed_negatives, in_batch_share: 0.5}", "train.ema_decay=0.9"],
    "whole catalogue": ["loss.kind=cross_entropy"],
    "phases": ["model.attention={kind: indexer, top_k: 8, num_index_heads: 2, index_dim: 16, warmup_steps: 20}"],
    "two by two": [TWO_BY_TWO, "model.dropout=0"],
}
ROWS = "parallel.embedding=row_wise"
SHARDED_CASES = {
    "rows": [ROWS, "model.dropout=0"],
    "rows, in batch": [ROWS, "loss.kind=in_batch", "train.clip_norm=1"],
    "columns, mixed": [
        "parallel.embedding=column_wise",
        "model.embedding_dim=64",
        "loss={kind: mixed_negatives, in_batch_share: 0.5}",
        "train.ema_decay=0.9",
    ],
    "rows, blocks": [ROWS, "loss.negatives=block", "train.autocast=bf16"],
    "rows, fused": [ROWS, "parallel.fused=adam", "loss.negatives=shared"],
}
RANKING = ["task.layout=targets", "model.dropout=0"]


def losses_of(name: str, overrides: list[str], graphs: bool) -> tuple[torch.Tensor, bool]:
    """Return (the losses of all steps of a few epochs of the configuration `name`, whether steps were captured)."""
    words = ["device=cuda", "parallel.data=auto", "train.batch_size=64", f"train.cuda_graphs={str(graphs).lower()}"]
    config = load_config(CONFIGS / f"{name}.yaml", [*words, *overrides])
    ranks = Ranks(config)
    data = open_data(config, ranks=ranks)
    config = data.config
    torch.manual_seed(config.seed)
    model = build_model(config, data.vocabulary, data.device, ranks).train()
    optimizer, step = build_step(config, model, data.device, ranks=ranks)
    batches, losses = train_batches(config, data, ranks), []
    for epoch in range(EPOCHS):
        for batch in batches.epoch(epoch):
            set_lr(config, optimizer, len(losses), 100)
            losses.append(step(replace(batch, phase=phase_at(config, len(losses))))["loss"].clone())
    assert captures(config, ranks.by_heads) == graphs
    graphed = any(isinstance(one, torch.cuda.CUDAGraph) for one in gc.get_objects())
    return torch.stack(losses).cpu(), graphed


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    ranking = {"ranking": RANKING, "ranking, rows": [*RANKING, ROWS]}
    cases = [(name, "synthetic-ranking", overrides) for name, overrides in ranking.items()]
    cases += [(name, "synthetic-hstu", overrides) for name, overrides in (CASES | SHARDED_CASES).items()]
    for name, config, overrides in cases:
        if TWO_BY_TWO in overrides and world < 4:
            continue
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        expected, graphed = losses_of(config, overrides, graphs=False)
        assert not graphed, name
        losses, graphed = losses_of(config, overrides, graphs=True)
        assert graphed, name
        gc.collect()
        torch.testing.assert_close(
            losses, expected, rtol=2e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
        print(f"rank {os.environ['RANK']}: {name}, {len(losses)} steps, to {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
