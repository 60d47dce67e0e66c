"""Remove users from prepared data, and list the runs that were trained on their events.

python -m tools.forget USER [USER ...] [--data .cache] [--runs runs]

Ids are texts, as in the data. This does not change the raw data, nor the users of a service (DELETE /users/USER).
"""

from pathlib import Path

from cli.command import Parser, run_main
from data.forget import has_users, prepared_folders, remove_users
from data.types import DataError, shown
from training.folder import FolderError
from training.vocabulary import load_vocabulary


def trained_on(runs: list[Path], users: list[str]) -> tuple[list[Path], list[str]]:
    """Return (runs in these folders that were trained on data with one of the users, errors of unreadable runs)."""
    folders = {file.parent for path in runs for file in (*path.glob("config.yaml"), *path.rglob("*/config.yaml"))}
    trained, faults = [], []
    for folder in sorted(folders):
        try:
            if has_users(load_vocabulary(folder).user_ids, users).any():
                trained.append(folder)
        except FolderError as error:
            faults.append(str(error))
    return trained, faults


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit status."""
    parser = Parser(prog="python -m tools.forget", description=__doc__)
    parser.add_argument("users", nargs="+", metavar="USER", help="ids of users")
    parser.add_argument("--data", type=Path, action="append", metavar="DIR",
                        help="a data.cache_dir, or a prepared data set; by default .cache")  # fmt: skip
    parser.add_argument(
        "--runs", type=Path, action="append", metavar="DIR", help="a run, or a folder of runs; by default runs/"
    )
    options = parser.parse_args(arguments)
    folders = []
    for path in options.data or [Path(".cache")]:
        if not path.is_dir():
            raise DataError(f"--data: {shown(path, 200)}: no such folder")
        folders += prepared_folders(path)
    runs = options.runs or [Path("runs")]
    for path in options.runs or []:
        if not path.is_dir():
            raise DataError(f"--runs: {shown(path, 200)}: no such folder")
    for folder in folders:
        if (removed := remove_users(folder, options.users)) is not None:
            print(f"{folder}: removed {removed.users:,} users with {removed.events:,} events; now {removed.folder}")
    trained, faults = trained_on(runs, options.users)
    for folder in trained:
        print(f"{folder}: was trained on data with one of these users")
    for fault in faults:
        print(f"not checked: {fault}")
    print(f"checked: {len(folders):,} prepared data sets; runs trained on data with these users: {len(trained):,}")
    print("Remove the users from the raw data, too.")
    return 0


if __name__ == "__main__":
    run_main(main)
