"""Compare the memory that `train.py --plan` predicts for one GPU with what a GPU allocates, in steps with the run's
largest batch, captured and replayed, and in an evaluation.

    python benchmarks/plan.py configs/ml-1m-hstu.yaml [key=value ...]    appends to benchmarks/results/plan.jsonl
    python benchmarks/plan.py CONFIG --predict                           the prediction alone, on any machine
    python benchmarks/plan.py --recorded                                 the peaks in results/parts.jsonl, predicted

A separate process, which sees no GPU, makes the prediction.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import parts
from benchmarks.figures import RESULTS
from cli.command import Parser, run_main
from data.batch import Batch
from hstu_sparse_checkout import commit
from models.hstu import SequenceModel
from training.config import load_config
from training.graph import padded_sequences, padded_tokens
from training.planning.imagined import imagined_gpu
from training.planning.meter import Meter
from training.planning.plan import CUBLAS_BYTES, MIB, memory_of_a_gpu, plan, tokens_of_batches
from training.ranks.processes import Ranks
from training.report import environment
from training.run import build_model, open_data
from training.step import build_step, train_batches

STEPS = 4  # of the first epoch, before the largest batch


def predict(options) -> dict:
    """Return the plan, and its peaks of training alone and of the whole run."""
    config = load_config(options.config, options.overrides)
    data = open_data(config, device=torch.device("cpu"))
    prediction = plan(data.config, data, build_step, memory_of_a_gpu())
    return asdict(prediction) | {"peak": prediction.peak, "training_peak": prediction.training_peak}


def recorded() -> None:
    """Print for each step of `benchmarks/train.py --parts` its peak, the predicted peak, their ratio.

    If a step was not the first of its process, its record lacks the workspace that cuBLAS had allocated before.
    """
    parser = argparse.ArgumentParser()
    parts.add_arguments(parser)
    for record in map(json.loads, (RESULTS / "parts.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["attention"] not in parts.KINDS or not record.get("peak_memory_bytes"):
            continue
        settings = {name: record[name] for name in ("tokens", "items", "size", "loss", "model", "train")}
        options = argparse.Namespace(**vars(parser.parse_args([])) | settings)
        config = parts.configuration(options, record["length"], parts.KINDS[record["attention"]])
        uncaptured = config.train.model_copy(update={"cuda_graphs": False})
        tokens = padded_tokens(config.train.batch_size * record["length"])
        sequences = padded_sequences(config.train.batch_size, record["length"])
        with imagined_gpu(), Meter() as meter:
            model = SequenceModel(config.model, record["items"]).train()
            _, step = build_step(config.model_copy(update={"train": uncaptured}), model, torch.device("cpu"))
            token_columns = [torch.empty(tokens, dtype=torch.int64) for _ in range(4)]
            offsets, users = (torch.empty(n, dtype=torch.int64) for n in (sequences + 1, sequences))
            for _ in range(2):
                step(Batch(*token_columns, seq_offsets=offsets, users=users))
        measured = record["peak_memory_bytes"] / MIB
        least, most = meter.peak / MIB, (meter.peak + 2 * CUBLAS_BYTES) / MIB
        print(
            f"{record['attention']:<20}{record['length']:>8,}{measured:>10,.0f} MiB, predicted {least:,.0f} to "
            f"{most:,.0f}, {least / measured:.3f} to {most / measured:.3f}; {record['commit']}",
            flush=True,
        )


def measure(options) -> dict:
    """Measure peaks of torch's allocated memory, in training and in the evaluation after it."""
    config = load_config(options.config, options.overrides)
    ranks = Ranks(config)
    data = open_data(config)
    config = data.config
    torch.manual_seed(config.seed)
    counts = tokens_of_batches(config, data)
    epoch = int(np.argmax([tokens.max() for tokens in counts]))
    model = build_model(config, data.vocabulary, data.device, ranks).train()
    _, step = build_step(config, model, data.device, ranks=ranks)
    batches = train_batches(config, data, ranks)
    for number, batch in enumerate(batches.epoch(0)):
        if number == STEPS:
            break
        step(batch)
    largest = next(batches.epoch(epoch, start=int(counts[epoch].argmax())))
    for _ in range(3):  # uncaptured, captured, replayed
        step(largest)
    torch.cuda.synchronize()
    record: dict = {"training_peak": torch.cuda.max_memory_allocated()}
    record |= {"training_reserved": torch.cuda.memory_reserved()}
    judged = next(name for name in ("valid", "test") if getattr(data.splits, name) is not None)
    data.task.evaluate(model, data.eval_batches(judged))
    statistics = torch.cuda.memory_stats()
    record |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    record |= {"requested_peak": statistics["requested_bytes.all.peak"], "tokens": largest.num_tokens}
    return record | {"environment": environment(data.device)}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--name", help="the name in the record; by default the configuration's")
    parser.add_argument("--predict", action="store_true", help="measure nothing; print the prediction")
    parser.add_argument(
        "--recorded", action="store_true", help="predict the peaks in results/parts.jsonl; needs no GPU"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "plan.jsonl", help="the JSON lines, which are added to")
    options = parser.parse_intermixed_args()
    if options.recorded:
        return recorded()
    if options.config is None:
        parser.error("give a configuration, or --recorded")
    if options.predict:
        print(json.dumps(predict(options)))
        return
    command = [sys.executable, __file__, options.config, *options.overrides, "--predict"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    predicted = json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout)
    measured = measure(options)
    ratio = {name: round(predicted[name] / measured[name], 4) for name in ("training_peak", "peak")}
    name = options.name or load_config(options.config, options.overrides).name
    record = {"config": name, "ratio": ratio, "predicted": predicted, "measured": measured, "commit": commit()}
    print(name, json.dumps(ratio), flush=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    run_main(main)
