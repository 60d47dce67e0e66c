"""Measure serving: the pages' capacity, a model on a CPU or GPU, and an open-loop client of the HTTP service.

python benchmarks/serving.py --capacity                      users with full windows in a GB, by format
python benchmarks/serving.py --cpu                           recommend over 50,000 items and append, N = 200, on a CPU
python benchmarks/serving.py --filters                       recommend over 1,000,000 items with filters, on a CPU
python benchmarks/serving.py --gpu [--seconds 150]           against recomputing the history, on a GPU
python benchmarks/serving.py --http URL --run RUN --rate 100 --seconds 300     mixed routes at a fixed rate
python benchmarks/serving.py --start 1000000 --run RUN       the start of serve.py with a log of so many events

Each result is a line of JSON, on standard output and in the file --out.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main
from data.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FORMATS = {
    "fp32": {"cache": "fp32"},
    "bf16": {"cache": "bf16"},
    "8bit": {"cache": "8bit"},
    "4bit": {"cache": "4bit"},
    "2bit+4sinks": {"cache": "2bit", "sink_tokens": 4},
}
# N, layers, embedding size, heads; the first is configs/ml-1m-hstu-large.yaml.
MODELS = {"large-200": (200, 8, 50, 2), "4x256-4096": (4096, 4, 256, 4)}
GB = 10**9


class Results:
    """Print lines of JSON as they come, each with the commit, the versions and the hardware."""

    def __init__(self, path: Path | None):
        import torch

        from hstu_sparse_checkout import commit

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
        self.path, self.facts = path, {"device": device, "torch": torch.__version__, "commit": commit()}

    def __call__(self, **line) -> None:
        text = json.dumps(line | self.facts)
        print(text, flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def make(name: str, device: str, *, task="retrieval", items=3706, autocast="none", **options):
    """Return a recommender of random weights of one of MODELS; options: of ServingOptions."""
    import torch

    from data.vocabulary import Vocabulary
    from serving import Recommender, ServingOptions
    from training.config import RunConfig
    from training.run import build_model

    longest, layers, size, heads = MODELS[name]
    ranking = task == "ranking"
    tree = {
        "name": name,
        "data": {"format": "ml-1m", "protocol": "last_tenth" if ranking else "published"},
        "model": {
            "block": "hstu", "max_seq_len": longest, "embedding_dim": size, "num_layers": layers, "num_heads": heads,
            "attention": {"kind": "dense", "time_bias": True},
        },
        "train": {"epochs": 1, "autocast": autocast},
    }  # fmt: skip
    if ranking:
        tree["task"] = {"kind": "ranking", "actions": [{"name": "liked", "at_least": 4}]}
    config = RunConfig.model_validate(tree)
    torch.manual_seed(0)
    vocabulary = Vocabulary(np.arange(items), 6 if ranking else None)
    model = build_model(config, vocabulary, torch.device(device)).eval()
    options = ServingOptions(**{"cache_bytes": 4 * GB} | options)
    return Recommender(model, config, vocabulary, options=options, clock=lambda: 0)


def fill(recommender, users: int, events: int, seed: int = 0) -> int:
    """Give each user so many events; return the time of the last one."""
    rng = np.random.default_rng(seed)
    for user in range(users):
        times = np.cumsum(rng.integers(1, 5000, events))
        actions = rng.integers(0, 6, events) if recommender.ranking else None
        recommender.append(
            [user] * events, rng.integers(0, len(recommender.items), events), times, actions, encode=False
        )
    return 5000 * events


def timed(call, repeats: int, device: str = "cpu", warmup: int = 3) -> dict[str, float]:
    """Return median, p99 and least time of a call in milliseconds, including the device's work."""
    import torch

    times = []
    for i in range(warmup + repeats):
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= warmup:
            times.append(1000 * (time.perf_counter() - began))
    return {"median_ms": round(float(np.median(times)), 3), "p99_ms": round(float(np.percentile(times, 99)), 3),
            "least_ms": round(min(times), 3)}  # fmt: skip


