"""Trains the run that a YAML file describes, evaluates it and writes a report.

    python train.py configs/synthetic-hstu.yaml [key=value ...]   a new run, under run_dir/name/
    python train.py --resume RUN                                  go on after an interruption or a kill

On the CPU a resumed run ends bit-identical to one that was never stopped, at the same number of threads.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from data.batches import Batches
from data.datasets import DataError, Dataset, load_dataset
from data.splits import Splits, make_splits, train_item_counts
from models.checkpoint import (
    CheckpointError,
    checkpoints,
    load_checkpoint,
    load_folder,
    load_weights,
    save_checkpoint,
    save_folder,
)
from models.config import ConfigError, RunConfig, load_config, save_config
from models.graph import GraphedStep
from models.hstu import SequenceModel
from models.losses import training_loss
from models.metrics import metrics_by_length, ranking_metrics
from models.monitor import MetricsLog, ProgressBar, StopSignal
from models.report import environment, print_result, write_report
from models.retrieval import FILTERS, model_scorer, popularity_scorer, rank_targets

console = Console()


@dataclass
class Data:
    dataset: Dataset
    splits: Splits
    device: torch.device
    config: RunConfig

    def batches(self, split: str, **options) -> Batches:
        return Batches(self.dataset, getattr(self.splits, split), device=self.device, **options)

    def eval_batches(self, split: str) -> Batches:
        return self.batches(split, batch_size=self.config.eval.batch_size, shuffle=False, with_seen=True)


def open_data(config: RunConfig) -> Data:
    """The run's data set, prepared or from the cache, its splits and the device they go to."""
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no GPU (make doctor says why)")
    if config.threads:
        torch.set_num_threads(config.threads)
    c = config.data
    dataset = load_dataset(
        c.format,
        c.path,
        cache_dir=c.cache_dir,
        min_user_events=c.min_user_events,
        min_item_events=c.min_item_events,
        columns=c.columns,
        synthetic=c.synthetic,
    )
    splits = make_splits(
        dataset,
        c.protocol,
        max_seq_len=config.model.max_seq_len,
        valid_fraction=c.valid_fraction,
        test_fraction=c.test_fraction,
    )
    timed = any(getattr(attention, "time_bias", False) for attention in config.model.attention)
    if timed and not dataset.has_timestamps:
        raise ConfigError(f"model.attention.time_bias: {dataset.name} has no timestamps, set it to false")
    if config.model.action_embedding and dataset.actions is None:
        raise ConfigError(f"model.action_embedding: {dataset.name} has no actions, set it to false")
    return Data(dataset, splits, torch.device(kind), config)


def build_model(config: RunConfig, data: Data) -> SequenceModel:
    dataset = data.dataset
    num_actions = int(dataset.actions.max()) + 1 if config.model.action_embedding else 0
    try:
        return SequenceModel(config.model, dataset.num_items, num_actions).to(data.device)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


