"""Write what a run's folder has beside its checkpoints: on the first rank. On the others NoWriter does nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from training.best import best_again, take_over_best
from training.checkpoints import Progress, set_aside_damaged
from training.config import RunConfig, as_yaml
from training.folder import LINEAGE, MANIFEST, as_json, claimed, new_manifest, write_file, write_judged
from training.monitor import MetricsLog
from training.ranks.processes import NoLog
from training.report import write_report
from training.run import Data
from training.tracking import open_tracker
from training.vocabulary import save_vocabulary


class Writer:
    """Write the files of the run in `folder`."""

    folder: Path

    @contextmanager
    def claim(self, folder: Path, new: bool, another: bool) -> Iterator[Path]:
        """Claim the folder, see `claimed`."""
        with claimed(folder, new, another) as self.folder:
            yield self.folder

    def set_aside_damaged(self) -> list[Path]:
        return set_aside_damaged(self.folder)

    def begin(self, config: RunConfig, data: Data, progress: Progress, *, new: bool) -> None:
        """Write the configuration first, so that a run that is killed here can be resumed; then who it is.

        new: the run has no checkpoint.
        """
        self.write_config(config)
        if new:
            manifest = new_manifest()
            write_file(self.folder / MANIFEST, json.dumps(manifest, indent=1))
            save_vocabulary(self.folder, data.dataset, data.vocabulary)
            progress.run = manifest["run"]

    def write_config(self, config: RunConfig) -> None:
        write_file(self.folder / "config.yaml", as_yaml(config))

    def begin_update(self, data: Data, progress: Progress, lineage: Callable[[str], str]) -> None:
        """Write what `begin` does but the configuration, which follows the first checkpoint: an update that is killed
        before that cannot be resumed as if it were a run of its own.

        lineage: gives the content of lineage.jsonl for the id of the run.
        """
        manifest = new_manifest()
        progress.run = manifest["run"]
        write_file(self.folder / MANIFEST, json.dumps(manifest, indent=1))
        save_vocabulary(self.folder, data.dataset, data.vocabulary, data.events)
        write_file(self.folder / LINEAGE, lineage(progress.run))

    def open_log(self, config: RunConfig, progress: Progress) -> MetricsLog:
        return MetricsLog(self.folder, progress.records, open_tracker(config, self.folder, progress.run, progress.step))

    def best_again(self, config: RunConfig, progress: Progress) -> tuple[float | None, int]:
        return best_again(config, self.folder, progress)

    def take_over_best(self, config: RunConfig, progress: Progress) -> None:
        take_over_best(config, self.folder, progress)

    def write_judged(self, arrays: dict[str, np.ndarray]) -> None:
        write_judged(self.folder, arrays)

    def write_result(self, config: RunConfig, data: Data, result: dict, progress: Progress) -> None:
        """Write result.json and the report."""
        write_file(self.folder / "result.json", as_json(result))
        write_report(self.folder, config, data.task, result, progress.records, data.dataset)


class NoWriter(Writer):
    """Write nothing: the first rank does."""

    @contextmanager
    def claim(self, folder: Path, new: bool, another: bool) -> Iterator[Path]:
        yield folder

    def set_aside_damaged(self) -> list[Path]:
        return []

    def begin(self, config: RunConfig, data: Data, progress: Progress, *, new: bool) -> None:
        pass

    def write_config(self, config: RunConfig) -> None:
        pass

    def open_log(self, config: RunConfig, progress: Progress) -> NoLog:  # type: ignore[override]
        return NoLog(progress.records)

    def best_again(self, config: RunConfig, progress: Progress) -> tuple[float | None, int]:
        return progress.best, progress.stale

    def take_over_best(self, config: RunConfig, progress: Progress) -> None:
        pass

    def write_judged(self, arrays: dict[str, np.ndarray]) -> None:
        pass

    def write_result(self, config: RunConfig, data: Data, result: dict, progress: Progress) -> None:
        pass
