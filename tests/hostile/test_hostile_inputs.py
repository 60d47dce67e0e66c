"""Run a sample of the hostile cases (tests/hostile), and test the process of a case."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.accepted import ACCEPTED
from tests.hostile.harness import ERROR, WORKS, Process, judge

ROOT = Path(__file__).resolve().parents[2]


# Without `feature` and `kill`, which train three runs each before their first case.
QUICK = ["config", "raw", "own", "cache", "run", "side", "operator", "download", "--sample", "80"]


@pytest.mark.parametrize("areas", [QUICK, pytest.param([], marks=pytest.mark.slow)], ids=["quick", "all"])
def test_short_campaign(areas):
    command = [sys.executable, "-m", "tests.hostile", *areas, "--short", "--quiet", "--jobs", "2"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


def test_accepted_cases_are_documented():
    lines = (ROOT / "tests/hostile/ACCEPTED.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == [f"| `{name}` | {reason} |" for name, reason in ACCEPTED.items()]


def ended(run, **limits):
    return Process(run, **({"seconds": 20} | limits)).wait()


def fails(status, line):
    print(line)
    return status


def test_verdicts():
    assert judge(ended(lambda: fails(2, "error: wrong")), ERROR) == ("passed", "error: wrong")
    assert judge(ended(lambda: fails(2, "error: wrong")), WORKS)[0] == "refused"
    assert judge(ended(lambda: fails(0, "fine")), ERROR)[0] == "accepted"
    assert judge(ended(lambda: fails(0, "fine")), WORKS) == ("passed", "fine")
    assert judge(ended(lambda: fails(2, "no reason given")), ERROR)[0] == "traceback"
    assert judge(ended(lambda: fails(2, "error: " + "x" * 5000)), ERROR)[0] == "traceback"
    assert judge(ended(lambda: 1 // 0), ERROR) == ("traceback", "ZeroDivisionError: integer division or modulo by zero")
    assert judge(ended(lambda: os.kill(os.getpid(), 9)), ERROR)[0] == "traceback"
    assert judge(ended(lambda: os.read(os.pipe()[0], 1) and 0, seconds=0.02), ERROR)[0] == "hang"


def test_full_disk(tmp_path):
    with_limit = ended(lambda: (tmp_path / "file").write_bytes(b"x" * 100), disk=50)
    assert with_limit.exception.startswith("OSError")
