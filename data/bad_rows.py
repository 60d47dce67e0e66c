"""Rows that cannot be read: collected, then told all at once, or dropped and counted."""

from __future__ import annotations

from .types import DataError

MOST_TOLD = 20  # in an error
MOST_NOTED = 5  # where they are dropped


class BadRows:
    """The bad rows of a source. `drop` says whether they are left out or end the preparation."""

    def __init__(self, drop: bool):
        self.drop = drop
        self.count = 0
        self.first: list[str] = []

    @property
    def room(self) -> int:
        """How many more bad rows are to be described, and not only counted."""
        return MOST_TOLD - len(self.first)

    def add(self, count: int, described: list[str]) -> None:
        """Take over `count` bad rows; `described` says of the first ones where they are and what is wrong."""
        self.count += count
        self.first += described[: self.room]

    def stop(self, what: str) -> None:
        """Raise DataError for a fault that leaves nothing to go on with, after the bad rows before it."""
        raise DataError("\n  ".join([f"{self.count + 1} bad rows:", *self.first, what]) if self.first else what)

    def check(self, place: str) -> None:
        """Raise DataError for the bad rows so far, unless they are dropped; a line for each, MOST_TOLD at most."""
        if not self.count or self.drop:
            return
        if self.count == 1:
            raise DataError(self.first[0])
        told = f", the first {len(self.first)}" if len(self.first) < self.count else ""
        head = f"{place}: {self.count:,} bad rows (data.on_bad_row=drop leaves them out){told}:"
        raise DataError("\n  ".join([head, *self.first]))

    def note(self) -> str:
        """A sentence about the rows that were dropped."""
        first = "; ".join(self.first[:MOST_NOTED])
        return f"{self.count:,} bad rows were left out (data.on_bad_row: drop), the first: {first}"
