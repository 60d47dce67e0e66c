"""Hooks of the site's build: pages that are made from other files, and links to files that are not pages.

MkDocs calls `on_page_markdown` for each page.
"""

import json
import re
import sys
from pathlib import Path
from posixpath import normpath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NOTEBOOK = re.compile(r"<!-- notebook (\S+) -->")
INCLUDED = re.compile(r"<!-- include (\S+) -->")
IMAGE = re.compile(r"^(!\[[^\]]*\]\(([^)\s]+\.png)\))$", re.MULTILINE)
LINK = re.compile(r"\[([^\]\[]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fill in configuration keys and included files, name files in place of links to them, and link figures."""
    if "<!-- keys -->" in markdown:
        from training.keys import as_markdown

        markdown = markdown.replace("<!-- keys -->", as_markdown())
    if included := INCLUDED.search(markdown):
        text = (ROOT / included[1]).read_text().replace("](docs/", "](")
        markdown = markdown.replace(included[0], text)
    if notebook := NOTEBOOK.search(markdown):
        markdown = markdown.replace(notebook[0], notebook_cells(ROOT / notebook[1]))
    markdown = LINK.sub(lambda link: _link(link, Path(page.file.src_uri).parent), markdown)
    return IMAGE.sub(r"[\1](\2)", markdown)  # a figure opens in full, which phones need


def notebook_cells(notebook: Path) -> str:
    """Return the text and code of a notebook, with each cell's stored outputs after it."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += map(_output, cell.get("outputs", []))
    return "\n\n".join(parts)


def _output(output: dict) -> str:
    """Format an output of a notebook: HTML and figures unchanged, otherwise its text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    forms = {form: "".join(value) for form, value in data.items()}
    if "text/html" in forms:
        content = re.sub(r"\s*\n\s*", " ", forms["text/html"])  # an empty line would end the HTML
        return f'<div class="output">{content}</div>'
    if "image/png" in forms:
        content = forms["image/png"].replace("\n", "")
        return f'<div class="output"><img alt="figure of the cell above" src="data:image/png;base64,{content}"></div>'
    return f"```text\n{forms['text/plain'].rstrip()}\n```"


def _link(link: re.Match, folder: Path) -> str:
    """Return a link to a page unchanged, and a link to another file of the project as that file's path."""
    text, target, _ = link.groups()
    if (ROOT / "docs" / folder / target).exists() and not target.startswith("../"):
        return link[0]
    path = normpath(f"docs/{folder}/{target}")
    if path.startswith("docs/") and not (ROOT / path).exists():  # from a file of the project's root
        path = target
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{folder}: a link to {target}, which does not exist")
    return link[0] if path.startswith("docs/") else f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
