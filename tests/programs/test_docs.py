"""Check that the code blocks of README and the pages run, and that the files, keys and flags they name exist."""

import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import hstu_sparse
from cli import command
from tests.programs.test_train import run as run_program
from tests.support.ports import reserved_ports
from training.keys import sections

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "configs" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(sh|python|yaml)(?: title=\"(.+?)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*\n((?:.*\n)*?)^```", re.MULTILINE)
INDENTED = re.compile(r"(?:^(?: {4,}|\t).*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FOLDERS = "configs|cli|experiments|serving|training|hstu_sparse|models|evaluation|data|tests|tools|benchmarks|docs"
FOLDERS += "|examples"
FILE = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./{{}},*<>-]*)")
CONFIG = re.compile(
    r"[a-z0-9{},]+(?:-[a-z0-9{},]+)*-(?:hstu|sasrec|large|best|ranking|bsa|htree|indexer|rotatekv|ring|\{.*\})"
)
KEY = re.compile(r"(?<![\w./])((?:data|task|model|loss|train|eval|parallel)(?:\.[A-Za-z_0-9]+)+)(?![\w(/]|\.\w)")
FLAG = re.compile(r"(?<![\w-])(--[a-z](?:[a-z-]*[a-z])?)(?![\w-])")
PLACEHOLDER = re.compile(r"<|\*|\.\.\.|NAME")


@cache
def known_keys() -> set[str]:
    """Return the dotted keys of a configuration, and those of the mappings that contain them."""
    keys = {key.name for section in sections() for key in section.keys}
    return keys | {".".join(key.split(".")[:n]) for key in keys for n in range(1, key.count(".") + 1)}


@cache
def flags() -> dict[str, set[str]]:
    """Map each program to its flags, from --help where that is cheap, else from its source."""
    by_program = {}
    for program in ("train", "eval", "compare", "tune", "serve"):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            getattr(command, f"{program}_options")("", ["--help"])
        by_program[f"{program}.py"] = set(FLAG.findall(text.getvalue()))
    files = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "data" / "download.py", ROOT / "tests" / "conftest.py"]
    for file in files:
        by_program[str(file.relative_to(ROOT))] = set(re.findall(r'"(--[a-z][a-z-]*)"', file.read_text()))
    shared = set().union(*(names for file, names in by_program.items() if file.startswith("benchmarks/")))
    by_program["benchmarks/run.py"] |= shared  # it also has its operators' flags
    by_program["benchmarks/train.py"] |= by_program["benchmarks/parts.py"]
    by_program["(torchrun)"] = {"--standalone", "--nproc-per-node", "--nnodes", "--rdzv-endpoint", "--max-restarts"}
    return by_program


def spread(name: str) -> Iterator[str]:
    """Expand a-{b,c} to a-b, a-c."""
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", name)]
    return map("".join, itertools.product(*parts))


def exists(path: str) -> bool:
    return bool(PLACEHOLDER.search(path)) or all((ROOT / one).exists() for one in spread(path.rstrip(".,")))


def is_key(name: str) -> bool:
    """Return whether there is a key, a mapping of keys, a module or a file of that name."""
    name = re.sub(r"\.\d+(?=\.|$)", "", name) if name.startswith("model.attention") else name
    name = re.sub(r"(\.columns)\.[a-z_]\w*(?=\.|$)", r"\1.NAME", name) if ".features." in name else name
    parent, _, last = name.rpartition(".")
    modules = ("/".join(name.split(".")[:n]) for n in range(2, name.count(".") + 2))
    return (
        name in known_keys()
        or last in ("py", "NAME") or (parent in known_keys() and last.isupper())
        or any((ROOT / f"{module}.py").exists() or (ROOT / module).is_dir() for module in modules)
    )  # fmt: skip


