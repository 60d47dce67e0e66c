"""Measure what attention kinds remember, by distance: evaluate the runs of configs/compare/long-memory.yaml again with
options that change what a trained layer may attend to.

    python compare.py configs/compare/long-memory.yaml --out memory --parallel 4 --no-speed
    python benchmarks/memory.py memory              appends to benchmarks/results/memory.jsonl
    python benchmarks/memory.py --table             accuracy by distance, in Markdown

The weights are unchanged: the result shows how an option changes a model that was trained without it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import RESULTS
from cli.command import Parser, run_main
from eval import open_run
from experiments.results import runs_in
from hstu_sparse_checkout import commit
from training.config import load_config
from training.folder import FolderError
from training.report import environment
from training.run import judge

# kind of the memory layer -> options for further evaluations
VARIANTS = {
    "bsa": [{"block_counts": 4}, {"block_counts": 64}, {"selection_group": 16}],
    "htree": [{"top_k": 16}, {"top_k": 256}, {"selection_group": 16}],
    "indexer": [{"top_k": 16}, {"top_k": 256}, {"selection_group": 16}],
}


def measure(folder: Path, out: Path) -> None:
    """Append a JSON line for each finished run in the folders of `folder`, and for each variant of its kind."""
    for setting in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            runs = runs_in(setting)
        except FolderError as error:  # a setting without a finished run is left out; the others are judged
            print(error, file=sys.stderr)
            continue
        for run in runs:
            layers = load_config(run / "config.yaml").model.attention
            for options in [{}, *VARIANTS.get(layers[-1].kind, [])]:
                overrides = [f"model.attention.{len(layers) - 1}.{name}={value}" for name, value in options.items()]
                config, data, model, facts = open_run(run, overrides)
                result = judge(model, data, "test")
                record = {
                    "setting": setting.name,
                    "seed": config.seed,
                    "attention": config.model.attention[-1].model_dump(mode="json"),
                    "changed": options,
                    "recall": config.data.recall and config.data.recall.model_dump(mode="json"),
                    "epoch": facts["epoch"],
                    **{name: result[name] for name in ("model", "guess", "by_distance", "recalls")},
                    "commit": commit(),
                    "environment": environment(data.device),
                }
                print(json.dumps(record), flush=True)
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


def table(records: list[dict]) -> list[str]:
    """Format as Markdown: a row for each record, accuracy in percent at each distance."""
    distances = list(records[0]["by_distance"])
    lines = ["| setting | " + " | ".join(distances) + " |", "| --- |" + " ---: |" * len(distances)]
    for record in records:
        changed = ", ".join(f"{name}={value}" for name, value in record["changed"].items())
        cells = [f"{100 * record['by_distance'][name]:.1f}" for name in distances]
        lines.append(
            f"| {record['setting']}{f' judged with {changed}' if changed else ''} | " + " | ".join(cells) + " |"
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="the --out of compare.py")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.jsonl", help="the JSON lines, which are added to")
    parser.add_argument("--table", action="store_true", help="print the table of --out, judge nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table([json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()])))
    elif options.folder is None:
        parser.error("give the folder of a comparison, or --table")
    else:
        measure(options.folder, options.out)


if __name__ == "__main__":
    run_main(main)