def capacity(results: Results) -> None:
    """Fill pools of a GB with users of full windows until there is no room."""
    from hstu_sparse import PagePool, PoolFull
    from serving.options import ServingOptions, page_format

    for name, (longest, layers, *_) in MODELS.items():
        recommender = make(name, "cpu", items=10, cache_bytes=GB // 10)
        for cache, options in FORMATS.items():
            form = page_format(recommender.model, ServingOptions(**options))
            pool, users = PagePool.within(form, GB, longest - 1, layers=layers), 0
            try:
                while True:
                    pool.reserve([], longest - 1)
                    users += 1
            except PoolFull:
                results(part="capacity", model=name, cache=cache, users_per_gb=users, pool_bytes=pool.nbytes,
                        bytes_per_user=form.bytes(longest - 1, layers))  # fmt: skip


def cpu(results: Results) -> None:
    import torch

    torch.set_num_threads(2)
    recommender = make("large-200", "cpu", items=50_000, cache_bytes=GB // 10)
    now = [fill(recommender, 8, 150)]
    for user in range(8):
        recommender.recommend([user], at=now[0])
    rng = np.random.default_rng(1)

    def append():
        now[0] += 1
        recommender.append([int(rng.integers(8))], [int(rng.integers(50_000))], [now[0]])

    for route, call in (
        ("append", append),
        ("recommend", lambda: recommender.recommend([int(rng.integers(8))], at=now[0])),
        ("score 100", lambda: recommender.score([3], [rng.integers(0, 50_000, 100)], at=now[0])),
    ):
        results(part="cpu", route=route, threads=2, items=50_000, **timed(call, 300, warmup=20))


def filtered(results: Results, items: int = 1_000_000) -> None:
    """Time lists of all items, and of a thousandth of them: a named list, and ids in the request."""
    import torch

    torch.set_num_threads(2)
    recommender = make("large-200", "cpu", items=items, cache_bytes=GB // 10)
    now = fill(recommender, 8, 150)
    stock = recommender.items.original(np.random.default_rng(1).choice(items, items // 1000, replace=False))
    recommender.filters.put("stock", stock)
    for filters in ({}, {"filters": ["stock"]}, {"allow": stock}, {"deny": stock}):
        called = timed(lambda: recommender.recommend([3], at=now, **filters), 100, warmup=5)  # noqa: B023
        results(part="filters", filter=next(iter(filters), None), threads=2, items=items, **called)


def recomputed(recommender):
    """Return a function that runs the model without pages: one pass over whole windows, candidates by `num_targets`."""
    import copy

    import torch
    from torch import nn

    import hstu_sparse
    from hstu_sparse.bias.relative import RelativeBias

    model, enabled = recommender.model, recommender.config.train.autocast == "bf16"

    class Whole(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        sizes = property(lambda self: self.inner.sizes)

        def forward(self, x, q, k, v, batch):
            inner, targets = self.inner, batch.num_targets
            longest = inner.sizes.max_seq_len + batch.more
            position = torch.nn.functional.pad(inner.position_bias, (0, batch.more))
            bias = RelativeBias(position, inner.time_bias, batch.timestamps, batch.query_timestamps)
            shared = dict(num_targets=targets, bias=bias)
            plan = hstu_sparse.attention_plan(q, v, batch.seq_offsets, longest, once=batch.once, **shared)
            options = shared | dict(scale=inner.config.scale, normalizer=inner.normalizer, plan=plan)
            return hstu_sparse.hstu_attention(q, k, v, batch.seq_offsets, longest, **options), {}

    layers = []
    for layer in model.layers:
        twin = copy.copy(layer)
        twin._modules = layer._modules | {"attention": Whole(layer.attention)}
        layers.append(twin)

    @torch.no_grad()
    def run(batch):
        batch._shared.clear()  # results that layers share last for one pass
        with torch.autocast(batch.item_ids.device.type, torch.bfloat16, enabled=enabled):
            x = model.embedding(batch)
            for layer in layers:
                x, _ = layer(x, batch)
        return x.float()

    return run


def whole_batch(recommender, users, at, candidates=None):
    """Return the batch of whole windows of users, each followed by its candidates for ranking, [B, M]."""
    import torch

    from data.batch import Cut
    from serving.paged_group import ServedBatch
    from serving.tokens import TokenColumns, window_tokens

    engine, parts, lengths, origins = recommender._engine, [], [], []
    for i, user in enumerate(users):
        history = recommender._histories.get(str(user))
        begin = recommender.window.begin(history.count)
        total = engine.per_event * (history.count - begin)
        parts.append(window_tokens(history, begin, 0, total, engine.per_event, at))
        more = 0
        if candidates is not None:
            more = candidates.shape[1]
            constant_columns = (np.full(more, x) for x in (0, at, at, total))
            parts.append(TokenColumns(candidates[i], *constant_columns))
        lengths.append(total + more)
        origins.append(history.timestamps[begin - history.first])
    columns = TokenColumns.joined(parts)
    to = lambda x: torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(engine.device)
    items, actions, times, query_times, positions = map(to, vars(columns).values())
    offsets = to(np.append(0, np.cumsum(lengths)))
    common = dict(
        item_ids=items, timestamps=times, target_ids=torch.full_like(items, -1), query_timestamps=query_times,
        seq_offsets=offsets, users=torch.arange(len(lengths), device=engine.device), actions=actions,
        cut=Cut(None, positions, to(np.array(origins)), None, None),
    )  # fmt: skip
    batch = ServedBatch(has_action=positions % 2 == 1 if engine.ranking else None, **common)
    count = 0 if candidates is None else candidates.shape[1]
    batch.more, batch.num_targets = count, None
    if count:
        batch.num_targets = torch.full((len(lengths),), count, device=engine.device)
    return batch


def gpu(results: Results, seconds: float, device: str = "cuda", quick: bool = False) -> None:
    """Measure everything on a GPU, the most important first; begin nothing after `seconds`."""
    until = time.monotonic() + seconds
    sizes = dict(count=16, repeats=3) if quick else dict(count=1024, repeats=20)
    name, other = ("large-200",) * 2 if quick else ("4x256-4096", "large-200")
    some = ("bf16", "2bit+4sinks") if quick else ("bf16", "2bit+4sinks", "4bit", "8bit", "fp32")
    num_users, counts = 2 if quick else 8, (2, 1) if quick else (64, 256, 1)
    repeats = sizes["repeats"]
    parts = [(candidates_of, name, device, num_users, *sizes.values(), True)]
    parts += [(requests_of, name, cache, device, count, repeats, True) for count in counts for cache in some[:2]]
    parts += [(candidates_of, name, device, num_users, *sizes.values(), False)]
    parts += [(requests_of, name, cache, device, counts[0], repeats, False) for cache in some[:2]]
    parts += [(requests_of, other, cache, device, count, repeats, True) for count in counts for cache in some[:2]]
    parts += [(candidates_of, model, device, users, *sizes.values(), True) for model, users in ((name, 64), (other, 8))]
    parts += [(requests_of, name, cache, device, counts[0], repeats, True) for cache in some[2:]]
    for part, *arguments in parts[:4] if quick else parts:
        if time.monotonic() < until:
            part(results, *arguments)
            free(device)


def free(device: str) -> None:
    """Free the memory of earlier recommenders."""
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def requests_of(results: Results, name: str, cache: str, device: str, count: int, repeats: int, graphs: bool) -> None:
    """Time requests of `count` users: from pages, after one more event, and (with bf16) from recomputed windows."""
    from evaluation.scores import best_items
    from models.heads import normalized

    options = FORMATS[cache] | dict(cache_bytes=(8 if device == "cuda" else 1) * GB, cuda_graphs=graphs)
    recommender = make(name, device, autocast="bf16", **options)
    longest, slide = recommender.window.capacity, recommender.window.slide
    warmup, sliding = 4, 3
    # The last event that is timed without a slide is the `longest`-th one.
    now = [fill(recommender, count, longest - warmup - repeats)]
    users, run = list(range(count)), recomputed(recommender)
    recommender.recommend(users, at=now[0])
    if recommender.statistics["evictions"]:
        results(part="recommend", model=name, cache=cache, users=count, route="left out: they do not fit")
        return

    def append():
        now[0] += 1
        recommender.append(users, [5] * count, [now[0]] * count)

    def after_an_event():
        append()
        recommender.recommend(users, at=now[0] + 1)

    def recompute():
        batch = whole_batch(recommender, users, now[0] + 1)
        return best_items(recommender._search.scores_of(normalized(run(batch)[batch.seq_offsets[1:] - 1])), 10)

    line = dict(part="recommend", model=name, cache=cache, users=count, cuda_graphs=graphs)
    call = lambda: recommender.recommend(users, at=now[0] + 1)
    results(**line, route="recommend", **timed(call, repeats, device, warmup))
    times = timed(after_an_event, repeats, device, warmup)
    results(**line, route="append one, recommend", events=recommender.history(0).count, **times)
    if cache == "bf16":
        results(**line, route="recompute", events=recommender.history(0).count, **timed(recompute, 5, device, 2))
    results(**line, route="append one", **timed(append, 8, device, 1), note="the first one slides, and is left out")
    slide_times, before = [], 0
    for turn in range(sliding + 1):
        more = longest + (turn + 1) * slide - recommender.history(0).count
        now[0] += 1
        recommender.append(users * more, [5] * (more * count), [now[0]] * (more * count))
        call()
        before = recommender.statistics["tokens_encoded"]
        slide_times.append(timed(after_an_event, 1, device, 0)["least_ms"])
    encoded = (recommender.statistics["tokens_encoded"] - before) // count
    results(
        **line, route="append one that slides, recommend", encoded=encoded, median_ms=float(np.median(slide_times[1:]))
    )
    if device == "cuda" and recommender._engine.graphs:
        results(**line, route="the device alone", **device_times(recommender))


def device_times(recommender) -> dict:
    """Return the GPU's milliseconds of each captured pass, by its kind, and the bytes that PyTorch holds."""
    import torch

    facts = {}
    for key, captured in recommender._engine.graphs.captured.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(20):
            captured.graph.replay()
        end.record()
        torch.cuda.synchronize()
        facts[f"{key[0]}_ms"] = round(begin.elapsed_time(end) / 20, 4)
    return facts | {"bytes": torch.cuda.memory_reserved(), "pool_bytes": recommender.statistics["page_bytes"]}


def candidates_of(results: Results, name: str, device: str, users: int, count: int, repeats: int, graphs: bool) -> None:
    """Time scoring candidates from pages, and in one pass over history and candidates."""
    import torch

    recommender = make(name, device, task="ranking", autocast="bf16", cache="bf16", cuda_graphs=graphs)
    events = recommender.window.capacity
    now = fill(recommender, users, events)
    rng = np.random.default_rng(2)
    rows = np.stack([rng.permutation(len(recommender.items))[:count] for _ in range(users)])
    keys = [str(user) for user in range(users)]
    outputs = recommender.candidate_outputs(keys, list(rows), [now] * users)
    run = recomputed(recommender)
    batch = whole_batch(recommender, keys, now, rows)
    expected = run(batch).unflatten(0, (users, -1))[:, -count:].flatten(0, 1)
    error = float((outputs - expected).norm() / expected.norm())
    line = dict(part="candidates", model=name, users=users, candidates=count, tokens=2 * events, cuda_graphs=graphs)
    results(**line, route="difference", relative=round(error, 5))

    def captured():
        graph = torch.cuda.CUDAGraph()
        run(batch)
        with torch.cuda.graph(graph):
            run(batch)
        return graph.replay

    routes = {
        "pages": lambda: recommender.candidate_outputs(keys, list(rows), [now] * users),
        "recompute": lambda: run(whole_batch(recommender, keys, now, rows)),
        "recompute, batch at hand": lambda: run(batch),
    }
    if device == "cuda":
        routes["recompute, the device alone"] = captured()
    for route, call in routes.items():
        times = timed(call, repeats, device)
        results(**line, route=route, **times, per_second=round(1000 * users * count / times["median_ms"]))
    if device == "cuda" and recommender._engine.graphs:
        results(**line, route="pages, the device alone", **device_times(recommender))


async def client(results: Results, url: str, run: Path, rate: float, seconds: float, token: str | None) -> None:
    """Send requests of four routes at a fixed rate; no request waits for the answers of others."""
    import httpx

    items = np.load(run / "vocabulary" / "item_ids.npy", allow_pickle=False).tolist()
    rng = np.random.default_rng(0)
    latencies: dict[str, list[float]] = {}
    statuses: Counter = Counter()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as http:
        some = [items[i] for i in rng.integers(0, len(items), 50)]
        for user in range(200):
            event = [{"user": f"load-{user}", "item": item} for item in some[: 1 + user % 50]]
            try:
                (await http.post("/events", json={"events": event})).raise_for_status()
            except httpx.HTTPError as error:
                raise UserError(f"{url}: {error}") from None

        async def request(due: float) -> None:
            user, kind = f"load-{rng.integers(200)}", rng.random()
            item = items[int(rng.integers(len(items)))]
            if kind < 0.5:
                route, call = "recommend", http.get(f"/users/{user}/recommendations")
            elif kind < 0.75:
                route, call = "events", http.post("/events", json={"events": [{"user": user, "item": item}]})
            elif kind < 0.95:
                route, call = "scores", http.post("/scores", json={"user": user, "candidates": some})
            else:
                route, call = "history", http.get(f"/users/{user}")
            try:
                status = str((await call).status_code)
            except httpx.HTTPError as error:
                status = type(error).__name__
            statuses[status] += 1
            latencies.setdefault(route, []).append(1000 * (time.perf_counter() - due))

        began, tasks = time.perf_counter(), []
        for i in range(int(rate * seconds)):
            due = began + i / rate
            await asyncio.sleep(max(0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(request(due)))
        await asyncio.gather(*tasks)
    everything = np.concatenate(list(latencies.values()))
    for route, times in {**latencies, "all": everything}.items():
        quantiles = {f"p{q:g}_ms": round(float(np.percentile(times, q)), 1) for q in (50, 99, 99.9)}
        results(part="http", route=route, rate=rate, seconds=seconds, requests=len(times), **quantiles)
    results(part="http", statuses=dict(statuses))


def start(results: Results, run: Path, lines: int) -> None:
    """Time serve.py from its start to its address, with logs of so many events, of few users and of many."""
    from serving.http.event_log import EventLog

    items = np.load(run / "vocabulary" / "item_ids.npy", allow_pickle=False)
    for most_users in (1000, 10**6):
        rng = np.random.default_rng(0)
        users, some = rng.integers(0, most_users, lines).tolist(), items[rng.integers(0, len(items), lines)].tolist()
        with tempfile.TemporaryDirectory() as folder:
            log = EventLog(Path(folder, "events.log"), fsync=False)
            for begin in range(0, lines, 10_000):  # so that the log has segments, as a service's has
                part = range(begin, min(begin + 10_000, lines))
                log.append(
                    [{"users": [f"u{users[t]}"], "items": [some[t]], "timestamps": [t], "actions": None} for t in part]
                )
            log.close()
            command = [sys.executable, ROOT / "serve.py", run, "--port", "0", "--log", log.path]
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
                served = any("Serving on" in line for line in process.stdout or ())
                seconds = round(time.perf_counter() - began, 1)
                process.terminate()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_seconds = round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 1)
        line = {"seconds": seconds, "cpu_seconds": cpu_seconds} if served else {"error": process.returncode}
        results(part="start", lines=lines, users=len(set(users)), **line)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--filters", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--http", metavar="URL")
    parser.add_argument("--run", type=Path, help="with --http and --start: the run's folder")
    parser.add_argument("--start", type=int, metavar="LINES")
    parser.add_argument("--rate", type=float, default=100, help="the number of requests a second")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--out", type=Path, help="the file that JSON lines are added to")
    options = parser.parse_args()
    if not (options.capacity or options.cpu or options.filters or options.gpu or options.http or options.start):
        parser.error("give --capacity, --cpu, --filters, --gpu, --http or --start")
    if (options.http or options.start) and options.run is None:
        parser.error("--http and --start need --run RUN")
    results = Results(options.out)
    if options.capacity:
        capacity(results)
    if options.cpu:
        cpu(results)
    if options.filters:
        filtered(results)
    if options.gpu:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("error: --gpu needs a CUDA GPU; there is none here")
        gpu(results, options.seconds)
    if options.start:
        start(results, options.run, options.start)
    if options.http:
        token = options.token_file.read_text().strip() if options.token_file else None
        asyncio.run(client(results, options.http, options.run, options.rate, options.seconds, token))


if __name__ == "__main__":
    run_main(main)
