"""Check the imports between modules: in one direction, without a cycle, and each module can be imported alone."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("train", "eval", "compare", "tune", "serve")
FOLDERS = ("cli", "experiments", "serving", "training", "models", "evaluation", "data", "hstu_sparse")
FILES = [
    ROOT / "hstu_sparse_checkout.py",
    *(ROOT / f"{program}.py" for program in PROGRAMS),
    *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")),
]
# Package -> the packages that it may import; docs/architecture.md gives the reasons.
ALLOWED = {
    **{program: set(FOLDERS) for program in PROGRAMS},
    "experiments": {"experiments", "serving", "training", "models", "evaluation", "cli", "data", "hstu_sparse"},
    "serving": {"serving", "training", "models", "evaluation", "cli", "data", "hstu_sparse"},
    "training": {"training", "models", "evaluation", "cli", "data", "hstu_sparse"},
    "models": {"models", "evaluation", "data", "hstu_sparse"},
    "evaluation": {"evaluation", "data", "hstu_sparse"},
    "cli": {"cli", "data", "hstu_sparse"},
    "data": {"data", "hstu_sparse"},
    "hstu_sparse": {"hstu_sparse"},
    "hstu_sparse_checkout": set(),
}
# The files of cli/ that only programs import.
PROGRAMS_ONLY = {"cli.command", "cli.program"}
# Folders of hstu_sparse that operators share, and pairs (operator, the operator that it is built on).
SHARED = {"bias", "core", "tiles"}
BUILT_ON = {("ring", "flash"), ("cache", "dense"), ("cache", "layer")}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Imports each module in a separate process, which has loaded nothing of the project but the module's packages.
EACH_ALONE = """
import gc, importlib, multiprocessing, sys
gc.disable()  # neither here nor in the processes: to look through what is imported takes seconds
libraries = ["fastapi", "fbgemm_gpu", "matplotlib.figure", "optuna", "polars", "prometheus_client", "pydantic.main"]
libraries += ["rich.progress", "rich.table", "scipy.sparse", "scipy.special", "torch._dynamo", "torchrec", "triton"]
for library in libraries:
    importlib.import_module(library)
context = multiprocessing.get_context("fork")
for name in sys.argv[1:]:
    process = context.Process(target=importlib.import_module, args=(name,))
    process.start()
    process.join()
    print(name * (process.exitcode != 0))
gc.freeze()
"""
MODULES = {name_of(file): file for file in FILES}


def imports(code: ast.AST, package: str = "") -> set[str]:
    """Return the project's modules that code of a package imports, including imports inside functions.

    Imports for type checkers count, too. `from package import name` is an import of the module `package.name` if there
    is one, and not of the package's __init__.py.
    """
    names = set()
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            inside = {f"{module}.{alias.name}" for alias in node.names}
            names |= inside if inside <= MODULES.keys() else {module}
        else:
            names |= imports(node, package)
    return names & MODULES.keys() if names else names


@functools.cache
def graph() -> dict[str, set[str]]:
    """Map each module to the modules that it or its functions import."""
    return {
        name: imports(ast.parse(file.read_text()), name if file.name == "__init__.py" else name.rpartition(".")[0])
        for name, file in MODULES.items()
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return a path from a module back to itself; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if way_back := walk(other, [*way, name]):
                return way_back
        done.add(name)
        return []

    return next((way_round for name in sorted(graph) if (way_round := walk(name, []))), [])


def test_the_check_sees_a_circle():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    code = "def f():\n    import train\nfrom .types import DataError\nif TYPE_CHECKING:\n    from models import hstu"
    assert imports(ast.parse(code), "data") == {"train", "data.types", "models.hstu"}


def test_no_circle():
    assert circle(graph()) == []


def test_arrows_run_one_way():
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if other.split(".")[0] not in ALLOWED[name.split(".")[0]] | {"hstu_sparse_checkout"}
        or (other in PROGRAMS_ONLY and name not in PROGRAMS and not name.startswith("cli."))
    ]
    assert not wrong, wrong


def test_operators_do_not_import_one_another():
    """Check operators and the folders in SHARED, which several operators import and which import no operator."""
    rooms = {file.parent.name for file in (ROOT / "hstu_sparse").glob("*/__init__.py")}
    pairs = {
        (name.split(".")[1], other.split(".")[1])
        for name, others in graph().items()
        for other in others
        if name.startswith("hstu_sparse.") and other.startswith("hstu_sparse.")
    }
    wrong = {(a, b) for a, b in pairs if a != b and {a, b} <= rooms and b not in SHARED} - BUILT_ON
    assert len(rooms) > 5 and rooms > SHARED and not wrong, wrong


@pytest.mark.parametrize(
    "modules", [PROGRAMS, pytest.param([*MODULES], marks=pytest.mark.slow)], ids=["programs", "all"]
)
def test_modules_import_alone(modules):
    """Check that each of the modules can be imported alone.

    Programs suffice: they import nearly all other modules, and there is no cycle.
    """
    run = subprocess.run([sys.executable, "-c", EACH_ALONE, *modules], cwd=ROOT, capture_output=True, text=True)
    failed = run.stdout.split()
    assert run.returncode == 0 and not failed, f"cannot be imported alone: {failed}\n{run.stderr[-3000:]}"


def test_no_function_hides_a_module():
    import hstu_sparse

    assert not [name for name in hstu_sparse.__all__ if f"hstu_sparse.{name}" in MODULES]


@functools.cache
def first_imports(module: str) -> list[ast.stmt]:
    """Return the import statements of a module that are in no function or block."""
    body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("program", ["train", "eval", "serve"])
def test_programs_start_without_libraries_that_take_seconds(program):
    """Check that torchrec, matplotlib, scipy.stats and checkpoints are imported inside the functions that use them.

    A program that only reports an error must not wait for them.
    """
    slow = {"torchrec", "matplotlib", "scipy.stats", "torch.distributed.checkpoint", "torch.distributed.tensor"}
    reached, waiting = set(), {program}
    while waiting:
        module = waiting.pop()
        reached.add(module)
        for node in first_imports(module):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module}
            wrong = [name for name in names for library in slow if f"{name}.".startswith(f"{library}.")]
            assert not wrong, f"{module} imports {wrong}"
            waiting |= imports(ast.Module([node], [])) - reached
