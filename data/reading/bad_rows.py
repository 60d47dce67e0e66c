"""Collect rows that cannot be read, then report them all at once, or drop and count them."""

from __future__ import annotations

from data.types import DataError

MOST_TOLD = 20  # bad rows that an error lists
MOST_NOTED = 5  # bad rows that the note about dropped rows lists


class BadRows:
    """The bad rows of a source. `drop` decides whether they are left out or end the preparation."""

    def __init__(self, drop: bool):
        self.drop = drop
        self.count = 0
        self.first: list[str] = []

    @property
    def room(self) -> int:
        """The number of bad rows that still get a description; further ones are only counted."""
        return MOST_TOLD - len(self.first)

    def add(self, count: int, described: list[str]) -> None:
        """Count `count` bad rows; `described` has, for the first ones, their place and what is wrong with them."""
        self.count += count
        self.first += described[: self.room]

    def stop(self, message: str) -> None:
        """Raise DataError for a fault after which nothing more can be read; the error lists the earlier bad rows
        too.
        """
        raise DataError("\n  ".join([f"{self.count + 1} bad rows:", *self.first, message]) if self.first else message)

    def check(self, place: str) -> None:
        """Raise DataError for the bad rows so far, unless they are dropped; it has a line for each, MOST_TOLD at
        most.
        """
        if not self.count or self.drop:
            return
        if self.count == 1:
            raise DataError(self.first[0])
        limit = f", the first {len(self.first)}" if len(self.first) < self.count else ""
        head = f"{place}: {self.count:,} bad rows (data.on_bad_row=drop leaves them out){limit}:"
        raise DataError("\n  ".join([head, *self.first]))

    def note(self) -> str:
        """Return a sentence about the rows that were dropped."""
        first = "; ".join(self.first[:MOST_NOTED])
        return f"{self.count:,} bad rows were left out (data.on_bad_row: drop), the first: {first}"
