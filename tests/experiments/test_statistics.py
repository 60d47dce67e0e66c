"""Check the parts of a comparison: intervals that hold the truth, corrected tests, plans and their errors."""

import math
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from data.errors import ConfigError
from experiments.plan import load_plan
from experiments.report import as_html, readable_changes
from experiments.results import Results, Setting
from training.plots import Row, Series, curves, groups, scatter, strip
from training.statistics import Error, compare, holm, log_ratio, seed_variance, user_draws

SEEDS, SIMULATED = 5, 1000


def simulated(rng, users, shares):
    """Yield (ours, theirs) [100, S, M] with the true ratio 1.1 for each share.

    Users differ much, in the same way for both settings, and less in how a setting suits them and how a run happens to.
    Seeds have this share of the variance of the ratio's logarithm.
    """
    spread = np.array([0.9, 0.15, 0.35], np.float32)  # of logarithms: user, user by setting, user by run
    user, setting, run = np.exp(spread**2) - 1  # squared coefficients of variation
    of_users = 2 * (1 + user) * (setting + (1 + setting) * run / SEEDS) / users

    def lognormal(spread, *shape):
        return np.exp(spread * rng.standard_normal(shape, np.float32) - spread**2 / 2)

    common = lognormal(spread[0], 100, 1, users)
    parts = [
        (
            mean * common * lognormal(spread[1], 100, 1, users) * lognormal(spread[2], 100, SEEDS, users),
            rng.standard_normal((100, SEEDS, 1), np.float32),
        )
        for mean in (1.1, 1.0)
    ]
    for share in shares:
        of_seed = np.sqrt(share / (1 - share) * of_users * SEEDS / 2)
        yield [of_user * (1 + of_seed * seed) for of_user, seed in parts]


