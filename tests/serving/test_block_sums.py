"""Test the stored sums of blocks, which requests read in place of every token."""

import numpy as np
import pytest
import torch

from hstu_sparse import PageFormat, PagePool
from serving.block_sums import BlockSums
from tests.serving.plain import item_ids, make_config, make_model, serve
from tests.support.budgets import make_jagged, make_offsets

BSA = {"kind": "bsa", "block_size": 8, "block_counts": 3, "selection_group": 4, "window_size": 5}


@pytest.mark.parametrize("size", [1, 3, 8, 16, 24, 40])
def test_sums_equal_those_of_the_pages(size):
    """The sums do not depend on how tokens were written, or on the block and page sizes."""
    pool = PagePool(PageFormat(2, 16, 32), 30)
    lengths = [70, 0, 41]
    rows = [pool.reserve([], length) for length in lengths]
    table, sums = pool.table(rows), BlockSums(pool, {0: size})
    assert sums.nbytes == 30 * BlockSums.page_bytes(pool.format, {0: size})
    before = torch.zeros(3, dtype=torch.int64)
    for step, counts in enumerate(([33, 0, 1], [0, 0, 7], [37, 0, 33])):
        k, v = (make_jagged(counts, (2, width), seed=step) for width in (16, 32))
        pool.write(0, k, v, make_offsets(counts), table, before)
        sums.write(0, table, before, torch.tensor(counts))
        before = before + torch.tensor(counts)
    assert before.tolist() == lengths
    blocks = 80 // size
    complete_sums, begun = sums.read(0, table, before, blocks), sums.begun(0, table, before)
    stored = pool.read(0, table, before)
    for block_sums, open_sum, x in zip(complete_sums, begun, stored):
        for user, (begin, length) in enumerate(zip(np.cumsum([0, *lengths]).tolist(), lengths)):
            user_rows = x[begin : begin + length].transpose(0, 1)  # [H, L, ..]
            whole = length // size
            expected = user_rows[:, : whole * size].unflatten(1, (whole, size)).sum(2) if whole else user_rows[:, :0]
            torch.testing.assert_close(block_sums[user, :, :whole], expected)
            assert not block_sums[user, :, whole:].any()
            torch.testing.assert_close(open_sum[user, :, 0], user_rows[:, whole * size :].sum(1))


def test_a_request_reads_only_sums_and_its_chosen_blocks(monkeypatch):
    config = make_config(BSA, max_seq_len=64)
    served = serve(config, make_model(config), cache_bytes=2**22)
    rng = np.random.default_rng(0)
    items, times = item_ids()[rng.integers(0, 40, 50)], np.cumsum(rng.integers(0, 40_000, 50))
    served.append([1] * 49, items[:49], times[:49])
    expected = serve(config, served.model, cache_bytes=2**22)
    expected.append([1] * 50, items, times)
    scores = expected.score([1], [item_ids()], int(times[-1]) + 9)
    monkeypatch.setattr(PagePool, "read", None)
    served.append([1], items[49:], times[49:])
    np.testing.assert_allclose(served.score([1], [item_ids()], int(times[-1]) + 9), scores, atol=1e-6)


def test_the_budget_holds_pages_and_sums():
    config = make_config(BSA, max_seq_len=64)
    served = serve(config, make_model(config), cache_bytes=2**20)
    statistics = served.statistics
    assert 0.9 * 2**20 < statistics["page_bytes"] <= 2**20
    assert statistics["bytes_per_user"] == statistics["page_bytes"] // statistics["pages"] * 4
