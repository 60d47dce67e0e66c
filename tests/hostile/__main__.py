"""Run the hostile cases from the command line; see the package's docstring."""

# ruff: noqa: E402
import os

# Before all imports: a process with threads cannot be forked safely, and a log needs no colours.
os.environ.update(OMP_NUM_THREADS="1", POLARS_MAX_THREADS="1", TERM="dumb", COLUMNS="200", no_proxy="127.0.0.1")
os.environ.pop("TRITON_INTERPRET", None)  # kernels have no device here, as on a user's CPU

import gc

gc.disable()  # during the imports, whose objects `main` excludes from collection afterwards

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

# Imported once here, not in each child:
import matplotlib.pyplot  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import torchrec  # noqa: F401

from tests.hostile import caches, configs, downloads, features, kills, operators, own_data, raw, runs, side
from tests.hostile.accepted import ACCEPTED
from tests.hostile.harness import VERDICTS, run_all

AREAS = {
    "config": configs.cases,
    "raw": raw.cases,
    "own": own_data.cases,
    "cache": caches.cases,
    "run": runs.cases,
    "feature": features.cases,
    "side": side.cases,
    "operator": operators.cases,
    "download": downloads.cases,
    "kill": kills.cases,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--short", action="store_true", help="the cases of `make test-slow`")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="every N-th case of an area, from its first")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quiet", action="store_true", help="print what failed, and the counts")
    options = parser.parse_args()
    if unknown := set(options.areas) - AREAS.keys():
        parser.error(f"unknown area {', '.join(sorted(unknown))}; known: {', '.join(AREAS)}")
    gc.freeze()  # so that the children copy less memory
    gc.enable()
    started, counts, failed = time.monotonic(), collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        base = Path(name)
        base.chmod(0o755)
        os.chdir(base)
        for area in options.areas or AREAS:
            place = base / area
            place.mkdir()
            cases = AREAS[area](place)
            names = [case.name for case in cases]
            for name in ACCEPTED:
                if name.startswith(area) and name not in names:
                    failed.append(f"accepted.py names a case that there is not: {name}")
            if len(set(names)) < len(names):
                failed.append(f"{area}: two cases of one name: {max(names, key=names.count)}")
            chosen = [case for case in cases if options.only in case.name and (case.short or not options.short)]
            chosen = chosen[:: options.sample]
            (place / "cases").mkdir()
            for case, verdict, line in run_all(chosen, place / "cases", options.jobs):
                counts[area, verdict] += 1
                text = f"{verdict:9} {case.name}: {line}"[:300]
                if verdict != "passed":
                    failed.append(text)
                if verdict != "passed" or not options.quiet:
                    print(text, flush=True)
    print("\nAccepted on purpose:", *(f"  {name}: {reason}" for name, reason in ACCEPTED.items()), sep="\n")
    print("\n          " + "".join(f"{verdict:>10}" for verdict in VERDICTS))
    for area in dict.fromkeys(area for area, _ in counts):
        print(f"{area:10}" + "".join(f"{counts[area, verdict]:10}" for verdict in VERDICTS))
    print(f"{sum(counts.values())} cases, {len(failed)} failed, {time.monotonic() - started:.0f} s")
    for text in failed:
        print(text)
    return bool(failed)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.exit(main())
