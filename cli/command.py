"""Parse the command lines of train.py, eval.py, compare.py, tune.py and serve.py, and start smaller programs.

Nothing slow is imported here, so that `--help` and errors in arguments are printed before torch is imported.
"""

import argparse
import csv
import difflib
import errno
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cli.environment import check_environment, open_standard_files, wait_asleep
from cli.interrupt import leave
from data.errors import UserError
from hstu_sparse_checkout import commit

ROOT = Path(__file__).resolve().parent.parent


def true_or_false(text: str) -> bool:
    """Parse the value of a switch, for argparse."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text == "true"


def _values(text: str) -> tuple[str, list[str]]:
    """Parse FEATURE=VALUE,VALUE, for argparse."""
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected FEATURE=VALUE,VALUE, got {text!r}")
    return name, next(csv.reader([values]), [""])


def _floor(text: str) -> tuple[str, float]:
    """Parse METRIC=VALUE, for argparse."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected METRIC=VALUE, got {text!r}")
    return name, number


# Options of serving a run: name, type, text of --help. Their defaults are in serving.ServingOptions.
SERVING_OPTIONS = (
    ("sink_tokens", int, "quantised cache: first tokens of a window that are not quantised; by default 0"),
    ("clip", float, "quantised cache: fraction of a group's range to cover; by default .75 at 2 bits, else 1"),
    ("head_group", int, "quantised cache: heads to quantise together; by default 2, or 1 if their number is odd"),
    ("quant_group", int, "quantised cache: channels that share a scale; by default 64"),
    ("cache_bytes", int, "memory for keys and values of all users, in bytes; by default 1 GiB"),
    ("slide", int, "oldest events to drop at once when a window is full; by default a quarter of the window"),
    ("cuda_graphs", true_or_false, "on a GPU: run forward passes of few tokens as CUDA graphs; by default true"),
)


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors and a description that is printed without line wrapping."""

    def __init__(self, **options):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def _print_message(self, message: str, file=None):
        if message and file is sys.stdout:
            _print(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str):
        word = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        option, equals, _ = word.partition("=")
        if near := difflib.get_close_matches(option, self._option_string_actions, 1):
            message += f", did you mean {near[0]}?"
        elif equals:
            message += f", did you mean {word.lstrip('-')}?"
        self.exit(2, f"error: {message} (--help lists the options)\n")


class _Version(argparse.Action):
    def __call__(self, parser, *arguments):
        # The file is read: an import would take seconds, and installed metadata may be from an earlier checkout.
        text = (ROOT / "hstu_sparse" / "__init__.py").read_text(encoding="utf-8")
        version = text.partition('__version__ = "')[2].partition('"')[0]
        _print(f"hstu_sparse {version}, commit {commit()}\n")
        parser.exit()


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = Parser(description=description)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and the commit")
    return parser


def train_options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of train.py; exit with a one-line error if they are invalid."""
    parser = _parser(description)
    add = parser.add_argument
    add("config", nargs="?", help="the run's YAML file")
    add("overrides", nargs="*", metavar="key=value", help="dotted overrides, like train.lr=3e-4")
    add("--out", "--run", dest="run", type=Path, help="the run's folder; by default a new one under run_dir/name")
    add(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue this run; key=value changes its paths, device or length (docs/training.md); "
        "auto: with CONFIG and --out, continue from the newest complete checkpoint there, or begin a new run",
    )
    add("--init-from", type=Path, metavar="RUN", help="begin with the weights of this run; its items keep their rows")
    add(
        "--update",
        type=Path,
        metavar="RUN",
        help="train this run further on the new events of data.path=NEW, as a new run (docs/updating.md)",
    )
    add("--dry-run", action="store_true", help="prepare the data, train a few steps, print time and memory")
    add(
        "--keys", nargs="?", const="", metavar="PREFIX", help="print the keys of a configuration that begin with PREFIX"
    )
    add("--plan", action="store_true", help="prepare the data, predict each GPU's memory; needs no GPU")
    add(
        "--gpu-memory",
        type=_gibibytes,
        metavar="GIB",
        help="with --plan: a GPU's memory; by default this machine's, or 139",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.keys is not None:
        if options.config is not None or options.resume:
            parser.error("--keys prints the keys of all configurations: it takes neither a config nor --resume")
        return options
    options.auto = options.resume == Path("auto")
    if options.auto:
        if options.config is None or options.run is None or options.init_from or options.dry_run:
            parser.error("--resume auto needs CONFIG and --out RUN, and takes neither --init-from nor --dry-run")
        options.resume = None
    if options.update and (options.resume or options.auto or options.init_from or options.dry_run or options.plan):
        parser.error("--update makes a new run from RUN: leave out --resume, --init-from, --dry-run and --plan")
    run_option = "--resume" if options.resume else "--update" if options.update else None
    if run_option and options.config is not None:
        options.overrides.insert(0, options.config)
        options.config = None
        if "=" not in options.overrides[0]:
            parser.error(f"give either a config or {run_option} RUN, not both: got the config {options.overrides[0]}")
    if options.config is None and run_option is None:
        parser.error("give a config, like configs/synthetic-hstu.yaml, or --resume RUN")
    if options.resume and (options.run or options.init_from or options.dry_run or options.plan):
        parser.error("--out, --init-from, --dry-run and --plan are for a new run: --resume continues an existing one")
    if options.plan and (options.run or options.init_from or options.dry_run):
        parser.error("--plan trains nothing: leave out --out, --init-from and --dry-run")
    if options.gpu_memory is not None and not options.plan:
        parser.error("--gpu-memory requires --plan")
    if options.config is not None and not os.path.lexists(options.config) and (near := _config_like(options.config)):
        parser.error(f"{options.config}: No such file, did you mean {near}?")
    return options


def _config_like(name: str) -> str | None:
    """Return the path of the config with the name closest to `name`, such as `ml-100k-hstu`; None if none is close."""
    configs = {path.stem: path for path in (ROOT / "configs").glob("*.yaml")}
    near = difflib.get_close_matches(Path(name).stem, configs, 1)
    return os.path.relpath(configs[near[0]]) if near else None


def eval_options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of eval.py; exit with a one-line error if they are invalid."""
    parser = _parser(description)
    add = parser.add_argument
    add("run", type=Path, nargs="?", help="the folder of a run")
    add("overrides", nargs="*", metavar="key=value", help="dotted overrides, like device=cpu")
    add(
        "--split",
        choices=("train", "valid", "test", "new"),
        default="test",
        help="the split to evaluate; by default test; new: the events of --data NEW after the run's last event",
    )
    add("--data", metavar="NEW", help="other data of the same format; items unknown to the run are left out")
    add("--predict", type=Path, metavar="OUT", help="write the top-k items of each user of the split")
    add("--recommend", type=Path, metavar="OUT", help="write each user's next items, without evaluation")
    add("--users", type=Path, metavar="FILE", help="with --recommend: a file of user ids, one per line; by default all")
    add("--history", type=Path, metavar="FILE", help="with --recommend: events to use instead of the data's")
    add("--items", type=Path, metavar="FILE", help="with --recommend: a file of new items with their features")
    add(
        "--at",
        type=int,
        metavar="SECONDS",
        help="with --recommend: the Unix time of the request; by default the latest time in the data",
    )
    add("--top-k", type=int, default=10, metavar="K", help="the length of each user's list; by default 10")
    add(
        "--exclude-seen",
        type=true_or_false,
        metavar="BOOL",
        help="with --recommend: leave out items of the history; by default true unless the run's filter_seen is none",
    )
    add("--allow", type=Path, metavar="FILE", help="with --recommend: recommend only items of FILE, one id per line")
    add("--deny", type=Path, metavar="FILE", help="with --recommend: recommend no items of FILE, one id per line")
    add(
        "--where",
        type=_values,
        action="append",
        metavar="FEATURE=VALUE,VALUE",
        help="with --recommend: recommend items that have one of the values (a value with a comma in double quotes); "
        "several --where must all hold",
    )
    add(
        "--at-most",
        type=_values,
        action="append",
        metavar="FEATURE=N",
        help="with --recommend: at most N items with the same value in a list",
    )
    add(
        "--export-items",
        type=Path,
        metavar="OUT",
        help="write item vectors and ids into this folder, without evaluation",
    )
    add(
        "--export-model",
        type=Path,
        metavar="OUT.pt2",
        help="compile the model into a file that torch loads without this package; it maps a history to --top-k items",
    )
    add("--overwrite", action="store_true", help="replace an output that exists")
    add("--sampled", type=int, metavar="COUNT", help="also rank among COUNT random items")
    add("--seed", type=int, default=0, help="the seed that draws the items of --sampled; by default 0")
    add(
        "--serve",
        nargs="?",
        const="auto",
        metavar="CACHE",
        help="evaluate the run as serve.py runs it, event by event; CACHE as in serve.py --cache",
    )
    _add_serving(add)
    options = parser.parse_intermixed_args(arguments)
    if options.run is None:
        parser.error("give the folder of a run, like runs/NAME/20260101-120000")
    if options.top_k < 1 or (options.sampled is not None and options.sampled < 1):
        parser.error("--top-k and --sampled take a whole number of at least 1")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed: expected 0 to {2**63 - 1}, got {options.seed}")
    if options.at is not None and not 0 <= options.at < 2**62:
        parser.error(f"--at: expected seconds since 1970, got {options.at}")
    for name in ("users", "history", "items", "at", "exclude_seen", "allow", "deny", "where", "at_most"):
        if getattr(options, name) is not None and not options.recommend:
            parser.error(f"--{name.replace('_', '-')} requires --recommend")
    for name in ("where", "at_most"):
        pairs = getattr(options, name) or []
        setattr(options, name, dict(pairs))
        if len(getattr(options, name)) < len(pairs):
            parser.error(f"--{name.replace('_', '-')}: give each feature once")
    for feature, numbers in options.at_most.items():
        if len(numbers) != 1 or not numbers[0].isdecimal():
            parser.error(f"--at-most {feature}: expected a whole number, got {','.join(numbers)}")
        options.at_most[feature] = int(numbers[0])
    for name in ("predict", "sampled", "serve"):
        if getattr(options, name) is not None and (options.recommend or options.export_items or options.export_model):
            parser.error(
                f"--{name.replace('_', '-')} evaluates a split: leave out --recommend, --export-items, --export-model"
            )
    if options.split == "new" and (not options.data or options.recommend or options.export_items):
        parser.error("--split new needs --data NEW, and cannot be combined with --recommend and --export-items")
    for option, conflicting, reason in (
        ("recommend", "export_items", ""),
        ("recommend", "export_model", ""),
        ("export_items", "export_model", ""),
        ("users", "history", " (--users selects users of the data, --history replaces the data)"),
        ("history", "data", ""),
    ):
        if getattr(options, option) and getattr(options, conflicting):
            names = " and ".join(f"--{name.replace('_', '-')}" for name in (option, conflicting))
            parser.error(f"{names}: give only one of them{reason}")
    if options.serve is None and (serving := serving_options(options)):
        parser.error(f"--{next(iter(serving)).replace('_', '-')} requires --serve")
    return options


def serve_options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of serve.py; exit with a one-line error if they are invalid."""
    parser = _parser(description)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run, or a folder of runs, whose newest run is served")
    add(
        "--watch",
        action="store_true",
        help="switch to each newer run in the folder of runs once it is finished",
    )
    add("--watch-seconds", type=float, default=5.0, metavar="S", help="seconds between checks of --watch; by default 5")
    add("--floor", type=_floor, action="append", metavar="METRIC=VALUE",
        help="refuse a run whose result.json has a worse value than this")  # fmt: skip
    add("--missing-items", type=float, default=0.0, metavar="SHARE",
        help="the greatest fraction of the served items that may be unknown to the next run; by default 0")  # fmt: skip
    add("--host", default="127.0.0.1", help="the address to listen on; by default 127.0.0.1, for this machine only")
    add("--port", type=int, default=8000, help="the port to listen on; by default 8000; 0: any free port")
    add("--token-file", type=Path, metavar="FILE", help="require the bearer token in FILE (docs/serving.md)")
    add("--history", action="store_true", help="start with the events of the run's data")
    add("--users", type=Path, metavar="FILE", help="users' features, in the format of the run's data.features.users")
    add("--log", type=Path, metavar="FILE", help="the append-only log of accepted events; by default RUN/events.log")
    add("--store", metavar="URL", help="redis://HOST:PORT/DB, shared by several services, in place of the log")
    add("--fsync", choices=("always", "never"), default="always",
        help="always: accepted events survive a power cut; never: they survive a kill, not a power cut")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="by default the device in the run's configuration")
    add(
        "--cache",
        default="auto",
        help="the format of cached keys and values: fp32, bf16, fp16, 8bit, 4bit or 2bit; by default auto",
    )
    _add_serving(add)
    limits = (
        ("body", 2**20, "bytes of the body of a request"),
        ("filter-body", 2**26, "bytes of the body of a request with a named list or new items"),
        ("events", 10_000, "events of a request"),
        ("items", 1_000, "new items of a request"),
        ("candidates", 10_000, "candidates of a request"),
        ("request-users", 1_000, "users of a request"),
        ("list", 1_000, "items of a list of recommendations"),
        (
            "waiting",
            1_024,
            "requests in progress, at most half of the connections; further requests get status 503",
        ),
        ("connections", 4_096, "open connections; a further connection closes the one that is idle longest"),
        ("users", 10_000_000, "users with events"),
        ("history", 1_000_000, "events of a user"),
    )
    for name, default, text in limits:
        add(f"--max-{name}", type=int, default=default, metavar="N", help=f"{text}; by default {default:,}")
    add("--log-level", choices=("debug", "info", "warning"), default="info", help="debug: a line for each request")
    options = parser.parse_args(arguments)
    if options.store is not None and options.log is not None:
        parser.error("--store and --log: give only one of them")
    options.floor = dict(options.floor or [])
    if not options.watch_seconds > 0:
        parser.error(f"--watch-seconds: expected a number above 0, got {options.watch_seconds:g}")
    if not 0 <= options.missing_items <= 1:
        parser.error(f"--missing-items: expected a share from 0 to 1, got {options.missing_items:g}")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port: expected 0 to {2**16 - 1}, got {options.port}")
    for name, *_ in limits:
        if (value := getattr(options, f"max_{name.replace('-', '_')}")) < 1:
            parser.error(f"--max-{name}: expected at least 1, got {value}")
    return options


