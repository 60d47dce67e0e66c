"""A task from outside the package, named by its path: the example of CONTRIBUTING.md, in all programs."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import compare
import eval as evaluation
import serve
import train
from data.errors import ConfigError
from serving import Recommender, ServingError
from tests.programs.tiny import tiny
from training.config import RunConfig, as_yaml, load_config

ROOT = Path(__file__).resolve().parents[3]
KIND = "my_tasks.parity:Parity"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with my_tasks/, run.yaml and two finished runs of the task, `one` and `two`."""
    folder = tmp_path_factory.mktemp("outside")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    (source,) = [block for block in blocks if "class Parity" in block]
    (folder / "my_tasks").mkdir()
    (folder / "my_tasks" / "parity.py").write_text(source)
    (folder / "my_tasks" / "wrong.py").write_text("class Alien: ...\n")
    (folder / "run.yaml").write_text(tiny() + f"task: {{kind: '{KIND}', weight: 2.0}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for seed, name in enumerate(("one", "two")):
            options = ["--run", str(folder / name), f"seed={seed}", f"data.cache_dir={folder / 'cache'}"]
            assert train.main([str(folder / "run.yaml"), *options]) == 0
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "my_tasks"]:
        del sys.modules[name]


def test_it_trains_and_evaluates(place):
    run = place / "one"
    config = load_config(run / "config.yaml")
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == {"kind": KIND, "weight": 2.0}
    assert RunConfig.model_validate(yaml.safe_load(as_yaml(config))) == config
    result = json.loads((run / "result.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < result["model"]["accuracy"] <= 1 and [line["accuracy"] for line in lines][1:]
    assert "| model | 0." in (run / "report.md").read_text()
    assert evaluation.main([str(run), "--split", "valid"]) == 0
    assert json.loads((run / "eval-valid.json").read_text())["model"]["accuracy"] == result["best"]


def test_it_resumes(place, tmp_path):
    """A run that is resumed for another epoch has the losses of one that was started with as many epochs."""
    options = [str(place / "run.yaml"), f"data.cache_dir={place / 'cache'}", "eval.test=false"]
    assert train.main([*options, "train.epochs=1", "--run", str(tmp_path / "short")]) == 0
    assert train.main(["--resume", str(tmp_path / "short"), "train.epochs=2"]) == 0
    assert train.main([*options, "--run", str(tmp_path / "long")]) == 0
    first, second = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("short", "long")
    )
    assert len(first) == 2 and first == second


def test_it_is_compared(place, tmp_path, capsys):
    runs = [f"{name}={place / name}" for name in ("one", "two")]
    assert compare.main(["--runs", *runs, "--out", str(tmp_path / "out"), "--no-speed"]) == 0
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert rows["metric"] == "accuracy" and "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (evaluation, ["--predict", "out.csv"], f"task.kind={KIND} does not rank items: --predict, --recommend, "),
        (evaluation, ["--export-items", "out"], f"task.kind={KIND} does not rank items: "),
        (evaluation, ["--sampled", "10"], f"task.kind={KIND} does not rank items: "),
        (evaluation, ["--serve"], f"task.kind={KIND} cannot be served"),
        (serve, [], f"task.kind={KIND} cannot be served"),
    ],
)
def test_errors_of_programs_have_its_name(place, capsys, program, options, message):
    assert program.main([str(place / "one"), *options]) == 2
    assert message in capsys.readouterr().err


def test_service_error_has_its_name(place):
    with pytest.raises(ServingError, match=f"^task.kind={KIND} cannot be served"):
        Recommender.load(place / "one")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.kind=bce", f"loss: not supported by task.kind={KIND}, leave it out"),
        ("model.head={kind: mol}", f"model.head: not supported by task.kind={KIND}, leave it out"),
        ("train.augment={drop: 0.1}", f"train.augment: not supported by task.kind={KIND}, leave it out"),
        ("parallel.data=2", f"parallel.data: not supported by task.kind={KIND}, leave it out"),
        ("parallel.embedding=row_wise", f"parallel.embedding: not supported by task.kind={KIND}, leave it out"),
        (
            "data.protocol=last_tenth",
            f"data.protocol=last_tenth: task.kind={KIND} expects one of leave_one",
        ),
        (
            "data.format=recall",
            f"task.kind={KIND} does not support data.format=recall: both must be recall, or neither",
        ),
        ("eval.best_metric=NDCG@10", "eval.best_metric: NDCG@10 is none of accuracy"),
        ("task.wieght=2.0", "task.wieght: unknown key, did you mean weight?"),
        ("task.weight=0.0", "task.weight: input should be greater than 0"),
        ("task.kind=my_tasks.parity:Other", "module my_tasks.parity has no class Other"),
        ("task.kind=my_tasks.other:Parity", "no module my_tasks.other; its folder must be in PYTHONPATH"),
        ("task.kind=my_tasks.wrong:Alien", "its class does not derive from Task (models.tasks.contract)"),
        ("task.kind=parity", "unknown task parity, known: retrieval, ranking, recall, or a path like my_module:MyTask"),
    ],
)
def test_invalid_configurations_raise(place, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(place / "run.yaml", [override])
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_another_kind_has_its_default_options(place):
    config = load_config(place / "run.yaml", ["task.kind=retrieval"])
    assert config.task.model_dump() == {"kind": "retrieval"}
