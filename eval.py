"""Evaluates a run from its folder alone, over the full catalogue, and writes predictions.

python eval.py RUN [--split test] [--predict OUT.parquet --top-k 10] [--sampled 100]
python eval.py RUN --kv-cache rotatekv --bits 2 [--sink-tokens 4]      the model answers from a packed cache
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from data.datasets import DataError
from models.checkpoint import CheckpointError, load_weights
from models.config import ConfigError, load_config
from models.folder import FolderError, access, check_run, write_file
from models.metrics import ranking_metrics
from models.monitor import explain_faults, memory_fault
from models.report import print_result
from models.retrieval import best_items, model_scorer, rank_targets, sampled_candidates, seen_by
from models.run import Data, build_model, check_config, check_fingerprint, final_weights, judge, open_data
from models.serving import ServingError, serve_from_cache

console = Console()

# Options of the packed cache: name, type, default.
CACHE_OPTIONS = (
    ("bits", int, 2),
    ("head_group", int, 2),
    ("quant_group", int, 64),
    ("sparsity", float, 0.0),
    ("sink_tokens", int, 0),
    ("clip", float, 1.0),
)
CLIPS = {2: 0.75, 3: 0.9}  # the default of clip at so many bits: what loses the least, see docs/rotatekv.md


def open_run(folder: Path, overrides: list[str]):
    """(config, data, model) of a run folder, the model with its final weights."""
    check_run(folder)
    config = load_config(folder / "config.yaml", overrides)
    weights, facts, source = final_weights(folder)
    check_config(facts, load_config(folder / "config.yaml"), folder, source)
    data = open_data(config, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    check_fingerprint(facts.get("fingerprint"), data, folder)
    model = build_model(data)
    load_weights(model, weights, source)
    return data.config, data, model, {"weights": source.name, "epoch": facts["epoch"]}


@torch.no_grad()
def predict(config, data: Data, model, split: str, k: int, out: Path) -> int:
    """Writes the k best items of each user of the split, in original ids; returns the number of rows.

    Columns: user, rank (from 1), item, score (cosine). The history is the split's: nothing from its target on.
    """
    import polars as pl

    score = model_scorer(model, config.train.autocast == "bf16")
    users, items, values = [], [], []
    for batch in data.eval_batches(split).epoch(0):
        how = config.eval.filter_seen
        best, ids = best_items(score(batch), k, None if how == "none" else seen_by(how, batch))
        users.append(batch.users.cpu().numpy())
        items.append(ids.cpu().numpy())
        values.append(best.cpu().numpy())
    users, items, values = (np.concatenate(parts) for parts in (users, items, values))
    width = items.shape[1]
    frame = pl.DataFrame(
        {
            "user": np.asarray(data.dataset.user_ids)[np.repeat(users, width)],
            "rank": np.tile(np.arange(1, width + 1, dtype=np.int32), len(users)),
            "item": np.asarray(data.dataset.item_ids)[items.ravel()],
            "score": values.ravel(),
        }
    ).filter(pl.col("score").is_finite())  # a user who has seen nearly everything has fewer than k left
    with access(out, "written"):
        frame.write_parquet(out)
    return len(frame)


def check_options(options: argparse.Namespace) -> None:
    """ConfigError for values of the command line that nothing can be done with."""
    if options.top_k < 1 or (options.sampled is not None and options.sampled < 1):
        raise ConfigError("--top-k and --sampled take a whole number of at least 1")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed: expected 0 to {2**63 - 1}, got {options.seed}")
    if options.predict:
        # Nothing but an earlier file of predictions is ever written over.
        if options.predict.suffix != ".parquet" or options.predict.is_dir():
            raise ConfigError(f"--predict {options.predict}: expected the name of a file that ends in .parquet")
        if not options.predict.absolute().parent.is_dir():
            raise ConfigError(f"{options.predict.parent}: no such folder")


def cache_defaults(bits: int) -> dict:
    return {name: default for name, _, default in CACHE_OPTIONS} | {"bits": bits, "clip": CLIPS.get(bits, 1.0)}


def cache_options(options: argparse.Namespace) -> dict | None:
    """What `serve_from_cache` takes, or None without --kv-cache; ConfigError for options without a cache."""
    given = {name: value for name, _, _ in CACHE_OPTIONS if (value := getattr(options, name)) is not None}
    if options.kv_cache is None:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is an option of --kv-cache, which is not given")
        return None
    return cache_defaults(given.get("bits", 2)) | given


def result_name(split: str, cache: dict | None) -> str:
    """eval-test.json; with a cache its options stand in the name, so that results lie beside each other."""
    if cache is None:
        return f"eval-{split}.json"
    parts = [f"eval-{split}-rotatekv-{cache['bits']}bit"]
    defaults = cache_defaults(cache["bits"])
    parts += [f"{name}={cache[name]}" for name, default in defaults.items() if cache[name] != default]
    return "-".join(parts) + ".json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, like device=cpu")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="test")
    parser.add_argument("--predict", type=Path, metavar="OUT.parquet", help="write the top-k items of each user")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--sampled", type=int, metavar="COUNT", help="also rank among COUNT random items")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled candidates")
    parser.add_argument("--kv-cache", choices=("rotatekv",), help="the last query reads its history from such a cache")
    for name, kind, default in CACHE_OPTIONS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            help=f"of the cache; by default {CLIPS if name == 'clip' else default}",
        )
    options = parser.parse_intermixed_args(arguments)
    try:
        check_options(options)
        cache = cache_options(options)
        config, data, model, source = open_run(options.run, options.overrides)
        if options.sampled and options.sampled > data.dataset.num_items:
            raise ConfigError(f"--sampled {options.sampled}: there are {data.dataset.num_items} items")
        if getattr(data.splits, options.split) is None:
            raise ConfigError(f"--split {options.split}: protocol {config.data.protocol} has no such split")
        size = serve_from_cache(model, **cache) if cache else None
        result = judge(model, data, options.split) | source | {"notes": data.splits.notes}
        if options.sampled:
            filters = [config.eval.filter_seen]
            batches = data.eval_batches(options.split).epoch(0)
            candidates = sampled_candidates(options.sampled, options.seed)
            score = model_scorer(model, config.train.autocast == "bf16")
            (ranks,) = rank_targets(score, batches, filters=filters, candidates=candidates)
            label = f"SAMPLED: target among {options.sampled} random items, not comparable with full ranking"
            result["sampled"] = {"label": label, "seed": options.seed, **ranking_metrics(ranks)}
        print_result(console, data.task, result)
        if size:
            result["kv_cache"] = size.report()
            console.print("Served from a cache: " + ", ".join(f"{k} {v}" for k, v in result["kv_cache"].items()))
        path = options.run / result_name(options.split, cache)
        write_file(path, json.dumps(result, indent=1))
        console.print(f"Written: {path}")
        if options.predict:
            rows = predict(config, data, model, options.split, options.top_k, options.predict)
            console.print(f"Written: {options.predict} ({rows:,} rows)")
        return 0
    except (ConfigError, DataError, CheckpointError, FolderError, ServingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if (line := memory_fault(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
