"""Allocate pages to users; evict the least recently used.

Letters: H heads, S blocks that bsa chooses.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

import hstu_sparse
from serving.errors import CacheFull


@dataclass
class Entry:
    """The pages of one user.

    row      the numbers of the pages in the pool
    begin    the first event of the cached window
    length   the number of cached tokens, from the first one of the window on
    choices  for bsa, layer -> [H, S] int32: the choice of the open selection group; None or -1 if none is open
    """

    row: Sequence[int] = ()
    begin: int = 0
    length: int = 0
    choices: dict[int, Tensor] | None = None
    _table: tuple[Sequence[int], np.ndarray] | None = None

    def table(self, width: int) -> np.ndarray:
        """Return the row of a page table, [width] int32: the pages, padded with -1."""
        if self._table is None or self._table[0] is not self.row or len(self._table[1]) != width:
            table = np.full(width, -1, np.int32)
            table[: len(self.row)] = self.row
            self._table = self.row, table
        return self._table[1]


class Caches:
    """The entries of all users who have pages, the least recently used first.

    group: lengths are only cut to multiples of this number: 1 or, for bsa, the size of a selection group, since the
    choice of an open group cannot be computed again.

    ahead: the entries of the next windows of users; their pages are the first to be freed.
    soon: the users whose next windows are to be encoded.
    """

    def __init__(self, pool: hstu_sparse.PagePool, group: int = 1):
        self.pool, self.group = pool, group
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.ahead: OrderedDict[str, Entry] = OrderedDict()
        self.soon: OrderedDict[str, None] = OrderedDict()
        self.pinned: set[str] = set()
        self.evictions = 0

    def __contains__(self, user: str) -> bool:
        return user in self.entries

    def length(self, user: str, begin: int) -> int:
        """Return the number of cached tokens of the window that begins at event `begin`.

        Pages of another window are freed. If this window was encoded ahead, its pages take their place.
        """
        entry = self.entries.get(user)
        if entry is None:
            return 0
        if entry.begin != begin:
            following = self.ahead.pop(user, None)
            if following is not None and following.begin != begin:
                self.pool.shrink(following.row, 0)
                following = None
            if following is None:
                self.cut(entry, 0)
                entry.begin = begin
            else:
                self.pool.shrink(entry.row, 0)
                self.entries[user] = entry = following
        return entry.length

    def cut(self, entry: Entry, length: int) -> None:
        """Remove the tokens after the first `length` from an entry."""
        if length >= entry.length:
            return
        entry.length = max(0, length - length % self.group)
        entry.row = self.pool.shrink(entry.row, entry.length)
        entry.choices = None

    def drop(self, user: str) -> bool:
        """Free the pages of a user; return whether there were any."""
        self.drop_ahead(user)
        self.soon.pop(user, None)
        entry = self.entries.pop(user, None)
        if entry is not None:
            self.pool.shrink(entry.row, 0)
        return entry is not None

    def drop_ahead(self, user: str) -> None:
        """Free the pages of the user's next window."""
        following = self.ahead.pop(user, None)
        if following is not None:
            self.pool.shrink(following.row, 0)

    def reserve_ahead(self, user: str, begin: int, tokens: int) -> Entry | None:
        """Return the entry of the user's next window, with pages for `tokens`; None if too few pages are free."""
        following = self.ahead.get(user)
        if following is None or following.begin != begin:
            self.drop_ahead(user)
            following = Entry(begin=begin)
        try:
            following.row = self.pool.reserve(following.row, tokens)
        except hstu_sparse.PoolFull:
            self.drop_ahead(user)
            return None
        self.ahead[user] = following
        return following

    def fitting(self, users: Sequence[str], tokens: Sequence[int]) -> int:
        """Return the largest n for which the first n `users` can have pages for their `tokens` at the same time.

        Raises CacheFull if the first one cannot, since other users are pinned.
        """
        rows = int(self.pool.format.sink_tokens > 0)
        pinned = {user: len(entry.row) for user in self.pinned if (entry := self.entries.get(user)) and len(entry.row)}
        pages = self.pool.num_pages - sum(pinned.values()) + rows * len(pinned)
        sequences = self.pool.num_sequences - len(pinned) if rows else math.inf
        if not pinned and len(users) <= sequences:
            num_pages = self.pool.format.num_pages
            if len(users) * num_pages(max(tokens, default=0)) <= pages or sum(map(num_pages, tokens)) <= pages:
                return len(users)
        chosen: set[str] = set()
        for count, (user, length) in enumerate(zip(users, tokens)):
            if user not in chosen:
                chosen.add(user)
                if user in pinned:
                    pages += pinned[user] - rows
                    sequences += 1
                pages -= self.pool.format.num_pages(length)
                sequences -= 1
            if pages < 0 or sequences < 0:
                if not count:
                    raise CacheFull(
                        f"no room for {length:,} tokens of a user, since {len(pinned):,} pinned users fill the cache: "
                        "unpin users, or set a larger cache_bytes"
                    )
                return count
        return len(users)

    def reserve(self, users: Sequence[str], begins: Sequence[int], tokens: Sequence[int]) -> list[Entry]:
        """Return the entries of `users`, with pages for `tokens` tokens of the windows that begin at events `begins`.

        All users must fit, see `fitting`. Other users' pages are evicted if needed, the least recently used first.
        """
        entries, size = self.entries, self.pool.format.page_size
        sinks = int(self.pool.format.sink_tokens > 0)
        for user, begin in zip(users, begins):
            entry = entries.get(user)
            if entry is None:
                entries[user] = Entry(begin=begin)
            elif entry.begin != begin:
                self.length(user, begin)
        reserved, chosen = [], set(users)
        for user, length in zip(users, tokens):
            entry = entries[user]
            entries.move_to_end(user)
            reserved.append(entry)
            while not (length and sinks * size + length <= len(entry.row) * size):
                try:
                    entry.row = self.pool.reserve(entry.row, max(length, entry.length))
                    break
                except hstu_sparse.PoolFull:
                    if self.ahead:
                        self.drop_ahead(next(iter(self.ahead)))
                        continue
                    other = next((x for x in entries if x not in chosen and x not in self.pinned), None)
                    if other is None:
                        raise
                    self.drop(other)
                    self.evictions += 1
        return reserved
