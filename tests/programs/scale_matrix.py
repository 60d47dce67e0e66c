"""Run all cases of which test_scale.py runs a sample, and kill ranks at random: 90 minutes on two cores.

    python -m tests.programs.scale_matrix OUT [--kills 20] [--only REGEX]

The cases: every model (hstu, sasrec, bsa, hstu with mol and with features) with every loss and sharding that it
supports, on 2 and 4 ranks against one; ranks killed at 20 random steps and checkpoints; a run of 4 ranks resumed on 2,
on 1 and with another sharding; 943 users evaluated on 4 ranks. Each prints a line: the largest relative difference of
the steps' losses (after a kill, of the steps since the restart) and of the final metrics.
"""

import argparse
import json
import random
import re
from pathlib import Path

from tests.programs.scale_cases import BSA, FEATURES, MOL, SASREC
from tests.programs.test_scale import facts_of, launch

MODELS = {"hstu": [], "sasrec": SASREC, "bsa": BSA, "mol": MOL, "features": [FEATURES]}
LOSSES = {
    "sampled": [],
    "shared": ["loss.negatives=shared"],
    "block": ["loss.negatives=block"],
    "in-batch": ["loss.kind=in_batch"],
    "mixed": ["loss.kind=mixed_negatives"],
    "bce": ["loss.kind=bce"],
    "whole": ["loss.kind=cross_entropy"],
}
TABLES = {
    "replicated": [],
    "row": ["parallel.embedding=row_wise"],
    "table": ["parallel.embedding=table_wise"],
    "column": ["parallel.embedding=column_wise"],
    "auto": ["parallel.embedding=auto"],
    "row-fused": ["parallel.embedding=row_wise", "parallel.fused=rowwise_adagrad"],
}
REFUSED = {("whole", table) for table in ("table", "column", "row-fused")} | {("mol", "bce"), ("mol", "mixed")}
LIMIT = 1e-4


def differences(shared: dict, alone: dict) -> tuple[float, float]:
    """Return the largest relative differences of losses (of a resumed run: of the last steps) and of metrics."""
    losses = zip(shared["losses"], alone["losses"][-len(shared["losses"]) :], strict=True)
    metrics = ((shared["metrics"][name], value) for name, value in alone["metrics"].items())
    one, other = (max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs) for pairs in (losses, metrics))
    return one, other


def report(name: str, shared: dict, alone: dict) -> bool:
    one, other = differences(shared, alone)
    right = max(one, other) <= LIMIT and shared["users"] == alone["users"]
    print(f"{'ok    ' if right else 'FAILED'} {name}: losses {one:.1e}, metrics {other:.1e}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", default=".")
    options = parser.parse_args()
    results = every_case(options)
    print(f"{sum(results)} of {len(results)} right")
    return 0 if all(results) else 1


def every_case(options: argparse.Namespace) -> list[bool]:
    results = []
    for table, table_options in TABLES.items():
        cases = {
            f"{model}-{loss}-{table}": [*model_options, *loss_options, *table_options]
            for model, model_options in MODELS.items()
            for loss, loss_options in LOSSES.items()
            if not {(loss, table), (model, loss)} & REFUSED and re.search(options.only, f"{model}-{loss}-{table}")
        }
        out = options.out / table
        out.mkdir(parents=True, exist_ok=True)
        (out / "cases.json").write_text(json.dumps(cases))
        if cases:
            launch([1, 2, 4], out, *cases, more=out / "cases.json")
        for name in cases:
            results += [report(f"{name} on {w}", facts_of(out, name, w), facts_of(out, name, 1)) for w in (2, 4)]
    draw, out = random.Random(0), options.out / "kills"
    if re.search(options.only, "kills"):
        out.mkdir(parents=True, exist_ok=True)
        launch([1], out, "bsa-column-mixed", "sasrec-row-whole")
        for number in range(options.kills):
            case = draw.choice(["bsa-column-mixed", "sasrec-row-whole"])
            kill = f"{case}:{draw.randrange(2)}:{draw.choice(['step', 'save', 'saved'])}:{draw.randint(2, 31)}"
            folder = out / f"{number}"
            launch([2], folder, f"{case}:resume:train.checkpoint_seconds=0", restarts=1, kill=kill)
            facts = facts_of(folder, case, 2)
            right = report(f"killed at {kill}, {facts['starts']} starts", facts, facts_of(out, case, 1))
            results.append(right and facts["starts"] == 2)
    if re.search(options.only, "resumed"):
        out = options.out / "resumed"
        launch([1], out / "one", "hstu")
        for world, epochs, kind in ((4, 2, "row_wise"), (2, 4, "row_wise"), (1, 6, "row_wise"), (4, 8, "column_wise")):
            launch([world], out, f"hstu:resume:train.epochs={epochs}:parallel.embedding={kind}")
        results.append(
            report("4 ranks, 2, 1, 4 with another sharding", facts_of(out, "hstu", 4), facts_of(out / "one", "hstu", 1))
        )
    if re.search(options.only, "users"):
        out = options.out / "users"
        out.mkdir(parents=True, exist_ok=True)
        data = "data.synthetic={num_users: 943, num_items: 200, mean_length: 20}"
        (out / "cases.json").write_text(json.dumps({"users": [data, "train.epochs=1", "train.batch_size=400"]}))
        launch([1, 4], out, "users", more=out / "cases.json")
        assert facts_of(out, "users", 4)["users"] == 943
        results.append(report("943 users on 4 ranks", facts_of(out, "users", 4), facts_of(out, "users", 1)))
    return results


if __name__ == "__main__":
    raise SystemExit(main())
