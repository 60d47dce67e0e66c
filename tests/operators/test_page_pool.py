"""The page pool: rows, what is written and read, its sizes, and its file."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hstu_sparse import PageFormat, PagePool, PoolFull, rotatekv_round_trip
from hstu_sparse.cache import files
from tests.support.budgets import make_jagged, make_offsets

CODES = dict(bits=2, sink_tokens=4)
FORMATS = {"bf16": PageFormat(2, 16, 32, torch.bfloat16), "2 bits": PageFormat(2, 16, 32, torch.float32, **CODES)}


def filled(format, lengths, layers=2):
    """Return (pool, rows) with random tokens."""
    pool = PagePool(format, 40, layers=layers, num_sequences=len(lengths))
    rows = [pool.reserve([], length) for length in lengths]
    where = make_offsets(lengths), pool.table(rows), torch.zeros(len(lengths), dtype=torch.int64)
    for layer in range(layers):
        k, v = (make_jagged(lengths, (2, size), seed=i + 5 * layer) for i, size in enumerate((16, 32)))
        pool.write(layer, k, v, *where)
    pool.write_timestamps(torch.arange(sum(lengths)), *where)
    return pool, rows


def read_all(pool, rows, lengths):
    where = pool.table(rows), torch.tensor(lengths)
    return [x for layer in range(pool.layers) for x in pool.read(layer, *where)] + [pool.read_timestamps(*where)]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_own_pages_through_any_operations(name):
    """No page has two owners and none is lost; a reserve that fails changes nothing."""
    pool, rng, rows = PagePool(FORMATS[name], 30, num_sequences=6), random.Random(0), {}
    sinks, refused = int(FORMATS[name].sink_tokens > 0), 0
    for _ in range(2000):
        user, length = rng.randrange(9), rng.choice((0, 1, 15, 16, 17, 60, 200))
        row = rows.get(user, [])
        before = pool.free_pages, pool.free_sequences
        if rng.random() < 0.5:
            try:
                rows[user] = pool.reserve(row, length)
            except PoolFull:
                refused += 1
                assert (pool.free_pages, pool.free_sequences) == before
            else:
                assert len(rows[user]) == max(len(row), -(-length // 16) + sinks * (length > 0))
                assert list(rows[user][: len(row)]) == list(row)
        else:
            rows[user] = pool.shrink(row, length)
            assert rows[user] == row[: -(-length // 16) + sinks if length else 0] or not row
        owned = [page for row in rows.values() for page in row[sinks:]]
        assert len(set(owned)) == len(owned) == 30 - pool.free_pages
        if sinks:
            owned = [row[0] for row in rows.values() if row]
            assert len(set(owned)) == len(owned) == 6 - pool.free_sequences
    assert refused > 20


def test_a_row_that_was_given_back_is_refused():
    pool = PagePool(FORMATS["bf16"], 4)
    row = pool.reserve([], 40)
    assert len(pool.shrink(row, 0)) == 0
    for call in (pool.shrink, pool.reserve):
        with pytest.raises(ValueError, match="is not in use; pass the last result of reserve or shrink"):
            call(row, 0)
    with pytest.raises(ValueError, match=r"row\[0\]=7 is not in use"):
        pool.shrink([7], 0)
    assert pool.free_pages == 4


@pytest.mark.parametrize("backend", ["reference"])
def test_codes_are_those_of_the_round_trip(backend):
    """Sinks come back as they are; k in another dtype than the pool's sinks is written as it is given."""
    lengths = (40, 3, 0, 20)
    pool, rows = filled(FORMATS["2 bits"], lengths, layers=1)
    k, v = (make_jagged(lengths, (2, size), seed=i) for i, size in enumerate((16, 32)))
    expected = rotatekv_round_trip(k, v, make_offsets(lengths), **CODES, backend=backend)
    for actual, expected_values in zip(read_all(pool, rows, lengths), expected):
        torch.testing.assert_close(actual, expected_values)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", FORMATS)
