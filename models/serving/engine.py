"""The model on top of its users' pages: brings pages up to date, and answers requests from them.

The pages of a user hold the window's tokens but the last, whose query time the next event or request decides. A request
runs that token with its own time and leaves no trace; of ranking, candidates follow behind it.

Letters: B users, T new tokens, E embedding size, M candidates of a user.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import hstu_sparse
from data.batch import Cut
from models.attention import BlockSparseAttention
from models.config import RunConfig
from models.serving.caches import Caches
from models.serving.errors import ServingError
from models.serving.histories import History, Window
from models.serving.options import ServingOptions, page_format
from models.serving.parts import Part, Pass, ServedBatch, ServedRankingBatch
from models.serving.passes import run, served_layers
from models.serving.tokens import Columns, candidate_tokens, single_tokens, window_tokens

TOKENS = {"cpu": 2**14, "cuda": 2**17}  # new tokens of one pass


@dataclass(frozen=True)
class Ask:
    """A request: what the user's window says at the time `at` (seconds), of ranking about `candidates` [M], rows."""

    user: str
    history: History
    at: int
    candidates: np.ndarray | None = None


class Engine:
    """A model in evaluation mode, its layers reading from pages, and the pages of its users. Not safe for threads."""

    def __init__(self, model: nn.Module, config: RunConfig, window: Window, options: ServingOptions):
        self.model, self.window = model.eval(), window
        self.device = model.item_weight.device
        self.ranking = config.task.kind == "ranking"
        self.per_event = 2 if self.ranking else 1
        self.autocast = config.train.autocast == "bf16"
        context = model.embedding.context
        if context is not None and (context.num_users or context.num_events):
            raise ServingError(
                "data.features: those of users and events cannot be served, nobody tells them to a service; those of "
                "items and of the calendar can"
            )
        self.layers = served_layers(model)
        form = page_format(model, options)
        sparse = [layer.attention.inner.config for layer in self.layers if self._is_sparse(layer)]
        if sparse and form.bits:
            raise ServingError(f"cache={options.cache}: bsa is served from keys and values as they are, not from codes")
        self._choices = {
            place: (form.heads, layer.attention.inner.config.block_counts)
            for place, layer in enumerate(self.layers)
            if self._is_sparse(layer)
        }
        longest = self.per_event * window.capacity
        try:
            pool = hstu_sparse.PagePool.within(
                form, options.cache_bytes, longest, layers=len(self.layers), device=self.device
            )
        except ValueError:
            least = form.bytes(longest, len(self.layers))
            raise ServingError(
                f"cache_bytes: a window of {longest:,} tokens takes {least:,} bytes, got {options.cache_bytes:,}"
            ) from None
        self.caches = Caches(pool, math.lcm(*(c.selection_group for c in sparse)))
        self.encoded = 0  # tokens that were written into pages, for metrics

    @staticmethod
    def _is_sparse(layer: nn.Module) -> bool:
        return isinstance(layer.attention.inner, BlockSparseAttention)

    @property
    def bytes_per_user(self) -> int:
        """What the pages of a user with a full window take."""
        pool = self.caches.pool
        return pool.format.bytes(self.per_event * self.window.capacity, pool.layers)

    @property
    def description(self) -> dict:
        """The pages' format in words, and the bytes of a full window in it and in bf16."""
        form, layers, tokens = self.caches.pool.format, len(self.layers), self.per_event * self.window.capacity
        whole = hstu_sparse.PageFormat(form.heads, form.head_size, form.value_size, torch.bfloat16)
        found = {"cache": str(form.dtype).removeprefix("torch.")}
        if form.bits:
            found = {"cache": f"{form.bits}bit", "sink_tokens": form.sink_tokens, "clip": form.clip}
        size, size_bf16 = form.bytes(tokens, layers), whole.bytes(tokens, layers)
        return found | {"bytes_per_user": size, "bytes_per_user_bf16": size_bf16}

    # What pages hold.

    def _begin(self, history: History) -> int:
        return self.window.begin(history.count)

    def _tokens(self, history: History) -> int:
        """Tokens of the window."""
        return self.per_event * (history.count - self._begin(history))

    def changed(self, user: str, history: History, unchanged: int) -> None:
        """Drops what the pages hold behind the first `unchanged` events of the user; the last of them gets a new query.

        history: as it is now.
        """
        begin = self._begin(history)
        self.caches.length(user, begin)
        self.caches.cut(user, max(0, self.per_event * (unchanged - begin) - 1))

    def update(self, users: list[str], histories: list[History]) -> None:
        """Brings the pages of distinct users up to date, whoever else's have to go for that."""
        tokens = [self._tokens(history) for history in histories]
        for chunk in self._chunks(users, tokens, [0] * len(users)):
            self._encode(users[chunk], histories[chunk], tokens[chunk])

    def _chunks(self, users: list[str], tokens: list[int], asked: list[int]):
        """Slices of users whose pages fit at the same time, of at most TOKENS asked tokens."""
        most, begin = TOKENS[self.device.type], 0
        while begin < len(users):
            fit = self.caches.fitting(users[begin:], tokens[begin:])
            end, total, chosen = begin, 0, set()
            while end < begin + fit and (end == begin or total + asked[end] <= most):
                # The last action of a user is written behind the pages: for one request at a time.
                if self.ranking and users[end] in chosen:
                    break
                chosen.add(users[end])
                total += asked[end]
                end += 1
            yield slice(begin, end)
            begin = end

    def _encode(self, users: list[str], histories: list[History], tokens: list[int]) -> None:
        """Writes what the pages of users lack; they fit. tokens: of their windows, the last of which stays out."""
        lengths = [self.caches.length(user, self._begin(history)) for user, history in zip(users, histories)]
        self.caches.reserve(users, tokens)
        most = TOKENS[self.device.type]
        pieces: list[tuple[str, History, int, int]] = []
        room, done = most, set()
        for user, history, start, total in zip(users, histories, lengths, tokens):
            self.caches.entries[user].begin = self._begin(history)
            while start < total - 1 and user not in done:
                stop = min(total - 1, start + room)
                pieces.append((user, history, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    self._write(pieces)
                    pieces, room = [], most
            done.add(user)
        if pieces:
            self._write(pieces)

    def _write(self, pieces: list[tuple[str, History, int, int]]) -> None:
        if all(stop - start == 1 for *_, start, stop in pieces):
            events = [self._begin(h) - h.first + start // self.per_event for _, h, start, _ in pieces]
            starts = np.array([start for *_, start, _ in pieces])
            columns = single_tokens([h for _, h, *_ in pieces], events, starts, self.per_event)
        else:
            columns = Columns.joined(
                [window_tokens(h, self._begin(h), start, stop, self.per_event) for _, h, start, stop in pieces]
            )
        counts = np.array([stop - start for *_, start, stop in pieces])
        lengths = np.array([start for *_, start, _ in pieces])
        offsets, lengths = self._to_device(np.append(0, np.cumsum(counts)), lengths)
        users = [user for user, *_ in pieces]
        batch = self._batch(columns, np.repeat([self._origin(h) for _, h, *_ in pieces], counts), users)
        everything = slice(0, len(columns.items))
        pages = self._pages(users)
        part = Part(everything, offsets, pages, lengths, False, batch.timestamps, batch.query_timestamps)
        batch.served.parts.append(part)
        batch.served.last = len(self.layers) - 1
        self._run(batch)
        for place, (user, _, _, stop) in enumerate(pieces):
            entry = self.caches.entries[user]
            entry.length = stop
            if self._choices:
                entry.choices = {layer: choice[place] for layer, choice in batch.served.choices.items()}
        self.encoded += len(columns.items)

    # Requests.

    def answer(self, asks: list[Ask]) -> Tensor:
        """Outputs of requests in fp32, not normalised: [B, E], or of ranking those of all candidates, end to end."""
        users, histories = [ask.user for ask in asks], [ask.history for ask in asks]
        tokens = [self._tokens(history) for history in histories]
        counts = [1 if ask.candidates is None else 1 + len(ask.candidates) for ask in asks]
        found = []
        for chunk in self._chunks(users, tokens, counts):
            self._encode(users[chunk], histories[chunk], tokens[chunk])
            found.append(self._ask(asks[chunk], tokens[chunk]))
        return torch.cat(found) if found else torch.zeros(0, self.model.item_weight.shape[1], device=self.device)

    def _ask(self, asks: list[Ask], tokens: list[int]) -> Tensor:
        count, users = len(asks), [ask.user for ask in asks]
        histories = [ask.history for ask in asks]
        last = single_tokens(
            histories,
            [len(history.items) - 1 for history in histories],
            np.array(tokens) - 1,
            self.per_event,
            [ask.at for ask in asks],
        )
        origins = np.array([self._origin(ask.history) for ask in asks])
        totals, pages = np.array(tokens), self._pages(users)
        if not self.ranking:
            batch = self._batch(last, origins, users)
            ones, lengths = self._to_device(np.arange(count + 1), totals - 1)
            everything = slice(0, count)
            part = Part(everything, ones, pages, lengths, True, batch.timestamps, batch.query_timestamps)
            batch.served.parts.append(part)
            return self._run(batch)
        sizes = np.array([len(ask.candidates) for ask in asks])
        new = [candidate_tokens(ask.candidates, total, ask.at) for ask, total in zip(asks, tokens)]
        columns = Columns.joined([last, *new])
        batch = self._batch(columns, np.concatenate([origins, np.repeat(origins, sizes)]), users)
        at = np.array([ask.at for ask in asks])
        ones, offsets, lengths, at = self._to_device(
            np.arange(count + 1), np.append(0, np.cumsum(sizes)), totals - 1, at
        )
        first, rest = slice(0, count), slice(count, len(columns.items))
        times, query_times = batch.timestamps[first], batch.query_timestamps[first]
        batch.served.parts += [
            Part(first, ones, pages, lengths, False, times, query_times),
            Part(rest, offsets, pages, lengths + 1, True, at, at),
        ]
        return self._run(batch)[count:]

    # What a pass is given.

    def _origin(self, history: History) -> int:
        return int(history.timestamps[self._begin(history) - history.first])

    def _pages(self, users: list[str]) -> Tensor:
        return self.caches.pool.table([self.caches.entries[user].row for user in users])

    def _to_device(self, *arrays: np.ndarray) -> list[Tensor]:
        """Arrays of integers on the device, as int64, by one copy."""
        sizes = [len(x) for x in arrays]
        joined = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False)).to(self.device)
        return list(joined.split(sizes))

    def _batch(self, columns: Columns, origins: np.ndarray, users: list[str]):
        """The batch of new tokens, each a sequence of its own as far as the layers beside attention can tell."""
        total = len(columns.items)
        items, actions, times, query_times, positions, starts = self._to_device(*vars(columns).values(), origins)
        offsets = torch.arange(total + 1, device=self.device)
        served = Pass(self.caches.pool, [], choices=self._open_choices(users))
        common = dict(
            item_ids=items,
            timestamps=times,
            target_ids=torch.full_like(items, -1),
            query_timestamps=query_times,
            seq_offsets=offsets,
            users=offsets[:-1],
            actions=actions,
            cut=Cut(offsets[:-1], positions, starts, None, None),
            served=served,
        )
        return ServedRankingBatch(is_action=positions % 2 == 1, **common) if self.ranking else ServedBatch(**common)

    def _open_choices(self, users: list[str]) -> dict[int, Tensor]:
        found = {}
        for layer, shape in self._choices.items():
            none = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            known = [self.caches.entries[user].choices for user in users]
            found[layer] = torch.stack([none if choices is None else choices[layer] for choices in known])
        return found

    def _run(self, batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return run(self.model, self.layers, batch)
