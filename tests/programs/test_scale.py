"""Test train.py over several processes: same losses and metrics as one process, also when ranks are killed."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.run import parse_args

from cli.command import train_options
from tests.damage import damaged_files
from tests.programs import scale_cases
from tests.programs.scale_cases import CASES
from tests.support.forked import forked_torchrun
from training.checkpoints import checkpoints, set_aside_damaged
from training.saved import CheckpointError, load_folder

ROOT = Path(__file__).resolve().parents[2]
FEW = "train.epochs=2:eval.every=2:train.checkpoint_seconds=0"  # eight steps
# How two ranks share the table or the sequences.
SHARDINGS = ("replicated", "row_wise", "table_wise", "column_wise")
WAYS = {sharding: [f"parallel.embedding={sharding}"] for sharding in SHARDINGS}
WAYS |= {"heads": ["parallel.context=2"], "heads-rows": ["parallel.context=2", "parallel.embedding=row_wise"]}
WAYS["ring"] = ["parallel.context=2", "parallel.context_by=ring", "model.attention={kind: ring, inner: hstu}"]
# Each model, loss and sharding of the table once; test_a_rank_without_rows_of_the_table has fused optimisers.
SHORT = ("hstu", "hstu-table-mol", "bsa-column-mixed", "sasrec-row-whole", "ranking")
SHORT = tuple(f"{case}:train.epochs=3:train.lr=2e-2:eval.every=3" for case in SHORT)


def launch(worlds, out, *cases, restarts=0, kill=None, more=None, status=0, by_torchrun=False):
    """Run `cases` by tests/programs/scale_cases.py with each number of processes; return the standard error.

    restarts: the number of restarts of all processes after one has failed; status: the expected exit status;
    by_torchrun: start them by torchrun, and not as forked processes with its environment.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {} if kill is None else {"SCALE_KILL": kill}
    environment |= {} if more is None else {"SCALE_CASES": str(more)}
    out.mkdir(parents=True, exist_ok=True)
    items = [f"{item},{item % 5},{'|'.join(str(item % n) for n in (2, 3, 7))}" for item in range(70)]
    (out / "items.csv").write_text("\n".join(["item,group,tags", *items]) + "\n")
    errors = ""
    for world in worlds:
        if by_torchrun:
            command = [*torchrun(world, restarts), "-m", "tests.programs.scale_cases", str(out), *cases]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT)
            code, printed = done.returncode, done.stderr
        else:
            code, printed = forked_torchrun(world, scale_cases.main, str(out), *cases, restarts=restarts, **environment)
        assert code == status, printed[-3000:]
        errors += printed
    return errors


