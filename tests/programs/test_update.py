"""Test train.py --update: a run is trained further on new events, and known ids keep their rows."""

import json
import shutil

import numpy as np
import pytest
import torch

import eval as evaluation
import train
from data.datasets import load_dataset
from data.update import new_events
from tests.training.test_changes import refuses
from tools import forget
from training.checkpoints import checkpoints
from training.config import load_config
from training.dcp import read_tensors, saved_tensors
from training.run import open_data
from training.vocabulary import load_vocabulary
from training.weights import TABLE

pl = pytest.importorskip("polars")

CONFIG = """
name: t
device: cpu
threads: 1
data: {format: csv, path: PLACE/old.csv, cache_dir: PLACE/cache, protocol: all, FEATURES}
model: {block: hstu, max_seq_len: 8, embedding_dim: 8, num_layers: 1, attention: {kind: dense}}
loss: {kind: cross_entropy}
train: {epochs: 2, batch_size: 16, lr: 1.0e-2, ema_decay: 0.9, checkpoint_seconds: 1000, update: {epochs: 1}}
"""
FEATURES = "features: {items: {format: csv, path: PLACE/items.csv, columns: {kind: {kind: category, min_count: 1}}}}"


def table(rows):
    return "\n".join(["user,item,timestamp", *(",".join(map(str, row)) for row in rows), ""])


def rows(users, times, step=3):
    return [(f"u{user:02}", f"i{(user + step * n) % 11:02}", n) for user in users for n in times]


