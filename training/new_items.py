"""Add new items to a trained model, represented by their features only."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.features.files import read_new_items
from data.features.new_items import check_known_by_features, new_items
from data.types import DataError, shown
from data.vocabulary import with_items
from models.hstu import SequenceModel
from training.config import RunConfig
from training.vocabulary import Known

NAMED = 5  # number of items listed in an error


def add_items_of(path: Path, config: RunConfig, known: Known, model: SequenceModel) -> Known:
    """Add the items of a file, in the format of data.features.items, to the model; return `known` with them.

    Known items are unchanged. DataError if the run has no features of items, if an item has no known feature value, if
    the file has no new item, or if a new id is text where the run's ids are numbers.
    """
    vocabulary = known.vocabulary
    features = check_known_by_features(vocabulary.features)
    assert config.data.features is not None and config.data.features.items is not None
    file = config.data.features.items.model_copy(update={"path": str(path)})
    ids, columns = read_new_items(file, vocabulary.item_ids)
    items = new_items(features, len(ids), columns)
    if not items.described.all():
        nothing = ids[~items.described]
        examples = ", ".join(map(shown, nothing[:NAMED].tolist()))
        raise DataError(f"{shown(path, 200)}: {len(nothing):,} items have no feature that the run knows: {examples}")
    if vocabulary.item_ids.dtype.kind == "i":
        if wrong := [one for one in ids.tolist() if not re.fullmatch(r"0|-?[1-9]\d{0,17}", one)]:
            raise DataError(f"{shown(path, 200)}: expected whole numbers, as the run's ids are, got {shown(wrong[0])}")
        ids = ids.astype(np.int64)
    model.embedding.add_items(items)
    return replace(known, vocabulary=with_items(vocabulary, ids, items))
