"""The kernels of paged attention and of the page pool, in Triton's interpreter."""

import pytest
import torch

from hstu_sparse import PageFormat, PagePool, RelativeBias, paged_attention
from hstu_sparse.core.launch import INTERPRET
from tests.random.cases import operator
from tests.random.cases.paged import launched_with
from tests.support.budgets import make_jagged, make_offsets, make_timestamps

pytestmark = pytest.mark.skipif(not INTERPRET, reason="kernels on a CPU need TRITON_INTERPRET=1")

LENGTHS = dict(lengths=(40, 0, 1, 33), query_lengths=(3, 2, 1, 0))
BIASED = dict(position=True, timed=True)
CODES = dict(bits=2, sink_tokens=4, head_group=2)
CASES = {
    "append": dict(LENGTHS, **BIASED),
    "append, softmax, parts": dict(LENGTHS, softmax=True, splits=2, **BIASED),
    "candidates": dict(LENGTHS, candidates=True, **BIASED),
    "candidates, softmax, parts": dict(LENGTHS, candidates=True, softmax=True, splits=3, timed=True),
    "many": dict(lengths=(30, 2), query_lengths=(17, 40), softmax=True, **BIASED),
    "many candidates": dict(lengths=(30, 2), query_lengths=(17, 40), candidates=True, contiguous=False),
    "odd heads": dict(LENGTHS, head_size=25, value_size=33, stored="float16"),
    "nothing cached": dict(lengths=(0, 0), query_lengths=(1, 3), candidates=True, softmax=True),
    "window, append, parts": dict(
        lengths=(70, 20, 3), query_lengths=(3, 30, 0), window=18, softmax=True, splits=2, **BIASED
    ),
    "window, candidates": dict(LENGTHS, candidates=True, window=1, **BIASED),
    "window, 2 bits": dict(LENGTHS, bits=2, head_group=2, sink_tokens=18, window=24, splits=2, timed=True),
    "context, window, append, parts": dict(
        lengths=(70, 0, 3), query_lengths=(2, 20, 1), context=18, window=5, softmax=True, splits=2, **BIASED
    ),
    "context, candidates, 2 bits": dict(
        LENGTHS, candidates=True, context=17, window=3, bits=2, sink_tokens=4, head_group=2, **BIASED
    ),
    "2 bits": dict(LENGTHS, bits=2, head_group=2, sink_tokens=4, clip=0.75, **BIASED),
    "2 bits, parts": dict(LENGTHS, bits=2, head_group=2, sink_tokens=4, splits=2, softmax=True, candidates=True),
    "2 bits, many": dict(lengths=(30, 2), query_lengths=(17, 40), bits=2, head_group=2, sink_tokens=18, softmax=True),
    "4 bits, odd heads": dict(LENGTHS, bits=4, head_group=4, head_size=25, value_size=24, position=True),
    "8 bits, values across blocks": dict(
        lengths=(30, 2), query_lengths=(17, 40), bits=8, head_group=4, value_size=24, quant_group=32, candidates=True
    ),
}


# Marked slow: test_dropped_tokens_are_not_read writes and reads in the same way.
LONG = "2 bits, many"


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == LONG else []) for x in CASES])
def test_kernels_agree_with_the_reference(name):
    operator("paged").check("cpu", **dict(groups=1, head_size=16, value_size=16) | CASES[name])


@pytest.mark.parametrize(
    ("new", "options"),
    [
        ((3, 2, 13), {}),
        ((17, 40, 40), CODES),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (((3, 2, 13), CODES), ((17, 40, 40), {}))),
    ],
)
def test_dropped_tokens_are_not_read(options, new):
    """New tokens in a page of -1 are not stored: later tokens do not read them, and all other results are right.

    Padding sees itself alone, also in a pool without pages.
    """
    lengths = (20, 0, 5)  # the second sequence is padding, the third has one page of 16 tokens
    pool = PagePool(PageFormat(2, 16, 16, **options), 4, num_sequences=3)
    rows = [pool.reserve([], lengths[0] + new[0]), [], pool.reserve([], 16)]
    pages = torch.full((3, 4), -1, dtype=torch.int32)
    for row, page in zip(rows, pages):
        page[: len(row)] = torch.tensor(row)
    n, q_offsets = torch.tensor(lengths), make_offsets(new)
    pool.write(0, *(make_jagged(lengths, (2, 16), seed=i) for i in range(2)), make_offsets(lengths), pages, n * 0)
    q, k, v = (make_jagged(new, (2, 16), seed=i) for i in range(2, 5))
    times = torch.arange(sum(new))
    pool.write(0, k, v, q_offsets, pages, n, backend="triton")
    pool.write_timestamps(times, q_offsets, pages, n, backend="triton")
    bias = RelativeBias(make_jagged([100], ()), make_jagged([60], ()), times, times + 40)
    out, expected = (
        paged_attention(q, k, v, q_offsets, pool, pages, n, 100, activation="softmax", bias=bias, backend=backend)
        for backend in ("triton", "reference")
    )
    assert out.isfinite().all()
    right = slice(0, int(q_offsets[2]) + 12)
    torch.testing.assert_close(out[right], expected[right])
    assert torch.equal(out[new[0] : new[0] + new[1]], v[new[0] : new[0] + new[1]])
    nowhere = PagePool(pool.format, 0), pages.fill_(-1), n * 0, 100
    for backend in ("triton", "reference"):
        assert torch.equal(paged_attention(q, k, v, q_offsets, *nowhere, activation="softmax", backend=backend), v)


@pytest.mark.parametrize(
    "call",
    [
        dict(),
        dict(activation="softmax", splits=2, timed=False),
        CODES,
        pytest.param(dict(activation="softmax", splits=2), marks=pytest.mark.slow),
        pytest.param(dict(timed=False), marks=pytest.mark.slow),
    ],
)
def test_one_new_token_is_a_candidate_bit_for_bit(call):
    """A bias computed once for each position is the bias of each pair."""
    call = dict(call)
    splits, timed, activation = (call.pop(x, y) for x, y in dict(splits=1, timed=True, activation="silu").items())
    lengths, heads, size = (70, 0, 1), 2, 16
    pool = PagePool(PageFormat(heads, size, size, torch.float32, **call), 20, num_sequences=3)
    pages = pool.table([pool.reserve([], n + 1) for n in lengths])
    n, zero, ones = torch.tensor(lengths), torch.zeros(3, dtype=torch.int64), make_offsets([1] * 3)
    k, v = (make_jagged(lengths, (heads, size), seed=i) for i in range(2))
    pool.write(0, k, v, make_offsets(lengths), pages, zero, backend="triton")
    pool.write_timestamps(make_timestamps(lengths), make_offsets(lengths), pages, zero)
    q, k, v = (make_jagged([1] * 3, (heads, size), seed=i) for i in range(2, 5))
    times = torch.tensor([2**31, 5, 7])
    bias = RelativeBias(make_jagged([80], ()), make_jagged([60], ()) if timed else None, times, times + 40)

    def out(candidates):
        with launched_with(splits):
            return paged_attention(
                q, k, v, ones, pool, pages, n, 80, candidates=candidates, bias=bias, activation=activation,
                backend="triton",
            )  # fmt: skip

    assert torch.equal(out(False), out(True))
