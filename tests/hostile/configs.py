"""Define cases of configurations: values on the command line, YAML files, paths. Each line of a table is a case."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import train
from tests.hostile.accepted import ACCEPTED
from tests.hostile.harness import EITHER, ERROR, WORKS, Case

BASE = """name: t
seed: 1
device: cpu
threads: 1
run_dir: runs
data: {format: synthetic, protocol: leave_one_out, cache_dir: cache, synthetic: {num_users: 30, num_items: 20, num_clusters: 4, mean_length: 8.0, min_length: 5, max_length: 12}}
model: {block: hstu, max_seq_len: 16, embedding_dim: 8, num_layers: 1, num_heads: 1, dropout: 0.1, attention: {kind: dense}}
loss: {kind: sampled_softmax, num_negatives: 4}
train: {epochs: 1, batch_size: 16, lr: 1e-3, checkpoint_seconds: 1000}
eval: {every: 1}
"""  # noqa: E501

# Overrides that must be refused, separated by two blanks.
REFUSED = """
train.lr=-1  train.lr=0  train.lr=.nan  train.lr=nan  train.lr=.inf  train.lr='1e-3'  train.lr=  train.lr=[
train.lr=*x  train.lr=[[1]]  train.lr.x=3  train.lrr=3  train.epochs=0  train.epochs=-1  train.epochs=1.5
train.epochs=true  train.betas=[0.9]  train.betas=[0.9,0.9,0.9]  train.betas=[1.5,0.9]  train.betas=[-1.0,0.9]
train.betas=[0.9,.nan]  train.betas=0.9  train.betas=[1.0,0.9]  train.weight_decay=.nan  train.weight_decay=.inf
train.weight_decay=-1.0  train.clip_norm=0  train.clip_norm=.nan  train.clip_norm=.inf  train.warmup_steps=-1
train.batch_size=0  train.batch_size=HUGE  train.autocast=true  train.compile=1  train.checkpoint_seconds=-1
train.checkpoint_seconds=.nan  train.ema_decay=1.0  train.ema_decay=.nan  train.decay=foo  train=null
model.dropout=1.5  model.dropout=.nan  model.dropout=1.0  model.max_seq_len=0  model.max_seq_len=1000000000000000
model.num_heads=3  model.num_layers=0  model.num_layers=2.0  model.embedding_dim=1000000000000
model.embedding_dim=HUGE  model.attention_dim=0  model.linear_dim=0  model.feed_forward_dim=0
model.block=transformer  model.block=foo  model.action_embedding=true  model.rotary={}  model.rotary={position: 1}
model.rotary={positions: true}  model=3  model.attention=[{kind: dense}, {kind: dense}]  model.attention=[]
model.attention=null  model.attention=dense  model.attention={}  model.attention.kind=foo  model.attention.kind=[1]
model.attention.kind={a: 1}  model.attention.scale=.nan  model.attention.scale=.inf  model.attention.normalizer=4
model.attention.window_size=-1  model.attention.num_time_buckets=0  model.attention.num_time_buckets=1000000000000000
model.attention.time_bias=foo  model.attention.time_bias=1  model.attention.time_bias=null
model.attention.0.kind=bsa  model.attention.backend=triton  model.attention.backend=foo
model.attention={kind: softmax, backend: cute}  model.attention={kind: softmax, dropout: 1.0}
model.attention={kind: softmax, num_kv_heads: 3}
model.attention={kind: bsa, block_size: 0}  model.attention={kind: bsa, block_size: 32, selection_group: 3}
model.attention={kind: bsa, normalizer: 4}  model.attention={kind: bsa, block_counts: 0}
model.attention={kind: bsa, gate_hidden_dim: 0}  model.attention={kind: bsa, block_size: 16, selection_group: 32}
model.attention={kind: bsa, window_size: -1}  model.attention={kind: bsa, window_size: 1.5}
model.attention={kind: bsa, backend: triton}  loss=null  loss.kind=foo  loss.num_negatives=0
loss.num_negatives=1000000000000  loss.temperature=.nan  loss.temperature=.inf  loss.temperature=0
loss.temperature=1e-300  loss.temperature=1e300  eval.batch_size=0  eval.batch_size=HUGE  eval.every=-1
eval.patience=0  eval.best_metric=HR  eval.filter_seen=no  eval.filter_seen=foo  seed=-1  seed=1180591620717411303424
seed=0x_  seed=010  seed=0b10  train.lr=1:30  train.epochs=0b1  data.separator=ab  data.separator=3
data.on_bad_row=skip  data.duplicates=first  data.columns={timestamp_unit: days}
seed=1.0  name=../x  name=..  name=.  name=.hidden  name=  name=a/b  name=2020-99-99  name=2020-01-01
run_dir=3  device=cuda:7  device=tpu  threads=0  threads=1099511627776  data=[]  data.protocol=foo  data.format=foo
data.path=x  data.cache_dir=null  data.columns={user: u}  data.columns=[user]  data.columns={usr: u}
data.min_user_events=0  data.min_item_events=1000000000  data.min_item_events=HUGE  data.valid_fraction=1.5
data.valid_fraction=-0.1  data.valid_fraction=.nan  data.test_fraction=0  data.synthetic=5  data.synthetic.num_users=0
data.synthetic.num_userz=3  data.synthetic.num_users=1000000000000  data.synthetic.num_items=1000000000000
data.synthetic.noise=.nan  data.synthetic.noise=2  data.synthetic.mean_length=.inf  data.synthetic.mean_length=3
data.synthetic.zipf=.inf  data.synthetic.zipf=1000  data.synthetic.seed=-1  data.synthetic.seed=HUGE
data.synthetic.num_clusters=21  data.synthetic.num_users=2.5  foo  =3  a..b=3  .=3
model.attention={kind: htree, compression_rate: 1}  model.attention={kind: htree, top_k: 0}
model.attention={kind: htree, rope_base: 0.0}  model.attention={kind: htree, rope_base: .inf}
model.attention={kind: htree, num_kv_heads: 3}  model.attention={kind: htree, time_bias: true}
model.attention={kind: htree, backend: triton}  model.attention={kind: indexer, top_k: 0}
model.attention={kind: indexer, loss_weight: -1.0}  model.attention={kind: indexer, loss_weight: .inf}
model.attention={kind: indexer, warmup_steps: -1}  model.attention={kind: indexer, index_dim: 0}
model.attention={kind: indexer, backend: triton}  model.attention={kind: rotatekv, bits: 5}
model.attention={kind: rotatekv, bits: 2.0}  model.attention={kind: rotatekv, head_group: 4}
model.attention={kind: rotatekv, sparsity: 1.0}  model.attention={kind: rotatekv, quant_group: 24}
model.attention={kind: rotatekv, head_group: 1}
model.attention={kind: ring, inner: foo}  model.attention={kind: ring, inner: softmax, scale: 0.0}
model.attention={kind: ring, inner: softmax, num_kv_heads: 3}  model.head=3  model.head={}  model.table_dtype=foo
model.head={kind: mol, query_components: 0}  model.head={kind: mol, item_components: 1.5}
model.head={kind: mol, component_dim: 1000000000000}  model.head={kind: mol, query_components: 1000000000}
model.head={kind: mol, gate_hidden_dim: 0}  model.head={kind: mol, dropout: 1.0}  model.head={kind: mol, dropout: .nan}
model.head={kind: mol, temperature: 0.0}  model.head={kind: mol, temperature: 1e-300}
model.head={kind: mol, item_dropout: .nan}  model.head={kind: mol, item_dropout: 1.0}
model.head={kind: mol, temperature: .inf}  model.head={kind: mol, balance_weight: -1.0}
model.head={kind: mol, balance_weight: .inf}  model.head={kind: mol, learned_temperature: true}  model.head={kind: foo}
model.head={kind: [1]}  model.head.kind=null  model.head.foo=1  model.head={kind: dot, learned_temperature: 1}
model.head={kind: dot, temperature: 0.1}  model.head=[{kind: dot}]  model.rotary=true  model.rotary={position: null}
model.rotary={position: false, time: false}  model.rotary=[position]  model.feed_forward_dim=-1
model.feed_forward_dim=1.5  model.feed_forward_dim=true  model.feed_forward_dim=1000000000
model.embedding_dim=1000000000  model.num_layers=1000000000  model.max_seq_len=1000000000
model.attention.num_time_buckets=1000000000  model.linear_dim=1000000000  model.table_dtype=float16
model.table_dtype=null  model.attention={kind: rotatekv, sink_tokens: -1}  model.attention={kind: rotatekv, bits: true}
model.attention={kind: rotatekv, sink_tokens: 1.5}  model.attention={kind: rotatekv, sparsity: .nan}
model.attention={kind: rotatekv, sparsity: 0.95}  model.attention={kind: rotatekv, window_size: 3}
model.attention={kind: indexer, num_index_heads: 0}  model.attention={kind: indexer, top_k: 1000000000000}
model.attention={kind: indexer, warmup_steps: 1.5}  model.attention={kind: indexer, scale: .nan}
model.attention={kind: ring, inner: softmax, position_bias: true}
model.attention={kind: ring, inner: hstu, dropout: 0.1}
model.attention={kind: ring, inner: [softmax]}  model.attention={kind: ring, inner: softmax, window_size: -1}
model.attention={kind: softmax, num_kv_heads: 0}  parallel=null  parallel=3  parallel.context=0  parallel.context=-1
parallel.context=1.5  parallel.context=true  parallel.context=null  parallel.context=2  parallel.context=HUGE
parallel.foo=1  parallel.context.x=1  train.matmul_precision=true  train.matmul_precision=null
train.matmul_precision=[high]  train.ema_decay=0  train.ema_decay=-0.5  train.ema_decay=.inf  train.ema_decay=true
train.decay=null  train.decay=true  train.cuda_graphs=1  train.warmup_steps=.inf  loss.negatives=null
loss.negatives=[shared]  loss.in_batch_share=1.0  loss.in_batch_share=2  loss.in_batch_share=true
loss.temperature=true  loss.temperature=null  loss.kind=null  loss.kind=[bce]
loss.negatives=foo  loss.in_batch_share=0.0  loss.in_batch_share=.nan  train.matmul_precision=foo
train.lr=!!python/object/apply:os.system [echo]  train.lr=!!float x  seed=!!int x  seed=!!int 3
""".replace("HUGE", str(2**63))

# Overrides with which a run must work; those of one run are separated by `;`.
WORKING = """
model.max_seq_len=1  train.autocast=bf16  loss.kind=bce  loss.kind=in_batch  loss.kind=cross_entropy
train.batch_size=1  eval.batch_size=1  eval.every=0  train.group_by_length=true  train.ema_decay=0.9
train.decay=cosine  model.attention={kind: bsa, block_size: 24}
model.attention={kind: bsa, block_size: 1, window_size: 1000}  model.attention={kind: softmax}
model.attention={kind: htree, compression_rate: 2, top_k: 2}  model.attention={kind: indexer, top_k: 4}
model.num_heads=2;model.attention_dim=8;model.linear_dim=8;model.attention={kind: rotatekv}
model.attention={kind: ring}
model.attention={kind: ring, inner: softmax}  model.attention={kind: ring, inner: hstu}  loss.kind=mixed_negatives
train.matmul_precision=high  loss.negatives=shared  model.table_dtype=bfloat16  model.head={kind: mol}
model.head={kind: dot, learned_temperature: true}  model.head.kind=mol;loss.kind=in_batch
model.head.kind=mol;loss.kind=cross_entropy;train.ema_decay=0.5;model.feed_forward_dim=4;loss.temperature=0.1
model.block=transformer;model.feed_forward_dim=8;model.head.kind=mol;model.rotary={time: true}
model.attention={kind: indexer, top_k: 4, warmup_steps: 3};train.ema_decay=0.999
loss.kind=in_batch;loss.negatives=shared
model.num_heads=2;model.attention_dim=8;model.linear_dim=8;model.attention={kind: rotatekv, sink_tokens: 1000000}
model.num_layers=2;model.attention=[{kind: dense}, {kind: ring, inner: softmax}]  eval.patience=1;train.epochs=3
model.attention_dim=1;model.rotary={position: true}  model.attention={kind: indexer, top_k: 1000000}
model.rotary={position: true, time: true}  data.synthetic=null  data.protocol=temporal;data.valid_fraction=0
data.protocol=published
"""

# Several overrides that must be refused together.
TOGETHER = [
    ["data.protocol=temporal", "data.valid_fraction=0.6", "data.test_fraction=0.6"],
    ["data.protocol=published", "eval.patience=3"],
    ["eval.every=0", "eval.patience=3"],
    ["loss.num_negatives=1000000000", "train.epochs=1"],
    ["model.head.kind=mol", "loss.kind=bce"],
    ["model.head.kind=mol", "loss.kind=mixed_negatives"],
    ["model.head.kind=mol", "model.table_dtype=bfloat16"],
    ["loss.kind=mixed_negatives", "loss.num_negatives=1"],
    ["loss.kind=mixed_negatives", "loss.in_batch_share=0.01"],
    ["parallel.context=2", "model.attention={kind: ring, inner: hstu}"],
    ["parallel.context=2", "model.attention={kind: ring, inner: hstu}", "model.rotary={position: true}"],
    ["parallel.context=2", "model.attention={kind: ring, inner: hstu}", "model.head.kind=mol"],
    ["data.format=lines", "data.path=x", "model.rotary={time: true}"],
    ["model.head.kind=dot", "model.head.query_components=3"],
    ["model.head.kind=mol", "model.head.learned_temperature=true"],
]

DEEP = {"model: {": "model: &m {again: *m, ", "data: {": "data: &d {columns: *d, "}
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 9) + "]\n" for i in range(1, 12)
)


def swapped(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


# Files that must be refused.
BAD_FILES: dict[str, str | bytes] = {
    "unknown key": BASE + "foo: 1\n",
    "key twice": BASE + "seed: 2\n",
    "key twice in a section": swapped("lr: 1e-3", "lr: 1e-3, lr: 1e-2"),
    "tab": BASE + "\tfoo: 1\n",
    "empty": "",
    "bytes of no text": bytes(range(256)) * 20,
    "NUL": BASE + "\0",
    "latin-1": BASE.encode() + b"# \xe9\n",
    "utf-16": BASE.encode("utf-16"),
    "list": "- 1\n",
    "scalar": "abc",
    "two documents": BASE + "---\n" + BASE,
    "20,000 brackets": "a: " + "[" * 20000,
    "5,000 mappings deep": "a: " + "{a: " * 5000 + "}" * 5000,
    "3,000 lists deep": BASE + "x: " + "[" * 3000 + "]" * 3000,
    "integer key": BASE + "1: 2\n",
    "null key": BASE + "null: 2\n",
    "list as key": BASE + "? [a, b]\n: c\n",
    "mapping as key": BASE + "? {a: b}\n: c\n",
    "date of no calendar": swapped("name: t", "name: 2020-99-99"),
    "date as name": swapped("name: t", "name: 2020-01-01"),
    "python tag": BASE + "x: !!python/object/apply:os.system ['touch pwned']\n",
    "!!int foo": swapped("seed: 1", "seed: !!int foo"),
    "!!float foo": swapped("1e-3", "!!float foo"),
    "!!timestamp foo": swapped("seed: 1", "seed: !!timestamp foo"),
    "!!binary": swapped("seed: 1", "seed: !!binary é"),
    "!!set": BASE + "x: !!set {a, b}\n",
    "!!omap": BASE + "x: !!omap [1]\n",
    "!!omap as attention": swapped("{kind: dense}", "!!omap [kind: dense]"),
    "own tag": swapped("seed: 1", "seed: !mine 1"),
    "6,000 digits": swapped("seed: 1", "seed: " + "1" * 6000),
    "0b_": swapped("seed: 1", "seed: 0b_"),
    "list that contains itself": BASE + "x: &a [*a]\n",
    "attention that contains itself": swapped("{kind: dense}", "&a [*a]"),
    "section that contains itself": BASE.replace(*list(DEEP.items())[1]),
    "unknown alias": BASE + "x: *nope\n",
    "merge of a scalar": BASE + "<<: 3\n",
    "billion laughs": LAUGHS + BASE,
    "billion laughs as name": LAUGHS + swapped("name: t", "name: *a11"),
    "surrogate in the name": swapped("name: t", 'name: "\\ud800"'),
    "surrogate in a path": swapped("format: synthetic", 'format: lines, path: "\\ud800"'),
    "NUL in a path": swapped("format: synthetic", 'format: lines, path: "a\\0b"'),
    "name with a line end": swapped("name: t", 'name: "t\\n"'),
    "sections missing": "name: t\n",
    "quote never closed": BASE + 'x: "abc',
    "kind missing": swapped("kind: dense", "scale: 1.0"),
    "attention as text": swapped("{kind: dense}", "dense"),
}

# Files with which a run must work.
GOOD_FILES: dict[str, str] = {
    "byte order mark": "\ufeff" + BASE,
    "CRLF": BASE.replace("\n", "\r\n"),
    "anchor": BASE.replace("batch_size: 16", "batch_size: &b 16").replace("every: 1", "batch_size: *b"),
    "merge key": swapped("eval: {every: 1}", "eval: {<<: {every: 1}}"),
}


def start(folder: Path, *overrides: str, text: str | bytes = BASE, run: Path | str = "run", config="run.yaml") -> int:
    """Run train.py with a configuration and a run folder in `folder`."""
    (folder / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    defaults = [f"data.cache_dir={folder}/cache", f"run_dir={folder}/runs"]
    defaults = [o for o in defaults if text == BASE and not any(x.startswith(o.split("=")[0]) for x in overrides)]
    if any(re.match(r"(data|model|train)=", x) for x in overrides):
        defaults = []
    return train.main([str(folder / config), *defaults, *overrides, "--run", str(folder / run)])


def _refused(folder: Path, output: str) -> str | None:
    """Return the fault if a refused configuration wrote files or ran code, else None."""
    left = sorted(path.name for path in folder.iterdir() if path.name not in ("run.yaml", "cache"))
    if (Path.cwd() / "pwned").exists():
        return "code was run"
    return f"left behind {left}" if left else None


def _table(text: str) -> list[str]:
    return re.split(r"\n| {2,}", text.strip())


def cases(place: Path) -> list[Case]:
    def case(name: str, run: Callable[[Path], int | None], expect: str = ERROR, **more) -> Case:
        return Case("config", f"config: {name}", run, expect, **more)

    listed = []
    for number, text in enumerate(_table(REFUSED)):
        listed.append(case(text, lambda f, o=text: start(f, o), check=_refused, short=number % 3 == 0, seconds=25))
    for text in _table(WORKING):
        quick = text.startswith(("data.protocol", "model.max_seq_len", "eval.every"))
        listed.append(case(text, lambda f, o=text: start(f, *o.split(";")), WORKS, short=quick))
    for name in ACCEPTED:
        if name.startswith("config: "):
            text = name.removeprefix("config: ")
            expect = EITHER if "1000.0" in text else WORKS
            listed.append(case(text, lambda f, o=text: start(f, *o.split(";")), expect, short=False))
    for overrides in TOGETHER:
        listed.append(case(" ".join(overrides), lambda f, o=overrides: start(f, *o)))
    for number, (name, text) in enumerate(BAD_FILES.items()):
        run = lambda f, t=text: start(f, text=t)
        listed.append(case(f"file, {name}", run, check=_refused, short=number % 2 == 0, seconds=20))
    for name, text in GOOD_FILES.items():
        listed.append(case(f"file, {name}", lambda f, t=text: start(f, text=t), WORKS, short=False))
    return listed + _paths(case)


def _paths(case) -> list[Case]:
    def occupied(folder: Path) -> Path:
        (folder / "file").write_text("x")
        return folder / "file"

    def closed(folder: Path) -> Path:
        (folder / "closed").mkdir(mode=0)
        return folder / "closed"

    def loop(folder: Path) -> Path:
        (folder / "loop").symlink_to(folder / "loop")
        return folder / "loop"

    def pipe(folder: Path) -> int:
        os.mkfifo(folder / "pipe.yaml")
        return start(folder, config="pipe.yaml")

    def is_file(folder: Path, output: str) -> str | None:
        return None if (folder / "file").read_text() == "x" else "the file was changed"

    return [
        case("is a folder", lambda f: start(f, config=".")),
        case("is not there", lambda f: start(f, config="nope.yaml")),
        case("is a named pipe", pipe),
        case("is /dev/zero", lambda f: train.main(["/dev/zero"])),
        case("one line of 60 MB", lambda f: start(f, text="a: [" + "1, " * 20_000_000), seconds=10),
        case("NUL in its name", lambda f: start(f, config="a\0b")),
        case("a name of 5,000 characters", lambda f: start(f, config="a" * 5000)),
        case("no arguments", lambda f: train.main([])),
        case("a config and --resume", lambda f: train.main(["run.yaml", "--resume", str(f)])),
        case("--run is a file", lambda f: start(f, run=occupied(f)), check=is_file),
        case("--run below a file", lambda f: start(f, run=occupied(f) / "x"), check=is_file),
        case("--run in /proc", lambda f: start(f, run="/proc/nope/x")),
        case("--run with NUL", lambda f: start(f, run="a\0b")),
        case("--run of 5,000 characters", lambda f: start(f, run="a" * 5000)),
        case("--run is a loop of links", lambda f: start(f, run=loop(f))),
        case("--run in a closed folder", lambda f: start(f, run=closed(f) / "x"), nobody=True),
        case("--run holds something", lambda f: start(f, run="."), check=lambda f, o: None),
        case("run_dir is a file", lambda f: _unnamed(f, f"run_dir={occupied(f)}"), check=is_file),
        case("run_dir with NUL", lambda f: _unnamed(f, 'run_dir="a\\0b"')),
        case("run_dir is closed", lambda f: _unnamed(f, f"run_dir={closed(f)}"), nobody=True),
    ]


def _unnamed(folder: Path, *overrides: str) -> int:
    """Run train.py without --run, with a folder below run_dir."""
    (folder / "run.yaml").write_text(BASE)
    return train.main([str(folder / "run.yaml"), *overrides])
