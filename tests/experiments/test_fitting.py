"""Test `fit`: results and errors are those of files, existing runs are continued, runs have metrics and reports."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from data.errors import ConfigError
from data.types import DataError
from experiments import Run, fit
from training import loop
from training.folder import FolderError

MODEL = {"block": "hstu", "max_seq_len": 8, "embedding_dim": 8, "num_layers": 1, "attention": {"kind": "dense"}}
CONFIG = {
    "name": "shop",
    "device": "cpu",
    "threads": 1,
    "data": {"protocol": "leave_one_out", "columns": {"user": "customer", "item": "sku", "timestamp": "at"}},
    "model": MODEL,
    "train": {"epochs": 2, "batch_size": 8},
}


class Capsule:
    """A frame of another library, with Arrow's PyCapsule interface only."""

    def __init__(self, frame):
        self.frame = frame

    def __arrow_c_stream__(self, requested_schema=None):
        return self.frame.__arrow_c_stream__(requested_schema)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def orders():
    import polars as pl

    rows = [(f"c{user}", f"s{(user + step) % 9}", 1_700_000_000 + 60 * step) for user in range(24) for step in range(7)]
    return pl.DataFrame(rows, schema=["customer", "sku", "at"], orient="row")


def history(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def same_weights(run: Path, other: Path) -> None:
    tensors, others = (load_file(folder / "best" / "model.safetensors") for folder in (run, other))
    assert tensors and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def test_a_frame_and_a_file_give_bit_identical_runs(capsys):
    import polars as pl
    import yaml

    orders().write_csv("orders.csv")
    tree = CONFIG | {"data": CONFIG["data"] | {"format": "csv", "path": "orders.csv"}}
    Path("shop.yaml").write_text(yaml.safe_dump(tree))
    assert train.main(["shop.yaml", "--run", "of-file", "train.lr=0.01", "--quiet"]) == 0
    run = fit(orders(), config=CONFIG, run="of-frame", quiet=True, train={"lr": 0.01})
    assert not capsys.readouterr().out
    lines = [json.loads(line) for name in ("of-file", "of-frame") for line in history(Path(name))]
    assert all(line.pop("seconds") for line in lines) and lines[:2] == lines[2:]
    same_weights(Path("of-file"), run.folder)
    assert run.metrics == json.loads(Path("of-file/result.json").read_text())["model"]["history"]

    recommender = run.recommender()
    assert recommender.recommend(["c3"], k=3)[0].shape == (1, 3)
    # Other forms of the same events are the same data: the finished run is returned.
    for frame in (Capsule(orders()), orders().lazy(), orders().to_dict(as_series=False)):
        assert fit(frame, config=CONFIG, run=run, quiet=True, train={"lr": 0.01}).result["epoch"] == run.result["epoch"]
    assert fit("orders.csv", config="shop.yaml", quiet=True, **{"train.lr": 0.01}).metrics == run.metrics
    with pytest.raises(ConfigError, match=r"train.lr: 0.01 -> 0.02"):
        fit(orders(), config=CONFIG, run="of-frame", quiet=True, train={"lr": 0.02})
    more = pl.concat([orders(), orders().head(1)])
    with pytest.raises(DataError, match="trained on other data"):
        fit(more, config=CONFIG, run="of-frame", quiet=True, train={"lr": 0.01})

    again = Run.open("of-frame")
    assert again.folder == run.folder and repr(again) == f"Run({str(Path('of-frame').absolute())!r})"
    assert str(again.report()) == Path("of-frame/report.md").read_text()
    assert "&lt;svg" in again.report()._repr_html_()
    with pytest.raises(FolderError, match="not a run folder"):
        Run.open(".")


def test_pandas_and_pyarrow():
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    from data.frames import as_polars

    columns = orders().to_dict(as_series=False)
    for frame in (pd.DataFrame(columns), pa.table(columns)):
        assert as_polars(frame, "events").equals(orders())


def test_kinds_of_features_follow_their_types():
    import polars as pl

    run = fit(
        orders(),
        config=CONFIG,
        items=pl.DataFrame({"sku": [f"s{n}" for n in range(9)], "the brand": ["a", "b", "c"] * 3, "price": range(9)}),
        users=pl.DataFrame({"user": [f"c{n}" for n in range(24)], "tags": [["x", "y"]] * 24}),
        quiet=True,
        train={"epochs": 1},
    )
    text = (run.folder / "config.yaml").read_text()
    assert "the-brand:\n          kind: category\n          column: the brand" in text and "kind: list" in text
    assert "id: sku" in text and "price:\n          kind: number" in text


def test_a_list_of_floats_is_a_vector():
    import polars as pl

    from data.frames import feature_kind

    for dtype, kind in (
        (pl.List(pl.Float32), "vector"), (pl.Array(pl.Float64, 3), "vector"), (pl.List(pl.Int64), "list"),
        (pl.Float32, "number"), (pl.Enum(["a"]), "category"), (pl.Boolean, "category"), (pl.Date, None),
    ):  # fmt: skip
        assert feature_kind(dtype) == kind


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda pl, f: f.with_columns(sku=pl.when(pl.col("at") > 1_700_000_060).then("sku")), {},
         r"events\.parquet row 1, column sku: the value is missing"),
        (lambda pl, f: f.drop("sku"), {}, r"events\.parquet: no column 'sku'"),
        (lambda pl, f: f.clear(), {}, "events: the frame has no rows"),
        (lambda pl, f: 7, {}, "events: no data frame can be made of this int"),
        (lambda pl, f: f.with_columns(at=pl.Series([object()] * len(f), dtype=pl.Object)), {},
         "events, column at: expected numbers, text or times"),
        (lambda pl, f: "orders.csv", {}, r"orders\.csv: no such file"),
        (lambda pl, f: f, {"model": {"num_heds": 2}}, "model.num_heds: unknown key, did you mean num_heads"),
        (lambda pl, f: f, {"items": {"sku": ["s1"], "day": [None]}}, "items, column day: Null cannot be a feature"),
        (lambda pl, f: f, {"config": "nothing.yaml"}, "nothing.yaml: No such file"),
    ],
)  # fmt: skip
def test_errors_are_those_of_files(change, options, message):
    import polars as pl

    with pytest.raises((ConfigError, DataError), match=message):
        fit(change(pl, orders()), **{"config": CONFIG, "quiet": True} | options)


def test_ctrl_c_saves_and_the_same_call_continues(monkeypatch):
    whole = fit(orders(), config=CONFIG, quiet=True)
    set_lr, handler = loop.set_lr, signal.getsignal(signal.SIGINT)

    def interrupted(config, optimizer, step, steps):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return set_lr(config, optimizer, step, steps)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "set_lr", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"Stopped while training\. Saved at step 5 of 6"):
            fit(orders(), config=CONFIG, run="run", quiet=True)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not Run.open("run").result["finished"] and not Run.open("run").metrics
    same_weights(fit(orders(), config=CONFIG, run="run", quiet=True).folder, whole.folder)
