"""Check losses and their gradients against plain sums, with logits of the whole catalogue and of gathered rows."""

import math

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import catalogue_loss
from models import chunks, losses
from models.losses import Share, excluded_items
from models.options import LossConfig
from tests.models.test_hstu import NUM_ITEMS, make_batch

T, E, I = 37, 6, 23


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    out = F.normalize(torch.randn(T, E, generator=generator), dim=-1).requires_grad_()
    items = torch.randn(I, E, generator=generator).requires_grad_()
    return out, items, torch.randint(I, (T,), generator=generator)


def config(kind, **options):
    return LossConfig.model_validate({"kind": kind, "num_negatives": 5, **options})


def training_loss(c, out, items, targets, **options):
    """Compute the loss with drawn negatives."""
    share = Share(targets, losses.draw_negatives(c, len(items), targets))
    return losses.training_loss(c, out, items, share, **options)


def by_hand(c, out, items, targets):
    """Compute the loss one position at a time, from the same random numbers."""
    rows = {"shared": (), "block": (5,), "per_position": (T,)}[c.negatives]
    if c.kind == "in_batch":
        negatives = targets[torch.randint(2**62, (*rows, 5)) % T]
    elif c.kind == "mixed_negatives":
        in_batch = targets[torch.randint(2**62, (*rows, 2)) % T]
        negatives = torch.cat([in_batch, torch.randint(I, (*rows, 3))], -1)
    else:
        negatives = torch.randint(I, (*rows, 5))
    if c.negatives == "block":
        negatives = torch.stack([negatives[t % 5] for t in range(T)])
    negatives = negatives.expand(T, 5)
    probability = [2 / 5 * (targets == i).sum().item() / T + 3 / 5 / I for i in range(I)]
    items = items / items.norm(dim=1, keepdim=True)
    total = 0.0
    for t in range(T):
        logits = items @ out[t] / c.temperature
        positive = logits[targets[t]]
        if c.kind == "cross_entropy":
            total = total + logits.exp().sum().log() - positive
            continue
        rivals = negatives[t][negatives[t] != targets[t]]
        values = logits[rivals]
        if c.kind == "mixed_negatives":
            values = values - torch.tensor([math.log(5 * probability[i]) for i in rivals])
        if c.kind == "bce":
            total = total - F.logsigmoid(positive) - F.logsigmoid(-values).sum() / max(1, len(values))
        else:
            total = total + torch.cat([positive[None], values]).exp().sum().log() - positive
    return total / T


KINDS = ["sampled_softmax", "in_batch", "mixed_negatives", "bce", "cross_entropy"]


