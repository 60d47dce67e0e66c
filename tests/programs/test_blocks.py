"""Check that every shell and Python block of the pages runs in a test, and run those of the services and programs.

tests/programs/test_docs.py runs the blocks of README and of the pages for beginners.
"""

import contextlib
import re
import shutil

import numpy as np
import pytest
import torch

from data.features.features import Feature, feature_of
from data.features.vocabulary import FeatureVocabulary, KnownFeature
from data.vocabulary import Vocabulary
from serving import Recommender, ServingOptions
from tests.programs.test_docs import BLOCK, PAGES, REPLACED, ROOT, checkout, run_blocks  # noqa: F401  a fixture
from tests.serving.plain import NUM_ACTIONS, NUM_ITEMS, make_config
from training.run import build_model

# Page -> the test that runs its blocks, or that compares them with code that runs.
TESTS = {
    "README": "programs/test_docs.py::test_readme_runs",
    "CONTRIBUTING": "models/tasks/test_outside_task.py, models/attention/test_outside_kind.py",
    "bias": "programs/test_docs.py::test_the_page_quotes_the_code",
    "bsa_kernel": "programs/test_docs.py::test_the_page_quotes_the_code",
    "dense_kernel": "programs/test_docs.py::test_the_page_quotes_the_code",
    "getting_started": "programs/test_docs.py::test_getting_started_runs",
    "python": "programs/test_docs.py::test_the_page_for_python_runs",
    "start_research": "programs/test_docs.py::test_ten_minutes_for_a_researcher",
    "week": "programs/test_docs.py::test_the_week_runs",
}
TESTS |= dict.fromkeys(["api_attention", "api_data"], "programs/test_examples.py")
OPERATORS = ["indexer", "operators", "paged_attention", "ring", "start_kernels"]
TESTS |= dict.fromkeys(OPERATORS, "programs/test_docs.py::test_examples_of_operators_run")
PROGRAMS = ["evaluation", "serving", "training", "tuning", "updating"]
TESTS |= dict.fromkeys(PROGRAMS, "programs/test_blocks.py::test_the_page_of_a_program_runs")
# (Page, begin of a block) of those that do not run as they stand -> the test of the same, or what they need.
OTHERS = {
    ("CONTRIBUTING", "make setup"): "the set-up, which CI runs",
    ("CONTRIBUTING", "make test "): "the test suite",
    ("CONTRIBUTING", "git worktree add"): "the test suite and tests/programs/same_bits.py",
    ("CONTRIBUTING", "python benchmarks/run.py"): "benchmarks: they need a GPU",
    (
        "comparing",
        "python compare.py configs/compare/attention-kinds.yaml",
    ): "programs/test_compare.py",
    ("comparing", "python compare.py configs/compare/ml-1m-kinds.yaml"): "needs MovieLens 1M and a GPU",
    ("comparing", "python compare.py configs/compare/long-memory.yaml"): "needs a GPU",
    ("production", "pip install"): "serving/test_replicas.py",
    ("production", "recommender.recommend("): "programs/test_blocks.py::test_blocks_of_a_service_run",
    ("retrieval", "python train.py configs/default.yaml"): "needs data; models/tasks/test_repeats.py",
    ("indexer", "python benchmarks"): "needs a GPU",
    ("ranking", "python train.py configs/ml-100k-ranking.yaml"): "needs MovieLens 100K",
    ("ring", "torchrun"): "programs/test_ring_train.py",
    ("scaling", "torchrun"): "programs/test_scale.py",
    ("scaling", "python train.py configs/ml-1m-hstu-large.yaml --plan"): "training/planning/test_plan.py",
    ("serving", "recommender.add_users("): "programs/test_blocks.py::test_blocks_of_a_service_run",
    ("vectors", "python examples/vectors.py"): "needs scikit-learn; programs/test_started.py has its errors",
    ("vectors", "import numpy as np"): "needs sentence_transformers and its weights",
    ("vectors", "python eval.py"): "serving/test_new_items.py",
    ("vectors", "recommender.add_items("): "programs/test_blocks.py::test_blocks_of_a_service_run",
}
INDENTED_COMMAND = re.compile(r"\n\n {4}(?:python|torchrun|curl|make) .*")  # a block, but none of the above


