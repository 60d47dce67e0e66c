"""Block-sparse HSTU attention: the reference by hand and by its properties, validation, the research interface."""

import math

import pytest
import torch
from torch.nn import functional as F

from hstu_sparse import bsa_attention, compat
from hstu_sparse.bias.relative import RelativeBias
from hstu_sparse.bsa import bsa_attention_reference
from models.gate import GateModel
from tests.support.budgets import EDGE_CASES, make_jagged, make_offsets, make_timestamps


def draw(lengths, H=2, D=8, V=6, dtype=torch.float64, seed=0):
    q, k = (make_jagged(lengths, (H, D), dtype=dtype, seed=seed + i) for i in range(2))
    v = make_jagged(lengths, (H, V), dtype=dtype, seed=seed + 2)
    gates = tuple(make_jagged(lengths, (H,), dtype=dtype, seed=seed + 3 + i).sigmoid() for i in range(3))
    return q, k, v, gates, make_offsets(lengths)


def dense(q, k, v, scale, n, visible):
    """Return (1/N) sum over visible s of SiLU(scale * q.k) v for one sequence; visible [n, n] or [H, n, n]."""
    weights = F.silu(scale * torch.einsum("thd,shd->hts", q, k)) * visible
    return torch.einsum("hts,shv->thv", weights, v) / n


