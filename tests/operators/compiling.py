"""Compiles all kernels ahead of time, with the launchers' own constants.

    python -m tests.operators.compiling OPERATOR ARCH...

Triton's interpreter compiles nothing and cannot be switched off in a process, so the tests start one with it off; the
program prints a JSON line for each kernel.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.random.cases import operator

ROOT = Path(__file__).parents[2]
# Inline assembly that touches memory has its place on architectures where it was proved, and nowhere else.
PROVEN = (80, 90)
# Bytes of shared memory that a program may have there, with the driver's 1 KB.
SHARED = {80: 163 * 1024, 90: 228 * 1024}
MEMORY = re.compile(r"\b(ld|st|red|atom|cp)\.")


def compiled(name: str, *architectures: int) -> list[dict]:
    """What `compile_operator` finds, of all architectures in one process."""
    command = [sys.executable, "-m", "tests.operators.compiling", name, *map(str, architectures)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def compile_test(*names: str, architectures: tuple[int, ...] = (80, 90, 100, 120)):
    """A test that the kernels of these operators compile for these architectures as they should."""

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("name", names)
    def test(name):
        pytest.importorskip("triton")
        used = {arch for case in operator(name).launches() for arch in case.architectures}
        wanted = sorted(used.intersection(architectures))
        kernels = compiled(name, *wanted)
        assert {k["arch"] for k in kernels} == set(wanted)
        wrong = [
            k
            for k in kernels
            if k["local_bytes"] > k["allowed"]
            or k["shared_bytes"] > SHARED.get(k["arch"], k["shared_bytes"])
            or k["unset_registers"]
            or k["early_reloads"]
            or k["added_twice"]
            or k["memory_assembly"]
        ]
        assert not wrong, "\n".join(map(str, wrong))

    return test


def compile_operator(name: str, arch: int):
    """Kernels as `report` has them: of every case on sm_90, elsewhere of each its first case: compiling takes long.

    A case that leaves sm_90 out was chosen for the other proven architecture, and is compiled whole there.
    """
    from hstu_sparse.ahead import compile_launches

    known: set[str] = set()
    for case in operator(name).launches():
        if arch not in case.architectures:
            continue
        whole = arch == 90 or (arch in PROVEN and 90 not in case.architectures)
        for kernel in compile_launches(case.call, arch, None if whole else known):
            allowed = case.local_bytes
            if isinstance(allowed, dict):
                allowed = allowed.get(kernel["name"], 0)
            inline = [line for line in kernel.pop("asm")["ttgir"].splitlines() if "inline_asm" in line]
            touching = [] if arch in PROVEN else [line.strip() for line in inline if MEMORY.search(line)]
            yield kernel | {"label": case.label, "allowed": allowed, "memory_assembly": touching}


if __name__ == "__main__":
    for architecture in map(int, sys.argv[2:]):
        for found in compile_operator(sys.argv[1], architecture):
            print(json.dumps(found), flush=True)