def test_padding_of_a_batch_is_dropped(name, backend):
    """New tokens of a sequence whose pages are -1 are not written; it must have no earlier tokens."""
    if backend == "triton" and name == "bf16":
        name, format = "fp32", PageFormat(2, 16, 32)
    else:
        format = FORMATS[name]
    pool, rows = filled(format, (20, 5, 1), layers=1)
    before = [x.clone() for x in (*pool.tensors[0].values(), pool.timestamps)]
    pages, offsets = torch.full((2, 4), -1, dtype=torch.int32), torch.tensor([0, 1, 40])
    k, v = make_jagged([40], (2, 16)), make_jagged([40], (2, 32))
    where = offsets, pages, torch.zeros(2, dtype=torch.int64)
    pool.write(0, k, v, *where, backend=backend)
    pool.write_timestamps(torch.arange(40), *where, backend=backend)
    assert all(map(torch.equal, before, (*pool.tensors[0].values(), pool.timestamps)))
    # Other sequences of the same batch are written.
    pages[0, : len(rows[0])] = pool.table(rows[:1])[0]
    pool.write(0, k, v, offsets, pages, torch.tensor([20, 0]), backend=backend)
    pool.write_timestamps(torch.full((40,), 1000), offsets, pages, torch.tensor([20, 0]), backend=backend)
    assert pool.read_timestamps(pages[:1], torch.tensor([21]))[-1] == 1000
    assert sum(int((x != y).sum()) for x, y in zip(before, (*pool.tensors[0].values(), pool.timestamps))) > 1
    assert all(map(torch.equal, before[-1:], [pool.timestamps.masked_fill(pool.timestamps == 1000, 0)]))
    with pytest.raises(ValueError, match="pages must be from 0 to 39, got -1 to"):
        pool.write(0, k, v, offsets, pages, torch.tensor([20, 1]))


def test_numbers_that_do_not_fit_are_refused_and_small_ones_are_not():
    k, v = torch.full((1, 2, 16), 1e6), torch.full((1, 2, 32), 1e6)
    for format, message in (
        (PageFormat(2, 16, 32, torch.float16), "k must fit in float16 pages, up to 65504, got 1e"),
        (PageFormat(2, 16, 32, bits=8), "v must fit in fp16 scales"),
    ):
        pool = PagePool(format, 2)
        where = torch.tensor([0, 1]), pool.table([pool.reserve([], 1)]), torch.tensor([0])
        with pytest.raises(ValueError, match=message):
            pool.write(0, k, v, *where)
        pool.write(0, k * 1e-14, v * 1e-14, *where)


