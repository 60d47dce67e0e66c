"""Check an attention kind from outside the package, named by its path: training, evaluation, serving and errors."""

import json
import re
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import yaml

import eval as evaluation
import train
from data.errors import ConfigError
from serving import ServingError
from tests.serving.plain import item_ids, make_config, make_model, serve
from training.config import as_yaml, load_config

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "synthetic-hstu.yaml"
PATH = "my_package.my_module:LastAttention"
SMALL = ["data.synthetic={num_users: 200, num_items: 80, mean_length: 15}", "model.max_seq_len=20", "threads=1"]
SMALL += ["model.embedding_dim=16", "train.epochs=1", "train.batch_size=16", "device=cpu"]
MODULE = '''
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from models.attention.contract import AttentionKind
from models.attention.dense import DenseAttention


class LastAttention(AttentionKind):
    """A learned mixture of each token and the one before it."""

    class Config(AttentionKind.Config):
        kind: Literal["last"]
        share: float = Field(0.5, ge=0, le=1)

    def __init__(self, config, sizes):
        super().__init__(config, sizes)
        self.gate = nn.Parameter(torch.full((sizes.num_heads, 1), config.share))

    def forward(self, x, q, k, v, batch):
        before = v.roll(1, 0).where(batch.positions[:, None, None] > 0, 0)
        return v * self.gate + before * (1 - self.gate), {}


class MyDense(DenseAttention):
    """Dense attention with another default: it computes what dense computes."""

    class Config(DenseAttention.Config):
        kind: Literal["my_dense"]
        scale: float = 0.5


class Doubled(DenseAttention):
    """Twice dense attention, which the `paged` of dense does not compute."""

    class Config(DenseAttention.Config):
        kind: Literal["doubled"]

    def forward(self, x, q, k, v, batch):
        out, aux = super().forward(x, q, k, v, batch)
        return 2 * out, aux


class Alien:
    pass


class NoConfig(AttentionKind):
    Config = dict


a_function = len
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put my_package on Python's path; the fixture's `forget` makes this process as one that never imported it."""
    folder = tmp_path / "code" / "my_package"
    folder.mkdir(parents=True)
    (folder / "my_module.py").write_text(MODULE)
    (folder / "broken.py").write_text("raise ValueError('of the module itself')")
    (folder / "needy.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path / "code")

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
            del sys.modules[name]

    yield forget
    forget()


def test_it_trains_and_evaluates_from_its_folder(tmp_path, package):
    settings = [*SMALL, f"model.attention.kind={PATH}", "model.attention.share=0.25"]
    run = tmp_path / "run"
    assert train.main([str(CONFIG), *settings, "--run", str(run)]) == 0
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["model"]["attention"] == [{"kind": PATH, "share": 0.25}]
    package()
    assert evaluation.main([str(run)]) == 0
    result, again = (json.loads((run / name).read_text()) for name in ("result.json", "eval-test.json"))
    assert again["model"] == result["model"] and again["model"]["history"]["HR@10"] > 0


def recommender(attention):
    config = make_config(attention)
    return serve(config, make_model(config))


@pytest.mark.parametrize("name", ["LastAttention", "Doubled"])
def test_service_error_has_its_name(package, name):
    path = f"my_package.my_module:{name}"
    with pytest.raises(ServingError, match=rf"^layer 0 \({path}\) cannot be served: "):
        recommender({"kind": path})


def test_a_service_serves_a_subclass_as_its_base(package):
    kinds = "my_package.my_module:MyDense", "dense"
    served, dense = (recommender({"kind": kind, "scale": 0.5, "window_size": 3}) for kind in kinds)
    items = item_ids()
    for one in (served, dense):
        one.append([1] * len(items), items, range(0, 1000 * len(items), 1000))
    answers = [one.score([1], items[None], 10**6) for one in (served, dense)]
    np.testing.assert_array_equal(*answers)


def test_it_does_not_support_parallel_context(package):
    with pytest.raises(ConfigError, match=r"kind=my_package\.my_module:LastAttention supports neither ring nor heads"):
        load_config(CONFIG, [f"model.attention.kind={PATH}", "parallel.context=2"])


def test_the_example_of_contributing_trains(tmp_path, package):
    page = CONFIG.parents[1] / "CONTRIBUTING.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    (source,) = [block for block in blocks if "class WindowAttention" in block]
    (tmp_path / "code" / "my_package" / "window.py").write_text(source)
    run = tmp_path / "run"
    kind = "model.attention.kind=my_package.window:WindowAttention"
    assert train.main([str(CONFIG), *SMALL, kind, "--run", str(run)]) == 0
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("gate_spread" in json.dumps(line) for line in losses)
    with pytest.raises(ConfigError, match="window_size=30 is over"):
        load_config(CONFIG, [*SMALL, kind, "model.attention.window_size=30"])


def test_it_mixes_with_other_kinds_in_a_list(package, tmp_path):
    config = load_config(CONFIG, [f"model.attention=[{{kind: dense}}, {{kind: '{PATH}', share: 0.75}}]"])
    assert [(one.kind, getattr(one, "share", None)) for one in config.model.attention] == [
        ("dense", None),
        (PATH, 0.75),
    ]
    (tmp_path / "saved.yaml").write_text(as_yaml(config))
    assert load_config(tmp_path / "saved.yaml") == config
    changed = load_config(tmp_path / "saved.yaml", [f"model.attention.0.kind={PATH}"])
    assert [one.share for one in changed.model.attention] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ".kind=my_package.other:X",
            "kind: my_package.other:X: no module my_package.other; its folder must be in PYTH",
        ),
        (
            ".kind=no_package.other:X",
            "kind: no_package.other:X: no module no_package; its folder must be in PYTHONPATH",
        ),
        (".kind=my_package.my_module:X", "kind: my_package.my_module:X: module my_package.my_module has no class X"),
        (".kind=my_package.my_module:a_function", "module my_package.my_module has no class a_function"),
        (
            ".kind=my_package.my_module:Alien",
            "its class does not derive from AttentionKind (models.attention.contract)",
        ),
        (
            ".kind=my_package.my_module:NoConfig",
            "its Config does not derive from AttentionKind.Config (models.attention.contract)",
        ),
        (".kind=my_package.my_module", "kind: unknown attention kind my_package.my_module, known: dense, "),
        (".kind=../my_module:X", "kind: unknown attention kind ../my_module:X, known: dense, "),
        (f"={{kind: '{PATH}', shar: 0.5}}", "shar: unknown key, did you mean share?"),
        (f"={{kind: '{PATH}', share: 2.0}}", "share: input should be less than or equal to 1"),
    ],
)
def test_errors_are_one_line(package, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(CONFIG, ["model.attention" + override])
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("module", "reason"), [("broken", "of the module itself"), ("needy", "a_module_that_is_not_")])
def test_error_inside_the_module_has_its_traceback(package, module, reason):
    with pytest.raises(ImportError, match=f"importing my_package.{module} failed: .*{reason}") as error:
        load_config(CONFIG, [f"model.attention.kind=my_package.{module}:X"])
    files = [Path(frame.filename).name for frame in traceback.extract_tb(error.value.__cause__.__traceback__)]
    assert files[-1] == f"{module}.py"
