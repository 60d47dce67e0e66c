"""Test `compare` from Python: the result of compare.py, continued in its folder, shown in a notebook."""

from pathlib import Path

import pytest

from data.errors import ConfigError
from experiments import compare, runs
from tests.experiments.test_fitting import CONFIG, orders
from tests.programs.tiny import run_here

SETTINGS = {"dense": {}, "small": {"model": {"embedding_dim": 4}}}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Run jobs in this process; return the list of their names."""
    monkeypatch.chdir(tmp_path)
    names = []

    def launch(job, parallel):
        names.append(job.name)
        return run_here(job)

    monkeypatch.setattr(runs, "launch", launch)
    return names


def test_settings_are_compared_and_shown(launched):
    options = {"config": CONFIG, "out": "compared", "quiet": True, "train": {"epochs": 1}}
    comparison = compare(orders(), SETTINGS, seeds=[1], baseline="dense", **options)
    assert launched == [f"{name}, seed 1" for name in SETTINGS]
    settings = comparison.result["settings"]
    assert [setting["name"] for setting in settings] == [*SETTINGS]
    assert settings[1]["changes"] == ["model.embedding_dim: 8 -> 4"]
    assert comparison.folder == Path("compared").absolute()
    first = str(comparison).splitlines()[0]
    assert first.startswith("dense: NDCG@10 0.") and first.endswith("1 seed, 1.000 of dense")
    assert "&lt;svg" in comparison._repr_html_()
    # The same call with one more seed trains only the missing runs.
    more = compare(orders(), SETTINGS, seeds=[1, 2], **options)
    assert launched[2:] == [f"{name}, seed 2" for name in SETTINGS]
    assert [len(setting["runs"]) for setting in more.result["settings"]] == [2, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense": {}}, "plan: expected at least two settings"),
        ({"a": {}, "b": {"model": {"num_heds": 3}}}, r"plan: settings\.b: config: model\.num_heds: unknown key"),
        ({"a": {}, "b": {"seed": 3}}, "seed: a setting cannot have a seed"),
    ],
)
def test_invalid_settings(launched, settings, message):
    with pytest.raises(ConfigError, match=message):
        compare(orders(), settings, config=CONFIG, quiet=True)
    assert not launched
