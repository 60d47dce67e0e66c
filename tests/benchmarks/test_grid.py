"""Test benchmarks/grid.py: worker processes that train the runs of comparisons one after another."""

import json

import pytest

import train
from benchmarks import grid

PLAN = """
base: configs/synthetic-hstu.yaml
seeds: [3]
common:
  data.synthetic: {num_users: 60, num_items: 50, mean_length: 10}
  model.max_seq_len: 20
  train.epochs: 2
  eval.every: 0
  eval.patience: null
  device: cpu
  threads: 1
settings:
  dense: {}
  diverging: {train.lr: 1.0e+30}
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


@pytest.mark.slow  # some ten seconds for each attempt at a run
def test_runs_are_those_of_the_program_and_are_not_repeated(plan, tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(plan), "--out", str(out), "--seconds", "3600", "--workers", "1", "model.num_layers=1"]
    assert grid.main([*command, "--settings", "dense", "--valid", "3"]) == 0
    assert "2 runs finished, 0 remain" in capsys.readouterr().out
    assert grid.main(command) == 1
    printed = capsys.readouterr().out
    assert printed.count("diverging, seed 3: ") == grid.ATTEMPTS and "0 runs finished, 1 remain" in printed
    result = json.loads((out / "plan/dense/seed-3/result.json").read_text())
    assert train.main([str(out / "plan/dense/setting.yaml"), "seed=3", "--run", str(tmp_path / "run"), "--quiet"]) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["model"] == result["model"]
    (line,) = grid.valid_lines(out)
    assert (line["plan"], line["setting"], line["seed"], line["epoch"]) == ("plan", "dense", 3, 2)
    assert not (out / "valid/plan-dense-3").exists()
    plans = {"plan": grid.load_plan(plan, overrides=["model.num_layers=1"])}
    assert not grid.remaining_jobs(plans, out, [3], ["dense"])
    assert len(grid.remaining_jobs(plans, out, [3], [])) == 2
    capsys.readouterr()
    grid.main(["--out", str(out), "--table"])
    assert capsys.readouterr().out.splitlines()[1].split() == ["dense", f"{line['value']:.4f}", "1.000", "1", "seeds"]


@pytest.mark.parametrize("name", ["indexer", "htree"])
def test_the_plans_indexer_groups_and_htree_groups_have_the_defaults(name):
    """The setting after softmax has the values of `auto`; no setting chooses as many tokens as a sequence has."""
    _, first, *others = grid.load_plan(grid.Path(f"configs/compare/{name}-groups.yaml")).settings.values()
    for config in (first, *others):
        kind = config.model.attention[0]
        assert getattr(kind, "compression_rate", 1) * kind.top_k < config.model.max_seq_len
    default = type(kind)(kind=name).for_model(first.model.layer_sizes)
    for option in ("compression_rate", "top_k", "selection_group"):
        assert getattr(default, option, None) == getattr(first.model.attention[0], option, None)
