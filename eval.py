"""Evaluate a run over the full catalogue, predict, recommend and export, from the run's folder.

python eval.py RUN [--split test] [--predict OUT.parquet --top-k 10] [--sampled 100]      evaluate held-out events
python eval.py RUN --data NEW                                  evaluate on other data, with the items of the run
python eval.py RUN --recommend OUT.csv [--users FILE | --history FILE.csv]        each user's next items
python eval.py RUN --recommend OUT.csv --items NEW.csv         the same with new items, which have features
python eval.py RUN --export-items OUT                          write item vectors and ids
python eval.py RUN --export-model OUT.pt2                      write a file that torch loads without this package
python eval.py RUN --serve [2bit] [--slide 1]                  evaluate the run as serve.py runs it, event by event
"""

from cli.command import eval_options, parse_early, serving_options

if __name__ == "__main__":
    parse_early(eval_options, __doc__)

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cli.interrupt import Interrupts
from cli.program import run_program
from cli.terminal import terminal
from data.errors import ConfigError
from data.features.vocabulary import with_rows
from data.reading.encodings import decoded
from data.types import DataError, Dataset, shown
from data.vocabulary import index_of
from evaluation.item_filters import FilterError, ItemFilter, ItemFilters
from evaluation.ranking_metrics import Rankings, ranking_metrics
from evaluation.scores import SampledCandidates, rank_targets
from models.tasks.scoring import model_scorer
from serving import Recommender, ServingOptions
from serving.judge import ServedModel
from training.changes import evaluation_notes, moved_data
from training.config import ParallelConfig, RunConfig, load_config
from training.folder import access, as_json, read_regular, write_file
from training.monitor import explain_faults
from training.new_items import add_items_of
from training.outputs import check_export, check_table, export_items, recommendations, whole_histories, write_table
from training.ranks.processes import Ranks
from training.report import print_result
from training.run import (
    Data,
    absolute_path,
    find_data,
    for_data,
    judge,
    load_data,
    open_data,
    open_weights,
    trained_model,
)
from training.update import new_data
from training.vocabulary import Known

MOST_IDS = 2**32  # largest file of ids, in bytes


def open_run(folder: Path, overrides: list[str]):
    """Open a run folder; return (configuration, its data as in training, the model with its final weights, facts)."""
    config, known, weights, source, epoch = open_weights(folder, overrides)
    data = open_data(config, trained_on=known)
    model = trained_model(data.config, known, weights, source)
    return data.config, data, model, {"weights": source.name, "epoch": epoch}


def work(options: argparse.Namespace, interrupts: Interrupts) -> None:
    """Check the options and outputs, then export, recommend or evaluate."""
    interrupts.stage = "opening the run; nothing was written"
    alone, other_data = os.environ.get("WORLD_SIZE", "1") == "1", bool(options.data or options.history)
    config, known, weights, source, epoch = open_weights(options.run, options.overrides, alone, other_data)
    run_config = load_config(options.run / "config.yaml")
    moved, notes = moved_data(run_config, config), evaluation_notes(run_config, config)
    config, ranks = with_ranks(config, options)
    lists = options.predict or options.recommend or options.export_items or options.export_model
    if lists or options.sampled:
        config.task.check_lists()
    for out, name in ((options.predict, "--predict"), (options.recommend, "--recommend")):
        if out:
            check_table(out, name, config, options.overwrite)
    if options.export_items:
        check_export(options.export_items, config, options.overwrite)
    if options.data:
        path = absolute_path(options.data)
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": path})})
        for out, name in ((options.predict, "--predict"), (options.recommend, "--recommend")):
            if out:
                check_table(out, name, config, options.overwrite)
    if options.export_model:
        from training.portable import check_model, export_model

        check_model(options.export_model, config, known, options.overwrite)
        interrupts.stage = "compiling the model; nothing was written"
        model = trained_model(config.model_copy(update={"device": "cpu"}), known, weights, source)
        export_model(options.export_model, model, config, known, options.top_k)
        terminal.say(f"Written: {options.export_model}")
    elif options.export_items:
        interrupts.stage = "exporting the items; nothing was written"
        model = trained_model(config, known, weights, source, ranks)
        count, size = export_items(options.export_items, model, known.vocabulary.item_ids, ranks)
        terminal.say(f"Written: {options.export_items} ({count:,} vectors of {size})")
    elif options.recommend:
        model = trained_model(config, known, weights, source, ranks)
        recommend(options, config, known, model, interrupts, ranks, moved)
    else:
        interrupts.stage = "preparing the data; nothing was written"
        if options.split == "new":
            # On the device of this evaluation, and with all events of a run that is an update.
            trained = config.model_copy(update={"data": run_config.data})
            before = open_data(trained, trained_on=replace(known, events=None), ranks=ranks, rest=True)
            data = new_data(config, known, before, ranks)
        elif options.data:
            data = open_data(config, vocabulary=known.vocabulary, ranks=ranks)
        else:
            data = open_data(config, trained_on=known, moved=moved, ranks=ranks)
        model = trained_model(data.config, known, weights, source, ranks)
        facts = {"weights": source.name, "epoch": epoch, "notes": notes}
        evaluate(options, data.config, data, model, facts, interrupts)


