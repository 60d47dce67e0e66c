"""Pack the new tokens of one pass into one array, so that a single copy moves them to the device. Numpy only.

Letters: T new tokens, B users, P columns of the page table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hstu_sparse.core.launch import cdiv
from serving.caches import Entry
from serving.tokens import TokenColumns

MOST_USERS, MOST_TOKENS = 256, 2**14  # largest pass that is padded
FEW = 16  # most tokens of one user written in a padded pass; they fit into a page


class Sizes(NamedTuple):
    """The sizes T, B and P of a pass, including padding."""

    tokens: int
    users: int
    pages: int

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of `TokenBatch.numbers`, without a copy.

        They are the columns [7, T] (those of `TokenColumns`, the times of the windows' first events, the users' feature
        numbers), lengths [B], lengths that candidates attend to [B], request times [B], offsets [B + 1], and pages
        [B, P] int32.
        """
        tokens, users, pages = self
        table = cdiv(users * pages, 2)
        columns, *rest, numbers = numbers.split([7 * tokens, users, users, users, users + 1, table])
        return columns.view(7, tokens), *rest, numbers.view(torch.int32)[: users * pages].view(users, pages)


def rounded_up(count: int, steps: int = 1) -> int:
    """Round `count` >= 1 up to one of `steps` (a power of two) sizes between successive powers of two."""
    step = 1 << max(0, (count - 1).bit_length() - steps.bit_length())
    return -(-count // step) * step


@dataclass
class TokenBatch:
    """New tokens of B users.

    kind     write: the tokens are added to the pages; query: one token for each user, which is not written; rank: one
             token for each user, written after the pages' tokens for this request only, and candidates that attend to
             it
    entries  [B] the users' pages
    columns  the tokens, user by user; for rank the one token of each user, without the candidates
    origins  [B] times of the first events of the users' windows
    features [B] the users' feature numbers
    lengths  [B] tokens in the pages before the new ones, with feature tokens; for write, users without any are first
    counts   [B] new tokens of each user, at least one; for rank the number of candidates
    at       [B] rank only: the times of the requests
    items    rank only: the candidates, rows of the item table, user by user
    codes    [B] rank only: the codes of the features known before the user acts
    """

    kind: Literal["write", "query", "rank"]
    entries: list[Entry]
    columns: TokenColumns
    origins: np.ndarray
    features: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    at: np.ndarray | None = None
    items: np.ndarray | None = None
    codes: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens, T."""
        return len(self.columns.items) + (0 if self.items is None else len(self.items))

    def output_tokens(self, sizes: Sizes) -> slice:
        """Return the slice of tokens whose outputs are used."""
        if self.kind == "write":
            return slice(0)
        if self.kind == "query":
            return slice(len(self.entries))
        return slice(sizes.users, sizes.users + int(self.counts.sum()))

    @property
    def new_windows(self) -> bool:
        """Whether some token is the first one of a window."""
        return self.kind == "write" and not self.lengths.all()

    @property
    def whole(self) -> tuple[int, int]:
        """Return (the number of users without a token in their pages, who come first; the number of their new tokens).

        (0, 0) if every user has one new token: then no kernel for whole sequences is needed, and the order is free.
        """
        users = int((self.lengths == 0).sum()) if int(self.counts.max()) > 1 else 0
        return users, int(self.counts[:users].sum())

    @property
    def small(self) -> bool:
        """Whether the pass is small enough to be padded."""
        return (
            len(self.entries) <= MOST_USERS
            and self.tokens <= MOST_TOKENS
            and int(self.counts.max()) <= (FEW if self.kind == "write" else MOST_TOKENS)
        )

    def padded_sizes(self, pages: int) -> Sizes:
        """Return the sizes that the pass is padded to, for tables of `pages` pages.

        Padding tokens belong to additional users without pages. If each user has one token, so has each additional
        user. Padding candidates belong to a single user. Otherwise an additional user has up to FEW tokens, which
        fit into any table.
        """
        users, total = rounded_up(len(self.entries)), int(self.counts.sum())
        if self.kind != "rank" and total == len(self.entries):
            return Sizes(users, users, pages)
        tokens = max(64, rounded_up(total, 4))
        if self.kind == "rank":
            return Sizes(users + 1 + tokens, users + 1, pages)
        return Sizes(tokens, users + cdiv(max(64, tokens // 4), FEW), pages)

    def numbers(self, sizes: Sizes, tables: Sequence[np.ndarray], out: Tensor | None = None) -> Tensor:
        """Return the pass as int64 on the host, in the order of `Sizes.split`; in `out` if it is given.

        tables: the pages of each user, [P] int32, padded with -1.
        """
        table = cdiv(sizes.users * sizes.pages, 2)
        total = 7 * sizes.tokens + 4 * sizes.users + 1 + table
        buffer = torch.empty(total, dtype=torch.int64) if out is None else out
        columns, lengths, seen, at, offsets, pages = (x.numpy() for x in sizes.split(buffer))
        buffer[: len(buffer) - table].zero_()
        users, counts = len(self.entries), self.counts
        single, begin = len(self.columns.items), 0
        for row, column in zip(columns, vars(self.columns).values()):
            row[:single] = column
        if self.items is None:
            columns[5:, :single] = np.repeat([self.origins, self.features], counts, axis=1)
        else:
            # A candidate has the columns of its user, except for the item.
            begin = sizes.users
            candidates = columns[:, begin : begin + len(self.items)]
            columns[5, :users], columns[6, :users] = self.origins, self.features
            at[:users], candidates[0] = self.at, self.items
            user_columns = self.codes, self.at, self.at, self.columns.positions + 1, self.origins, self.features
            for row, user_values in zip(candidates[1:], user_columns):
                row[:] = np.repeat(cast(np.ndarray, user_values), counts)
        lengths[:users], seen[:users] = self.lengths, self.lengths + 1
        np.cumsum(counts, out=offsets[1 : users + 1])
        few = sizes.tokens if begin else 1 if sizes.tokens == sizes.users else FEW
        further = offsets[users] + few * np.arange(1, sizes.users - users + 1)
        np.minimum(further, sizes.tokens - begin, out=offsets[users + 1 :])
        np.concatenate(tables, out=pages[:users].reshape(-1))
        pages[users:] = -1
        return buffer
