"""Replace the model of a running service: load and check another run, then use it for all requests.

If the run fails a check, the current model stays.
"""

import gc
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.errors import UserError
from data.types import shown
from serving.errors import RequestError, ServingError
from serving.histories import keep_objects
from serving.http.event_log import EventLog
from serving.http.log_reader import LogReader
from serving.http.redis_store import SharedUsers
from serving.http.replay import catch_up, replay
from serving.http.worker import Exchange, Worker
from serving.recommender import Recommender
from training.config import RunConfig
from training.folder import FolderError, access, read_manifest, read_regular

RESULT = "result.json"
CHECKED_USERS, CHECKED_ITEMS = 64, 64  # their scores must be finite
WARM_USERS = 1024  # most users whose windows are encoded before the model is replaced
FEW_BYTES = 2**16  # most bytes of the log that are read while requests wait
logger = logging.getLogger("hstu_sparse.serve")


class ModelRefused(RequestError):
    """A run that cannot replace the current model."""


class Loading(ModelRefused):
    """Another run is being loaded."""


@dataclass(frozen=True)
class Requirements:
    """Requirements for a run to replace the current model.

    floor    metric -> the least value in the run's result.json, or the greatest if less is better
    missing  the largest share of the current model's items that the run does not know
    """

    floor: Mapping[str, float] = field(default_factory=dict)
    missing: float = 0.0


class Models:
    """The runs in a folder, one of which is the current model.

    load: returns the recommender of a run's folder, with the service's options.
    """

    def __init__(self, folder: Path, load: Callable[[Path], Recommender], requirements: Requirements | None = None):
        self.folder, self.load, self.requirements = folder, load, requirements or Requirements()
        self.refused: dict[str, str] = {}  # name of a run -> why it was refused
        self._loading = threading.Lock()

    def path(self, name: str) -> Path:
        """Return the folder of the run `name`; raise ModelRefused if it does not exist."""
        path = self.folder / name
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name or not (path / "config.yaml").is_file():
            raise ModelRefused(f"{shown(name)}: expected the name of a run in {shown(self.folder, 200)}")
        return path

    def finished(self) -> list[str]:
        """Return the names of the finished runs, the newest first."""
        runs = []
        with access(self.folder, "read"):
            for path in self.folder.iterdir():
                try:
                    if (path / "config.yaml").is_file() and _result(path).get("finished"):
                        runs.append((read_manifest(path)["created"], path.name))
                except (FolderError, KeyError):
                    continue  # the run is being written, or damaged
        return [name for _, name in sorted(runs, reverse=True)]

    def first(self) -> Recommender:
        """Load the newest finished run that fulfils the requirements; raise ServingError if there is none."""
        for name in self.finished():
            try:
                recommender = self.load(self.path(name))
                self.check_floor(self.path(name), recommender.config)
                return recommender
            except UserError as error:
                self._refuse(name, error)
        reasons = "".join(f"; {reason}" for reason in self.refused.values())
        fault = "not a run folder, and no finished run in it can be served"
        raise ServingError(f"{shown(self.folder, 200)}: {fault}{reasons}")

    def exchange(self, name: str, worker: Worker, log: EventLog | None) -> str:
        """Replace the model by the run `name`, with all events of the log or store; return the previous model's name.

        Raises ModelRefused, with the model unchanged.
        """
        if not self._loading.acquire(blocking=False):
            raise Loading("another run is being loaded, try again later")
        try:
            path, old = self.path(name), worker.recommender
            if log is None and worker.store is None:
                raise ModelRefused("the service has neither a log nor a store: another model could not get its events")
            new = self.load(path)
            check_requests(old, new, self.requirements.missing)
            self.check_floor(path, new.config)
            users = old.users_with_pages()[-WARM_USERS:]
            if worker.store is not None:
                shared = worker.store.for_recommender(new)
                shared.refresh(users)
                self._serve(new, shared, users, worker)
            else:
                assert log is not None
                with log.reader() as reader:
                    replay(new, reader)
                    while log.size - reader.size > FEW_BYTES:
                        catch_up(new, reader, log.size)
                    self._serve(new, reader, users, worker)
        except UserError as error:
            raise self._refuse(name, error) from None
        finally:
            self._loading.release()
        self.refused.pop(name, None)
        logger.info("the model %s replaced %s", new.label, old.label)
        label, (_, known) = old.label, new.items.lookup(old.items.ids)
        if lost := int((~known).sum()):
            logger.warning("%d items of %s are not known to %s", lost, label, new.label)
        del old
        if gc.get_freeze_count():
            keep_objects()  # excludes the new model's objects from garbage collection, and frees the old one's
        return label

    def _serve(self, new: Recommender, source: LogReader | SharedUsers, users: list[str], worker: Worker) -> None:
        check_answers(new, users)
        for begin in range(0, len(users), 16):  # ahead of these users' next requests
            new.encode(users[begin : begin + 16])
        worker.put(Exchange(new, source)).result()

    def _refuse(self, name: str, error: UserError) -> ModelRefused:
        self.refused[name] = str(error)
        logger.error("the run %s was refused: %s", shown(name), error)
        return error if isinstance(error, ModelRefused) else ModelRefused(str(error))

    def check_floor(self, path: Path, config: RunConfig) -> None:
        """Raise ModelRefused if a metric of the run is worse than its floor."""
        for metric, floor in self.requirements.floor.items():
            value = _metric(_result(path), metric, config)
            less = config.task.less_is_better(metric)
            if value is None:
                raise ModelRefused(f"{shown(path.name)}: {RESULT} has no metric {shown(metric)} (--floor)")
            if value > floor if less else value < floor:
                bound = "at most" if less else "at least"
                raise ModelRefused(f"{shown(path.name)}: {metric} is {value:g}, expected {bound} {floor:g}")


