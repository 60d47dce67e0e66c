"""Define the public functions of RotateKV over jagged tensors, their validation and the choice of implementation.

Letters: T cached tokens, Tq queries, B sequences, N max_seq_len, H heads, D query/key and V value head size, G heads of
a head group (head_group).

Source: RotateKV (IJCAI 2025, arXiv 2501.16383), Mustafar (arXiv 2505.22913).
"""

import dataclasses
import typing

import torch
from torch import Tensor

from hstu_sparse.bias.relative import RelativeBias, check_bias
from hstu_sparse.cache import packing
from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.layout import Layout, RotateKVOptions
from hstu_sparse.cache.rotatekv import reference
from hstu_sparse.cache.rotatekv.cache import RotateKVCache, check_kv
from hstu_sparse.core.jagged import check_jagged, check_offset_values, check_storage, readable, sequence_ids
from hstu_sparse.core.precision import without_autocast
from hstu_sparse.core.validation import (
    FLOATING_DTYPES,
    check_bool,
    check_int,
    check_normalizer,
    check_number,
    check_scale,
    check_some,
    check_tensor,
    choose_backend,
)

MOST_HADAMARD = 4096


@without_autocast
def hadamard_transform(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute the Walsh-Hadamard transform of the last dimension: Sylvester's matrix times n ** -0.5, its own inverse.

    Args:
        x: [..., n], fp16, bf16 or fp32 (the reference also fp64), n a power of two, for the kernel up to 4,096.
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
        return packing.hadamard_reference(x)
    if n > MOST_HADAMARD:
        raise ValueError(f"the kernel takes n up to {MOST_HADAMARD}, got {n}; use backend='reference'")
    from hstu_sparse.cache.rotatekv.hadamard import hadamard_operator

    return hadamard_operator(x)


@without_autocast
def calibrate(k: Tensor, *, head_group: int = 2, quant_group: int = 64) -> Tensor:
    """Compute an order of channels from sample keys, for `rotatekv_compress(..., channel_order=)`.

    After the transform a channel whose index is a multiple of quant_group is, except for its sign, a constant of every
    quantisation group, which the group's zero absorbs. So the channels with the greatest root mean square are assigned
    to those indices, the next ones to the following indices, and so on: channels with the same index within a group
    also add up in only half of the groups.

    Args:
        k: [T, H, D] sample keys (before RoPE), floating point.
        head_group, quant_group: the values for `rotatekv_compress`.

    Returns:
        [H / head_group, D * head_group] int64: maps an index to a channel of the head group.

    Examples:
        >>> hstu_sparse.calibrate(torch.randn(100, 2, 16)).shape  # one head group of 2 heads of 16
        torch.Size([1, 32])

    Raises:
        TypeError, ValueError: with the expected and the actual value.
    """
    options = RotateKVOptions(head_group=head_group, quant_group=quant_group)
    sizes: dict[str, int] = {}
    check_tensor("k", k, "T H D", sizes)
    check_storage("k", k, values=True)
    if sizes["T"] == 0:
        raise ValueError("k must have sample tokens, got T=0")
    layout = Layout(options, sizes["H"], sizes["D"], 1)
    strength = packing.grouped(k.detach(), head_group).double().square().mean(0)
    ranked = strength.sort(dim=-1, descending=True, stable=True).indices
    keys = layout.keys
    return ranked.unflatten(-1, (keys.group, keys.groups)).transpose(1, 2).flatten(1).contiguous()


def _check_order(channel_order: Tensor | None, layout: Layout, device: torch.device, wait: bool) -> Tensor | None:
    """Check and return the order, [HG, C] int64 contiguous. wait: read its values on a GPU too."""
    if channel_order is None:
        return None
    sizes = {"HG": layout.head_groups, "C": layout.keys.channels}
    check_tensor("channel_order", channel_order, "HG C", sizes, dtype=torch.int64, device=device)
    all_channels = torch.arange(sizes["C"], device=device).expand_as(channel_order)
    if (wait or readable(channel_order)) and not torch.equal(channel_order.sort(-1).values, all_channels):
        raise ValueError(f"channel_order must hold each of 0 .. {sizes['C'] - 1} once in every row")
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
    """Pack keys and values into a few bits each.

    The channels of head_group consecutive heads' keys are combined, permuted by channel_order, rotated by a Hadamard
    transform (which spreads outliers), pruned to the greatest magnitudes, and quantised: per token and quant_group
    channels x ~ zero + scale * code. Values are only quantised.

    Args:
        k: [T, H, D] keys before RoPE, fp16, bf16 or fp32 (the reference also fp64); any strides. D * head_group must be
            a power of two from 16 to 1,024.
        v: [T, H, V], dtype of k.
        seq_offsets: [B+1], int32 or int64, from 0 to T.
        bits: bits of a code, 2, 3, 4 or 8.
        head_group: 1, 2 or 4, dividing H.
        quant_group: channels that share a scale and a zero (fp16), a power of two from 16; all channels of a head group
            if there are fewer.
        sparsity: share of a rotated key's channels that is dropped, 0 to 0.9: the least magnitudes of each token.
        sink_tokens: the first tokens of each sequence, which are stored unquantised.
        clip: share of a quantisation group's range, around its middle, that the codes cover; values outside get the
            nearest code. Few codes are more accurate if they do not cover rare values: 0.75 at 2 bits and 0.9 at 3 lose
            the least (docs/rotatekv.md).
        channel_order: [H / head_group, D * head_group] int64, of `calibrate`; the cache stores a copy.
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        The cache. Nothing is differentiable (training: `rotatekv_round_trip`). Waits for the device once.

    Examples:
        >>> k, v, seq_offsets = torch.randn(40, 2, 64), torch.randn(40, 2, 64), torch.tensor([0, 40])
        >>> cache = hstu_sparse.rotatekv_compress(k, v, seq_offsets, bits=8)
        >>> keys, values = hstu_sparse.rotatekv_decompress(cache)
        >>> (keys - k).abs().max() < 0.05, (values - v).abs().max() < 0.05
        (tensor(True), tensor(True))

    Raises:
        TypeError, ValueError: with the expected and the actual value. Scales and zeros are fp16: on a CPU, and
            elsewhere with HSTU_SPARSE_DEBUG, keys (after their rotation) and values that are too large for them are
            refused, and those whose scales would all be rounded to 0. Otherwise they are clamped. NaN stays NaN, except
            in a file (`RotateKVCache.save`).

    Groups of small numbers among larger ones are restored with an error of up to (2^bits - 1) * 2^-25, whatever they
    are.
    """
    sizes = check_kv(k, v, seq_offsets)
    options = RotateKVOptions(bits, head_group, quant_group, float(sparsity), sink_tokens, clip)
    layout = Layout(options, sizes["H"], sizes["D"], sizes["V"])
    order = _check_order(channel_order, layout, k.device, wait=True)
    order = None if order is None else order.clone()  # a copy, since the caller may change the original
    format = PageFormat(sizes["H"], sizes["D"], sizes["V"], k.dtype, **dataclasses.asdict(options))
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
    """Return (k [T, H, D], v [T, H, V]) as a cache would restore them, without a cache or waiting for the device.

    It has no gradients; for training use `rotatekv_self_attention`.
    Arguments and errors: as `rotatekv_compress`.

    Examples:
        >>> k, v, seq_offsets = torch.randn(40, 2, 64), torch.randn(40, 2, 64), torch.tensor([0, 40])
        >>> keys, values = hstu_sparse.rotatekv_round_trip(k, v, seq_offsets, bits=8)
        >>> (keys - k).abs().max() < 0.05
        tensor(True)
    """
    sizes = check_kv(k, v, seq_offsets)
    options = RotateKVOptions(bits, head_group, quant_group, float(sparsity), sink_tokens, clip)
    layout = Layout(options, sizes["H"], sizes["D"], sizes["V"])
    channel_order = _check_order(channel_order, layout, k.device, wait=False)
    chosen = choose_backend(backend, k, "rotatekv_round_trip")
    if chosen == "reference" or readable(k):
        position = torch.arange(sizes["T"], device=k.device)
        position = position - seq_offsets[sequence_ids(seq_offsets, sizes["T"])]
        restored = reference.round_trip_reference(k, v, position < sink_tokens, layout, channel_order)
        if chosen == "reference":
            return restored
    from hstu_sparse.cache.rotatekv.launchers import round_trip_operator

    return round_trip_operator(
        k, v, seq_offsets, channel_order, bits, head_group, quant_group, float(sparsity), sink_tokens, float(clip)
    )


@without_autocast
def rotatekv_decompress(cache: RotateKVCache, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return (k [T, H, D], v [T, H, V]) of a cache, in their original dtype: keys without the rotation, before RoPE.

    backend: as `rotatekv_compress`.

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
    from hstu_sparse.cache.rotatekv.launchers import decompress

    return decompress(cache, sum(cache.lengths))


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
    """Compute attention of queries to all cached tokens of their sequence, directly on the packed cache.

        silu:     o[t] = (1/N) * sum over s of SiLU(scale * q[t].k[s] + b(t, s)) * v[s]
        softmax:  o[t] = sum over s of softmax(scale * q[t].k[s] + b(t, s)) * v[s]

    Queries of sequence b have position n_b, behind its cached tokens; their own tokens are not in the cache: the caller
    adds them (SiLU), or merges them by log-sum-exp (softmax). A sequence without cached tokens gives 0.

    Args:
        q: [Tq, H, D], dtype of the cache; any strides.
        q_offsets: [B+1], int32 or int64, from 0 to Tq: the queries of each cached sequence.
        cache: the result of `rotatekv_compress`, which is not changed.
        max_seq_len: N, at least the longest cached sequence.
        activation: "silu" or "softmax".
        scale: factor of the scores, D ** -0.5 by default.
        normalizer: a finite number above 0 in place of N in the factor 1/N of silu; `max_seq_len` by default.
        bias: position table of more than max_seq_len entries, read at n_b - s; time table with the cached tokens'
            timestamps [T] and the queries' times query_timestamps [Tq]. Forward only: it gets no gradient.
        rope_base: rotates cached token s to position s and the queries to n_b (half-split pairs, pair i of D/2 by
            position * rope_base ** (-2i/D)); needs an even D. None for no RoPE.
        return_lse: also return the log-sum-exp of the scores, [Tq, H] fp32 (softmax only).
        backend: "triton", "reference", or "auto": triton for CUDA tensors, reference for CPU tensors.

    Returns:
        [Tq, H, V], dtype of q; with return_lse a tuple. No gradients.

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
    sizes = {"H": cache.layout.heads, "D": cache.layout.head_size}
    call = _check_attention(
        q, q_offsets, sizes, tokens, cache.seq_offsets, max_seq_len, activation=activation, scale=scale,
        normalizer=normalizer, bias=bias, rope_base=rope_base, return_lse=return_lse,
    )  # fmt: skip
    if q.dtype != cache.dtype:
        raise TypeError(f"q must be {cache.dtype} as the cache, got {q.dtype}")
    if known:
        check_offset_values(cache.seq_offsets, max_seq_len, None)
    chosen = choose_backend(backend, q, "rotatekv_attention")
    return _attend(q, q_offsets, cache, max_seq_len, call, chosen)


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
    """Compute `rotatekv_attention` on unpacked keys and values, such as the result of `rotatekv_decompress`.

    Args:
        k, v: [T, H, D] and [T, H, V], dtype of q, any strides; seq_offsets: [B+1], of k and v.
        The others: as `rotatekv_attention`.
    """
    sizes: dict[str, int] = {}
    check_tensor("k", k, "T H D", sizes)
    check_tensor("v", v, "T H V", sizes, dtype=k.dtype, device=k.device)
    check_jagged(seq_offsets, max_seq_len, k=k, v=v)
    check_some(sizes, "H", "D", "V")
    tokens = sizes.pop("T")
    call = _check_attention(
        q, q_offsets, sizes, tokens, seq_offsets, max_seq_len, activation=activation, scale=scale,
        normalizer=normalizer, bias=bias, rope_base=rope_base, return_lse=return_lse,
    )  # fmt: skip
    if q.dtype != k.dtype:
        raise TypeError(f"q must be {k.dtype} as k, got {q.dtype}")
    chosen = choose_backend(backend, q, "unpacked_attention")
    return _attend(q, q_offsets, (k, v, seq_offsets), max_seq_len, call, chosen)


def _check_cache(cache) -> None:
    if not isinstance(cache, RotateKVCache):
        raise TypeError(f"cache must be a RotateKVCache, got {type(cache).__name__}")


def _check_attention(
    q, q_offsets, sizes, tokens, seq_offsets, max_seq_len, *, activation, scale, normalizer, bias, rope_base,
    return_lse,
) -> dict:  # fmt: skip
    """Check and complete the options of an attention call."""
    sizes = {letter: size for letter, size in sizes.items() if letter != "V"}
    check_tensor("q", q, "Tq H D", sizes, device=seq_offsets.device)
    check_jagged(q_offsets, max(1, sizes["Tq"]), q=q)
    check_int("max_seq_len", max_seq_len, 1)
    if q_offsets.shape != seq_offsets.shape:
        raise ValueError(f"q_offsets must be [B+1={seq_offsets.shape[0]}] as the cache's, got {list(q_offsets.shape)}")
    if activation not in ("silu", "softmax"):
        raise ValueError(f"activation must be silu or softmax, got {activation!r}")
    check_bool("return_lse", return_lse)
    if return_lse and activation != "softmax":
        raise ValueError("return_lse needs activation='softmax': SiLU's parts add up without it")
    if normalizer is not None and activation != "silu":
        raise ValueError(f"normalizer is for activation='silu', softmax has none, got {normalizer!r}")
    if rope_base is not None:
        rope_base = check_number("rope_base", rope_base, above=0)
        if sizes["D"] % 2:
            raise ValueError(f"rope_base needs an even head size, got D={sizes['D']}")
    bias = check_bias(bias, max_seq_len + 1, tokens, q.device, query_tokens=sizes["Tq"])
    scale, normalizer = check_scale(scale, sizes["D"]), check_normalizer(normalizer, max_seq_len)
    return dict(
        activation=activation, scale=scale, normalizer=normalizer, bias=bias, rope_base=rope_base, return_lse=return_lse
    )


def _attend(q, q_offsets, source, max_seq_len, call, chosen):
    return_lse = call["return_lse"]
    if chosen == "reference":
        if isinstance(source, RotateKVCache):
            source = (*reference.decompress_reference(source), source.seq_offsets)
        del call["return_lse"]
        with torch.no_grad():
            out, lse = reference.attention_reference(q, q_offsets, *source, **call)
    else:
        from hstu_sparse.cache.rotatekv import launch_attention

        if not isinstance(source, RotateKVCache):
            source = launch_attention.Plain(*source)
        softmax = call.pop("activation") == "softmax"
        out, lse = launch_attention.attention(q, q_offsets, source, max_seq_len, softmax=softmax, **call)
    return (out, typing.cast(Tensor, lse).float()) if return_lse else out