OLD = rows(range(20), range(10))
# i05 is gone; a00 sorts before all known ids, z99 after them; u03 has a late event, before the run's last one.
KEPT = [row for row in OLD if row[1] != "i05"]
LATE = [("u03", "i09", 2)]
FRESH = [(f"u{user:02}", item, 20 + n) for user in range(15, 25) for n, item in enumerate(("a00", "z99", "i01"))]
MORE = [row for row in rows(range(10, 20), range(10, 14)) if row[1] != "i05"]
FIRST = KEPT + LATE + MORE + FRESH
SECOND = FIRST + [(f"u{user:02}", "n00", 30) for user in range(12)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a run, its update `first`, and the update `second` of `first`."""
    place = tmp_path_factory.mktemp("update")
    for name, content in (("old", OLD), ("first", FIRST), ("second", SECOND)):
        (place / f"{name}.csv").write_text(table(content))
    (place / "run.yaml").write_text(CONFIG.replace("FEATURES", "").replace("PLACE", str(place)))
    assert train.main([str(place / "run.yaml"), "--run", str(place / "run")]) == 0
    for before, name in (("run", "first"), ("first", "second")):
        update(place, before, name)
    return place


def update(place, before, name, *more):
    path = f"data.path={place / name}.csv"
    assert (
        train.main(["--update", str(place / before), path, "train.update.epochs=2", *more, "--run", str(place / name)])
        == 0
    )


def tensors(checkpoint):
    saved = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved_tensors(checkpoint).items()}
    read_tensors(checkpoint, saved)
    return {name: value for name, value in saved.items() if not name.startswith("random.")}


def test_known_ids_keep_their_rows_and_moments(place):
    before, after = tensors(checkpoints(place / "run")[-1]), tensors(checkpoints(place / "first")[0])
    old, new = (list(load_vocabulary(place / name).vocabulary.item_ids) for name in ("run", "first"))
    assert sorted(new) == new and set(new) == {*old, "a00", "z99"} and "i05" in new
    assert before.keys() == after.keys()
    places = [new.index(item) for item in old]
    for name, value in before.items():
        rows_after = after[name][places] if TABLE in name and value.dim() else after[name]
        assert torch.equal(rows_after, value), name
    fresh = [new.index(item) for item in ("a00", "z99")]
    assert after[f"model.{TABLE}"][fresh].abs().sum() > 0
    assert torch.equal(after[f"average.{TABLE}"][fresh], after[f"model.{TABLE}"][fresh])
    assert not any(after[f"optimizer.{TABLE}.{name}"][fresh].any() for name in ("exp_avg", "exp_avg_sq"))


def test_training_has_the_new_events_and_as_many_older_ones_as_targets(place):
    config, known = load_config(place / "first" / "config.yaml"), load_vocabulary(place / "first")
    data = open_data(config, trained_on=known)
    dataset, train_split, events = data.dataset, data.splits.train, known.events
    assert events.after == 9
    users = np.asarray(dataset.user_ids)[np.searchsorted(dataset.user_offsets, events.late, side="right") - 1]
    assert [(users[0], dataset.item_ids[dataset.items[events.late[0]]])] == [("u03", "i09")] and len(events.late) == 1
    assert events.new.tolist() == np.flatnonzero(dataset.timestamps > 9).tolist()
    targets, first = [], set(dataset.user_offsets[:-1].tolist())
    for begin, end in zip(train_split.begin, train_split.end):
        targets += [event for event in range(begin + 1, end) if train_split.counted[event]]
        assert end - begin <= 9
    trainable = set(events.new.tolist()) - first
    assert len(set(targets)) == len(targets) == 2 * len(trainable)
    assert trainable < set(targets) and not set(targets) & (first | set(events.late.tolist()))
    (batch,) = data.batches("train", batch_size=1000, shuffle=False).epoch(0)
    assert sorted(batch.target_ids[batch.target_ids >= 0].tolist()) == sorted(dataset.items[targets].tolist())


def test_the_old_model_is_evaluated_as_by_eval(place):
    assert evaluation.main([str(place / "run"), "--data", str(place / "first.csv"), "--split", "new"]) == 0
    result = json.loads((place / "run" / "eval-new-of-first.csv.json").read_text())
    lines = [json.loads(line) for line in (place / "first" / "lineage.jsonl").read_text().splitlines()]
    how = load_config(place / "run" / "config.yaml").eval.filter_seen
    assert lines[1]["judged"] == result["model"][how]
    assert result["split"] == "new" and result["users"] == 10  # the others have no history in RUN


def test_new_events_are_evaluated_on_another_device_and_with_a_condition(place, tmp_path):
    """Check that data.where may leave out events of the run, on a machine without the GPU of the training."""
    shutil.copytree(place / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("device: cpu", "device: cuda"))
    options = "--split", "new", "device=cpu", 'data.where="timestamp != 3"'
    assert evaluation.main([str(tmp_path / "run"), "--data", str(place / "first.csv"), *options]) == 0
    assert json.loads((tmp_path / "run" / "eval-new-of-first.csv.json").read_text())["users"] == 10


def test_lineage_has_every_generation(place):
    ids = [json.loads((place / name / "run.json").read_text())["run"] for name in ("run", "first", "second")]
    lines = [json.loads(line) for line in (place / "second" / "lineage.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == ids and [line["generation"] for line in lines] == [0, 1, 2]
    assert (place / "second" / "lineage.jsonl").read_text().startswith((place / "first" / "lineage.jsonl").read_text())
    assert [line["events"] for line in lines] == [len(OLD), len(FIRST), len(SECOND)]
    assert [(one["new_events"], one["late_events"], one["new_items"]) for one in lines[1:]] == [
        (len(MORE) + len(FRESH), 1, 2),
        (12, 0, 1),
    ]
    assert [line["new_events_of_new_items"] for line in lines[1:]] == [20, 12] and lines[2]["judged"] is None
    assert lines[2]["after"] == 22 and 0 <= lines[1]["judged"]["NDCG@10"] <= 1


def test_new_items_are_recommended_and_the_run_can_be_resumed(place, tmp_path):
    folder = shutil.copytree(place / "first", tmp_path / "first")
    assert train.main(["--resume", str(folder), "train.epochs=12"]) == 0
    assert load_config(folder / "config.yaml").train.epochs == 12
    assert evaluation.main([str(folder), "--recommend", str(tmp_path / "top.csv"), "--top-k", "5"]) == 0
    listed = {line.split(",")[2] for line in (tmp_path / "top.csv").read_text().splitlines()[1:]}
    assert listed & {"a00", "z99"}


def test_a_resumed_update_ends_as_an_uninterrupted_one(place, tmp_path):
    for name, epochs in (("whole", 3), ("parts", 1)):
        options = [f"data.path={place / 'first.csv'}", f"train.update.epochs={epochs}", "--run", tmp_path / name]
        assert train.main([str(option) for option in ("--update", place / "run", *options)]) == 0
    assert train.main(["--resume", str(tmp_path / "parts"), "train.epochs=3"]) == 0
    whole, parts = (tensors(checkpoints(tmp_path / name)[-1]) for name in ("whole", "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("who,what\na,b\n", (), "who"),
        (table(OLD[:-1] + FRESH), (), ": 1 of the 200 events of the run are missing"),
        (table(FRESH), (), "user u16, item i01, at 6"),
        (table(FRESH[:1]), (), "all of the 200 events of the run are missing"),  # no user has two events
        (table([("new", item, 20) for item in ("i01", "i02")]), (), "all of the 200 events of the run are missing"),
        (table(OLD), (), "no event to train on is later than the run's last one, at 9"),
        (table(OLD + FRESH[:1]), ("data.protocol=leave_one_out",), "later events (1) are held out for evaluation"),
        (table(FIRST), ("model.embedding_dim=16",), "an update cannot change model.embedding_dim: 8 -> 16"),
    ],
)
def test_an_impossible_update_is_refused_and_writes_nothing(place, tmp_path, capsys, content, more, message):
    (tmp_path / "new.csv").write_text(content)
    out = tmp_path / "runs" / "new"
    options = [f"data.path={tmp_path / 'new.csv'}", *more, "--run", out]
    assert "no such folder" in refuses(tmp_path, capsys, train.main, "--update", place / "nothing", *options)
    assert message in refuses(tmp_path, capsys, train.main, "--update", place / "run", *options)
    assert not out.parent.exists()


def test_events_of_deleted_users_may_be_gone(place, tmp_path):
    """Check that data with fewer events than the run's can be used for an update if whole users are gone."""
    gone = {"u00", "u01", "u02"}
    rest = [row for row in OLD if row[0] not in gone] + [("u05", "i01", 20), ("u06", "i02", 20)]
    assert len(rest) < len(OLD)
    (tmp_path / "new.csv").write_text(table(rest))
    assert (
        train.main(
            [
                str(x)
                for x in ("--update", place / "run", f"data.path={tmp_path / 'new.csv'}", "--run", tmp_path / "run")
            ]
        )
        == 0
    )
    line = json.loads((tmp_path / "run" / "lineage.jsonl").read_text().splitlines()[1])
    assert (line["new_events"], line["late_events"], line["events"]) == (2, 0, len(rest))


def test_a_run_whose_data_were_rewritten_is_updated(tmp_path):
    """Check updates after users are removed from the source and from the prepared copies, twice."""
    (tmp_path / "run.yaml").write_text(CONFIG.replace("FEATURES", "").replace("PLACE", str(tmp_path)))
    (tmp_path / "old.csv").write_text(table(OLD))
    assert train.main([str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run")]) == 0
    rows, before = OLD, "run"
    for time, gone in ((20, "u00"), (30, "u01")):
        assert forget.main([gone, "--data", str(tmp_path / "cache"), "--runs", str(tmp_path)]) == 0
        rows = [row for row in rows if row[0] != gone] + [("u05", "i01", time), ("u06", "i02", time)]
        (tmp_path / "old.csv").write_text(table(rows))
        new = "--data", str(tmp_path / "old.csv"), "--split", "new"
        assert evaluation.main([str(tmp_path / before), *new]) == 0
        update(tmp_path, before, name := f"run-{time}", f"data.path={tmp_path / 'old.csv'}")
        line = json.loads((tmp_path / name / "lineage.jsonl").read_text().splitlines()[-1])
        assert (line["new_events"], line["late_events"], line["events"]) == (2, 0, len(rows))
        before = name


def test_items_with_features_begin_as_their_features(tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item,kind\n" + "".join(f"i{n:02},k{n % 3}\n" for n in range(11)))
    (tmp_path / "old.csv").write_text(table(OLD))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("FEATURES", FEATURES).replace("PLACE", str(tmp_path)))
    assert train.main([str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run")]) == 0
    (tmp_path / "week.csv").write_text(table(FRESH))  # without the earlier events: most items of items.csv have none
    arguments = "--update", tmp_path / "run", f"data.path={tmp_path / 'week.csv'}"
    assert "week: all of the 200 events of the run are missing" in refuses(tmp_path, capsys, train.main, *arguments)
    assert evaluation.main([str(tmp_path / "run"), "--data", str(tmp_path / "week.csv"), "--split", "new"]) == 2
    assert "events of the run are missing" in capsys.readouterr().err
    (tmp_path / "items.csv").write_text(
        "item,kind\na00,k1\nz99,a-new-kind\n" + "".join(f"i{n:02},k{n % 3}\n" for n in range(11) if n != 5)
    )
    (tmp_path / "new.csv").write_text(table(FIRST))
    update(tmp_path, "run", "new")
    before, after = tensors(checkpoints(tmp_path / "run")[-1]), tensors(checkpoints(tmp_path / "new")[0])
    old, new = (load_vocabulary(tmp_path / name).vocabulary for name in ("run", "new"))
    assert list(new.features.features[0].values) == ["a-new-kind", "k0", "k1", "k2"]
    (name,) = (name for name in before if name.startswith("model.") and "items_kind" in name)
    assert torch.equal(after[name][[0, 2, 3, 4]], before[name]) and after[name][1].any()
    ids = list(new.item_ids)
    assert not after[f"model.{TABLE}"][[ids.index("a00"), ids.index("z99")]].any()
    places = [ids.index(item) for item in old.item_ids]
    assert torch.equal(after[f"model.{TABLE}"][places], before[f"model.{TABLE}"])
    vanished = ids.index("i05")
    offsets, kinds = new.features.item_rows[0]
    assert kinds[offsets[vanished]] == 4 and new.features.trained.all()
    assert evaluation.main([str(tmp_path / "new"), "--recommend", str(tmp_path / "top.csv"), "--top-k", "3"]) == 0


def test_known_items_without_events_are_not_new(tmp_path, capsys):
    features = FEATURES.replace("path:", "unknown: add, path:")
    (tmp_path / "items.csv").write_text("item,kind\n" + "".join(f"{name},k\n" for name in ("i01", "x1", "x2", "x3")))
    (tmp_path / "old.csv").write_text(table(OLD))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("FEATURES", features).replace("PLACE", str(tmp_path)))
    assert train.main([str(tmp_path / "run.yaml"), "--run", str(tmp_path / "run")]) == 0
    (tmp_path / "new.csv").write_text(table([*OLD, ("u05", "x1", 20), ("u06", "z99", 20)]))
    update(tmp_path, "run", "new")
    assert "12 of 15 items keep their rows, 1 are new, 2 have no training event yet" in capsys.readouterr().out
    line = json.loads((tmp_path / "new" / "lineage.jsonl").read_text().splitlines()[1])
    assert line["new_items"] == 1


def test_repeated_equal_events_all_count(place):
    config, known = load_config(place / "run" / "config.yaml"), load_vocabulary(place / "run")
    before = open_data(config, trained_on=known)
    (place / "twice.csv").write_text(table(OLD + OLD[:1] + OLD[9:10]))
    again = open_data(load_config(place / "run" / "config.yaml", [f"data.path={place / 'twice.csv'}"]))
    events, times = new_events(again.dataset, before.dataset, before.splits.train_end), again.dataset.timestamps
    assert times[events.late].tolist() == [0] and times[events.new].tolist() == [9]
    events = new_events(before.dataset, again.dataset, again.splits.train_end)  # duplicates may be dropped
    assert not len(events.lost) and events.num_present == len(OLD) + 2


def orders(path, rows, cancelled=()):
    """Write orders with a status; `cancelled`: the indices of cancelled ones."""
    status = ["cancelled" if n in cancelled else "sent" for n in range(len(rows))]
    frame = pl.DataFrame(dict(zip(("user", "item", "timestamp"), zip(*rows))) | {"status": status})
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


WEEK = [*OLD, ("u05", "i01", 20), ("u06", "i02", 20)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Return a folder with a run that was trained on the orders that are not cancelled."""
    place = tmp_path_factory.mktemp("shop")
    orders(place / "old.csv", OLD)
    options = "where: \"status <> 'cancelled'\""
    (place / "run.yaml").write_text(CONFIG.replace("FEATURES", options).replace("PLACE", str(place)))
    assert train.main([str(place / "run.yaml"), "--run", str(place / "run")]) == 0
    return place


@pytest.mark.parametrize(("ending", "more"), [("csv", ("data.partitions=2",)), ("parquet", ("data.format=parquet",))])
def test_orders_that_are_cancelled_later_do_not_stop_an_update(shop, tmp_path, capsys, ending, more):
    new = orders(tmp_path / f"new.{ending}", WEEK, cancelled=(7, 8, 19))
    update(shop, "run", f"new-{ending}", f"data.path={new}", *more)
    note = "3 events on which the run was trained are left out by data.where."
    assert note in capsys.readouterr().out
    assert train.main(["--resume", str(shop / f"new-{ending}"), "train.epochs=3"]) == 0
    assert note in json.loads((shop / f"new-{ending}" / "result.json").read_text())["notes"]
    assert evaluation.main([str(shop / "run"), "--data", str(new), "--split", "new", *more]) == 0
    assert note in json.loads((shop / "run" / f"eval-new-of-new.{ending}.json").read_text())["notes"]


@pytest.mark.parametrize("where", [(), ("data.where=\"status <> 'cancelled' AND TRUE\"",)])
def test_orders_that_are_in_no_row_stop_an_update_though_others_are_cancelled(shop, tmp_path, capsys, where):
    new = orders(tmp_path / "new.csv", WEEK[1:], cancelled=(6, 7, 18))
    line = refuses(tmp_path, capsys, train.main, "--update", shop / "run", f"data.path={new}", *where)
    assert "new: 1 of the 200 events of the run are missing, for example user u00, item i00, at 0: " in line
    assert "except those of deleted users and the 3 that data.where leaves out; " in line


def test_an_update_says_that_a_condition_leaves_out_all_events_of_the_run(shop, tmp_path, capsys):
    new = orders(tmp_path / "new.csv", [*WEEK, ("u05", "i02", 21)], cancelled=range(len(OLD)))
    line = refuses(tmp_path, capsys, train.main, "--update", shop / "run", f"data.path={new}")
    assert "new: data.where leaves out all events of the run that the source has" in line


def test_prepared_data_cannot_show_what_a_condition_leaves_out(shop, tmp_path, capsys):
    new = orders(tmp_path / "new.csv", WEEK, cancelled=(7, 8, 19))
    load_dataset("csv", new, cache_dir=tmp_path / "cache", where="status <> 'cancelled'")
    new.unlink()
    (prepared,) = (tmp_path / "cache").glob("csv-*")
    line = refuses(tmp_path, capsys, train.main, "--update", shop / "run", f"data.path={prepared}")
    assert "3 of the 200 events of the run are missing" in line
    assert "perhaps data.where leaves them out: that can be checked only in raw files" in line
