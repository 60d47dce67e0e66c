"""Store the vocabulary of a run, the original ids and values for the rows of its tables, in its folder.

RUN/vocabulary/ has item_ids.npy, user_ids.npy, the values of features, and state.json with their checksums and all
other facts that are needed to build the model. With it a run can be used without its data.
"""

import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import find_folder, replace_folder
from data.cache import save_array
from data.features.features import ENTITIES, KINDS, VECTOR, Feature
from data.features.vocabulary import CALENDAR, FeatureVocabulary, KnownFeature
from data.features.zones import checked_zone
from data.prepare import file_sha256
from data.types import DataError, Dataset
from data.update import NewEvents
from data.vocabulary import Vocabulary
from training.folder import FolderError, access, read_regular

NAME = "vocabulary"
MOST = 2**36  # bytes of a file of ids
VECTORS = re.compile(r"vectors-\d+-values")  # the names of files that may be larger than memory


@dataclass(frozen=True)
class Known:
    """The stored facts about the data that a run was trained on; events: the new events, only for an update."""

    vocabulary: Vocabulary
    user_ids: np.ndarray
    fingerprint: str
    name: str
    has_timestamps: bool
    events: NewEvents | None = None


def save_vocabulary(run: Path, dataset: Dataset, known: Vocabulary, events: NewEvents | None = None) -> None:
    """Write RUN/vocabulary; FolderError if it cannot be written.

    known: the vocabulary of the model, which is trained on `dataset`. events: the new events, only for an update.
    """
    arrays = {"item_ids": known.item_ids, "user_ids": dataset.user_ids}
    facts: dict[str, Any] = {
        "fingerprint": dataset.fingerprint,
        "name": dataset.name,
        "has_timestamps": dataset.has_timestamps,
        "num_actions": known.num_actions,
        "action_names": known.action_names,
        "sha256": {},
    }
    if known.features is not None:
        arrays |= feature_arrays(known.features)
        described = [[feature.entity, feature.name, feature.kind, feature.known] for feature in known.features.features]
        facts |= {"features": described, "calendar": known.features.calendar}
        facts["vectors"] = [feature.name for feature in known.features.vectors]
        facts["time_zone"] = known.features.time_zone
    if events is not None:
        arrays |= {"new_events": events.new, "late_events": events.late}
        facts |= {"after": events.after, "left_out_events": events.left_out}
    with access(run / NAME, "written"), replace_folder(run / NAME) as folder:
        for name, array in arrays.items():
            if VECTORS.fullmatch(name):
                save_array(folder / f"{name}.npy", array)
            else:
                np.save(folder / f"{name}.npy", np.asarray(array), allow_pickle=False)
            facts["sha256"][name] = file_sha256(folder / f"{name}.npy")
        (folder / "state.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def load_vocabulary(run: Path) -> Known:
    """Read the files of `save_vocabulary`; FolderError if one is missing or damaged."""
    folder = find_folder(run / NAME)
    path = folder / "state.json"
    try:
        with access(path, "read"):
            facts = json.loads(read_regular(path))
        arrays = {}
        for name in facts["sha256"].keys() | {"item_ids", "user_ids"}:
            path = folder / f"{name}.npy"
            if VECTORS.fullmatch(name):
                arrays[name] = _mapped(path, facts["sha256"][name])
                continue
            with access(path, "read"):
                content = read_regular(path, MOST)
            if hashlib.sha256(content).hexdigest() != facts["sha256"][name]:
                raise FolderError(f"{path}: damaged (its checksum differs from the one it was written with)")
            arrays[name] = np.load(io.BytesIO(content), allow_pickle=False)
        names, ids = facts["action_names"], arrays["item_ids"]
        features = None
        if "features" in facts:
            described, vectors = facts["features"], facts.get("vectors", [])
            features = features_of(described, facts["calendar"], arrays, facts.get("time_zone"), vectors)
        known = Vocabulary(ids, facts["num_actions"], None if names is None else tuple(names), features)
        events = None
        if "after" in facts:
            left_out = int(facts.get("left_out_events", 0))  # earlier runs have none
            events = NewEvents(int(facts["after"]), arrays["new_events"], arrays["late_events"], left_out=left_out)
        return Known(known, arrays["user_ids"], facts["fingerprint"], facts["name"], facts["has_timestamps"], events)
    except FolderError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, EOFError) as error:
        raise FolderError(f"{path}: damaged ({type(error).__name__})") from None


