"""Measure appends and requests while windows of users slide, with and without encoding the next window ahead.

    python benchmarks/slides.py [--seconds 10] [--users 64] [--model 4x256-4096] [--device cuda]

The model thread of the service gets requests at fixed times: `single`, in turn an event and a list of a user chosen at
random, whether or not earlier ones are answered; `all`, an event of every user and, once these events are answered, a
list for each user. Every user's window slides once, at times spread over the run. Each result is a line of JSON, on
standard output and in the file --out: the median and p99 of milliseconds from a request's time to its answer, and their
ratio.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving import MODELS, Results, fill, free, make
from cli.command import Parser, run_main
from serving.filters import Filter
from serving.http.requests import Events, Recommend
from serving.http.worker import Worker

WARMUP = 0.2  # the part of a run that is not counted: graphs are captured in it


class WithoutAhead(Worker):
    """A model thread that encodes nothing ahead of time."""

    def _encode_ahead(self) -> int:
        return 0


def measure(results: Callable[..., None], options, pattern: str, ahead: bool) -> None:
    """Time one pattern of requests on a new recommender."""
    cache_bytes = 4 * 10**9 if options.device == "cuda" else 10**9
    recommender = make(options.model, options.device, autocast="bf16", cache="bf16", cache_bytes=cache_bytes)
    longest, rng = recommender.window.capacity, np.random.default_rng(1)
    rounds = int(options.seconds * options.rate[pattern])
    each = rounds if pattern == "all" else rounds // (2 * options.users)
    now = fill(recommender, options.users, longest - each)
    users = [str(user) for user in range(options.users)]
    for place, user in enumerate(users):  # the first of them slides at the first counted event, the last at the end
        more = each - 1 - int(each * (WARMUP + (1 - WARMUP) * place / len(users)))
        recommender.append([user] * more, [5] * more, [now] * more, encode=False)
    worker = (Worker if ahead else WithoutAhead)(recommender, None)
    worker.start()

    def recommend(some: list[str]):
        return worker.put(Recommend(some, 10, None, None, Filter()))

    for count in (len(users), 1, 2, 4, 8):
        recommend(users[:count]).result()
    while ahead and recommender.encode_ahead():  # a service has time for this while a quarter of a window arrives
        pass
    encoded = recommender.statistics["tokens_encoded_ahead"]
    latencies: dict[str, list[float]] = {"append": [], "recommend": []}
    pending, began = [], time.perf_counter()

    def add(route: str, future, due: float) -> None:
        count = time.perf_counter() - began > WARMUP * options.seconds
        if count:
            future.add_done_callback(lambda _: latencies[route].append(1000 * (time.perf_counter() - due)))
        pending.append(future)

    order = rng.permutation(np.repeat(np.arange(options.users), each))
    for number in range(rounds):
        due = began + number / options.rate[pattern]
        time.sleep(max(0.0, due - time.perf_counter()))
        chosen = users if pattern == "all" else [users[order[number // 2 % len(order)]]]
        now += 1
        if pattern == "all" or number % 2 == 0:
            items = rng.integers(0, len(recommender.items), len(chosen)).tolist()
            add("append", worker.put(Events(chosen, items, [now] * len(chosen), None)), due)
        if pattern == "all":
            pending[-1].result()
            due = time.perf_counter()
        if pattern == "all" or number % 2:
            add("recommend", recommend(chosen), due)
    for future in pending:
        future.result()
    worker.stop()
    slid = sum(recommender.window.begin(recommender._histories.get(user).count) > 0 for user in users)
    facts = recommender.statistics
    line = dict(part="slides", model=options.model, users=options.users, pattern=pattern, ahead=ahead, slid=slid)
    line |= dict(rate=options.rate[pattern], tokens_ahead=facts["tokens_encoded_ahead"] - encoded)
    for route, times in latencies.items():
        median, p99 = (round(float(np.percentile(times, q)), 3) for q in (50, 99))
        worst = round(max(times), 3)
        results(**line, route=route, median_ms=median, p99_ms=p99, worst_ms=worst, ratio=round(p99 / median, 2))


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="4x256-4096")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10, help="of each of four runs")
    parser.add_argument("--single-rate", type=float, default=100, help="requests a second of single users")
    parser.add_argument("--all-rate", type=float, default=20, help="events and lists of all users a second")
    parser.add_argument("--out", type=Path, help="the file that JSON lines are added to")
    options = parser.parse_args()
    options.rate = {"single": options.single_rate, "all": options.all_rate}
    results = Results(options.out)
    measure(lambda **_: None, options, "single", True)  # compiles kernels
    for pattern in ("single", "all"):
        for ahead in (True, False):
            free(options.device)
            measure(results, options, pattern, ahead)


if __name__ == "__main__":
    run_main(main)
