"""Define, launch and register sparse attention. A program has some of the tokens that share a choice.

Letters: T tokens of the batch, H query heads (of which HEADS share a key head), D query/key and V value head size, K
chosen tokens per row of a choice, G rows of a choice and R tokens that share one (selection_group, see choices.py).

A program's tile has a row for each token and head: row token * BH + head, where BH is H padded. So R times H queries
use a gathered key. The first loop is over the choice, whose keys are gathered and visible to all rows. If tokens share
a choice, a second loop is over the group's tokens, which are adjacent; each is visible from its own position on. The
bias is computed once for all heads. Scores are in units of log 2.

Several key heads are supported only with shared choices. The rows are multiplied with the keys of one key head after
another, with zeros in the rows of other heads, so that choice and bias are read once for all key heads.

dk, dv and the tables' gradients are summed by atomic additions. A program first sums over the rows of its tile: for
dk and dv there are D + V additions for each key that it reads and each key head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hstu_sparse.bias.gradients import add_to, add_to_tables
from hstu_sparse.bias.relative import BIAS, RelativeBias, unflatten_arguments
from hstu_sparse.bias.scores import load_times, table_bias
from hstu_sparse.core.launch import LaunchConfig, cdiv, configuration, next_power_of_2, padded_head, precision, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.indexer import choices
from hstu_sparse.indexer.choices import LOG2E, POSITION_COPIES, TIME_COPIES, chosen_tokens, find_query
from hstu_sparse.tiles.rows import Rows, add_scores, as_rows, load_rows, log_sum


class Sizes(NamedTuple):
    """The constants of a kernel: heads, head sizes in memory and in results, key heads, tile widths, group size."""

    H: int
    D: int
    V: int
    OUT_D: int
    OUT_V: int
    KEY_HEADS: int
    BH: int
    BD: int
    BV: int
    R: int
    PRECISION: str


class TileRows(NamedTuple):
    """The rows of a program's tile.

    t, is_token      [TOKENS] the tokens' positions, and the mask of those that exist
    row_t            [rows] the position of each row's token
    head, inside     [rows] the head, and the mask of rows whose token and head exist
    token            [rows] the token's index in the batch
    """

    t: tl.tensor
    is_token: tl.tensor
    row_t: tl.tensor
    head: tl.tensor
    inside: tl.tensor
    token: tl.tensor


@triton.jit
def _find_rows(query, size, first, TOKENS: tl.constexpr, sizes: tl.constexpr):
    """Return the `TileRows` of the tokens from `first` on of a group of `size` tokens."""
    each = first + tl.arange(0, TOKENS)
    row = tl.arange(0, TOKENS * sizes.BH)
    place, head = first + row // sizes.BH, row % sizes.BH
    inside = (place < size) & (head < sizes.H)
    return TileRows(query.t + each, each < size, query.t + place, head, inside, query.token + place)


@triton.jit
def _load_tile(base, tile, stride_t, stride_h, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile [rows, PADDED] of [T, H, SIZE], zeros in rows without token or head."""
    return load_rows(base, tile.token * stride_t + tile.head * stride_h, 1, tile.inside, SIZE, PADDED)


