"""Format the sentences and tables of a retrieval report, from the result of a task's `judge`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.splits import Split, target_events, target_samples
from data.types import Dataset, shown
from evaluation.baselines import left_out
from evaluation.ranking_metrics import describe_lists, informative
from evaluation.report import Table, cells

# Sentences for the values of eval.filter_seen.
FILTERED = {
    "history": "all items of a user's history are removed from the ranking, so that a target that repeats one is a "
    "miss",
    "window": "the items of the model's window (the last max_seq_len events) are removed from the ranking, "
    "as in the published figures",
    "none": "nothing is removed from the ranking",
}
SHORT = {"history": "history removed", "window": "window removed", "none": "none removed"}
SAMPLES, SAMPLE_LENGTH = 3, 5


def protocol_lines(result: dict, filter_seen: str, same_time: str) -> list[str]:
    """Return sentences about the rankings; filter_seen, same_time: the options of `eval`."""
    lines = [
        f"Split {result['split']}, {result['users']:,} users, full ranking over the catalogue. "
        f"Main metrics: {FILTERED[filter_seen]} (eval.filter_seen={filter_seen}). The tables show the other choices, "
        "too.",
        f"{result['repeated']:.2%} of the targets repeat an earlier item of their user.",
    ]
    if result["targets"] > result["users"]:
        lines.append(
            f"{result['targets']:,} targets in {result['rankings']:,} rankings. Metrics are averaged over each user's "
            "rankings, then over users."
        )
    if share := result.get("same_time"):
        known = "hidden from" if same_time == "hidden" else "part of"
        lines.append(
            f"{share:.2%} of the targets have the time of an earlier event of their user: such events are {known} "
            f"their history (eval.same_time={same_time})."
        )
    if cold := result.get("cold"):
        lines.append(
            f"{cold['items']:,} items have no training event. They are {cold['targets']:,} of the targets and "
            f"{cold['in_lists']:.2%} of the entries in the model's lists."
        )
    settings = (
        f"{name} {', '.join(f'{option} {value}' for option, value in baseline['settings'].items())}"
        for name, baseline in result["baselines"].items()
        if baseline["settings"]
    )
    lines.append(f"Settings of the baselines, chosen on the validation split if there is one: {'; '.join(settings)}.")
    return [*lines, *left_out(result["items"]), *result["notes"]]


def tables(result: dict, metrics: Sequence[str], on_terminal: Sequence[str], filter_seen: str) -> list[Table]:
    """Return the tables of a report, the main one first; on_terminal: the metrics to show on a terminal."""
    names = informative(metrics, result["items"])
    order = sorted(FILTERED, key=lambda how: how != filter_seen)
    rows = [(f"{who}, {SHORT[how]}", result[who][how]) for how in order for who in ("model", "popularity")]
    others = [item for item in result["baselines"].items() if item[0] != "popularity"]
    rows[2:2] = [(f"{name}, {SHORT[order[0]]}", baseline["metrics"]) for name, baseline in others]
    if "sampled" in result:
        rows.append((result["sampled"]["label"], result["sampled"]))
    short = [0, *(1 + names.index(name) for name in on_terminal if name in names)]
    by_length = [[row["history"], f"{row['users']:,}", *cells(row, names)] for row in result["by_history"]]
    by_popularity = [[row["events"], f"{row['users']:,}", *cells(row, names)] for row in result["by_popularity"]]
    intervals = [[name, f"{low:.4f}", f"{high:.4f}"] for name, (low, high) in result["intervals"].items()]
    lists = result["lists"]
    list_metrics = [f"{lists['users']:,}", f"{lists['coverage']:.1%}", f"{lists['gini']:.3f}"]
    list_metrics += [f"{lists['novelty']:.2f} bits", f"{lists['weighted_ndcg']:.4f}"]
    examples = [
        [row["user"], ", ".join(row["history"]), row["target"], ", ".join(row["list"])] for row in lists["samples"]
    ]
    return [
        Table("Full ranking", ["", *names], [[label, *cells(values, names)] for label, values in rows], short),
        Table("By length of the history", ["events", "users", *names], by_length),
        Table(
            "By popularity of the target (0 training events: a cold item)",
            ["training events", "users", *names],
            by_popularity,
        ),
        Table("95% intervals over users (not over seeds)", ["", "from", "to"], intervals),
        Table(
            f"The model's lists of {lists['length']}",
            ["lists", "coverage", "Gini", "novelty", f"weighted NDCG@{lists['length']}"],
            [list_metrics],
            note="Coverage: the share of the catalogue in any of the lists. Gini: how unequally they show items. "
            "Novelty: the mean of -log2 of an item's share of the training events. Weighted NDCG: the weight of a "
            "target is inverse to its popularity.",
        ),
        Table("Examples", ["user", "last events", "next event", "list"], examples, words=True),
    ]


def described_lists(dataset: Dataset, split: Split, lists: np.ndarray, counts: np.ndarray) -> dict[str, dict]:
    """Describe recommended lists [M, k] (-1 for no item) and give examples: `lists`.

    For data with features, also count the items without training events, overall, among the targets and in the lists:
    `cold`. counts: [I], the number of training events of each item.
    """
    result = {"lists": describe_lists(lists, counts) | {"samples": samples(dataset, split, lists)}}
    if dataset.features:
        cold = counts == 0
        result["cold"] = {
            "items": int(cold.sum()),
            "targets": int(cold[dataset.items[target_events(split)]].sum()),
            "in_lists": float(cold[lists[lists >= 0]].mean()),
        }
    return result


def samples(dataset: Dataset, split: Split, lists: np.ndarray) -> list[dict[str, Any]]:
    """Return the last events, the target and the first items of the list, for a split's first users."""
    ids, examples = dataset.item_ids, []
    _, first = np.unique(target_samples(split), return_index=True)
    targets = target_events(split)[first]
    rows = zip(split.users, split.begin, split.end, targets, lists[:SAMPLES, :SAMPLE_LENGTH])
    for user, begin, end, target, items in rows:
        history = dataset.items[max(begin, end - 1 - SAMPLE_LENGTH) : end - 1]
        words = {"user": dataset.user_ids[user], "target": ids[dataset.items[target]]}
        shown_rows = {"history": history, "list": items[items >= 0]}
        examples.append(
            {key: shown(value) for key, value in words.items()}
            | {key: [shown(ids[item]) for item in row] for key, row in shown_rows.items()}
        )
    return examples
