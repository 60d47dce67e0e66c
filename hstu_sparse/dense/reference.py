"""Dense HSTU attention in plain PyTorch: the specification, and the layer that trains on a CPU.

Letters: T tokens of the batch, B sequences, N max_seq_len, n the longest sequence of a group, H heads, D query/key
head size, V value head size.

Source: Zhai et al., Actions Speak Louder than Words, ICML 2024 (arXiv 2402.17152).
"""

import functools
import itertools
import math

import torch
import torch.nn.functional as F

# Width of a time bucket on the logarithmic axis (natural logarithm of seconds).
BUCKET_WIDTH = 0.301


@functools.lru_cache(maxsize=64)
def bucket_edges(num_buckets: int) -> list[float]:
    """The least value in bucket 1, 2, ..., num_buckets, rounded up to fp32, so that `x >= edge` is exact in fp32."""
    edges = []
    for k in range(1, num_buckets + 1):
        exponent = BUCKET_WIDTH * k
        exact = math.exp(exponent) if exponent < 88 else math.inf
        edge = torch.tensor(exact, dtype=torch.float32, device="cpu")
        if edge.item() < exact:
            edge = torch.nextafter(edge, torch.full_like(edge, math.inf))
        edges.append(edge.item())
    return edges


def time_bucket(difference: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """min(floor(ln(max(|x|, 1)) / 0.301), num_buckets), for int64 x of any shape; returns int32.

    Counts the bucket edges that |x| has reached in place of taking a logarithm, so no value near an edge depends on
    how a machine rounds its logarithm: exact for |x| < 2^24, and for x rounded to fp32 above.
    """
    edges = torch.tensor(bucket_edges(num_buckets), dtype=torch.float32, device=difference.device)
    return torch.bucketize(difference.abs().float(), edges, right=True, out_int32=True)


def hstu_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    alpha: float | None = None,
    num_targets: torch.Tensor | None = None,
    window_size: int = 0,
    position_bias: torch.Tensor | None = None,
    time_bias: torch.Tensor | None = None,
    timestamps: torch.Tensor | None = None,
    query_timestamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as `hstu_sparse.hstu_attention`; any device, any float dtype, differentiable."""
    total, _, size = q.shape
    alpha = size**-0.5 if alpha is None else alpha
    batch = seq_offsets.shape[0] - 1
    if batch == 0 or total == 0:
        # Nothing to attend to; the sum keeps every input in the graph, so that its gradient is zeros and not None.
        tables = sum(x.sum() for x in (position_bias, time_bias) if x is not None)
        return v * (q.sum() + k.sum() + tables)
    alike, tokens = _groups(seq_offsets.tolist())
    parts = []
    for members in alike:
        chosen = torch.tensor(members, device=q.device)
        parts.append(
            _attend(
                q, k, v, seq_offsets[:-1][chosen].long(), seq_offsets.diff()[chosen].long(), max_seq_len, alpha,
                None if num_targets is None else num_targets[chosen], window_size, position_bias, time_bias,
                timestamps, timestamps if query_timestamps is None else query_timestamps,
            )
        )  # fmt: skip
    return torch.cat(parts).index_select(0, torch.tensor(tokens, device=q.device).argsort())


def _groups(offsets: list[int]) -> tuple[list[list[int]], list[int]]:
    """Sequences of like length together (within a factor 1.3), so that padding wastes little: (groups, token order)."""
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    groups: list[list[int]] = []
    for b in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        if lengths[b] == 0:
            continue
        if not groups or 1.3 * lengths[b] + 8 < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(b)
    return groups, [t for group in groups for b in group for t in range(offsets[b], offsets[b + 1])]


def _attend(
    q, k, v, begins, lengths, max_seq_len, alpha, num_targets, window_size, position_bias, time_bias, timestamps, asked
):
    """The sequences at `begins` with these `lengths`, padded to the longest; their outputs one after another."""
    batch, heads, longest = begins.shape[0], q.shape[1], int(lengths.max())
    step = torch.arange(longest, device=q.device)
    inside = step < lengths[:, None]  # [B, n]
    index = (begins[:, None] + step).masked_fill(~inside, 0).flatten()

    def pad(x):  # [T, H, X] -> [B, H, n, X]
        return x.index_select(0, index).view(batch, longest, heads, -1).transpose(1, 2)

    history = lengths if num_targets is None else lengths - num_targets
    position = torch.minimum(step, history[:, None])  # [B, n]: every candidate stands where the first one does
    if num_targets is None:
        distance = step[:, None] - step  # [n, n], the same for all sequences
        visible = distance >= 0
    else:
        distance = position[:, :, None] - position[:, None, :]  # [B, n, n]
        visible = ((step[:, None] > step) & (step < history[:, None])[:, None, :]) | (step[:, None] == step)
    if window_size > 0:
        visible = visible & (distance < window_size)
    # Padding needs no mask of its own: causality hides padded keys from real queries, and padded queries are dropped.
    hidden = ~visible if num_targets is None else ~visible[:, None]

    scores = torch.matmul(pad(q * alpha), pad(k).transpose(2, 3))  # [B, H, n, n]
    if position_bias is not None:
        looked_up = _look_up(position_bias, distance.clamp(min=0))
        scores = scores + (looked_up if num_targets is None else looked_up[:, None])
    if time_bias is not None:
        seen = timestamps.index_select(0, index).view(batch, 1, longest)
        asked = asked.index_select(0, index).view(batch, longest, 1)
        scores = scores + _look_up(time_bias, time_bucket(asked - seen, time_bias.shape[0] - 1))[:, None]
    weights = F.silu(scores).masked_fill(hidden, 0).to(v.dtype)
    padded = torch.matmul(weights, pad(v / max_seq_len)).transpose(1, 2).reshape(batch * longest, heads, v.shape[2])
    return padded.index_select(0, inside.flatten().nonzero()[:, 0])


class _LookUp(torch.autograd.Function):
    """table[index], whose gradient is a weighted bincount: on a CPU many times as fast as index_select's."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.size, ctx.dtype = table.shape[0], table.dtype
        return table.index_select(0, index.flatten()).view(index.shape)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        # In fp64: a bucket sums millions of terms. CUDA's bincount adds in no fixed order.
        grad = torch.bincount(index.flatten(), weights=grad.flatten().double(), minlength=ctx.size)
        return grad.to(ctx.dtype), None


_look_up = _LookUp.apply
