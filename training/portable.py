"""Compile a run's retrieval model into a file that torch can load without this package.

It maps a history to the k best items, on a CPU.

Letters: n events of a history, N max_seq_len, E embedding size, I items, k length of the list.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from data.atomic import replace_file
from data.batch import Batch
from data.earlier import Earlier
from data.errors import ConfigError
from data.types import shown
from models.heads import normalized
from models.hstu import SequenceModel
from models.repeats import add_terms
from models.tasks.scoring import normalized_items
from training.config import RunConfig
from training.folder import access
from training.outputs import check_place
from training.vocabulary import Known

OPTION, ENDING = "--export-model", ".pt2"


class NextItems(nn.Module):
    """Return the k best items after a history; shapes and control flow do not depend on the values of the history."""

    table: Tensor

    def __init__(self, model: SequenceModel, k: int, exclude_seen: bool):
        super().__init__()
        self.model, self.k, self.exclude_seen = model.eval(), min(k, len(model.item_table)), exclude_seen
        self.register_buffer("table", normalized_items(model.item_table.detach()))

    def forward(self, items: Tensor, timestamps: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows of the items [k] int64, scores [k] fp32), best first; excluded items have a score of -inf.

        Args:
            items: [n] int64, rows of the item table, in time order; n from 1 to N.
            timestamps: [n] int64, in seconds; zeros if the run's data have no timestamps.
            at: [] int64, the time of the next event, in seconds.
        """
        following = torch.cat([timestamps[1:], at[None]])
        offsets, user = torch.arange(2) * items.shape[0], torch.zeros(1, dtype=torch.int64)
        batch = Batch(items, timestamps, torch.full_like(items, -1), following, offsets, user)
        out, _ = self.model.raw_output(batch)
        last = normalized(out[-1:])
        scores = last @ self.table.T
        if self.model.repeats is not None:
            terms = self.model.repeats(last, offsets[1:] - 1, Earlier.of(batch, items.shape[0]))
            scores = add_terms(scores, *terms)
        if self.exclude_seen:
            scores = scores.index_fill(1, items, -torch.inf)
        best, rows = scores[0].topk(self.k)
        return rows, best


def check_model(path: Path, config: RunConfig, known: Known, overwrite: bool) -> None:
    """Raise ConfigError unless the run's model may be written to `path`."""
    config.task.check_lists()
    if config.embeds_actions:
        raise ConfigError(
            f"{OPTION}: expected a model that reads only items and times, got one that also reads actions"
        )
    features = known.vocabulary.features
    if features is not None and (features.of("users") or features.of("events")):
        raise ConfigError(f"{OPTION}: the model reads features of users or events; only those of items are supported")
    if features is not None and features.vectors:
        raise ConfigError(f"{OPTION}: the model reads vectors of items, which are not supported")
    for attention in config.model.attention:
        if not attention.portable:
            raise ConfigError(f"{OPTION}: model.attention.kind={attention.kind}: expected dense or softmax")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ConfigError(f"{OPTION} needs a C++ compiler: apt-get install g++")
    with access(path, "written"):
        if path.suffix != ENDING or path.is_dir():
            raise ConfigError(f"{OPTION} {shown(path, 200)}: expected the name of a file that ends in {ENDING}")
        check_place(path, OPTION, config)
        if path.exists() and not overwrite:
            raise ConfigError(f"{OPTION} {shown(path, 200)}: the file exists; --overwrite replaces it")


def exported(next_items: NextItems, longest: int) -> torch.export.ExportedProgram:
    """Export a model for histories of 1 to `longest` events."""
    n, traced = torch.export.Dim("n", min=1, max=longest), min(longest, 3)
    inputs = torch.arange(traced), torch.arange(traced), torch.tensor(traced)  # they must not share memory
    # Without this setting torch.export assumes that n is not 1.
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        shapes = ({0: n}, {0: n}, None)
        return torch.export.export(next_items, inputs, dynamic_shapes=shapes, strict=False)


def export_model(path: Path, model: SequenceModel, config: RunConfig, known: Known, k: int) -> None:
    """Export the model, which must be on the CPU, compile it with AOTInductor and write it to a file.

    The file has machine code for the processor type of this machine, the weights, and as metadata `item_ids` (a JSON
    list), `max_seq_len`, `has_timestamps` and `k`. `torch._inductor.aoti_load_package` loads it.

    Raises ConfigError for a head that computes scores by a network.
    """
    if model.head is not None:
        raise ConfigError(f"{OPTION}: model.head.kind={config.model.head.kind}: expected dot")
    next_items = NextItems(model, k, config.eval.filter_seen != "none")
    facts = {
        "item_ids": json.dumps(known.vocabulary.item_ids.tolist()),
        "max_seq_len": str(config.model.max_seq_len),
        "has_timestamps": json.dumps(known.has_timestamps),
        "k": str(next_items.k),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"model{ENDING}")
        torch._inductor.aoti_compile_and_package(
            exported(next_items, config.model.max_seq_len),
            package_path=str(file),
            inductor_configs={"aot_inductor.metadata": facts},
        )
        with access(path, "written"):
            replace_file(path, lambda place: shutil.copyfile(file, place))