class Watch(threading.Thread):
    """A thread that replaces the model by the newest finished run, and tries each run once."""

    def __init__(self, models: Models, worker: Worker, log: EventLog | None, seconds: float):
        super().__init__(name="watch", daemon=True)
        self.models, self.worker, self.log, self.seconds = models, worker, log, seconds
        self._tried: set[str | None] = {worker.recommender.label}
        self._stop_requested = threading.Event()

    def run(self) -> None:
        name: str | None = None
        while not self._stop_requested.wait(self.seconds):
            try:
                name = next(iter(self.models.finished()), None)
                if name is None or name in self._tried:
                    continue
                self.models.exchange(name, self.worker, self.log)
                self._tried.add(name)
            except Loading:
                continue
            except ModelRefused:
                self._tried.add(name)
            except UserError as error:
                logger.error("%s", error)
            except Exception:
                self._tried.add(name)
                logger.exception("internal error while loading a run")

    def stop(self) -> None:
        """End the thread, once a run that is being loaded has replaced the model or was refused."""
        self._stop_requested.set()
        self.join()


def check_requests(old: Recommender, new: Recommender, most_missing: float) -> None:
    """Raise ModelRefused unless the new model accepts the old one's requests and knows enough of its items."""
    for what, before, after in (
        ("ranks given candidates", old.ranking, new.ranking),
        ("reads actions", old.actions is not None, new.actions is not None),
        ("reads times", old.has_timestamps, new.has_timestamps),
    ):
        if before != after:
            one, other = (old, new) if before else (new, old)
            raise ModelRefused(f"{new.label}: cannot replace {old.label}: {one.label} {what}, {other.label} does not")
    ids = np.asarray(old.items.ids)[: old.model.embedding.num_items]  # without added items, which `new` gets, too
    _, known = new.items.lookup(ids)
    missing = ids[~known]
    if len(missing) > most_missing * len(known):
        examples = ", ".join(shown(item) for item in missing[:5].tolist())
        raise ModelRefused(
            f"{new.label}: does not know {len(missing):,} of the {len(known):,} items of {old.label}: {examples}"
        )


def check_answers(new: Recommender, users: list[str]) -> None:
    """Raise ModelRefused unless the new model's scores for some stored users are finite."""
    users = [user for user in users if new.knows(user)][-CHECKED_USERS:]
    if not users:
        return
    items = new.items.ids[:: -(-len(new.items) // CHECKED_ITEMS)]
    finite = np.isfinite(new.score(users, np.tile(items, (len(users), 1)))).all()
    if finite and not new.ranking:
        finite = np.isfinite(new.recommend(users, min(10, len(new.items)), exclude_seen=False)[1]).all()
    if not finite:
        raise ModelRefused(f"{new.label}: scores for stored users are not finite")


def _result(path: Path) -> dict:
    """Read result.json of a run; {} if it does not exist; raise FolderError if it is damaged."""
    file = path / RESULT
    if not file.exists():
        return {}
    with access(file, "read"):
        content = read_regular(file)
    try:
        result = json.loads(content)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        raise FolderError(f"{shown(file, 200)}: damaged, expected a JSON object")
    return result


def _metric(result: dict, metric: str, config: RunConfig) -> float | None:
    """Return a metric of the test split, or the best validation metric; None if the run has neither."""
    model = result.get("model") or {}
    value = model.get(result.get("filter_seen"), model).get(metric)
    if value is None and metric == config.best_metric:
        value = result.get("best")
    return value if isinstance(value, int | float) else None