def keys_of(tree: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a YAML configuration."""
    if isinstance(tree, list):
        for number, one in enumerate(tree):
            yield from keys_of(one, f"{prefix}{number}.") if isinstance(one, dict) else ()
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            if name != "action_codes":
                yield from keys_of(value, f"{prefix}{name}.")


def faults_of_yaml(text: str) -> Iterator[str]:
    """Yield the unknown keys of a block: part of a run's configuration, or a plan or search space with dotted keys."""
    tree = yaml.safe_load(text)
    tops = {section.title for section in sections() if "." not in section.title and section.title.islower()}
    if not isinstance(tree, dict):
        return
    if tops & set(tree):
        names = keys_of(tree)
    else:
        names = (name for part in ("settings", "space", "fixed", "quick") for name in dotted(tree.get(part) or {}))
    yield from (f"key {name}" for name in names if not is_key(name))


def dotted(tree: dict) -> Iterator[str]:
    for name, value in tree.items():
        if "." in name:
            yield name
        elif isinstance(value, dict):
            yield from dotted(value)


def faults_of_code(text: str) -> Iterator[str]:
    """Yield the files, configs, keys and flags in a span or line of code that do not exist."""
    yield from (f"file {path}" for path in FILE.findall(text) if not exists(path))
    if CONFIG.fullmatch(text) and "." not in text:
        yield from (f"config {name}" for name in spread(text) if not (ROOT / f"configs/{name}.yaml").exists())
    yield from (f"key {name}" for name in KEY.findall(text) if not is_key(name))
    if " && " in text:
        yield from (fault for part in text.split(" && ") for fault in faults_of_code(part))
        return
    words = text.split()
    program = next((word for word in words if word in flags() or (word.endswith(".py") and "/" in word)), None)
    if words and words[0].startswith("make"):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"make {word}" for word in words[1:2] if re.fullmatch("[a-z-]+", word) and word not in targets)
    elif program in flags():
        used = FLAG.findall(text.partition(program)[2])
        yield from (f"{program} {flag}" for flag in used if flag not in flags()[program])
    elif FLAG.match(text):
        every = set().union(*flags().values())
        yield from (f"flag {flag}" for flag in FLAG.findall(text) if flag not in every)
    for name in re.findall(r"\bhstu_sparse\.([a-zA-Z_]\w*)\(", text):
        if not hasattr(hstu_sparse, name) and not list((ROOT / "hstu_sparse").glob(f"{name}*")):
            yield f"hstu_sparse.{name}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page and of files that it includes (see docs/hooks.py)."""
    text = page.read_text()
    included = [(ROOT / name).read_text() for name in re.findall(r"<!-- include (\S+) -->", text)]
    titles = re.findall(r"^#+ (.+)$", "\n".join([text, *included]), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


def faults(text: str, folder: Path) -> list[str]:
    """Return the names and links in a page whose targets do not exist."""
    listed: list[str] = []
    for language, _, block in BLOCK.findall(text):
        if language == "yaml":
            listed += faults_of_yaml(block)
        listed += [fault for line in re.sub(r"\\\n", "", block).splitlines() for fault in faults_of_code(line)]
    rest = BLOCK.sub("", text)
    for block in INDENTED.findall(rest):
        listed += [fault for line in block.splitlines() for fault in faults_of_code(line.strip())]
    listed += [fault for span in SPAN.findall(rest) for fault in faults_of_code(span)]
    return listed + list(faults_of_links(rest, folder))


def faults_of_links(text: str, folder: Path) -> Iterator[str]:
    """Yield the links to files or headings that do not exist."""
    for target, anchor in LINK.findall(text):
        page = folder / target
        if target and not page.exists():
            yield f"link {target}"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page):
            yield f"anchor {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_links_of_a_page_exist(page):
    assert not (wrong := faults(page.read_text(), page.parent)), wrong


def test_pages_are_short():
    """Check that pages do not grow: what nobody will use again is left out."""
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert not {name: count for name, count in words.items() if count > 2_000}


def test_lines_of_blocks_fit_the_page():
    """Check that no line of a block has to be scrolled to on the site at 1280 pixels."""
    blocks = ((page.name, block) for page in PAGES for block in FENCED.findall(page.read_text()))
    assert not [f"{page}: {line}" for page, block in blocks for line in block.splitlines() if len(line) > 95]


def test_pages_cite_versions_and_no_commits():
    """Check that pages cite no commits, which are rewritten; readers have versions."""
    commit = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")
    assert not {page.name: hashes for page in PAGES if (hashes := commit.findall(page.read_text()))}
    assert commit.findall("at 8fae257, at 1_234_567 and 12345678 rows") == ["8fae257"]


