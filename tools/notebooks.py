"""Run notebooks of examples/ from a clean kernel and store their outputs, which the site shows.

    python -m tools.notebooks examples/shop.ipynb [--data FOLDER]

It needs nbclient and ipykernel. Text, tables and figures are stored; stderr, progress bars and execution times are not.
"""

import os
import shutil
import tempfile
from pathlib import Path

from cli.command import Parser, run_main

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("text/html", "image/png", "text/plain")
MOST_BYTES = 400_000  # largest size of a notebook with its outputs


def executed(path: Path, raw: Path | None = None):
    """Run a notebook in an empty folder and return it with its outputs; raw: a folder to copy there, into raw/."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as folder:
        if raw is not None:
            shutil.copytree(raw, Path(folder, "raw", raw.name))
        nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}}).execute()
    return notebook


def with_clean_outputs(notebook):
    """Return the notebook with only the outputs that the site shows, and without execution times."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = list(filter(None, map(clean, cell.outputs)))
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    return notebook


def clean(output):
    """Return an output with only the first of its formats in SHOWN; None for one that is not shown."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    form = next((form for form in SHOWN if form in output.data), None)
    if form is None or "application/vnd.jupyter.widget-view+json" in output.data:
        return None
    output.data, output.metadata = {form: output.data[form]}, {}
    return output


def main() -> None:
    """Run the notebooks named on the command line and store them with their outputs."""
    parser = Parser(prog="python -m tools.notebooks", description="Run notebooks and store their outputs.")
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK", help="the .ipynb file")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a data set to copy into raw/ of the notebook")
    options = parser.parse_args()
    for path in options.notebooks:
        path.stat()  # raises for a missing file before anything runs
    import nbformat

    for path in options.notebooks:
        notebook = with_clean_outputs(executed(path, options.data))
        text = nbformat.writes(notebook) + "\n"
        if len(text) > MOST_BYTES:
            raise SystemExit(f"{path}: {len(text):,} bytes with its outputs, expected at most {MOST_BYTES:,}")
        path.write_text(text)
        print(f"{path}: {len(text):,} bytes")


if __name__ == "__main__":
    run_main(main)
