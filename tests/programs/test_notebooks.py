"""Test that the notebooks of examples/ run from a clean kernel, and that the site shows their outputs."""

import json
from pathlib import Path

import pytest

from docs.hooks import notebook_cells
from tools.notebooks import executed, with_clean_outputs

ROOT = Path(__file__).resolve().parents[2]
MOVIELENS = ROOT.parent / "shared" / "data" / "ml-100k"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["research", "shop"])
def test_a_notebook_runs(name):
    for package in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package)
    data = MOVIELENS if MOVIELENS.is_dir() else None
    cells = with_clean_outputs(executed(ROOT / "examples" / f"{name}.ipynb", data)).cells
    shown = [output["data"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
    assert any("iframe" in data.get("text/html", "") for data in shown)  # a report
    assert name == "shop" or any("image/png" in data for data in shown)


def test_the_site_shows_the_outputs_of_a_notebook(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["two\n", "lines\n"]},
        {
            "output_type": "execute_result",
            "data": {"text/html": ["<table>\n\n<tr></tr></table>"], "text/plain": "shape"},
        },
        {"output_type": "display_data", "data": {"image/png": "aGk=\n", "text/plain": "<Figure>"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# A title"]},
        {"cell_type": "code", "source": ["run()"], "outputs": outputs},
    ]
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    title, code, text, table, figure = notebook_cells(path).split("\n\n")
    assert (title, code, text) == ("# A title", "```python\nrun()\n```", "```text\ntwo\nlines\n```")
    assert table == '<div class="output"><table> <tr></tr></table></div>'
    assert figure.startswith('<div class="output"><img') and "base64,aGk=" in figure
