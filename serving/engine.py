"""Run the model on cached pages of keys and values: bring users' pages up to date and answer requests.

A user's pages hold all tokens of the window except the last one, whose query time is the time of the next event or
request. A request runs the last token at the request's time and leaves the tokens in the pages as they are. For
ranking, that token is written after them, for this request only, and the candidates attend to it. If features of users
are tokens, they come first and are written together, since they attend to one another.

Letters: B users, T new tokens, E embedding size, M candidates of a user.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

import hstu_sparse
from data.batch import Cut
from hstu_sparse.core.jagged import sequence_ids
from models.attention.contract import PagedForm
from models.hstu import SequenceModel
from serving.block_sums import BlockSums
from serving.caches import Caches, Entry
from serving.contexts import Contexts
from serving.errors import ServingError
from serving.graphs import Graphs
from serving.histories import History, Window
from serving.options import ServingOptions, page_format, served_form
from serving.paged_group import PagedGroup, PagedPass, ServedBatch
from serving.paged_pass import run, served_layers
from serving.token_batch import FEW, Sizes, TokenBatch
from serving.tokens import TokenColumns, single_tokens, window_tokens
from training.config import RunConfig

TOKENS = {"cpu": 2**14, "cuda": 2**17}  # most new tokens of one pass
AHEAD = {"cpu": 32, "cuda": 1024}  # most tokens encoded ahead in one pass: a request may wait for it
MARGIN = 16  # the next window is encoded ahead if a slide is fewer than capacity / MARGIN events away


class UserRequest(NamedTuple):
    """A user's request at time `at` (seconds).

    candidates: [M] rows of the item table, the items to score (ranking only); code: the code of those features of the
    next event that are known before the user acts (ranking only, see `Contexts`)
    """

    user: str
    history: History
    at: int
    candidates: np.ndarray | None = None
    code: int = 0


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a user's window, to be written to pages."""

    window: "UserWindow"
    entry: Entry
    start: int
    stop: int


class UserWindow(NamedTuple):
    """The part of a user's history that the model sees: `tokens` tokens of the window that begins at event `begin`.

    Pages that are up to date hold all of these tokens except the last.
    """

    user: str
    history: History
    begin: int
    tokens: int

    @property
    def origin(self) -> int:
        """The time of the window's first event."""
        return self.history.timestamps.item(self.begin - self.history.first)


