"""Compile all kernels ahead of time, with the launchers' constants.

    python -m tests.operators.compiling OPERATOR,... ARCH,... [lowered]

Triton's interpreter compiles nothing and cannot be switched off in a process, so the tests start one with it off; the
program prints a JSON line for each kernel.
"""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.random.cases import Launches, operator

ROOT = Path(__file__).parents[2]
# Inline assembly that touches memory may be used only on architectures on which it was tested.
PROVEN = (80, 90)
MEMORY = re.compile(r"\b(ld|st|red|atom|cp)\.")


def launches_of(name: str) -> list[Launches]:
    return operator(name).launches()


def compiled(names: Iterable[str], architectures: Iterable[int], lowered: bool = False) -> list[dict]:
    """Return the results of `compile_operator` for these operators and architectures, from one process."""
    listed = (",".join(names), ",".join(map(str, architectures)), *(["lowered"] if lowered else []))
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.operators.compiling", *listed],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def compile_operator(name: str, arch: int, lowered: bool = False):
    """Return the reports of compiled kernels: of every case on sm_90, elsewhere of the first case of each kernel.

    Compiling more takes long. A case that leaves out sm_90 was chosen for the architecture that it has; all of its
    kernels are compiled there. lowered: compile the first case of each kernel, up to Triton's GPU dialect.
    """
    from tools.ahead import compile_launches, lower_launches

    known: set[str] = set()
    for case in launches_of(name):
        if arch not in case.architectures:
            continue
        whole = arch == 90 or (arch in PROVEN and 90 not in case.architectures)
        if lowered:
            kernels = lower_launches(case.call, arch, known)
        else:
            kernels = compile_launches(case.call, arch, None if whole else known)
        for kernel in kernels:
            allowed = case.local_bytes
            if isinstance(allowed, dict):
                allowed = allowed.get(kernel["name"], 0)
            inline = [line for line in kernel.pop("asm")["ttgir"].splitlines() if "inline_asm" in line]
            touching = [] if arch in PROVEN else [line.strip() for line in inline if MEMORY.search(line)]
            yield kernel | {"operator": name, "label": case.label, "allowed": allowed, "memory_assembly": touching}


if __name__ == "__main__":
    gc.freeze()  # what is imported, which takes seconds to look through
    for one in sys.argv[1].split(","):
        for architecture in map(int, sys.argv[2].split(",")):
            for report in compile_operator(one, architecture, "lowered" in sys.argv[3:]):
                print(json.dumps(report), flush=True)
    gc.freeze()
