"""Write the files of a run's folder other than checkpoints, on the first rank; on other ranks NoWriter does nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from training.best import best_by_metric, update_best_facts
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
        """Write the configuration, the manifest and the vocabulary; new: whether the run has no checkpoint.

        The configuration comes first: with it alone a run that is killed can be resumed.
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
        """Write the manifest, the vocabulary and lineage.jsonl of an update.

        The configuration is written after the first checkpoint: an update that is killed before must not be resumed as
        an ordinary run.

        lineage: a function that maps the run's id to the content of lineage.jsonl.
        """
        manifest = new_manifest()
        progress.run = manifest["run"]
        write_file(self.folder / MANIFEST, json.dumps(manifest, indent=1))
        save_vocabulary(self.folder, data.dataset, data.vocabulary, data.events)
        write_file(self.folder / LINEAGE, lineage(progress.run))

    def open_log(self, config: RunConfig, progress: Progress) -> MetricsLog:
        return MetricsLog(self.folder, progress.records, open_tracker(config, self.folder, progress.run, progress.step))

    def best_by_metric(self, config: RunConfig, progress: Progress) -> tuple[float | None, int]:
        return best_by_metric(config, self.folder, progress)

    def update_best_facts(self, config: RunConfig, progress: Progress) -> None:
        update_best_facts(config, self.folder, progress)

    def write_judged(self, arrays: dict[str, np.ndarray]) -> None:
        write_judged(self.folder, arrays)

    def write_result(self, config: RunConfig, data: Data, result: dict, progress: Progress) -> None:
        """Write result.json and the report."""
        write_file(self.folder / "result.json", as_json(result))
        write_report(self.folder, config, data.task, result, progress.records, data.dataset)


class NoWriter(Writer):
    """Write nothing, on ranks other than the first."""

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

    def best_by_metric(self, config: RunConfig, progress: Progress) -> tuple[float | None, int]:
        return progress.best, progress.stale

    def update_best_facts(self, config: RunConfig, progress: Progress) -> None:
        pass

    def write_judged(self, arrays: dict[str, np.ndarray]) -> None:
        pass

    def write_result(self, config: RunConfig, data: Data, result: dict, progress: Progress) -> None:
        pass
