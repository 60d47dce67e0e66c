"""Define cases of runs with more features: other heads, averages of weights, rotation, packed caches, processes.

One run with all of them is trained, another one is interrupted. Then their checkpoints, configurations and command
lines are damaged as in runs.py, and files of packed caches, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save

import eval as evaluation
import hstu_sparse
import train
from hstu_sparse.cache import files
from tests.hostile import runs
from tests.hostile.harness import ERROR, WORKS, Case, Process, signalled
from tests.hostile.runs import Change, config, differs, facts, tensors
from training import loop

ATTENTION = "{kind: rotatekv, sink_tokens: 1}"
HEAD = "{kind: mol, query_components: 2, item_components: 2, component_dim: 4, gate_hidden_dim: 8}"
MODEL = ["model.num_heads=2", "model.attention_dim=8", "model.linear_dim=8", "model.feed_forward_dim=16"]
MODEL += [f"model.attention={ATTENTION}", f"model.head={HEAD}", "model.rotary={position: true, time: true}"]
TRAIN = ["train.ema_decay=0.9", "train.decay=cosine", "train.matmul_precision=high", "loss.negatives=shared"]
first_average = lambda entries: next(name for name in sorted(entries) if name.startswith("average."))


def only(keep: Callable[[str], bool]) -> Callable[[dict], dict]:
    return lambda entries: {name: value for name, value in entries.items() if keep(name)}


# Changes after which a run must not be resumed.
RESUME: dict[str, Change] = {
    "no averages": tensors("state", only(lambda n: not n.startswith("average."))),
    "one average missing": tensors("state", lambda t: t.pop(first_average(t)) is None),
    "an average too many": tensors("state", lambda t: t.update({"average.zzz": torch.zeros(1)})),
    "average NaN": tensors("state", lambda t: t[first_average(t)].fill_(float("nan")) is None),
    "average of another shape": tensors("state", lambda t: t.update({first_average(t): torch.zeros(3)})),
    "averages in fp64": tensors(
        "state", lambda t: {n: v.double() if n.startswith("average.") else v for n, v in t.items()}
    ),
    "weights without a gate of the head": tensors("model", only(lambda n: "pair_gate" not in n)),
    "moments of one number": tensors(
        "state", lambda t: {n: v.mean() if n.endswith("exp_avg") else v for n, v in t.items()}
    ),
    "step of the optimizer negative": tensors(
        "state", lambda t: {n: v - 1000 if n.endswith(".step") else v for n, v in t.items()}
    ),
    "second moments negative": tensors(
        "state", lambda t: {n: -v - 1 if n.endswith("_sq") else v for n, v in t.items()}
    ),
    "moments of another name": tensors(
        "state", lambda t: {n.replace("exp_avg_sq", "momentum"): v for n, v in t.items()}
    ),
    "ema_decay removed": config("ema_decay: 0.9", "ema_decay: null"),
    "ema_decay changed": config("ema_decay: 0.9", "ema_decay: 0.99"),
    "the head's temperature changed": config("(?m)^    temperature: 0.05", "    temperature: 0.1"),
    "dot head": config(r"(?s)head:\n    kind: mol.*?balance_weight: 0.001", "head:\n    kind: dot"),
    "no rotary": config(r"(?s)rotary:\n    position: true\n    time: true", "rotary: null"),
    "no feed-forward": config("feed_forward_dim: 16", "feed_forward_dim: null"),
    "bits changed": config("bits: 2", "bits: 4"),
    "matmul_precision changed": config("matmul_precision: high", "matmul_precision: highest"),
    "negatives changed": config("negatives: shared", "negatives: per_position"),
    "decay changed": config("decay: cosine", "decay: linear"),
    "two processes": config("context: 1", "context: 2"),
    "fewer epochs than done": config("epochs: 6", "epochs: 1"),
    "another loss": config("kind: sampled_softmax", "kind: in_batch"),
}

# Arguments that eval.py must refuse, for the run of this file and for the basic one, whose heads are too small.
EVAL_REFUSED = """
--serve foo; --sink-tokens 1; --slide 1; --serve fp32; --serve bf16 --sink-tokens 1; --serve 2bit; --serve 3bit
--serve 2bit --head-group 3; --serve 2bit --head-group x; --serve 2bit --quant-group 0; --serve 2bit --quant-group 2.0
--serve 2bit --clip nan; --serve 2bit --clip 0; --serve 2bit --clip 2; --serve 2bit --sink-tokens -1; --serve --slide 0
--serve 2bit --sink-tokens 1000000000000; --serve --slide 1000; --serve --slide -1; --serve --cache-bytes 10
--serve --cache-bytes -1; model.head.component_dim=8; model.head.kind=dot; model.head.foo=1
model.feed_forward_dim=null; parallel.context=2; train.ema_decay=2; train.matmul_precision=foo; train.ema_decay=null
loss.kind=in_batch
"""
BASIC_REFUSED = """
--serve 2bit --head-group 3; --serve 4bit --sink-tokens -1; --serve --sink-tokens 1
"""
EVAL_WORKING = """
--serve; --serve 2bit --sink-tokens 1 --clip 1; --serve --slide 1 --split valid --sampled 5 --predict o.parquet
train.matmul_precision=highest; train.autocast=bf16
"""


def kv_cache(order: bool = True) -> hstu_sparse.RotateKVCache:
    k, v = (torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    chosen = hstu_sparse.calibrate(k) if order else None
    return hstu_sparse.rotatekv_compress(k, v, torch.tensor([0, 4, 4, 9]), sink_tokens=1, channel_order=chosen)


def rewritten(change: Callable[[dict, dict], object]) -> Callable[[Path], None]:
    """Return a change of the tensors and facts in the file of a packed cache, with its checksum."""

    def go(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
            facts = json.loads(file.metadata()["facts"])
        change(entries, facts)
        text = json.dumps(facts)
        path.write_bytes(_cache_file(entries, text))

    return go


def entry(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[Path], None]:
    def go(entries: dict, facts: dict) -> None:
        entries[name] = torch.as_tensor(change(entries[name]), dtype=entries[name].dtype)

    return rewritten(go)


def with_facts(**other) -> Callable[[Path], None]:
    return rewritten(lambda entries, facts: facts.update(other))


def option(**other) -> Callable[[Path], None]:
    return rewritten(lambda entries, facts: facts["format"].update(other))


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


BAD_CACHES: dict[str, Callable[[Path], object]] = {
    "cut short": content(lambda b: b[:-9]),
    "a bit turned": content(lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]),
    "empty": content(lambda b: b""),
    "text": content(lambda b: b"hello"),
    "a header of 2^60": content(lambda b: (2**60).to_bytes(8, "little") + b[8:]),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a loop of links": lambda path: (path.unlink(), path.symlink_to(path)),
    "other tensors": lambda path: path.write_bytes(save({"a": torch.zeros(1)})),
    "no facts": lambda path: path.write_bytes(save({"a": torch.zeros(1)}, {"format": files.FORMAT})),
    "another format": lambda path: path.write_bytes(save({"a": torch.zeros(1)}, {"format": "rotatekv.9"})),
    **{f"facts that are {x!r}": content(lambda b, x=x: _facts_of(b, x)) for x in ("[]", "null", "{", "1" * 5000)},
    "facts of 100,000 brackets": content(lambda b: _facts_of(b, "[" * 100000)),
    **{f"bits {x!r}": option(bits=x) for x in (5, 0, "2", True, None, 4)},
    **{f"sink_tokens {x!r}": option(sink_tokens=x) for x in (-1, 2, 10**12, 1.0)},
    **{f"sparsity {x!r}": option(sparsity=x) for x in (0.5, 2.0, "0", float("nan"))},
    **{f"head_group {x!r}": option(head_group=x) for x in (1, 4, 0)},
    "an option too many": option(foo=1),
    "a format that is a list": with_facts(format=[1]),
    **{f"heads {x!r}": option(heads=x) for x in (0, -2, 4, 10**12, "2", None, 2.0, True)},
    **{f"head_size {x!r}": option(head_size=x) for x in (0, -8, 16, 10**12)},
    **{f"value_size {x!r}": option(value_size=x) for x in (0, -8, 16, 10**12)},
    **{f"dtype {x!r}": option(dtype=x) for x in ("load", "int64", "float8_e4m3fn", "nope", "", None, 3, "float64")},
    **{f"num_pages {x!r}": with_facts(num_pages=x) for x in (-1, 0, 1, 2.0, True, None, "2")},
    **{f"num_sequences {x!r}": with_facts(num_sequences=x) for x in (-1, 0, 1, 2.0, True, None, "2")},
    **{f"layers {x!r}": with_facts(layers=x) for x in (-1, 0, 2, 10**12, 1.0, True, None, "1")},
    **{f"timed {x!r}": with_facts(timed=x) for x in (True, 1, None, "no")},
    "lengths below 0": entry("lengths", lambda x: x - 5),
    "lengths that are huge": entry("lengths", lambda x: x + 2**62),
    "lengths of more tokens": entry("lengths", lambda x: x * 40),
    "lengths of another type": rewritten(lambda e, f: e.update(lengths=e["lengths"].int())),
    "no lengths": entry("lengths", lambda x: x[:0]),
    "channels twice": entry("channel_order", lambda x: x * 0),
    "channels beyond the last": entry("channel_order", lambda x: x + 1),
    "channels below 0": entry("channel_order", lambda x: x - 1),
    "scales that are NaN": entry("0.k_ranges", lambda x: x * float("nan")),
    "zeros that are infinite": entry("0.v_ranges", lambda x: x + float("inf")),
    "scales below 0": entry("0.k_ranges", lambda x: -x.abs() - 1),
    "sinks that are NaN": entry("0.sink_k", lambda x: x * float("nan")),
    "codes of another type": rewritten(lambda e, f: e.update({"0.k_codes": e["0.k_codes"].long()})),
    "codes of another shape": rewritten(lambda e, f: e.update({"0.k_codes": e["0.k_codes"][:1]})),
    "no codes": rewritten(lambda e, f: e.pop("0.v_codes")),
    "a tensor too many": rewritten(lambda e, f: e.update(zzz=torch.zeros(1))),
}


def _facts_of(content: bytes, text: str) -> bytes:
    return _cache_file(load(content), text)


def _cache_file(entries: dict, text: str) -> bytes:
    return save(entries, {"format": files.FORMAT, "facts": text, "sha256": files.checksum(text, entries)})


def load_cache(path: Path | str) -> int:
    """Load the file of a packed cache and read it as attention does."""
    try:
        cache = hstu_sparse.RotateKVCache.load(path)
    except ValueError as error:
        print("error:", error)
        assert "\n" not in str(error)
        return 2
    k, v = hstu_sparse.rotatekv_decompress(cache)
    hstu_sparse.rotatekv_attention(k[:1].repeat(3, 1, 1), torch.arange(4), cache, 9)
    print("read", k.shape, v.shape)
    return 0


def save_cache(path: Path | str) -> int:
    """Save a packed cache; print an OSError, which names the file."""
    try:
        kv_cache().save(path)
    except (OSError, ValueError) as error:
        print("error:", error)
        return 2
    return load_cache(path)


def _caches(case) -> list[Case]:
    def damaged(change: Callable[[Path], object]) -> Callable[[Path], int]:
        def go(folder: Path) -> int:
            path = folder / "cache.safetensors"
            kv_cache().save(path)
            change(path)
            return load_cache(path)

        return go

    def clean(folder: Path, output: str) -> str | None:
        left = [path.name for path in folder.rglob("*") if path.is_file()]
        return f"left behind {left}" if left else None

    def closed(folder: Path) -> Path:
        (folder / "closed").mkdir(mode=0)
        return folder / "closed" / "c"

    listed = [
        case(f"cache file: {name}", damaged(change), short=number % 6 == 0)
        for number, (name, change) in enumerate(BAD_CACHES.items())
    ]
    return [
        *listed,
        case("cache file: whole", damaged(lambda path: None), WORKS),
        case("cache file: NUL in its name", lambda f: load_cache("a\0b")),
        case("cache file: a name of 5,000 characters", lambda f: load_cache("a" * 5000)),
        case("cache saved", lambda f: save_cache(f / "c"), WORKS),
        case("cache saved into no folder", lambda f: save_cache(f / "no" / "c"), check=clean),
        case("cache saved as a folder", lambda f: save_cache(f), check=clean),
        case("cache saved with NUL", lambda f: save_cache("a\0b"), check=clean),
        case("cache saved into a closed folder", lambda f: save_cache(closed(f)), nobody=True),
        case("cache saved on a full disk", lambda f: save_cache(f / "c"), check=clean, disk=500),
    ]


def _processes(case) -> list[Case]:
    """Return cases of `parallel.context` and of torchrun's environment variables."""
    RING = ["model.attention={kind: ring, inner: softmax}", "parallel.context=2"]
    ENVIRONMENTS = {
        "no processes": {},
        "more processes": {"WORLD_SIZE": "4"},
        "a number of processes that is none": {"WORLD_SIZE": "x"},
        "an empty number of processes": {"WORLD_SIZE": ""},
        "no rank": {"WORLD_SIZE": "2"},
        "no address": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
        "a rank that is none": {"WORLD_SIZE": "2", "RANK": "x", "LOCAL_RANK": "0"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"},
        "a rank too many": {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"},
        "a port that is none": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
        "a port beyond the last": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
    }

    def go(folder: Path, environment: dict, *overrides: str) -> int:
        os.environ.update(environment)
        return runs.start(folder / "run", *overrides)

    listed = [case(f"context: {n}", lambda f, e=e: go(f, e, *RING)) for n, e in ENVIRONMENTS.items()]
    listed.append(case("context: processes for a run of one", lambda f: go(f, {"WORLD_SIZE": "2"})))
    return listed


def cases(place: Path) -> list[Case]:
    def case(name: str, run, expect: str = ERROR, **more) -> Case:
        return Case("feature", f"feature {name}", run, expect, **more)

    finished, stopped, basic = (place / name / "run" for name in ("finished", "stopped", "basic"))
    for run in (finished, stopped, basic):
        run.parent.mkdir()
    for run, overrides in ((finished, MODEL + TRAIN), (basic, ["train.epochs=1"])):
        ended = Process(lambda run=run, more=overrides: runs.start(run, *more), seconds=300).wait()
        assert ended.status == 0, ended.output
    ended = signalled(lambda: runs.start(stopped, *MODEL, *TRAIN), signal.SIGTERM, loop, "set_lr", runs.STEP)
    assert ended.status == 128 + signal.SIGTERM, ended.output
    expected = facts(finished)

    def resume(change: Change, *more: str) -> Callable[[Path], int]:
        def go(folder: Path) -> int:
            shutil.copytree(stopped, folder / "run")
            change(folder / "run")
            return train.main(["--resume", str(folder / "run"), *more])

        return go

    def judge_it(of: Path, *more: str) -> Callable[[Path], int]:
        def go(folder: Path) -> int:
            shutil.copytree(of, folder / "run")
            os.chdir(folder)
            return evaluation.main(["run", *more])

        return go

    def same(folder: Path, output: str) -> str | None:
        return differs(folder / "run", expected)

    listed = [case(f"resume: {n}", resume(c), short=i % 2 == 0) for i, (n, c) in enumerate(RESUME.items())]
    listed.append(case("resume: nothing", resume(lambda run: None), WORKS, check=same))
    for table, run, expect in (
        (EVAL_REFUSED, finished, ERROR),
        (BASIC_REFUSED, basic, ERROR),
        (EVAL_WORKING, finished, WORKS),
    ):
        for text in re.split(r"; |\n", table.strip()):
            name = f"eval {'of the basic run ' if run == basic else ''}{text}"
            listed.append(case(name, judge_it(run, *text.split()), expect, short=text.endswith(("x", "--serve"))))
    listed += [
        case("eval: its file is a folder", judge_folder(finished, "eval-test.json")),
        case("resume: .lock is a folder", resume(lambda run: _replaced(run / ".lock"))),
        case("resume: report.md is a folder", resume(lambda run: _replaced(run / "report.md")), short=False),
        case("resume: result.json is a folder", resume(lambda run: _replaced(run / "result.json")), short=False),
        case("resume: loss.svg is a folder", resume(lambda run: _replaced(run / "loss.svg")), short=False),
        case("resume: best is a file", resume(lambda run: _file(run / "best"))),
        case("resume: best deleted", resume(lambda run: shutil.rmtree(run / "best")), short=False),
        case("resume: tensorboard is a file", resume(lambda run: _file(run / "tensorboard")), short=False),
        case("--resume and --run", lambda f: train.main(["--resume", str(stopped), "--run", str(f / "x")])),
        case("--resume and another train.lr", resume(lambda run: None, "train.lr=2e-3")),
        case("--resume and other options of saving", resume(lambda run: None, "train.checkpoint_seconds=5"), WORKS),
        case("--resume of nothing", lambda f: train.main(["--resume", ""])),
    ]
    return listed + _caches(case) + _processes(case)


def judge_folder(run: Path, name: str) -> Callable[[Path], int]:
    def go(folder: Path) -> int:
        shutil.copytree(run, folder / "run")
        _replaced(folder / "run" / name)
        return evaluation.main([str(folder / "run")])

    return go


def _replaced(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "x").write_text("x")


def _file(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("x")
