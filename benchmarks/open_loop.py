"""Find the rate of mixed requests at which the 99th percentile of a service's latencies passes a limit.

    python benchmarks/open_loop.py . [OTHER_CHECKOUT ...] [--rates 40,60,80] [--seconds 6] [--limit 100]

Each checkout trains a small run and serves it, on the CPU, by its own serve.py. At each rate they are measured in
turns: requests leave at fixed times, whether or not earlier ones are answered, half of them for lists, a quarter
events, a fifth scores of 50 candidates, the rest histories. A service that is over the limit at two rates in a row is
not measured at higher ones; the rate at which it reaches the limit is interpolated. Each result is a line of JSON, on
standard output and in the file --out.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving import Results
from cli.command import Parser, run_main
from data.errors import UserError
from serving.histories import keep_objects

USERS, ITEMS, CANDIDATES = 200, 3000, 50
RUN = [
    "configs/synthetic-hstu.yaml", f"data.synthetic={{num_users: 500, num_items: {ITEMS}}}", "train.epochs=1",
    "model.max_seq_len=200", "device=cpu", "eval.every=0", "eval.patience=null",
]  # fmt: skip
RATES = "40,50,60,70,85,100,120,140,170,200,240,280,340,400,480,560"
ATTEMPTS = 2  # rates in a row over the limit, after which a service is not measured at higher ones


class Client:
    """Connections to a service, which send requests and read the whole answers. items: the ids that it knows."""

    def __init__(self, port: int, items: list[int]):
        self.port, self.items, self.idle = port, items, []

    async def send(self, method: str, path: str, body: object = None) -> int:
        """Return the status of the answer."""
        content = b"" if body is None else json.dumps(body).encode()
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer)
        await reader.readexactly(int(length[1]) if length else 0)
        self.idle.append((reader, writer))
        return int(answer[9:12])


@contextlib.contextmanager
def serving(checkout: Path, folder: Path, wrapper: Path | None) -> Iterator[Client]:
    """Yield the client of a service of the checkout; its run is trained in `folder`, unless the folder has it."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    run = folder / "run"
    if not (run / "result.json").exists():
        command = [sys.executable, "train.py", *RUN, f"data.cache_dir={folder / 'cache'}", "--run", run, "--quiet"]
        subprocess.run(list(map(str, command)), cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    (run / "events.log").unlink(missing_ok=True)
    command = [sys.executable, wrapper or "serve.py", run, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        list(map(str, command)), cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    try:
        for line in process.stdout or ():
            if address := re.search(r"Serving on http://127\.0\.0\.1:(\d+)", line):
                items = np.load(run / "vocabulary" / "item_ids.npy", allow_pickle=False).tolist()
                yield Client(int(address[1]), items)
                return
        raise UserError(f"{checkout}: serve.py has not started")
    finally:
        process.terminate()
        process.communicate()


async def prepare(client: Client) -> None:
    """Give each user some events, so that half of the windows are full."""
    rng = np.random.default_rng(0)
    for user in range(USERS):
        items = rng.choice(client.items, 2 * user + 1).tolist()
        events = [{"user": f"load-{user}", "item": item} for item in items]
        if await client.send("POST", "/events", {"events": events}) != 200:
            raise UserError("the service takes no events")


async def measure(client: Client, rate: float, seconds: float, seed: int) -> dict:
    """Return percentiles of the latencies at a rate, the answers per second, and the number of failed requests."""
    rng, times, failed = np.random.default_rng(seed), [], 0
    some = rng.choice(client.items, CANDIDATES).tolist()

    async def request(due: float) -> None:
        nonlocal failed
        user, kind = f"load-{rng.integers(USERS)}", rng.random()
        if kind < 0.5:
            status = await client.send("GET", f"/users/{user}/recommendations")
        elif kind < 0.75:
            event = {"user": user, "item": int(rng.choice(client.items))}
            status = await client.send("POST", "/events", {"events": [event]})
        elif kind < 0.95:
            status = await client.send("POST", "/scores", {"user": user, "candidates": some})
        else:
            status = await client.send("GET", f"/users/{user}")
        failed += status != 200
        times.append(1000 * (time.perf_counter() - due))

    began, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(request(due)))
    await asyncio.gather(*tasks)
    percentiles = {f"p{q}_ms": round(float(np.percentile(times, q)), 1) for q in (50, 99)}
    return percentiles | {"answered": round(len(times) / (time.perf_counter() - began), 1), "failed": failed}


def passed(points: list[tuple[float, float]], limit: float) -> float | None:
    """Return the rate at which p99 reaches the limit, by log-log interpolation from the last point below the limit to
    the next one; None if there is no point below or after.

    points: (rate, p99) by ascending rate.
    """
    below = [place for place, (_, p99) in enumerate(points) if p99 <= limit]
    if not below or below[-1] + 1 == len(points):
        return None
    (r0, p0), (r1, p1) = points[below[-1]], points[below[-1] + 1]
    share = (np.log(limit) - np.log(p0)) / (np.log(p1) - np.log(p0))
    return round(float(r0 * (r1 / r0) ** share), 1)


async def run(results: Results, options, clients: dict[Path, Client]) -> None:
    points: dict[Path, list[tuple[float, float]]] = {checkout: [] for checkout in clients}
    for client in clients.values():
        await prepare(client)
        await measure(client, options.rates[0], options.seconds, 0)
    for number, rate in enumerate(options.rates):
        for checkout, client in clients.items():
            if len(last := points[checkout][-ATTEMPTS:]) == ATTEMPTS and all(p99 > options.limit for _, p99 in last):
                continue
            line = await measure(client, rate, options.seconds, number)
            points[checkout].append((rate, line["p99_ms"]))
            results(part="open loop", checkout=str(checkout), rate=rate, **line)
    for checkout, measured in points.items():
        rate = passed(measured, options.limit)
        results(part="open loop", checkout=str(checkout), limit_ms=options.limit, passed_at=rate)


def rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--rates", type=rates, default=RATES)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--limit", type=float, default=100, help="milliseconds")
    parser.add_argument("--folder", type=Path, help="the folder of the runs, which a later call takes over")
    parser.add_argument("--wrapper", type=Path, help="a script that serves in place of serve.py, with a profile say")
    parser.add_argument("--out", type=Path, help="the file that JSON lines are added to")
    options = parser.parse_args(arguments)
    results = Results(options.out)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = {}
        for number, checkout in enumerate(options.checkouts):
            place = folder / str(number)
            place.mkdir(parents=True, exist_ok=True)
            clients[checkout] = stack.enter_context(serving(checkout.resolve(), place, options.wrapper))
        keep_objects()  # this process may not pause either
        asyncio.run(run(results, options, clients))


if __name__ == "__main__":
    run_main(main)
