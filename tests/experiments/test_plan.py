"""Test plans of comparisons and their errors."""

import pytest

from data.errors import ConfigError
from experiments.plan import load_plan

PLAN = """
base: configs/synthetic-hstu.yaml
seeds: [1, 2]
settings:
  dense: {}
  bsa: {model.attention.kind: bsa, model.attention.block_size: 8, train.lr: 1e-5}
quick: {train.epochs: 1}
"""


def planned(tmp_path, old="", new="", **options):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace(old, new) if old else PLAN)
    return load_plan(path, **options)


def test_plan(tmp_path):
    plan = planned(tmp_path)
    assert plan.seeds == [1, 2] and plan.baseline == "dense" and plan.names == ["dense", "bsa"]
    bsa = plan.settings["bsa"]
    assert bsa.model.attention[0].block_size == 8 and bsa.train.lr == 1e-5 and bsa.name == "bsa"
    assert plan.settings["dense"].train.epochs == 6
    quick = planned(tmp_path, quick=True, seeds=[7], baseline="bsa", runs={"old": [tmp_path]})
    assert quick.settings["dense"].train.epochs == 1 and quick.seeds == [7] and quick.names[0] == "bsa"
    other = planned(tmp_path, "dense: {}", "dense: {base: configs/synthetic-hstu.yaml, model.num_layers: 1}")
    assert other.settings["dense"].model.num_layers == 1
    common = planned(
        tmp_path, "seeds:", "common: {train.lr: 1e-4, train.epochs: 3}\nseeds:", overrides=["train.epochs=2"]
    )
    assert [setting.train.lr for setting in common.settings.values()] == [1e-4, 1e-5]
    assert {setting.train.epochs for setting in common.settings.values()} == {2}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("settings:", "setings:", "plan.yaml: setings: unknown key, did you mean settings?"),
        ("seeds: [1, 2]", "seeds: [1, x]", "plan.yaml: seeds.1: input should be a valid integer"),
        ("seeds: [1, 2]", "seeds: [1, 1]", "plan.yaml: seeds: 1 is given twice"),
        ("seeds: [1, 2]", "seeds: []", "plan.yaml: seeds: list should have at least 1 item"),
        ("seeds: [1, 2]", "baseline: dens", "plan.yaml: baseline: expected one of dense, bsa, got dens"),
        ("  dense: {}\n", "", "expected at least two settings or runs to compare, got 1"),
        ("dense: {}", "../x: {}", "settings.../x.[key]: string should match pattern"),
        ("dense: {}", "report.html: {}", "settings.report.html: this name is reserved for a file"),
        ("dense: {}", "dense: {seed: 3}", "settings.dense: seed: a setting cannot have a seed"),
        ("dense: {}", "dense: 3", "settings.dense: input should be a valid dictionary"),
        ("base: configs", "base: nowhere", "settings.dense: nowhere/synthetic-hstu.yaml: No such file"),
        ("base: configs/synthetic-hstu.yaml", "", "settings.dense: base: missing"),
        ("block_size", "blok_size", "model.attention.blok_size: unknown key, did you mean block_size?"),
        ("train.lr", "data.min_item_events: 3, train.lr", "settings.bsa: data.min_item_events: 1 -> 3"),
        (
            "train.lr",
            "data.protocol: all, eval.patience: null, train.lr",
            "settings.bsa: data.protocol=all has no held-out events to compare settings on",
        ),
        ("train.lr", "eval.filter_seen: none, train.lr", "settings.bsa: eval.filter_seen: auto -> none"),
        (PLAN, "[]", "plan.yaml: expected a mapping"),
        ("quick: {train.epochs: 1}\n", "", "--quick: the plan has no section quick"),
        (
            "quick: {",
            "quick: {train.epoch: 1, ",
            "settings.dense: configs/synthetic-hstu.yaml: train.epoch: unknown key",
        ),
    ],
)
def test_errors_of_a_plan(tmp_path, old, new, message):
    with pytest.raises(ConfigError) as raised:
        planned(tmp_path, old, new, quick=True)
    assert any(message in line for line in str(raised.value).split("\n")), raised.value


def test_ranking_runs_with_other_layouts_are_comparable_and_with_other_actions_not():
    base = "configs/synthetic-ranking.yaml"
    targets = {"task.layout": "targets", "task.hidden_dim": 4}
    weighted = {"task.actions": [{"name": "liked", "at_least": 1, "weight": 2}]}
    plan = load_plan({"base": base, "settings": {"interleaved": {}, "targets": targets, "weighted": weighted}})
    assert plan.settings["targets"].task.layout == "targets"
    other = {"task.actions": [{"name": "liked", "at_least": 2}]}
    with pytest.raises(ConfigError, match="settings of a comparison must be evaluated on the same events"):
        load_plan({"base": base, "settings": {"interleaved": {}, "other": other}})