def text_of(page: str) -> str:
    """Return the text of a page."""
    return next(file for file in PAGES if file.stem == page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return (language, text) of the shell and Python blocks of a page."""
    return [(language, text) for language, _, text in BLOCK.findall(text_of(page)) if language != "yaml"]


def unlisted(page: str, blocks: list[tuple[str, str]]) -> list[str]:
    """Return the blocks that no test runs."""
    others = tuple(begin for name, begin in OTHERS if name == page)
    tested = {"python", "sh"} if page in TESTS else set()
    if page in {*OPERATORS, "CONTRIBUTING"}:
        tested = {"python"}
    return [text for language, text in blocks if language not in tested and not text.startswith(others)]


@pytest.mark.parametrize("page", [page.stem for page in PAGES if page.parent.name != "configs"])
def test_every_block_runs_in_a_test(page):
    assert not (listed := unlisted(page, blocks_of(page))), listed
    assert not (indented := INDENTED_COMMAND.findall(text_of(page))), indented


def test_a_block_that_no_test_runs_is_found():
    assert INDENTED_COMMAND.search("Run it:\n\n    python train.py CONFIG\n")
    assert unlisted("production", [("sh", "python serve.py runs\n")]) == ["python serve.py runs\n"]


def test_the_lists_of_blocks_are_true():
    """Check that the tests and blocks that the lists name exist."""
    for page, begin in OTHERS:
        assert any(text.startswith(begin) for _, text in blocks_of(page)), begin
    for page, test in TESTS.items():
        assert blocks_of(page), page
        for file in re.findall(r"[\w/]+\.py", test):
            text = (ROOT / "tests" / file).read_text()
            assert f"def {test.rpartition('::')[2]}(" in text or "::" not in test, test
    for reason in OTHERS.values():
        for file in re.findall(r"(?<![\w/])(?:programs|serving|models|training|experiments)/[\w/]+\.py", reason):
            assert (ROOT / "tests" / file).exists(), file


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page of serve.py calls curl")
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_page_of_a_program_runs(page, checkout):  # noqa: F811
    if page == "updating":  # it goes on from the pages of a shop
        blocks = BLOCK.findall((ROOT / "docs/getting_started.md").read_text())
        (orders,) = (text for language, _, text in blocks if language == "python" and "orders.csv" in text)
        (config,) = (text for _, title, text in blocks if title == "shop.yaml")
        (checkout / "shop.yaml").write_text(config)
        with contextlib.chdir(checkout):
            exec(compile(orders, "getting_started", "exec"), {})
        new = "".join(f"c{n},s1{n},175000000{n}\n" for n in range(5))
        (checkout / "until-day-8.csv").write_text((checkout / "orders.csv").read_text() + new)
    few = "train.epochs=1 data.synthetic.num_users=200"
    short = [("synthetic-hstu.yaml --out", f"synthetic-hstu.yaml {few} --out"), ("<< 30", "<< 20")]
    short += [("--trials 20", f"--trials 2 {few}"), ("shop.yaml data", "shop.yaml train.epochs=1 data")]
    skipped = tuple(begin for name, begin in OTHERS if name == page)
    run_blocks(f"docs/{page}.md", checkout, [*REPLACED, *short], skipped)


def recommender_of(item_ids: np.ndarray, features: FeatureVocabulary, task: str = "retrieval") -> Recommender:
    """Return a recommender of random weights whose run has these features."""
    config = make_config(task=task, max_seq_len=20)
    known = Vocabulary(item_ids, NUM_ACTIONS if task == "ranking" else None, features=features)
    model = build_model(config, known, torch.device("cpu")).eval()
    return Recommender(model, config, known, options=ServingOptions(cache_bytes=2**22))


def categories(name: str, values: list[str]) -> Feature:
    """Return a feature of items that has these values in turn."""
    return feature_of("items", name, "category", NUM_ITEMS, np.arange(NUM_ITEMS), np.resize(values, NUM_ITEMS))


def run(page: str, begin: str, **names) -> None:
    """Run the block of a page that begins like this."""
    (block,) = [text for _, text in blocks_of(page) if text.startswith(begin)]
    exec(compile(block, page, "exec"), names)


def test_blocks_of_a_service_run():
    """Run the blocks that filter lists, describe users and events, and add items."""
    items = (categories("category", ["shoes", "hats"]), categories("colour", ["red"]), categories("brand", ["a", "b"]))
    recommender = recommender_of(np.arange(NUM_ITEMS), FeatureVocabulary((), items=items))
    recommender.append([1, 2], [3, 4], [10, 20])
    run("production", "recommender.recommend(", recommender=recommender, users=[1, 2], items_in_stock=[1, 3, 5])
    assert set(recommender.recommend([1], 10, filters=["stock"])[0][0].tolist()) <= {1, 3, 5, -1}  # -1: no item

    known = (
        KnownFeature("users", "country", "category", np.array(["de"])),
        KnownFeature("users", "tags", "list", np.array(["new", "pro"])),
        KnownFeature("events", "device", "category", np.array(["phone", "tv"]), "before"),
        KnownFeature("events", "watched", "number", np.array([10.0, 60.0])),
    )
    names = np.array([f"i{n}" for n in range(NUM_ITEMS)])
    run("serving", "recommender.add_users(", recommender=recommender_of(names, FeatureVocabulary(known), "ranking"))

    one_each = np.arange(NUM_ITEMS + 1)
    title = Feature("items", "title", "vector", np.eye(NUM_ITEMS, 3, dtype=np.float16), one_each[:-1], one_each)
    brand = categories("brand", ["acme"])
    rows = (one_each, np.ones(NUM_ITEMS, np.int64))
    known = (KnownFeature("items", "brand", "category", brand.values),)
    features = FeatureVocabulary(known, (), (rows,), np.ones(NUM_ITEMS, bool), items=(brand,), vectors=(title,))
    recommender = recommender_of(names, features)
    recommender.append(["u"], ["i1"], [10])
    run("vectors", "recommender.add_items(", recommender=recommender)
    assert "sku-9" in recommender.recommend(["u"], NUM_ITEMS)[0][0].tolist()
