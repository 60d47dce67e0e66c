"""Name the version of the code that runs."""

import subprocess
from pathlib import Path


def commit() -> str:
    """Return the commit of this checkout, with `+changes` if files differ from it; `unknown` outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        run = [
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run[0] + ("+changes" if run[1] else "")
