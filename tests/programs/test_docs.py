"""What README and the pages say can be done: their blocks run, and what they name exists."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh|python|yaml)(?: title=\"(.+?)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SET_UP = {"make setup", "source .venv/bin/activate", "pip install .", "make train", "make test"}  # not run, but checked
SHORTER = [("seeds: [1, 2]", "seeds: [1]"), ("epochs: 5", "epochs: 1"), ("epochs=8", "epochs=2")]  # for a test's time


@pytest.fixture
def checkout(tmp_path):
    """A folder in which the programs can be called and leave their output."""
    for name in (
        "train.py",
        "eval.py",
        "compare.py",
        "tune.py",
        "serve.py",
        "models",
        "data",
        "hstu_sparse",
        "configs",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_blocks(page: str, folder: Path) -> None:
    """Runs the blocks of a page in their order: shell and Python; a YAML block with a title becomes that file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for language, title, text in BLOCK.findall((ROOT / page).read_text()):
        text = text.replace("8000", port)
        for long, short in SHORTER:
            text = text.replace(long, short)
        if language == "yaml":
            if title:
                (folder / title).write_text(text)
            continue
        if language == "sh":
            lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
            text = "\n".join(["set -e -m", *(line for line in lines if line not in SET_UP)])
        command = ["bash", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{page}:\n{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page calls curl")
def test_getting_started_runs(checkout):
    run_blocks("docs/getting_started.md", checkout)
    assert (checkout / "next.csv").read_text().count("\n") > 300
    assert (checkout / "compared" / "report.html").exists()
