"""Model training with 100 million items and 100 million users on 8 to 1,024 GPUs, from measured constants.

    python benchmarks/scaling.py                                   the tables of docs/scaling.md, in Markdown
    python benchmarks/scaling.py --items 10000000 --tokens 32768   with other numbers of items, and of tokens of a GPU
    python benchmarks/scaling.py --nvlink 200 --memory 80          with another bandwidth, on GPUs of 80 GB
    python benchmarks/scaling.py --measured FILE                   with the exchange in lines of benchmarks/scale.py

Nothing here has run on more than four GPUs. The parts of a step on one H200 (results/parts.jsonl), the loss
(results/catalogue_loss.jsonl), the rate of a copy and the exchange over NVLink (results/scale.jsonl, two H100s) are
measured. The bandwidth of the network is from a datasheet, and REACHED is a guess of the share of it that a step
reaches. No part overlaps another.

Letters: G GPUs, T tokens of a GPU, I items, E embedding size, R different rows that a GPU looks up in a step.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.command import Parser, run_main

RESULTS = Path(__file__).resolve().parent / "results"
GPUS = (8, 16, 64, 256, 1024)
MEASURED_TOKENS = 65_536  # tokens of a step in both files
SIZE, LENGTH, ATTENTION = 256, 2048, "dense both biases"  # 4 layers, 4 heads of 64, bf16 autocast
GPUS_OF_A_MACHINE = 8
# NVIDIA H200 Tensor Core GPU, datasheet.
GPU_BYTES = 141e9
# Seconds of an exchange besides its bytes, and the bytes a second that a GPU then receives, on two H100s:
# measured_exchange(results/scale.jsonl).
WAIT, NVLINK = 2.9e-3, 153e9
# NVIDIA DGX H200, datasheet: a 400 Gb/s network adapter for each GPU.
NETWORK = 50e9
REACHED = 0.6
# A copy between two places of an H200's memory, bytes read and written.
COPY = 4.3e12
# The memory's bandwidth of an H100 over that of an H200, by their datasheets: 3.35 and 4.8 TB/s.
H100_OF_H200 = 3.35 / 4.8
# Grattafiori et al., The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54
# days on 16,384 GPUs.
GPU_HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419
NEGATIVES = 128


class Setting(NamedTuple):
    """A way to train. loss: the items that a target competes with. fused: whether rowwise Adagrad updates the table."""

    title: str
    loss: str
    fused: bool


SETTINGS = (
    Setting("128 negatives for each token, AdamW", "per token", False),
    Setting("128 negatives for each token, fused rowwise Adagrad", "per token", True),
    Setting("128 negatives for all tokens, AdamW", "shared", False),
    Setting("128 negatives for all tokens, fused rowwise Adagrad", "shared", True),
    Setting("the whole catalogue, AdamW", "whole", False),
)


class Machine(NamedTuple):
    """Bytes a second that a GPU receives over NVLink and over the network in a step, the bytes of its memory, and the
    seconds of an exchange of no bytes.
    """

    nvlink: float = NVLINK
    network: float = NETWORK * REACHED
    memory: float = GPU_BYTES
    wait: float = WAIT


MACHINE = Machine()


class Step(NamedTuple):
    """Costs of a step on one GPU: bytes of memory, bytes received, milliseconds by part."""

    table: float
    optimizer: float
    rest: float
    looked_up: float
    nvlink: float
    network: float
    dense_ms: float
    loss_ms: float
    exchange_ms: float
    optimizer_ms: float

    @property
    def memory(self) -> float:
        return self.table + self.optimizer + self.rest + self.looked_up

    @property
    def ms(self) -> float:
        return self.dense_ms + self.loss_ms + self.exchange_ms + self.optimizer_ms


def records(name: str) -> Iterator[dict]:
    for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def measured_step() -> dict:
    """Return the record of a step by part."""
    (record,) = (
        candidate
        for candidate in records("parts")
        if candidate["attention"] == ATTENTION and candidate["length"] == LENGTH
    )
    return record


def measured_loss(setting: Setting) -> float:
    """Return milliseconds of the loss, forward and backward, with MEASURED_TOKENS over a million items."""
    name = {"per token": "ours 128 negatives per token", "shared": "ours 128 negatives shared", "whole": "ours"}
    times = [
        record["ms"]
        for record in records("catalogue_loss")
        if (record["name"], record["items"], record.get("part")) == (name[setting.loss], 10**6, "step")
        and record.get("checked")
    ]
    return times[-1]


def rows_looked_up(setting: Setting, tokens: int, items: int) -> float:
    """Return R: the distinct ids of a step with uniform ids over all items. Popular items make them fewer."""
    drawn = {"per token": tokens * (2 + NEGATIVES), "shared": 2 * tokens + NEGATIVES, "whole": tokens}[setting.loss]
    return items * -math.expm1(-drawn / items)


def measured_exchange(path: Path) -> tuple[float, float]:
    """Return (seconds of an exchange of no bytes, bytes a second), fitted to cases on one rank and on several.

    The time of an exchange is that of a step on several ranks minus that on one, plus the optimiser's time for the part
    of the table that the other ranks have. It is assumed to be linear in the bytes that a rank receives. It includes
    torchrec's work for the exchange and the time for which the host waits.
    """
    from benchmarks.scale import CASES  # imports torch, which the tables do not need
    from benchmarks.scale_tables import records
    from training.config import load_config
    from training.ranks.sharding import distinct, num_looked_up

    measured = records(path)
    sizes, times = [], []
    for (case, how, ranks), several in measured.items():
        one = measured.get((case, how, 1))
        if case not in ("large", "long", "fused") or ranks == 1 or one is None:
            continue
        config, items, others = load_config(CASES[case].config, several["overrides"]), several["items"], 1 - 1 / ranks
        row = 4 * config.model.embedding_dim
        # Rows arrive from the other ranks, then gradients of this rank's rows.
        received = distinct(items, num_looked_up(config, int(several["tokens"] / ranks), ranks))
        sizes.append(2 * others * received * row)
        copy = COPY * (H100_OF_H200 if "H100" in several["device"] else 1)
        spared = 0 if config.parallel.fused else 9 * items * row * others / copy
        times.append((several["queued"] - one["queued"]) / 1e3 + spared)
    if len(sizes) < 2:
        raise SystemExit(f"{path}: needs two of the cases large, long and fused, each on one rank and on several")
    slope, seconds = statistics.linear_regression(sizes, times)
    if slope <= 0 or seconds < 0:
        raise SystemExit(f"{path}: no wait and bandwidth fit these bytes and seconds: {sizes}, {times}")
    return seconds, 1 / slope


def step(setting: Setting, gpus: int, tokens: int, items: int, machine: Machine = MACHINE) -> Step:
    """Return the step of one of G GPUs with T tokens each, the table row-wise."""
    step_record, share, row = measured_step(), tokens / MEASURED_TOKENS, 4 * SIZE
    shard, rows = items * row / gpus, rows_looked_up(setting, tokens, items)
    elsewhere, outside = (gpus - 1) / gpus, max(0, gpus - GPUS_OF_A_MACHINE) / gpus
    # Rows arrive and their gradients are sent.
    moved = 2 * rows * row
    outputs = 0.0
    if setting.loss == "whole":
        # Outputs of all tokens and their gradients, each summed over all GPUs, which moves them twice.
        outputs = tokens * gpus * row
        moved += 4 * outputs
    nvlink, network = moved * (elsewhere - outside), moved * outside
    loss = measured_loss(setting) * share
    if setting.loss == "whole":
        loss *= items / 10**6  # T * G tokens with I / G items
    parts = step_record["parts_ms"]
    # AdamW reads four tensors and writes three, after the gradient was zeroed and added to; the fused optimiser reads
    # and writes the rows of the step, and their gradients once.
    touched = 3 * rows * row if setting.fused else 9 * shard
    return Step(
        table=shard,
        optimizer=4 * items / gpus if setting.fused else 3 * shard,
        rest=step_record["peak_memory_bytes"] * share,
        looked_up=3 * rows * row + 4 * outputs,
        nvlink=nvlink,
        network=network,
        dense_ms=(parts["embedding"] + parts["projections"] + parts["attention"]) * share,
        loss_ms=loss,
        exchange_ms=1e3 * (machine.wait + nvlink / machine.nvlink + network / machine.network),
        optimizer_ms=1e3 * touched / COPY,
    )


def table(setting: Setting, tokens: int, items: int, machine: Machine = MACHINE) -> Iterator[str]:
    head = (
        "GPUs, table, gradient and optimiser, rows of a step, all memory, by NVLink, by network, layers, loss, exchange"
    )
    yield f"| {head.replace(', ', ' | ')} | optimiser | step | tokens/s |"
    yield "| ---: |" + " ---: |" * 12
    for gpus in GPUS:
        s = step(setting, gpus, tokens, items, machine)
        memory = f"{s.memory / 1e9:,.0f}" if s.memory <= machine.memory else f"**{s.memory / 1e9:,.0f}**"
        sizes = (f"{x / 1e9:,.1f}" for x in (s.table, s.optimizer, s.looked_up))
        moved = (f"{x / 1e9:,.2f}" for x in (s.nvlink, s.network))
        times = (f"{x:,.1f}" for x in (s.dense_ms, s.loss_ms, s.exchange_ms, s.optimizer_ms, s.ms))
        rate = f"{gpus * tokens / s.ms / 1e3:,.1f} M"
        yield f"| {gpus:,} | " + " | ".join((*sizes, memory, *moved, *times, rate)) + " |"


def users(count: int, events: int, items: int, machine: Machine = MACHINE) -> Iterator[str]:
    """Describe what so many users need besides the step."""
    columns, order = 16 * events, 6 * 8 * count
    products = 2 * count * items * SIZE
    yield "| GPUs | evaluation of every user | epoch | checkpoint of each GPU | between two interruptions |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for gpus in GPUS:
        s = step(SETTINGS[3], gpus, MEASURED_TOKENS, items, machine)
        judged = products / gpus / 400e12
        epoch = events / (gpus * MEASURED_TOKENS) * s.ms / 1e3
        hours = GPU_HOURS_BETWEEN_FAILURES / gpus
        yield (
            f"| {gpus:,} | {judged / 60:,.1f} min | {epoch / 60:,.1f} min | {(s.table + s.optimizer) / 1e9:,.2f} GB | "
            f"{hours:,.0f} h |"
        )
    yield ""
    yield (
        f"{count:,} users of {events // count:,} events are {columns / 1e9:,.0f} GB of columns on the disk of each "
        f"machine, and {order / 1e9:,.1f} GB of order and offsets in each process, "
        f"{GPUS_OF_A_MACHINE * order / 1e9:,.0f} GB for a machine of {GPUS_OF_A_MACHINE} GPUs."
    )


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000_000)
    parser.add_argument("--users", type=int, default=100_000_000)
    parser.add_argument("--events", type=int, default=10_000_000_000)
    parser.add_argument("--tokens", type=int, default=MEASURED_TOKENS, help="the tokens of each GPU in a step")
    parser.add_argument("--nvlink", type=float, help="GB/s that a GPU receives over NVLink in a step")
    parser.add_argument("--network", type=float, help="GB/s that it receives over the network")
    parser.add_argument("--memory", type=float, help="GB of a GPU's memory")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="take the exchange from lines of benchmarks/scale.py"
    )
    options = parser.parse_args()
    sizes = (options.nvlink, options.network, options.memory)
    machine = Machine(*(value if size is None else 1e9 * size for value, size in zip(MACHINE, sizes)))
    if options.measured:
        wait, nvlink = measured_exchange(options.measured)
        machine = machine._replace(wait=wait, nvlink=nvlink)
        print(f"An exchange, as measured: {1e3 * wait:.2f} ms, then {nvlink / 1e9:,.1f} GB/s\n")
    for setting in SETTINGS:
        print(f"{setting.title}:\n")
        print("\n".join(table(setting, options.tokens, options.items, machine)) + "\n")
    print("\n".join(users(options.users, options.events, options.items, machine)))


if __name__ == "__main__":
    run_main(main)
