"""Check the mixture of logits against plain formulas, in chunks, and in training, evaluation and predictions."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F

from models import heads, losses
from models.heads import MixtureOfLogits, MoLConfig, mol_loss, normalized
from models.options import LossConfig
from models.tasks.scoring import output_scorer
from tests.models.test_hstu import make_batch, make_model
from tests.programs.test_train import fails, run, start

E, I, T = 6, 11, 7
CONFIG = MoLConfig(
    kind="mol",
    query_components=2,
    item_components=3,
    component_dim=4,
    gate_hidden_dim=5,
    dropout=0.0,
    item_dropout=0.0,
    temperature=0.5,
)
SMALL = "model.head={kind: mol, query_components: 2, item_components: 2, component_dim: 8, gate_hidden_dim: 8}"


def setup(**changes):
    torch.manual_seed(0)
    head = MixtureOfLogits(CONFIG.model_copy(update=changes), E).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    out = F.normalize(torch.randn(T, E), dim=-1).double().requires_grad_()
    items = torch.randn(I, E).double().requires_grad_()
    return head, out, items, torch.tensor([3, 0, -1, 10, 3, 5, -1])


def score_by_hand(head, o, e):
    """Compute the formula of one output and one item, pair by pair."""
    o, e = o * E**0.5, e / e.norm() * E**0.5
    logits = []
    for a in range(2):
        for b in range(3):
            q, x = head.query(o)[4 * a : 4 * a + 4], head.item(e)[4 * b : 4 * b + 4]
            logits.append(q @ x / (q.norm() * x.norm()) / 0.5)
    logits = torch.stack(logits)
    z = head.query_gate(o) * head.item_gate(e) + head.pair_gate(logits)
    return ((z * torch.sigmoid(z)).softmax(0) * logits).sum()


def test_scores_by_hand():
    head, out, items, _ = setup()
    actual = head.scores_of_all(out, head.items(items))
    expected = torch.stack([torch.stack([score_by_hand(head, o, e) for e in items]) for o in out])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_starts_as_the_cosine():
    _, out, items, _ = setup()
    torch.manual_seed(0)
    head = MixtureOfLogits(CONFIG.model_copy(update={"component_dim": E}), E).double()
    scores = head.scores_of_all(out, head.items(items)).double()
    torch.testing.assert_close(scores, out @ F.normalize(items, dim=-1).T / 0.5, rtol=1e-5, atol=1e-5)


def test_item_dropout_changes_neither_gates_nor_evaluation():
    head, _, items, _ = setup(item_dropout=0.5)
    first, again, judged = head.items(items), head.items(items), head.eval().items(items)
    assert not torch.allclose(first.components, again.components)
    torch.testing.assert_close(first.gates, judged.gates)
    torch.testing.assert_close(judged, setup()[0].items(items))


def test_item_dropout_of_the_dot_head_is_on_targets_in_training_alone():
    """The training loss is that of the items after dropout; inputs and evaluation have no item dropout."""
    batch, loss = dataclasses.replace(make_batch([4, 3]), target_ids=torch.arange(7)), LossConfig(kind="cross_entropy")
    model = make_model("dense", embedding_dim=64, head={"kind": "dot", "item_dropout": 0.5})
    plain = make_model("dense", embedding_dim=64)
    out = plain.raw_output(batch)[0].detach()
    assert torch.equal(model.raw_output(batch)[0], out)
    for training in (True, False):
        torch.manual_seed(1)
        actual, _ = losses.head_loss(model.train(training), loss, out, batch)
        torch.manual_seed(1)
        items = F.dropout(model.item_weight, 0.5, training)
        assert torch.equal(actual, losses.training_loss(loss, normalized(out), items, losses.Share(batch.target_ids)))
    assert torch.equal(actual, losses.head_loss(plain, loss, out, batch)[0])


def test_separate_targets_are_learned_and_scored_by():
    """The input table has gradients from inputs only, the target table from the loss; scores are by targets."""
    batch = make_batch([4, 3])
    model = make_model("dense", head={"kind": "dot", "separate_targets": True}).train()
    assert torch.equal(model.item_weight, make_model("dense").item_weight)
    out, _ = model.raw_output(batch)
    loss, _ = losses.head_loss(model, LossConfig(kind="cross_entropy"), out, batch)
    loss.backward()
    assert model.targets.grad.abs().sum(1).all()
    assert set(model.item_weight.grad.abs().sum(1).nonzero()[:, 0].tolist()) == set(batch.item_ids.tolist())
    scores = output_scorer(model.eval())(torch.eye(8)[:2]).tile(0, len(model.targets))
    torch.testing.assert_close(scores, F.normalize(model.targets.detach().float(), dim=1).T[:2])


@pytest.mark.parametrize("sampled", [0, 1, 5])
@pytest.mark.parametrize("chunk", [2**21, 1])
def test_loss_and_gradients(monkeypatch, sampled, chunk):
    """Compare with the plain loss over all scores, and its gradients, for chunks of any size.

    With one negative per output there are fewer negatives than items, and each chunk prepares its items.
    """
    monkeypatch.setitem(heads.CHUNK, "cpu", chunk)
    head, out, items, targets = setup()
    negatives = torch.randint(I, (T, sampled), generator=torch.Generator().manual_seed(2)) if sampled else None
    if sampled:
        negatives[0, -1] = targets[0]
    loss, aux = mol_loss(head, out, items, targets, negatives)
    scores, pi = head.scores(head.queries(out), head.items(items))
    real = targets >= 0
    target_scores = scores[real].gather(1, targets[real, None])
    if sampled:
        others = scores[real].gather(1, negatives[real]).masked_fill(negatives[real] == targets[real, None], -torch.inf)
        expected = (torch.cat([target_scores, others], 1).logsumexp(1) - target_scores[:, 0]).mean()
    else:
        expected = F.cross_entropy(scores, targets, ignore_index=-1)
    torch.testing.assert_close(loss, expected)
    leaves = [out, items, *head.parameters()]
    for actual, right in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        torch.testing.assert_close(actual, right)

    pi = pi[real].gather(1, targets[real, None, None].expand(-1, 1, 6))[:, 0]

    def entropy(p):
        return -(p * p.log()).sum(-1)

    balance = entropy(pi).mean() - entropy(pi.mean(0))
    _, pi_again = head.scores(head.queries(out), head.items(items))
    assert pi_again.shape == (T, I, 6)
    torch.testing.assert_close(aux["mol_balance"].value, balance, check_dtype=False, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(aux["mol_balance"].weighted, 0.001 * aux["mol_balance"].value)


def test_dropout_renormalises_in_training_alone():
    head, out, items, _ = setup(dropout=0.5)
    # If all cosines are equal, the score is the sum of the weights times this logit.
    queries, items = head.queries(out), head.items(items)
    alike = torch.ones_like(queries.components[..., :1])
    queries = queries._replace(components=F.pad(alike, (0, 3)))
    items = items._replace(components=F.pad(torch.ones_like(items.components[..., :1]), (0, 3)))
    dropped, pi = head.train().scores(queries, items)
    assert (pi > 0).all()
    right = (dropped - 1 / 0.5).abs() < 1e-4
    assert (right | (dropped == 0)).all() and right.float().mean() > 0.9
    head, out, items, _ = setup(dropout=0.5)
    sides = head.queries(out), head.items(items)
    assert not torch.allclose(head.train().scores(*sides)[0], head.eval().scores(*sides)[0])


@pytest.mark.parametrize(
    "loss", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("sampled_softmax", "cross_entropy")), "in_batch"]
)
def test_a_model_with_the_head(tmp_path, loss):
    pl = pytest.importorskip("polars")
    folder, predictions = tmp_path / "run", tmp_path / "top.parquet"
    done = start(folder, SMALL, f"loss.kind={loss}", "train.epochs=2")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] < lines[0]["loss"] and "mol_balance" in lines[0]
    assert run("eval.py", folder, "--predict", predictions, "--top-k", 5).returncode == 0
    table = pl.read_parquet(predictions)
    assert len(table) == 5 * table["user"].n_unique()


def test_bce_raises(tmp_path):
    fails(start(tmp_path / "run", SMALL, "loss.kind=bce"), "loss.kind=bce is not supported by model.head.kind=mol")
