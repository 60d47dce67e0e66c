"""Initialise a model with the weights of another run."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cli.terminal import terminal
from data.datasets import Vocabulary
from data.errors import ConfigError
from data.features.vocabulary import FeatureVocabulary
from data.types import shown
from data.vocabulary import index_of
from models.hstu import SequenceModel
from training.config import RunConfig
from training.folder import check_run
from training.ranks.tables import sharded_table
from training.run import final_facts
from training.saved import CheckpointError
from training.vocabulary import load_vocabulary
from training.weights import TABLE, checked_facts, load_weights, open_slices, saved_weights

# Matches the weights of a table of features, and captures its name.
FEATURE_TABLE = re.compile(r"embedding\.(?:items|context)\..*embedding_bags\.([^.]+)\.weight")


class Places(NamedTuple):
    """The rows of another run to copy into new tables: (new rows, old rows) of items, and of each feature by name."""

    items: tuple[torch.Tensor, torch.Tensor]
    features: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, vocabulary: Vocabulary, others: Vocabulary) -> "Places":
        place = index_of(np.asarray(vocabulary.item_ids), others.item_ids)
        if vocabulary.features is not None and vocabulary.features.trained is not None:
            place[~vocabulary.features.trained] = -1  # items without training events keep rows of zeros
        items = torch.from_numpy(np.flatnonzero(place >= 0)), torch.from_numpy(place[place >= 0])
        return cls(items, feature_places(vocabulary.features, others.features))

    def fill(self, name: str, new: torch.Tensor, old: torch.Tensor) -> bool:
        """Copy the known rows of the table `old` into `new`, or all of a tensor that is not a table.

        name: the name of both tensors in their models. Return whether the shape of `old` fits.
        """
        feature = FEATURE_TABLE.fullmatch(name)
        has_item_rows = name in (TABLE, "targets") or name.endswith(".correction")
        table = has_item_rows or name.startswith("embedding.tables.embeddings.") or feature is not None
        if new.shape[table:] != old.shape[table:]:
            return False
        if has_item_rows or (feature is not None and feature[1] in self.features):
            new_rows, old_rows = self.items if feature is None else self.features[feature[1]]
            new[new_rows.to(new.device)] = old[old_rows.to(old.device)].to(new)
        elif table:
            rows = min(len(old), len(new))
            new[:rows] = old[:rows].to(new)
        else:
            new.copy_(old)
        return True


def warm_start(model: SequenceModel, config: RunConfig, vocabulary: Vocabulary, folder: Path) -> None:
    """Copy the weights of the run in `folder` into a new model: the rows of items that both have, and other tensors.

    Rows of other items keep their initial values. ConfigError if the shape of a tensor or the actions do not fit.
    """
    check_run(folder)
    facts, source = final_facts(folder)
    source_vocabulary = load_vocabulary(folder)
    if source_vocabulary.fingerprint != facts.get("fingerprint"):
        raise CheckpointError(f"{source}: vocabulary/ belongs to other training data")
    if config.model.action_embedding and vocabulary.action_names != source_vocabulary.vocabulary.action_names:
        names, ours = (
            shown(", ".join(one.action_names or ["numbers"]), 200) for one in (source_vocabulary.vocabulary, vocabulary)
        )
        raise ConfigError(f"--init-from {shown(folder, 200)}: expected the actions of these data, {ours}, got {names}")
    places, sharded = Places.of(vocabulary, source_vocabulary.vocabulary), sharded_table(model)
    if sharded is None:
        weights, _ = saved_weights(source)
    else:
        checked_facts(source, sharded.ranks)
        with open_slices(source, sharded) as (weights, shape, item_rows):
            if shape[1] != sharded.size:
                raise ConfigError(f"--init-from {shown(folder, 200)}: another model, the item table does not fit")
            sharded.take(item_rows, *places.items)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in sorted(state.keys() | weights.keys()):
        if name not in state or name not in weights or not places.fill(name, state[name], weights[name]):
            raise ConfigError(f"--init-from {shown(folder, 200)}: another model, {name} does not fit")
    load_weights(model, state, source)
    terminal.say(
        f"{source}: weights copied, with the rows of {len(places.items[0]):,} of {len(vocabulary.item_ids):,} items"
    )


def feature_places(
    features: FeatureVocabulary | None, others: FeatureVocabulary | None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Map the table of each feature to (new rows, old rows) of equal values; numeric features are left out."""
    places = {}
    new, old = ({(o.entity, o.name): o for o in v.features} if v else {} for v in (features, others))
    for key in new.keys() & old.keys():
        new_feature, old_feature = new[key], old[key]
        if new_feature.kind != "number" and old_feature.kind != "number":
            rows = old_feature.rows_of(new_feature.values)
            in_both = np.append(True, rows > 0)  # row 0, for unknown values, is in both
            new_rows, old_rows = np.arange(len(rows) + 1)[in_both], np.append(0, rows)[in_both]
            places["_".join(key)] = torch.from_numpy(new_rows), torch.from_numpy(old_rows)
    return places
