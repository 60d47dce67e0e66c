"""Train a run from data frames, in Python: `fit`, and `Run`, the run that it returns."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

from cli.interrupt import keyboard_interrupts
from cli.terminal import terminal
from data.errors import ConfigError
from data.features.files import ID
from data.frames import as_polars, feature_kind, store
from data.types import shown
from serving import Recommender
from training.config import RunConfig, checked, load_tree, merge, put
from training.folder import access, check_run, read_regular
from training.loop import train
from training.run import absolute_paths
from training.strict_yaml import SHIPPED

RESULT = "result.json"


class Page:
    """A report: a notebook shows its page, and `print` its text."""

    def __init__(self, page: Path, text: str):
        self.page, self.text = page, text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        content = html.escape(read_text(self.page))  # an iframe keeps the page's styles out of the notebook
        return f'<iframe srcdoc="{content}" style="width: 100%; height: 45em; border: 0"></iframe>'


class Run:
    """A run in its folder, with its metrics, report and recommender.

    A run can be given in place of its folder's path, as to `Recommender.load`.

    Attributes:
        folder: an absolute path; docs/training.md lists its files.

    Examples:
        >>> run = Run.open(run.folder)
        >>> run.result["finished"], sorted(run.metrics)[0], run.report().page.name
        (True, 'HR@1', 'report.html')
        >>> run.recommender(cache_bytes=2**20).recommend(["c3"], k=3)[0].shape
        (1, 3)
        >>> Run.open("nowhere")
        Traceback (most recent call last):
        training.folder.FolderError: ...nowhere: no such folder
    """

    def __init__(self, folder: str | Path):
        """Open the run in `folder`; FolderError if there is none."""
        self.folder = Path(folder).expanduser().absolute()
        check_run(self.folder)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open the run in `folder`, written by `fit` or train.py; FolderError if there is none."""
        return cls(folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json; FolderError for a run that has not ended."""
        return json.loads(read_text(self.folder / RESULT))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the test split, by name; empty for a run that was interrupted or not evaluated."""
        result = self.result
        metrics = result.get("model", {})
        return metrics.get(result.get("filter_seen"), metrics)

    def report(self) -> Page:
        """Return the report: metrics, baselines and curves. FolderError for a run that has not ended."""
        return Page(self.folder / "report.html", read_text(self.folder / "report.md"))

    def recommender(self, *, history: bool = True, device: str | None = None, **options) -> Recommender:
        """Return a recommender of the run, by default with the events of its data; for arguments and errors see
        `Recommender.load`.
        """
        return Recommender.load(self.folder, history=history, device=device, **options)


def read_text(path: Path) -> str:
    """Read a file of a run; FolderError if it is missing."""
    with access(path, "read"):
        return read_regular(path).decode()


def fit(
    events: Any,
    *,
    config: str | Path | Mapping[str, Any] = "default",
    items: Any = None,
    users: Any = None,
    run: str | PathLike[str] | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Train a run, evaluate it and write its report; bit-identical to `train.py` with the same YAML file.

    Args:
        events: the interactions, one row each: a frame of polars, pandas, Arrow or another library with Arrow's
            PyCapsule interface, a dict of columns, or the path of a file. The columns are user, item and timestamp, or
            those named by `data={"columns": {...}}`. None: the data in `config`.
        config: `default` (its sizes follow the data), `small` (for up to some 100,000 events), the name of another
            configuration in configs/, the path of a YAML file, or the content of such a file as a dict.
        items, users: features, one row for each item or user, in the same forms. Without `data.features.items.columns`
            (or users), each column of a frame is a feature of a kind by its type: text is a `category`, a number is a
            `number`, a list of floats is a `vector`, and any other list is a `list`. The ids are in the column item or
            user, or in the column with the name of the events' column.
        run: the run's folder; by default a new one below `run_dir`. If the folder has a run of the same configuration
            and data, this run is continued, or returned if it is finished.
        quiet: print nothing.
        overrides: options of the configuration: `seed=2`, `train={"epochs": 5}` or `**{"train.epochs": 5}`.

    Returns:
        The run.

    Raises:
        ConfigError: an option is wrong, or differs from that of the run in the folder; the message names it.
        DataError: the data are wrong (the message names the row and column), or not those of the run in the folder.
        FolderError: another process trains in the folder, or it cannot be written.
        KeyboardInterrupt: on Ctrl-C, after the state of the training is saved.

    Examples:
        >>> pairs = [(user, (user + step) % 5, 60 * step) for user in range(30) for step in range(6)]
        >>> events = {name: list(column) for name, column in zip(("user", "item", "timestamp"), zip(*pairs))}
        >>> run = fit(events, config="small", train={"epochs": 3}, quiet=True)
        >>> sorted(run.metrics)[:3]
        ['HR@1', 'HR@10', 'HR@100']
        >>> items, scores = run.recommender().recommend([7], k=2, exclude_seen=False)
        >>> items.shape
        (1, 2)
    """
    terminal.begin(quiet)
    _, settings = configured(events, config, items, users, overrides)
    folder, resume = (None, False) if run is None else (Path(run).expanduser(), None)
    with keyboard_interrupts() as interrupts:
        return Run(train(settings, folder, resume, interrupts=interrupts))


def configured(
    events: Any, config: str | Path | Mapping[str, Any], items: Any, users: Any, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], RunConfig]:
    """Store the frames; return the configuration as (a tree, a checked RunConfig). For the arguments see `fit`."""
    source = config if isinstance(config, Mapping) else SHIPPED.get(str(config), Path(config).expanduser())
    where, tree = "config" if isinstance(source, Mapping) else str(source), load_tree(source)
    merge(tree, overrides)
    named = {"events": events, "items": items, "users": users}
    frames = {entity: placed(tree, entity, data) for entity, data in named.items() if data is not None}
    cache_dir = checked(tree, where).data.cache_dir
    for entity, frame in frames.items():
        if frame is not None:
            put(tree, [*section_of(entity), "path"], str(store(frame, entity, cache_dir)))
    return tree, absolute_paths(checked(tree, where))


def section_of(entity: str) -> list[str]:
    """Return the keys of the configuration's section for `entity`: events, items or users."""
    return ["data"] if entity == "events" else ["data", "features", entity]


def placed(tree: dict[str, Any], entity: str, source: Any) -> Any:
    """Put a source into the configuration's tree; return it as a frame to be stored, or None if it is a path."""
    section = section_of(entity)
    if isinstance(source, str | Path):
        put(tree, [*section, "path"], str(source))
        if (ending := Path(source).suffix[1:]) in ("csv", "parquet"):
            put(tree, [*section, "format"], ending)
        return None
    frame = as_polars(source, entity)
    put(tree, [*section, "format"], "parquet")
    put(tree, [*section, "path"], f"{entity}.parquet")
    if entity != "events":
        options = tree["data"]["features"][entity]
        if "id" not in options and (column := id_column(tree, entity)) in frame.columns:
            options["id"] = column
        if "columns" not in options:
            options["columns"] = feature_columns(frame, entity, options.get("id", ID[entity]))
    return frame


def id_column(tree: dict[str, Any], entity: str) -> str | None:
    """Return the events' column with the ids of items or users, or None if the configuration names none."""
    columns = tree["data"].get("columns")
    return columns.get(ID[entity]) if isinstance(columns, dict) else None


def feature_columns(frame: Any, entity: str, ids: str) -> dict[str, dict[str, str]]:
    """Return the option `columns` for the features in a polars frame, by their types; ConfigError for other types."""
    columns = {}
    for column, dtype in frame.schema.items():
        if column == ids:
            continue
        if (kind := feature_kind(dtype)) is None:
            raise ConfigError(f"{entity}, column {shown(column)}: {dtype} cannot be a feature: leave the column out")
        columns[re.sub(r"[^A-Za-z0-9_-]+", "-", column)] = {"kind": kind, "column": column}
    listed = ", ".join(f"{shown(name)} ({options['kind']})" for name, options in columns.items())
    terminal.say(f"features of {entity}: {listed}")
    return columns