def test_by_hand():
    """Two blocks of two, one head of size one, scale 1, N 4: each sum written out."""
    q = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64).view(4, 1, 1)
    k = torch.tensor([1.0, 3.0, -1.0, 0.5], dtype=torch.float64).view(4, 1, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(4, 1, 1)
    one = torch.ones(4, 1, dtype=torch.float64)
    offsets = torch.tensor([0, 4])

    def run(gates, window=0):
        shape = dict(block_size=2, block_counts=1, window_size=window, scale=1.0)
        return bsa_attention(q, k, v, offsets, 4, gates, **shape).flatten()

    silu = lambda x: x / (1 + torch.exp(torch.tensor(-x, dtype=torch.float64)))
    zero = torch.zeros_like(one)
    # kbar_0 = 2, vbar_0 = 1.5 from t = 1 on; kbar_1 = -0.25, vbar_1 = 3.5 at t = 3. BS / N = 1/2.
    compressed = [0, 0.5 * silu(2) * 1.5, 0.5 * silu(2) * 1.5, 0.5 * (silu(4) * 1.5 + silu(-0.5) * 3.5)]
    # S = 1: the own block alone.
    selected = [
        silu(1) / 4,
        (silu(1) * 1 + silu(3) * 2) / 4,
        silu(-1) * 3 / 4,
        (silu(-2) * 3 + silu(1) * 4) / 4,
    ]
    windowed = [silu(1) / 4, (silu(1) + silu(3) * 2) / 4, (silu(3) * 2 + silu(-1) * 3) / 4, selected[3]]
    torch.testing.assert_close(run((one, zero, None)), torch.tensor(compressed, dtype=torch.float64))
    torch.testing.assert_close(run((zero, one, None)), torch.tensor(selected, dtype=torch.float64))
    torch.testing.assert_close(run((zero, zero, one), 2), torch.tensor(windowed, dtype=torch.float64))
    total = torch.tensor([0.5 * c + 2 * s + w for c, s, w in zip(compressed, selected, windowed)], dtype=torch.float64)
    torch.testing.assert_close(run((0.5 * one, 2 * one, one), 2), total)


def test_bias_by_hand():
    """Repeat test_by_hand's blocks with both tables: the place of a block is its middle, its second token."""
    q = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64).view(4, 1, 1)
    k = torch.tensor([1.0, 3.0, -1.0, 0.5], dtype=torch.float64).view(4, 1, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(4, 1, 1)
    one, zero = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    # Differences of 0 and 1 s fall into bucket 0, of 2 s (ln 2 / 0.301 = 2.3) into 2, of 8 s (6.9) into 6, capped at 3.
    bias = RelativeBias(
        torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        torch.tensor([0, 1, 2, 8]),
        torch.tensor([1, 1, 2, 10]),
    )

    def run(gates, window=0):
        shape = dict(block_size=2, block_counts=1, window_size=window, scale=1.0)
        return bsa_attention(q, k, v, torch.tensor([0, 4]), 4, gates, bias=bias, **shape).flatten()

    silu = lambda x: x / (1 + math.exp(-x))
    # Block 0 (means 2 and 1.5) at token 1, block 1 (-0.25 and 3.5) at token 3. BS / N = 1/2.
    compressed = [
        0,
        0.5 * silu(2 + 0.1 + 1) * 1.5,
        0.5 * silu(2 + 0.2 + 1) * 1.5,
        0.5 * (silu(4 + 0.3 + 4) * 1.5 + silu(-0.5 + 0.1 + 3) * 3.5),
    ]
    selected = [
        silu(1 + 0.1 + 1) / 4,
        (silu(1 + 0.2 + 1) + silu(3 + 0.1 + 1) * 2) / 4,
        silu(-1 + 0.1 + 1) * 3 / 4,
        (silu(-2 + 0.2 + 4) * 3 + silu(1 + 0.1 + 3) * 4) / 4,
    ]
    windowed = [selected[0], selected[1], (silu(3 + 0.2 + 1) * 2 + silu(-1 + 0.1 + 1) * 3) / 4, selected[3]]
    torch.testing.assert_close(run((one, zero, None)), torch.tensor(compressed, dtype=torch.float64))
    torch.testing.assert_close(run((zero, one, None)), torch.tensor(selected, dtype=torch.float64))
    torch.testing.assert_close(run((zero, zero, one), 2), torch.tensor(windowed, dtype=torch.float64))


def test_bias_takes_part_in_the_choice():
    """Test blocks of equal means, so that the bias of the position decides: for the nearest block, or the farthest."""
    q, k, v, gates, offsets = draw((48,))
    k = torch.ones_like(k)
    rising = torch.arange(48, dtype=torch.float64)
    shape = dict(block_size=8, block_counts=3, return_block_indices=True)
    for table, expected in ((rising, [0, 1, 5]), (-rising, [3, 4, 5])):
        # SiLU rises above -1.28 and falls below, so the scores are kept above.
        bias = RelativeBias(table + 60)
        _, indices = bsa_attention(q, k, v, offsets, 48, gates, bias=bias, **shape)
        assert indices[47].tolist() == [expected] * 2


def test_bias_has_gradients():
    q, k, v, gates, offsets = draw((21, 0, 9))
    times = make_timestamps((21, 0, 9), seed=1)
    leaves = [x.requires_grad_() for x in (q, k, v, *gates, *(torch.randn(n, dtype=torch.float64) for n in (24, 40)))]
    shape = dict(block_size=8, block_counts=2, window_size=4, selection_group=2, scale=8**-0.5)

    def run(q, k, v, g_cmp, g_slc, g_swa, position, time):
        bias = RelativeBias(position, time, times, times + 50)
        return bsa_attention_reference(q, k, v, offsets, 24, (g_cmp, g_slc, g_swa), bias=bias, **shape)[0]

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_compression_is_dense_over_complete_past_blocks_where_k_is_constant_in_a_block():
    lengths, BS, N = (37,), 8, 50
    q, k, v, gates, offsets = draw(lengths)
    k = k[torch.arange(37) // BS * BS]
    zero = torch.zeros_like(gates[0])
    out = bsa_attention(q, k, v, offsets, N, (gates[0], zero, None), block_size=BS)
    t = torch.arange(37)
    visible = (t // BS + 1) * BS <= t[:, None] + 1
    expected = gates[0].unsqueeze(-1) * dense(q, k, v, 8**-0.5, N, visible)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_selection_of_all_blocks_is_dense(group):
    lengths, N = (37, 16), 50
    q, k, v, gates, offsets = draw(lengths)
    zero, one = torch.zeros_like(gates[0]), torch.ones_like(gates[0])
    shape = dict(block_size=8, block_counts=5, selection_group=group)
    out, indices = bsa_attention(q, k, v, offsets, N, (zero, one, None), **shape, return_block_indices=True)
    for start, n in ((0, 37), (37, 16)):
        part = slice(start, start + n)
        causal = torch.ones(n, n, dtype=torch.float64).tril()
        torch.testing.assert_close(out[part], dense(q[part], k[part], v[part], 8**-0.5, N, causal))
        for t in range(n):
            own_block = t // 8
            assert indices[start + t].tolist() == [list(range(own_block + 1)) + [-1] * (4 - own_block)] * 2


@pytest.mark.parametrize("group", [1, 4])
def test_nothing_after_t_changes_output_t(group):
    lengths, cut = (45,), 22
    q, k, v, gates, offsets = draw(lengths)
    shape = dict(block_size=8, block_counts=3, window_size=5, selection_group=group, return_block_indices=True)
    before = bsa_attention(q, k, v, offsets, 45, gates, **shape)
    q, k, v = q.clone(), k.clone(), v.clone()
    for x in (q, k, v):
        x[cut:] = torch.randn_like(x[cut:]) * 3
    after = bsa_attention(q, k, v, offsets, 45, gates, **shape)
    for a, b in zip(before, after):
        assert torch.equal(a[:cut], b[:cut])
        assert not torch.equal(a[cut:], b[cut:])


def test_ties_go_to_the_smaller_block():
    q, k, v, gates, offsets = draw((40,))
    k = torch.ones_like(k)  # every mean key is the same
    _, indices = bsa_attention(q, k, v, offsets, 40, gates, block_size=8, block_counts=3, return_block_indices=True)
    assert indices[39].tolist() == [[0, 1, 4]] * 2
    assert indices[31].tolist() == [[0, 1, 3]] * 2  # the own block is complete here, and still chosen once


def test_a_group_shares_its_first_token_choice():
    q, k, v, gates, offsets = draw((64,), seed=5)
    shape = dict(block_size=8, block_counts=3, return_block_indices=True)
    _, alone = bsa_attention(q, k, v, offsets, 64, gates, **shape)
    _, shared = bsa_attention(q, k, v, offsets, 64, gates, **shape, selection_group=4)
    assert torch.equal(shared, alone[torch.arange(64) // 4 * 4])
    assert not torch.equal(shared, alone)


def test_every_chosen_block_is_the_best_there_is():
    """SiLU is not monotone, so the block of the greatest SiLU may not be that of the greatest product."""
    q, k, v, gates, offsets = draw((80,), H=1, D=4)
    q, k = q * 3, k * 3
    _, indices = bsa_attention(q, k, v, offsets, 80, gates, block_size=8, block_counts=3, return_block_indices=True)
    kbar = k.unflatten(0, (10, 8)).mean(1)[:, 0]
    other = 0
    for t in range(80):
        own_block = t // 8
        products = 0.5 * (kbar[:own_block] @ q[t, 0])
        best = F.silu(products).sort(descending=True, stable=True).indices[:2].sort().values.tolist()
        assert indices[t, 0].tolist()[: min(own_block, 2) + 1] == [*best, own_block]
        other += best != products.topk(min(own_block, 2)).indices.sort().values.tolist()
    assert other > 0


@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases_have_gradients(name):
    lengths, N = EDGE_CASES[name]
    q, k, v, gates, offsets = draw(lengths)
    leaves = [x.requires_grad_() for x in (q, k, v, *gates)]
    shape = dict(block_size=8, block_counts=3, window_size=4, selection_group=2, scale=8**-0.5)
    run = lambda *x: bsa_attention_reference(*x[:3], offsets, N, x[3:], **shape)[0]
    assert run(*leaves).shape == v.shape
    assert all(g.shape == x.shape for g, x in zip(torch.autograd.grad(run(*leaves).sum(), leaves), leaves))
    if sum(lengths):
        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_sequences_do_not_mix():
    lengths = (30, 0, 17, 41)
    q, k, v, gates, offsets = draw(lengths)
    shape = dict(block_size=8, block_counts=3, window_size=4)
    together = bsa_attention(q, k, v, offsets, 50, gates, **shape)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        part = slice(begin, end)
        alone = bsa_attention(
            q[part], k[part], v[part], make_offsets((end - begin,)), 50, tuple(g[part] for g in gates), **shape
        )
        torch.testing.assert_close(together[part], alone)


def test_given_indices_replace_the_choice():
    q, k, v, gates, offsets = draw((40, 13))
    shape = dict(block_size=8, block_counts=3, window_size=0, selection_group=1, scale=0.3)
    out, indices = bsa_attention_reference(q, k, v, offsets, 40, gates, **shape)
    again, same = bsa_attention_reference(q, k, v, offsets, 40, gates, **shape, block_indices=indices)
    assert torch.equal(indices, same)
    torch.testing.assert_close(out, again)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(block_size=0), ValueError, "block_size must be at least 1, got 0"),
        (dict(block_counts=0), ValueError, "block_counts must be at least 1, got 0"),
        (dict(window_size=-1), ValueError, "window_size must be at least 0, got -1"),
        (dict(selection_group=3), ValueError, "selection_group must divide block_size=32, got 3"),
        (dict(block_size=30, selection_group=7), ValueError, "selection_group must divide block_size=30, got 7"),
        (dict(block_counts=2.0), TypeError, "block_counts must be a whole number, got 2.0"),
        (dict(scale=float("nan")), ValueError, "scale must be a finite number"),
        (dict(bias=torch.zeros(40)), TypeError, "bias must be a RelativeBias, got Tensor"),
        (dict(bias=RelativeBias(torch.zeros(39))), ValueError, r"bias.position must be \[at least 40\], got \[39\]"),
        (dict(bias=RelativeBias(time=torch.zeros(5))), ValueError, "bias.time needs bias.timestamps"),
        (dict(backend="cuda"), ValueError, "backend must be"),
        (dict(max_seq_len=0), ValueError, "max_seq_len must be at least 1, got 0"),
        (
            dict(k=torch.zeros(40, 2, 9, dtype=torch.float64)),
            ValueError,
            r"k must be \[T=40, H=2, D=8\], got shape \[40, 2, 9\]",
        ),
        (
            dict(v=torch.zeros(39, 2, 6, dtype=torch.float64)),
            ValueError,
            r"v must be \[T=40, H=2, V\], got shape \[39, 2, 6\]",
        ),
        (dict(v=torch.zeros(40, 2, 6)), TypeError, "v must be torch.float64, got torch.float32"),
        (dict(q=torch.zeros(40, 8)), ValueError, r"q must be \[T, H, D\]"),
        (dict(gates=(torch.zeros(40, 2),) * 2), ValueError, "g_cmp, g_slc, g_swa"),
        (
            dict(gates=(torch.zeros(40, 2), torch.zeros(40, 2), None), window_size=3),
            ValueError,
            r"g_swa must be a tensor \[T, H\], got None",
        ),
        (dict(gates=(None, torch.zeros(40, 2), None)), ValueError, r"g_cmp must be a tensor \[T, H\], got None"),
        (
            dict(gates=(torch.zeros(40, 3), torch.zeros(40, 2), None)),
            ValueError,
            r"g_cmp must be \[T=40, H=2\], got shape \[40, 3\]",
        ),
        (dict(seq_offsets=torch.zeros(2)), TypeError, "seq_offsets"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change, error, words):
    q, k, v, gates, offsets = draw((40,))
    call = dict(q=q, k=k, v=v, seq_offsets=offsets, max_seq_len=40, gates=gates) | change
    with pytest.raises(error, match=words):
        bsa_attention(**call)


class TestResearchInterface:
    """The published usage of the research code, on CPU."""

    def test_jagged_function(self):
        torch.manual_seed(0)
        B, N, H, D, V = 2, 64, 4, 8, 16
        q, k = torch.randn(2 * N - 9, H * D), torch.randn(2 * N - 9, H * D)
        v, u = torch.randn(2 * N - 9, H * V), torch.randn(2 * N - 9, H * V)
        offsets = torch.tensor([0, N, 2 * N - 9])
        gate_model = GateModel(in_features=D, hidden_dim=16)
        out, padded_q, padded_k = compat.triton_hstu_attention_with_bsa(
            num_heads=H,
            attention_dim=D,
            linear_dim=V,
            q=q,
            k=k,
            v=v,
            u=u,
            x_offsets=offsets,
            invalid_attn_mask=torch.zeros(B, N, N),
            gate_model=gate_model,
            block_counts=3,
            block_size=16,
            window_size=4,
        )
        heads = [x.unflatten(-1, (H, -1)) for x in (q, k, v)]
        shape = dict(block_counts=3, block_size=16, window_size=4, selection_group=2)
        attended = bsa_attention(*heads, offsets, N, gate_model(heads[0]), **shape)
        torch.testing.assert_close(out, F.layer_norm(attended.flatten(1), (H * V,), eps=1e-6) * u)
        assert padded_q.shape == padded_k.shape == (B, N, H, D)
        torch.testing.assert_close(padded_q[1, : N - 9].flatten(1), q[N:])
        assert padded_k[1, N - 9 :].abs().sum() == 0

    @pytest.mark.parametrize("block_size", [16, 15])
    def test_padded_function(self, block_size):
        torch.manual_seed(0)
        B, N, H = 2, 40, 2
        q, k, v, u = (torch.randn(B, N, H, size) for size in (8, 8, 6, 6))
        g_cmp, g_slc = torch.rand(B, N, H), torch.rand(B, N, H)
        out, indices = compat.triton_block_sparse_attn(
            q=q, k=k, v=v, u=u, g_cmp=g_cmp, g_slc=g_slc, g_swa=None,
            block_counts=2, block_size=block_size, window_size=0,
        )  # fmt: skip
        assert out.shape == (B, N, H, 6)
        assert indices.shape == (B, H, N, 2)
        for b in range(B):
            expected = bsa_attention(
                q[b], k[b], v[b], torch.tensor([0, N]), N, (g_cmp[b], g_slc[b], None),
                block_counts=2, block_size=block_size, selection_group=2 if block_size == 16 else 1,
            )  # fmt: skip
            torch.testing.assert_close(out[b], expected)

    def test_module_trains(self):
        torch.manual_seed(0)
        layer = compat.TritonHSTUBSAAttention(
            embedding_dim=12, linear_hidden_dim=6, attention_dim=8, num_heads=2, block_counts=2, block_size=8
        )
        gate_model = GateModel(in_features=8, hidden_dim=4)
        x = torch.randn(37, 12, requires_grad=True)
        out, padded_q, padded_k = layer(x, torch.tensor([0, 20, 37]), torch.zeros(2, 32, 32), gate_model)
        assert out.shape == x.shape
        assert padded_q.shape == padded_k.shape == (2, 32, 2, 8)
        out.square().sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
