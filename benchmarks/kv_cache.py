"""Measure the quality cost of a packed cache: evaluate runs of compare.py again, by a service with packed keys.

    python compare.py PLAN.yaml --out quality/                   trains the runs (dense, rotatekv, ...)
    python benchmarks/kv_cache.py quality/ --names dense,rotatekv --bits 2,4 --sinks 0,4

For every run OUT/NAME/seed-SEED the ranks of its users' targets go to OUT/ranks/NAME+2bit+4sinks-SEED.npy, and a line
with the cache's size to OUT/kv_cache.jsonl. The table's ratios and intervals are over users and runs, each run compared
with itself. With --plot the mean NDCG@10 is drawn over the bytes of a user.
"""

import io
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import save
from cli.command import Parser, run_main
from data.atomic import replace_file
from evaluation.ranking_metrics import user_metrics
from experiments.runs import is_finished
from training.config import load_config
from training.folder import read_judged
from training.statistics import compare


def finished_runs(folder: Path) -> list[Path]:
    """Return the folders of a setting's finished runs."""
    return sorted(run for run in folder.glob("seed-*") if is_finished(run))


def rank(folder: Path, out: Path, options: dict) -> None:
    from eval import open_run
    from evaluation.ranking_metrics import ranking_metrics
    from evaluation.scores import rank_targets
    from models.tasks.scoring import model_scorer
    from serving import Recommender, ServingOptions
    from serving.judge import ServedModel

    name, seed = folder.parent.name, folder.name.removeprefix("seed-")
    sinks = options["sink_tokens"]
    groups, clip = options.get("quant_group", 64), options.get("clip", 1.0)
    name += (
        f"+{options['bits']}bit" + (f"+{sinks}sinks" if sinks else "") + (f"+{groups}groups" if groups != 64 else "")
    ) + (f"+{clip}clip" if clip != 1 else "")
    target = out / "ranks" / f"{name}-{seed}.npy"
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    config, data, model, _ = open_run(folder, [])
    other_options = {key: value for key, value in options.items() if key != "bits"}
    serving = ServingOptions(cache=f"{options['bits']}bit", slide=1, **other_options)
    if all(layer.attention.config.kind == "rotatekv" for layer in model.layers):
        serving = ServingOptions(slide=1)  # a rotatekv run is judged with the codes that it was trained for
    served = Recommender(model, config, data.vocabulary, has_timestamps=data.dataset.has_timestamps, options=serving)
    score = model_scorer(ServedModel(served, data.dataset), config.train.autocast == "bf16")
    (ranks,) = rank_targets(score, data.eval_batches("test").epoch(0), filters=[config.eval.filter_seen])
    line = {"name": name, "seed": int(seed), **options, **served.description, **ranking_metrics(ranks)}
    with (out / "kv_cache.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    # Written last: its existence marks the setting as done.
    content = io.BytesIO()
    np.save(content, ranks)
    replace_file(target, content.getvalue())
    print(json.dumps(line), flush=True)


class Row(NamedTuple):
    """Result of a setting: bytes of a user's cache, mean NDCG@10 over seeds, ratio to the full cache, its interval."""

    name: str
    size: float
    value: float
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0


def gains(out: Path, name: str) -> dict[str, np.ndarray]:
    """Return seed -> NDCG@10 of every user; name: a setting, or with `+` a setting with the packed cache it names."""
    if "+" in name:
        paths = sorted((out / "ranks").glob(f"{name}-*.npy"))
        ranks = {path.stem.removeprefix(f"{name}-"): np.load(path, allow_pickle=False) for path in paths}
    else:
        folders = finished_runs(out / name)
        how = {folder: load_config(folder / "config.yaml").eval.filter_seen for folder in folders}
        ranks = {folder.name.removeprefix("seed-"): read_judged(folder)[how[folder]] for folder in folders}
    return {seed: user_metrics(x, ["NDCG@10"])["NDCG@10"] for seed, x in ranks.items() if seed.isdigit()}


def table(out: Path) -> list[Row]:
    """Return all settings, the full caches in bf16 first. A setting is compared with the full runs of its own seeds."""
    lines = [json.loads(line) for line in (out / "kv_cache.jsonl").read_text(encoding="utf-8").splitlines()]
    full_caches, packed = {}, []
    for name, line_of in {line["name"]: line for line in lines}.items():
        base = name.partition("+")[0]
        full, served = gains(out, base), gains(out, name)
        seeds = sorted(full.keys() & served.keys())
        if full:
            full_caches[base] = Row(base, line_of["bytes_per_user_bf16"], float(np.mean(list(full.values()))))
        pair = [np.stack([x[seed] for seed in seeds]) for x in (served, full)] if seeds else ()
        interval = compare(*pair, same_runs=True)[:3] if seeds else ()
        packed.append(Row(name, line_of["bytes_per_user"], float(np.mean(list(served.values()))), *interval))
    return [*full_caches.values(), *packed]


def plot(rows: list[Row], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for i, row in enumerate(rows):
        place = row.size / 1024, row.value
        axis.scatter(*place)
        axis.annotate(row.name, place, textcoords="offset points", xytext=(4, -10 if i % 2 else 4), fontsize=8)
    axis.set(xscale="log", xlabel="cache of a user, KiB", ylabel="NDCG@10, mean over seeds")
    axis.margins(x=0.15)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    save(figure, target)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = Parser(description=__doc__)
    parser.add_argument("out", type=Path, help="the --out of compare.py")
    parser.add_argument("--names", default="dense", help="the settings to judge, separated by commas")
    parser.add_argument("--bits", type=numbers, default=[2, 4, 8])
    parser.add_argument("--sinks", type=numbers, default=[0, 4])
    parser.add_argument(
        "--groups", type=numbers, default=[64], help="the number of channels that share a scale (quant_group)"
    )
    parser.add_argument("--clip", type=float, default=1.0, help="the share of a group's range that codes cover")
    parser.add_argument("--plot", type=Path, help="draw the existing results into this PNG; rank nothing")
    arguments = parser.parse_args()
    if not arguments.out.is_dir():
        parser.error(f"{arguments.out}: no such folder")
    if not arguments.plot:
        for name in arguments.names.split(","):
            if not (folders := finished_runs(arguments.out / name)):
                parser.error(f"--names: {arguments.out / name} has no finished run")
            for folder in folders:
                for bits in arguments.bits:
                    for sinks in arguments.sinks:
                        for group in arguments.groups:
                            options = {"bits": bits, "sink_tokens": sinks, "quant_group": group, "clip": arguments.clip}
                            rank(folder, arguments.out, options)
    rows = table(arguments.out)
    print("| setting | bytes of a user | NDCG@10 | over the full cache | 95% interval |")
    print("| --- | ---: | ---: | ---: | --- |")
    for row in rows:
        interval = f"{row.ratio:.3f} | {row.low:.3f} to {row.high:.3f}"
        print(f"| {row.name} | {row.size:,.0f} | {row.value:.4f} | {interval} |")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    run_main(main)