@pytest.mark.parametrize("form", ["per_position", "block", "shared"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "gathered rows"])
@pytest.mark.parametrize("chunk", [2**20, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(inputs, kind, chunk, whole, form, monkeypatch):
    out, items, targets = inputs
    monkeypatch.setitem(chunks.CHUNK, "cpu", chunk)
    monkeypatch.setattr(losses, "BLOCK", 8)
    if not whole or form != "per_position":
        if kind == "cross_entropy" or (whole and form != "per_position"):
            pytest.skip("one way only")
        monkeypatch.setattr(losses, "takes_whole_catalogue", lambda *_: False)
    chosen = config(kind, temperature=0.5, negatives=form, in_batch_share=0.4)
    torch.manual_seed(3)
    loss = training_loss(chosen, out, items, targets)
    actual = torch.autograd.grad(2 * loss, (out, items))
    torch.manual_seed(3)
    expected = by_hand(chosen, out, items, targets)
    gradients = torch.autograd.grad(2 * expected, (out, items))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, a, b in zip(("out", "items"), actual, gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_label_smoothing_spreads_a_share_of_the_target(inputs, device):
    out, items, targets = inputs
    plain, smooth = (config("cross_entropy", temperature=0.5, label_smoothing=share) for share in (0.0, 0.3))
    logits = out @ (items / items.norm(dim=1, keepdim=True)).T / 0.5
    logs = logits.log_softmax(1)
    target_logs = logs[torch.arange(T), targets]
    for chosen, expected in ((plain, target_logs), (smooth, 0.7 * target_logs + 0.3 * logs.mean(1))):
        actual = training_loss(chosen, out.to(device), items.to(device), targets.to(device))
        torch.testing.assert_close(actual.cpu(), -expected.mean(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="label_smoothing is for kind=cross_entropy"):
        config("in_batch", label_smoothing=0.1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_temperature_gets_its_gradient(inputs, kind, device):
    """Compare the gradient with a finite difference."""
    out, items, targets = (x.detach().to(device) for x in inputs)

    def loss(temperature):
        torch.manual_seed(3)
        return training_loss(config(kind), out, items, targets, temperature=temperature)

    middle = torch.tensor(0.3, device=device, requires_grad=True)
    value = loss(middle)
    (gradient,) = torch.autograd.grad(value, middle)
    below, above = loss(torch.tensor(0.299, device=device)), loss(torch.tensor(0.301, device=device))
    torch.testing.assert_close(value, (below + above) / 2, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(gradient, (above - below) / 0.002, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["per_position", "block", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_equals_cpu(inputs, kind, form, monkeypatch):
    """Compare the operator with the chunked loss for the same negatives."""
    out, items, targets = inputs
    targets = F.pad(targets, (0, 3), value=-1)
    out = F.pad(out.detach(), (0, 0, 0, 3))
    chosen = config(kind, negatives=form)
    drawn = losses.draw_negatives(chosen, I, targets)
    results = []
    for device in ("cpu", "cuda"):
        moved = drawn
        if drawn is not None:
            log_q = None if drawn.log_q is None else drawn.log_q.to(device)
            moved = drawn._replace(ids=drawn.ids.to(device), log_q=log_q)
        monkeypatch.setattr(losses, "draw_negatives", lambda *_, moved=moved: moved)
        x, y = out.to(device).requires_grad_(), items.detach().to(device).requires_grad_()
        loss = training_loss(chosen, x, y, targets.to(device))
        results.append([z.detach().cpu() for z in (loss, *torch.autograd.grad(loss, (x, y)))])
    # The operator normalises `out`.
    along = (results[0][1] * out).sum(1, keepdim=True) * out
    results[0][1] -= along if kind != "bce" else 0
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("kind", ["sampled_softmax", "mixed_negatives", "bce"])
def test_a_block_has_the_loss_of_its_positions(inputs, kind, uneven, monkeypatch):
    """Compare with a row of negatives for each position; of uneven blocks, two have most positions and one has none."""
    monkeypatch.setitem(chunks.CHUNK, "cpu", 100)  # tiles in two chunks
    out, items, targets = inputs
    targets[::5] = -1
    ids = torch.randint(I, (4, 5))
    ids[:, 2] = targets[[4, 4, 2, 3]]
    block = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3, 2, 0]).repeat(4)[:T] if uneven else None
    drawn = losses.Negatives(ids, torch.linspace(-3, -1, I) if kind == "mixed_negatives" else None, block)
    temperature, results = torch.tensor(0.3, requires_grad=True), []
    for each in (drawn, drawn._replace(ids=drawn.per_position(T), block=None)):
        loss = losses.training_loss(config(kind), out, items, Share(targets, each), temperature=temperature)
        results.append((loss, *torch.autograd.grad(loss, (out, items, temperature))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    index = torch.tensor([36, 4, 7])
    part = Share(targets, drawn).part(index)
    assert torch.equal(part.targets, targets[index])
    if not uneven:
        assert torch.equal(part.drawn.per_position(3), drawn.per_position(T)[index])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("uneven", [False, True])
def test_positions_of_a_block_in_succession_have_their_negatives(device, uneven):
    """The loss of blocks, as a GPU computes it, is that of each position's own row of negatives."""
    out, items = torch.randn(300, 4, device=device), torch.randn(I, 4, device=device)
    targets = torch.randint(-1, I, (300,), device=device)
    drawn = losses.draw_negatives(LossConfig(negatives="block", num_negatives=3), I, targets)
    assert drawn.ids.shape == (3, 3) and torch.equal(drawn.per_position(300)[[4, 298]], drawn.ids[[1, 1]])
    if uneven:  # more positions than a tile has, only some, and none
        drawn = drawn._replace(block=2 * (torch.arange(300, device=device) % 9 == 0).long())
    expected = catalogue_loss(out, items, targets, temperature=1.0, negatives=drawn.per_position(300))
    places, ids, size = drawn.tiles(300, 128)
    assert size == 128 and len(ids) == (5 if uneven else 3)
    x = out.new_zeros(len(ids) * size, 4).index_copy_(0, places, out)
    y = targets.new_full((len(x),), -1).index_copy_(0, places, targets)
    actual = catalogue_loss(x, items, y, temperature=1.0, negatives=ids, block=size)
    torch.testing.assert_close(actual, expected)
    if device == "cuda":
        share = Share(targets, drawn)
        torch.testing.assert_close(
            losses.training_loss(config("sampled_softmax", temperature=1.0), out, items, share), expected
        )


@pytest.mark.parametrize(("positions", "blocks"), [(1, 1), (300, 3), (65_536, 64), (65_537, 65)])
def test_number_of_blocks(positions, blocks):
    assert losses.block_count(positions) == blocks


def test_mixed_negatives_need_both_kinds():
    with pytest.raises(ValueError, match="must leave at least one in-batch and one uniform negative"):
        config("mixed_negatives", in_batch_share=0.05)


def test_negative_equal_to_the_positive_does_not_count():
    # With a single item, all negatives equal the positive, which then has probability one.
    out, items = torch.ones(3, 1), torch.ones(1, 1)
    loss = training_loss(config("sampled_softmax"), out, items, torch.zeros(3, dtype=torch.long))
    assert loss.item() == 0


def test_no_second_derivative(inputs, monkeypatch):
    monkeypatch.setitem(chunks.CHUNK, "cpu", 300)
    out, items, targets = inputs
    loss = training_loss(config("sampled_softmax", negatives="per_position"), out, items, targets)
    with pytest.raises(RuntimeError, match="a sum over chunks of rows has no second derivative"):
        torch.autograd.grad(loss, out, create_graph=True)


def test_untrained_loss_is_that_of_a_uniform_distribution():
    out, items = F.normalize(torch.randn(200, 16), dim=-1), torch.randn(5000, 16)
    loss = training_loss(config("sampled_softmax", temperature=100.0), out, items, torch.randint(5000, (200,)))
    assert loss.item() == pytest.approx(math.log(6), rel=1e-2)


@pytest.mark.parametrize("form", ["per_position", "block", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_count(inputs, kind, form):
    if kind == "mixed_negatives" and form == "per_position":
        pytest.skip("the second draw begins where the first, of another size, ends")
    out, items, targets = inputs
    rows = torch.cat([out, out[:9]])
    padded = F.pad(targets, (0, 9), value=-1)
    results = []
    for x, y in ((out, targets), (rows, padded)):
        torch.manual_seed(5)
        loss = training_loss(config(kind, negatives=form), x, items, y)
        results.append((loss, *torch.autograd.grad(loss, (out, items), retain_graph=True)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["per_position", "block", "shared"])
@pytest.mark.parametrize("kind", ["in_batch", "mixed_negatives"])
def test_negatives_of_the_batch_are_targets_wherever_tokens_have_none(kind, form):
    """Tokens without a target that are not padding are never drawn; every target can be."""
    targets = torch.tensor([-1, 3, -1, -1, 7, 5, -1, 3, -1])
    chosen = config(kind, negatives=form, in_batch_share=0.6)
    drawn = set()
    for seed in range(50):
        torch.manual_seed(seed)
        ids, log_q, _ = losses.draw_negatives(chosen, I, targets)
        ids = ids[..., :3] if kind == "mixed_negatives" else ids
        drawn |= set(ids.flatten().tolist())
    assert drawn == {3, 5, 7}
    if log_q is not None:
        torch.testing.assert_close(log_q[[3, 5, 0]].exp(), 0.6 * torch.tensor([0.5, 0.25, 0]) + 0.4 / I)


def test_no_position_gives_zero():
    items = torch.randn(I, E, requires_grad=True)
    loss = training_loss(config("sampled_softmax"), torch.empty(0, E), items, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0 and items.grad.abs().sum() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_table_gets_a_bf16_gradient(inputs, kind):
    out, items, targets = inputs
    table = items.detach().bfloat16().requires_grad_()
    results = []
    for rows in (table, table.detach().float().requires_grad_()):
        torch.manual_seed(1)
        loss = training_loss(config(kind), out, rows, targets)
        results.append((loss, *torch.autograd.grad(loss, (out, rows))))
    assert results[0][2].dtype == torch.bfloat16
    for a, b in zip(*results):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("which", ["history", "sequence"])
def test_items_of_the_user_do_not_compete(which, smoothing, device, monkeypatch):
    """Compare with logits of the remaining items, one position at a time; targets may be repeated items."""
    monkeypatch.setitem(chunks.CHUNK, device, 3 * NUM_ITEMS)
    batch = make_batch([5, 1, 4])
    batch.target_ids[2], batch.target_ids[7] = batch.item_ids[1], -1
    out = F.normalize(torch.randn(10, E), dim=-1).to(device).requires_grad_()
    items = torch.randn(NUM_ITEMS, E).to(device).requires_grad_()
    chosen = config("cross_entropy", exclude=which, temperature=0.5, label_smoothing=smoothing)
    excluded = excluded_items(chosen, batch, 6).to(device)
    targets = batch.target_ids.to(device)
    actual = losses.training_loss(chosen, out, items, Share(targets), excluded=excluded)
    total = 0.0
    for begin, end in ((0, 5), (5, 6), (6, 10)):
        for t in range(begin, end):
            if t == 7:
                continue
            user_items = batch.item_ids[begin : t + 1].tolist()
            if which == "sequence":
                user_items = batch.item_ids[begin:end].tolist() + batch.target_ids[begin:end].tolist()
            target = int(batch.target_ids[t])
            rivals = [item for item in range(NUM_ITEMS) if item == target or item not in user_items]
            logs = (F.normalize(items, dim=-1)[rivals] @ out[t] / 0.5).log_softmax(0)
            total = total - (1 - smoothing) * logs[rivals.index(target)] - smoothing * logs.mean()
    torch.testing.assert_close(actual, total / 9)
    for a, b in zip(*(torch.autograd.grad(loss, (out, items)) for loss in (actual, total / 9))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="exclude is for kind=cross_entropy"):
        config("in_batch", exclude=which)
