"""Check the examples of the API's docstrings and pages: every public name has one, and each prints what it shows."""

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

import hstu_sparse
from tests.experiments.test_fitting import CONFIG, orders

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTED = re.compile(r"^::: (\S+)((?:\n    .*)*)", re.MULTILINE)
METHODS = (property, cached_property, classmethod, staticmethod)
OTHERS = [
    "hstu_sparse.core.jagged.offsets_from_lengths",
    "hstu_sparse.core.jagged.sequence_ids",
    "evaluation.ranking_metrics.ranking_metrics",
    "training.strict_yaml.parse_yaml",
    "data.filtering.k_core",
    "data.filtering.offsets_of",
    "training.config.merge",
]
API = sorted((ROOT / "docs").glob("api_*.md"))
# Operator -> its options on the page that documents it, if any.
OPERATORS = {f"hstu_sparse.{name}": "" for name in hstu_sparse.__all__}
OPERATORS |= {
    path: options
    for page in sorted((ROOT / "docs").glob("*.md"))
    for path, options in DOCUMENTED.findall(page.read_text())
    if path in OPERATORS
}
SLOW = ("experiments.compare", "experiments.Comparison")  # they start processes; the second uses the first one's runs


class Name(NamedTuple):
    """A public name: its path, its object, and the paths of its parents, whose examples may cover it."""

    path: str
    documented: object
    parents: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def in_class(self) -> bool:
        return any(inspect.isclass(resolve(parent)) for parent in self.parents)

    @property
    def text(self) -> str:
        return inspect.getdoc(self.documented) or ""

    @property
    def examples(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.text)


def resolve(path: str) -> object:
    """Return a module, or an object in a module, by its dotted path."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            documented: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            documented = getattr(documented, name)
        return documented
    raise ModuleNotFoundError(path)


def members(documented: object, listed: list[str] | None) -> Iterator[tuple[str, object]]:
    """Yield the public functions, methods and properties of a module or class; if `listed` is given, only these."""
    if listed is not None:
        yield from ((name, inspect.getattr_static(documented, name)) for name in listed)
    elif inspect.ismodule(documented):
        for name, member in vars(documented).items():
            if getattr(member, "__module__", "") == documented.__name__ and not name.startswith("_"):
                yield name, member
    else:
        inherited = {name for base in documented.__mro__[1:] for name in vars(base)}
        for name, member in vars(documented).items():
            public = not name.startswith("_") and name not in inherited
            if public and (inspect.isfunction(member) or isinstance(member, METHODS)):
                yield name, member


def names_of(path: str, options: str = "") -> Iterator[Name]:
    """Yield the names that `::: path` documents in a page: the name and its members, or the members in the options."""
    documented = resolve(path)
    chosen = yaml.safe_load(options)["options"] if options.strip() else {}
    yield Name(path, documented)
    if inspect.ismodule(documented) or inspect.isclass(documented):
        for name, member in members(documented, chosen.get("members")):
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            yield Name(f"{path}.{name}", member, (path,))
            if inspect.ismodule(documented) and inspect.isclass(member):
                yield from (Name(f"{path}.{name}.{n}", m, (f"{path}.{name}",)) for n, m in members(member, None))


def names_on(page: Path) -> list[Name]:
    return [name for path, options in DOCUMENTED.findall(page.read_text()) for name in names_of(path, options)]


def without_example(names: list[Name]) -> list[str]:
    """Return the names that have no docstring, or no example in it or in their class's docstring."""
    by_path = {name.path: name for name in names}
    missing = [f"{name.path}: no docstring" for name in names if not name.text]
    for name in names:
        word = re.compile(rf"\b{name.name}\b")
        shown = any(word.search(one.source) for parent in name.parents for one in by_path[parent].examples)
        is_module = inspect.ismodule(name.documented)
        if not (name.examples or shown or is_module):
            missing.append(f"{name.path}: no example")
    return missing


def check(place: str, text: str, names: dict) -> dict:
    """Run the examples of a text; return the names that they define."""
    example = doctest.DocTestParser().get_doctest(text, names, place, None, None)
    torch.manual_seed(0)
    report: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=options).run(example, out=report.append, clear_globs=False)
    assert not report, "".join(report)
    return example.globs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a run with a feature of its items, for examples that need one."""
    import polars as pl

    from experiments import fit

    cache = {"cache_dir": str(tmp_path_factory.mktemp("cache"))}
    brands = pl.DataFrame({"sku": [f"s{n}" for n in range(9)], "brand": ["a", "b", "c"] * 3})
    folder = tmp_path_factory.mktemp("runs") / "shop"
    return fit(orders(), items=brands, config=CONFIG, run=folder, quiet=True, train={"epochs": 1}, data=cache)


@pytest.mark.parametrize("path", [*OPERATORS, *OTHERS])
def test_the_example_of_an_operator(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    names = list(names_of(path, OPERATORS.get(path, "")))
    assert not (missing := without_example(names)), missing
    for name in names:
        known = {"torch": torch, "hstu_sparse": hstu_sparse, names[0].name: names[0].documented}
        check(name.path, name.text, known)


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_every_name_of_an_api_page_has_an_example(page):
    names = names_on(page)
    assert names and not (missing := without_example(names)), missing


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_the_examples_of_an_api_page(tmp_path, monkeypatch, trained, page):
    """Run the page's examples, then those of its docstrings, which may use the names that the page defines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    text = page.read_text()

    def fixtures():
        return {"run": trained, "recommender": trained.recommender(cache_bytes=2**20), "torch": torch}

    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    left = check(page.name, "\n".join(blocks), fixtures())
    names = names_on(page)
    known = {name.name: name.documented for name in names if not name.in_class}
    for name in names:
        if name.examples and name.path not in SLOW:
            check(name.path, name.text, known | left | fixtures())


@pytest.mark.slow
def test_the_examples_of_comparing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left: dict = {"compare": resolve("experiments.compare")}
    for path in SLOW:
        left = check(path, inspect.getdoc(resolve(path)) or "", left)