def test_no_sentence_begins_with_of():
    """Check pages, docstrings and comments: such a sentence has to be read twice."""
    begins = re.compile(r"(?:^\s*|[.!?] |\"\"\"|# |\()Of [a-z\[|`]", re.MULTILINE)
    code = [file for folder in FOLDERS.split("|") for file in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{file.relative_to(ROOT)}: {text[match.start() : match.end() + 40]!r}"
        for file in [*PAGES, ROOT / "CHANGELOG.md", *code, *ROOT.glob("*.py")]
        for text in [file.read_text()]
        for match in begins.finditer(text)
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see `configs/ml-100k-hsut.yaml`", "file configs/ml-100k-hsut.yaml"),
        ("the config `ml-1m-{hstu,sasrek}`", "config ml-1m-sasrek"),
        ("`ml-7m-hstu`", "config ml-7m-hstu"),
        ("`train.lrr=3`", "key train.lrr"),
        ("```sh\npython train.py CONFIG --resum RUN\n```\n", "train.py --resum"),
        ("    python eval.py RUN --servee\n", "eval.py --servee"),
        ("`--no-such-flag`", "flag --no-such-flag"),
        ("`make tests`", "make tests"),
        ("```yaml\nmodel: {attention: {kind: bsa, blok_size: 3}}\n```\n", "key model.attention.blok_size"),
        ("```yaml\nsettings: {a: {model.blok: hstu}}\n```\n", "key model.blok"),
        ("[x](docs/nothing.md)", "link docs/nothing.md"),
        ("[x](docs/data.md#no-such-part)", "anchor docs/data.md#no-such-part"),
        ("`hstu_sparse.no_attention(q)`", "hstu_sparse.no_attention"),
    ],
)
def test_the_check_finds_what_is_wrong(text, fault):
    assert fault in faults(text, ROOT)


SET_UP = {"make setup", "source .venv/bin/activate", "pip install .", "make train", "make test"}  # not run, but checked
# Text of a page -> what is run in its place, in less time.
REPLACED = [
    ("seeds: [1, 2]", "seeds: [1]"),
    ("epochs: 5", "epochs: 1"),
    ("epochs: 3", "epochs: 1"),
    ("epochs=8", "epochs=2"),
    ("epochs=3", "epochs=1"),
]
REPLACED += [("--retry 60", "--retry 900")]  # a service starts late on a busy machine


@pytest.fixture
def checkout(tmp_path):
    """Return a folder in which the programs can be called and write their output."""
    for name in (
        "train.py",
        "eval.py",
        "compare.py",
        "tune.py",
        "serve.py",
        "hstu_sparse_checkout.py",
        "cli",
        "experiments",
        "serving",
        "training",
        "models",
        "evaluation",
        "data",
        "hstu_sparse",
        "configs",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


SYNOPSIS = re.compile(r"\b(?:CONFIG|PLAN\.yaml|SPACE\.yaml)\b")  # a line that shows a program's arguments
# A call of a program that needs no shell: `run` makes it in this process.
CALL = re.compile(r"python (?:train|eval|compare)\.py(?: [\w./=-]+)+")
# A block that fails ends the services that it started.
SHELL = "set -e -m\ntrap 'kill $(jobs -p) 2>/dev/null || :' EXIT\n"


def run_blocks(page: str, folder: Path, replaced=REPLACED, skipped: tuple[str, ...] = ()) -> None:
    """Run the shell and Python blocks of a page in order; a block with a title is written to that file.

    replaced: (text, what is run in its place); skipped: the begins of blocks that are not run.
    """
    with reserved_ports() as (port,):
        _run_blocks(page, folder, replaced, skipped, port)


def _run_blocks(page: str, folder: Path, replaced, skipped: tuple[str, ...], port: str) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.setdefault("PYTHONPATH", str(ROOT))
    for language, title, text in BLOCK.findall((ROOT / page).read_text()):
        if skipped and text.startswith(skipped):
            continue
        text = text.replace("8000", port)
        for written, run in replaced:
            text = text.replace(written, run)
        if title:
            (folder / title).write_text(text)
        if title or language == "yaml":
            continue
        if language == "sh":
            lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
            lines = [line for line in lines if line not in SET_UP and not line.startswith("#")]
            lines = [line for line in lines if not SYNOPSIS.search(line)]
            with contextlib.chdir(folder):
                while lines and CALL.fullmatch(lines[0]):
                    done = run_program(*lines.pop(0).split()[1:])
                    assert done.returncode == 0, done
            text = SHELL + "\n".join(lines)
        if language == "python":
            with contextlib.chdir(folder):
                exec(compile(text, page, "exec"), {})
            continue
        done = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{page}:\n{text}\n{done.stdout}\n{done.stderr}"


def test_a_block_that_fails_ends_what_it_started(tmp_path):
    """Check that the call ends: it would take ten minutes if a process that still runs kept the output open."""
    # bash can lose a signal that comes right after it forks, so the process says that it runs.
    block = f"{SHELL}(echo yes > runs; exec sleep 1000) &\nuntil test -s runs; do sleep .01; done\nfalse"
    assert subprocess.run(["bash", "-c", block], cwd=tmp_path, capture_output=True, timeout=600).returncode == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page calls curl")
def test_readme_runs(checkout):
    for language, _, text in BLOCK.findall((ROOT / "docs" / "getting_started.md").read_text()):
        if language == "python" and "orders.csv" in text:
            with contextlib.chdir(checkout):
                exec(compile(text, "getting_started", "exec"), {})
    run_blocks("README.md", checkout)
    assert (checkout / "next.csv").exists() and (checkout / "compared" / "report.html").exists()


@pytest.mark.parametrize("page", ["operators", "indexer", "ring", "paged_attention", "start_kernels"])
def test_examples_of_operators_run(page):
    blocks = [
        text for language, _, text in BLOCK.findall((ROOT / f"docs/{page}.md").read_text()) if language == "python"
    ]
    assert blocks
    names = {}
    for text in blocks:
        exec(compile(text, page, "exec"), names)


def test_the_page_for_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = [block for language, _, block in BLOCK.findall(text) if language == "python" and "compare" not in block]
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "python.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_the_page_for_python_runs_in_a_new_process_and_folder(tmp_path, library):
    if library == "pandas":
        pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    text = (ROOT / "docs" / "python.md").read_text().replace("import polars as pl", f"import {library} as pl")
    blocks = [block for language, _, block in BLOCK.findall(text) if language == "python"]
    assert len([line for line in blocks[0].splitlines() if line]) == 10  # the page says ten lines
    code = f"import sys; sys.path.append({str(ROOT)!r})\n" + "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "effect" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("bsa_kernel", "hstu_sparse/bsa/query_major.py"),
        ("dense_kernel", "hstu_sparse/dense/kernels.py"),
        ("bias", "tests/operators/test_bias_toy.py"),
    ],
)
def test_the_page_quotes_the_code(page, file):
    code = (ROOT / file).read_text()
    blocks = [text for _, _, text in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())]
    # A block is a part of the code with other line breaks, or lines of the code with some left out.
    partial = [text for text in blocks if "".join(text.split()) not in "".join(code.split())]
    assert blocks and not (wrong := [line for text in partial for line in text.split("\n") if line not in code]), wrong


