"""Describe the new tokens of one pass as numbers: one array, so that one copy takes them to the device. Numpy only.

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
from serving.tokens import Columns

MOST_USERS, MOST_TOKENS = 256, 2**14  # of a pass that is padded
FEW = 16  # tokens of a user written in such a pass, which fit into a page


class Sizes(NamedTuple):
    """T, B and P of a pass, padding included."""

    tokens: int
    users: int
    pages: int

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of `Work.numbers`, without a copy.

        columns [7, T]: those of `Columns`, times of the windows' first events, numbers of the users' features; lengths
        [B], lengths that candidates see [B], times of the requests [B], offsets [B + 1], pages [B, P] int32.
        """
        tokens, users, pages = self
        table = cdiv(users * pages, 2)
        columns, *rest, numbers = numbers.split([7 * tokens, users, users, users, users + 1, table])
        return columns.view(7, tokens), *rest, numbers.view(torch.int32)[: users * pages].view(users, pages)


def rounded_up(count: int, steps: int = 1) -> int:
    """Return the least size that is at least `count` >= 1, of `steps` (a power of two) sizes an octave."""
    step = 1 << max(0, (count - 1).bit_length() - steps.bit_length())
    return -(-count // step) * step


@dataclass
class Work:
    """New tokens of B users.

    kind     write: tokens that stay in the pages; ask: a token each that leaves no trace; rank: a token each, written
             behind the pages for this request, and candidates that see it
    entries  [B] the users' pages
    columns  the tokens, user by user; of rank one of each user, which the candidates see
    origins  [B] times of the first events of the users' windows
    features [B] the numbers of the users' features
    lengths  [B] tokens in the pages before the new ones, of features too; of write the users without any stand first
    counts   [B] new tokens of each user, at least one; of rank the number of candidates
    at       [B] of rank: the times of the requests
    items    of rank: the candidates, rows of the item table, user by user
    codes    [B] of rank: the codes of the candidates, of what is known before the user acts
    """

    kind: Literal["write", "ask", "rank"]
    entries: list[Entry]
    columns: Columns
    origins: np.ndarray
    features: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    at: np.ndarray | None = None
    items: np.ndarray | None = None
    codes: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.columns.items) + (0 if self.items is None else len(self.items))

    def output_tokens(self, sizes: Sizes) -> slice:
        """Return the tokens whose outputs are requested."""
        if self.kind == "write":
            return slice(0)
        if self.kind == "ask":
            return slice(len(self.entries))
        return slice(sizes.users, sizes.users + int(self.counts.sum()))

    @property
    def new_windows(self) -> bool:
        """Whether the first tokens of some user's window are written."""
        return self.kind == "write" and not self.lengths.all()

    @property
    def whole(self) -> tuple[int, int]:
        """Return (the number of users without a token in their pages, who come first; the number of their tokens now).

        (0, 0) if each user has one token: these need no kernel for whole sequences, and come in any order.
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
        """Return the sizes that the pass is padded to, with tables of so many pages.

        Additional users have nothing in their pages, and none to write to. They have the additional tokens: one each if
        others have one each, candidates all together, else up to FEW, for which any table has room.
        """
        users, total = rounded_up(len(self.entries)), int(self.counts.sum())
        if self.kind != "rank" and total == len(self.entries):
            return Sizes(users, users, pages)
        tokens = max(64, rounded_up(total, 4))
        if self.kind == "rank":
            return Sizes(users + 1 + tokens, users + 1, pages)
        return Sizes(tokens, users + cdiv(max(64, tokens // 4), FEW), pages)

    def numbers(self, sizes: Sizes, tables: Sequence[np.ndarray], out: Tensor | None = None) -> Tensor:
        """Return the pass as int64, in the order that `Sizes.split` defines; on the host, in `out` if that is given.

        tables: the pages of each user, [P] int32, followed by -1.
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
            # All columns of a candidate except the item are its user's.
            begin = sizes.users
            candidates = columns[:, begin : begin + len(self.items)]
            columns[5, :users], columns[6, :users] = self.origins, self.features
            at[:users], candidates[0] = self.at, self.items
            of_each = self.codes, self.at, self.at, self.columns.positions + 1, self.origins, self.features
            for row, of_users in zip(candidates[1:], of_each):
                row[:] = np.repeat(cast(np.ndarray, of_users), counts)
        lengths[:users], seen[:users] = self.lengths, self.lengths + 1
        np.cumsum(counts, out=offsets[1 : users + 1])
        few = sizes.tokens if begin else 1 if sizes.tokens == sizes.users else FEW
        further = offsets[users] + few * np.arange(1, sizes.users - users + 1)
        np.minimum(further, sizes.tokens - begin, out=offsets[users + 1 :])
        np.concatenate(tables, out=pages[:users].reshape(-1))
        pages[users:] = -1
        return buffer