@pytest.mark.parametrize("users", [200, 3000])
def test_interval_holds_the_true_ratio(users):
    """Seeds have a twentieth, half and nineteen twentieths of the variance, for the same users."""
    shares, rng = (0.05, 0.5, 0.95), np.random.default_rng(users)
    num_covered = dict.fromkeys(shares, 0)
    for _ in range(SIMULATED // 100):
        for share, (ours, theirs) in zip(shares, simulated(rng, users, shares)):
            center, error = log_ratio(ours, theirs, draws=250)
            num_covered[share] += (np.abs(center - np.log(1.1)) <= error.half_width()).sum()
    for share, number in num_covered.items():
        assert 0.93 * SIMULATED <= number <= 0.97 * SIMULATED, share


def test_setting_against_itself_is_exactly_one():
    values = np.random.default_rng(0).random((3, 50)) ** 3
    assert compare(values, values, same_runs=True) == (1.0, 1.0, 1.0, 1.0, True)
    again = compare(values, values.copy())
    assert again.ratio == 1.0 and again.low < 1 < again.high and again.p == 1.0


def test_one_seed_has_users_alone_and_no_hit_no_interval():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random((1, 400)) + 0.5, rng.random((1, 400)) + 0.5
    comparison = compare(ours, theirs)
    assert not comparison.seeds and comparison.low < comparison.ratio < comparison.high
    # The delta method's standard error of a ratio of means over the same users.
    difference = (ours / ours.mean() - theirs / theirs.mean()).std() / 20
    assert np.log(comparison.high / comparison.ratio) == pytest.approx(1.966 * difference, rel=0.1)
    nothing = compare(np.zeros((1, 400)), theirs)
    assert nothing.ratio == 0 and np.isnan([nothing.low, nothing.high, nothing.p]).all()


def test_p_value_is_where_the_interval_begins_to_leave_out_one():
    error = Error(np.array(0.01), 999, np.array(0.02), np.array(4.0), True)
    half = error.half_width()
    assert error.p_value(half) == pytest.approx(0.05, abs=1e-8)
    assert error.p_value(-half) == pytest.approx(0.05, abs=1e-8)
    # One part alone is Student's t: 2.776 of 4 degrees, 1.962 of 999.
    only_seeds = Error(np.array(0.0), 999, np.array(1.0), np.array(4.0), True)
    only_users = Error(np.array(1.0), 999, np.array(0.0), np.array(1.0), True)
    assert only_seeds.half_width() == pytest.approx(2.776445, abs=1e-5)
    assert only_users.half_width() == pytest.approx(1.962341, abs=1e-5)


def test_seed_variance_takes_off_the_users_chance():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((400, 5, 50))
    rows = noise + rng.standard_normal((400, 1, 50)) + 0.3 * rng.standard_normal((400, 5, 1))
    assert seed_variance(rows).mean() == pytest.approx(0.09 / 5, rel=0.15)
    # Without seeds' differences runs scatter by 1/50 all the same, which would be 1/250 of a mean over five.
    assert seed_variance(noise).mean() < 0.4 / 250


def test_draws_of_many_users_are_draws_of_groups(monkeypatch):
    values = np.random.default_rng(0).random((2, 1501))
    whole = user_draws(values, 300)
    monkeypatch.setattr("training.statistics.MOST_DRAWN", 200)
    groups = user_draws(values, 300)
    assert groups.mean(-1) == pytest.approx(values.mean(-1), abs=0.003)
    assert groups.std(-1) == pytest.approx(whole.std(-1), rel=0.2)
    # The same users for all rows: what is the same in both cancels out.
    pair = user_draws(np.stack([values[0], 2 * values[0]]), 50)
    assert pair[0].std() > 0 and pair[1] / pair[0] == pytest.approx(np.full(50, 2.0))


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    corrected = holm([0.02, float("nan"), 0.03])
    assert corrected[0] == pytest.approx(0.04) and np.isnan(corrected[1]) and corrected[2] == pytest.approx(0.04)
    assert holm([]) == []


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
        ("seeds: [1, 2]", "seeds: [1, 1]", "plan.yaml: seeds: 1 given twice"),
        ("seeds: [1, 2]", "seeds: []", "plan.yaml: seeds: list should have at least 1 item"),
        ("seeds: [1, 2]", "baseline: dens", "plan.yaml: baseline: dens is none of dense, bsa"),
        ("  dense: {}\n", "", "expected at least two settings or runs to compare, got 1"),
        ("dense: {}", "../x: {}", "settings.../x.[key]: string should match pattern"),
        ("dense: {}", "report.html: {}", "settings.report.html: the name of a file of the result"),
        ("dense: {}", "dense: {seed: 3}", "settings.dense: seed: a setting has none of its own"),
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
        ("quick: {train.epochs: 1}\n", "", "--quick: the plan does not say what to change"),
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


def test_plots_are_svg_in_the_page_s_colours():
    nan = float("nan")
    plots = [
        curves(
            [Series(0, [(1, 0.3), (2, 0.31)]), Series(1, [(1, nan), (2, math.inf)])], "epoch", 'a "metric" & <more>'
        ),
        scatter([Series(7, [(1500.0, 0.5), (3500.0, 0.6)])], "MiB", "metric"),
        groups([(0, {"few": 0.1, "$x_1$": None, "many": 0.3}), (1, dict.fromkeys(("few", "$x_1$", "many")))], "g", "m"),
        strip([Row("<a>", 0, [0.1, 0.2], 0.15), Row("b" * 60, 1, [], 1.1, (0.9, 1.3))], "ratio", at=1.0),
    ]
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "var(--line)" in plot and "#010101" not in plot and "<style" not in plot
        assert not re.search(r"https?:|url\(", plot)
    assert plots[1] == scatter([Series(7, [(1500.0, 0.5), (3500.0, 0.6)])], "MiB", "metric")
    assert 'aria-label="a &quot;metric&quot; &amp; &lt;more&gt; by epoch"' in plots[0] and ">1.5<" not in plots[0]
    assert ">2,000<" in plots[1] and ">$x_1$<" in plots[2]
    assert ">&lt;a&gt;<" in plots[3] and "b" * 43 + "…" in plots[3] and "var(--soft)" in plots[3]


def test_a_page_escapes_what_runs_say():
    runs = [SimpleNamespace(result={"parameters": 10}, curve=[(1, 0.4), (2, 0.5)])]
    metrics = {"mean": 0.5, "by_seed": [0.5], "sd": None, "ratio": 1.0, "low": None, "high": None, "p_holm": None}
    settings = [Setting(name, runs, {"auc": metrics}, {"length": {"few": None}}) for name in ("a", "b")]
    page = as_html(Results("auc", 1200, False, settings, [("b, seed 1", "error: <script>")]))
    assert "1,200 users" in page and "error: &lt;script&gt;" in page and "<script" not in page
    assert page.count("<svg") == 4 and page.count('class="legend"') == 2


def test_changes_are_shown_without_options_of_the_other_kind():
    changes = [
        "model.rotary: None -> {'time': True}",
        "train.clip_norm: 1.0 -> None",
        "model.attention.0.kind: dense -> htree",
        "model.attention.0.scale: 1.0 -> None",
        "model.attention.0.top_k: None -> 16",
    ]
    assert readable_changes(changes) == [
        "model.rotary: absent -> {'time': True}",
        "train.clip_norm: 1.0 -> absent",
        "model.attention.0.kind: dense -> htree",
        "model.attention.0.top_k: 16",
    ]
