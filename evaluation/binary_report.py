"""Write the tables and plots of a report on predicted actions, from the result of the task's `judge`."""

from collections.abc import Sequence

from evaluation.binary_metrics import NAMES
from evaluation.binary_plots import plot_curves
from evaluation.report import Table, cells


def tables(result: dict, actions: Sequence[str]) -> list[Table]:
    """Return the metrics of each action beside the baseline's, and by history length; the main table first."""
    several = len(actions) > 1
    rows = []
    for action in ["", *(f"{action}/" for action in actions if several)]:
        for who in ("model", "baseline"):
            label = f"{who}, {action[:-1] or ('mean of the actions' if several else actions[0])}"
            rows.append([label, *cells({name: result[who][action + name] for name in NAMES}, NAMES)])
    over, by_history = [], []
    for name, values in result["actions"].items():
        gain = values["auc_over_baseline"]
        interval = f"{gain['lower']:+.4f} to {gain['upper']:+.4f}"
        over.append([name, f"{values['positive_share']:.4f}", f"{gain['difference']:+.4f}", interval])
        by_length = [[row["history"], f"{row['events']:,}", *cells(row, NAMES)] for row in values["by_history"]]
        title = "By length of the history" + (f": {name}" if several else "")
        by_history.append(Table(title, ["events before", "scored events", *NAMES], by_length))
    headings = ["action", "share of positives", "AUC minus the baseline's", "95% (bootstrap over users)"]
    return [
        Table("Predicted actions", ["", *NAMES], rows, list(range(len(NAMES) + 1))),
        Table("Against the baseline", headings, over),
        *by_history,
    ]


def plots(result: dict) -> dict[str, bytes]:
    """Plot ROC curves and calibration of each action: PNG images by the name of their file."""
    images = {}
    for name, values in result["actions"].items():
        aucs = {who: result[who].get(f"{name}/auc", result[who]["auc"]) for who in values["curves"]}
        images[f"ranking-{name}.png"] = plot_curves(name, values["curves"], aucs)
    return images
