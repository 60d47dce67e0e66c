"""RotateKV: the mathematics by hand, the reference, the cache that grows and its file. No kernel runs here."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import hstu_sparse
from hstu_sparse import (
    PagePool,
    RelativeBias,
    RotateKVCache,
    calibrate,
    hadamard_transform,
    hstu_attention,
    rotatekv_attention,
    rotatekv_compress,
    rotatekv_decompress,
    rotatekv_round_trip,
    rotatekv_self_attention,
)
from hstu_sparse.cache import store
from hstu_sparse.cache.format import PageFormat, Side
from hstu_sparse.cache.rotatekv import reference
from hstu_sparse.compat import mustafar_attention_with_rope, mustafar_decompress_with_hadamard_inverse
from tests.support.budgets import EDGE_CASES, make_jagged, make_offsets, make_timestamps


def make(lengths=(37, 0, 130, 1), heads=2, size=32, value_size=24, dtype=torch.float32, seed=0):
    k = make_jagged(lengths, (heads, size), dtype=dtype, seed=seed)
    v = make_jagged(lengths, (heads, value_size), dtype=dtype, seed=seed + 1)
    return k, v, make_offsets(lengths)


def relative_error(actual, true):
    return ((actual - true).norm() / true.norm()).item()


def test_self_attention_by_a_loop():
    """Each token by itself: codes of the others, its own key and value; gradients as if the codes were k and v."""
    lengths, N, scale = (7, 0, 4), 9, 0.3
    k, v, offsets = make(lengths, size=16, value_size=5, dtype=torch.float64)
    q, times = make_jagged(lengths, (2, 16), dtype=torch.float64, seed=3), make_timestamps(lengths)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(N).double(), torch.randn(20).double())]
    bias, options = RelativeBias(*leaves[3:], times, times + 100), dict(bits=2, sink_tokens=1)
    coded = rotatekv_round_trip(k, v, offsets, **options)
    straight_k, straight_v = (x + (y - x).detach() for x, y in zip((k, v), coded))
    rows = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        for t in range(begin, end):
            total = torch.zeros(2, 5, dtype=torch.float64)
            for s in range(begin, t + 1):
                key, value = (k[s], v[s]) if s == t else (straight_k[s], straight_v[s])
                bucket = min(int(((times[t] + 100 - times[s]).double().log() / 0.301).floor()), 19)
                score = scale * (q[t] * key).sum(-1) + leaves[3][t - s] + leaves[4][bucket]
                total = total + (score * score.sigmoid())[:, None] * value / N
            rows.append(total)
    expected = torch.stack(rows)
    actual = rotatekv_self_attention(q, k, v, offsets, N, scale=scale, bias=bias, **options)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn(actual.shape).double()
    for x, y in zip(*(torch.autograd.grad(out, leaves, grad) for out in (actual, expected))):
        torch.testing.assert_close(x, y)
    assert (coded[0] != k).any() and (coded[0][0] == k[0]).all()


def test_hadamard_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(hadamard_transform(x), torch.tensor([10.0, -2.0, -4.0, 0.0]) / 2)
    x = torch.randn(3, 5, 64, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x)
    assert torch.autograd.gradcheck(hadamard_transform, (x[:1, :2, :8],))


def test_codes_by_hand():
    """Two bits, one group of 16: from -1 to 2 in steps of 1; a half goes to the even code; a constant has scale 0."""
    x = torch.tensor([-1.0, 0.0, 1.0, 2.0, -0.5, 0.5, 1.5, 0.2] * 2)
    side = Side.for_channels(16, 64, 2)
    coded = store.quantise(torch.stack((x, torch.full((16,), 3.0)))[:, None], side, 2, None)
    assert coded.codes[0, 0, :8].tolist() == [0, 1, 2, 3, 0, 2, 2, 1]
    assert (coded.scale.flatten().tolist(), coded.zero.flatten().tolist()) == ([1.0, 0.0], [-1.0, 3.0])
    assert (coded.codes[1] == 0).all()
    assert torch.equal(store.dequantise(coded, side, torch.float32)[1], torch.full((1, 16), 3.0))


def test_clipped_codes_by_hand():
    """Three quarters of a range from -1 to 7 reach from 0 to 6 in steps of 2; what lies outside becomes 0 or 6."""
    x = torch.tensor([-1.0, 7.0, 0.0, 6.0, 0.9, 1.1, 3.2, 5.2] * 2)[None, None]
    side, options = Side.for_channels(16, 64, 2), PageFormat(2, 16, 16, bits=2, clip=0.75)
    coded = store.quantise(x, side, 2, None, options.inset)
    assert (coded.zero.item(), coded.scale.item()) == (0.0, 2.0)
    assert coded.codes[0, 0, :8].tolist() == [0, 3, 0, 3, 0, 1, 2, 3]


def test_clipping_helps_few_codes():
    """The greatest of rotated numbers are rare: 2-bit codes of a range without them have 2/3 of the squared error."""
    k, v, offsets = make((300,))
    whole, clipped = (
        relative_error(rotatekv_round_trip(k, v, offsets, bits=2, clip=clip)[0], k) for clip in (1.0, 0.75)
    )
    assert clipped**2 < 0.67 * whole**2


def test_codes_are_of_the_stored_scale():
    x = torch.linspace(0, 1000.3, 64)[None, None]
    side = Side.for_channels(64, 64, 8)
    coded = store.quantise(x, side, 8, None)
    scale, zero = coded.scale.float(), coded.zero.float()
    assert scale.item() != 1000.3 / 255
    assert torch.equal(coded.codes[0, 0], ((x[0, 0] - zero) / scale).flatten().clamp(0, 255).round().long())


def test_pruning_keeps_the_greatest_and_the_first_of_equals():
    x = torch.tensor([[[1.0, -3.0, 2.0, -2.0, 2.0, 0.0, 3.0, -1.0]]])
    assert store.prune(x, 4)[0, 0].nonzero().flatten().tolist() == [1, 2, 3, 6]
    assert PageFormat(2, 64, 64, bits=2, sparsity=0.7).num_kept == 39  # ceil(0.3 * 128)
    assert PageFormat(2, 64, 64, bits=2, sparsity=0.9).num_kept == 13  # ceil(0.1 * 128)


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_is_exact_and_dense(bits, width):
    codes = torch.randint(2**bits, (5, 3, 4 * width), generator=torch.Generator().manual_seed(0))
    words = store.pack(codes, width, bits)
    assert torch.equal(store.unpack(words, width, bits), codes)
    if width * bits % 32 == 0 and (bits != 3 or width >= 32):
        assert words.numel() * 32 == codes.numel() * bits


def test_packing_order_by_hand():
    """The channel at place (field * words + word) * 2 + half is at bit half * 16 + field * 2 of its word."""
    codes = torch.zeros(64, dtype=torch.long)
    codes[(5 * 4 + 3) * 2 + 1] = 2
    words = store.pack(codes, 64, 2)
    assert words.tolist() == [[0, 0, 0, 2 << (16 + 10)]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_of_what_is_kept(bits):
    mask = store.prune(torch.randn(7, 2, 64, generator=torch.Generator().manual_seed(1)), 13)
    codes = torch.randint(2**bits, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    words = store.pack_kept(codes, mask, 13, bits)
    assert words.shape[-1] == sum(-(-13 * plane // 32) for plane in ((2, 1) if bits == 3 else (bits,)))
    assert torch.equal(store.unpack_kept(words, mask, 13, bits), codes)


@pytest.mark.parametrize("options", [{}, dict(head_group=4), dict(head_group=1, quant_group=16), dict(sink_tokens=5)])
@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.12), (3, 0.25), (2, 0.5)])
def test_error_of_a_round_trip(bits, most, options):
    k, v, offsets = make(heads=4)
    for name, x, y in zip("kv", (k, v), rotatekv_decompress(rotatekv_compress(k, v, offsets, bits=bits, **options))):
        assert relative_error(y, x) < most, name


@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize("options", [{}, dict(sparsity=0.5, sink_tokens=3), dict(bits=3, sink_tokens=25, clip=0.8)])
def test_round_trip_is_decompress_of_compress(name, options):
    k, v, offsets = make(EDGE_CASES[name][0])
    restored = rotatekv_decompress(rotatekv_compress(k, v, offsets, **options))
    for x, y in zip(restored, rotatekv_round_trip(k, v, offsets, **options)):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    sinks = options.get("sink_tokens", 0)
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:]):
        last = min(end, begin + sinks)
        assert torch.equal(restored[0][begin:last], k[begin:last])
        assert torch.equal(restored[1][begin:last], v[begin:last])


def outlier_keys(heads=2, size=32, seed=0):
    """Keys as models have them: a few channels many times as large as the others."""
    k, v, offsets = make((200, 100), heads=heads, size=size, seed=seed)
    k[:, :, 3] += 12.0
    k[:, 0, 17] *= 15.0
    return k, v, offsets


def test_rotation_helps_with_outliers():
    """Compare with codes of as many bits without rotation, which is how values are encoded."""
    k, _, offsets = outlier_keys()
    rotated, plain = rotatekv_round_trip(k, k, offsets, bits=2)
    normal = [c for c in range(32) if c not in (3, 17)]
    assert relative_error(rotated[:, :, normal], k[:, :, normal]) < 0.8 * relative_error(
        plain[:, :, normal], k[:, :, normal]
    )
    assert relative_error(rotated, k) < relative_error(plain, k)


def test_calibrated_order_helps_with_outliers():
    k, v, offsets = outlier_keys(size=128)
    order = calibrate(k[:150])
    assert torch.equal(order.sort(-1).values, torch.arange(256).expand(1, 256))
    assert sorted(order[0, [0, 64, 128]].tolist()) == [3, 17, 128 + 3]
    errors = [relative_error(rotatekv_round_trip(k, v, offsets, channel_order=o)[0], k) for o in (order, None)]
    assert errors[0] < 0.9 * errors[1]


def test_size():
    """At 2 bits at most 0.17 of bf16, scales included; pruning makes it smaller still."""
    for lengths in ((8192,), (200, 150, 33, 180)):
        k, v, offsets = make(lengths, heads=2, size=128, value_size=128, dtype=torch.bfloat16)
        whole = 2 * (k.numel() + v.numel())
        dense = rotatekv_compress(k, v, offsets, bits=2).nbytes
        assert dense <= 0.17 * whole, f"{dense / whole:.4f}"
        if lengths == (8192,):
            assert rotatekv_compress(k, v, offsets, bits=2, sparsity=0.7).nbytes < dense


def codes_at(cache, sequence, position):
    format = cache.pool.format
    return store.read_codes(cache.tensors, format, *store.locate_tokens(format, cache.pages, sequence, position))


@pytest.mark.parametrize(
    "options", [{}, dict(sparsity=0.6), dict(bits=3, sink_tokens=9), dict(sparsity=0.3, sink_tokens=70)]
)
def test_append_leaves_what_is_packed_and_equals_compressing_all(options):
    steps = [(37, 0, 130, 1), (0, 0, 0, 0), (1, 1, 1, 1), (90, 3, 64, 0)]
    portions = [make(lengths, seed=10 * i) for i, lengths in enumerate(steps)]
    cache = rotatekv_compress(*portions[0], **options)
    for k, v, offsets in portions[1:]:
        sequence, position = (x[cache.tokens()[1] >= cache.format.sink_tokens] for x in cache.tokens())
        before, lengths = codes_at(cache, sequence, position), cache.lengths
        rows, sinks = [list(row) for row in cache.rows], cache.tensors.get("sink_k", torch.zeros(0)).clone()
        assert cache.append(k, v, offsets) is cache
        for actual, expected in zip(codes_at(cache, sequence, position), before):
            assert all(x is y is None or torch.equal(x, y) for x, y in zip(actual, expected))
        for row, now, length in zip(rows, cache.rows, lengths):
            assert list(now[: len(row)]) == row
            if row and cache.format.sink_tokens:
                stored_sinks = cache.tensors["sink_k"][row[0], : min(length, cache.format.sink_tokens)]
                assert torch.equal(stored_sinks, sinks[row[0], : min(length, cache.format.sink_tokens)])
    together = [
        torch.cat([part[x][part[2][b] : part[2][b + 1]] for b in range(4) for part in portions]) for x in (0, 1)
    ]
    offsets = sum(part[2] for part in portions)
    for x, y in zip(rotatekv_decompress(cache), rotatekv_decompress(rotatekv_compress(*together, offsets, **options))):
        assert torch.equal(x, y)
    assert torch.equal(cache.seq_offsets, offsets)


def test_append_refuses_what_does_not_fit():
    cache = rotatekv_compress(*make())
    for wrong, message in (
        (make(size=16, heads=4), "H=2, got keys and values with H=4"),
        (make(lengths=(1, 2)), "B\\+1=5"),
        (make(value_size=8), "V=24"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(*wrong)
    with pytest.raises(TypeError, match="float32"):
        cache.append(*make(dtype=torch.float64))


def test_attention_equals_dense_attention_of_the_last_token():
    """A query at the end, with its own token added, against hstu_attention over all; both biases."""
    lengths, N = (30, 1, 12), 40
    k, v, offsets = make(lengths, value_size=32)
    q = make_jagged(lengths, (2, 32), seed=5)
    times = make_timestamps(lengths)
    tables = dict(position=torch.randn(N), time=torch.randn(129))
    query_times = times + 1000
    whole = hstu_attention(
        q, k, v, offsets, N, bias=RelativeBias(**tables, timestamps=times, query_timestamps=query_times)
    )
    last = offsets[1:] - 1
    history = torch.ones(len(k), dtype=torch.bool)
    history[last] = False
    lens = offsets.diff() - 1
    cached = make_offsets(lens.tolist())
    cache = rotatekv_compress(k[history], v[history], cached, bits=8, sink_tokens=64)
    bias = RelativeBias(**tables, timestamps=times[history], query_timestamps=query_times[last])
    out = rotatekv_attention(q[last], torch.arange(4), cache, N - 1, bias=bias) * ((N - 1) / N)
    own_score = (q[last] * k[last]).sum(-1) * 32**-0.5 + tables["position"][0]
    own_score = (
        own_score + tables["time"][hstu_sparse.bias.relative.time_bucket(query_times[last] - times[last], 128)][:, None]
    )
    out = out + torch.nn.functional.silu(own_score)[..., None] * v[last] / N
    torch.testing.assert_close(out, whole[last])


def test_softmax_parts_merge_by_log_sum_exp():
    k, v, _ = make((50,))
    q = make_jagged((3,), (2, 32), seed=7)
    parts = []
    for part in (slice(0, 20), slice(20, 50), slice(0, 50)):
        cache = rotatekv_compress(k[part], v[part], make_offsets((part.stop - part.start,)), sink_tokens=100)
        parts.append(rotatekv_attention(q, make_offsets((3,)), cache, 50, activation="softmax", return_lse=True))
    share = torch.stack([lse for _, lse in parts[:2]]).softmax(0)[..., None]
    torch.testing.assert_close(share[0] * parts[0][0] + share[1] * parts[1][0], parts[2][0])


def test_rope_depends_on_distance_only_and_two_stages_agree():
    k, v, offsets = make((40, 7))
    q, q_offsets = make_jagged((2, 3), (2, 32), seed=3), make_offsets((2, 3))
    cache = rotatekv_compress(k, v, offsets)
    options = dict(activation="softmax", rope_base=100.0, return_lse=True)
    fused = rotatekv_attention(q, q_offsets, cache, 40, **options)
    restored = mustafar_decompress_with_hadamard_inverse(cache)
    staged = mustafar_attention_with_rope(q, q_offsets, *restored, offsets, 40, **options)
    torch.testing.assert_close(fused, staged)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    near, shifted = (reference.rope(x, torch.arange(5) + shift, 50.0) for shift in (0, 1000))
    torch.testing.assert_close(near @ near.transpose(1, 2), shifted @ shifted.transpose(1, 2))
    scores = [reference.rope(x, torch.tensor([p] * 5), 50.0)[1:] * reference.rope(x, torch.arange(5) + p, 50.0)[:-1]
              for p in (0, 77)]  # fmt: skip
    torch.testing.assert_close(scores[0].sum(-1), scores[1].sum(-1))


@pytest.mark.parametrize("options", [{}, dict(sparsity=0.5, sink_tokens=4, bits=3)])
def test_file(tmp_path, options):
    k, v, offsets = make()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[None]
    cache = rotatekv_compress(k, v, offsets, channel_order=order, **options)
    cache.append(*make((1, 2, 3, 4)))
    cache.save(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    loaded = RotateKVCache.load(tmp_path / "cache")
    assert loaded.format == cache.format and loaded.dtype == cache.dtype and loaded.nbytes == cache.nbytes
    for saved, restored in zip(rotatekv_decompress(cache), rotatekv_decompress(loaded)):
        assert torch.equal(saved, restored)
    assert torch.equal(cache.channel_order, loaded.channel_order) and loaded.lengths == cache.lengths
    more = make((0, 1, 0, 20), seed=9)
    for x, y in zip(rotatekv_decompress(cache.append(*more)), rotatekv_decompress(loaded.append(*more))):
        assert torch.equal(x, y)


def damage(path, how):
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "one bit":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    elif how == "noise":
        path.write_bytes(bytes(range(256)) * 9)
    elif how == "foreign":
        save_file({"k_codes": torch.zeros(3)}, path)
    elif how == "other options":
        tensors = load_file(path)
        path.write_bytes(data.replace(b'\\"heads\\": 2', b'\\"heads\\": 4'))
        assert path.read_bytes() != data and tensors
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "empty", "one bit", "noise", "foreign", "other options", "missing"])
def test_damaged_file_is_refused_in_one_line(tmp_path, how):
    path = tmp_path / "cache"
    rotatekv_compress(*make()).save(path)
    damage(path, how)
    with pytest.raises(ValueError, match="cache: ") as caught:
        RotateKVCache.load(path)
    assert "\n" not in str(caught.value)


def test_pages_of_a_pool_are_no_cache(tmp_path):
    pool = PagePool(PageFormat(2, 16, 16, bits=2), 3, layers=2)
    pool.save(tmp_path / "cache", [], [])
    with pytest.raises(ValueError, match="expected a RotateKV cache, got the pages of a pool"):
        RotateKVCache.load(tmp_path / "cache")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(bits=5), ValueError, "bits must be one of 2, 3, 4, 8, got 5"),
        (dict(head_group=3), ValueError, "head_group must be one of"),
        (dict(head_group=4), ValueError, "must divide the number of heads, got H=2"),
        (dict(quant_group=48), ValueError, "quant_group must be a power of two"),
        (dict(sparsity=0.95), ValueError, "sparsity must be from 0 to 0.9"),
        (dict(sparsity=float("nan")), ValueError, "sparsity"),
        (dict(clip=0.0), ValueError, "clip must be above 0 and at most 1"),
        (dict(clip=1.5), ValueError, "clip must be above 0 and at most 1"),
        (dict(sink_tokens=-1), ValueError, "sink_tokens must be at least 0"),
        (dict(bits=True), TypeError, "bits must be a whole number"),
        (dict(channel_order=torch.zeros(1, 64, dtype=torch.long)), ValueError, "must be a permutation of 0 to"),
        (dict(channel_order=torch.zeros(64, dtype=torch.long)), ValueError, "HG=1, C=64"),
        (dict(backend="cuda"), ValueError, "backend must be one of"),
    ],
)
def test_options_are_refused(changed, error, message):
    with pytest.raises(error, match=message):
        rotatekv_compress(*make(), **changed)


@pytest.mark.parametrize(("size", "group", "near"), [(25, 2, "D=16 or D=32"), (48, 1, "D=32 or D=64"), (4, 2, "D=8")])
def test_heads_that_cannot_be_rotated_are_refused_with_those_that_can(size, group, near):
    with pytest.raises(ValueError, match=f"got D={size}, head_group={group}; .* {near}$"):
        rotatekv_compress(*make(size=size), head_group=group)


def test_attention_is_refused():
    k, v, offsets = make()
    cache = rotatekv_compress(k, v, offsets)
    q, q_offsets = torch.zeros(4, 2, 32), torch.arange(5)
    run = lambda **changes: rotatekv_attention(
        **(dict(q=q, q_offsets=q_offsets, cache=cache, max_seq_len=130) | changes)
    )
    for changes, error, message in (
        (dict(q=q[:, :1]), ValueError, "H=2, D=32"),
        (dict(q=q.double()), TypeError, "float32, as the cache"),
        (dict(q=q[:3], q_offsets=q_offsets[:-1]), ValueError, "B\\+1=5"),
        (dict(cache=k), TypeError, "RotateKVCache"),
        (dict(activation="relu"), ValueError, "silu or softmax"),
        (dict(return_lse=True), ValueError, "softmax"),
        (dict(rope_base=0.0), ValueError, "rope_base"),
        (dict(bias=RelativeBias(torch.zeros(130))), ValueError, "at least 131"),
        (dict(bias=RelativeBias(None, torch.zeros(9), torch.zeros(168, dtype=torch.long))), ValueError, "query_times"),
    ):
        with pytest.raises(error, match=message):
            run(**changes)
    with pytest.raises(ValueError, match="power of two"):
        hadamard_transform(torch.zeros(3, 12))
