"""Test the buffers of captured steps with a sharded table; captured_cases.py trains with them on GPUs."""

import torch

from models.losses import Negatives, Share
from training.ranks.losses import Prepared, Rows
from training.ranks.staged import Staged

TABLE = torch.randn(500, 8)


def prepared(ids: torch.Tensor, tokens: int) -> Prepared:
    """Return a share of `tokens` positions with three negatives each, all of them among the items `ids`."""
    share = Share(
        targets=torch.randint(len(ids), (tokens,)),
        drawn=Negatives(torch.randint(len(ids), (tokens, 3)), log_q=torch.rand(len(ids))),
        count=torch.tensor(7),
    )
    return Prepared(share, Rows(TABLE[ids].requires_grad_(), ids, torch.randint(len(ids), (tokens,))))


def test_a_step_finds_its_tensors_at_the_same_addresses_until_it_needs_more():
    staged, earlier = Staged(), None
    # Rows and tokens: the first step, one with fewer of both, one with more tokens, one with more rows.
    for count, tokens, replaced in [(200, 100, True), (100, 70, False), (100, 300, True), (400, 100, True)]:
        sample = prepared(torch.randperm(500)[:count], tokens)
        share, rows = staged.stage(sample)
        assert staged.replaced == replaced
        assert len(share.targets) == len(rows.inverse) == len(share.drawn.ids) >= tokens
        assert len(rows.values) == len(rows.ids) == len(share.drawn.log_q) >= count
        assert torch.equal(rows.values[rows.inverse[:tokens]], sample.rows.values[sample.rows.inverse])
        assert torch.equal(rows.values[share.targets[:tokens]], sample.rows.values[sample.share.targets])
        assert torch.equal(rows.ids[share.drawn.ids[:tokens]], sample.rows.ids[sample.share.drawn.ids])
        assert torch.equal(share.drawn.log_q[:count], sample.share.drawn.log_q)
        assert (share.targets[tokens:] == -1).all() and not rows.values[count:].any() and share.count == 7
        addresses = rows.values.data_ptr(), rows.values.grad.data_ptr(), share.targets.data_ptr()
        assert replaced or addresses == earlier
        earlier = addresses


def test_the_gradient_of_rows_is_that_of_one_step():
    staged = Staged()
    for _ in range(2):
        sample = prepared(torch.arange(100), 50)
        rows = staged.stage(sample).rows
        rows.values[rows.inverse[:50]].sum().backward()
        counts = torch.bincount(sample.rows.inverse, minlength=100)
        assert torch.equal(staged.buffers["gradient"][:100], counts[:, None].expand(-1, 8).float())


def test_graphs_share_the_memory_of_gradients():
    staged, weights = Staged(), [torch.ones(3, 4), torch.ones(()), torch.ones(2)]
    addresses = set()
    for value in (1.0, 2.0):
        for weight in weights[:2]:
            weight.grad = torch.full_like(weight, value)
        *gradients, none = staged.keep(weights)
        assert none is None and all(torch.equal(p.grad, buffer) for p, buffer in zip(weights, gradients))
        addresses.add(tuple(buffer.data_ptr() for buffer in gradients))
    assert len(addresses) == 1
