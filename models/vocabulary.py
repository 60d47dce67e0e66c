"""What a run's folder keeps of its data: the original ids behind the rows of its tables.

RUN/vocabulary/: item_ids.npy, user_ids.npy and state.json, which holds their checksums and what else a model is built
from. With it a run can be used where its data are not.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.atomic import find_folder, replace_folder
from data.types import Dataset
from data.vocabulary import Vocabulary, vocabulary_of
from models.folder import FolderError, access, read_regular

NAME = "vocabulary"
MOST = 2**36  # bytes of a file of ids


@dataclass(frozen=True)
class Known:
    """The data that a run was trained on, as far as its folder tells."""

    vocabulary: Vocabulary
    user_ids: np.ndarray
    fingerprint: str
    name: str
    has_timestamps: bool


def save_vocabulary(run: Path, dataset: Dataset) -> None:
    """Writes RUN/vocabulary whole; FolderError when the disk is full, say."""
    known = vocabulary_of(dataset)
    facts = {
        "fingerprint": dataset.fingerprint,
        "name": dataset.name,
        "has_timestamps": dataset.has_timestamps,
        "num_actions": known.num_actions,
        "action_names": known.action_names,
        "sha256": {},
    }
    with access(run / NAME, "written"), replace_folder(run / NAME) as folder:
        for name, ids in (("item_ids", known.item_ids), ("user_ids", dataset.user_ids)):
            np.save(folder / f"{name}.npy", np.asarray(ids), allow_pickle=False)
            facts["sha256"][name] = hashlib.sha256((folder / f"{name}.npy").read_bytes()).hexdigest()
        (folder / "state.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def load_vocabulary(run: Path) -> Known:
    """What `save_vocabulary` wrote; FolderError when something is missing or damaged."""
    folder = find_folder(run / NAME)
    path = folder / "state.json"
    try:
        with access(path, "read"):
            facts = json.loads(read_regular(path))
        ids = {}
        for name in ("item_ids", "user_ids"):
            path = folder / f"{name}.npy"
            with access(path, "read"):
                content = read_regular(path, MOST)
            if hashlib.sha256(content).hexdigest() != facts["sha256"][name]:
                raise FolderError(f"{path}: damaged (its checksum differs from the one it was written with)")
            ids[name] = np.load(io.BytesIO(content), allow_pickle=False)
        names = facts["action_names"]
        known = Vocabulary(ids["item_ids"], facts["num_actions"], None if names is None else tuple(names))
        return Known(known, ids["user_ids"], facts["fingerprint"], facts["name"], facts["has_timestamps"])
    except FolderError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, EOFError) as error:
        raise FolderError(f"{path}: damaged ({type(error).__name__})") from None