def with_ranks(config: RunConfig, options: argparse.Namespace) -> tuple[RunConfig, Ranks | None]:
    """Return (the configuration for torchrun's processes, the ranks); without torchrun the ranks are None.

    Their number may differ from that of training.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return config, None
    if options.serve:
        raise ConfigError("--serve runs in one process, without torchrun")
    parallel = ParallelConfig(data="auto", embedding="row_wise" if config.parallel.sharded else "replicated")
    config = config.model_copy(update={"parallel": parallel})
    ranks = Ranks(config)
    terminal.quiet |= not ranks.first
    return config, ranks


def evaluate(options, config: RunConfig, data: Data, model, facts: dict, interrupts: Interrupts) -> None:
    """Evaluate the split, write the result, then print it."""
    split, dataset = "test" if options.split == "new" else options.split, data.dataset
    if options.sampled and options.sampled > dataset.num_items:
        raise ConfigError(f"--sampled {options.sampled}: expected at most {dataset.num_items:,}, the number of items")
    if getattr(data.splits, split) is None:
        if options.split == "new":
            raise DataError(f"--split new: no user of {shown(options.data, 200)} has a new event and a history")
        names = [name for name in ("train", "valid", "test") if getattr(data.splits, name) is not None]
        hint = "; --split new evaluates the events after the run's last one" if options.data else ""
        known = f"{' or '.join(names)}, the splits of protocol {config.data.protocol} in these data"
        raise ConfigError(f"--split {split}: expected {known}{hint}")
    if options.predict and config.data.targets == "all":
        raise ConfigError("--predict writes one list for each user: expected data.targets=first, got all")
    served = None
    if options.serve:
        if (form := config.task.served()) is not None and split not in form.splits:
            expected = f"{' or '.join(form.splits)}, in which every target has a history"
            raise ConfigError(f"--serve: expected --split {expected}, got {split}")
        serving = ServingOptions(cache=options.serve, **serving_options(options))
        served = Recommender(model, config, data.vocabulary, has_timestamps=dataset.has_timestamps, options=serving)
        model = ServedModel(served, dataset)
    interrupts.stage = f"evaluating the split {split}; nothing was written"
    result = judge(model, data, split) | facts | {"notes": [*facts["notes"], *dataset.notes, *data.splits.notes]}
    if options.data:
        result |= {"split": options.split, "data": config.data.path, "left_out": dataset.left_out}
    batches = data.eval_batches(split)
    if options.sampled:
        candidates = SampledCandidates(options.sampled, options.seed)
        score = model_scorer(model, config.train.autocast == "bf16", data.task.ranks)
        tracked = terminal.track(batches.epoch(0), len(batches), "ranking among sampled items")
        rankings = Rankings.of(getattr(data.splits, split))
        (places,) = rank_targets(score, tracked, filters=[config.eval.filter_seen], candidates=candidates)
        label = f"SAMPLED: target among {options.sampled} random unseen items, not comparable with full ranking"
        if candidates.short:
            result["notes"].append(
                f"Warning: --sampled {options.sampled}: {candidates.short:,} users have fewer unseen items, all of "
                "which were ranked."
            )
        metrics = ranking_metrics(places, list(result["popularity"]["none"]), rankings)
        result["sampled"] = {"label": label, "seed": options.seed, **metrics}
    if served:
        result["served"] = served.description
    first = data.task.ranks is None or data.task.ranks.first
    path = options.run / result_name(options.split, options, options.data)
    if first:
        write_file(path, as_json(result))
    interrupts.stage = f"predicting; {path} is complete"
    if options.predict:
        tracked = terminal.track(batches.epoch(0), len(batches), "predicting")
        how = config.eval.filter_seen
        frame = recommendations(config, model, dataset, tracked, options.top_k, data.task.ranks, filter_seen=how)
        if first:
            write_table(options.predict, frame)
    print_result(config.name, data.task, result)
    if served:
        terminal.say("Served: " + ", ".join(f"{key} {value}" for key, value in result["served"].items()))
    terminal.say(f"Written: {path}")
    if options.predict:
        terminal.say(f"Written: {options.predict} ({len(frame):,} rows)")


def recommend(
    options,
    config: RunConfig,
    known: Known,
    model,
    interrupts: Interrupts,
    ranks: Ranks | None = None,
    moved: Sequence[str] = (),
) -> None:
    """Write each user's top-k next items after the whole history, as serve.py recommends them.

    The items pass the filters. Those of the history are left out according to --exclude-seen, by default unless
    `eval.filter_seen` is `none`.
    """
    interrupts.stage = "preparing the data; nothing was written"
    trained_on = known
    if options.items:
        if ranks is not None:
            raise ConfigError("--items runs in one process, without torchrun")
        known = add_items_of(options.items, config, known, model)
        new = len(known.vocabulary.item_ids) - len(trained_on.vocabulary.item_ids)
        terminal.say(f"{options.items}: {new:,} new items")
    passing = item_filter(options, known)
    if options.history:
        dataset = load_history(config, known, options.history)
    elif options.data:
        dataset = load_data(config, vocabulary=known.vocabulary)
    else:
        dataset = replace(find_data(config, trained_on, moved), item_ids=known.vocabulary.item_ids)
    if known.vocabulary.features is not None:
        dataset = with_rows(dataset, known.vocabulary.features)
    config = for_data(config, dataset)
    for note in dataset.notes:
        terminal.say(note)
    users = np.flatnonzero(np.diff(dataset.user_offsets))
    if options.users:
        users = chosen_users(options.users, dataset)
    latest = int(dataset.timestamps.max())
    if options.at is not None and options.at < latest:
        raise ConfigError(f"--at: expected at least {latest}, the time of the last event, got {options.at}")
    at, size = latest if options.at is None else options.at, config.eval.batch_size
    batches = whole_histories(dataset, users, at, config.model.max_seq_len, size, model.embedding.position.device)
    interrupts.stage = "recommending; nothing was written"
    tracked = terminal.track(batches, -(-len(users) // size), "recommending")
    exclude = config.eval.filter_seen != "none" if options.exclude_seen is None else options.exclude_seen
    how = "history" if exclude else "none"
    frame = recommendations(config, model, dataset, tracked, options.top_k, ranks, filter_seen=how, passing=passing)
    if ranks is None or ranks.first:
        write_table(options.recommend, frame)
    terminal.say(f"Written: {options.recommend} ({len(frame):,} rows for {len(users):,} users)")


def item_filter(options: argparse.Namespace, known: Known) -> ItemFilter:
    """Build the filter of --allow, --deny, --where and --at-most; ConfigError for features that are not the run's."""
    rows: dict[str, np.ndarray] = {}
    for name in ("allow", "deny"):
        if (path := getattr(options, name)) is not None:
            places = index_of(np.array(ids_of(path)), known.vocabulary.item_ids)
            rows[name] = places[places >= 0]
            if unknown := int((places < 0).sum()):
                terminal.say(f"--{name}: {unknown:,} of {len(places):,} items are unknown to the run")
    features = () if known.vocabulary.features is None else known.vocabulary.features.items
    filters = ItemFilters(len(known.vocabulary.item_ids), features)
    try:
        passing = filters.build(**rows, where=options.where, at_most=options.at_most)
    except FilterError as error:
        raise ConfigError(f"--{error}".replace("at_most", "at-most", 1)) from None
    for name, values in (options.where or {}).items():
        if absent := [value for value in values if filters.values("where", name).with_any([value])[1]]:
            terminal.say(f"--where: no item has the {shown(name)} {', '.join(map(shown, absent))}")
    if passing.mask is not None and not np.unpackbits(passing.mask, count=filters.num_items, bitorder="little").any():
        raise ConfigError("no item passes --allow, --deny and --where; nothing was written")
    return passing


