"""Test runs with vectors of items from YAML to service: cold items, missing files, updates, weights of another run."""

import json
import os

import numpy as np
import pytest
import torch

import eval as evaluation
import train
from serving import Recommender
from tests.training.test_changes import refuses
from training.checkpoints import checkpoints
from training.config import load_config
from training.run import final_weights
from training.vocabulary import load_vocabulary

pl = pytest.importorskip("polars")  # it reads raw files

CONFIG = """
name: t
seed: 1
device: cpu
threads: 1
run_dir: PLACE/runs
data:
  format: csv
  path: PLACE/events.csv
  protocol: all
  cache_dir: PLACE/cache
  features: {items: {format: npy, path: PLACE/titles.npy, columns: {title: vector}, unknown: add}}
model:
  block: hstu
  max_seq_len: 12
  embedding_dim: 16
  num_layers: 1
  attention: {kind: dense}
  id_dropout: 1
  vector_correction: 2
loss: {kind: cross_entropy}
train: {epochs: 8, batch_size: 16, lr: 1e-2, checkpoint_seconds: 1000, update: {epochs: 1}}
"""
GROUPS, WIDTH = 4, 8
TABLE = "embedding.items.vectors.0."


def write_events(path, users, first, items=10):
    """Write events of users who stay within a group of items."""
    rng = np.random.default_rng(len(users))
    rows = []
    for user in users:
        chosen = rng.permutation(items)[:8] * GROUPS + user % GROUPS
        rows += [f"{user},{item},{first + 1000 * k + user}" for k, item in enumerate(chosen)]
    path.write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")


