"""Collect rows that cannot be read, and report them together, or drop and count them."""

from __future__ import annotations

from data.types import DataError

MOST_LISTED = 20  # bad rows listed in an error
MOST_DROPPED = 10  # bad rows that may be dropped from any source, however small
MOST_NOTED = 5  # bad rows listed in the note about dropped rows
LIMIT = 0.01  # the default share of a source's rows that may be dropped


class BadRows:
    """The bad rows of a source.

    Args:
        drop: drop bad rows; otherwise they are an error.
        limit: the greatest share of rows that may be dropped.
        option: the configuration key of the source.

    Attributes:
        count: the number of bad rows so far.
        rows: the number of all rows so far.
        left_out: the number of rows so far that the condition `data.where` has left out.
        first: descriptions of the first bad rows.
    """

    def __init__(self, drop: bool, limit: float = LIMIT, option: str = "data"):
        self.drop, self.limit, self.option = drop, limit, option
        self.count = self.rows = self.left_out = 0
        self.first: list[str] = []

    @property
    def room(self) -> int:
        """The number of bad rows that can still be described; more are only counted."""
        return MOST_LISTED - len(self.first)

    def add(self, count: int, described: list[str]) -> None:
        """Count bad rows; described: the places and faults of the first of them."""
        self.count += count
        self.first += described[: self.room]

    def stop(self, message: str) -> None:
        """Raise DataError for a fault after which nothing can be read; the error also lists the earlier bad rows."""
        raise DataError("\n  ".join([f"{self.count + 1} bad rows:", *self.first, message]) if self.first else message)

    def check(self, place: str) -> None:
        """Raise DataError if there are bad rows that are not dropped, with a line for each of the first MOST_LISTED."""
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
        """Whether there are more bad rows than may be dropped."""
        return self.count > MOST_DROPPED and self.count > self.limit * self.rows

    def check_limit(self, place: str) -> None:
        """Raise DataError if more rows of the whole source were dropped than the limit allows."""
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
