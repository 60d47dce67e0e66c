"""Paged attention: what it means, in plain PyTorch, against the dense operator and against its definition."""

import dataclasses
import itertools

import pytest
import torch

from hstu_sparse import PageFormat, PagePool, RelativeBias, flash_attention, hstu_attention, paged_attention
from hstu_sparse.core.jagged import offsets_from_lengths
from hstu_sparse.core.mask import context_times
from tests.support.budgets import make_jagged, make_offsets, make_timestamps

H, D, V, N = 4, 16, 24, 160
LENGTHS = (40, 0, 1, 65, 16, 100)
PLAIN = PageFormat(H, D, V, torch.float64)
FORMATS = {
    "fp64": PLAIN,
    "fp32": dataclasses.replace(PLAIN, dtype=torch.float32),
    "bf16": dataclasses.replace(PLAIN, dtype=torch.bfloat16),
    "fp16": dataclasses.replace(PLAIN, dtype=torch.float16),
    "2 bits": dataclasses.replace(PLAIN, bits=2, sink_tokens=4, clip=0.75),
    "4 bits": dataclasses.replace(PLAIN, bits=4, head_group=4, quant_group=32),
    "8 bits": dataclasses.replace(PLAIN, bits=8, head_group=1, sink_tokens=20),
}


def tables(seed=9):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in (N, 60)]


class Users:
    """Tokens of some users and a pool that takes them portion by portion."""

    def __init__(self, format, lengths=LENGTHS, *, biased=True, dtype=torch.float64, room=0, layers=2, **call):
        self.format, self.lengths = format, list(lengths)
        sizes = (format.head_size, format.head_size, format.value_size)
        self.q, self.k, self.v = (
            make_jagged(lengths, (format.heads, size), dtype=dtype, seed=i) for i, size in enumerate(sizes)
        )
        self.times = make_timestamps(lengths)
        self.query_times = self.times + make_jagged(lengths, (), seed=5).abs().mul(1e4).long()
        self.begins = make_offsets(lengths).tolist()
        pages = sum(format.num_pages(length + room) for length in lengths)
        self.pool = PagePool(format, pages, layers=layers, num_sequences=len(lengths))
        self.rows = [self.pool.reserve([], length + room) for length in lengths]
        self.done = [0] * len(lengths)
        self.tables = [x.to(dtype) for x in tables()] if biased else [None, None]
        self.call = dict(layer=layers - 1) | call

    def append(self, counts, **options):
        """Return the outputs of the next tokens of each user, jagged."""
        index = [
            self.begins[b] + i for b, n in enumerate(counts) for i in range(self.done[b], self.done[b] + n)
        ]  # fmt: skip
        index = torch.tensor(index, dtype=torch.int64)
        where = make_offsets(counts), self.pool.table(self.rows), torch.tensor(self.done)
        self.pool.write_timestamps(self.times[index], *where)
        self.pool.write(self.call["layer"], self.k[index], self.v[index], *where, **options)
        bias = RelativeBias(*self.tables, self.times[index], self.query_times[index])
        out = self.attend(index, *where, bias, **options)
        self.done = [a + b for a, b in zip(self.done, counts)]
        return list(out.split(list(counts)))

    def attend(self, index, offsets, pages, lengths, bias, **options):
        q, k, v = self.q[index], self.k[index], self.v[index]
        return paged_attention(q, k, v, offsets, self.pool, pages, lengths, N, bias=bias, **self.call, **options)

    def at_once(self):
        return torch.cat(self.append(self.lengths))


