"""Plot ROC curves and calibration."""

import io


def plot_curves(name: str, curves: dict[str, dict], aucs: dict[str, float]) -> bytes:
    """Return a PNG of ROC curves and calibration; curves, aucs: `binary_metrics.curves` and the AUC of each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2))
    roc, calibration = figure.subplots(1, 2)
    # Fixed, since a layout of matplotlib would draw everything twice.
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.13, top=0.92)
    for who, points in curves.items():
        roc.plot(*zip(*points["roc"]), label=f"{who}, AUC {aucs[who]:.4f}")
        calibration.plot(*zip(*points["calibration"]), marker="o", markersize=4, label=who)
    for axes in (roc, calibration):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3)
        axes.legend()
    roc.set(title=f"{name}: ROC", xlabel="false positive rate", ylabel="true positive rate")
    calibration.set(title=f"{name}: calibration", xlabel="mean prediction", ylabel="share of positives")
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()
