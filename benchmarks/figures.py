"""Define where benchmarks store their measurements, and how they save figures."""

import io
from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # JSON lines, with hardware, versions and commit in each


def save(figure, target: Path) -> None:
    """Save a figure of matplotlib as a small PNG: 80 dots an inch in 64 colours."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(target, format="PNG", optimize=True)