def by_definition(users, softmax, window=N):
    """Compute one token at a time, from the rounded tokens before it and the unrounded token itself."""
    pool, offsets = users.pool, users.begins
    k, v = pool.read(users.call["layer"], pool.table(users.rows), torch.tensor(users.lengths), torch.float64)
    position, time = users.tables
    edges = torch.exp(0.301 * torch.arange(1, 60, dtype=torch.float64))
    result = []
    for b, e in itertools.pairwise(offsets):
        for t in range(b, e):
            keys, values = torch.cat((k[b:t], users.k[t : t + 1])), torch.cat((v[b:t], users.v[t : t + 1]))
            scores = torch.einsum("hd,shd->hs", users.q[t].double(), keys.double()) * users.q.shape[2] ** -0.5
            gaps = (users.query_times[t] - users.times[b : t + 1]).abs().double()
            scores = scores + position[torch.arange(t - b, -1, -1)] + time[torch.bucketize(gaps, edges, right=True)]
            scores, values = scores[:, -window:], values[-window:]
            weights = scores.softmax(-1) if softmax else torch.nn.functional.silu(scores) / N
            result.append(torch.einsum("hs,shv->hv", weights, values.double()))
    return torch.stack(result)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_sees_others_rounded_and_itself_as_it_is(name, activation):
    users = Users(FORMATS[name], activation=activation)
    torch.testing.assert_close(users.at_once(), by_definition(users, activation == "softmax"))


@pytest.mark.parametrize("window_size", [0, 7])
def test_pages_as_they_are_give_dense_attention(window_size):
    users = Users(PLAIN, window_size=window_size)
    options = dict(bias=RelativeBias(*users.tables, users.times, users.query_times), window_size=window_size)
    offsets = make_offsets(LENGTHS)
    torch.testing.assert_close(users.at_once(), hstu_attention(users.q, users.k, users.v, offsets, N, **options))


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("window_size", [0, 7])
def test_context_is_that_of_attention_without_pages(window_size, softmax):
    """In one call or in several; context has the time of the first event."""
    context, offsets = torch.tensor([3, 0, 1, 20, 16, 0]), make_offsets(LENGTHS)
    call = dict(num_context=context, window_size=window_size, activation="softmax" if softmax else "silu")
    users, parts = (Users(PLAIN, biased=not softmax, **call) for _ in range(2))
    bias = context_times(RelativeBias(*users.tables, users.times, users.query_times), context, offsets)
    for one in (users, parts):
        one.times, one.query_times = bias.timestamps, bias.query_timestamps
    out = users.at_once()
    tokens = users.q, users.k, users.v, offsets
    if softmax:
        window = window_size - 1, -1
        expected = flash_attention(*tokens, causal=True, num_context=context, window_size=window)
    else:
        expected = hstu_attention(*tokens, N, bias=bias, window_size=window_size, num_context=context)
    torch.testing.assert_close(out, expected)
    first, second = parts.append((3, 0, 1, 20, 16, 70)), parts.append((37, 0, 0, 45, 0, 30))
    torch.testing.assert_close(torch.cat([x for pair in zip(first, second) for x in pair]), out)