def test_every_config_says_whether_it_was_run():
    names = {name for span in SPAN.findall((ROOT / "configs" / "README.md").read_text()) for name in spread(span)}
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} <= names


@pytest.mark.slow  # it starts eleven programs; the README's blocks are seven similar ones
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page calls curl")
def test_getting_started_runs(checkout):
    run_blocks("docs/getting_started.md", checkout)
    assert (checkout / "next.csv").read_text().count("\n") > 300
    assert (checkout / "compared" / "report.html").exists()


def test_tests_that_the_page_of_data_names_exist():
    """Check the tests that the table of readable files names in each row."""
    page, folder = (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), ROOT / "tests" / "data"
    table = page[page.index("### What is read") : page.index("## Known formats")]
    tests = "".join(file.read_text(encoding="utf-8") for file in folder.rglob("test_*.py"))
    for file in re.findall(r"([\w/]+\.py)", table):
        assert (folder / file).is_file(), file
    for name in re.findall(r"\b(test_\w+)(?![\w.])", table):
        assert f"def {name}" in tests, name
    assert all(
        "test_" in line
        for line in table.splitlines()
        if line.startswith("| ") and " | test" not in line and "---" not in line and not line.startswith("| features,")
    )


@pytest.mark.slow
def test_ten_minutes_for_a_researcher(checkout, monkeypatch):
    # The page's own module lies beside train.py, which here is a link to ROOT's.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{checkout}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(checkout)])
    run_blocks("docs/start_research.md", checkout)
    assert (checkout / "compared-kinds" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page calls curl")
def test_the_week_runs(checkout):
    """Run all commands of the week in one shell: its services go on from block to block."""
    for language, title, text in BLOCK.findall((ROOT / "docs" / "getting_started.md").read_text()):
        if title == "shop.yaml":
            (checkout / title).write_text(text.replace("epochs: 5", "epochs: 1"))
        elif language == "python" and "orders.csv" in text:
            subprocess.run([sys.executable, "-c", text], cwd=checkout, check=True)
    blocks = [text for language, _, text in BLOCK.findall((ROOT / "docs" / "week.md").read_text()) if language == "sh"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    with reserved_ports() as (port,):
        program = (SHELL + "\n".join(blocks)).replace("8000", port).replace("--retry 60", "--retry 900")
        done = subprocess.run(["bash", "-c", program], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert '"unknown item"' in done.stdout and "live/day-8" in done.stdout