def torchrun(world, restarts=0):
    """Return the beginning of a command that runs a program in `world` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return [sys.executable, *launcher, "--monitor-interval", "0.1", "--max-restarts", str(restarts)]


def facts_of(out, case, world):
    return json.loads((out / f"{case}-{world}.json").read_text())


def check(shared, alone):
    count = len(shared["losses"])  # a resumed run has only the last steps
    assert shared["losses"] == pytest.approx(alone["losses"][-count:], rel=1e-4)
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
    assert shared["users"] == alone["users"]


@pytest.mark.parametrize(
    ("worlds", "cases"), [((2,), SHORT), pytest.param((2, 4), CASES, marks=pytest.mark.slow)], ids=["short", "all"]
)
def test_ranks_train_and_judge_as_one(tmp_path, worlds, cases):
    exported = ("hstu", "bsa-column-mixed", "sasrec-row-whole")  # replicated, by columns, by rows and with features
    after = ["judge:sasrec-row-whole", *(f"export:{case}" for case in exported)]
    launch([1, *worlds], tmp_path, *cases, *after)
    for case in (name.partition(":")[0] for name in cases):
        one = facts_of(tmp_path, case, 1)
        assert len(one["losses"]) >= 12 and one["losses"][-1] < 0.9 * one["losses"][0], case
        for world in worlds:
            check(facts_of(tmp_path, case, world), one)
    run = tmp_path / "sasrec-row-whole-1"
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
@pytest.mark.parametrize(
    ("case", "kill", "ranks"),
    [
        ("sasrec-row-whole", "1:step:14", "parallel.data=auto"),
        ("bsa-column-mixed", "0:save:9", "parallel.data=auto"),
        ("hstu", "1:step:14", "parallel.context=2"),  # by heads
    ],
)
def test_a_killed_rank_changes_nothing(tmp_path, case, kill, ranks):
    """Kill one rank with SIGKILL between two steps or within a checkpoint; torchrun restarts both."""
    launch([1], tmp_path, case)
    errors = launch(
        [2],
        tmp_path,
        f"{case}:resume:train.checkpoint_seconds=0:{ranks}",
        restarts=1,
        kill=f"{case}:{kill}",
        by_torchrun=True,
    )
    assert errors.count("error: ") == errors.count("error: communication with another process failed") <= 1
    resumed = facts_of(tmp_path, case, 2)
    assert 0 < len(resumed["losses"]) < 32
    check(resumed, facts_of(tmp_path, case, 1))


@pytest.mark.parametrize(
    ("ways", "kills", "epochs", "by_torchrun"),
    [(("row_wise",), 1, 2, False), pytest.param(WAYS, 5, 8, True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["one", "every"],
)
def test_a_killed_rank_of_every_kind_is_restarted(tmp_path, ways, kills, epochs, by_torchrun):
    """Kill a random rank with SIGKILL at a random step of each run; the metrics are those of an undisturbed run."""
    draw, steps = random.Random(48), 4 * epochs
    cases = {f"{way}-{n}": WAYS[way] for way in ways for n in range(kills)}
    kill = " ".join(f"{case}:{draw.randrange(2)}:step:{draw.randint(4, steps - 1)}" for case in cases)
    print("killed, drawn with seed 48:", kill)
    more = tmp_path / "more.json"
    more.write_text(json.dumps(cases | {"alone": []}))
    settings = f"train.epochs={epochs}:eval.every=2:train.checkpoint_seconds=0"
    launch([1], tmp_path, f"alone:resume:{settings}", more=more)
    resumed = [f"{case}:resume:{settings}" for case in cases]
    errors = launch([2], tmp_path, *resumed, restarts=len(cases), kill=kill, more=more, by_torchrun=by_torchrun)
    messages = errors.count("error: communication with another process failed")
    assert errors.count("error: ") == messages <= len(cases), errors[-3000:]
    for case in cases:
        facts = facts_of(tmp_path, case, 2)
        assert (tmp_path / f"{case}.killed").exists() and 0 < len(facts["losses"]) < steps, case
        check(facts, facts_of(tmp_path, "alone", 1))


def tensors_of(checkpoint):
    """Return the tensors in a checkpoint."""
    dcp_to_torch_save(checkpoint, checkpoint.parent / "whole.pt")
    return torch.load(checkpoint.parent / "whole.pt")


def test_a_rank_without_rows_of_the_table(tmp_path):
    """Train and resume with four items sharded by rows on three ranks: two items, two, and none."""
    items = "data.synthetic={num_users: 37, num_items: 4, num_clusters: 2, mean_length: 8}"
    cases = {"few": [items, "parallel.embedding=row_wise"]}
    cases["fused"] = [*cases["few"], "parallel.fused=rowwise_adagrad", "loss.negatives=shared"]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    for world, epochs in ((1, (2,)), (3, (1, 2))):
        names = [f"{case}:resume:train.epochs={epoch}:eval.every=2" for epoch in epochs for case in cases]
        launch([world], tmp_path / str(world), *names, more=tmp_path / "cases.json")
    for case in cases:
        check(facts_of(tmp_path / "3", case, 3), facts_of(tmp_path / "1", case, 1))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return (a folder with a finished run `row` of two ranks and a run `hstu` that diverged, the errors of `hstu`).

    The two last checkpoints of `row` are in the last epoch.
    """
    out = tmp_path_factory.mktemp("two")
    (out / "cases.json").write_text(json.dumps({"row": ["parallel.embedding=row_wise", "train.ema_decay=0.9"]}))
    runs = f"row:resume:{FEW}", f"hstu:resume:{FEW}:train.lr=1e20"
    return out, launch([2], out, *runs, more=out / "cases.json", status=1)


@pytest.mark.parametrize("option", ["--out", "--init-from", "--resume", "--quiet", "--dry-run"])
def test_torchrun_passes_the_options_of_train_on(option):
    arguments = ["train.py", "config.yaml", option, "x"]
    assert parse_args(["--standalone", *arguments]).training_script_args == arguments[1:]


def test_the_folder_s_option_has_two_names():
    assert [train_options(None, ["pyproject.toml", name, "r"]).run for name in ("--out", "--run")] == [Path("r")] * 2


def test_ranks_save_nothing_that_is_not_finite(two_ranks):
    out, errors = two_ranks
    left = checkpoints(out / "hstu")
    for checkpoint in left:
        assert all(value.isfinite().all() for value in tensors_of(checkpoint).values())
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "is not finite after step" in line and f"{left[-1]} is kept" in line


