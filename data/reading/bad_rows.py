"""Collect rows that cannot be read, then report them all at once, or drop and count them."""

from __future__ import annotations

from data.types import DataError

MOST_TOLD = 20  # bad rows that an error lists
MOST_DROPPED = 10  # bad rows that may be left out of any source, however small
MOST_NOTED = 5  # bad rows that the note about dropped rows lists


LIMIT = 0.01  # of the rows of a source, that may be left out unless the user says otherwise


class BadRows:
    """The bad rows of a source. `drop` decides whether they are left out or end the preparation.

    limit: the greatest share of them that may be left out. option: the configuration key of the source. rows: all rows
    so far, good and bad. left_out: those that the user's condition left out.
    """

    def __init__(self, drop: bool, limit: float = LIMIT, option: str = "data"):
        self.drop, self.limit, self.option = drop, limit, option
        self.count = self.rows = self.left_out = 0
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
        hint = "" if self.too_many else f" ({self.option}.on_bad_row=drop leaves them out)"
        head = f"{place}: {self.count:,} bad rows{hint}{limit}:"
        raise DataError("\n  ".join([head, *self.first]))

    @property
    def too_many(self) -> bool:
        """Whether more rows are bad than may be left out."""
        return self.count > MOST_DROPPED and self.count > self.limit * self.rows

    def check_limit(self, place: str) -> None:
        """Raise DataError if more rows of the whole source were left out than the limit allows."""
        if self.drop and self.too_many:
            head = (
                f"{place}: {self.count:,} of {self.rows:,} rows are bad ({self.option}.on_bad_row: drop), more than "
                f"data.bad_rows_limit={self.limit:g} allows, the first {len(self.first)}:"
            )
            raise DataError("\n  ".join([head, *self.first]))

    def note(self) -> str:
        """Return a sentence about the rows that were dropped."""
        first = "; ".join(self.first[:MOST_NOTED])
        return f"{self.count:,} bad rows were left out ({self.option}.on_bad_row: drop), the first: {first}"
