"""Test runs with features from YAML to report: cold items are recommended and counted; runs resume and are reused."""

import contextlib
import json
import shutil

import numpy as np
import pytest

import eval as evaluation
import train
from data.errors import ConfigError
from serving import Recommender
from training.config import load_config

pl = pytest.importorskip("polars")  # it reads raw files

CONFIG = """
name: t
seed: 1
device: cpu
threads: 1
run_dir: PATH/runs
data:
  format: csv
  path: PATH/events.csv
  protocol: leave_one_out
  cache_dir: PATH/cache
  features:
    items: {format: csv, path: PATH/items.csv, columns: {group: category}, unknown: add}
    users: {format: csv, path: PATH/users.csv, columns: {parity: category}}
    events: {calendar: [hour]}
model: {block: hstu, max_seq_len: 12, embedding_dim: 16, num_layers: 1, attention: {kind: dense}}
loss: {kind: cross_entropy}
train: {epochs: 6, batch_size: 16, lr: 1e-2, checkpoint_seconds: 1000}
"""
GROUPS = 4


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return a folder with a finished run: each user's items are of one group, and each group has an unseen item."""
    place = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    rows = []
    for user in range(48):
        items = rng.permutation(10)[:8] * GROUPS + user % GROUPS
        rows += [f"{user},{item},{1000 * k + user}" for k, item in enumerate(items)]
    (place / "events.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    items = [f"{item},g{item % GROUPS}" for item in range(10 * GROUPS)] + [f"new{g},g{g}" for g in range(GROUPS)]
    (place / "items.csv").write_text("item,group\n" + "\n".join(items) + "\n")
    (place / "users.csv").write_text("user,parity\n" + "\n".join(f"{user},{user % 2}" for user in range(48)) + "\n")
    (place / "run.yaml").write_text(CONFIG.replace("PATH", str(place)))
    assert train.main([str(place / "run.yaml"), "--run", str(place / "run")]) == 0
    return place


def test_cold_items_are_recommended_and_reported_separately(finished_run):
    result = json.loads((finished_run / "run" / "result.json").read_text())
    assert result["items"] == 10 * GROUPS + GROUPS and result["cold"]["items"] >= GROUPS
    assert sum(row["users"] for row in result["by_popularity"]) == result["users"] == 48
    assert result["cold"]["in_lists"] > 0
    report = (finished_run / "run" / "report.md").read_text()
    assert "items have no training event" in report and "By popularity of the target" in report
    assert (
        evaluation.main([str(finished_run / "run"), "--recommend", str(finished_run / "next.csv"), "--top-k", "5"]) == 0
    )
    frame = pl.read_csv(finished_run / "next.csv", schema_overrides={"user": pl.Int64, "item": pl.String})
    new = frame.filter(pl.col("item").str.starts_with("new"))
    # A new item is recommended to the users of its group, by its feature alone.
    right = new.filter(pl.col("item").str.slice(3).cast(pl.Int64) == pl.col("user") % GROUPS)
    assert right.height > 0.9 * new.height and right["user"].n_unique() > 24


def test_vectors_are_representations(finished_run):
    assert (
        evaluation.main([str(finished_run / "run"), "--export-items", str(finished_run / "vectors"), "--overwrite"])
        == 0
    )
    ids, vectors = (np.load(finished_run / "vectors" / f"{name}.npy") for name in ("item_ids", "items"))
    place = {item: row for row, item in enumerate(ids.tolist())}
    groups = [[place[str(item)] for item in range(g, 10 * GROUPS, GROUPS)] for g in range(GROUPS)]
    near = np.stack([(vectors[[place[f"new{g}"] for g in range(GROUPS)]] @ vectors[rows].T).mean(1) for rows in groups])
    assert near.argmax(0).tolist() == [*range(GROUPS)]


def test_a_run_resumes_and_is_judged_without_its_files(finished_run, tmp_path, monkeypatch):
    before = json.loads((finished_run / "run" / "result.json").read_text())["model"]
    for name in ("events.csv", "items.csv", "users.csv"):
        (finished_run / name).rename(tmp_path / name)
    try:
        assert evaluation.main([str(finished_run / "run")]) == 0
        assert json.loads((finished_run / "run" / "eval-test.json").read_text())["model"] == before
    finally:
        for name in ("events.csv", "items.csv", "users.csv"):
            (tmp_path / name).rename(finished_run / name)
    assert train.main(["--resume", str(finished_run / "run"), "train.epochs=7"]) == 0


def test_other_events_with_the_vocabulary_of_the_run(finished_run, tmp_path):
    """Check that users who are not in the users' file have no value."""
    (tmp_path / "more.csv").write_text(
        "user,item,timestamp\n" + "".join(f"9{u},{4 * n},{n}\n" for u in "ab" for n in range(5))
    )
    (tmp_path / "users.csv").write_text("user,parity\n9a,1\nzz,0\n")
    users = f"data.features.users.path={tmp_path / 'users.csv'}"
    assert evaluation.main([str(finished_run / "run"), "--data", str(tmp_path / "more.csv"), users]) == 0
    history = ["--history", str(tmp_path / "more.csv"), "--recommend", str(tmp_path / "next.csv"), users]
    assert evaluation.main([str(finished_run / "run"), *history]) == 0
    assert pl.read_csv(tmp_path / "next.csv")["user"].n_unique() == 2


def test_weights_of_another_run_go_to_the_same_values(finished_run, tmp_path):
    text = (finished_run / "items.csv").read_text().replace("g0", "a0").replace("g1", "g10")
    (tmp_path / "items.csv").write_text(text)
    items = [f"data.features.items.path={tmp_path / 'items.csv'}", f"run_dir={tmp_path}", "train.epochs=1"]
    options = [
        str(finished_run / "run.yaml"),
        "--init-from",
        str(finished_run / "run"),
        "--run",
        str(tmp_path / "run"),
        *items,
    ]
    assert train.main([*options, "train.lr=1e-30"]) == 0
    old, new = (weights(folder) for folder in (finished_run / "run", tmp_path / "run"))
    table = "embedding.items.tables.tables.embedding_bags.items_group.weight"
    assert new[table].shape == old[table].shape  # unknown, a0, g10, g2, g3; before g0, g1, g2, g3
    np.testing.assert_array_equal(new[table][[0, 3, 4]], old[table][[0, 3, 4]])
    assert not np.allclose(new[table][1], old[table][1])


def weights(folder):
    from training.run import final_weights

    return {name: value.numpy() for name, value in final_weights(folder)[0].items()}


def test_features_in_a_service(finished_run, tmp_path, capsys):
    """Check that a service gives the metrics of eval.py with features of items, users and the calendar."""
    run = tmp_path / "run"
    shutil.copytree(finished_run / "run", run)
    assert evaluation.main([str(run), "--serve", "--slide", "1", "--cache-bytes", str(2**24)]) == 0
    (served,) = run.glob("eval-*serve*.json")
    whole, served = (json.loads(path.read_text())["model"]["history"] for path in (run / "result.json", served))
    assert served == pytest.approx(whole, abs=0.01)  # a rounding may swap two items
    lists_of_a_program_and_of_a_service(run, tmp_path, capsys)


def lists_of_a_program_and_of_a_service(run, tmp_path, capsys):
    """Check that --recommend and `Recommender` filter the same items, also by the value of a single item."""
    (tmp_path / "deny").write_text("0\n1\nnobody\n")
    recommender = Recommender.load(run, history=True, cache_bytes=2**24)
    users = [str(user) for user in range(48)]
    for options, filters in (
        (["--where", "group=g0,g1,none", "--deny", tmp_path / "deny"], {"where": {"group": ["g0", "g1", "none"]}}),
        (["--at-most", "group=1", "--exclude-seen", "false"], {"at_most": {"group": 1}, "exclude_seen": False}),
        (["--where", "group=g2", "--exclude-seen", "true"], {"where": {"group": ["g2"]}, "exclude_seen": True}),
    ):
        deny = ["0", "1", "nobody"] if "--deny" in options else None
        out = tmp_path / "lists.csv"
        arguments = [run, "--recommend", out, "--overwrite", "--top-k", 12, "--at", 10**6, *options]
        assert evaluation.main([str(argument) for argument in arguments]) == 0
        written = pl.read_csv(out, schema_overrides={"user": pl.String, "item": pl.String})
        items, scores = recommender.recommend(users, 12, 10**6, deny=deny, **filters)
        for user, row, values in zip(users, items, scores):
            rows = written.filter(pl.col("user") == user)
            assert rows["item"].to_list() == row[np.isfinite(values)].tolist() and len(rows) > 0
            np.testing.assert_allclose(rows["score"].to_numpy(), values[np.isfinite(values)], atol=1e-5)
        output = capsys.readouterr().out
        notices = "--deny: 1 of 3 items are unknown", "--where: no item has the group none"
        assert all(notice in output for notice in notices) == (deny is not None)
    for options, says in (
        (["--where", 'group="g0, g1",none'], "no item passes --allow, --deny and --where; nothing was written"),
        (["--where", "colour=red"], "--where: colour is not a feature of the items: expected one of group"),
        (["--at-most", "group=few"], "--at-most group: expected a whole number"),
    ):
        with contextlib.suppress(SystemExit):
            assert evaluation.main([str(run), "--recommend", str(out), "--overwrite", *options]) == 2
        assert says in capsys.readouterr().err


def test_ranking_from_files_to_report(tmp_path):
    """Rank with features: users of one parity like items of one group; ids alone are too rare to learn this."""
    rng = np.random.default_rng(0)
    users, items, likes = (rng.integers(high, size=900) for high in (45, 60, 10))
    likes = np.where(likes == 0, 1, 0) ^ ((users + items) % 2)
    rows = [f"{u},{i},{t},{a},{t % 3}" for t, (u, i, a) in enumerate(zip(users, items, likes))]
    (tmp_path / "events.csv").write_text("user,item,timestamp,action,device\n" + "\n".join(rows) + "\n")
    (tmp_path / "items.csv").write_text("item,group\n" + "\n".join(f"{i},g{i % 2}" for i in range(60)) + "\n")
    (tmp_path / "users.csv").write_text("user,parity\n" + "\n".join(f"{u},{u % 2}" for u in range(45)) + "\n")
    (tmp_path / "run.yaml").write_text(
        CONFIG.replace("PATH", str(tmp_path))
        .replace("protocol: leave_one_out", "protocol: last_tenth\n  columns: {action: action}")
        .replace("calendar: [hour]", "columns: {device: {kind: category, known: before}}")
        .replace("unknown: add", "unknown: error")
        .replace("loss: {kind: cross_entropy}", "task: {kind: ranking, actions: [{name: liked, at_least: 1}]}")
    )
    run = tmp_path / "run"
    assert train.main([str(tmp_path / "run.yaml"), "--run", str(run), "train.epochs=12", "model.max_seq_len=90"]) == 0
    result = json.loads((run / "result.json").read_text())
    assert result["model"]["auc"] > 0.75
    assert evaluation.main([str(run), "--serve", "--cache-bytes", str(2**24)]) == 0
    served = json.loads((run / "eval-test-serve.json").read_text())["model"]
    assert served == pytest.approx(result["model"], abs=1e-6)
    recommender = Recommender.load(run, history=True, cache_bytes=2**24)
    before = recommender.score(["7"], [["3"]], 10**6)
    (tmp_path / "other.csv").write_text("user,parity\n7,0\n8,1\n")
    assert recommender.add_users_of(tmp_path / "other.csv") == 2
    assert recommender.score(["7"], [["3"]], 10**6) != before
    recommender.add_users_of(tmp_path / "users.csv")
    assert recommender.score(["7"], [["3"]], 10**6) == before
    for file in ("events", "items", "users"):
        (tmp_path / f"{file}.csv").rename(tmp_path / f"{file}.old")
    assert evaluation.main([str(run)]) == 0
    assert json.loads((run / "eval-test.json").read_text())["model"] == result["model"]


def test_errors_of_the_configuration(finished_run):
    for option, expected in (
        ("data.features.items.colums={}", "data.features.items.colums: unknown key, did you mean columns?"),
        ("data.features.items.columns.group.knd=list", "data.features.items.columns.group"),
        ("data.features.items.columns.group=text", "data.features.items.columns.group.kind"),
        ("data.features.events.calendar=[day]", "data.features.events.calendar.0"),
        ("data.features={}", "data.features: expected items, users or events"),
        ("data.features.items.format=xml", "data.features.items.format"),
    ):
        with pytest.raises(ConfigError, match=expected.replace("?", ".").replace("[", ".").replace("{", ".")):
            load_config(finished_run / "run.yaml", [option])


def test_features_of_users_as_tokens(finished_run, tmp_path, capsys):
    run, options = tmp_path / "run", ["data.features.users.as=tokens", "train.epochs=1", f"run_dir={tmp_path}"]
    assert train.main([str(finished_run / "run.yaml"), "--run", str(run), *options]) == 0
    assert "as: tokens" in (run / "config.yaml").read_text()
    assert evaluation.main([str(run)]) == 0
    result, again = (json.loads((run / name).read_text())["model"] for name in ("result.json", "eval-test.json"))
    assert again == result
    capsys.readouterr()
    assert train.main(["--resume", str(run), "data.features.users.as=sum"]) != 0
    assert "data.features.users.as" in capsys.readouterr().err
    assert evaluation.main([str(run), "--serve", "--slide", "1", "--cache-bytes", str(2**24)]) == 0
    served = json.loads((run / "eval-test-serve-slide=1.json").read_text())["model"]
    assert all(metrics == pytest.approx(result[name], abs=1e-6) for name, metrics in served.items())
    # An added item is as one of the catalogue without a training event, before and after a user has it.
    recommender = Recommender.load(run, history=True, cache_bytes=2**24)
    recommender.add_items(["added"], {"group": ["g1"]})
    pair = [["new1", "added"]] * 2
    assert np.ptp(recommender.score(["1", "2"], pair, 10**6), axis=1).max() < 1e-6
    recommender.append(["a", "a", "b", "b"], ["5", "new1", "5", "added"], [1, 2] * 2)
    a, b = recommender.score(["a", "b"], [["1", "2"]] * 2, 10**6)
    np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(
        ConfigError, match=r"data\.features\.users\.as=tokens: model\.attention\.kind=htree does not support"
    ):
        load_config(finished_run / "run.yaml", [options[0], "model.attention.kind=htree"])
    with pytest.raises(ConfigError, match=r"model\.attention\.backend=cute takes no data\.features\.users\.as=tokens"):
        load_config(finished_run / "run.yaml", [options[0], "model.attention={kind: softmax, backend: cute}"])
    with pytest.raises(ConfigError, match=r"data\.features\.users\.as: .*sum.*tokens"):
        load_config(finished_run / "run.yaml", ["data.features.users.as=token"])