def feature_arrays(known: FeatureVocabulary) -> dict[str, np.ndarray]:
    """Return the arrays of a feature vocabulary by the names of their files."""
    arrays = {f"feature-{number}-values": one.values for number, one in enumerate(known.features)}
    for number, (offsets, rows) in enumerate(known.item_rows):
        arrays |= {f"items-{number}-offsets": offsets, f"items-{number}-rows": rows}
    for number, feature in enumerate(known.items):
        arrays |= {f"items-{number}-values": feature.values, f"items-{number}-codes": feature.codes}
    for number, feature in enumerate(known.vectors):
        arrays |= {f"vectors-{number}-{part}": getattr(feature, part) for part in ("values", "codes", "offsets")}
    return arrays if known.trained is None else arrays | {"trained": known.trained}


def features_of(
    described: list,
    calendar: list,
    arrays: dict[str, np.ndarray],
    time_zone: str | None = None,
    vectors: Sequence[str] = (),
) -> FeatureVocabulary:
    """Rebuild a feature vocabulary from `feature_arrays`; KeyError, TypeError or ValueError if they are not valid."""
    features = tuple(
        KnownFeature(entity, name, kind, arrays[f"feature-{number}-values"], known)
        for number, (entity, name, kind, known) in enumerate(described)
    )
    for feature in features:
        if feature.entity not in ENTITIES or feature.kind not in KINDS or feature.known not in ("before", "after"):
            raise ValueError(f"{feature.name} has an unknown entity, kind or time")
    try:
        zone = None if time_zone is None else checked_zone(time_zone)
    except DataError as error:
        raise ValueError(str(error)) from None
    if not CALENDAR.keys() >= set(calendar):
        raise ValueError("unknown part of a calendar")
    count = sum(feature.entity == "items" for feature in features)
    item_rows = tuple((arrays[f"items-{number}-offsets"], arrays[f"items-{number}-rows"]) for number in range(count))
    items = len(arrays["item_ids"])
    if count and any(len(x) != items + more for x, more in ((arrays["trained"], 0), *((o, 1) for o, _ in item_rows))):
        raise ValueError(f"features of items: expected those of {items} items")
    item_features = tuple(
        Feature("items", one.name, one.kind, arrays[f"items-{number}-values"], arrays[f"items-{number}-codes"], offsets)
        for number, (one, (offsets, _)) in enumerate(zip((f for f in features if f.entity == "items"), item_rows))
        if f"items-{number}-codes" in arrays  # runs of version 0.2.0 have none
    )
    vector_features = tuple(_vectors(name, number, arrays, items) for number, name in enumerate(vectors))
    trained = arrays["trained"] if count or vector_features else None
    if trained is not None and len(trained) != items:
        raise ValueError(f"features of items: expected those of {items} items")
    return FeatureVocabulary(features, tuple(calendar), item_rows, trained, zone, item_features, vector_features)


def _vectors(name: str, number: int, arrays: dict[str, np.ndarray], items: int) -> Feature:
    """Rebuild a feature of item vectors from its stored arrays; KeyError or ValueError if they are not valid."""
    values, codes, offsets = (arrays[f"vectors-{number}-{part}"] for part in ("values", "codes", "offsets"))
    fits = values.ndim == 2 and values.dtype == np.float16 and codes.dtype == np.int32
    fits &= len(offsets) == items + 1 and offsets[0] == 0 and offsets[-1] == len(codes)
    if not fits or not np.isin(np.diff(offsets), (0, 1)).all():
        raise ValueError(f"vectors {name}: expected vectors of {items} items")
    if len(codes) and not 0 <= codes.min() <= codes.max() < len(values):
        raise ValueError(f"vectors {name}: the index of an item's vector is out of range")
    return Feature("items", str(name), VECTOR, values, codes, offsets)


def _mapped(path: Path, checksum: str) -> np.ndarray:
    """Return the array of a file, memory-mapped; FolderError if its checksum is wrong."""
    with access(path, "read"):
        if not path.is_file() or file_sha256(path) != checksum:
            raise FolderError(f"{path}: damaged (its checksum differs from the one it was written with)")
        # "c", copy-on-write: torch needs writable memory, and writes do not reach the file.
        return np.lib.format.open_memmap(path, mode="c")
