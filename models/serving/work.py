"""The new tokens of one pass as numbers: one array, so that one copy takes them to the device. numpy alone does it.

Letters: T new tokens, B users, P columns of the page table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.serving.tokens import Columns

MOST_USERS, MOST_TOKENS = 256, 2**14  # of a pass that is padded


class Sizes(NamedTuple):
    """T, B and P of a pass, padding included."""

    tokens: int
    users: int
    pages: int

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """The parts of `Work.numbers`, without a copy.

        columns [6, T]: items, actions, times, query times, positions, times of the windows' first events; lengths [B],
        lengths that candidates see [B], times of the requests [B], offsets [B + 1], pages [B, P] int32.
        """
        tokens, users, pages = self
        table = -(-users * pages // 2)
        columns, *rest, numbers = numbers.split([6 * tokens, users, users, users, users + 1, table])
        return columns.view(6, tokens), *rest, numbers.view(torch.int32)[: users * pages].view(users, pages)


def rounded_up(count: int, steps: int = 1) -> int:
    """The least of `steps` (a power of two) sizes an octave that is at least `count`, which is at least 1."""
    step = 1 << max(0, (count - 1).bit_length() - steps.bit_length())
    return -(-count // step) * step


@dataclass
class Work:
    """New tokens of B users.

    kind     append: a token each, which stay in the pages; write: any number of each, which stay; ask: a token each
             that leaves no trace; rank: a token each, written behind the pages for this request, and candidates that
             see it
    users    [B]
    columns  T tokens, user by user; of rank the B tokens first, then the candidates, user by user
    origins  [B] times of the first events of the users' windows
    lengths  [B] tokens in the pages before the new ones
    counts   [B] new tokens of each user; of rank the number of candidates
    at       [B] of rank: the times of the requests
    """

    kind: Literal["append", "write", "ask", "rank"]
    users: list[str]
    columns: Columns
    origins: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    at: np.ndarray | None = None

    def asked(self, sizes: Sizes) -> slice:
        """The tokens whose outputs are asked for."""
        if self.kind in ("append", "write"):
            return slice(0)
        if self.kind == "ask":
            return slice(len(self.users))
        return slice(sizes.users, sizes.users + int(self.counts.sum()))

    @property
    def whole(self) -> tuple[int, int]:
        """How many users, who stand first, have no token in their pages, and how many tokens these have now."""
        users = int((self.lengths == 0).sum()) if self.kind == "write" else 0
        return users, int(self.counts[:users].sum())

    @property
    def small(self) -> bool:
        """Whether the pass is one of those that are padded."""
        return self.kind != "write" and len(self.users) <= MOST_USERS and len(self.columns.items) <= MOST_TOKENS

    def padded_sizes(self, pages: int) -> Sizes:
        """The sizes that the pass is padded to, with tables of so many pages.

        Further users have nothing in their pages, and none to write to; one of them has the further candidates.
        """
        users = rounded_up(len(self.users))
        if self.kind != "rank":
            return Sizes(users, users, pages)
        users += 1
        return Sizes(users + rounded_up(max(64, int(self.counts.sum())), 4), users, pages)

    def numbers(self, sizes: Sizes, rows: Sequence[Sequence[int]]) -> Tensor:
        """int64, as `Sizes.split` takes it apart; on the host. rows: the pages of each user."""
        table = -(-sizes.users * sizes.pages // 2)
        found = torch.zeros(6 * sizes.tokens + 4 * sizes.users + 1 + table, dtype=torch.int64)
        columns, lengths, seen, at, offsets, pages = (x.numpy() for x in sizes.split(found))
        users, begin = len(self.users), sizes.users if self.kind == "rank" else 0
        origins = np.repeat(self.origins, self.counts)
        given = (*vars(self.columns).values(), np.concatenate([self.origins, origins]) if begin else origins)
        for row, column in zip(columns, given):
            if begin:
                row[:users], column = column[:users], column[users:]
            row[begin : begin + len(column)] = column
        lengths[:users], seen[:users] = self.lengths, self.lengths + 1
        if self.at is not None:
            at[:users] = self.at
        offsets[1 : users + 1] = np.cumsum(self.counts)
        # Further tokens: the last user's, of rank, else one of each further user.
        offsets[users + 1 :] = np.arange(users + 1, sizes.users + 1) if not begin else offsets[users]
        offsets[-1] = sizes.tokens - begin
        pages.fill(-1)
        for row, mine in zip(pages, rows):
            row[: len(mine)] = mine
        return found
