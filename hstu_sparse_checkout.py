"""Find the folder and the commit of this checkout, and check that no other module hides one of its packages.

The packages have common names, such as `data` and `models`. `make setup` appends the checkout to the environment's
import path, so that a user's file `data.py` comes before the package `data`; the error then names that file.
"""

import importlib.util
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGES = ("cli", "data", "evaluation", "experiments", "models", "serving", "training")


def commit() -> str:
    """Return the commit of this checkout, with `+changes` if files differ from it; `unknown` outside of a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        run = [
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run[0] + ("+changes" if run[1] else "")


def check_packages() -> None:
    """Raise ImportError if Python finds another module or package in place of one of the checkout's."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is None or Path(origin).resolve() != ROOT / name / "__init__.py":
            raise ImportError(f"{origin} hides the package {ROOT / name}: rename it, or import from another folder")


check_packages()