def train(config: RunConfig, folder: Path, resume: bool) -> int:
    """The whole run, in `folder`; returns the exit status."""
    torch.manual_seed(config.seed)
    data = open_data(config)
    model = build_model(config, data)
    optimizer, step = build_step(config, model, data.device)
    batches = data.batches(
        "train",
        batch_size=config.train.batch_size,
        seed=config.seed,
        group_by_length=config.train.group_by_length,
    )
    watched = "valid" if data.splits.valid is not None else "test"
    eval_batches = data.eval_batches(watched)
    progress = {"step": 0, "epoch": 0, "batch": 0, "loss_sum": 0.0, "events": 0, "best": None, "stale": 0, "lines": 0}
    progress |= {"seconds": 0.0, "fingerprint": data.dataset.fingerprint}
    if resume:
        saved = load_checkpoint(folder, model, optimizer)
        check_fingerprint(saved, data, folder)
        progress |= saved
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")
    log = MetricsLog(folder, progress["lines"], progress["step"])

    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{data.dataset.name}: {data.dataset.num_users:,} users, {data.dataset.num_items:,} items, "
        f"{data.dataset.num_events:,} events; {parameters:,} parameters; {data.device}; run folder {folder}"
    )
    stop = StopSignal()
    started, saved_at = time.monotonic() - progress["seconds"], time.monotonic()
    loss_sum = torch.tensor(progress["loss_sum"], dtype=torch.float64, device=data.device)

    def save() -> None:
        progress.update(loss_sum=loss_sum.item(), seconds=time.monotonic() - started, lines=log.lines)
        save_checkpoint(folder, model, optimizer, progress)

    with ProgressBar(console, config.train.epochs, len(batches), progress["step"]) as bar:
        for epoch in range(progress["epoch"], config.train.epochs):
            if config.eval.patience and progress["stale"] >= config.eval.patience:
                break
            model.train()
            for batch in batches.epoch(epoch, start=progress["batch"]):
                set_lr(config, optimizer, progress["step"])
                loss_sum += step(batch)
                progress["step"] += 1
                progress["batch"] += 1
                progress["events"] += batch.num_tokens
                bar.step(epoch, loss_sum, progress)
                if stop.signal:
                    save()
                    bar.stop()
                    console.print(f"Stopped at step {progress['step']}. To go on: python train.py --resume {folder}")
                    return 128 + stop.signal
            mean_loss = loss_sum.item() / max(1, progress["batch"])
            if mean_loss != mean_loss or mean_loss in (float("inf"), float("-inf")):
                raise CheckpointError(
                    f"the loss is {mean_loss} in epoch {epoch + 1}: try a lower train.lr or train.clip_norm; "
                    f"{folder} keeps the checkpoints from before"
                )
            record = {"epoch": epoch + 1, "step": progress["step"], "loss": mean_loss, "split": watched}
            progress.update(epoch=epoch + 1, batch=0)
            loss_sum.zero_()
            if config.eval.every and (epoch + 1) % config.eval.every == 0:
                metrics = evaluate(config, model, eval_batches)
                record |= metrics
                if watched == "valid":
                    keep_best(config, folder, model, progress, metrics)
                bar.print(
                    f"epoch {epoch + 1:>4}  loss {mean_loss:.4f}  {watched} "
                    + "  ".join(f"{name} {metrics[name]:.4f}" for name in ("HR@10", "NDCG@10"))
                )
            log.write(record, time.monotonic() - started)
            last = epoch + 1 == config.train.epochs
            if last or time.monotonic() - saved_at >= config.train.checkpoint_seconds:
                save()
                saved_at = time.monotonic()
    save()
    log.close()
    finish(config, folder, model, data, progress)
    return 0


def build_step(config: RunConfig, model, device: torch.device):
    """The optimiser, and the function that makes one step of it: batch -> loss, without waiting for the device."""
    c = config.train
    graphed = device.type == "cuda" and c.cuda_graphs and not c.compile
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(c.lr, device=device) if graphed else c.lr,
        betas=c.betas,
        weight_decay=c.weight_decay,
        fused=True,
        capturable=graphed,
    )
    if c.compile:
        for layer in model.layers:
            layer.compile(dynamic=True)

    def step(batch) -> torch.Tensor:
        # A cache of cast weights would outlive the step that a graph captures.
        with torch.autocast(device.type, torch.bfloat16, enabled=c.autocast == "bf16", cache_enabled=not graphed):
            out, aux = model(batch)
        loss = training_loss(config.loss, out, model.item_weight, batch.target_ids)
        for value in aux.values():
            loss = loss + value
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if c.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_norm)
        optimizer.step()
        return loss.detach()

    if not graphed:
        return optimizer, step
    return optimizer, GraphedStep(step, batch_size=c.batch_size, longest=config.model.max_seq_len)


def set_lr(config: RunConfig, optimizer, step: int) -> None:
    """The learning rate of this step: rising over the warm-up, then constant."""
    lr = config.train.lr * min(1.0, (step + 1) / max(1, config.train.warmup_steps))
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def evaluate(config: RunConfig, model, batches: Batches) -> dict[str, float]:
    scorer = model_scorer(model, config.train.autocast == "bf16")
    (ranks,) = rank_targets(scorer, batches.epoch(0), filters=[config.eval.filter_seen])
    model.train()
    return ranking_metrics(ranks)


