"""Train cases of tests/programs/test_scale.py, one after the other, in the processes that torchrun starts.

    torchrun --standalone --nproc-per-node 2 -m tests.programs.scale_cases OUT NAME ...

For W processes, a case writes OUT/NAME-W/ (the run) and OUT/NAME-W.json (the loss of each step, the final metrics).
`NAME:KEY=VALUE:...` adds overrides. `NAME:resume:...` resumes the run OUT/NAME, or begins it.
`judge:NAME` and `export:NAME` run eval.py on OUT/NAME-1, which writes OUT/lists.csv and OUT/items-NAME-W/.

SCALE_KILL="NAME:RANK:WHERE:NUMBER ..." kills a rank of each of these cases once with SIGKILL, and then writes
OUT/NAME.killed. WHERE is `step` (before the NUMBER-th step), `save` (before the rank writes the NUMBER-th checkpoint)
or `saved` (after the rank has written its part, before the checkpoint is moved into place). Finished cases are not
repeated after a restart. SCALE_CASES=FILE is a JSON file with more cases.
"""

import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "data.synthetic={num_users: 37, num_items: 61, mean_length: 20}",
    "model.max_seq_len=24",
    "model.num_layers=1",
    "model.embedding_dim=16",
    "model.dropout=0",
    "train.epochs=8",
    "train.lr=5e-3",
    "train.batch_size=12",  # four steps an epoch; the last step has one user, so that some ranks have none
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
FEATURES = (
    "data.features={items: {format: csv, path: OUT/items.csv, unknown: add, "
    "columns: {group: category, tags: {kind: list, separator: '|'}}}}"
)
CASES = {
    "hstu": ["model.num_layers=2"],
    "sasrec-mixed": [*SASREC, "loss.kind=mixed_negatives", "train.ema_decay=0.9"],
    "bsa-row-mol": [*BSA, *MOL, *WHOLE, "parallel.embedding=row_wise", "train.clip_norm=0.5"],
    "hstu-table-mol": [*MOL, "parallel.embedding=table_wise", "loss.kind=in_batch"],
    "hstu-row-fused": [
        *("model.num_layers=2", "parallel.embedding=row_wise", "parallel.fused=rowwise_adagrad"),
        *("loss.negatives=shared", "--init-from", "OUT/hstu-1"),
    ],
    "bsa-column-mixed": [
        *(*BSA, "parallel.embedding=column_wise", "loss.kind=mixed_negatives", "loss.negatives=block"),
        "train.ema_decay=0.9",
    ],
    "sasrec-row-whole": [*SASREC, *WHOLE, FEATURES, "parallel.embedding=row_wise", "train.clip_norm=0.5"],
    "ranking": [
        "task={kind: ranking, actions: [{name: liked, at_least: 1}]}",
        "data.protocol=last_tenth",
        "data.synthetic={num_users: 37, num_items: 24, num_clusters: 4, mean_length: 20, actions: true}",
        "loss={}",
        "train.epochs=5",  # of six steps
        "eval.every=5",
        "parallel.embedding=row_wise",
    ],
}


def killer(name: str, out: Path):
    """Return a function that kills this process as SCALE_KILL demands; it is called with `step`, `save` or `saved`."""
    kills = {kill.split(":")[0]: kill.split(":")[1:] for kill in os.environ.get("SCALE_KILL", "").split()}
    rank, where, number = kills.get(name, ("-1", "never", "0"))
    reached, killed = [], out / f"{name}.killed"
    armed = os.environ.get("RANK") == rank and not killed.exists()

    def call(place: str) -> None:
        reached.append(place)
        if armed and place == where and reached.count(place) == int(number):
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def run(case: str, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter

    import train
    from cli.command import train_options
    from cli.program import run_program
    from training import setup

    world, losses = int(os.environ.get("WORLD_SIZE", 1)), []
    name, *overrides = case.split(":")
    if name in ("judge", "export"):
        import eval
        from training.ranks import tables

        tables.BLOCK = 320  # numbers: 20 of the 61 items
        outputs = {"judge": ["--predict", str(out / "lists.csv")]}
        outputs["export"] = ["--export-items", str(out / f"items-{overrides[0]}-{world}")]
        if code := eval.main([str(out / f"{overrides[0]}-1"), *outputs[name], "--quiet"]):
            sys.exit(code)
        return
    resumed, reached = "resume" in overrides, killer(name, out)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (out / f"{name}-{world}.json").exists():
        return
    folder = out / (name if resumed else f"{name}-{world}")
    build, write, reduce = setup.build_step, FileSystemWriter.write_data, dist.all_reduce
    agreements = []  # all-reduces of integers by maximum: decisions of the ranks after a step

    def recorded(*inputs, **options):
        optimizer, step = build(*inputs, **options)

        def noted(batch):
            reached("step")
            result_of_step = step(batch)
            losses.append(float(result_of_step["loss"]))
            return result_of_step

        return optimizer, noted

    def written(*inputs, **options):
        reached("save")
        done = write(*inputs, **options)
        reached("saved")
        return done

    def reduced(tensor, op=dist.ReduceOp.SUM, *inputs, **options):
        if tensor.dtype == torch.int64 and op == dist.ReduceOp.MAX:
            agreements.append(tensor)
        return reduce(tensor, op, *inputs, **options)

    setup.build_step, FileSystemWriter.write_data, dist.all_reduce = recorded, written, reduced
    arguments = [str(ROOT / "configs/synthetic-hstu.yaml"), *SETTINGS]
    arguments += [part.replace("OUT/", f"{out}/") for part in CASES[name]]
    arguments += [*(part for part in overrides if part != "resume"), "--run", str(folder)]
    options = train_options(None, [*arguments, *(["--resume", "auto"] if resumed else [])])
    try:
        code = run_program(lambda interrupts: train.work(options, interrupts), quiet=True)
    finally:
        setup.build_step, FileSystemWriter.write_data, dist.all_reduce = build, write, reduce
    if code:
        sys.exit(code)
    if int(os.environ.get("RANK", 0)) == 0:
        result = json.loads((folder / "result.json").read_text())
        metrics = result["model"].get("history", result["model"])
        facts = {"losses": losses, "metrics": metrics, "users": result["users"], "agreements": len(agreements)}
        facts["starts"] = 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        (out / f"{name}-{world}.json").write_text(json.dumps(facts))


def main(out: str, *cases: str) -> None:
    if more := os.environ.get("SCALE_CASES"):
        CASES.update(json.loads(Path(more).read_text()))
    for case in cases:
        run(case, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
