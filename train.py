"""Train a run from a YAML configuration, evaluate it and write a report.

    python train.py configs/synthetic-hstu.yaml [key=value ...]   a new run, under run_dir/name/
    python train.py --resume RUN [key=value ...]                  continue after an interruption, or with more epochs
    python train.py CONFIG --init-from RUN [key=value ...]        start with the weights of another run
    python train.py --update RUN [data.path=NEW]                  continue RUN on new events, as a new run
    python train.py CONFIG --dry-run                              measure time and memory of a run
    python train.py --keys [PREFIX]                               print the keys of a configuration
    python train.py CONFIG --plan                                 predict the memory of each GPU, without a GPU

On the CPU, a resumed run ends bit-identical to an uninterrupted one with the same number of threads.
"""

import argparse
import shutil

from cli.command import parse_early, train_options


def check_early(options: argparse.Namespace) -> str | None:
    """Return the text of --keys, or check the configuration and return None."""
    if options.keys is not None:
        from training.keys import as_text

        return as_text(options.keys, min(100, shutil.get_terminal_size().columns))
    if options.config is not None:
        from training.config import load_config  # half of the time of all imports

        load_config(options.config, options.overrides)
    return None


if __name__ == "__main__":
    parse_early(train_options, __doc__, check_early)

import sys

from cli.interrupt import Interrupts
from cli.program import run_program
from training.config import load_config
from training.folder import check_run
from training.loop import train
from training.monitor import explain_faults
from training.run import absolute_paths
from training.update import updated_config


def work(options, interrupts: Interrupts) -> None:
    """Train, resume, update, plan or measure a run."""
    if options.resume:
        check_run(options.resume)
        config = load_config(options.resume / "config.yaml", options.overrides)
        train(absolute_paths(config), options.resume, True, interrupts=interrupts)
        return
    if options.update:
        config = absolute_paths(updated_config(options.update, options.overrides))
        train(config, options.run, False, interrupts=interrupts, update=options.update)
        return
    config = absolute_paths(load_config(options.config, options.overrides))
    if options.auto:
        train(config, options.run, None, interrupts=interrupts)
    elif options.plan:
        from training.planning.dry_run import print_plan

        print_plan(config, options.gpu_memory, interrupts)
    elif options.dry_run:
        from training.planning.dry_run import dry_run

        dry_run(config, interrupts)
    else:
        train(config, options.run, False, options.init_from, interrupts)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = train_options(__doc__, arguments)
    return run_program(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
