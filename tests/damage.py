"""Damage the files of a folder, one after the other."""

from collections.abc import Iterator
from pathlib import Path


def damaged_files(folder: Path) -> Iterator[str]:
    """Yield a name for each file damaged in each way; afterwards the file is as it was."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 0xFF
        for damage, left in {"flipped": bytes(flipped), "cut": content[:-1], "empty": b"", "missing": None}.items():
            path.unlink() if left is None else path.write_bytes(left)
            yield f"{path.name}: {damage}"
            path.write_bytes(content)