def _add_serving(add) -> None:
    for name, kind, text in SERVING_OPTIONS:
        add(f"--{name.replace('_', '-')}", type=kind, help=text)


def serving_options(options: argparse.Namespace) -> dict:
    """Return the options of SERVING_OPTIONS given on the command line, by name."""
    return {name: value for name, *_ in SERVING_OPTIONS if (value := getattr(options, name)) is not None}


def compare_options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of compare.py; exit with a one-line error if they are invalid."""
    parser = _parser(description)
    add = parser.add_argument
    add("plan", type=Path, nargs="?", help="the plan's YAML file")
    add("overrides", nargs="*", metavar="key=value", help="dotted overrides, for all settings of the plan")
    add("--out", type=Path, help="the folder of the runs and of the result")
    add("--seeds", type=_seeds, metavar="1,2,3", help="the seeds, instead of the plan's")
    add("--parallel", type=int, default=1, metavar="N", help="the number of runs at a time, on one machine")
    add("--quick", action="store_true", help="apply the overrides in the plan's section quick, for a short trial")
    add("--baseline", metavar="NAME", help="the setting to compare with, instead of the plan's")
    add("--no-speed", action="store_true", help="do not measure steps; the table shows earlier measurements")
    add(
        "--runs",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="finished runs, or folders of runs, to compare as well",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.out is None or (options.plan is None and not options.runs):
        parser.error("give a plan or --runs, and --out DIR")
    if options.parallel < 1:
        parser.error(f"--parallel: expected a whole number of at least 1, got {options.parallel}")
    runs: dict[str, list[Path]] = {}
    for assignment in options.runs:
        name, equals, folder = assignment.partition("=")
        if not (equals and folder and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name)):
            parser.error(f"--runs {assignment}: expected NAME=FOLDER, a NAME of letters, digits, _, - and later .")
        runs.setdefault(name, []).append(Path(folder))
    options.runs = runs
    return options


def tune_options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of tune.py; exit with a one-line error if they are invalid."""
    parser = _parser(description)
    add = parser.add_argument
    add("config", help="the run's YAML file")
    add("space", type=Path, help="the YAML file with the ranges of options")
    add("overrides", nargs="*", metavar="key=value", help="dotted overrides, for all trials")
    add("--out", type=Path, required=True, help="the folder of the trials and of the result")
    add("--trials", type=int, metavar="N", help="stop when the search has N trials, including earlier ones")
    add("--hours", type=float, metavar="H", help="start no trial after H hours")
    add("--parallel", type=int, default=1, metavar="N", help="the number of trials at a time, on one machine")
    options = parser.parse_intermixed_args(arguments)
    if options.trials is None and options.hours is None:
        parser.error("give --trials N, --hours H or both: without them the search has no end")
    for name in ("trials", "parallel"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name}: expected a whole number of at least 1, got {value}")
    if options.hours is not None and not 0 < options.hours < 1e6:
        parser.error(f"--hours: expected a number above 0 and below 1,000,000, got {options.hours}")
    return options


