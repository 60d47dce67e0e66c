"""Test benchmarks/trials.py: the order of a search, and trials by processes."""

import base64
import json
import zlib

import numpy as np
import pytest

from benchmarks import trials
from benchmarks.trials import Search, State, Trial
from data.errors import ConfigError

PLAN = """
searches:
  one:
    config: configs/synthetic-hstu.yaml
    fixed:
      data.synthetic: {num_users: 60, num_items: 50, mean_length: 10}
      model.max_seq_len: 20
      train.epochs: 2
      device: cpu
    options:
      train.lr: [1.0e-3, 3.0e-3, 1.0e-2]
      size:
        - {model.embedding_dim: 16, model.num_heads: 2}
        - {model.embedding_dim: 8, model.num_heads: 1}
    beside:
      mixed: {loss.kind: in_batch}
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def tried(state, better=()):
    """Return all trials of a search in order; each is recorded at once, an improvement if its point is in `better`."""
    trials_ = []
    while (trial := state.next()) is not None:
        trials_.append((trial.title, *trial.point.values()))
        state.record(trial, 1.0 + 0.1 * better.index(trial.point) if trial.point in better else 0.5, True)
    return trials_


def test_a_search_changes_one_option_by_a_step_and_goes_on_from_what_is_better():
    options = {"a": [0, 1, 2], "b": [0, 1]}
    state = State("s", Search(config="", options=options, start={"a": 1}))
    assert tried(state, [{"a": 1, "b": 0}]) == [("first", 1, 0), ("a", 2, 0), ("a", 0, 0), ("b", 1, 1)]
    state = State("s", Search(config="", options=options, start={"a": 1}))
    better = [{"a": 1, "b": 0}, {"a": 2, "b": 0}]
    # a = 2 is better: b is tried there, and a = 0 no more, which is two steps away.
    assert tried(state, better) == [("first", 1, 0), ("a", 2, 0), ("b", 2, 1)]
    assert state.best == better[1]


def test_improvements_of_concurrent_trials_are_tried_together():
    state = State("s", Search(config="", options={"a": [0, 1], "b": [0, 1]}))
    first, a, b = (state.next() for _ in range(3))
    for trial, value in ((first, 1.0), (a, 1.1), (b, 1.2)):
        state.record(trial, value, True)
    assert state.best == {"a": 0, "b": 1} and state.next() == Trial("b", {"a": 1, "b": 1}, {})


def test_small_gains_ended_trials_and_beside_settings_do_not_move_the_search():
    state = State("s", Search(config="", options={"a": [0, 1]}, beside={"x": {"k": 1}}))
    first, beside, a = (state.next() for _ in range(3))
    state.record(first, 1.0, True)
    state.record(beside, 2.0, True)
    state.record(a, 2.0, False)
    state.record(a, 1.004, True)
    assert state.best == {"a": 0} and beside == Trial("x", {"a": 0}, {"k": 1})
    state.repeat(1, [7])
    again = [state.next() for _ in range(2)]
    assert again == [beside._replace(more={"k": 1, "seed": 7}), first._replace(more={"seed": 7})]


@pytest.mark.slow  # four runs, each in a process of its own
def test_trials_and_judged_runs_of_a_plan_are_written_as_they_end(plan, tmp_path, capsys):
    """A search and the final run of another one, by one worker."""
    options = PLAN.index("    options:")
    judged = PLAN[PLAN.index("  one:") : options].replace("one", "two") + "    judged: [3]\n"
    plan.write_text(PLAN + judged)
    out = tmp_path / "out"
    changes = ["one:train.batch_size=16", "two:data.protocol=published", "two:eval.patience=null"]
    limits = ["--seconds", "3600", "--trials", "4", "--workers", "1", "--runs", str(tmp_path)]
    trials.main([str(plan), *changes, "--out", str(out), *limits])
    written = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    records = [record for record in written if record["search"] == "one"]
    assert [record["title"] for record in records] == ["first", "mixed", "train.lr"]
    for record in records:
        assert record["status"] == 0 and len(record["curve"]) == 2 and record["environment"]["torch"]
        assert record["value"] == max(point[1] for point in record["curve"]) > 0
        assert record["settings"]["train.batch_size"] == 16 and record["settings"]["eval.test"] is False
    assert records[1]["settings"]["loss.kind"] == "in_batch" and records[2]["settings"]["train.lr"] == 3e-3
    (final,) = [record for record in written if record["search"] == "two"]
    assert final["title"] == "final" and final["test"]["NDCG@10"] > 0 and final["status"] == 0
    ranks = np.frombuffer(zlib.decompress(base64.b64decode(final["ranks"])), np.uint8)
    assert len(ranks) == 60 and final["test"]["HR@10"] == pytest.approx((ranks <= 10).mean())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plan.yaml"]
    capsys.readouterr()
    trials.main(["--table", "--out", str(out)])
    printed = capsys.readouterr().out
    effect = records[2]["value"] / records[0]["value"] - 1
    assert "one: 3 trials" in printed and f"train.lr=0.003: {100 * effect:+.1f}% (1 trials)" in printed
    assert "two on the test split, 1 seeds" in printed and f"NDCG@10 {final['test']['NDCG@10']:.5f}" in printed


@pytest.mark.parametrize(
    "setting, message",
    [
        ("one:eval.best_metric=nothing", "eval.best_metric"),
        ("one:data.protocol=published", "eval.patience: protocol published leaves no validation split"),
        ("two:train.lr=1", "two:train.lr=1: expected SEARCH:key=value with one of one"),
    ],
)
def test_impossible_settings_are_refused_before_the_first_trial(plan, tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        trials.main([str(plan), setting, "--out", str(tmp_path / "out")])


ALL_SETS = {"beauty-5core", "beauty", "ml-1m"}


@pytest.mark.parametrize(
    "name, searches, settings",
    [
        ("recipes", ALL_SETS, 30),
        ("finals", ALL_SETS | {"ml-1m-large"}, 20),
        ("default", {"default-beauty", "default-ml-1m", "default-beauty-5core"}, 9),
    ],
)
def test_shipped_plans_are_possible(name, searches, settings):
    plan, states = trials.load_plan(trials.Path(f"configs/tune/{name}.yaml"), [])
    assert trials.check(states) >= settings and set(plan.searches) == searches


def test_drawn_settings_have_each_value_as_often_as_the_others():
    state = State("s", Search(config="", options={"a": [0, 1, 2], "b": [0, 1]}, drawn=6, beside={"x": {"k": 1}}))
    titles = [trial.title for trial in state.waiting]
    assert titles == ["first", "x", *["drawn"] * 6]
    drawn = [trial.point for trial in state.waiting[2:]]
    assert sorted(point["a"] for point in drawn) == [0, 0, 1, 1, 2, 2]
    assert sorted(point["b"] for point in drawn) == [0, 0, 0, 1, 1, 1]
    for trial in state.waiting:
        state.record(trial, 2.0 if trial.point == drawn[3] else 1.0, True)
    assert state.best == drawn[3]


def test_the_first_half_of_an_array_of_few_options_has_each_value_equally_often():
    state = State("s", Search(config="", options={name: [0, 1] for name in "abc"}, drawn=8))
    half = [state.next().point for _ in range(4)]
    assert [sum(point[option] for point in half) for option in "abc"] == [2, 2, 2]
    assert len({tuple(point.values()) for point in half}) == 4


def test_the_better_values_are_those_of_an_orthogonal_array_at_the_epoch_that_all_reached():
    """Effects +5%, 0 and -3%, some noise; one trial has a peak that the others had no time for."""
    options = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    state = State("s", Search(config="", options=options, drawn=8))
    drawn = [trial.point for trial in state.waiting if trial.title == "drawn"]
    assert len({tuple(point.values()) for point in [state.first, *drawn]}) == 8 == 1 + len(drawn)
    for number in range(8):
        trial = state.next()
        value = 0.1 * (1 + 0.05 * trial.point["a"] - 0.03 * trial.point["c"]) * (1 + 0.001 * (-1) ** number)
        points = [[2, value / 2, 3.0, 30.0], [4, value, 2.0, 40.0]]
        late = [[6, 9.0, 1.0, 50.0]] if trial.point == {"a": 0, "b": 1, "c": 1} else []
        state.record(trial, points[-1][1], False, points + late)
    assert state.better_values() == {"a": 1, "b": 0, "c": 0}


def test_the_better_values_are_tried_together_when_all_drawn_settings_have_ended():
    options = {name: [0, 1] for name in "abcde"}
    state = State("s", Search(config="", options=options, drawn=8))
    screened = [state.next() for _ in range(8)]
    state.running = 1
    assert state.next() is None
    for trial in screened:
        state.record(
            trial, 1.0 + 0.05 * trial.point["a"] - 0.03 * trial.point["b"], True, [[2, 1.0 + trial.point["a"]]]
        )
    state.running = 0
    together, again = state.next(), state.next()
    assert together == Trial("together", {"a": 1, "b": 0, "c": 0, "d": 0, "e": 0}, {}) and again.more == {"seed": 2}
    assert state.next().title in options  # and steps from there


def test_settings_for_several_data_sets_are_only_drawn_and_compared_with_the_best(tmp_path, capsys):
    lines = []
    for name in ("x", "y"):
        lines.append({"search": name, "title": "first", "values": {"k": 1}, "value": 0.4, "epoch": 2, "status": 0})
        state = State("d", Search(config="", options={"a": [0, 1]}, drawn=2, like=name))
        while (trial := state.next()) is not None:
            value = 0.4 - 0.04 * trial.point["a"]
            state.record(trial, value, True)
            lines.append({"search": f"d-{name}", "title": trial.title, "values": trial.point, "like": name})
            lines[-1] |= {"value": value, "epoch": 2, "status": 0}
    assert [line["values"] for line in lines] == 2 * [{"k": 1}, {"a": 0}, {"a": 1}]
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trials.table(tmp_path)
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[0] for line in last] == ["1.000", "0.900"] and last[1].endswith("a=1")


def test_runs_to_judge_are_no_trials(plan):
    plan.write_text(PLAN.replace("    options:", "    judged: [3, 4]\n    options:"))
    state = trials.load_plan(plan, [])[1]["one"]
    assert [(trial.title, trial.more) for trial in (state.next(), state.next())] == [
        ("final", {"seed": seed, "eval.test": True}) for seed in (3, 4)
    ]
    state.record(Trial("final", {}, {"seed": 3}), 0.5, True)
    state.repeat(3, [2])
    assert state.next() is None
