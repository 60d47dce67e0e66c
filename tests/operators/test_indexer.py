"""The lightning indexer, sparse attention and the index loss: references by hand, rules, kernels interpreted.

Letters: T tokens, H heads, D query/key and V value head size, J index heads, E index head size, K chosen tokens.
"""

import contextlib
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from hstu_sparse import (
    RelativeBias,
    index_scores,
    indexer_loss,
    lightning_indexer,
    sparse_attention,
)
from hstu_sparse.bias.relative import time_bucket
from hstu_sparse.compat import compute_index_loss_sparse
from tests.random.cases import indexer as cases
from tests.support.budgets import EDGE_CASES, make_jagged, make_offsets, make_timestamps

interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
BACKENDS = ["reference", pytest.param("triton", marks=interpreter)]


def inputs(lengths, *, heads=2, size=6, value_size=5, index_heads=3, index_size=4, dtype=torch.float64):
    make = functools.partial(make_jagged, lengths, dtype=dtype)
    return {
        "q": make((heads, size), seed=1),
        "k": make((size,), seed=2),
        "v": make((value_size,), seed=3),
        "iq": make((index_heads, index_size), seed=4),
        "ik": make((index_size,), seed=5),
        "w": make((index_heads,), seed=6),
    }


def tables(lengths, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    times = make_timestamps(lengths)
    position, time = (torch.randn(size, generator=generator, dtype=dtype) for size in (50, 20))
    return RelativeBias(position, time, times, times + 1000)


# The references, token by token.


def by_hand(x, lengths, bias, indices):
    """For every token: (scores of all it sees, attention over `indices` [H, len], output [H, V])."""
    begin = 0
    for length in lengths:
        for t in range(length):
            token = begin + t
            b = torch.zeros(t + 1, dtype=torch.float64)
            if bias is not None:
                gaps = bias.query_timestamps[token] - bias.timestamps[begin : token + 1]
                b = bias.position[: t + 1].flip(0) + bias.time[time_bucket(gaps, 19).long()]
            seen = slice(begin, token + 1)
            scores = torch.zeros(t + 1, dtype=torch.float64)
            for j in range(x["w"].shape[1]):
                scores = scores + x["w"][token, j] * F.relu(x["ik"][seen] @ x["iq"][token, j])
            chosen = [] if indices is None else [i for i in indices[token].tolist() if 0 <= i <= t]
            attention = ((x["q"][token] @ x["k"][seen].T) * 0.3 + b)[:, chosen].softmax(1)
            yield scores + b, chosen, attention, attention @ x["v"][seen][chosen]
        begin += length


@pytest.mark.parametrize("biased", [False, True])
def test_references_by_hand(biased):
    lengths = (7, 0, 12, 1)
    x, bias, offsets = inputs(lengths), tables(lengths) if biased else None, make_offsets(lengths)
    scores, indices = lightning_indexer(x["iq"], x["ik"], x["w"], offsets, 4, bias=bias)
    for t, (all_scores, *_) in enumerate(by_hand(x, lengths, bias, None)):
        best = sorted(range(len(all_scores)), key=lambda s: (-all_scores[s].item(), s))[:4]
        assert indices[t].tolist() == sorted(best) + [-1] * (4 - len(best))
        torch.testing.assert_close(scores[t, : len(best)], all_scores[sorted(best)])
        assert (scores[t, len(best) :] == -math.inf).all()

    indices = cases.any_indices(lengths, 6, torch.Generator().manual_seed(0))  # repeated, masked
    out = sparse_attention(x["q"], x["k"], x["v"], indices, offsets, scale=0.3, bias=bias)
    guess = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    valid = torch.rand(20, generator=torch.Generator().manual_seed(9)) < 0.6
    rows, at = [], index_scores(x["iq"], x["ik"], x["w"], indices, offsets, bias=bias)
    for t, (all_scores, chosen, attention, output) in enumerate(by_hand(x, lengths, bias, indices)):
        torch.testing.assert_close(out[t], output)
        visible = cases.visible_slots(indices, lengths)[t]
        torch.testing.assert_close(at[t][visible], all_scores[chosen])
        assert (at[t][~visible] == -math.inf).all()
        p, pi = attention.mean(0), guess[t][visible].softmax(0)
        rows.append((p * ((p + 1e-10).log() - (pi + 1e-10).log())).sum())
    options = dict(scale=0.3, bias=bias)
    loss = indexer_loss(x["q"], x["k"], guess, indices, offsets, **options)
    torch.testing.assert_close(loss, torch.stack(rows).mean())
    loss = indexer_loss(x["q"], x["k"], guess, indices, offsets, valid=valid, **options)
    torch.testing.assert_close(loss, torch.stack(rows)[valid].mean())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("group", [2, 3, 8, 50])
def test_groups_by_hand(biased, group):
    """Every rule of a shared choice, group by group; the losses' gradients by autograd of the plain loop."""
    lengths = (7, 0, 12, 1)
    x, bias, offsets = inputs(lengths), tables(lengths) if biased else None, make_offsets(lengths)
    options = dict(selection_group=group, bias=bias)
    scores, indices = lightning_indexer(x["iq"], x["ik"], x["w"], offsets, 4, **options)
    used = cases.group_rows(lengths, group)  # row -> (first token of the sequence, t0, tokens of the group)
    assert indices.shape == scores.shape == (sum(lengths) // group + 4, 4) and len(used) == sum(
        -(-n // group) for n in lengths
    )
    chosen_indices = cases.group_indices(lengths, 6, group, torch.Generator().manual_seed(0))  # repeated, masked
    at = index_scores(x["iq"], x["ik"], x["w"], chosen_indices, offsets, **options)
    out = sparse_attention(x["q"], x["k"], x["v"], chosen_indices, offsets, scale=0.3, **options)
    guess = torch.randn(
        len(chosen_indices), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
    ).requires_grad_()
    valid = torch.rand(20, generator=torch.Generator().manual_seed(9)) < 0.6
    plain = list(by_hand(x, lengths, bias, None))
    terms, counted = [], []
    for row in range(len(indices)):
        if row not in used:
            assert (indices[row] == -1).all() and (scores[row] == -math.inf).all() and (at[row] == -math.inf).all()
            continue
        begin, t0, size = used[row]
        score_row = plain[begin + t0][0][:t0]
        best = sorted(range(t0), key=lambda s: (-score_row[s].item(), s))[:4]
        assert indices[row].tolist() == sorted(best) + [-1] * (4 - len(best))
        torch.testing.assert_close(scores[row, : len(best)], score_row[sorted(best)])
        chosen = [s for s in chosen_indices[row].tolist() if 0 <= s < t0]
        visible = (chosen_indices[row] >= 0) & (chosen_indices[row] < t0)
        torch.testing.assert_close(at[row][visible], score_row[chosen])
        assert (at[row][~visible] == -math.inf).all()
        for t in range(t0, t0 + size):
            seen = chosen + list(range(t0, t + 1))
            weights = attention_by_hand(x, bias, begin, t, seen).softmax(1)
            torch.testing.assert_close(out[begin + t], weights @ x["v"][begin:][seen])
        if chosen:
            p, pi = attention_by_hand(x, bias, begin, t0, chosen).softmax(1).mean(0), guess[row][visible].softmax(0)
            terms.append((p * (p.log() - pi.log())).sum())
            counted.append(valid[begin + t0])
    loss = indexer_loss(x["q"], x["k"], guess, chosen_indices, offsets, scale=0.3, eps=1e-30, **options)
    terms = torch.stack(terms) if terms else guess.sum()[None] * 0
    torch.testing.assert_close(loss, terms.mean())
    torch.testing.assert_close(*(torch.autograd.grad(y, guess)[0] for y in (loss, terms.mean())))
    if counted:
        loss = indexer_loss(
            x["q"], x["k"], guess, chosen_indices, offsets, scale=0.3, eps=1e-30, valid=valid, **options
        )
        torch.testing.assert_close(loss, terms[torch.stack(counted)].sum() / max(sum(counted), 1))


def attention_by_hand(x, bias, begin, t, seen):
    """Scores [H, len(seen)] of the attention."""
    logits = x["q"][begin + t] @ x["k"][begin:][seen].T * 0.3
    if bias is None:
        return logits
    gaps = bias.query_timestamps[begin + t] - bias.timestamps[begin:][seen]
    return logits + bias.position[t - torch.tensor(seen, dtype=torch.int64)] + bias.time[time_bucket(gaps, 19).long()]


@pytest.mark.parametrize("group", [1, 3])
def test_gradients_of_the_references(group):
    lengths = (3, 0, 5)
    x, bias, offsets = inputs(lengths), tables(lengths), make_offsets(lengths)
    indices = cases.group_indices(lengths, 4, group, torch.Generator().manual_seed(0))
    leaves = [y.requires_grad_() for y in (*x.values(), bias.position, bias.time)]

    def attend(q, k, v, iq, ik, w, position, time):
        options = dict(selection_group=group, bias=bias._replace(position=position, time=time))
        scores = index_scores(iq, ik, w, indices, offsets, **options)
        return sparse_attention(q, k, v, indices, offsets, **options), scores[scores > -math.inf]

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("valid", [None, [True, False] * 6 + [True]])
def test_the_loss_gradient_is_pi_less_p_and_leaves_q_and_k_alone(backend, valid):
    lengths = (5, 0, 8)
    x, offsets = inputs(lengths, dtype=torch.float32), make_offsets(lengths)
    indices = cases.any_indices(lengths, 4, torch.Generator().manual_seed(0))
    scores = torch.randn(13, 4, requires_grad=True)
    q, k, position = x["q"].requires_grad_(), x["k"].requires_grad_(), torch.randn(9, requires_grad=True)
    mask = None if valid is None else torch.tensor(valid)
    # With an eps of this size the derivative of the loss itself would be another.
    loss = indexer_loss(
        q, k, scores, indices, offsets, bias=RelativeBias(position), valid=mask, eps=0.5, backend=backend
    )
    (3 * loss).backward()
    assert q.grad is None and k.grad is None and position.grad is None
    visible = cases.visible_slots(indices, lengths)
    begins = torch.tensor([0] * 5 + [5] * 8)
    keys = x["k"].detach()[(begins[:, None] + indices).clamp(0, 12)]
    distance = (torch.arange(13) - begins)[:, None] - indices
    logits = torch.einsum("thd,tkd->thk", q.detach(), keys) * 6**-0.5 + position.detach()[distance.clamp(0, 8)][:, None]
    p, pi = (
        y.masked_fill(~visible[:, None], -math.inf).softmax(-1).nan_to_num().mean(1)
        for y in (logits, scores.detach()[:, None])
    )
    counted = torch.ones(13, dtype=torch.bool) if mask is None else mask
    expected = 3 * (pi - p) / counted.sum() * counted[:, None]
    torch.testing.assert_close(scores.grad, expected, rtol=1e-5, atol=1e-6)
    expected = ((p * ((p + 0.5).log() - (pi + 0.5).log())).sum(1) * counted).sum() / counted.sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_gradient_of_a_retained_graph(backend):
    lengths = (3, 2)
    x, offsets = inputs(lengths, dtype=torch.float32), make_offsets(lengths)
    indices = cases.any_indices(lengths, 4, torch.Generator().manual_seed(0))
    scores = torch.randn(5, 4, requires_grad=True)
    loss = indexer_loss(x["q"], x["k"], scores, indices, offsets, backend=backend)
    first = torch.autograd.grad(loss, scores, torch.tensor(3.0), retain_graph=True)[0].clone()
    for _ in range(2):
        (again,) = torch.autograd.grad(loss, scores, retain_graph=True)
        torch.testing.assert_close(3 * again, first)
        again.zero_()  # the returned tensors do not belong to the graph


@pytest.mark.parametrize("width", [16, 64, 128])
def test_blocks_of_key_heads_are_powers_of_two(width, monkeypatch):
    """The number of key heads need not be a power of two. The interpreter has other blocks, so it is patched."""
    from hstu_sparse.indexer import attention, choices
    from hstu_sparse.indexer import loss as losses

    monkeypatch.setattr(choices, "INTERPRET", False)
    monkeypatch.setattr(losses, "INTERPRET", False)
    for key_heads, dtype, top_k in itertools.product((2, 3, 5, 12, 31), (torch.bfloat16, torch.float32), (9, 40, 300)):
        loss = losses.loss_config.__wrapped__(dtype, width, 32, top_k, 90, key_heads)
        assert loss.BLOCK in (16, 32, 64) and (not loss.HELD or top_k <= loss.HELD * loss.BLOCK)
        for kernel in ("fwd", "bwd"):
            config = attention.attention_config.__wrapped__(kernel, dtype, 2 * width, 32, 7, top_k, key_heads)
            assert {config.BLOCK, config.GROUP_BLOCK} <= {16, 32, 64}


@interpreter
def test_saved_and_gathered_scores_give_the_same_loss():
    from hstu_sparse.core.launch import LaunchConfig, override
    from hstu_sparse.indexer.loss import loss_config

    lengths = (3, 1)
    x, offsets = inputs(lengths, dtype=torch.float32), make_offsets(lengths)
    scores = torch.randn(4, 50, requires_grad=True)
    indices = cases.any_indices(lengths, 50, torch.Generator().manual_seed(0))
    bias = tables(lengths, torch.float32)
    results = []
    for num_held in (0, 2, 4):
        config = LaunchConfig(4, 2, BLOCK=32, HELD=num_held)
        with override(loss_config, lambda *_, config=config: config):
            loss = indexer_loss(x["q"], x["k"], scores, indices, offsets, bias=bias, backend="triton")
            padded = compute_index_loss_sparse(
                x["q"].view(2, 2, *x["q"].shape[1:]).transpose(1, 2), x["k"].view(2, 2, -1),
                scores.view(2, 2, 50), indices.view(2, 2, 50), 0.4, backend="triton",
            )  # fmt: skip
        results.append((loss.detach(), padded.detach(), *torch.autograd.grad(loss + padded, scores)))
    for others in results[1:]:
        torch.testing.assert_close(others, results[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_without_valid_tokens_is_zero(backend):
    offsets, none = make_offsets((0, 0)), torch.zeros(0, 2, dtype=torch.int32)
    x = inputs((3,), dtype=torch.float32)
    scores = torch.zeros(3, 2, requires_grad=True)
    indices = torch.full((3, 2), -1)
    loss = indexer_loss(
        x["q"], x["k"], scores, indices, make_offsets((3,)), valid=torch.zeros(3, dtype=torch.bool), backend=backend
    )
    assert loss == 0
    loss.backward()
    assert not scores.grad.any()
    assert indexer_loss(x["q"], x["k"], scores, indices, make_offsets((3,)), backend=backend) == 0
    empty = inputs((), dtype=torch.float32)
    assert indexer_loss(empty["q"], empty["k"], torch.zeros(0, 2), none, offsets, backend=backend) == 0
    out = sparse_attention(x["q"], x["k"], x["v"], indices, make_offsets((3,)), backend=backend)
    assert out.shape == (3, 2, 5) and not out.any()


# The choice.


@contextlib.contextmanager
def choice_with(capacity, sample):
    """Set the room of a query to `capacity` candidates and its sample to `sample` keys, inside the context."""
    from hstu_sparse.core.launch import override
    from hstu_sparse.indexer.launch_indexer import choice_config, sample_config

    small = lambda config, *_: config.replace(ROWS=32, BLOCK=16, HEADS=2)
    with override(sample_config, lambda *_: (capacity, sample)), override(choice_config, small):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind",
    [
        "few numbers",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("all zero", "none above zero", "ascending", "descending", "infinite")
        ),
    ],
)
def test_ties_are_exact(kind, backend, monkeypatch):
    """Whole numbers, so that equal scores are equal bits; rows with so little room that every kernel has work."""
    lengths, top_k, choosing = (44, 0, 9, 1), 7, contextlib.nullcontext()
    if backend == "triton":
        from hstu_sparse.indexer import launch_indexer

        choosing = choice_with(32, 16)
        monkeypatch.setattr(launch_indexer, "SCRATCH", 8 * 32 * 64)  # some tiles at a time
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-2, 3, (54, *s), generator=generator).float() for s in ((3, 4), (4,), (3,))]
    iq, ik, w = whole
    if kind == "all zero":
        w = torch.zeros_like(w)
    if kind == "none above zero":
        w = -w.abs()
    if kind.endswith("scending"):
        ik = torch.arange(54.0)[:, None].expand(54, 4) * (1 if kind == "ascending" else -1) + 100
        iq, w = torch.ones_like(iq), torch.ones_like(w)
    if kind == "infinite":  # scores that nothing exceeds, and more of them than a row has room for
        iq, w = torch.ones_like(iq), torch.ones_like(w)
        ik = torch.where(torch.arange(54)[:, None] % 8 == 5, ik, 3e38)
    with choosing:
        scores, indices = lightning_indexer(iq, ik, w, make_offsets(lengths), top_k, backend=backend)
    begin = 0
    for length in lengths:
        for t in range(begin, begin + length):
            score_row = (w[t] * F.relu(ik[begin : t + 1] @ iq[t].T)).sum(1)
            best = sorted(sorted(range(t + 1 - begin), key=lambda s: (-score_row[s].item(), s))[:top_k])
            assert indices[t].tolist() == best + [-1] * (top_k - len(best)), t
            assert scores[t, : len(best)].tolist() == score_row[best].tolist()
        begin += length


