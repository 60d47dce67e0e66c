"""Check the attention kind `ring` in one process, the division of a batch among ranks, and softmax on a GPU."""

import pytest
import torch

from models.hstu import SequenceModel
from models.options import ModelConfig
from tests.data.test_batch import MoreBatch, more
from tests.models.test_hstu import CONFIG, NUM_ITEMS, make_batch
from training.ranks.processes import Ranks

LENGTHS = [5, 12, 1, 9]
PAIRS = {
    "hstu": (
        {"kind": "dense", "window_size": 4},
        {"inner": "hstu", "window_size": 4, "position_bias": True, "time_bias": True},
    ),
    "softmax": ({"kind": "softmax", "num_kv_heads": 1}, {"inner": "softmax", "num_kv_heads": 1}),
}


def model_of(attention, dtype=torch.float64):
    torch.manual_seed(3)
    return SequenceModel(ModelConfig.model_validate(CONFIG | {"attention": attention}), NUM_ITEMS).to(dtype)


@pytest.mark.parametrize("inner", PAIRS)
def test_without_a_ring_it_is_the_inner_kind(inner):
    plain, options = PAIRS[inner]
    one, other = model_of(plain), model_of({"kind": "ring"} | options)
    other.load_state_dict(one.state_dict())
    batch = make_batch(LENGTHS)
    torch.testing.assert_close(one(batch)[0], other(batch)[0], rtol=1e-6, atol=1e-6)


def test_a_window_of_the_softmax():
    """Two layers with a window of 3 let a token reach four tokens back, and not five."""
    model = model_of({"kind": "ring", "inner": "softmax", "window_size": 3})
    batch = make_batch([12])
    before = model(batch)[0]
    batch.item_ids[4] = (batch.item_ids[4] + 1) % NUM_ITEMS
    changed = (model(batch)[0] - before).abs().amax(1) > 1e-12
    assert changed.nonzero().flatten().tolist() == [4, 5, 6, 7, 8]


def test_parts_of_a_divided_batch():
    batch, parts = more(make_batch(LENGTHS), [2, 0, 1, 3]), []
    for rank in range(2):
        ranks = Ranks.__new__(Ranks)
        ranks.context, ranks.context_group, ranks.context_rank = 2, None, rank
        parts.append(ranks.cut(batch))
        part = parts[-1]
        assert part.cut.plan.tokens[rank] == part.num_tokens == int(part.seq_offsets[-1])
        for name in ("item_ids", "timestamps", "target_ids", "query_timestamps", "real", "tags"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[part.cut.index])
        for name in ("users", "weight", "words", "word_offsets"):
            assert torch.equal(getattr(part, name), getattr(batch, name))
        assert torch.equal(part.positions, batch.positions[part.cut.index])
        assert torch.equal(part.origins, batch.origins)
    assert sorted(torch.cat([p.cut.index for p in parts]).tolist()) == list(range(sum(LENGTHS)))
    assert isinstance(parts[0], MoreBatch) and abs(parts[0].num_tokens - parts[1].num_tokens) <= len(LENGTHS)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_softmax_kind_on_a_gpu(dropout):
    """The jagged GPU kernel equals padded attention on the CPU, except for the random dropout mask."""
    model = model_of({"kind": "softmax", "dropout": dropout, "num_kv_heads": 1}, torch.float32)
    batch = make_batch(LENGTHS)
    expected = model.eval()(batch)[0]
    actual = model.cuda()(batch.to("cuda"))[0]
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    trained = model.train()(batch.to("cuda"))[0]
    assert torch.equal(trained, actual) == (dropout == 0)
    trained.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
