"""Trains several settings over several seeds and compares them user by user.

    python benchmarks/quality.py PLAN.yaml --out quality/ [--seeds 1,2,3,4,5] [--parallel 12]
    python benchmarks/quality.py --report quality/ --baseline dense

PLAN.yaml maps a name to what `train.py` is given: `dense: [configs/ml-1m-hstu.yaml, model.dropout=0.1]`. Every run goes
through `train.py` into OUT/runs; the rank of every user's target in the split, over the full catalogue with the
config's own filter, goes to OUT/ranks/NAME-SEED.npy, and a line about the run to OUT/runs.jsonl. Runs that are there
are kept.

The report: means over seeds, and for each setting the ratio of its mean NDCG@10 to the baseline's with a bootstrap
interval: 2,000 draws, each of users (the same for all runs) and of seeds (of each setting by itself, unless both are
the same runs, ranked in two ways), 2.5% to 97.5%.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
DRAWS = 2000


def start(out: Path) -> None:
    """What a worker does first: its output goes to a file of its own."""
    log = os.open(out / f"worker-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(ROOT))


def train_and_rank(name: str, seed: int, arguments: list[str], out: Path, split: str) -> None:
    import torch

    import eval as evaluation
    import train
    from models.retrieval import model_scorer, rank_targets

    folder, started = out / "runs" / f"{name}-{seed}", time.monotonic()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    status = train.main([*arguments, f"seed={seed}", "--run", str(folder)])
    if status:
        raise RuntimeError(f"train.py ended with {status}")
    seconds = time.monotonic() - started
    config, data, model, _ = evaluation.open_run(folder, [])
    score = model_scorer(model, config.train.autocast == "bf16")
    (ranks,) = rank_targets(score, data.eval_batches(split).epoch(0), filters=[config.eval.filter_seen])
    np.save(out / "ranks" / f"{name}-{seed}.npy", ranks)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    line = {"name": name, "seed": seed, "arguments": arguments, "seconds": round(seconds, 1)}
    line |= {"training_seconds": result["seconds"], "peak_memory_bytes": result.get("peak_memory_bytes")}
    line |= result["model"][config.eval.filter_seen] | {"environment": result["environment"]}
    with (out / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def gains(out: Path) -> dict[str, np.ndarray]:
    """NDCG@10 of every user, name -> [seeds, users]."""
    found: dict[str, list] = {}
    for path in sorted((out / "ranks").glob("*.npy")):
        ranks = np.load(path, allow_pickle=False)
        found.setdefault(path.stem.rpartition("-")[0], []).append(np.where(ranks <= 10, 1 / np.log2(ranks + 1.0), 0.0))
    return {name: np.stack(rows) for name, rows in found.items()}


def ratio_interval(ours: np.ndarray, theirs: np.ndarray, same_runs: bool = False) -> tuple[float, float, float]:
    """(ratio of means, 2.5% and 97.5% of the bootstrap) of two [seeds, users] over the same users.

    same_runs: row i of both is the same trained model, ranked in two ways; then the same rows are drawn of both.
    """
    if ours.shape[1] != theirs.shape[1] or (same_runs and len(ours) != len(theirs)):
        raise SystemExit(f"the runs are {ours.shape} and {theirs.shape} (seeds, users): not the same test")
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(DRAWS):
        users = rng.integers(ours.shape[1], size=ours.shape[1])
        own, other = (rng.integers(len(x), size=len(x)) for x in (ours, theirs))
        ratios.append(ours[own].mean(0)[users].mean() / theirs[own if same_runs else other].mean(0)[users].mean())
    return ours.mean() / theirs.mean(), *np.quantile(ratios, [0.025, 0.975])


def report(out: Path, baseline: str) -> str:
    found = gains(out)
    if baseline not in found:
        raise SystemExit(f"--baseline {baseline}: none of {', '.join(found)}")
    lines = [f"| setting | NDCG@10 | by seed | over {baseline} | 95% interval |", "| --- | --- | --- | --- | --- |"]
    for name, rows in found.items():
        # benchmarks/kv_cache.py names what it ranks again NAME+...
        same_runs = name.startswith(f"{baseline}+") and len(rows) == len(found[baseline])
        ratio, low, high = ratio_interval(rows, found[baseline], same_runs)
        seeds = " ".join(f"{x:.4f}" for x in rows.mean(1))
        lines.append(f"| {name} | {rows.mean():.4f} | {seeds} | {ratio:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("--out", type=lambda x: Path(x).resolve())
    parser.add_argument("--seeds", type=lambda x: [int(n) for n in x.split(",")], default=[1, 2, 3, 4, 5])
    parser.add_argument("--split", choices=("valid", "test"), default="test", help="whose targets are ranked")
    parser.add_argument("--only", type=lambda x: x.split(","), help="names of the plan to run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--report", type=Path, metavar="OUT")
    parser.add_argument("--baseline", default="dense")
    options = parser.parse_args()
    if options.report:
        print(report(options.report, options.baseline))
        return
    if not options.plan or not options.out:
        parser.error("PLAN.yaml and --out are needed, or --report")
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    jobs = [
        (name, seed, [str(x) for x in arguments])
        for seed in options.seeds
        for name, arguments in plan.items()
        if (not options.only or name in options.only) and not (options.out / "ranks" / f"{name}-{seed}.npy").exists()
    ]
    (options.out / "ranks").mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = False
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.parallel, mp_context=spawn, initializer=start, initargs=(options.out,)) as pool:
        runs = {pool.submit(train_and_rank, *job, options.out, options.split): job for job in jobs}
        for run in as_completed(runs):
            if error := run.exception():
                failed = True
                name, seed, _ = runs[run]
                print(f"{name}, seed {seed}: {error} ({options.out}/worker-*.log)", file=sys.stderr)
    if options.baseline in gains(options.out):
        print(report(options.out, options.baseline))
    sys.exit(failed)


if __name__ == "__main__":
    main()