class Engine:
    """A model in evaluation mode whose layers attend to cached pages, and the pages of its users. Not thread-safe."""

    def __init__(
        self, model: SequenceModel, config: RunConfig, window: Window, options: ServingOptions, contexts: Contexts
    ):
        self.model, self.window, self.contexts = model.eval(), window, contexts
        self.device = model.embedding.position.device
        task = served_form(config)
        self.ranking, self.per_event, self.num_context = task.candidates > 0, task.tokens_per_event, model.num_context
        self.autocast = config.train.autocast == "bf16"
        self.layers = served_layers(model, torch.bfloat16 if self.autocast else None)
        form = page_format(model, options)
        forms: list[PagedForm] = [layer.attention.form for layer in self.layers]
        sparse = {place: one.blocks for place, one in enumerate(forms) if one.blocks is not None}
        if sparse and form.bits:
            raise ServingError(f"cache={options.cache}: bsa needs unquantised pages, expected auto, fp32, bf16 or fp16")
        self._choices = {place: (form.heads, blocks.chosen) for place, blocks in sparse.items()}
        sizes = {place: blocks.size for place, blocks in sparse.items()}
        longest = self._tokens(window.capacity)
        pages_bytes, sums_bytes = (
            form.bytes(longest, len(self.layers)),
            form.num_pages(longest) * BlockSums.page_bytes(form, sizes),
        )
        try:
            pool = hstu_sparse.PagePool.within(
                form,
                max(1, options.cache_bytes * pages_bytes // (pages_bytes + sums_bytes)),
                longest,
                layers=len(self.layers),
                device=self.device,
            )
        except ValueError:
            least = pages_bytes + sums_bytes
            raise ServingError(
                f"cache_bytes: a window of {longest:,} tokens takes {least:,} bytes, got {options.cache_bytes:,}"
            ) from None
        self.caches = Caches(pool, math.lcm(*(blocks.group for blocks in sparse.values())))
        self.sums = BlockSums(pool, sizes) if sizes else None
        # With bsa, the host reads results of the device within a pass, which a graph cannot do.
        self.padded = options.cuda_graphs and self.device.type == "cuda" and not sparse
        self.graphs = Graphs(self.device) if self.padded else None
        self._tables = contexts.tensors(self.device)
        self._widest = form.num_pages(longest) + (form.sink_tokens > 0)
        # No window is encoded ahead if windows slide every few events: each event would need a whole window.
        self._margin = margin if (margin := max(1, window.capacity // MARGIN)) < window.slide else 0
        self.encoded = self.ahead = 0  # tokens written to pages, and those among them that were encoded ahead

    @property
    def bytes_per_user(self) -> int:
        """The bytes of the pages and block sums of a user with a full window."""
        pool, tokens = self.caches.pool, self._tokens(self.window.capacity)
        sizes = {} if self.sums is None else self.sums.sizes
        sums_bytes = pool.format.num_pages(tokens) * BlockSums.page_bytes(pool.format, sizes)
        return pool.format.bytes(tokens, pool.layers) + sums_bytes

    @property
    def page_bytes(self) -> int:
        """The bytes of all pages and block sums."""
        return self.caches.pool.nbytes + (0 if self.sums is None else self.sums.nbytes)

    def catalogue_changed(self) -> None:
        """Drop the captured graphs: they contain the addresses of the item and feature tables."""
        if self.graphs is not None:
            self.graphs = Graphs(self.device)

    def restored(self) -> None:
        """Compute the block sums of pages that were read from a file."""
        entries = [entry for entry in self.caches.entries.values() if entry.length]
        if self.sums is None or not entries:
            return
        tables = np.stack([entry.table(self._widest) for entry in entries])
        pages, lengths = (torch.from_numpy(x).to(self.device) for x in (tables, np.array([e.length for e in entries])))
        for one in range(len(entries)):
            for layer in self.sums.sizes:
                self.sums.write(layer, pages[one : one + 1], torch.zeros_like(lengths[:1]), lengths[one : one + 1])

    @property
    def statistics(self) -> dict[str, int]:
        """Return counts by name: users with pages, pinned users, pages in use, bytes of pages and so on."""
        caches, pool = self.caches, self.caches.pool
        return {
            "users_with_pages": len(caches.entries),
            "users_pinned": len(caches.pinned),
            "pages": pool.num_pages,
            "pages_in_use": pool.num_pages - pool.free_pages,
            "page_bytes": self.page_bytes,
            "bytes_per_user": self.bytes_per_user,
            "evictions": caches.evictions,
            "tokens_encoded": self.encoded,
            "tokens_encoded_ahead": self.ahead,
            "windows_ahead": len(caches.ahead),
        }

    @property
    def description(self) -> dict:
        """The format of the pages, and the bytes of a full window in this format and in bf16."""
        form, layers, tokens = self.caches.pool.format, len(self.layers), self._tokens(self.window.capacity)
        whole = hstu_sparse.PageFormat(form.heads, form.head_size, form.value_size, torch.bfloat16)
        facts: dict[str, Any] = {"cache": str(form.dtype).removeprefix("torch.")}
        if form.bits:
            facts = {"cache": f"{form.bits}bit", "sink_tokens": form.sink_tokens, "clip": form.clip}
        return facts | {"bytes_per_user": self.bytes_per_user, "bytes_per_user_bf16": whole.bytes(tokens, layers)}

    # The contents of pages.

    def _tokens(self, events: int) -> int:
        """Return the number of tokens of a window with this number of events, 0 if there are none."""
        return self.num_context + self.per_event * events if events > 0 else 0

    def _user_window(self, user: str, history: History) -> UserWindow:
        begin = self.window.begin(history.count)
        return UserWindow(user, history, begin, self._tokens(history.count - begin))

    def changed(self, user: str, history: History, unchanged: int) -> None:
        """Remove from the user's pages the tokens that a change of the history makes invalid.

        These are the tokens after the first `unchanged` events, and the token before them, whose query time changed.

        history: the history after the change.
        """
        entry = self.caches.entries.get(user)
        if entry is None:
            return
        begin = self.window.begin(history.count)
        if entry.begin != begin:
            self.caches.length(user, begin)
        for entry in (self.caches.entries[user], self.caches.ahead.get(user)):
            if entry is not None and entry.length >= self._tokens(unchanged - entry.begin):
                self.caches.cut(entry, max(0, self._tokens(unchanged - entry.begin) - 1))

    def encode_ahead(self, history_of: Callable[[str], History | None], most: int | None = None) -> int:
        """Encode the next windows of users whose windows slide within a few events, so that no request has to wait.

        most: encode at most this many tokens, by default AHEAD; history_of: returns a user's history. Only free pages
        are used.

        Returns the number of tokens, 0 if there is nothing to do.
        """
        caches, most = self.caches, most or AHEAD[self.device.type]
        pieces: list[Piece] = []
        while caches.soon and most > 0:
            user, _ = caches.soon.popitem(last=False)
            history, entry = history_of(user), caches.entries[user]
            if history is None or entry.begin != self.window.begin(history.count):
                continue
            begin = entry.begin + self.window.slide
            window = UserWindow(user, history, begin, self._tokens(history.count - begin))
            following = caches.reserve_ahead(user, begin, window.tokens)
            if following is not None and following.length < window.tokens - 1:
                stop = min(window.tokens - 1, max(self.num_context, following.length + most))
                pieces.append(Piece(window, following, following.length, stop))
                most -= stop - following.length
        if not pieces:
            return 0
        self._write(pieces)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that requests wait for one pass at most
        window, *_, stop = pieces[-1]
        if stop < window.tokens - 1:
            caches.soon[window.user] = None
            caches.soon.move_to_end(window.user, last=False)
        count = sum(stop - start for *_, start, stop in pieces)
        self.ahead += count
        return count

    def update(self, users: list[str], histories: list[History]) -> None:
        """Bring the pages of distinct users up to date; evict other users' pages if needed."""
        windows = [self._user_window(user, history) for user, history in zip(users, histories)]
        for chunk in self._chunks(windows, [0] * len(windows)):
            self._encode(windows[chunk])

    def _chunks(self, windows: list[UserWindow], num_outputs: list[int]):
        """Yield slices of users whose pages fit at the same time, with at most TOKENS outputs."""
        users, tokens = [window.user for window in windows], [window.tokens for window in windows]
        most, begin = TOKENS[self.device.type], 0
        while begin < len(users):
            fit = self.caches.fitting(users[begin:], tokens[begin:])
            if begin + fit == len(users) and sum(num_outputs[begin:]) <= most and len(set(users)) == len(users):
                yield slice(begin, len(users))
                return
            end, total, chosen = begin, 0, set()
            while end < begin + fit and (end == begin or total + num_outputs[end] <= most):
                # A ranking request writes the user's last token after the cached ones, so a pass has one of each user.
                if self.ranking and users[end] in chosen:
                    break
                chosen.add(users[end])
                total += num_outputs[end]
                end += 1
            yield slice(begin, end)
            begin = end

    def _encode(self, windows: list[UserWindow]) -> None:
        """Write the tokens missing from the pages of users; the pages of all of them must fit at the same time."""
        most = TOKENS[self.device.type]
        users, _, begins, tokens = zip(*windows)
        entries = self.caches.reserve(users, begins, tokens)
        pieces: list[Piece] = []
        room, done = most, set()
        for window, entry in zip(windows, entries):
            start, end = entry.length, window.tokens - 1
            if start >= end or window.user in done:
                continue
            done.add(window.user)
            if window.tokens > self._tokens(self.window.capacity - self._margin):
                self.caches.soon[window.user] = None
            while start < end:
                stop = min(end, start + room)
                # A window is encoded in one piece if it fits (see `PagedGroup.whole`).
                if stop < end and pieces:
                    stop = start
                else:
                    pieces.append(Piece(window, entry, start, stop))
                room -= stop - start
                if not room or stop == start:
                    self._write(pieces)
                    pieces, room = [], most
                start = stop
        if pieces:
            self._write(pieces)

    def _write(self, pieces: list[Piece]) -> None:
        if self.padded:
            few = [piece for piece in pieces if piece.stop - piece.start <= FEW]
            if few and len(few) < len(pieces):
                self._write(few)
                pieces = [piece for piece in pieces if piece.stop - piece.start > FEW]
        starts, stops = (np.array([piece[place] for piece in pieces]) for place in (2, 3))
        counts = stops - starts
        context = self.num_context
        if (counts == 1).all() and starts.min() >= context:
            seen = [piece.window for piece in pieces]
            events = [x.begin - x.history.first + (start - context) // self.per_event for x, _, start, _ in pieces]
            columns = single_tokens([x.history for x in seen], events, starts - context, self.per_event)
        else:
            order = np.argsort(starts > 0, kind="stable")
            pieces, starts, counts = [pieces[i] for i in order], starts[order], counts[order]
            seen = [piece.window for piece in pieces]
            columns = TokenColumns.joined(
                [
                    window_tokens(x.history, x.begin, start - context, stop - context, self.per_event)
                    for x, _, start, stop in pieces
                ]
            )
        origins = np.array([x.origin for x in seen], np.int64)
        entries = [piece.entry for piece in pieces]
        features = self._features(x.user for x in seen)
        _, choices = self._run(TokenBatch("write", entries, columns, origins, features, starts, counts))
        for place, (_, entry, _, stop) in enumerate(pieces):
            entry.length = stop
            if choices:
                entry.choices = {layer: choice[place] for layer, choice in choices.items()}
        self.encoded += len(columns.items)

    # Requests.

    def answer(self, requests: list[UserRequest], others: Sequence[tuple[str, History]] = ()) -> Tensor:
        """Return the outputs of requests, fp32, not normalised: [B, E]; for ranking, of all candidates, user by user.

        others: users whose pages are brought up to date in the same pass if they need only a few tokens.
        """
        windows = [self._user_window(request.user, request.history) for request in requests]
        counts = [1 if request.candidates is None else 1 + len(request.candidates) for request in requests]
        few, outputs = self._almost_current(others, {request.user for request in requests}), []
        for chunk in self._chunks(windows, counts):
            together = [*windows[chunk], *few]
            if few and self.caches.fitting([x.user for x in together], [x.tokens for x in together]) == len(together):
                self._encode([*few, *windows[chunk]])  # the requests' users last: most recently used
                few = []
            else:
                self._encode(windows[chunk])
            outputs.append(self._query(requests[chunk], windows[chunk]))
        if len(outputs) == 1:
            return outputs[0]
        size = self.model.embedding.position.shape[1]
        return torch.cat(outputs) if outputs else torch.zeros(0, size, device=self.device)

    def _almost_current(self, users: Sequence[tuple[str, History]], but: set[str]) -> list[UserWindow]:
        """Return the windows of users, except those in `but`, whose pages need at most FEW tokens."""
        seen = [self._user_window(user, history) for user, history in users if user in self.caches and user not in but]
        entries = [self.caches.entries[window.user] for window in seen]
        return [
            window
            for window, entry in zip(seen, entries)
            if entry.begin == window.begin and 0 < window.tokens - 1 - entry.length <= FEW
        ]

    def _query(self, requests: list[UserRequest], windows: list[UserWindow]) -> Tensor:
        histories, at = [request.history for request in requests], [request.at for request in requests]
        entries = [self.caches.entries[request.user] for request in requests]
        events, last = [len(history.items) - 1 for history in histories], np.array([x.tokens for x in windows]) - 1
        columns = single_tokens(histories, events, last - self.num_context, self.per_event, at)
        origins = np.array([x.origin for x in windows], np.int64)
        features = self._features(x.user for x in windows)
        if not self.ranking:
            one_each = np.ones(len(requests), np.int64)
            return self._run(TokenBatch("query", entries, columns, origins, features, last, one_each))[0]
        candidates = [cast(np.ndarray, request.candidates) for request in requests]
        counts, items = np.array([len(rows) for rows in candidates]), np.concatenate(candidates)
        codes = np.array([request.code for request in requests])
        return self._run(
            TokenBatch("rank", entries, columns, origins, features, last, counts, np.array(at), items, codes)
        )[0]

    def _features(self, users: Iterable[str]) -> np.ndarray:
        """Return the feature numbers of users, [B] int64, see `Contexts.user_number`."""
        return np.array([self.contexts.user_number(user) for user in users], np.int64)

    # Passes.

    def _run(self, batch: TokenBatch) -> tuple[Tensor, dict[int, Tensor]]:
        """Return (the outputs [.., E] of `TokenBatch.output_tokens`, `PagedPass.choices` after the pass).

        With CUDA graphs, passes of few tokens are padded to one of a few sizes and captured, then replayed.
        """
        if (tables := self.contexts.tensors(self.device)) != self._tables:
            self._tables = tables
            self.catalogue_changed()
        rows, has_sparse = [entry.table(self._widest) for entry in batch.entries], bool(self._choices)
        if not self.padded or not batch.small:
            sizes, whole = Sizes(batch.tokens, len(batch.entries), self._widest), (0, 0)
            served = PagedPass(self.caches.pool, [], choices=self._open_choices(batch.entries), sums=self.sums)
            if batch.kind == "write" and not has_sparse:
                whole = batch.whole
            numbers = batch.numbers(sizes, rows).to(self.device)
            out = self._pass(batch.kind, sizes, numbers, served, whole, batch.new_windows)
            return out[batch.output_tokens(sizes)], served.choices
        sizes = batch.padded_sizes(self._widest)
        call = lambda numbers: self._pass(batch.kind, sizes, numbers, PagedPass(self.caches.pool, []))
        if self.graphs is None:
            return call(batch.numbers(sizes, rows).to(self.device))[batch.output_tokens(sizes)], {}
        key = batch.kind, sizes
        out = self.graphs(key, call, batch.numbers(sizes, rows, self.graphs.staged(key, 0)))[batch.output_tokens(sizes)]
        return (out.clone() if len(out) else out), {}

    def _pass(
        self,
        kind: str,
        sizes: Sizes,
        numbers: Tensor,
        served: PagedPass,
        whole: tuple[int, int] = (0, 0),
        new_windows: bool = True,
    ) -> Tensor:
        """Write tokens to the pages, and return the outputs [T, E] of the tokens in `numbers` (`TokenBatch.numbers`).

        whole: for kind "write", `TokenBatch.whole`: the number of users without tokens in their pages, who come first,
        and the number of their tokens.
        new_windows: whether some tokens may be the first ones of a window.
        """
        columns, lengths, seen, at, offsets, pages = sizes.split(numbers)
        items, codes, times, query_times, places, origins, features = columns.unbind()
        total, users = sizes.tokens, sizes.users
        ones = torch.arange(total + 1, device=self.device)
        positions, num_context = places, None
        if self.num_context:
            positions, num_context = (places + 1).clamp(min=0), self.num_context * (pages[:, 0] >= 0)  # 0 for padding
            if new_windows and kind == "write":
                features = features[offsets[:-1].clamp(max=total - 1)]  # one number for each user
                last = self.num_context * (1 + sequence_ids(offsets, total))
                served.context = torch.where(places < 0, places + last, -1)
            else:
                features = features[:0]
        common: dict[str, Any] = dict(
            item_ids=items,
            timestamps=times,
            target_ids=torch.full_like(items, -1),
            query_timestamps=query_times,
            seq_offsets=ones,
            users=ones[:-1],
            cut=Cut(ones[:-1], positions, origins, cast(Any, None), None),  # one rank needs no plan
            served=served,
            num_context=self.num_context,
            **self.contexts.batch_columns(codes, features),
        )
        has_action = None
        if self.per_event == 2:
            has_action = places % 2 == 1
        elif self.ranking:  # the candidates follow after one token of each user
            has_action = ones[:-1] < (users if kind == "rank" else total)
        batch = ServedBatch(has_action=has_action, **common)

        def group(tokens: slice, rows: slice, begins: Tensor, candidates: bool, whole: bool = False) -> PagedGroup:
            group_times = times[tokens], query_times[tokens]
            context = None if num_context is None else num_context[rows]
            return PagedGroup(tokens, begins, pages[rows], lengths[rows], candidates, *group_times, whole, context)

        everyone, first = slice(0, users), slice(0, users)
        if kind == "query":
            served.groups = [group(slice(0, total), everyone, ones, True)]
        elif kind == "rank":
            candidates = PagedGroup(slice(users, total), offsets, pages, seen, True, at, at, num_context=num_context)
            served.groups = [group(first, everyone, ones[: users + 1], False), candidates]
        else:
            served.last = len(self.layers) - 1
            whole_users, whole_tokens = whole
            if whole_users:
                served.groups.append(
                    group(slice(0, whole_tokens), slice(0, whole_users), offsets[: whole_users + 1], False, True)
                )
            if whole_users < users:
                begins = offsets[whole_users:] - whole_tokens if whole_users else offsets
                served.groups.append(group(slice(whole_tokens, total), slice(whole_users, users), begins, False))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            return run(self.model, self.layers, batch)

    def _open_choices(self, entries: list[Entry]) -> dict[int, Tensor]:
        choices = {}
        for layer, shape in self._choices.items():
            none = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            known = [none if entry.choices is None else entry.choices[layer] for entry in entries]
            choices[layer] = torch.stack(known)
        return choices