def keep_best(config: RunConfig, folder: Path, model, progress: dict, metrics: dict) -> None:
    value = metrics[config.eval.best_metric]
    if progress["best"] is None or value > progress["best"]["value"]:
        progress["best"] = {"value": value, "epoch": progress["epoch"]}
        progress["stale"] = 0
        save_folder(
            folder / "best", {"model": model.state_dict()}, {**progress["best"], "fingerprint": progress["fingerprint"]}
        )
    else:
        progress["stale"] += 1


def final_weights(folder: Path) -> tuple[dict, dict, Path]:
    """The weights that a run is judged by: the best on the validation split if it had one, else the last."""
    found = [folder / "best"] if (folder / "best").exists() else checkpoints(folder)[-1:]
    if not found:
        raise CheckpointError(f"{folder}: no weights in this run folder yet")
    tensors, facts = load_folder(found[0], "model")
    return tensors["model"], facts, found[0]


def check_fingerprint(facts: dict, data: Data, folder: Path) -> None:
    if facts.get("fingerprint") != data.dataset.fingerprint:
        raise CheckpointError(
            f"{folder}: was trained on other data (fingerprint {facts.get('fingerprint')}, "
            f"{data.config.data.path or data.dataset.name} has {data.dataset.fingerprint})"
        )


def judge(config: RunConfig, model, data: Data, split: str) -> dict:
    """Everything that a report says of one split: metrics filtered and not, popularity beside, by history length."""
    batches = data.eval_batches(split)
    chosen = getattr(data.splits, split)
    counts = train_item_counts(data.dataset, data.splits)
    result = {"split": split, "users": len(chosen.users), "filter_seen": config.eval.filter_seen}
    for name, scorer in (
        ("model", model_scorer(model, config.train.autocast == "bf16")),
        ("popularity", popularity_scorer(counts, data.device)),
    ):
        ranks = dict(zip(FILTERS, rank_targets(scorer, batches.epoch(0), filters=FILTERS)))
        result[name] = {how: ranking_metrics(ranks[how]) for how in FILTERS}
        if name == "model":
            history = chosen.end - 1 - data.dataset.user_offsets[chosen.users]
            result["by_history"] = metrics_by_length(ranks[config.eval.filter_seen], history)
    return result


def finish(config: RunConfig, folder: Path, model, data: Data, progress: dict) -> None:
    weights, facts, source = final_weights(folder)
    load_weights(model, weights, source)
    result = judge(config, model, data, "test")
    result |= {
        "weights": source.name,
        "epoch": facts["epoch"],
        "steps": progress["step"],
        "seconds": progress["seconds"],
        "events_per_second": progress["events"] / max(progress["seconds"], 1e-9),
        "notes": data.splits.notes,
        "skipped": data.splits.skipped,
        "environment": environment(data.device),
    }
    if data.device.type == "cuda":
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    write_report(folder, config, result, data.dataset)
    print_result(console, config, result)
    console.print(f"Report: {folder / 'report.md'}")


def new_folder(config: RunConfig) -> Path:
    base = Path(config.run_dir) / config.name / time.strftime("%Y%m%d-%H%M%S")
    folder, count = base, 1
    while folder.exists():
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def absolute_paths(config: RunConfig) -> RunConfig:
    """The same run with its paths absolute, so that its folder can be used from anywhere."""
    paths = {"cache_dir": str(Path(config.data.cache_dir).resolve())}
    if config.data.path is not None:
        paths["path"] = str(Path(config.data.path).resolve())
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, like train.lr=3e-4")
    parser.add_argument("--run", type=Path, help="the run's folder, instead of a new one under run_dir/name")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder")
    options = parser.parse_intermixed_args(arguments)
    if (options.config is None) == (options.resume is None):
        parser.error("give either a config or --resume RUN")
    try:
        if options.resume:
            if not (options.resume / "config.yaml").exists():
                raise ConfigError(f"{options.resume}: not a run folder (no config.yaml)")
            return train(load_config(options.resume / "config.yaml"), options.resume, resume=True)
        config = absolute_paths(load_config(options.config, options.overrides))
        folder = options.run or new_folder(config)
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: already holds a run; --resume it or choose another folder")
        return train(config, folder, resume=False)
    except (ConfigError, DataError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