def test_sizes_are_what_is_allocated():
    for format in FORMATS.values():
        pool = PagePool(format, 7, layers=3, num_sequences=2)
        sinks = 2 * format.sequence_bytes
        assert pool.nbytes == 3 * (7 * format.page_bytes + sinks) + 7 * format.timestamp_bytes
        for budget in (121_472, 123_457, 1_000_000):
            pool = PagePool.within(format, budget, 200, layers=3)
            assert budget - pool.nbytes < format.bytes(200, 3) and pool.nbytes <= budget
            rows = []
            for _ in range(budget // format.bytes(200, 3)):
                rows.append(pool.reserve([], 200))
            with pytest.raises(PoolFull):
                pool.reserve([], 200)
    with pytest.raises(ValueError, match=r"num_bytes must be at least .* for a sequence of 200 tokens"):
        PagePool.within(format, 1000, 200)


def test_codes_take_a_sixth_of_bf16():
    """Check the ratio that capacity planning assumes, for heads of 64, two bits and four sinks."""
    full = PageFormat(4, 64, 64, torch.bfloat16)
    codes = PageFormat(4, 64, 64, torch.bfloat16, bits=2, sink_tokens=4)
    assert full.bytes(200, 8) > 5 * codes.bytes(200, 8)
    assert full.bytes(4096, 8) > 6 * codes.bytes(4096, 8)
    published = PageFormat(2, 25, 25, torch.bfloat16), PageFormat(2, 25, 25, torch.bfloat16, bits=2, sink_tokens=4)
    assert published[0].bytes(200, 8) > 4 * published[1].bytes(200, 8)


@pytest.mark.parametrize("name", FORMATS)
def test_file(tmp_path, name):
    lengths = [40, 0, 3, 17]
    pool, rows = filled(FORMATS[name], lengths)
    rows[0] = pool.shrink(rows[0], 30)
    pool.save(tmp_path / "pool", rows[::-1], [17, 3, 0, 30])
    back, again, stored_lengths = PagePool.load(tmp_path / "pool", num_pages=9)
    assert (back.format, back.layers, back.num_pages, stored_lengths) == (pool.format, 2, 9, [17, 3, 0, 30])
    assert all(map(torch.equal, read_all(back, again, stored_lengths), read_all(pool, rows[::-1], stored_lengths)))
    assert PagePool.load(tmp_path / "pool")[0].num_pages == 40
    with pytest.raises(PoolFull):
        PagePool.load(tmp_path / "pool", num_pages=4)


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        (lambda a, b: [a, a], [5, 5], "rows must not share pages"),
        (lambda a, b: [a, b], [5, 21], "the row of 21 tokens must have 3 entries, got 2"),
        (lambda a, b: [a], [5, 5], "lengths must have one entry for each of 1 rows, got 2"),
        (lambda a, b: [a, [99, 98]], [5, 5], "is not in use"),
    ],
)
def test_rows_that_do_not_fit_are_not_saved(tmp_path, rows, lengths, message):
    pool, indices = filled(FORMATS["2 bits"], (5, 16))
    with pytest.raises(ValueError, match=message):
        pool.save(tmp_path / "pool", rows(*indices), lengths)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "tensors", "message"),
    [
        (lambda facts: [1], lambda x: None, "the metadata must have exactly"),
        (lambda facts: facts.update(layers=3), lambda x: None, "the tensors do not match the metadata"),
        (lambda facts: facts.update(layers=-1), lambda x: None, "layers must be at least 1"),
        (lambda facts: facts.update(num_pages=2.5), lambda x: None, "num_pages must be a whole number"),
        (lambda facts: facts.update(num_pages=1), lambda x: None, "num_pages must be at least 3, got 1"),
        (lambda facts: facts["format"].update(dtype="int8"), lambda x: None, "dtype must be floating point, got int8"),
        (lambda facts: facts["format"].update(bits=5), lambda x: None, "bits must be one of"),
        (lambda facts: facts["format"].update(heads=4), lambda x: None, r"0.k_codes must be"),
        (lambda facts: facts["format"].update(more=4), lambda x: None, "more"),
        (lambda facts: None, lambda x: x["lengths"].add_(16), "must be"),
        (lambda facts: None, lambda x: x["lengths"].sub_(18), "all at least 0"),
        (lambda facts: None, lambda x: x.update(lengths=torch.tensor([1.0])), "int64, all at least 0"),
    ],
)  # fmt: skip
def test_forged_file_is_refused_in_one_line(tmp_path, change, tensors, message):
    """A forged file has a valid checksum, as other code could write it."""
    path = tmp_path / "pool"
    pool, rows = filled(FORMATS["2 bits"], (17, 3))
    pool.save(path, rows, [17, 3])
    with safe_open(path, framework="pt") as file:
        facts, entries = json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = change(facts) or facts
    tensors(entries)
    text = json.dumps(facts)
    save_file(entries, path, {"format": files.FORMAT, "facts": text, "sha256": files.checksum(text, entries)})
    with pytest.raises(ValueError, match=message) as caught:
        PagePool.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "another", "missing"])
def test_damaged_file_is_refused_in_one_line(tmp_path, damage):
    path = tmp_path / "pool"
    pool, rows = filled(FORMATS["bf16"], (17, 3))
    pool.save(path, rows, [17, 3])
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(whole[:-7])
    elif damage == "flipped":
        whole[-9] ^= 4
        path.write_bytes(whole)
    elif damage == "another":
        save_file({"a": torch.zeros(1)}, path)
    else:
        path.unlink()
    with pytest.raises(ValueError, match="pool: ") as caught:
        PagePool.load(path)
    assert "\n" not in str(caught.value)
