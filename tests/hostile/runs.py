"""Define cases of runs that are resumed or evaluated after checkpoints, configurations or metrics were changed.

A change is made to a copy of an interrupted run. If it can be resumed, it must end as the uninterrupted run: with the
same lines of metrics.jsonl (except seconds), weights, optimizer and result.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save

import eval as evaluation
import train
from tests.hostile.configs import BASE
from tests.hostile.harness import EITHER, ERROR, WORKS, Case, Process, judge, signalled
from training import loop
from training.dcp import read_tensors, saved_tensors
from training.saved import checksum, facts_checksum

LONG = ["train.epochs=6", "train.batch_size=4", "data.synthetic.num_users=80"]
STEP = 48  # the step of 120 at which the run is interrupted: in the third of six epochs
Change = Callable[[Path], object]


def start(run: Path, *overrides: str) -> int:
    """Run train.py for a run folder, with the configuration next to it."""
    config = run.with_name("run.yaml")
    config.write_text(BASE.replace("cache_dir: cache", f"cache_dir: {run.parent}/cache"))
    return train.main([str(config), *LONG, *overrides, "--run", str(run)])


def facts(run: Path) -> dict:
    """Return the results of a run that must not depend on interruptions."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run / "result.json").read_text())
    digest = lambda *files: hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {
        "metrics": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
        "weights": digest(last / "__0_0.distcp"),
        "best": digest(run / "best" / "model.safetensors"),
        "result": {key: result[key] for key in ("model", "popularity", "by_history", "weights", "epoch", "steps")},
    }


def differs(run: Path, expected: dict) -> str | None:
    actual = facts(run)
    names = [name for name in expected if actual[name] != expected[name]]
    left = [path.name for path in run.rglob(".*") if path.name not in (".lock", ".metadata")]
    if names:
        return f"other {', '.join(names)} than the run that was never stopped"
    return f"left behind {left}" if left else None


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def folders(run: Path, name: str) -> list[Path]:
    """Return the last checkpoint and best/, if they have the file."""
    return [folder for folder in (newest(run), run / "best") if (folder / name).exists()]


def raw(name: str, change: Callable[[bytes], bytes]) -> Change:
    """Return a change of a file of the checkpoints without its checksum."""

    def go(run: Path) -> None:
        for folder in folders(run, name):
            (folder / name).write_bytes(change((folder / name).read_bytes()))

    return go


def forged(name: str, change: Callable[[bytes], bytes]) -> Change:
    """Return a change of a file of the checkpoints with all checksums."""

    def go(run: Path) -> None:
        for folder in folders(run, name):
            content = change((folder / name).read_bytes())
            (folder / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            size = len(content)
            _state(
                folder,
                lambda facts, digest=digest, size=size: (
                    facts["sha256"].update({name: digest}),
                    facts["sizes"].update({name: size}),
                ),
            )

    return go


def _state(folder: Path, change: Callable[[dict], object]) -> None:
    facts = json.loads((folder / "state.json").read_text())
    change(facts)
    facts.pop("checksum", None)
    (folder / "state.json").write_text(json.dumps(facts | {"checksum": facts_checksum(facts)}))


def tensors(kind: str, change: Callable[[dict], object], listed: bool = True) -> Change:
    """Return a change of the tensors in the checkpoint (for `model`, also in best/) with all checksums.

    kind: `model`, or `state` for all other tensors. listed: whether state.json gets the names of the new tensors.
    """

    def rewrite(content: bytes) -> bytes:
        entries = dict(load(content))
        return save(change(entries) or entries)

    def go(run: Path) -> None:
        if kind == "model":
            forged("model.safetensors", rewrite)(run)
        folder = newest(run)
        entries = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved_tensors(folder).items()}
        read_tensors(folder, entries)
        weights = {name[6:]: value for name, value in entries.items() if name.startswith("model.")}
        state = {name: value for name, value in entries.items() if not name.startswith("model.")}
        part = weights if kind == "model" else state
        changed = change(part) or part
        weights, state = (changed, state) if kind == "model" else (weights, changed)
        entries = state | {f"model.{name}": value for name, value in weights.items()}
        dcp.save(entries, checkpoint_id=folder, no_dist=True)
        files = [path for path in folder.iterdir() if path.name != "state.json"]
        facts = {"sha256": {path.name: checksum(path) for path in files}}
        facts["sizes"] = {path.name: path.stat().st_size for path in files}
        _state(folder, lambda of: of.update(facts | ({"tensors": sorted(entries)} if listed else {})))

    return go


