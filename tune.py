"""Search for good options of a run with Optuna, on the validation split only.

    python tune.py configs/synthetic-hstu.yaml configs/tune/synthetic-hstu.yaml --trials 20 --out tuned
    python tune.py CONFIG SPACE.yaml --hours 2 --parallel 2 --out DIR [key=value ...]

The same command again continues where it was interrupted, even in the middle of a trial. DIR gets a folder for each
trial, best.yaml (the best configuration), report.md and trials.csv. experiments/space.py and docs/tuning.md describe
the file SPACE.yaml.
"""

import argparse

from cli.command import parse_early, tune_options


def check_early(options: argparse.Namespace) -> None:
    """Check the configuration before the imports that take seconds."""
    from training.config import load_config  # takes half of the time of all imports

    load_config(options.config, options.overrides)


if __name__ == "__main__":
    parse_early(tune_options, __doc__, check_early)

import os
import sys

import torch

from cli.interrupt import Interrupts
from cli.program import run_program
from data.errors import ConfigError
from training.config import RunConfig
from training.folder import claimed
from training.monitor import explain_faults

try:
    import optuna
except ImportError:
    optuna = None  # type: ignore[assignment]


def with_threads(config: RunConfig, parallel: int) -> RunConfig:
    """Return the configuration with `threads` set on a CPU, where the last bits of results depend on their number."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if config.threads or not on_cpu:
        return config
    return config.model_copy(update={"threads": max(1, (os.cpu_count() or 1) // parallel)})


def work(options, interrupts: Interrupts) -> None:
    """Open or continue the search, run trials, write the report."""
    if optuna is None:
        raise ConfigError("tune.py needs Optuna: pip install 'hstu_sparse[tune]', or make setup")
    from experiments.space import load_space, tuned_config
    from experiments.tuning import Limits, open_search, search
    from experiments.tuning_report import conclude

    space = load_space(options.space)
    config = with_threads(tuned_config(options.config, space, options.overrides), options.parallel)
    with claimed(options.out, new=False):
        tuning = open_search(options.out, options.config, config, space, options.overrides)
        search(tuning, interrupts, Limits(options.trials, options.hours, options.parallel))
        interrupts.stage = "reporting; all trials are finished"
        conclude(tuning, config)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = tune_options(__doc__, arguments)
    return run_program(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
