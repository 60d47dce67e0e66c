"""Test the doctor: it accepts every known combination and prints what to install for every mismatch."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.doctor import COMBINATIONS, TESTED, main, mismatches

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"torch": "2.13.0+cpu", "triton": "3.7.1", "torchrec": "1.8.0", "fbgemm": "1.8.0"}


@pytest.mark.parametrize("release", COMBINATIONS)
def test_known_combinations_fit(release):
    versions = {"torch": f"{release}.0+cu130", "triton": "3.6.0"} | COMBINATIONS[release]
    assert mismatches(versions, "fbgemm-gpu", has_gpu=True) == []


@pytest.mark.parametrize(
    ("change", "has_gpu", "name", "expected"),
    [
        ({"torch": None}, False, "fbgemm-gpu-cpu", "torch is missing: pip install torch==2.13.0"),
        ({"torch": "2.9.1"}, False, "fbgemm-gpu-cpu", "torch 2.9.1 is not one of"),
        ({"fbgemm": "1.7.0"}, False, "fbgemm-gpu-cpu", "pip install fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm": None}, True, None, "fbgemm-gpu is missing: pip install fbgemm-gpu==1.8.0"),
        ({"torchrec": "1.6.0"}, False, "fbgemm-gpu-cpu", "pip install --no-deps torchrec==1.8.0"),
        ({"triton": "3.5.0"}, True, "fbgemm-gpu", "triton 3.5.0 does not work with torch 2.13"),
        ({}, True, "fbgemm-gpu-cpu", "fbgemm-gpu-cpu has no CUDA operators"),
    ],
)
def test_mismatch_says_what_to_install(change, has_gpu, name, expected):
    (line,) = mismatches(GOOD | change, name, has_gpu)
    assert expected in line


def test_this_machine_is_fine(capsys):
    assert main() == 0
    assert "Everything fits." in capsys.readouterr().out


def test_runs_where_nothing_is_installed():
    """Check that it runs without site-packages, before `make setup`, and fails."""
    command = [sys.executable, "-S", "-I", str(ROOT / "tools" / "doctor.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stderr
    expected = "! Nothing is installed yet: make setup installs the tested versions into .venv"
    assert done.stdout.splitlines()[-1] == expected


def make_setup(environment, *arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    clean |= {"PIP_CONFIG_FILE": os.devnull} | environment
    command = ["make", *arguments, "setup", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=clean)


def test_setup_for_a_cpu_needs_an_index_without_cuda(tmp_path):
    """Check that it stops before pip uses the public index, whose torch comes with CUDA."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    done = make_setup({}, "DEVICE=cpu", f"VENV={tmp_path}")
    assert done.returncode == 2 and "make setup TORCH_INDEX=ADDRESS" in done.stdout and "Installing" not in done.stdout


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["DEVICE=cpu", "TORCH_INDEX=http://other.example/cpu"], "--extra-index-url http://other.example/cpu"),
        (["DEVICE=cpu", "TORCH_INDEX="], "pip install"),
        (["DEVICE=cuda"], "pip install"),
    ],
)
def test_setup_passes_the_index_to_pip(tmp_path, settings, expected):
    shown = make_setup({}, "--dry-run", f"VENV={tmp_path}", *settings).stdout
    assert expected in shown and 'test -n ""' in shown  # no question is asked
    assert shown.count("--extra-index-url") == expected.count("--extra-index-url")


@pytest.mark.parametrize(("release", "suffix"), [(TESTED, ""), ("2.14", "-2-14")])
def test_pyproject_pins_the_tested_combinations(release, suffix):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    versions = COMBINATIONS[release]
    for device, fbgemm in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        pins = [f"torch=={release}.0", f"triton=={versions['triton']}", f"{fbgemm}=={versions['fbgemm']}"]
        assert extras[device + suffix] == pins
    assert f"TORCHREC_{release} := {versions['torchrec']}" in (ROOT / "Makefile").read_text()
