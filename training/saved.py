"""Save folders of tensors and facts atomically, load them, and detect damaged files by checksums.

state.json has the facts, the checksum and the size of every other file, and the checksum of these facts.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.atomic import find_folder, replace_folder
from data.errors import UserError
from data.types import shown
from training.folder import check_regular, read_regular

DAMAGED = "damaged (its checksum differs from the one it was written with)"


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another model; the message is one line."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or its checksum is wrong."""


def save_folder(folder: Path, tensors: dict[str, dict[str, Tensor]], facts: dict) -> None:
    """Write `tensors` (one safetensors file for each entry) and `facts` into a folder atomically.

    CheckpointError if it cannot be written or a tensor is not finite; an existing folder is then unchanged.
    """
    if name := not_finite((key, value) for entries in tensors.values() for key, value in entries.items()):
        raise CheckpointError(f"{folder}: not written, {shown(name)} is not finite; the previous content is unchanged")
    try:
        with replace_folder(folder) as temporary:
            facts_file = temporary / "state.json"
            facts_file.touch()
            for name, entries in tensors.items():
                path = temporary / f"{name}.safetensors"
                save_file({key: value.detach().cpu().contiguous() for key, value in entries.items()}, path)
                # The mode according to the umask: safetensors creates files that only the owner can read.
                path.chmod(facts_file.stat().st_mode)
            write_facts(temporary, facts, {path.name: checksum(path) for path in temporary.glob("*.safetensors")})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder}: cannot be written: {reason}; the previous content is unchanged") from error


def exists(folder: Path) -> bool:
    """Return whether the folder exists, or the previous one after a crash during its replacement."""
    return find_folder(folder).exists()


def load_folder(folder: Path, *names: str, checked: slice | None = None) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """Load the named tensor files and the facts of `folder`.

    CheckpointError if a file cannot be read, DamagedError if one is missing or its checksum is wrong. checked: a slice
    of the folder's files, ordered by name, whose checksums are checked too; slice(None) for all.
    """
    folder = find_folder(folder)
    path = folder / "state.json"
    try:
        facts = read_facts(path)
        sums, lengths = facts.pop("sha256"), facts.pop("sizes")
        files = {f"{name}.safetensors" for name in names}
        for name in sorted(files.union(sorted(lengths)[checked] if checked else ())):
            path = folder / name
            if name not in sums:
                raise CheckpointError(f"{path}: written by another version of this program, it has no checksum")
            check_regular(path, lengths[name])
            if checksum(path) != sums[name]:
                raise DamagedError(f"{path}: {DAMAGED}")
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):  # reads the header
                    pass
        return {name: load_file(folder / f"{name}.safetensors") for name in names}, facts
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename}: not found") from None
    except OSError as error:  # without errno: raised by check_regular
        kind = CheckpointError if error.errno else DamagedError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {shown(error, 200)})") from None


def write_facts(folder: Path, facts: dict, sums: dict[str, str]) -> None:
    """Write state.json of a folder; sums: the checksums of its files by name."""
    facts = {**facts, "sha256": sums, "sizes": {name: (folder / name).stat().st_size for name in sums}}
    text = json.dumps({**facts, "checksum": facts_checksum(facts)}, indent=1)
    (folder / "state.json").write_text(text, encoding="utf-8")


def read_facts(path: Path) -> dict:
    """Read a state.json; DamagedError when its checksum is wrong."""
    try:
        facts = json.loads(read_regular(path).decode())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or facts.pop("checksum", None) != facts_checksum(facts):
        raise DamagedError(f"{path}: {DAMAGED}")
    return facts


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that is not finite, or None, without copying tensors."""
    for name, value in tensors:
        if value.is_floating_point() and value.numel() and not torch.stack(value.aminmax()).isfinite().all():
            return name
    return None


def checksum(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def facts_checksum(facts: dict) -> str:
    """Compute the SHA-256 of facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
