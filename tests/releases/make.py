"""Write small stored things of this version, which later versions are tested with (test_releases.py):

    python -m tests.releases.make

writes tests/releases/VERSION: a run with its prepared data, the log of its service with a segment, a store of
`Recommender.save`, a file of `PagePool.save`, and what the model answered.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import hstu_sparse

ROOT = Path(__file__).resolve().parents[2]
AT = 1_800_000_000
CONFIG = """
name: shop
seed: 0
device: cpu
threads: 1
data:
  format: csv
  path: orders.csv
  cache_dir: cache
  columns: {user: customer, item: sku, timestamp: ordered_at}
  protocol: leave_one_out
model: {block: hstu, max_seq_len: 16, embedding_dim: 8, num_layers: 1, num_heads: 1, attention: {kind: dense}}
train: {epochs: 2, batch_size: 8, lr: 1e-2, checkpoint_seconds: 1000}
"""
# Files that are written for people or for a running process, and the checkpoint before the first step.
LEFT_OUT = ("tensorboard", "report.md", "report.html", "*.[ps][nv]g", ".*.lock", ".lock", "checkpoints/step-00000000")
STORE = """
from serving import Recommender
recommender = Recommender.load("run", history=True)
recommender.append(["c0", "saved"], ["s1", "s2"], [1_790_000_000, 1_790_000_000])
recommender.save("store")
"""
PAGES = """
import torch
from hstu_sparse import PageFormat, PagePool
pool = PagePool(PageFormat(2, 16, 16, dtype=torch.float32), 2, layers=1)
row = pool.reserve((), 20)
offsets, pages, lengths = torch.tensor([0, 20]), pool.table([row]), torch.tensor([0])
k = torch.arange(20 * 2 * 16, dtype=torch.float32).view(20, 2, 16)
pool.write(0, k, -k, offsets, pages, lengths)
pool.save("pages.safetensors", [row], [20])
"""
SEGMENT = """
from pathlib import Path
from serving.http import event_log
event_log.FULL = 1
log = event_log.EventLog(Path("run/events.log"))
log.append([{"users": ["late"], "items": ["s3"], "timestamps": [1_795_000_000], "actions": None}])
log.close()
"""


def orders() -> str:
    rows = [f"c{n % 20},s{(n % 20 + n // 20 * (1 + n % 2)) % 12},{1_700_000_000 + 3_600 * n}" for n in range(200)]
    return "\n".join(["customer,sku,ordered_at", *rows, ""])


def request(url: str, body: object = None, method: str | None = None) -> dict:
    """Send a request, waiting for a service that starts; return the answer."""
    data = None if body is None else json.dumps(body).encode()
    for _ in range(600):
        try:
            message = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
            with urllib.request.urlopen(message) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def serve(start: Sequence[str], folder: Path, environment: dict[str, str]) -> dict:
    """Post events to a service of the run, delete a user, and return lists of recommendations."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = subprocess.Popen([*start, "run", "--history", "--port", str(port)], cwd=folder, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        request(f"{url}/health")
        for user, item in (("c0", "s5"), ("new", "s1"), ("new", "s2"), ("gone", "s1")):
            event = {"user": user, "item": item, "timestamp": AT - 100, "id": f"{user}-{item}"}
            request(f"{url}/events", {"events": [event]})
        request(f"{url}/users/gone", method="DELETE")
        request(f"{url}/filters/stock", {"items": ["s1", "s2", "s3"]}, "PUT")
        return {
            user: request(f"{url}/users/{user}/recommendations?k=3&at={AT}")["items"] for user in ("c0", "c1", "new")
        }
    finally:
        service.terminate()
        service.wait()


def main() -> None:
    target = ROOT / "tests" / "releases" / hstu_sparse.__version__
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="release-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "orders.csv").write_text(orders())
        (folder / "shop.yaml").write_text(CONFIG)

        def python(program: str) -> None:
            subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True)

        python("import train; train.main(['shop.yaml', '--out', 'run', '--quiet'])")
        answers = serve([sys.executable, str(ROOT / "serve.py")], folder, environment)
        (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")
        python(SEGMENT)
        python(STORE)
        python(PAGES)
        for pattern in LEFT_OUT:
            for path in (folder / "run").glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(folder, target)


if __name__ == "__main__":
    main()