def test_context_comes_at_once():
    users = Users(PLAIN, num_context=torch.tensor([3, 0, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"num_context of sequence 0 must be from 0 to 2, .* its new tokens, got 3"):
        users.append((2, 0, 1, 1, 1, 1))


@pytest.mark.parametrize("name", ["fp64", "2 bits"])
def test_a_window(name):
    users = Users(FORMATS[name], activation="softmax", window_size=5)
    torch.testing.assert_close(users.at_once(), by_definition(users, True, window=5))


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("name", FORMATS)
def test_portions_do_not_matter(name, activation):
    whole = Users(FORMATS[name], activation=activation)
    expected = whole.at_once()
    users = Users(FORMATS[name], activation=activation)
    generator, parts = torch.Generator().manual_seed(3), [[] for _ in LENGTHS]
    while users.done != users.lengths:
        left = [n - done for n, done in zip(users.lengths, users.done)]
        counts = [min(n, int(torch.randint(0, 30, (), generator=generator))) for n in left]
        for part, out in zip(parts, users.append(counts)):
            part.append(out)
    torch.testing.assert_close(torch.cat([x for part in parts for x in part]), expected)
    for layer in range(2):
        for actual, expected_pages in zip(users.pool.tensors[layer].values(), whole.pool.tensors[layer].values()):
            assert torch.equal(actual, expected_pages)


def test_a_short_portion_beside_a_long_one():
    """Padding of a short sequence beside a nearly full one lies beyond N, where no table has an entry."""
    users, whole = (Users(PLAIN, (N, N)) for _ in range(2))
    first, second = users.append((N - 1, 1)), users.append((1, N - 1))
    torch.testing.assert_close(torch.cat([first[0], second[0], first[1], second[1]]), whole.at_once())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fp64", dict(activation="silu")),
        ("fp64", dict(activation="softmax", window_size=3, num_context=torch.tensor([3, 0, 0, 20, 8, 0]))),
        ("2 bits", dict(activation="silu", window_size=20)),
        ("2 bits", dict(activation="softmax")),
    ],
)
def test_candidates_see_the_pages_and_themselves(name, call):
    """Each candidate has the output of an only next token; later places of the pages do not count."""
    users = Users(FORMATS[name], **call)
    users.append([length // 2 for length in LENGTHS])
    counts = [length - length // 2 for length in LENGTHS]
    index = torch.cat([torch.arange(b + n // 2, b + n) for b, n in zip(users.begins, LENGTHS)])
    asking_times = torch.tensor([2_000_000_000 + 1000 * b for b in range(len(LENGTHS))])
    where = make_offsets(counts), users.pool.table(users.rows), torch.tensor(users.done)
    before = [x.clone() for x in users.pool.tensors[1].values()]
    out = users.attend(index, *where, RelativeBias(*users.tables, asking_times, asking_times + 50), candidates=True)
    assert all(torch.equal(x, y) for x, y in zip(before, users.pool.tensors[1].values()))
    for b, (first, last) in enumerate(itertools.pairwise(where[0].tolist())):
        one = [int(c == b) for c in range(len(LENGTHS))]
        for i in range(first, last):
            bias = RelativeBias(*users.tables, asking_times[b : b + 1], asking_times[b : b + 1] + 50)
            alone = users.attend(index[i : i + 1], make_offsets(one), *where[1:], bias)
            torch.testing.assert_close(out[i : i + 1], alone)


@pytest.mark.parametrize("name", ["fp32", "bf16", "2 bits"])
@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_an_order_of_candidates_does_not_matter_bit_for_bit(name, activation):
    format = dataclasses.replace(FORMATS[name], dtype=torch.float32)
    users = Users(format, dtype=torch.float32, activation=activation)
    users.at_once()
    counts = (37, 1, 0, 64, 5, 130)
    where = make_offsets(counts), users.pool.table(users.rows), torch.tensor(LENGTHS)
    index = torch.cat(
        [torch.randint(0, sum(LENGTHS), (n,), generator=torch.Generator().manual_seed(n)) for n in counts]
    )
    order = torch.cat(
        [first + torch.randperm(n, generator=torch.Generator().manual_seed(n)) for first, n in zip(where[0], counts)]
    )
    times = torch.full((len(LENGTHS),), 2_000_000_000)
    bias = RelativeBias(*users.tables, times)
    out, moved = (users.attend(i, *where, bias, candidates=True) for i in (index, index[order]))
    assert torch.equal(out[order], moved)


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_users_without_tokens_see_themselves(activation):
    users = Users(PLAIN, (0, 0, 0), biased=False, room=20, activation=activation)
    q, k, v = (make_jagged((3, 0, 1), (H, size), dtype=torch.float64, seed=i) for i, size in enumerate((D, D, V)))
    call = (make_offsets((3, 0, 1)), users.pool, users.pool.table(users.rows), torch.zeros(3, dtype=torch.int32), N)
    out = paged_attention(q, k, v, *call, candidates=True, activation=activation)
    scores = torch.nn.functional.silu((q * k).sum(-1, keepdim=True) * D**-0.5) / N
    torch.testing.assert_close(out, v if activation == "softmax" else scores * v)


def test_heads_that_are_no_power_of_two_are_padded():
    """The zeros change no product; codes are those of keys that are padded by hand."""
    format = PageFormat(2, 25, 25, torch.float64, bits=8)
    users = Users(format, (40, 3), activation="softmax")
    k, _ = users.pool.read(0, users.pool.table(users.rows), torch.tensor([0, 0]))
    assert k.shape == (0, 2, 25)
    out = users.at_once()
    torch.testing.assert_close(out, by_definition(users, True))
    exact = Users(PageFormat(2, 25, 25, torch.float64), (40, 3), activation="softmax").at_once()
    assert float((out - exact).abs().max()) < 0.02


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_nothing_new(lengths, offsets):
    users = Users(PLAIN, (5,) * len(lengths), biased=False)
    q, v = torch.zeros(0, H, D), torch.zeros(0, H, V)
    pages = users.pool.table(users.rows)
    zeros = torch.zeros(len(lengths), dtype=offsets)
    out = paged_attention(q, q, v, offsets_from_lengths(zeros), users.pool, pages, zeros, N)
    assert out.shape == (0, H, V)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(pool=3), TypeError, "pool must be a PagePool, got int"),
        (dict(q=torch.zeros(2, H, D + 1)), ValueError, "q must be"),
        (dict(v=torch.zeros(2, H, V).double()), TypeError, "v must be torch.float32, got torch.float64"),
        (dict(lengths=torch.tensor([4])), ValueError, "lengths must be"),
        (dict(lengths=torch.tensor([4, -1])), ValueError, "lengths must be at least 0, got -1"),
        (dict(lengths=torch.tensor([4, 32])), ValueError, "pages has room for 32 tokens of a sequence, got 33"),
        (dict(pages=torch.full((2, 2), 9, dtype=torch.int32)), ValueError, "pages must be from 0 to 3, got 9 to 9"),
        (dict(pages=torch.zeros(2, 2, dtype=torch.int64)), TypeError, "pages must be torch.int32"),
        (dict(window_size=-1), ValueError, "window_size must be at least 0, got -1"),
        (dict(layer=2), ValueError, "layer must be at most 1, got 2"),
        (dict(activation="relu"), ValueError, "activation must be silu or softmax"),
        (dict(candidates=1), TypeError, "candidates must be True or False"),
        (dict(max_seq_len=4), ValueError, "a sequence has 5 tokens with its new ones, more than max_seq_len=4"),
        (dict(bias=RelativeBias(torch.zeros(31))), ValueError, "bias.position must be"),
        (dict(bias=RelativeBias(time=torch.zeros(9), timestamps=torch.zeros(3).long())), ValueError, "timestamps must"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(change, error, message):
    format = PageFormat(H, D, V)
    pool = PagePool(format, 4, layers=2)
    pages = pool.table([pool.reserve([], 32), pool.reserve([], 32)])
    q, v = torch.zeros(2, H, D), torch.zeros(2, H, V)
    call = dict(q=q, k=q, v=v, q_offsets=make_offsets((1, 1)), pool=pool, pages=pages, lengths=torch.tensor([4, 0]))
    with pytest.raises(error, match=message) as caught:
        paged_attention(**call | dict(max_seq_len=32) | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [dict(bits=3), dict(bits=2, sparsity=0.5)])
def test_codes_that_only_rotatekv_attention_reads(options):
    pool = PagePool(PageFormat(H, D, D, **options), 4)
    q = torch.zeros(1, H, D)
    pages = pool.table([[]])
    with pytest.raises(ValueError, match=r"use hstu_sparse\.rotatekv_attention"):
        paged_attention(q, q, q, make_offsets((1,)), pool, pages, torch.tensor([0]), 32)
