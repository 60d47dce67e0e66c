"""Trains cases of tests/programs/test_scale.py, one after the other, in as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node 2 -m tests.programs.scale_cases OUT NAME ...

Writes OUT/NAME-W/ (the run) and OUT/NAME-W.json (the loss of each step, the metrics of the end) for W processes.
"""

import json
import os
import sys
from pathlib import Path

import train
from models.command import train_options
from models.program import guarded

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "data.synthetic={num_users: 37, num_items: 61, mean_length: 20}",
    "model.max_seq_len=24",
    "model.embedding_dim=16",
    "model.dropout=0",
    "train.epochs=8",
    "train.lr=5e-3",
    "train.batch_size=12",  # four steps an epoch, the last of which has one user: some ranks have none
    "train.checkpoint_seconds=1000",
    "eval.patience=null",
    "eval.every=4",
    "eval.batch_size=10",
    "loss.num_negatives=16",
    "threads=1",
    "device=cpu",
    "parallel.data=auto",
]
SASREC = ["model.block=transformer", "model.feed_forward_dim=16", "model.attention={kind: softmax}"]
BSA = ["model.attention={kind: bsa, block_size: 4, block_counts: 2, window_size: 8}"]
MOL = [
    "model.head={kind: mol, query_components: 2, item_components: 2, component_dim: 8, gate_hidden_dim: 8, "
    "dropout: 0, item_dropout: 0}"
]
WHOLE = ["loss.kind=cross_entropy"]
CASES = {
    "hstu": [],
    "sasrec-mixed": [*SASREC, "loss.kind=mixed_negatives", "train.ema_decay=0.9"],
    "bsa-whole": [*BSA, *WHOLE, "train.clip_norm=0.5"],
    "hstu-table-mol": [*MOL, "parallel.embedding=table_wise", "loss.kind=in_batch"],
    "hstu-row-shared": ["parallel.embedding=row_wise", "loss.negatives=shared", "train.ema_decay=0.9"],
    "bsa-column-mixed": [*BSA, "parallel.embedding=column_wise", "loss.kind=mixed_negatives"],
    "sasrec-row-whole": [*SASREC, *WHOLE, "parallel.embedding=row_wise", "train.clip_norm=0.5"],
    "ranking": [
        "task={kind: ranking, actions: [{name: liked, at_least: 1}]}",
        "data.protocol=last_tenth",
        "data.synthetic={num_users: 37, num_items: 24, num_clusters: 4, mean_length: 20, actions: true}",
        "loss={}",
        "parallel.embedding=row_wise",
    ],
}


def run(case: str, out: Path) -> None:
    world, losses = int(os.environ.get("WORLD_SIZE", 1)), []
    folder = out / f"{case}-{world}"
    build = train.build_step

    def recorded(*given, **options):
        optimizer, step = build(*given, **options)

        def noted(batch):
            found = step(batch)
            losses.append(float(found["loss"]))
            return found

        return optimizer, noted

    train.build_step = recorded
    arguments = [str(ROOT / "configs/synthetic-hstu.yaml"), *SETTINGS, *CASES[case], "--run", str(folder)]
    options = train_options(None, arguments)
    try:
        code = guarded(lambda interrupts: train.work(options, interrupts), quiet=True)
    finally:
        train.build_step = build
    if code:
        sys.exit(code)
    if int(os.environ.get("RANK", 0)) == 0:
        result = json.loads((folder / "result.json").read_text())
        metrics = result["model"].get("history", result["model"])
        told = {"losses": losses, "metrics": metrics, "users": result["users"]}
        (out / f"{case}-{world}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run(name, Path(sys.argv[1]))
