"""Test that every file that a user can run reports a wrong name, a missing file and no network in one line."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import run_main

ROOT = Path(__file__).resolve().parents[2]
WRONG = {
    "benchmarks/ab.py": [("absent .", "absent: no checkout"), (". . --what dens", "--what: dens is none of dense, ")],
    "benchmarks/balance.py": [("absent.yaml", "absent.yaml: No such file")],
    "benchmarks/baselines.py": [("time --events x", "--events: invalid int"), ("tame", "invalid choice: 'tame'")],
    "benchmarks/bsa.py": [("absent.jsonl", "absent.jsonl: No such file"), ("pyproject.toml", "not a JSON file")],
    "benchmarks/crossover.py": [
        ("--table --out absent.jsonl", "absent.jsonl: No such file"),
        ("--kinds dens", "--kinds: dens is none of"),
    ],
    "benchmarks/grid.py": [("absent.yaml --out OUT", "absent.yaml: No such file"), ("--out OUT", "give a plan")],
    "benchmarks/kinds.py": [("--results absent.json", "absent.json: No such file")],
    "benchmarks/kv_cache.py": [("absent", "absent: no such folder"), ("OUT --names dens", "has no finished run")],
    "benchmarks/memory.py": [("absent", "absent: No such file"), ("--table --out absent", "absent: No such file")],
    "benchmarks/open_loop.py": [("", "the following arguments are required"), (". --rates x", "--rates: invalid")],
    "benchmarks/plan.py": [("absent.yaml --predict", "absent.yaml: No such file")],
    "benchmarks/prepare.py": [("--folder README.md", "README.md: File exists"), ("--rows x", "--rows: invalid int")],
    "benchmarks/ring.py": [("--cases absent", "invalid choice: 'absent'"), ("", "start it by torchrun")],
    "benchmarks/run.py": [("--op absent", "absent is none of bsa, "), ("--plot absent.jsonl", "absent.jsonl: No such")],
    "benchmarks/scale.py": [("absent", "absent is none of the cases"), ("", "give cases (")],
    "benchmarks/scale_tables.py": [("absent.jsonl", "absent.jsonl: No such file")],
    "benchmarks/scaling.py": [("--measured absent.jsonl", "absent.jsonl: No such file")],
    "benchmarks/serving.py": [("--http http://127.0.0.1:1", "need --run RUN"), ("--start 5 --run absent", "absent/")],
    "benchmarks/slides.py": [("--model absent", "invalid choice: 'absent'")],
    "benchmarks/train.py": [("absent.yaml", "absent.yaml: No such file"), ("--parts --kinds dens", "dens is none of")],
    "benchmarks/trials.py": [("absent.yaml --out OUT", "absent.yaml: No such file"), ("--out OUT", "give a plan")],
    "benchmarks/updates.py": [
        ("run absent --out OUT", "absent: No such file"),
        ("table absent", "updates.jsonl: No such"),
    ],
    "data/download.py": [
        ("ml-1k", "invalid choice: 'ml-1k'"),
        ("ml-100k --to OUT --url http://127.0.0.1:PORT/x.zip", "if this machine is offline, put"),
        ("ml-100k --to OUT --url nonsense", "nonsense: expected an address"),
        ("ml-100k --to README.md", "README.md"),
    ],
    "examples/load_exported.py": [("absent.pt2 1 a=1", "absent.pt2: no such file"), ("", "expected OUT.pt2 AT ITEM=")],
    "examples/recommend.py": [
        ("absent absent.csv", "absent: no such folder"),
        ("absent", "the following arguments are required: events"),
    ],
    "examples/vectors.py": [("items.csv titles", "titles: expected a name that ends in .npy")],
    "tools/doctor.py": [],
    "tools/notebooks.py": [
        ("absent.ipynb", "absent.ipynb: No such file"),
        ("", "the following arguments are required"),
    ],
    "tools/forget.py": [("user --data absent", "--data: absent: no such folder"), ("", "arguments are required")],
}


def test_every_file_that_can_be_run_is_tested():
    folders = ("benchmarks", "data", "examples", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if '\nif __name__ == "__main__":' in path.read_text()} == {
        *WRONG
    }


@pytest.fixture(scope="module")
def closed_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        yield bound.getsockname()[1]


@pytest.mark.parametrize(
    ("file", "arguments", "message"),
    [(file, *case) for file, cases in WRONG.items() for case in cases],
    ids=lambda value: value if value in WRONG else "",
)
def test_an_error_is_one_line(file, arguments, message, tmp_path, closed_port, monkeypatch, capfd):
    words = arguments.replace("OUT", str(tmp_path)).replace("PORT", str(closed_port)).split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [file, *words])
    monkeypatch.setattr(sys, "path", [str(ROOT / file).rpartition("/")[0], *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(file, run_name="__main__")
    if isinstance(ended.value.code, str):  # which Python prints when the process ends
        print(ended.value.code, file=sys.stderr)
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code != 0 and line.startswith("error: ") and message in line


def test_other_errors_keep_their_traceback():
    def broken():
        raise LookupError("a fault of the program")

    with pytest.raises(LookupError):
        run_main(broken)


def test_a_download_without_set_up_says_how_to_set_up():
    command = [sys.executable, "-S", "data/download.py", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"error: the package \w+ is not installed in this Python; run `make setup`, .*\n", done.stderr)
