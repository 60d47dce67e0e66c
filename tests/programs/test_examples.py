"""Docstrings and pages of the API carry examples: every public operator has one, and each gives what it says."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import hstu_sparse
from tests.experiments.test_fitting import CONFIG, orders

ROOT = Path(__file__).resolve().parents[2]

TYPES = {"PageFormat", "PagePool", "PoolFull", "RingPlan", "RotateKVCache"}  # described where they are used
OTHERS = [
    "hstu_sparse.core.jagged:offsets_from_lengths",
    "hstu_sparse.core.jagged:sequence_ids",
    "evaluation.ranking_metrics:ranking_metrics",
    "training.strict_yaml:parse_yaml",
    "data.filtering:k_core",
    "data.filtering:offsets_of",
    "training.config:merge",
    "training.meta_weights:load_meta_weights",
]
OF_RUNS = [
    "experiments.fitting:fit",
    "serving:Recommender.item_vectors",
    "serving:Recommender.similar",
    "serving:Recommender.explain",
]
API = sorted((ROOT / "docs").glob("api_*.md"))
PUBLIC = [f"hstu_sparse:{name}" for name in hstu_sparse.__all__ if name not in TYPES]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, for examples that need one."""
    from experiments import fit

    cache = {"cache_dir": str(tmp_path_factory.mktemp("cache"))}
    folder = tmp_path_factory.mktemp("runs") / "shop"
    return fit(orders(), config=CONFIG, run=folder, quiet=True, train={"epochs": 1}, data=cache)


def check(place: str, text: str, names: dict) -> None:
    example = doctest.DocTestParser().get_doctest(text, names, place, None, None)
    assert example.examples, "no example"
    torch.manual_seed(0)
    report: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    doctest.DocTestRunner(optionflags=options).run(example, out=report.append)
    assert not report, "".join(report)


def check_docstring(place: str, names: dict) -> None:
    module, _, path = place.partition(":")
    documented: object = importlib.import_module(module)
    for name in path.split("."):
        documented = getattr(documented, name)
    check(place, inspect.getdoc(documented) or "", {"torch": torch, path: documented} | names)


@pytest.mark.parametrize("place", [*PUBLIC, *OTHERS])
def test_the_example_gives_what_it_says(place):
    check_docstring(place, {"hstu_sparse": hstu_sparse})


@pytest.mark.parametrize("place", OF_RUNS)
def test_an_example_with_a_run(tmp_path, monkeypatch, trained, place):
    monkeypatch.chdir(tmp_path)
    check_docstring(place, {"recommender": trained.recommender()})


@pytest.mark.slow
def test_the_example_of_compare(tmp_path, monkeypatch):
    """Its runs are processes."""
    monkeypatch.chdir(tmp_path)
    check_docstring("experiments.comparing:compare", {})


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_the_examples_of_an_api_page(tmp_path, monkeypatch, trained, page):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    text = page.read_text()
    if ">>>" in text:
        blocks = text.split("```python\n")[1:]
        examples = "\n".join(block.partition("```")[0] for block in blocks)
        check(page.name, examples, {"run": trained, "recommender": trained.recommender()})
