"""The notebooks of examples/ run from a clean kernel, each in under five minutes on two cores."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOVIELENS = ROOT.parent / "shared" / "data" / "ml-100k"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["research", "shop"])
def test_a_notebook_runs(tmp_path, monkeypatch, name):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    if MOVIELENS.is_dir():
        shutil.copytree(MOVIELENS, tmp_path / "raw" / "ml-100k")
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if output["output_type"] != "stream"]
    assert any("iframe" in data.get("text/html", "") for data in shown)  # a report
    assert name == "shop" or any("image/png" in data for data in shown)
