"""Test train.py over several processes: the losses and metrics of one process, also when ranks are killed."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.programs.scale_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
# Each model, loss and way to spread the table at least once.
SHORT = ("hstu", "hstu-table-mol", "hstu-row-fused", "bsa-column-mixed", "sasrec-row-whole", "ranking")


def launch(python, worlds, out, *cases, restarts=0, kill=None, more=None):
    """Have tests/programs/scale_cases.py run `cases` in so many processes, one number after the other.

    python: its executable. restarts: of torchrun. Returns what was printed as errors.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {} if kill is None else {"SCALE_KILL": kill}
    environment |= {} if more is None else {"SCALE_CASES": str(more)}
    out.mkdir(parents=True, exist_ok=True)
    items = [f"{item},{item % 5},{'|'.join(str(item % n) for n in (2, 3, 7))}" for item in range(70)]
    (out / "items.csv").write_text("\n".join(["item,group,tags", *items]) + "\n")
    errors = ""
    for world in worlds:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        launcher += ["--monitor-interval", "0.1", "--max-restarts", str(restarts)]
        module = ["-m", "tests.programs.scale_cases", str(out), *cases]
        command = [python, *(launcher if world > 1 else []), *module]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        errors += done.stderr
    return errors


def facts_of(out, case, world):
    return json.loads((out / f"{case}-{world}.json").read_text())


def check(shared, alone):
    count = len(shared["losses"])  # a run that was gone on with has the last steps
    assert shared["losses"] == pytest.approx(alone["losses"][-count:], rel=1e-4)
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
    assert shared["users"] == alone["users"]


@pytest.mark.parametrize(
    ("worlds", "cases"), [((2,), SHORT), pytest.param((2, 4), CASES, marks=pytest.mark.slow)], ids=["short", "all"]
)
def test_ranks_train_and_judge_as_one(tmp_path, quick_python, worlds, cases):
    exported = ("hstu", "bsa-column-mixed", "sasrec-row-whole")  # replicated, by columns, by rows and with features
    after = ["judge:hstu-row-fused", *(f"export:{case}" for case in exported)]
    launch(quick_python.executable, [1, *worlds], tmp_path, *cases, *after)
    for case in cases:
        one = facts_of(tmp_path, case, 1)
        assert len(one["losses"]) >= 30 and one["losses"][-1] < 0.9 * one["losses"][0], case
        for world in worlds:
            check(facts_of(tmp_path, case, world), one)
    run = tmp_path / "hstu-row-fused-1"
    judged, trained = (json.loads((run / name).read_text()) for name in ("eval-test.json", "result.json"))
    assert judged["users"] == 37
    for how, metrics in trained["model"].items():
        assert judged["model"][how] == pytest.approx(metrics, rel=1e-4)
    assert judged["popularity"] == trained["popularity"]
    assert len((tmp_path / "lists.csv").read_text().splitlines()) > 300
    for case in exported:
        one, *several = (
            {path.name: path.read_bytes() for path in (tmp_path / f"items-{case}-{world}").iterdir()}
            for world in (1, *worlds)
        )
        assert {"items.npy", "item_ids.npy", "items.parquet"} <= one.keys()
        assert all(files == one for files in several), case


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kill"), [("sasrec-row-whole", "1:step:14"), ("bsa-column-mixed", "0:save:9")])
def test_a_killed_rank_changes_nothing(tmp_path, quick_python, case, kill):
    """SIGKILL of one rank, between two steps or within a checkpoint; torchrun starts both again."""
    launch(quick_python.executable, [1], tmp_path, case)
    errors = launch(
        quick_python.executable,
        [2],
        tmp_path,
        f"{case}:resume:train.checkpoint_seconds=0",
        restarts=1,
        kill=f"{case}:{kill}",
    )
    assert errors.count("error: ") == errors.count("error: another process of this run was lost") <= 1
    resumed = facts_of(tmp_path, case, 2)
    assert 0 < len(resumed["losses"]) < 32
    check(resumed, facts_of(tmp_path, case, 1))


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_torchrun_restarts_a_killed_rank_with_every_sharding(tmp_path, quick_python, kills):
    """SIGKILL of a random rank at a random step of each run; the metrics are those of an undisturbed run."""
    draw, shardings = random.Random(48), ("replicated", "row_wise", "table_wise", "column_wise")
    cases = {f"{sharding}-{n}": [f"parallel.embedding={sharding}"] for sharding in shardings for n in range(kills)}
    kill = " ".join(f"{case}:{draw.randrange(2)}:step:{draw.randint(2, 7)}" for case in cases)
    print("killed, drawn with seed 48:", kill)
    more = tmp_path / "more.json"
    more.write_text(json.dumps(cases))
    settings = "train.epochs=2:train.checkpoint_seconds=0:eval.every=1"  # 8 steps
    launch(quick_python.executable, [1], tmp_path / "alone", "replicated-0:train.epochs=2:eval.every=1", more=more)
    resumed = [f"{case}:resume:{settings}" for case in cases]
    launch(quick_python.executable, [2], tmp_path, *resumed, restarts=len(cases), kill=kill, more=more)
    for case in cases:
        facts = facts_of(tmp_path, case, 2)
        assert (tmp_path / f"{case}.killed").exists() and 0 < len(facts["losses"]) < 8, case
        check(facts, facts_of(tmp_path / "alone", "replicated-0", 1))


@pytest.mark.slow
def test_resumed_on_other_ranks_and_shardings(tmp_path, quick_python):
    case = "hstu"
    launch(quick_python.executable, [1], tmp_path / "alone", case)
    changes = [(2, 2, "row_wise"), (1, 4, "replicated"), (2, 5, "column_wise"), (2, 6, "replicated")]
    for world, epochs, kind in (*changes, (2, 8, "table_wise")):
        launch(
            quick_python.executable, [world], tmp_path, f"{case}:resume:train.epochs={epochs}:parallel.embedding={kind}"
        )
    check(facts_of(tmp_path, case, 2), facts_of(tmp_path / "alone", case, 1))


@pytest.mark.slow
def test_batches_sequences_and_table_are_divided_together(tmp_path, quick_python):
    """Two ranks share each batch, two each sequence, and all four the table; an auxiliary loss that counts groups."""
    ring, row = "model.attention={kind: ring, inner: hstu}", "parallel.embedding=row_wise"
    indexer = "model.attention={kind: indexer, top_k: 4, warmup_steps: 8, selection_group: 4}"
    cases = {"ring": [ring, row], "ring-whole": [ring, row, "loss.kind=cross_entropy"], "indexer": [indexer]}
    more = tmp_path / "more.json"
    more.write_text(json.dumps(cases))
    launch(quick_python.executable, [1], tmp_path, *cases, more=more)
    divided = [f"{case}:parallel.context=2" if "ring" in case else case for case in cases]
    launch(quick_python.executable, [4], tmp_path, *divided, more=more)
    for case in cases:
        check(facts_of(tmp_path, case, 4), facts_of(tmp_path, case, 1))
