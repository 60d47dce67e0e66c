"""Print lines of benchmarks/scale.py as Markdown: weak scaling, and memory compared with the prediction without a GPU.

    python benchmarks/scale_tables.py benchmarks/results/scale.jsonl

Weak scaling is the tokens a second of each of several GPUs divided by those of one GPU with the same code (`shared`:
the step that ranks share; `shared, captured`: the same in CUDA graphs). Memory is the peak of the first rank's tensors,
predicted as by `train.py --plan` for its largest batch; captured steps are left out, since they allocate nothing when
they are replayed. If several lines have the same step, the last one counts.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.scale import CASES, Case, random_batch
from cli.command import Parser, run_main
from models.hstu import SequenceModel
from training.config import RunConfig, load_config
from training.planning.plan import CUBLAS_BYTES, GPU_BYTES, MIB, plan_step
from training.planning.ranks import ImaginedRanks, ImaginedTable
from training.ranks.processes import Ranks
from training.report import markdown_table
from training.step import build_step

PLAIN = ("captured", "uncaptured")  # the steps of one process


def records(path: Path) -> dict[tuple[str, str, int], dict]:
    """Return the measured lines by (case, kind of step, ranks)."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(line["case"], line["how"], line["ranks"]): line for line in lines if "queued" in line}


def scaling_rows(measured: dict[tuple[str, str, int], dict]) -> Iterator[list[str]]:
    """Yield the cells of each case that ran on several GPUs."""
    for (case, how, ranks), several in measured.items():
        if ranks == 1:
            continue
        ones = [measured.get((case, kind, 1)) for kind in (*PLAIN, how)]
        times = ["" if one is None else f"{one['queued']:.2f}" for one in ones]
        efficiency = ""
        if (one := ones[-1]) is not None:
            share = several["tokens"] / several["queued"] / ranks / (one["tokens"] / one["queued"])
            efficiency = f"{100 * share:.1f}%"
        tokens, imbalance = f"{several['tokens'] / ranks:,.0f}", f"{several['imbalance']:.4f}"
        yield [
            case,
            how,
            f"{several['items']:,}",
            tokens,
            *times,
            f"{ranks}",
            f"{several['queued']:.2f}",
            efficiency,
            imbalance,
        ]


def memory_rows(measured: dict[tuple[str, str, int], dict]) -> Iterator[list[str]]:
    """Yield the cells of each line that has a peak."""
    for (case, how, ranks), record in measured.items():
        if "captured" not in how.split(", ") and record["peaks"][0] is not None:
            peak, expected = record["peaks"][0] / MIB, predicted(record) / MIB
            yield [case, how, f"{ranks}", f"{peak:,.0f}", f"{expected:,.0f}", f"{expected / peak:.3f}"]


def predicted(record: dict) -> int:
    """Return the bytes of the first rank's peak in the step of a record, as `train.py --plan` computes them.

    If the case was not the first of its process, the workspaces that cuBLAS had allocated before are not part of it.
    """
    case = CASES.get(record["case"]) or Case(record["case"], (), (), record["items"])
    world, items, device = record["ranks"], record["items"], torch.device("cpu")
    # A single rank keeps `auto`, so that it has the same step as several ranks.
    shared = "parallel.data=auto"
    words = [f"parallel.data={world}" if word == shared and world > 1 else word for word in record["overrides"]]
    config, longest = load_config(case.config, words), record.get("longest", case.longest)
    ranks = ImaginedRanks(world, world, config.parallel.distributed_step)
    batches = [random_batch(config, 2, ranks, n, longest, device) for n in range(record["steps"])]

    def make_model(config: RunConfig, ranks: Ranks | None) -> SequenceModel:
        table = None if ranks is None or not config.parallel.sharded else ImaginedTable(config, items, ranks, device)
        return SequenceModel(config.model, items, table=table)

    largest = (batches[0], *record["largest"])
    plan = plan_step(config, items, make_model, build_step, largest, GPU_BYTES)
    # The other batches wait on the device.
    sizes = [sum(x.numel() * x.element_size() for _, x, _ in batch._tensors()) for batch in batches]
    first = record["before"] < 2 * CUBLAS_BYTES
    return plan.training_peak + sum(sizes) - max(sizes) - (0 if first else 2 * CUBLAS_BYTES)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("file", type=Path, help="lines of benchmarks/scale.py")
    options = parser.parse_args()
    measured = records(options.file)
    ones = [f"one GPU, {how} (ms)" for how in (*PLAIN, "the same step")]
    headings = ["case", "step", "items", "tokens of a GPU", *ones, "GPUs", "step (ms)", "weak scaling", "imbalance"]
    print("\n".join(markdown_table(headings, list(scaling_rows(measured)))) + "\n")
    headings = ["case", "step", "GPUs", "measured (MiB)", "predicted (MiB)", "ratio"]
    print("\n".join(markdown_table(headings, list(memory_rows(measured)))))


if __name__ == "__main__":
    run_main(main)