def load_history(config: RunConfig, known: Known, path: Path) -> Dataset:
    """Load the events of a file with the run's vocabulary, as CSV or Parquet by the name's ending, else in the run's
    format.
    """
    kind: str = config.data.format
    columns: Any = config.data.columns
    if path.suffix in (".csv", ".parquet"):
        kind = path.suffix[1:]
        if config.data.format not in ("csv", "parquet"):
            columns = {"timestamp": "timestamp" if known.has_timestamps else ""}
            columns |= {"action": "action"} if config.model.action_embedding else {}
    elif kind == "synthetic":
        raise ConfigError(f"--history {shown(path, 200)}: expected a name that ends in .csv or .parquet")
    options = {"format": kind, "columns": columns, "synthetic": None, "min_user_events": 1}
    return load_data(config, path=str(path), cache_dir=None, vocabulary=known.vocabulary, **options)


def chosen_users(path: Path, dataset: Dataset) -> np.ndarray:
    """Return the indices of the users whose ids are in the file, one per line; DataError for ids not in the data."""
    ids = ids_of(path)
    if not ids:
        raise DataError(f"{shown(path, 200)}: expected user ids, one per line, got none")
    users = index_of(np.array(ids), dataset.user_ids)
    if unknown := [name for name, user in zip(ids, users) if user < 0]:
        examples = ", ".join(shown(name) for name in unknown[:5])
        raise DataError(f"{shown(path, 200)}: {len(unknown):,} of {len(ids):,} users are not in the data: {examples}")
    return users


def ids_of(path: Path) -> list[str]:
    """Read the ids in a file, one per line."""
    with access(path, "read"):
        content = read_regular(path, MOST_IDS)
    lines = [line.strip() for line in decoded(content, shown(path, 200)).splitlines()]
    return [line for line in lines if line]


def result_name(split: str, options: argparse.Namespace, data: str | None = None) -> str:
    """Return the name of the result's file: eval-SPLIT.json, or a longer name with the data and options of serving."""
    parts = [f"eval-{split}"]
    if data is not None:
        parts.append("of-" + (re.sub(r"[^A-Za-z0-9._]+", "-", Path(data).name)[:100] or "data"))
    if options.serve is not None:
        parts.append("serve" if options.serve == "auto" else f"serve-{options.serve}")
        parts += [f"{name}={value}" for name, value in serving_options(options).items() if name != "cache_bytes"]
    return "-".join(parts) + ".json"


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    options = eval_options(__doc__, arguments)
    return run_program(lambda interrupts: work(options, interrupts), options.quiet)


if __name__ == "__main__":
    explain_faults()
    sys.exit(main())