@triton.jit
def _store_tile(base, tile, value, H: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store a tile [rows, PADDED] to [T, H, SIZE]."""
    column = tl.arange(0, PADDED)
    pointers = base + (tile.token * H + tile.head)[:, None] * SIZE + column[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=tile.inside[:, None] & (column < SIZE)[None, :])


@triton.jit
def _load_key_heads(x, rows, mask, SIZE: tl.constexpr, PADDED: tl.constexpr, KEY_HEADS: tl.constexpr):
    """Return the tile [keys, PADDED] of every key head, a tuple, from `Rows` [T, KEY_HEADS, SIZE]."""
    tiles = (load_rows(x.pointer, rows, x.stride_t, mask, SIZE, PADDED),)
    for number in tl.static_range(1, KEY_HEADS):
        tiles += (load_rows(x.pointer + number * x.stride_h, rows, x.stride_t, mask, SIZE, PADDED),)
    return tiles


@triton.jit
def _mask_heads(x, head, number: tl.constexpr, sizes: tl.constexpr):
    """Zero the rows of x whose query heads do not use the key head `number`."""
    if sizes.KEY_HEADS == 1:
        return x
    else:
        return tl.where((head // (sizes.H // sizes.KEY_HEADS) == number)[:, None], x, 0.0).to(x.dtype)


@triton.jit
def _products(x, tiles, head, sizes: tl.constexpr):
    """Return the products [rows, keys] of the rows of x with the keys (or values) of their key heads."""
    products = tl.dot(_mask_heads(x, head, 0, sizes), tl.trans(tiles[0]), input_precision=sizes.PRECISION)
    for number in tl.static_range(1, len(tiles)):
        masked = _mask_heads(x, head, number, sizes)
        products = tl.dot(masked, tl.trans(tiles[number]), products, input_precision=sizes.PRECISION)
    return products


@triton.jit
def _weighted(weights, tiles, head, acc, sizes: tl.constexpr):
    """Add the products of weights [rows, keys] and the tiles of their key heads to acc [rows, channels]."""
    for number in tl.static_range(len(tiles)):
        masked = _mask_heads(weights, head, number, sizes)
        acc = tl.dot(masked, tiles[number], acc, input_precision=sizes.PRECISION)
    return acc


@triton.jit
def _repeat_heads(x, BH: tl.constexpr):
    """Repeat [tokens, keys] for every head: [tokens * BH, keys]; return [1, keys] for a single token."""
    if BH == 1 or x.shape[0] == 1:
        return x
    else:
        wide = tl.broadcast_to(x[:, None, :], [x.shape[0], BH, x.shape[1]])
        return tl.reshape(wide, [x.shape[0] * BH, x.shape[1]])


@triton.jit
def _sum_heads(x, BH: tl.constexpr):
    """Sum over heads: [tokens * BH, keys] -> [tokens, keys]."""
    if BH == 1:
        return x
    elif x.shape[0] == BH:
        return tl.sum(x, 0)[None, :]
    else:
        return tl.sum(tl.reshape(x, [x.shape[0] // BH, BH, x.shape[1]]), 1)


@triton.jit
def _scores(products, s, visible, query, tile, bias, scale, BH: tl.constexpr, LOCAL: tl.constexpr):
    """Return (scores [rows, keys] in units of log 2, -inf where masked; time buckets and visibility [tokens, keys]).

    products: of queries and keys. LOCAL: a key is visible only from its own position on.
    """
    scores = products * (scale * LOG2E)
    seen = tile.is_token[:, None] & visible[None, :]
    if LOCAL:
        seen = seen & (s[None, :] <= tile.t[:, None])
    bucket = tl.zeros(seen.shape, tl.int32)
    if (bias.position is not None) or (bias.time is not None):
        query_times = load_times(bias.query_times, query.begin + tile.t, tile.is_token)[:, None]
        key_times = load_times(bias.key_times, query.begin + s, visible)[None, :]
        added, bucket = table_bias(bias, tile.t[:, None] - s[None, :], seen, query_times, key_times)
        scores += _repeat_heads(added * LOG2E, BH)
    # Rows without a token or head need no mask: their results are dropped.
    mask = visible[None, :]
    if LOCAL:
        mask = mask & (s[None, :] <= tile.row_t[:, None])
    return tl.where(mask, scores, float("-inf")), bucket, seen


@triton.jit
def _attend(
    row_max, row_sum, acc, queries, s, visible, k, v, query, tile, bias, scale,
    sizes: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the online softmax: row_max, row_sum and acc."""
    keys = _load_key_heads(k, query.begin + s, visible, sizes.D, sizes.BD, sizes.KEY_HEADS)
    values = _load_key_heads(v, query.begin + s, visible, sizes.V, sizes.BV, sizes.KEY_HEADS)
    products = _products(queries, keys, tile.head, sizes)
    scores, _, _ = _scores(products, s, visible, query, tile, bias, scale, sizes.BH, LOCAL)
    row_max, row_sum, weights, rescale = add_scores(row_max, row_sum, scores)
    return row_max, row_sum, _weighted(weights.to(values[0].dtype), values, tile.head, acc * rescale[:, None], sizes)


@triton.jit(do_not_specialize=["G"])
def sparse_attention_fwd_kernel(
    q, k, v, indices, rows, out, lse, bias, scale, K, G,
    sizes: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the output and, for each head, the log-sum-exp of TOKENS tokens of a row of a choice.

    A step processes BLOCK chosen keys, or GROUP_BLOCK keys of the group. A token without keys gets zeros.
    """
    first = tl.program_id(1) * TOKENS
    query = find_query(rows, tl.program_id(0).to(tl.int64), G, sizes.R)
    size = tl.load(rows + 2 * G + query.row).to(tl.int32)
    if first >= size:
        return
    ROWS: tl.constexpr = TOKENS * sizes.BH
    BV: tl.constexpr = sizes.BV
    tile = _find_rows(query, size, first, TOKENS, sizes)
    queries = _load_tile(q.pointer, tile, q.stride_t, q.stride_h, sizes.D, sizes.BD)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BV], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, query, start, K, BLOCK)
        row_max, row_sum, acc = _attend(
            row_max, row_sum, acc, queries, s, visible, k, v, query, tile, bias, scale, sizes, False
        )
    if sizes.R > 1:
        for start in range(0, tl.minimum(first + TOKENS, size), GROUP_BLOCK):
            ahead = start + tl.arange(0, GROUP_BLOCK)
            s = query.t + ahead
            row_max, row_sum, acc = _attend(
                row_max, row_sum, acc, queries, s, ahead < size, k, v, query, tile, bias, scale, sizes, True
            )
    acc = tl.where(row_sum[:, None] == 0.0, 0.0, acc / row_sum[:, None])
    _store_tile(out, tile, acc, sizes.H, sizes.OUT_V, sizes.BV)
    # For a token without keys this stores 0, so that the backward pass has weights exp2(-inf - 0) = 0.
    tl.store(lse + tile.token * sizes.H + tile.head, log_sum(row_max, row_sum), mask=tile.inside)


class Saved(NamedTuple):
    """The rows of a program in the backward pass: tiles of q and do, the log-sum-exp, and delta = do.out."""

    queries: tl.tensor
    grads: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


@triton.jit
def _add_keys(sums, token, visible, share, number: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
              KEY_HEADS: tl.constexpr):  # fmt: skip
    """Add a tile to the rows of a key head in `Sums` [T, KEY_HEADS, SIZE]."""
    column = tl.arange(0, PADDED)
    where = sums.pointer + token[:, None] * (KEY_HEADS * SIZE) + number * SIZE + column[None, :]
    add_to(where, share, sums.unit, visible[:, None] & (column < SIZE)[None, :])


@triton.jit
def _gradients(
    acc, saved, s, visible, k, v, dk, dv, tables, query, tile, bias, scale, sizes: tl.constexpr, LOCAL: tl.constexpr
):
    """Add a block of keys to acc (dq before scaling), which is returned, and to dk, dv and the tables' gradients."""
    keys = _load_key_heads(k, query.begin + s, visible, sizes.D, sizes.BD, sizes.KEY_HEADS)
    values = _load_key_heads(v, query.begin + s, visible, sizes.V, sizes.BV, sizes.KEY_HEADS)
    products = _products(saved.queries, keys, tile.head, sizes)
    scores, bucket, seen = _scores(products, s, visible, query, tile, bias, scale, sizes.BH, LOCAL)
    weights = tl.exp2(scores - saved.lse[:, None])
    dweights = _products(saved.grads, values, tile.head, sizes)
    dscores = weights * (dweights - saved.delta[:, None])
    if (tables.position is not None) or (tables.time is not None):
        distance = tile.t[:, None] - s[None, :]
        value = _sum_heads(dscores, sizes.BH)
        add_to_tables(tables, value, distance, seen, bucket, query.row, POSITION_COPIES, TIME_COPIES)
    narrow = dscores.to(keys[0].dtype)
    weights = weights.to(saved.grads.dtype)
    for number in tl.static_range(len(keys)):
        masked = tl.trans(_mask_heads(narrow, tile.head, number, sizes))
        share = tl.dot(masked, saved.queries, input_precision=sizes.PRECISION) * scale
        _add_keys(dk, query.begin + s, visible, share, number, sizes.OUT_D, sizes.BD, sizes.KEY_HEADS)
        masked = tl.trans(_mask_heads(weights, tile.head, number, sizes))
        share = tl.dot(masked, saved.grads, input_precision=sizes.PRECISION)
        _add_keys(dv, query.begin + s, visible, share, number, sizes.OUT_V, sizes.BV, sizes.KEY_HEADS)
    return _weighted(narrow, keys, tile.head, acc, sizes)


@triton.jit(do_not_specialize=["G"])
def sparse_attention_bwd_kernel(
    do, q, k, v, out, lse, indices, rows, dq, dk, dv, tables, bias, scale, K, G,
    sizes: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dq of TOKENS tokens of a row of a choice, and add to dk, dv and the tables' gradients."""
    first = tl.program_id(1) * TOKENS
    query = find_query(rows, tl.program_id(0).to(tl.int64), G, sizes.R)
    size = tl.load(rows + 2 * G + query.row).to(tl.int32)
    if first >= size:
        return
    ROWS: tl.constexpr = TOKENS * sizes.BH
    BD: tl.constexpr = sizes.BD
    tile = _find_rows(query, size, first, TOKENS, sizes)
    queries = _load_tile(q.pointer, tile, q.stride_t, q.stride_h, sizes.D, sizes.BD)
    grads = _load_tile(do.pointer, tile, do.stride_t, do.stride_h, sizes.V, sizes.BV)
    result = _load_tile(out, tile, sizes.H * sizes.OUT_V, sizes.OUT_V, sizes.OUT_V, sizes.BV)
    # In rows without a token or head, +inf makes all weights 0.
    row_lse = tl.load(lse + tile.token * sizes.H + tile.head, mask=tile.inside, other=float("inf"))
    saved = Saved(queries, grads, row_lse, tl.sum(grads.to(tl.float32) * result.to(tl.float32), 1))
    acc = tl.zeros([ROWS, BD], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, query, start, K, BLOCK)
        acc = _gradients(acc, saved, s, visible, k, v, dk, dv, tables, query, tile, bias, scale, sizes, False)
    if sizes.R > 1:
        for start in range(0, tl.minimum(first + TOKENS, size), GROUP_BLOCK):
            ahead = start + tl.arange(0, GROUP_BLOCK)
            s = query.t + ahead
            acc = _gradients(acc, saved, s, ahead < size, k, v, dk, dv, tables, query, tile, bias, scale, sizes, True)
    _store_tile(dq, tile, acc * scale, sizes.H, sizes.OUT_D, sizes.BD)


@configuration
def attention_config(
    kernel: str, dtype: torch.dtype, width: int, heads: int, group: int, top_k: int, key_heads: int = 1
) -> LaunchConfig:
    """Return the configuration of the kernel "fwd" or "bwd"; it is fixed rather than tuned at run time.

    A program has TOKENS tokens of a group. A step processes BLOCK chosen keys, or GROUP_BLOCK keys of the group. width:
    padded size of a key plus a value of one head; heads: padded.
    """
    if group == 1:
        block = choices.key_block(dtype, width)
        return LaunchConfig(4, 3, TOKENS=1, BLOCK=block if kernel == "fwd" else min(block, 32), GROUP_BLOCK=16)
    most = 64 if dtype.itemsize == 2 and width <= 256 else 32 if width <= 256 and key_heads == 1 else 16
    tokens = max(16 // heads, min(next_power_of_2(group), most // heads), 1)
    block = max(16, min(choices.key_block(dtype, width * key_heads), next_power_of_2(top_k)))
    if kernel == "bwd" or tokens * heads > 32:
        block = min(block, 32)
    if dtype.itemsize == 4 and key_heads > 1:  # products in fp32 take many registers
        block = 16
    near = max(16, min(block, next_power_of_2(group)))
    # A third stage makes forward 40% slower; up to 32 rows two warps are as fast as four.
    is_small = tokens * heads <= 32 and width <= 128 and dtype.itemsize == 2
    warps = 8 if kernel == "bwd" and width > 256 else 2 if is_small else 4
    return LaunchConfig(warps, 2, TOKENS=tokens, BLOCK=block, GROUP_BLOCK=near)


class Arguments(NamedTuple):
    """The operator's arguments in the order of its schema. k: [T, D] or [T, Hkv, D]; rows: see choices.py."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    rows: Tensor
    bias: RelativeBias
    scale: float
    group: int


def _launch(kernel, a: Arguments, q: Tensor, k: Tensor, v: Tensor, *arguments) -> None:
    """Launch a kernel for tensors whose rows kernels can read."""
    name = "fwd" if kernel is sparse_attention_fwd_kernel else "bwd"
    (_, H, D), key_heads, K, G = q.shape, k.shape[1], a.indices.shape[1], a.rows.shape[1]
    heads = padded_head(H) if a.group == 1 else next_power_of_2(H)
    sizes = Sizes(
        H, D, v.shape[2], a.q.shape[2], a.v.shape[-1], key_heads, heads, padded_head(D), padded_head(v.shape[2]),
        a.group, precision(q.dtype),
    )  # fmt: skip
    config = attention_config(name, q.dtype, sizes.BD + sizes.BV, heads, a.group, K, key_heads)
    grid = G, cdiv(a.group, config.TOKENS)
    run(kernel, grid, *arguments, choices.kernel_bias(a.bias), a.scale, K, G, sizes=sizes, **config)


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp [T, H])."""
    a = unflatten_arguments(Arguments, arguments)
    out, lse = _fake(a.q, a.k, a.v)
    if len(out):
        q, k, v = as_rows(a.q, choices.by_heads(a.k), choices.by_heads(a.v))
        rows = map(Rows.of, (q, k, v))
        _launch(sparse_attention_fwd_kernel, a, q, k, v, *rows, a.indices, a.rows, out, lse)
    return out, lse


def _backward(do: Tensor, *arguments) -> list[Tensor]:
    a, out, lse = unflatten_arguments(Arguments, arguments[:-2]), *arguments[-2:]
    T, H, _ = a.q.shape
    dq = torch.empty(a.q.shape, dtype=a.q.dtype, device=a.q.device)
    if T == 0:
        return [dq, *(torch.zeros_like(x) for x in (a.k, a.v, *a.bias[:2]) if x is not None)]
    do, q, k, v = as_rows(do, a.q, choices.by_heads(a.k), choices.by_heads(a.v))

    def sum_of_scores() -> Tensor:
        """Bound |dscores| summed over the heads and keys of one query: weights (dweights - their mean)."""
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (do, v)]
        return 2 * H * longest[0] * longest[1]

    dk = choices.key_sums(a.k, T, lambda: sum_of_scores() * abs(a.scale) * q.abs().amax())
    dv = choices.key_sums(a.v, T, lambda: H * do.abs().amax().float())
    tables = choices.table_sums(a.bias, T, sum_of_scores)
    rows = map(Rows.of, (do, q, k, v))
    gradients = dq, dk, dv, tables.arguments
    _launch(sparse_attention_bwd_kernel, a, q, k, v, *rows, out, lse, a.indices, a.rows, *gradients)
    return [dq, dk.total(a.k.dtype), dv.total(a.v.dtype), *tables.gradients()]


def _fake(q, k, v, *_) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)


_SCHEMA = f"Tensor q, Tensor k, Tensor v, Tensor indices, Tensor rows, {BIAS}, float scale, SymInt group"
sparse_attention_jagged = Operator(
    "sparse_attention", _SCHEMA, _forward, _backward, _fake, "q k v position time", outputs=2, keep_output=True
)
