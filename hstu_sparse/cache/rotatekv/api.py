"""Define the public functions of RotateKV over jagged tensors, and their validation.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group (head_group).

Source: RotateKV (IJCAI 2025, arXiv 2501.16383), Mustafar (arXiv 2505.22913).
"""

import typing

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.cache import store
from hstu_sparse.cache.format import PageFormat, Side, check_codes, check_heads
from hstu_sparse.cache.paged.reference import Scoring, check_scoring
from hstu_sparse.cache.rotatekv import reference
from hstu_sparse.cache.rotatekv.cache import RotateKVCache, check_kv
from hstu_sparse.core import validation
from hstu_sparse.core.jagged import check_jagged, check_offset_values, check_storage, readable, sequence_ids
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import (
    FLOATING_DTYPES,
    check_int,
    check_not_empty,
    check_qkv,
    check_tensor,
    choose_backend,
)
from hstu_sparse.dense import hstu_attention

if typing.TYPE_CHECKING:
    from hstu_sparse.dense.plan import AttentionPlan

MAX_HADAMARD = 4096


@without_autocast
def hadamard_transform(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiply the last dimension by Sylvester's Hadamard matrix times n ** -0.5. Applying this twice restores x.

    Args:
        x: [..., n], fp16, bf16 or fp32 (the reference also fp64); n is a power of two, up to 4,096 for the kernel.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [..., n], contiguous, dtype of x. Gradients flow to x.

    Examples:
        >>> x = hstu_sparse.hadamard_transform(torch.tensor([2.0, 0, 0, 0]))
        >>> x, hstu_sparse.hadamard_transform(x)
        (tensor([1., 1., 1., 1.]), tensor([2., 0., 0., 0.]))

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor [..., n], got {type(x).__name__}")
    check_storage("x", x)
    if x.dtype not in FLOATING_DTYPES:
        raise TypeError(f"x must be floating point, got {x.dtype}")
    n = x.shape[-1] if x.dim() else 0
    if n < 1 or n & (n - 1):
        raise ValueError(f"the last dimension of x must be a power of two, got shape {list(x.shape)}")
    if choose_backend(backend, x, "hadamard_transform") == "reference":
        return store.hadamard_reference(x)
    if n > MAX_HADAMARD:
        raise ValueError(f"the kernel supports n up to {MAX_HADAMARD}, got {n}; use backend='reference'")
    from hstu_sparse.cache.rotatekv.hadamard import hadamard_operator

    return hadamard_operator(x)


@without_autocast
def calibrate(k: Tensor, *, head_group: int = 2, quant_group: int = 64) -> Tensor:
    """Compute an order of channels from sample keys, for the argument `channel_order` of `rotatekv_compress`.

    The transform spreads a channel over all quantisation groups. A channel whose index is a multiple of quant_group
    adds a constant to each group, which changes the group's zero but not its range. Therefore the channels with the
    largest root mean square get these indices, the next ones the following indices, and so on.

    Args:
        k: [T, H, D] sample keys before RoPE, floating point.
        head_group, quant_group: see `rotatekv_compress`.

    Returns:
        [H / head_group, D * head_group] int64: the channel of the head group for each index.

    Examples:
        >>> hstu_sparse.calibrate(torch.randn(100, 2, 16)).shape  # one head group of 2 heads of 16
        torch.Size([1, 32])

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    check_codes(head_group=head_group, quant_group=quant_group)
    sizes: dict[str, int] = {}
    check_tensor("k", k, "T H D", sizes)
    check_storage("k", k, values=True)
    if sizes["T"] == 0:
        raise ValueError("k must have sample tokens, got T=0")
    check_heads(sizes["H"], sizes["D"], head_group)
    keys = Side.for_channels(sizes["D"] * head_group, quant_group, 2)
    strength = store.grouped(k.detach(), head_group).double().square().mean(0)
    ranked = strength.sort(dim=-1, descending=True, stable=True).indices
    return ranked.unflatten(-1, (keys.group, keys.groups)).transpose(1, 2).flatten(1).contiguous()


def _check_format(k: Tensor, v: Tensor, seq_offsets: Tensor, codes: dict[str, typing.Any]) -> PageFormat:
    sizes = check_kv(k, v, seq_offsets)
    check_codes(**codes)
    check_heads(sizes["H"], sizes["D"], codes["head_group"])
    return PageFormat(sizes["H"], sizes["D"], sizes["V"], k.dtype, **codes)


def _check_order(channel_order: Tensor | None, format: PageFormat, device: torch.device, wait: bool) -> Tensor | None:
    """Check the order and return it, [HG, C] int64, contiguous. wait: check values on a GPU, too."""
    if channel_order is None:
        return None
    sizes = {"HG": format.head_groups, "C": format.keys.channels}
    check_tensor("channel_order", channel_order, "HG C", sizes, dtype=torch.int64, device=device)
    all_channels = torch.arange(sizes["C"], device=device).expand_as(channel_order)
    if (wait or readable(channel_order)) and not torch.equal(channel_order.sort(-1).values, all_channels):
        raise ValueError(f"each row of channel_order must be a permutation of 0 to {sizes['C'] - 1}")
    return channel_order.contiguous()


@without_autocast
def rotatekv_compress(
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    *,
    bits: int = 2,
    head_group: int = 2,
    quant_group: int = 64,
    sparsity: float = 0.0,
    sink_tokens: int = 0,
    clip: float = 1.0,
    channel_order: Tensor | None = None,
    backend: str = "auto",
) -> RotateKVCache:
    """Quantise keys and values to a few bits for each channel, and return them as a cache.

    The keys of head_group consecutive heads are concatenated, permuted by channel_order, rotated by a Hadamard
    transform, which spreads outliers, pruned to the largest magnitudes, and quantised: for each token and quant_group
    channels x ~ zero + scale * code. Values are only quantised.

    Args:
        k: [T, H, D] keys before RoPE, fp16, bf16 or fp32 (the reference also fp64); any strides. D * head_group must be
            a power of two from 16 to 1,024.
        v: [T, H, V], dtype of k.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        bits: the number of bits of a code: 2, 3, 4 or 8.
        head_group: the number of heads that are rotated together: 1, 2 or 4, a divisor of H.
        quant_group: the number of channels that share a scale and a zero (fp16), a power of two from 16; all channels
            of a head group if there are fewer.
        sparsity: the share of the channels of a rotated key that are set to 0, from 0 to 0.9: the smallest magnitudes
            of each token.
        sink_tokens: the number of first tokens of each sequence that are not quantised.
        clip: the share of a quantisation group's range, around its middle, that the codes cover; values outside get the
            nearest code. 0.75 for 2 bits and 0.9 for 3 bits have the smallest error (docs/rotatekv.md).
        channel_order: [H / head_group, D * head_group] int64, the result of `calibrate`; the cache stores a copy.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        The cache. Not differentiable; for training use `rotatekv_self_attention`. Waits for the device.

    Examples:
        >>> k, v, seq_offsets = torch.randn(40, 2, 64), torch.randn(40, 2, 64), torch.tensor([0, 40])
        >>> cache = hstu_sparse.rotatekv_compress(k, v, seq_offsets, bits=8)
        >>> keys, values = hstu_sparse.rotatekv_decompress(cache)
        >>> (keys - k).abs().max() < 0.05, (values - v).abs().max() < 0.05
        (tensor(True), tensor(True))

    Raises:
        TypeError, ValueError: with the expected and the actual value. On a CPU, and elsewhere with HSTU_SPARSE_DEBUG=1,
            ValueError is raised for keys (after the rotation) and values that are too large for fp16 scales and zeros,
            or all so small that fp16 is too coarse for their scales. Without
            this check large ones are clamped, and the smallest ones are restored as the zero of their group.

    NaN is restored as NaN, but `RotateKVCache.save` raises ValueError for it. The error of a group of very small
    numbers, next to groups of larger ones, is up to (2^bits - 1) * 2^-25.
    """
    codes = dict(bits=bits, head_group=head_group, quant_group=quant_group, sparsity=float(sparsity))
    format = _check_format(k, v, seq_offsets, codes | dict(sink_tokens=sink_tokens, clip=clip))
    order = _check_order(channel_order, format, k.device, wait=True)
    order = None if order is None else order.clone()  # the caller may change the original
    cache = RotateKVCache.empty(format, seq_offsets.shape[0] - 1, k.device, order)
    return cache.append(k, v, seq_offsets, backend=backend)


@without_autocast
@torch.no_grad()
def rotatekv_round_trip(
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    *,
    bits: int = 2,
    head_group: int = 2,
    quant_group: int = 64,
    sparsity: float = 0.0,
    sink_tokens: int = 0,
    clip: float = 1.0,
    channel_order: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (k [T, H, D], v [T, H, V]) as a cache would restore them, without a cache.

    Not differentiable; for training use `rotatekv_self_attention`. Does not wait for the device. For arguments and
    errors see `rotatekv_compress`.

    Examples:
        >>> k, v, seq_offsets = torch.randn(40, 2, 64), torch.randn(40, 2, 64), torch.tensor([0, 40])
        >>> keys, values = hstu_sparse.rotatekv_round_trip(k, v, seq_offsets, bits=8)
        >>> (keys - k).abs().max() < 0.05
        tensor(True)
    """
    codes = dict(bits=bits, head_group=head_group, quant_group=quant_group, sparsity=float(sparsity))
    codes |= dict(sink_tokens=sink_tokens, clip=clip)
    return round_trip(k, v, seq_offsets, codes, channel_order, backend)


def round_trip(
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    codes: dict[str, typing.Any],
    channel_order: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Compute `rotatekv_round_trip` with gradients: quantisation is differentiated as the identity.

    codes: the options bits, head_group, quant_group, sparsity, sink_tokens and clip.
    """
    format = _check_format(k, v, seq_offsets, codes)
    channel_order = _check_order(channel_order, format, k.device, wait=False)
    chosen = choose_backend(backend, k, "rotatekv_round_trip")
    if chosen == "reference" or readable(k):
        position = torch.arange(len(k), device=k.device) - seq_offsets[sequence_ids(seq_offsets, len(k))]
        sinks = position < format.sink_tokens
        with torch.no_grad():
            restored = reference.round_trip_reference(k, v, sinks, format, channel_order)
        if chosen == "reference":
            if torch.is_grad_enabled():  # add 0, whose gradient is that of k or v
                restored = tuple(y + (x - x.detach()) for x, y in zip((k, v), restored, strict=True))
            return restored
    from hstu_sparse.cache.launch import round_trip_operator

    f = format
    options = f.bits, f.head_group, f.quant_group, f.sparsity, f.sink_tokens, float(f.clip)
    return round_trip_operator(k, v, seq_offsets, channel_order, *options)


@without_autocast
def rotatekv_self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    *,
    bits: int = 2,
    head_group: int = 2,
    quant_group: int = 64,
    sparsity: float = 0.0,
    sink_tokens: int = 0,
    clip: float = 1.0,
    channel_order: Tensor | None = None,
    scale: float | None = None,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    plan: "AttentionPlan | None" = None,
    backend: str = "auto",
) -> Tensor:
    """Compute `hstu_attention` to quantised keys and values, for training a model that is served with a cache.

    A token attends to other tokens as the cache restores them, and to itself without quantisation. The gradient of
    quantisation is the identity (straight-through).

    Args:
        q, k: [T, H, D], fp16, bf16 or fp32 (the reference also fp64); any strides.
        v: [T, H, V], dtype of q.
        bits, head_group, quant_group, sparsity, sink_tokens, clip, channel_order: as `rotatekv_compress`.
        The others: as `hstu_attention`.

    Returns:
        [T, H, V], dtype of q. Gradients flow to q, k, v and both tables.

    Examples:
        >>> q, k, v = torch.randn(3, 40, 2, 64)
        >>> seq_offsets = torch.tensor([0, 40])
        >>> out = hstu_sparse.rotatekv_self_attention(q, k, v, seq_offsets, max_seq_len=40, bits=8)
        >>> torch.allclose(out, hstu_sparse.hstu_attention(q, k, v, seq_offsets, max_seq_len=40), atol=0.02)
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    backend = choose_backend(backend, q, "rotatekv_self_attention")
    sizes = check_qkv(q, k, v, seq_offsets, max_seq_len)
    scale, normalizer = validation.check_factors(scale, normalizer, sizes["D"], max_seq_len)
    bias = check_bias(bias, max_seq_len, sizes["T"], q.device)
    codes: dict[str, typing.Any] = dict(bits=bits, head_group=head_group, quant_group=quant_group)
    codes |= dict(sparsity=float(sparsity), sink_tokens=sink_tokens, clip=clip)
    coded_k, coded_v = round_trip(k, v, seq_offsets, codes, channel_order, backend)
    if backend == "triton":
        from hstu_sparse.cache.rotatekv.self_term import self_term_operator

        self_term = self_term_operator(q, k, v, coded_k, coded_v, *bias, scale, normalizer)
    else:
        self_term = reference.self_term(q, k, v, coded_k, coded_v, bias, scale, normalizer)
    options: dict[str, typing.Any] = dict(scale=scale, normalizer=normalizer, bias=bias, plan=plan, backend=backend)
    return hstu_attention(q, coded_k, coded_v, seq_offsets, max_seq_len, **options) + self_term


@without_autocast
def rotatekv_decompress(cache: RotateKVCache, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Restore (k [T, H, D], v [T, H, V]) from a cache, in the original dtype; keys are those before RoPE.

    backend: see `rotatekv_compress`.

    Examples:
        >>> k, v, seq_offsets = torch.randn(40, 2, 64), torch.randn(40, 2, 64), torch.tensor([0, 40])
        >>> cache = hstu_sparse.rotatekv_compress(k, v, seq_offsets, bits=4)
        >>> keys, values = hstu_sparse.rotatekv_decompress(cache)
        >>> keys.shape, values.shape
        (torch.Size([40, 2, 64]), torch.Size([40, 2, 64]))
    """
    _check_cache(cache)
    if choose_backend(backend, cache.seq_offsets, "rotatekv_decompress") == "reference":
        return reference.decompress_reference(cache)
    from hstu_sparse.cache.launch import decompress

    return decompress(cache)


@without_autocast
def rotatekv_attention(
    q: Tensor,
    q_offsets: Tensor,
    cache: RotateKVCache,
    max_seq_len: int,
    *,
    activation: str = "silu",
    scale: float | None = None,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    rope_base: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of queries to all cached tokens of their sequence, without decompressing the cache.

        silu:     o[t] = (1/N) * sum over s of SiLU(scale * q[t].k[s] + b(t, s)) * v[s]
        softmax:  o[t] = sum over s of softmax(scale * q[t].k[s] + b(t, s)) * v[s]

    All queries of sequence b have position n_b, the number of its cached tokens. They do not attend to themselves: the
    caller adds that term (SiLU), or merges it by log-sum-exp (softmax). For a sequence without cached tokens the result
    is 0.

    Args:
        q: [Tq, H, D], dtype of the cache; any strides.
        q_offsets: [B+1], int32 or int64, from 0 to Tq: the queries of each cached sequence.
        cache: the result of `rotatekv_compress`.
        max_seq_len: N, at least the length of the longest cached sequence.
        activation: "silu" or "softmax".
        scale: factor of the scores, D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N of silu; `max_seq_len` by default.
        bias: the position table has more than max_seq_len entries, read at n_b - s; `timestamps` [T] are those of the
            cached tokens, `query_timestamps` [Tq] those of the queries. Not differentiable.
        rope_base: the base of RoPE, with cached token s at position s and queries at n_b: pair (i, i + D/2) is rotated
            by position * rope_base ** (-2i/D); D must be even. None for no RoPE.
        return_lse: also return the log-sum-exp of the scores, [Tq, H] fp32 (softmax only).
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [Tq, H, V], dtype of q; with return_lse a tuple. Not differentiable.

    Examples:
        >>> k, v, seq_offsets = torch.randn(40, 2, 64), torch.ones(40, 2, 64), torch.tensor([0, 40])
        >>> cache = hstu_sparse.rotatekv_compress(k, v, seq_offsets, bits=2)
        >>> q, q_offsets = torch.randn(1, 2, 64), torch.tensor([0, 1])  # one query
        >>> out = hstu_sparse.rotatekv_attention(q, q_offsets, cache, max_seq_len=40, activation="softmax")
        >>> torch.allclose(out, torch.ones(1, 2, 64))  # a mean of ones
        True

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    _check_cache(cache)
    known = readable(cache.seq_offsets)
    tokens = bias.timestamps.shape[0] if isinstance(bias, RelativeBias) and bias.timestamps is not None else 0
    if tokens and known:
        tokens = sum(cache.lengths)
    sizes = {"H": cache.format.heads, "D": cache.format.head_size}
    bias = _check_queries(q, q_offsets, sizes, cache.seq_offsets, max_seq_len, bias, tokens)
    scoring = check_scoring(activation, scale, normalizer, bias, max_seq_len, sizes["D"], rope_base, return_lse)
    if q.dtype != cache.dtype:
        raise TypeError(f"q must be {cache.dtype}, as the cache, got {q.dtype}")
    if known:
        check_offset_values(cache.seq_offsets, max_seq_len, None)
    if choose_backend(backend, q, "rotatekv_attention") == "reference":
        restored = *reference.decompress_reference(cache), cache.seq_offsets
        return _by_reference(q, q_offsets, restored, scoring)
    from hstu_sparse.cache.rotatekv.launch import attend_to_cache

    return _results(*attend_to_cache(q, q_offsets, cache, max_seq_len, scoring))


@without_autocast
def unpacked_attention(
    q: Tensor,
    q_offsets: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    *,
    activation: str = "silu",
    scale: float | None = None,
    normalizer: float | None = None,
    bias: RelativeBias | None = None,
    rope_base: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `rotatekv_attention` for uncompressed keys and values, such as the result of `rotatekv_decompress`.

    Args:
        k, v: [T, H, D] and [T, H, V], dtype of q, any strides.
        seq_offsets: [B+1], the offsets of k and v.
        The others: as `rotatekv_attention`.
    """
    sizes: dict[str, int] = {}
    check_tensor("k", k, "T H D", sizes)
    check_tensor("v", v, "T H V", sizes, dtype=k.dtype, device=k.device)
    check_jagged(seq_offsets, max_seq_len, k=k, v=v)
    check_not_empty(sizes, "H", "D", "V")
    sizes.pop("V")
    bias = _check_queries(q, q_offsets, sizes, seq_offsets, max_seq_len, bias, sizes.pop("T"))
    scoring = check_scoring(activation, scale, normalizer, bias, max_seq_len, sizes["D"], rope_base, return_lse)
    if q.dtype != k.dtype:
        raise TypeError(f"q must be {k.dtype}, as k, got {q.dtype}")
    if choose_backend(backend, q, "unpacked_attention") == "reference":
        return _by_reference(q, q_offsets, (k, v, seq_offsets), scoring)
    from hstu_sparse.cache.rotatekv.launch import attend_to_rows

    return _results(*attend_to_rows(q, q_offsets, (k, v, seq_offsets), max_seq_len, scoring))


def _check_cache(cache) -> None:
    if not isinstance(cache, RotateKVCache):
        raise TypeError(f"cache must be a RotateKVCache, got {type(cache).__name__}")


def _check_queries(
    q: Tensor,
    q_offsets: Tensor,
    sizes: dict[str, int],
    seq_offsets: Tensor,
    max_seq_len: int,
    bias: RelativeBias | None,
    tokens: int,
) -> RelativeBias:
    """Check the queries and their bias; return the bias with defaults. tokens: the number of cached tokens."""
    check_tensor("q", q, "Tq H D", sizes, device=seq_offsets.device)
    check_jagged(q_offsets, max(1, sizes["Tq"]), name="q_offsets", q=q)
    check_int("max_seq_len", max_seq_len, 1)
    if q_offsets.shape != seq_offsets.shape:
        raise ValueError(f"q_offsets must be [B+1={seq_offsets.shape[0]}], got shape {list(q_offsets.shape)}")
    return check_bias(bias, max_seq_len + 1, tokens, q.device, query_tokens=sizes["Tq"])


@torch.no_grad()
def _by_reference(q: Tensor, q_offsets: Tensor, rows: tuple[Tensor, Tensor, Tensor], scoring: Scoring):
    out, lse = reference.attention_reference(
        q, q_offsets, *rows, activation="softmax" if scoring.softmax else "silu", scale=scoring.scale,
        normalizer=scoring.normalizer, bias=scoring.bias, rope_base=scoring.rope_base,
    )  # fmt: skip
    return _results(out, lse if scoring.return_lse else None)


def _results(out: Tensor, lse: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return out if lse is None else (out, lse.float())
