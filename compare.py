"""Compare settings: train each with several seeds, and report how they differ over users and seeds.

    python compare.py configs/compare/attention-kinds.yaml --out compared [--quick] [--parallel N]
    python compare.py PLAN.yaml --out DIR --seeds 1,2,3            other seeds than the plan's
    python compare.py PLAN.yaml --out DIR data.path=ml-1m          an override for all settings
    python compare.py --runs a=runs/a/20260101-120000 b=runs/b/20260101-120000 --out DIR      existing runs

The same command again continues where it was interrupted, without repeating finished runs. DIR gets a folder for each
run, comparison.json, comparison.csv and report.html. experiments/plan.py and docs/comparing.md describe plans.
"""

from cli.command import compare_options, parse_early

if __name__ == "__main__":
    parse_early(compare_options, __doc__)

import sys

from cli.interrupt import Interrupts
from cli.program import run_program
from experiments.comparing import compare_plan
from experiments.plan import load_plan
from training.monitor import explain_faults


def work(options, interrupts: Interrupts) -> None:
    """Load the plan and run the comparison."""
    plan = load_plan(
        options.plan,
        seeds=options.seeds,
        runs=options.runs,
        baseline=options.baseline,
        quick=options.quick,
        overrides=options.overrides,
    )
    compare_plan(plan, options.out, interrupts, options.parallel, not options.no_speed)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = compare_options(__doc__, arguments)
    return run_program(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