def test_ranks_agree_once_a_step(two_ranks):
    """Count the all-reduces: one a step for checkpoints and signals, and one at the end of each epoch but the last."""
    facts = facts_of(two_ranks[0], "row", 2)
    assert facts["agreements"] == len(facts["losses"]) + 1


@pytest.mark.slow
def test_damage_of_a_checkpoint_of_ranks_is_found(two_ranks, tmp_path):
    """Damage each file, including shards; --resume auto continues from the checkpoint before."""
    shutil.copytree(two_ranks[0], tmp_path, dirs_exist_ok=True)
    run = tmp_path / "row"
    before, last = checkpoints(run)
    assert len([path for path in last.iterdir() if path.suffix == ".distcp"]) == 2
    for damage in damaged_files(last):
        with pytest.raises(CheckpointError, match=r"damaged|not found|cannot be read"):
            load_folder(last, checked=slice(None))
            pytest.fail(damage)
        (aside,) = set_aside_damaged(run)
        assert checkpoints(run) == [before], damage
        next((run / "checkpoints").glob("damaged-*")).rename(aside)
    shard = next(last.glob("__1_*.distcp"))
    shard.write_bytes(bytes(byte ^ 1 if place == 5000 else byte for place, byte in enumerate(shard.read_bytes())))
    command = [*torchrun(2), "train.py", "--resume", run]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and f"error: {shard}: damaged" in done.stderr, done.stderr
    launch([2], tmp_path, f"row:resume:{FEW}", more=tmp_path / "cases.json")
    assert len(list((run / "checkpoints").glob(f"damaged-{last.name}-*"))) == 1
    assert len(facts_of(tmp_path, "row", 2)["losses"]) == 1
    check(facts_of(tmp_path, "row", 2), facts_of(two_ranks[0], "row", 2))


def test_a_run_of_one_process_goes_on_with_two_ranks_and_back(tmp_path):
    """Train with a loss without negatives, since ranks draw other negatives than one process without `parallel`."""
    options = ["loss.kind=cross_entropy", "train.ema_decay=0.9"]
    (tmp_path / "cases.json").write_text(json.dumps({"whole": options, "alone": options}))
    one, two = "resume:eval.every=3:parallel.data=1:train.epochs", "resume:eval.every=3:parallel.data=auto:train.epochs"
    for world, *names in ((1, f"alone:{one}=3", f"whole:{one}=1"), (2, f"whole:{two}=2"), (1, f"whole:{one}=3")):
        launch([world], tmp_path, *names, more=tmp_path / "cases.json")
    assert len(facts_of(tmp_path, "whole", 1)["losses"]) == 4
    check(facts_of(tmp_path, "whole", 1), facts_of(tmp_path, "alone", 1))


@pytest.mark.slow
def test_resumed_on_other_ranks_and_shardings(tmp_path):
    case = "hstu"
    launch([1], tmp_path / "alone", case)
    changes = [(2, 2, "row_wise"), (1, 4, "replicated"), (2, 5, "column_wise"), (2, 6, "replicated")]
    for world, epochs, kind in (*changes, (2, 8, "table_wise")):
        launch([world], tmp_path, f"{case}:resume:train.epochs={epochs}:parallel.embedding={kind}")
    check(facts_of(tmp_path, case, 2), facts_of(tmp_path / "alone", case, 1))


@pytest.mark.slow
def test_batches_sequences_and_table_are_divided_together(tmp_path):
    """Divide each batch by two ranks, each sequence by two and the table by four, with an auxiliary loss."""
    ring, row = "model.attention={kind: ring, inner: hstu}", "parallel.embedding=row_wise"
    indexer = "model.attention={kind: indexer, top_k: 4, warmup_steps: 8, selection_group: 4, num_kv_heads: 2}"
    cases = {"ring": [ring, row], "ring-whole": [ring, row, "loss.kind=cross_entropy"], "indexer": [indexer]}
    users = "{format: csv, path: OUT/items.csv, id: item, as: tokens, unknown: drop, columns: {group: category}}"
    features = f"data.features={{users: {users}}}"
    cases["features"] = [features, row, "parallel.fused=rowwise_adagrad", "loss.negatives=shared"]
    more = tmp_path / "more.json"
    more.write_text(json.dumps(cases))
    launch([1], tmp_path, *cases, more=more)
    divided = [f"{case}:parallel.context=2" for case in cases]
    divided = [f"{case}:parallel.context_by=ring" if "ring" in case else case for case in divided]
    launch([4], tmp_path, *divided, more=more)
    for case in cases:
        check(facts_of(tmp_path, case, 4), facts_of(tmp_path, case, 1))