def write_vectors(place, ids):
    """Write vectors of items, each near the vector of its group."""
    centres = np.eye(WIDTH)[:GROUPS]
    noise = np.random.default_rng(0).normal(size=(1000, WIDTH)) * 0.1
    np.save(place / "titles.npy", np.stack([centres[i % GROUPS] + noise[i] for i in ids]).astype(np.float32))
    np.save(place / "titles.ids.npy", np.array(ids))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a finished run without an id table, whose catalogue has four items without events."""
    place = tmp_path_factory.mktemp("vectors")
    write_events(place / "events.csv", range(48), 0)
    write_vectors(place, range(44))
    (place / "run.yaml").write_text(CONFIG.replace("PLACE", str(place)))
    assert train.main([str(place / "run.yaml"), "--run", str(place / "run")]) == 0
    return place


def test_items_are_known_by_their_vectors_alone(place):
    weights, _, _ = final_weights(place / "run")
    assert not any("embeddings.item" in name for name in weights)
    assert weights[TABLE + "weight"].shape == (WIDTH, 16) and not weights[TABLE + "correction"][40:].any()
    assert weights[TABLE + "correction"][:40].any(1).all()
    out = place / "next.csv"
    assert evaluation.main([str(place / "run"), "--recommend", str(out), "--top-k", "5"]) == 0
    frame = pl.read_csv(out)
    new = frame.filter(pl.col("item") >= 40)
    assert new.filter(pl.col("item") % GROUPS == pl.col("user") % GROUPS).height > 0.9 * new.height > 10


def test_a_run_shares_the_file_and_needs_no_other(place, tmp_path):
    """Check that the run's array is a link to the cache's, and that a run works without the source and the cache."""
    (array,) = (place / "run" / "vocabulary").glob("vectors-0-values.npy")
    (cached,) = (place / "cache").glob("csv-*/feature-0-values.npy")
    assert os.path.samefile(array, cached)
    assert isinstance(load_vocabulary(place / "run").vocabulary.features.vectors[0].values, np.memmap)
    recommender = Recommender.load(place / "run", cache_bytes=2**22)
    recommender.append([0, 0, 0], [0, 4, 8], [1, 2, 3])
    items, _ = recommender.recommend([0], 8, 10)
    assert (items[0] % GROUPS == 0).mean() > 0.7
    table = recommender.model.item_table
    for name in ("titles.npy", "titles.ids.npy"):
        (place / name).rename(tmp_path / name)
    try:
        assert train.main(["--resume", str(place / "run"), "train.epochs=9"]) == 0
        (place / "cache").rename(tmp_path / "cache")
        assert evaluation.main([str(place / "run"), "--export-items", str(tmp_path / "out")]) == 0
    finally:
        for name in ("titles.npy", "titles.ids.npy", "cache"):
            (tmp_path / name).rename(place / name)
    assert not torch.equal(Recommender.load(place / "run", cache_bytes=2**22).model.item_table, table)
    vectors = np.load(tmp_path / "out" / "items.npy")
    assert vectors.shape == (44, 16) and np.isfinite(vectors).all()


def test_damaged_vectors_of_a_run(place, tmp_path, capsys):
    import shutil

    shutil.copytree(place / "run", tmp_path / "run")
    file = tmp_path / "run" / "vocabulary" / "vectors-0-values.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    file.write_bytes(content)
    assert "vectors-0-values.npy: damaged" in refuses(tmp_path, capsys, evaluation.main, tmp_path / "run")


def test_new_items_of_an_update(place, tmp_path):
    """New items begin with their vectors and zero corrections; known items keep rows and moments."""
    write_events(tmp_path / "more.csv", range(48), 0)
    events = (tmp_path / "more.csv").read_text()
    new = "".join(f"{user},{40 + user % GROUPS},{10**6 + user}\n" for user in range(24)) + "0,99,2000000\n"
    (tmp_path / "more.csv").write_text(events + new)
    write_vectors(tmp_path, [99, *range(44)])
    paths = [f"data.path={tmp_path}/more.csv", f"data.features.items.path={tmp_path}/titles.npy"]
    assert (
        train.main(["--update", str(place / "run"), *paths, "train.update.epochs=2", "--run", str(tmp_path / "run")])
        == 0
    )
    known = load_vocabulary(tmp_path / "run").vocabulary
    assert known.item_ids.tolist() == [*range(44), 99] and known.features.vectors[0].values.shape == (45, WIDTH)
    before, after = (saved(folder) for folder in (place / "run", tmp_path / "run"))
    for name, value in before.items():
        per_item = "correction" in name and value.shape[:1] == (44,)
        assert torch.equal(after[name][:44] if per_item else after[name], value), name
    assert not after[f"model.{TABLE}correction"][44].any()
    result = final_weights(tmp_path / "run")[0]
    assert result[TABLE + "correction"][40:].any(1).all()  # they have been trained
    assert json.loads((tmp_path / "run" / "lineage.jsonl").read_text().splitlines()[-1])["new_items"] == 1


def saved(run):
    from training.dcp import read_tensors, saved_tensors

    checkpoint = checkpoints(run)[-1] if run.parent.name.startswith("vectors") else checkpoints(run)[0]
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved_tensors(checkpoint).items()}
    read_tensors(checkpoint, tensors)
    return {name: value for name, value in tensors.items() if not name.startswith("random.")}


def test_weights_of_another_run_go_to_the_same_items(place, tmp_path, capsys):
    write_events(tmp_path / "events.csv", range(48), 0, items=9)
    write_vectors(tmp_path, range(4, 36))
    options = [f"data.path={tmp_path}/events.csv", f"data.features.items.path={tmp_path}/titles.npy"]
    options += ["data.features.items.unknown=drop", "train.epochs=1", "train.lr=1e-30", f"run_dir={tmp_path}"]
    config, source = str(place / "run.yaml"), str(place / "run")
    assert train.main([config, "--init-from", source, "--run", str(tmp_path / "run"), *options]) == 0
    old, new = (final_weights(folder)[0] for folder in (place / "run", tmp_path / "run"))
    assert torch.equal(new[TABLE + "correction"][4:], old[TABLE + "correction"][4:36])
    message = refuses(tmp_path, capsys, train.main, config, "--init-from", source, "model.id_dropout=0.5", *options)
    assert "another model, embedding.tables.embeddings.item.weight does not fit" in message


def test_places_of_vectors_may_change(place):
    columns = "data.features.items.columns.title"
    config = load_config(place / "run" / "config.yaml", [f"{columns}.ids={place}/titles.ids.npy"])
    assert config.data.features.items.vectors["title"].ids == f"{place}/titles.ids.npy"
    option = f"{columns}.ids={place}/titles.ids.npy"
    assert train.main(["--resume", str(place / "run"), option, "train.epochs=10"]) == 0


def test_vectors_are_in_no_exported_model(place, capsys):
    assert evaluation.main([str(place / "run"), "--export-model", str(place / "model.pt2")]) == 2
    assert "the model reads vectors of items, which are not supported" in capsys.readouterr().err