@interpreter
def test_the_sample_spares_the_refill(monkeypatch):
    """On random scores no row has too few or too many candidates, so the kernel that corrects such rows gets none."""
    from hstu_sparse.indexer import topk

    counts = []
    kernel = topk.lightning_indexer_refill_kernel

    class Look:
        def __getitem__(self, grid):
            return lambda *arguments, **options: counts.append((arguments[4].clone(), arguments[2]))  # and tokens

    monkeypatch.setattr(topk, "lightning_indexer_refill_kernel", Look())
    x = inputs((100,), dtype=torch.float32)
    operands = x["iq"], x["ik"], x["w"].abs(), make_offsets((100,)), 4
    with choice_with(64, 256):
        _, indices = lightning_indexer(*operands, backend="triton")
    assert kernel is not topk.lightning_indexer_refill_kernel and len(counts) == 1
    num_candidates, tokens = counts[0]
    num_candidates = num_candidates[tokens >= 0]
    assert (num_candidates[64:] >= 4).all() and (num_candidates <= 64).all() and num_candidates[64:].float().mean() < 40
    assert torch.equal(indices, lightning_indexer(*operands)[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_chosen_is_dense_attention(backend):
    lengths = (5, 0, 12)
    x, offsets = inputs(lengths, dtype=torch.float32), make_offsets(lengths)
    bias = tables(lengths, torch.float32)
    _, indices = lightning_indexer(x["iq"], x["ik"], x["w"], offsets, 12, backend=backend)
    out = sparse_attention(x["q"], x["k"], x["v"], indices, offsets, bias=bias, backend=backend)
    begin = 0
    for length in lengths:
        span, step = slice(begin, begin + length), torch.arange(length)
        gaps = bias.query_timestamps[span, None] - bias.timestamps[None, span]
        distance = step[:, None] - step
        mask = bias.position[distance.clamp(min=0)] + bias.time[time_bucket(gaps, 19).long()]
        q, k, v = x["q"][span].transpose(0, 1), x["k"][span], x["v"][span]
        expected = F.scaled_dot_product_attention(
            *(y[None].float() for y in (q, k.expand(2, -1, -1), v.expand(2, -1, -1))),
            attn_mask=mask.masked_fill(distance < 0, -math.inf),
        )
        torch.testing.assert_close(out[span], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        begin += length


# Padded chunks.


def plain_padded_loss(query, key, index_score, indices, scaling, chunk_offset, eps=1e-10):
    """One row after the other."""
    batch, heads, rows, _ = query.shape
    total = 0.0
    for b in range(batch):
        for i in range(rows):
            slots = [j for j, s in enumerate(indices[b, i].tolist()) if 0 <= s <= chunk_offset + i]
            if not slots:
                continue
            keys = key[b, indices[b, i, slots].long()]
            p = sum((keys @ query[b, h, i] * scaling).softmax(0) for h in range(heads)) / heads
            pi = index_score[b, i, slots].softmax(0)
            total += (p * ((p + eps).log() - (pi + eps).log())).sum()
    return total / batch


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_loss_equals_plain_computation(backend):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 6, 10, generator=generator), torch.randn(2, 15, 10, generator=generator)
    score = torch.randn(2, 6, 7, generator=generator, requires_grad=True)
    indices = torch.randint(-2, 15, (2, 6, 7), generator=generator)
    indices[0, 0] = 14  # nothing left of this row
    loss = compute_index_loss_sparse(query, key, score, indices, 0.4, chunk_offset=5, backend=backend)
    (actual,) = torch.autograd.grad(loss, score)
    expected = plain_padded_loss(query, key, score, indices, 0.4, 5, eps=0.0)
    (gradient,) = torch.autograd.grad(expected, score)
    torch.testing.assert_close(loss, expected.detach() if expected.requires_grad else expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_add_up(backend):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 2, 12, 8, generator=generator), torch.randn(1, 12, 8, generator=generator)
    score = torch.randn(1, 12, 5, generator=generator)
    indices = torch.randint(0, 12, (1, 12, 5), generator=generator)
    whole = compute_index_loss_sparse(query, key, score, indices, 0.4, backend=backend)
    parts = [
        compute_index_loss_sparse(
            query[:, :, a:b], key, score[:, a:b], indices[:, a:b], 0.4, chunk_offset=a, backend=backend
        )
        for a, b in ((0, 5), (5, 6), (6, 12))
    ]
    torch.testing.assert_close(sum(parts), whole)
    # The same rows as one jagged sequence: a mean over rows there, a sum here.
    jagged = indexer_loss(
        query[0].transpose(0, 1), key[0], score[0], indices[0], make_offsets((12,)), scale=0.4, backend=backend
    )
    torch.testing.assert_close(12 * jagged, whole)


# The interface.


@pytest.mark.parametrize(
    ("function", "change", "error", "message"),
    [
        (lightning_indexer, {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        (lightning_indexer, {"top_k": 1.0}, TypeError, "top_k must be a whole number, got 1.0"),
        (lightning_indexer, {"selection_group": 0}, ValueError, "selection_group must be at least 1, got 0"),
        (sparse_attention, {"selection_group": 2}, ValueError, r"indices must be \[G=3, K\], got shape \[5, 2\]"),
        (indexer_loss, {"selection_group": 2}, ValueError, r"indices must be \[G=3, K\], got shape \[5, 2\]"),
        (lightning_indexer, {"ik": torch.zeros(5, 3)}, ValueError, r"ik must be \[T=5, E=4\], got shape \[5, 3\]"),
        (lightning_indexer, {"w": torch.zeros(5, 2)}, ValueError, r"w must be \[T=5, J=3\], got shape \[5, 2\]"),
        (lightning_indexer, {"backend": "cuda"}, ValueError, "lightning_indexer: backend must be one of auto"),
        (sparse_attention, {"k": torch.zeros(5, 7)}, ValueError, r"k must be \[T=5, D=6\], got shape \[5, 7\]"),
        (
            sparse_attention,
            {"k": torch.zeros(5, 1, 7)},
            ValueError,
            r"k must be \[T=5, Hkv, D=6\], got shape \[5, 1, 7\]",
        ),
        (sparse_attention, {"k": torch.zeros(5, 1, 6)}, ValueError, r"v must be \[T=5, Hkv=1, V\], got shape \[5, "),
        (sparse_attention, {"indices": torch.zeros(5, 2)}, TypeError, "indices must be int32 or int64, got torch.flo"),
        (sparse_attention, {"scale": math.inf}, ValueError, "scale must be a finite number, got inf"),
        (sparse_attention, {"bias": 3}, TypeError, "bias must be a RelativeBias, got int"),
        (indexer_loss, {"scores": torch.zeros(5, 3)}, ValueError, r"scores must be \[T=5, K=2\], got shape \[5, 3\]"),
        (indexer_loss, {"valid": torch.zeros(5)}, TypeError, "valid must be torch.bool, got torch.float32"),
        (indexer_loss, {"eps": 0}, ValueError, "eps must be a finite number above 0, got 0"),
        (compute_index_loss_sparse, {"chunk_offset": -1}, ValueError, "chunk_offset must be at least 0, got -1"),
        (compute_index_loss_sparse, {"key": torch.zeros(1, 9, 5)}, ValueError, r"key must be \[B=1, S, D=6\], got sha"),
    ],
)
def test_errors(function, change, error, message):
    x, indices = inputs((5,), dtype=torch.float32), torch.zeros(5, 2, dtype=torch.int32)
    choice = {"k": x["k"], "indices": indices, "seq_offsets": make_offsets((5,))}
    arguments = {
        lightning_indexer: {n: x[n] for n in ("iq", "ik", "w")} | {"seq_offsets": make_offsets((5,)), "top_k": 2},
        sparse_attention: {"q": x["q"], "v": x["v"]} | choice,
        indexer_loss: {"q": x["q"], "scores": torch.zeros(5, 2)} | choice,
        compute_index_loss_sparse: {
            "query": x["q"].transpose(0, 1)[None], "key": x["k"][None], "index_score": torch.zeros(1, 5, 2),
            "indices": indices[None], "scaling": 1.0,
        },
    }[function]  # fmt: skip
    with pytest.raises(error, match=message):
        function(**arguments | change)


@interpreter
def test_kernels_refuse_what_they_cannot_do():
    x, offsets = inputs((5,), dtype=torch.float32), make_offsets((5,))
    indexer = x["iq"], x["ik"], x["w"], offsets
    with pytest.raises(ValueError, match=r"take top_k up to 2048, got 3000; use backend='reference', or index_scores"):
        lightning_indexer(*indexer, 3000, backend="triton")
    indices = lightning_indexer(*indexer, 2)[1]
    with pytest.raises(TypeError, match=r"sparse_attention: the kernels take fp16, bf16 and fp32, got torch.float64"):
        sparse_attention(*(x[n].double() for n in "qkv"), indices, offsets, backend="triton")
    with pytest.raises(ValueError, match=r"take V from 1 to 256, got V=300"):
        sparse_attention(x["q"], x["k"], torch.zeros(5, 300), indices, offsets, backend="triton")
    wide = torch.zeros(5, 4, 140)
    with pytest.raises(ValueError, match=r"take up to 512 channels in all key heads, padded .*, got 1024; use backend"):
        sparse_attention(wide, wide, wide, indices, offsets, backend="triton")
    with pytest.raises(ValueError, match=r"the heads of k must divide the 4 heads of q, got 3"):
        sparse_attention(wide, wide[:, :3], wide[:, :3], indices, offsets)
    with pytest.raises(ValueError, match=r"v must be \[T=5, Hkv=2, V\], got shape \[5, 140\]"):
        sparse_attention(wide, wide[:, :2], wide[:, 0], indices, offsets)
    with pytest.raises(ValueError, match=r"take H from 1 to 128, got H=200"):
        indexer_loss(torch.zeros(5, 200, 6), x["k"], torch.zeros(5, 2), indices, offsets, backend="triton")


# The kernels, in the interpreter; the campaign has more. A row without a group may begin where the batch ends.
EDGES = ("all sequences empty", "lengths that divide nothing")
LENGTHS = {name: EDGE_CASES[name][0] for name in EDGES}
LENGTHS["empty sequences in the middle and at the end"] = (20, 0, 33, 0)


def kernel_cases():
    """Yield operator, lengths and group; mark as slow what `test_kernels_with_key_heads` or a longer case has, too."""
    for operator, edge, group in itertools.product(cases.OPERATORS, LENGTHS, (1, 3)):
        below = operator in ("sparse_attention", "indexer_loss")
        slow = group > 1 and (below or edge != "lengths that divide nothing")
        if group == 1 or operator != "compute_index_loss_sparse":
            yield pytest.param(operator, edge, group, marks=pytest.mark.slow if slow else [])


@interpreter
@pytest.mark.parametrize(("operator", "edge", "group"), kernel_cases())
def test_kernels(operator, edge, group):
    lengths, long = LENGTHS[edge], edge == "lengths that divide nothing"
    cases.check(
        "cpu", operator=operator, lengths=[n // 3 for n in lengths], heads=3 if long else 2, size=20 if long else 16,
        value_size=24, top_k=5, dtype="float32", position=long, time=long, exact=False, strided=long,
        wide_indices=False, deterministic=not long, seed=1, group=group,
    )  # fmt: skip


@interpreter
@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("operator", ["sparse_attention", "indexer_loss"])
def test_kernels_with_key_heads(operator, group, deterministic):
    cases.check(
        "cpu", operator=operator, lengths=[7, 0, 3], heads=6, key_heads=3, size=20, value_size=12, top_k=5,
        dtype="float32", position=True, time=True, exact=False, strided=deterministic, wide_indices=False,
        deterministic=deterministic, seed=1, group=group,
    )  # fmt: skip


@pytest.mark.parametrize("group", [1, 3])
def test_key_heads_are_attention_by_themselves(group):
    """Each key head with its query heads; the loss's p is the mean over all heads."""
    lengths, options = (7, 4), {"selection_group": group}
    q, k, v = (torch.randn(11, *shape, dtype=torch.float64).requires_grad_() for shape in ((4, 6), (2, 6), (2, 5)))
    offsets = make_offsets(lengths)
    indices = cases.group_indices(lengths, 3, group, torch.Generator().manual_seed(0))
    scores = torch.randn(indices.shape, dtype=torch.float64, requires_grad=True)
    apart = [(q[:, 2 * n : 2 * n + 2], k[:, n], v[:, n]) for n in range(2)]
    out = sparse_attention(q, k, v, indices, offsets, **options)
    expected = torch.cat([sparse_attention(*heads, indices, offsets, **options) for heads in apart], 1)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    gradients = [torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (out, expected)]
    torch.testing.assert_close(*gradients)
    # The gradient pi - p is linear in p, and so the mean over key heads of theirs.
    loss = indexer_loss(q, k, scores, indices, offsets, **options)
    losses = [indexer_loss(*heads[:2], scores, indices, offsets, **options) for heads in apart]
    (gradient,), (expected,) = (torch.autograd.grad(x, scores) for x in (loss, sum(losses) / 2))
    torch.testing.assert_close(gradient, expected)
    assert loss < sum(losses) / 2  # by the convexity of KL


@interpreter
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["sparse_attention", "lightning_indexer", "index_loss", "index_scores"])
def test_opcheck(name, group):
    from hstu_sparse.indexer import attention, launch_indexer
    from hstu_sparse.indexer import loss as losses
    from hstu_sparse.indexer.choices import choice_rows

    lengths = (3,)
    x, offsets = inputs(lengths, dtype=torch.float32), make_offsets(lengths)
    bias = tables(lengths, torch.float32)
    position = bias.position.requires_grad_()
    rows = choice_rows(offsets, sum(lengths), group)
    rest = rows, position, None, None, None
    indices = lightning_indexer(x["iq"], x["ik"], x["w"], offsets, 3, selection_group=group)[1]
    scores = torch.randn(len(indices), 3, requires_grad=True)
    x = {n: y.requires_grad_() for n, y in x.items()}
    indexer = (x["iq"], x["ik"], x["w"])
    operator, arguments = {
        "sparse_attention": (
            attention.sparse_attention_jagged,
            (x["q"], x["k"], x["v"], indices, *rest, 0.4, group),
        ),
        "lightning_indexer": (launch_indexer.lightning_indexer_jagged, (*indexer, offsets, *rest, 3, group)),
        "index_scores": (launch_indexer.index_scores_jagged, (*indexer, indices, *rest, group)),
        "index_loss": (
            losses.indexer_loss_jagged,
            (scores, x["q"], x["k"], indices, *rest, None, 0.4, 1e-10, group, losses.DIFFERENCE),
        ),
    }[name]
    torch.library.opcheck(operator.registered_forward, arguments)


@interpreter
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_graph(group):
    lengths = (6, 3)
    x, offsets = inputs(lengths, dtype=torch.float32), make_offsets(lengths)
    options = dict(selection_group=group, backend="triton")

    def layer(q, k, v, iq, ik, w):
        scores, indices = lightning_indexer(iq, ik, w, offsets, 4, **options)
        out = sparse_attention(q, k, v, indices, offsets, **options)
        return out.square().sum() + indexer_loss(q, k, scores, indices, offsets, **options)

    leaves = [y.requires_grad_() for y in x.values()]
    expected = torch.autograd.grad(layer(*leaves), leaves)
    actual = torch.autograd.grad(torch.compile(layer, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    torch.testing.assert_close(actual, expected)
