"""Remove users from prepared data, and list the runs that were trained on their events.

python -m tools.forget USER [USER ...] [--data .cache] [--runs runs]

Ids are texts, as in the data. The program names each id that it finds neither in prepared data nor in a run; if it
finds none of the ids, the exit status is 2. This does not change the raw data, nor the users of a service
(DELETE /users/USER).
"""

from pathlib import Path

from cli.command import Parser, run_main
from data.forget import has_users, prepared_folders, remove_users
from data.types import DataError, shown
from training.folder import FolderError
from training.vocabulary import load_vocabulary


def trained_on(runs: list[Path], users: list[str]) -> tuple[dict[Path, list[str]], list[str]]:
    """Return (run in these folders -> those of the users on whose data it was trained, errors of unreadable runs)."""
    folders = {file.parent for path in runs for file in (*path.glob("config.yaml"), *path.rglob("*/config.yaml"))}
    trained: dict[Path, list[str]] = {}
    faults = []
    for folder in sorted(folders):
        try:
            ids = load_vocabulary(folder).user_ids
            if (known := has_users(ids, users)).any():
                trained[folder] = ids[known].astype(str).tolist()
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
    present: set[str] = set()
    for folder in folders:
        if (removed := remove_users(folder, options.users)) is not None:
            present.update(removed.users)
            count = f"{len(removed.users):,} users with {removed.events:,} events"
            print(f"{folder}: removed {count}; now {removed.folder}")
    trained, faults = trained_on(runs, options.users)
    for folder, ids in trained.items():
        present.update(ids)
        print(f"{folder}: was trained on data with one of these users")
    for fault in faults:
        print(f"not checked: {fault}")
    for user in dict.fromkeys(options.users):
        if user not in present:
            print(f"{shown(user)}: in no prepared data set and no run{' that could be checked' if faults else ''}")
    print(f"checked: {len(folders):,} prepared data sets; runs trained on data with these users: {len(trained):,}")
    if not present:
        raise DataError(
            "none of these users is in the prepared data or runs: give the ids as in the data, and the folders by "
            "--data and --runs"
        )
    print("Remove the users from the raw data, too.")
    return 0


if __name__ == "__main__":
    run_main(main)