def with_values(**values) -> Change:
    """Return a change of the facts in state.json with its checksum."""
    return lambda run: [_state(folder, lambda facts: facts.update(values)) for folder in folders(run, "state.json")]


def without_fact(key: str) -> Change:
    return lambda run: [_state(folder, lambda facts: facts.pop(key, None)) for folder in folders(run, "state.json")]


def config(pattern: str, by: str) -> Change:
    def go(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert re.search(pattern, text), text
        (run / "config.yaml").write_text(re.sub(pattern, by, text))

    return go


def metrics(change: Callable[[bytes], bytes]) -> Change:
    return lambda run: (run / "metrics.jsonl").write_bytes(change((run / "metrics.jsonl").read_bytes()))


class Bomb:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def first(entries: dict) -> str:
    return sorted(entries)[0]


def emptied(run: Path) -> None:
    for folder in (newest(run), run / "best"):
        for file in folder.iterdir():
            file.unlink()


def no_checkpoints(run: Path, instead: str | None = None) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "best", ignore_errors=True)
    if instead == "file":
        (run / "checkpoints").write_text("x")
    elif instead == "step":
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "step-00000099").write_text("x")


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Return a change that replaces a file of the checkpoints by another object, such as a folder."""

    def go(run: Path) -> None:
        for folder in folders(run, name):
            (folder / name).unlink()
            make(folder / name)

    return go


def linked(name: str) -> Change:
    """Return a change that moves a folder of the run and links to it."""

    def go(run: Path) -> None:
        (run / name).rename(run.parent / f"moved-{name}")
        (run / name).symlink_to(run.parent / f"moved-{name}")

    return go


# Changes after which a run must be neither resumed nor evaluated.
DAMAGE: dict[str, Change] = {
    "model cut short": raw("model.safetensors", lambda b: b[:-9]),
    "model with a bit turned": raw("model.safetensors", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]),
    "model empty": raw("model.safetensors", lambda b: b""),
    "model cut short, forged": forged("model.safetensors", lambda b: b[:-9]),
    "model is a pickle, forged": forged("model.safetensors", lambda b: pickle.dumps(Bomb())),
    "model with a header of 2^60, forged": forged("model.safetensors", lambda b: struct.pack("<Q", 2**60) + b[8:]),
    "weight of another shape": tensors("model", lambda t: t.update({first(t): torch.zeros(3)})),
    "weight missing": tensors("model", lambda t: t.pop(first(t)) is None),
    "weight too many": tensors("model", lambda t: t.update(zzz=torch.zeros(1))),
    "weights in fp64": tensors("model", lambda t: {name: value.double() for name, value in t.items()}),
    "weights in int32": tensors("model", lambda t: {name: value.int() for name, value in t.items()}),
    "weights in complex": tensors("model", lambda t: {name: value.to(torch.complex64) for name, value in t.items()}),
    "weights NaN": tensors("model", lambda t: {name: value * float("nan") for name, value in t.items()}),
    "one weight infinite": tensors("model", lambda t: t[first(t)].view(-1)[-1:].fill_(float("inf")) is None),
    "state.json cut short": raw("state.json", lambda b: b[:40]),
    "state.json is a list": raw("state.json", lambda b: b"[]"),
    "state.json is null": raw("state.json", lambda b: b"null"),
    "state.json in latin-1": raw("state.json", lambda b: b"\xe9"),
    "state.json of 100,000 brackets": raw("state.json", lambda b: b"[" * 100000),
    "state.json edited": raw("state.json", lambda b: b.replace(b'"epoch": ', b'"epoch": 1')),
    "no checksums": without_fact("sha256"),
    "no fingerprint": without_fact("fingerprint"),
    "no epoch": without_fact("epoch"),
    "epoch is text": with_values(epoch="x"),
    "epoch is true": with_values(epoch=True),
    "another embedding_dim": config("embedding_dim: 8", "embedding_dim: 16"),
    "another num_layers": config("num_layers: 1", "num_layers: 2"),
    "other data": config("num_items: 20", "num_items: 21"),
    "model is a pipe": instead("model.safetensors", os.mkfifo),
    "model is a device": instead("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "model of 1 TB": instead("model.safetensors", lambda path: (path.touch(), os.truncate(path, 2**40))),
    "state.json is a pipe": instead("state.json", os.mkfifo),
    "state.json is a device": instead("state.json", lambda path: path.symlink_to("/dev/zero")),
    "scale changed in config.yaml": config("scale: 1.0", "scale: 5.0"),
    "lr changed in config.yaml": config("lr: 0.001", "lr: 0.01"),
    "config.yaml deleted": lambda run: (run / "config.yaml").unlink(),
    "config.yaml of other bytes": lambda run: (run / "config.yaml").write_bytes(b"\xff\0"),
    "no checkpoints": no_checkpoints,
    "checkpoint is an empty folder": emptied,
    "checkpoint is a file": lambda run: no_checkpoints(run, "step"),
    "checkpoints is a file": lambda run: no_checkpoints(run, "file"),
}

# Changes after which a run must not be resumed.
RESUME: dict[str, Change] = {
    "tensors cut short": raw("__0_0.distcp", lambda b: b[:-9]),
    "tensors cut short, forged": forged("__0_0.distcp", lambda b: b[: len(b) // 2]),
    "tensors are zeros, forged": forged("__0_0.distcp", lambda b: bytes(len(b))),
    "tensors are a pickle, forged": forged("__0_0.distcp", lambda b: pickle.dumps(Bomb())),
    "tensors deleted": lambda run: (newest(run) / "__0_0.distcp").unlink(),
    "metadata cut short": raw(".metadata", lambda b: b[:-9]),
    "metadata deleted": lambda run: (newest(run) / ".metadata").unlink(),
    "metadata run code, forged": forged(".metadata", lambda b: pickle.dumps(Bomb())),
    "metadata are a list, forged": forged(".metadata", lambda b: pickle.dumps([])),
    "metadata is a pipe": instead(".metadata", os.mkfifo),
    "no random state": tensors("state", lambda t: t.pop("random.cpu") is None, listed=False),
    "random state too short": tensors("state", lambda t: t.update({"random.cpu": torch.zeros(3, dtype=torch.uint8)})),
    "random state as fractions": tensors("state", lambda t: t.update({"random.cpu": torch.zeros(3)})),
    "random state of zeros": tensors("state", lambda t: t["random.cpu"].zero_() is None),
    "unknown tensor": tensors("state", lambda t: t.update({"a.b": torch.zeros(1)})),
    "optimizer of no parameter": tensors("state", lambda t: t.update({"optimizer.x.step": torch.zeros(1)})),
    "optimizer of other shapes": tensors("state", lambda t: {n: v[:1] if "exp_avg" in n else v for n, v in t.items()}),
    "optimizer half missing": tensors("state", lambda t: {n: v for n, v in t.items() if "attention" not in n}, False),
    "optimizer without second moments": tensors("state", lambda t: {n: v for n, v in t.items() if "_sq" not in n}),
    "optimizer missing": tensors("state", lambda t: {n: v for n, v in t.items() if "optimizer" not in n}, False),
    "optimizer NaN": tensors("state", lambda t: {n: v * float("nan") if "exp" in n else v for n, v in t.items()}),
    "optimizer negative": tensors("state", lambda t: {n: v - 1 if "exp_avg_sq" in n else v for n, v in t.items()}),
    "optimizer in int32": tensors("state", lambda t: {n: v.int() if "exp" in n else v for n, v in t.items()}),
    "no list of tensors": without_fact("tensors"),
    "step -5": with_values(step=-5),
    "step is text": with_values(step="x"),
    "batch 10^9": with_values(batch=10**9),
    "batch -3": with_values(batch=-3),
    "epoch -1": with_values(epoch=-1),
    "epoch 1000": with_values(epoch=1000),
    "records are text": with_values(records="x"),
    "losses NaN": with_values(losses={"loss": [float("nan"), 3]}),
    "losses of another shape": with_values(losses={"loss": [1.0]}),
    "best is text": with_values(best="x"),
    "seconds negative": with_values(seconds=-1.0),
    "a fact too many": with_values(zzz=1),
    "seed changed": config("(?m)^seed: 1", "seed: 2"),
    "batch_size changed": config("batch_size: 4\n", "batch_size: 8\n"),
    "epochs fewer than done": config("epochs: 6", "epochs: 2"),
    "a loss changed": config("num_negatives: 4", "num_negatives: 5"),
    "run.json deleted": lambda run: (run / "run.json").unlink(),
    "run.json of another run": lambda run: (run / "run.json").write_text('{"run": "0123"}'),
    "run.json is a list": lambda run: (run / "run.json").write_text("[]"),
    "checkpoints is a link": linked("checkpoints"),
    "best is a link": linked("best"),
    "tensorboard is a link": linked("tensorboard"),
    ".lock is a link": lambda run: ((run / ".lock").unlink(), (run / ".lock").symlink_to(run / "config.yaml")),
    ".lock is a pipe": lambda run: ((run / ".lock").unlink(), os.mkfifo(run / ".lock")),
    "metrics.jsonl is a pipe": lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")),
    "tensors are a pipe": instead("__0_0.distcp", os.mkfifo),
    "metrics.jsonl is a folder": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
}

# Changes after which a resumed run must end as the uninterrupted one.
MENDED: dict[str, Change] = {
    "nothing": lambda run: None,
    "metrics.jsonl deleted": lambda run: (run / "metrics.jsonl").unlink(),
    "metrics.jsonl last line cut": metrics(lambda b: b[:-40]),
    "metrics.jsonl shortened": metrics(lambda b: b.splitlines(True)[0]),
    "metrics.jsonl of other bytes": metrics(lambda b: b"\xff\xfe" + b),
    "metrics.jsonl with half a line": metrics(lambda b: b + b'{"epoch": 9, "st'),
    "metrics.jsonl with a line too many": metrics(lambda b: b + b.splitlines(True)[0]),
    "metrics.jsonl with bytes behind": metrics(lambda b: b + b"\xff\xfe"),
    "metrics.jsonl with zeros behind (power cut)": metrics(lambda b: b + b"\0" * 300),
    "killed while best/ was replaced": lambda run: (run / "best").rename(run / ".best.old"),
    "killed while a checkpoint was written": lambda run: newest(run).rename(
        newest(run).with_name(f".{newest(run).name}.tmp-123-000000ab")
    ),
}

# Arguments of eval.py for the finished run that must be refused, and those that must work.
EVAL_REFUSED = """
--predict o.parquet --top-k 0; --predict o.parquet --top-k x; --predict .; --predict no/o.parquet; --predict o.txt
--predict /proc/x.parquet; --predict run/config.yaml; --sampled 0; --sampled 1000000; --sampled 1000000000000000000
--sampled 3 --seed -1; --sampled 3 --seed 1180591620717411303424; --split foo; model.embedding_dim=16; foo=1
data.synthetic.num_items=21; device=cuda:9; model.max_seq_len=0
--recommend o.txt; --recommend .; --recommend /dev/full; --recommend o.csv --users nope; --recommend o.csv --users run
--recommend o.csv --users run/config.yaml; --recommend o.csv --history nope.csv; --recommend o.csv --history run
--recommend o.csv --history run/config.yaml; --recommend o.csv --at 5; --recommend o.csv --at -1; --at 5
--recommend o.csv --predict p.csv; --recommend o.csv --data nope; --data nope; --export-items run; --export-items no/x
--export-items /dev/null; --users x; --history x; --recommend o.csv --users /dev/zero
"""
EVAL_WORKING = """
--recommend o.csv; --recommend o.parquet --top-k 1000000000000 --at 4000000000; --export-items items; --quiet
--split train; --split valid; --predict o.parquet --top-k 1000000000000000000; --sampled 20 --seed 9223372036854775807
"""


def cases(place: Path) -> list[Case]:
    finished, stopped = place / "finished" / "run", place / "stopped" / "run"
    for run in (finished, stopped):
        run.parent.mkdir()
    ended = Process(lambda: start(finished), seconds=300).wait()
    assert ended.status == 0, ended.output
    ended = signalled(lambda: start(stopped), signal.SIGTERM, loop, "set_lr", STEP)
    assert ended.status == 128 + signal.SIGTERM, ended.output
    expected = facts(finished)

    def same(folder: Path, output: str) -> str | None:
        return differs(folder / "run", expected)

    def harmless(folder: Path, output: str) -> str | None:
        return "code was run" if (Path.cwd() / "pwned").exists() else None

    def case(name: str, run, expect: str = ERROR, **more) -> Case:
        return Case("run", f"run {name}", run, expect, **more)

    def resume(change: Change, *more: str, of: Path = stopped) -> Callable[[Path], int]:
        def go(folder: Path) -> int:
            shutil.copytree(of, folder / "run")
            change(folder / "run")
            return train.main(["--resume", str(folder / "run"), *more])

        return go

    def judge_it(change: Change, *more: str, of: Path = stopped) -> Callable[[Path], int]:
        def go(folder: Path) -> int:
            shutil.copytree(of, folder / "run")
            change(folder / "run")
            os.chdir(folder)
            return evaluation.main(["run", *more])

        return go

    listed = []
    for number, (name, change) in enumerate((DAMAGE | RESUME).items()):
        listed.append(case(f"resume: {name}", resume(change), check=harmless, short=number % 2 == 0))
    for number, (name, change) in enumerate(DAMAGE.items()):
        listed.append(case(f"eval: {name}", judge_it(change), check=harmless, short=number % 3 == 0))
    listed += [case(f"resume: {n}", resume(c), WORKS, check=same, short=n == "nothing") for n, c in MENDED.items()]
    nothing = MENDED["nothing"]
    for text in re.split(r"; |\n", EVAL_REFUSED.strip()):
        listed.append(case(f"eval {text}", judge_it(nothing, *text.split(), of=finished)))
    for text in re.split(r"; |\n", EVAL_WORKING.strip()):
        listed.append(case(f"eval {text}", judge_it(nothing, *text.split(), of=finished), WORKS, short=False))
    listed += [
        case("resume: more epochs", resume(config("epochs: 6", "epochs: 7")), WORKS, short=False),
        case("resume: threads changed", resume(config("threads: 1", "threads: 2")), WORKS, short=False, seconds=180),
        case("resume of the finished run", resume(nothing, of=finished), WORKS, check=same, short=False),
        case("eval: attention.scale overridden", judge_it(nothing, "model.attention.0.scale=9.0"), WORKS, short=False),
        case(
            "eval: eval.filter_seen in config.yaml",
            judge_it(config(r"filter_seen: \w+", "filter_seen: window")),
            WORKS,
        ),
        case("eval: train.lr overridden", judge_it(nothing, "train.lr=3.0"), short=False),
        case("eval: killed while best/ was replaced", judge_it(MENDED["killed while best/ was replaced"]), WORKS),
        case("eval of a file", lambda f: evaluation.main([str(stopped / "config.yaml")])),
        case("eval of nothing", lambda f: evaluation.main([str(f / "nope")])),
        case("eval of NUL", lambda f: evaluation.main(["a\0b"])),
        case("resume of nothing", lambda f: train.main(["--resume", str(f / "nope")])),
        case("resume of an empty folder", lambda f: train.main(["--resume", str(f)])),
        case(
            "train into a folder that holds a run",
            lambda f: train.main([str(finished.with_name("run.yaml")), "--run", str(finished)]),
        ),
    ]
    return listed + _rights(case, finished, stopped) + _full(case, expected) + _together(case, stopped, expected)


def _rights(case, finished: Path, stopped: Path) -> list[Case]:
    def frozen(run: Path) -> Path:
        """Return a read-only copy of a run."""
        copy = run.parent.parent / f"frozen-{run.parent.name}"
        shutil.copytree(run, copy)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        return copy

    evaluated, resumed = frozen(finished), frozen(stopped)

    def closed(folder: Path) -> Path:
        (folder / "closed").mkdir(mode=0)
        return folder / "closed" / "run"

    return [
        case("eval of a run that cannot be written", lambda f: evaluation.main([str(evaluated)]), nobody=True),
        case(
            "resume of a run that cannot be written",
            lambda f: train.main(["--resume", str(resumed)]),
            nobody=True,
        ),
        case("eval of a run in a closed folder", lambda f: evaluation.main([str(closed(f))]), nobody=True),
        case("resume of a run in a closed folder", lambda f: train.main(["--resume", str(closed(f))]), nobody=True),
    ]


def _full(case, expected: dict) -> list[Case]:
    """Return cases of a disk that is full at several sizes of files, and then not."""

    def clean(folder: Path, output: str) -> str | None:
        left = [str(path) for path in folder.rglob(".*") if ".tmp" in path.name]
        return f"left behind {left}" if left else None

    def again(folder: Path) -> int:
        """Train until the disk is full, then resume with free space: the run must end as the undisturbed one."""
        signalled(lambda: start(folder / "run"), signal.SIGTERM, loop, "set_lr", STEP)
        full = Process(lambda: train.main(["--resume", str(folder / "run")]), seconds=60, disk=3000).wait()
        verdict, line = judge(full, ERROR)
        assert verdict == "passed", f"{verdict}: {line}"
        assert not clean(folder, ""), clean(folder, "")
        return train.main(["--resume", str(folder / "run")])

    def full(folder: Path, size: int) -> int:
        (folder / "run.yaml").write_text(BASE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return train.main([str(folder / "run.yaml"), "--run", str(folder / "run")])

    sizes = (0, 100, 2000, 4000, 10000)
    return [
        *(case(f"disk full, {size} bytes", lambda f, s=size: full(f, s), check=clean) for size in sizes),
        case("disk full, then room", again, WORKS, check=lambda f, o: differs(f / "run", expected), short=False),
    ]


def _together(case, stopped: Path, expected: dict) -> list[Case]:
    def begin_resume(folder: Path) -> Process:
        """Start a resume that waits before its first step until the file `go` exists or its parent has ended."""
        set_lr, parent = loop.set_lr, os.getpid()

        def patient(*arguments):
            while os.getppid() == parent and not (folder / "go").exists():
                time.sleep(0.001)
            return set_lr(*arguments)

        def resume() -> int:
            loop.set_lr = patient
            return train.main(["--resume", str(folder / "run")])

        return Process(resume, seconds=60)

    def two(folder: Path) -> int:
        shutil.copytree(stopped, folder / "run")
        resumes, verdicts = [begin_resume(folder) for _ in range(2)], []
        while resumes:
            for process in resumes[:]:
                if ended := process.poll():
                    resumes.remove(process)
                    verdicts.append(judge(ended, EITHER)[1])
                    (folder / "go").touch()
            time.sleep(0.001)
        verdicts.sort()
        print(*verdicts, sep="\n")
        assert sum("another process is using it" in line for line in verdicts) == 1, verdicts
        return 0

    def halted(folder: Path) -> int:
        """Start a second resume while the first one has locked the folder."""
        shutil.copytree(stopped, folder / "run")
        first = begin_resume(folder)
        while "process" not in (folder / "run" / ".lock").read_text() or "parameters;" not in first.output.decode():
            first.poll()
            time.sleep(0.001)
        second = Process(lambda: train.main(["--resume", str(folder / "run")]), seconds=60).wait()
        (folder / "go").touch()
        first.wait()
        print(second.output)
        assert "another process is using it" in second.output
        return 0

    same = lambda folder, output: differs(folder / "run", expected)
    return [
        case("two resumes at once", two, WORKS, check=same, short=False),
        case("a resume while another one runs", halted, WORKS, check=same),
    ]
