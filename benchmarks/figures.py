"""Define where benchmarks store their measurements, and how they save figures."""

import io
from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # files of JSON lines, each with hardware, versions and commit


def save(figure, target: Path) -> None:
    """Save a figure of matplotlib as a small PNG: 80 dots an inch in 64 colours."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(target, format="PNG", optimize=True)


def panels(plt, count: int, size: tuple[float, float], **options) -> tuple:
    """Return a figure with `count` panels of that size in inches, two in a row, and its panels."""
    rows, columns = -(-count // 2), min(count, 2)
    figure, axes = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, **options)
    for unused in axes.flat[count:]:
        unused.set_visible(False)
    return figure, list(axes.flat[:count])