def _gibibytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"expected a number of GiB like 80, got {text}")
    return size


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if not all(0 <= seed < 2**63 for seed in seeds):
        raise argparse.ArgumentTypeError(f"expected whole numbers like 1,2,3, got {text}")
    return seeds


def parse_early(
    parse: Callable[[str | None], argparse.Namespace],
    description: str | None,
    check: Callable[[argparse.Namespace], str | None] | None = None,
) -> None:
    """Exit before the slow imports if the arguments are wrong, or if they only need a text to be printed.

    Until `Interrupts` is entered, Ctrl-C ends the process with one line. Until `run_program`, no garbage is collected.

    parse: train_options or another parser of this file. check: gets the parsed options; returns a text to print before
    exit, or None to go on; raises UserError for options that are wrong.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    open_standard_files()
    options = parse(description)
    wait_asleep()
    check_environment(Parser().exit)
    gc.disable()
    try:
        text = None if check is None else check(options)
    except UserError as error:
        Parser().exit(2, f"error: {error}\n")
    if text is not None:
        _print(text + "\n")
        sys.exit()


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run the `main` of a benchmark or an example, then exit; an error that a user can fix is one line and status 2."""
    try:
        sys.exit(main())
    except UserError as error:
        line = str(error)
    except ModuleNotFoundError as error:
        line = f"the package {error.name} is not installed in this Python"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = f"not a JSON file: {error}"
    except OSError as error:
        line = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except subprocess.CalledProcessError as error:  # the command has printed its error
        line = f"{Path(error.cmd[1]).name} ended with status {error.returncode}"
    except KeyboardInterrupt:
        sys.exit(130)
    sys.stderr.write(f"error: {line}\n")
    sys.exit(2)


def _print(text: str) -> None:
    """Print on standard output; exit with a one-line error if this fails, except when the reader closed the pipe."""
    try:
        if sys.stdout is None:  # closed before the program began
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if sys.stdout is not None:  # Python flushes it once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            Parser().exit(2, f"error: standard output cannot be written: {error.strerror}\n")
