"""Check the term of repeats against a loop over a user's events: in scores, in the loss and in serving."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from data.earlier import Earlier
from models import chunks
from models.hstu import SequenceModel
from models.losses import head_loss
from models.options import LossConfig, ModelConfig
from models.repeats import COUNT_OCTAVES, EVENT_OCTAVES, TIME_OCTAVES, RepeatTerm
from models.tasks.scoring import model_scorer
from tests.models.test_hstu import CONFIG, NUM_ITEMS, make_batch
from tests.serving.plain import Plain, item_ids, make_config, make_model, serve

LENGTHS = [5, 0, 12, 1, 9]


def bucket(number, octaves):
    return sum(edge <= number for edge in {math.ceil(2 ** (half / 2)) for half in range(2 * octaves + 1)})


def by_hand(term, out, items, times, at):
    """Return the term of each item after the events `items` at `times`, for a query at time `at`."""
    weights, terms, last = term.weights(out * len(out) ** 0.5), {}, len(items) - 1
    earlier = [place for place in range(last) if items[place] == items[-1]][::-1][:2]
    for item in set(items):
        place = max(place for place in range(len(items)) if items[place] == item)
        order = sum(flag << rank for rank, flag in enumerate(items[p + 1] == item for p in earlier))
        rows = [
            term.gap[bucket(last - place, EVENT_OCTAVES)],
            term.age[bucket(at - times[place], TIME_OCTAVES)],
            term.count[bucket(items.count(item), COUNT_OCTAVES)],
            term.order[order],
        ]
        terms[item] = weights @ sum(rows)
    return terms


def drawn(term, seed=0):
    torch.manual_seed(seed)
    for table in (term.gap, term.age, term.count, term.order):
        torch.nn.init.normal_(table, std=0.3)
    return term


def few_items(batch, count=4):
    """Return the batch with so few items that most of them repeat."""
    return dataclasses.replace(batch, item_ids=batch.item_ids % count, target_ids=batch.target_ids % (count + 2))


def sequences(batch):
    for begin, end in zip(batch.seq_offsets[:-1].tolist(), batch.seq_offsets[1:].tolist()):
        for token in range(begin, end):
            yield token, batch.item_ids[begin : token + 1].tolist(), batch.timestamps[begin : token + 1].tolist()


@pytest.mark.parametrize("times", [True, False])
def test_terms_by_hand(times):
    batch, term = few_items(make_batch(LENGTHS)), drawn(RepeatTerm(6, 3))
    if not times:
        nothing = torch.zeros_like(batch.timestamps)
        batch = dataclasses.replace(batch, timestamps=nothing, query_timestamps=nothing)
    out = F.normalize(torch.randn(batch.num_tokens, 6), dim=-1)
    items, terms = term(out, torch.arange(batch.num_tokens), Earlier.of(batch, 12))
    for token, seen, seen_at in sequences(batch):
        expected = by_hand(term, out[token], seen, seen_at, int(batch.query_timestamps[token]))
        actual = torch.zeros(NUM_ITEMS).index_add_(0, items[token], terms[token])
        torch.testing.assert_close(actual[list(expected)], torch.stack(list(expected.values())))
        assert set(actual.nonzero()[:, 0].tolist()) <= set(seen)


def test_nothing_later_changes_a_term():
    batch, term = few_items(make_batch(LENGTHS)), drawn(RepeatTerm(6, 3))
    out, tokens = F.normalize(torch.randn(batch.num_tokens, 6), dim=-1), torch.arange(batch.num_tokens)
    before = term(out, tokens, Earlier.of(batch, 12))
    for cut in (1, 8, 12, 20):
        later, rng = tokens >= cut, np.random.default_rng(cut)
        other = torch.from_numpy(rng.integers(0, 4, batch.num_tokens))
        flipped = dataclasses.replace(
            batch,
            item_ids=torch.where(later, other, batch.item_ids),
            timestamps=torch.where(later, batch.timestamps + 7, batch.timestamps),
            query_timestamps=torch.where(later, batch.query_timestamps + 9, batch.query_timestamps),
            target_ids=torch.where(tokens >= cut - 1, other, batch.target_ids),
        )
        after = term(out, tokens, Earlier.of(flipped, 12))
        for old, new in zip(before, after):
            torch.testing.assert_close(old[:cut], new[:cut], rtol=0, atol=0)


def test_an_empty_batch_has_no_terms():
    items, terms = RepeatTerm(6, 3)(torch.zeros(0, 6), torch.arange(0), Earlier.of(make_batch([0]), 12))
    assert items.shape == terms.shape == (0, 12)


def model_of(**head):
    torch.manual_seed(1)
    config = CONFIG | {"attention": {"kind": "dense"}, "head": {"kind": "dot", "repeats": 3} | head}
    model = SequenceModel(ModelConfig.model_validate(config), NUM_ITEMS)
    drawn(model.repeats)
    return model


@pytest.mark.parametrize("exclude", ["none", "history"])
def test_loss_and_gradients(exclude, monkeypatch):
    monkeypatch.setitem(chunks.CHUNK, "cpu", 1000)  # a few rows at a time
    model, batch = model_of(), few_items(make_batch(LENGTHS))
    loss_config = LossConfig(kind="cross_entropy", exclude=exclude, temperature=0.3)
    out = torch.randn(batch.num_tokens, 8, requires_grad=True)
    loss, _ = head_loss(model, loss_config, out, batch)
    inputs = [out, model.item_weight, *model.repeats.parameters()]
    actual = torch.autograd.grad(loss, inputs)
    total, unit = 0.0, F.normalize(out, dim=-1)
    for token, seen, seen_at in sequences(batch):
        terms = by_hand(model.repeats, unit[token], seen, seen_at, int(batch.query_timestamps[token]))
        added = torch.zeros(NUM_ITEMS).index_add(0, torch.tensor(list(terms)), torch.stack(list(terms.values())))
        logits = (F.normalize(model.item_weight, dim=-1) @ unit[token] + added) / 0.3
        target = int(batch.target_ids[token])
        left_out = [item for item in set(seen) - {target} if exclude == "history"]
        logits = logits.index_fill(0, torch.tensor(left_out, dtype=torch.int64), -torch.inf)
        total = total + logits.logsumexp(0) - logits[target]
    expected = total / batch.num_tokens
    torch.testing.assert_close(loss, expected)
    for one, other in zip(actual, torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_term_of_zeros_changes_no_score():
    model, batch = model_of(), few_items(make_batch([5, 9]))
    plain = dataclasses.replace(batch)
    for table in (model.repeats.gap, model.repeats.age, model.repeats.count, model.repeats.order):
        torch.nn.init.zeros_(table)
    with_term = torch.cat([tile for *_, tile in model_scorer(model)(plain).tiles()], 1)
    model.repeats = None
    torch.testing.assert_close(with_term, torch.cat([tile for *_, tile in model_scorer(model)(plain).tiles()], 1))


@pytest.mark.parametrize("slide", [1, 3])
def test_served_scores_have_the_term(slide):
    """The term depends on the latest max_seq_len events, also after attention's window has slid."""
    config = make_config(head={"kind": "dot", "repeats": 3}, loss={"kind": "cross_entropy"}, max_seq_len=8)
    model = make_model(config)
    drawn(model.repeats)
    service, plain, rng = serve(config, model, slide=slide), Plain(config, model, slide), np.random.default_rng(0)
    for count in (1, 3, 7, 5):
        items, times = item_ids()[rng.integers(0, 5, count)], np.sort(rng.integers(0, 10**6, count))
        service.append(["u"] * count, items, times)
        plain.append(["u"] * count, items, times)
        events, at = plain.users["u"][-8:], 10**6 + 5
        out = plain.output("u", at)
        rows, seen_at = [(item - 100) // 3 for _, item, _ in events], [time for time, *_ in events]
        terms = by_hand(model.repeats, out, rows, seen_at, at)
        scores = F.normalize(model.item_weight, dim=-1) @ out
        scores = scores.index_add(0, torch.tensor(list(terms)), torch.stack(list(terms.values())))
        best, values = service.recommend(["u"], k=40, at=at, exclude_seen=False)
        expected = scores[torch.from_numpy((best[0] - 100) // 3)]
        torch.testing.assert_close(torch.from_numpy(values[0]), expected.detach(), rtol=1e-4, atol=1e-5)
        assert (np.diff(values[0]) <= 0).all()
        candidates = item_ids()[[3, 0, 20, 3, 4]]
        scored = service.score(["u"], [candidates], at=at)[0]
        chosen = scores[torch.from_numpy((candidates - 100) // 3)]
        torch.testing.assert_close(torch.from_numpy(scored), chosen.detach(), rtol=1e-4, atol=1e-5)
