"""Compare settings: train each with several seeds, and report how they differ over users and seeds.

    python compare.py configs/compare/attention-kinds.yaml --out compared [--quick] [--parallel N]
    python compare.py PLAN.yaml --out DIR --seeds 1,2,3            other seeds than the plan's
    python compare.py PLAN.yaml --out DIR data.path=ml-1m          all settings changed
    python compare.py --runs a=runs/a/20260101-120000 b=runs/b/20260101-120000 --out DIR      existing runs

The same command again continues where it was stopped: finished runs are not repeated. DIR gets a folder for each run,
comparison.json, comparison.csv and report.html. experiments/plan.py and docs/comparing.md describe plans.
"""

from cli.command import answer_early, compare_options

if __name__ == "__main__":
    answer_early(compare_options, __doc__)

import sys

from cli.interrupt import Interrupts
from cli.program import guarded
from cli.terminal import terminal
from experiments.plan import load_plan
from experiments.report import as_html
from experiments.results import as_csv, collect, comparison_json, finished
from experiments.runs import run_all, speed_jobs, training_jobs, write_settings
from experiments.table import print_results
from training.folder import claimed, write_file
from training.monitor import explain_faults
from training.run import TrainingError


def work(options, interrupts: Interrupts) -> None:
    plan = load_plan(
        options.plan,
        seeds=options.seeds,
        runs=options.runs,
        baseline=options.baseline,
        quick=options.quick,
        overrides=options.overrides,
    )
    with claimed(options.out, new=False):
        write_settings(plan, options.out)
        failed = run_all(training_jobs(plan, options.out), interrupts, options.parallel)
        if not options.no_speed:
            configs = {name: folders[0] / "config.yaml" for name, folders in finished(plan, options.out).items()}
            failed += run_all(speed_jobs(configs, options.out), interrupts)  # one process at a time
        interrupts.stage = "comparing; all runs are finished"
        results = collect(plan, options.out, failed)
        write_file(options.out / "comparison.json", comparison_json(results))
        write_file(options.out / "comparison.csv", as_csv(results))
        write_file(options.out / "report.html", as_html(results))
        print_results(results)
        terminal.say(f"Written: {options.out}/comparison.json, comparison.csv, report.html")
    if failed:
        raise TrainingError(f"{len(failed)} of the runs failed: " + "; ".join(f"{name}: {why}" for name, why in failed))


def main(arguments: list[str] | None = None) -> int:
    options = compare_options(__doc__, arguments)
    return guarded(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
