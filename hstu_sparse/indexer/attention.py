"""Define the kernels of sparse attention; a program has some of the tokens that share a choice.

Letters: T tokens of the batch, H query heads (of which HEADS share a key head), D query/key and V value head size, K
chosen tokens per row of a choice, G rows of a choice and R tokens that share one (selection_group, see choices.py).

Tokens times heads are the rows of the tensor cores' tile, so that a gathered key is used by R times H queries: row is
token * BH + head, BH being the heads, padded. The first loop is over the choice, whose keys are gathered and visible to
all rows; the second, if tokens share a choice, over the group's tokens, which are adjacent, each visible from itself
on. The bias belongs to token and key: it is computed once for all heads. Scores are in units of log 2.

With several key heads a tile of rows meets the tile of each one after another, with zeros in the rows of heads that
another one serves: choice and bias are read once for all of them.

dk, dv and the tables' gradients are sums by atomic additions: D + V for a pair of a query and a key.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hstu_sparse.bias.gradients import add_to, add_to_tables
from hstu_sparse.bias.scores import load_times, table_bias
from hstu_sparse.indexer.choices import LOG2E, chosen_tokens, find_query
from hstu_sparse.tiles.rows import load_rows
from hstu_sparse.tiles.softmax import add_scores, log_sum

# Copies of a table's gradient that atomic additions are spread over. Most pairs fall into few time buckets.
POSITION_COPIES, TIME_COPIES = tl.constexpr(4), tl.constexpr(64)


class Sizes(NamedTuple):
    """Constants: heads, head sizes in memory and in the results, key heads, widths of the tiles; see above."""

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


class Lines(NamedTuple):
    """The rows of a program's tile.

    t, is_token      [TOKENS] positions of the tokens, and which of them exist
    row_t            [rows] the position of a row's token
    head, inside     [rows] head, and whether both token and head exist
    token            [rows] index of the token in the batch
    """

    t: tl.tensor
    is_token: tl.tensor
    row_t: tl.tensor
    head: tl.tensor
    inside: tl.tensor
    token: tl.tensor


@triton.jit
def _find_lines(query, size, lead, TOKENS: tl.constexpr, sizes: tl.constexpr):
    """Return the `Lines` of the tokens from `lead` on of a group of `size`."""
    each = lead + tl.arange(0, TOKENS)
    line = tl.arange(0, TOKENS * sizes.BH)
    place, head = lead + line // sizes.BH, line % sizes.BH
    inside = (place < size) & (head < sizes.H)
    return Lines(query.t + each, each < size, query.t + place, head, inside, query.token + place)


@triton.jit
def _load_lines(base, lines, stride_t, stride_h, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile [rows, PADDED] of [T, H, SIZE], zeros in rows without token or head."""
    return load_rows(base, lines.token * stride_t + lines.head * stride_h, 1, lines.inside, SIZE, PADDED)


@triton.jit
def _store_lines(base, lines, value, H: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store a tile [rows, PADDED] to [T, H, SIZE]."""
    column = tl.arange(0, PADDED)
    pointers = base + (lines.token * H + lines.head)[:, None] * SIZE + column[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=lines.inside[:, None] & (column < SIZE)[None, :])


@triton.jit
def _load_key_heads(x, rows, mask, SIZE: tl.constexpr, PADDED: tl.constexpr, KEY_HEADS: tl.constexpr):
    """Return the tile [keys, PADDED] of every key head, a tuple, from `Rows` [T, KEY_HEADS, SIZE]."""
    tiles = (load_rows(x.pointer, rows, x.stride_t, mask, SIZE, PADDED),)
    for number in tl.static_range(1, KEY_HEADS):
        tiles += (load_rows(x.pointer + number * x.stride_h, rows, x.stride_t, mask, SIZE, PADDED),)
    return tiles


@triton.jit
def _rows_served(x, head, number: tl.constexpr, sizes: tl.constexpr):
    """Zero the rows of x whose query head another key head than `number` serves."""
    if sizes.KEY_HEADS == 1:
        return x
    else:
        return tl.where((head // (sizes.H // sizes.KEY_HEADS) == number)[:, None], x, 0.0).to(x.dtype)


@triton.jit
def _products(x, tiles, head, sizes: tl.constexpr):
    """Return the products [rows, keys] of the rows of x and the tiles of their key heads."""
    products = tl.dot(_rows_served(x, head, 0, sizes), tl.trans(tiles[0]), input_precision=sizes.PRECISION)
    for number in tl.static_range(1, len(tiles)):
        served = _rows_served(x, head, number, sizes)
        products = tl.dot(served, tl.trans(tiles[number]), products, input_precision=sizes.PRECISION)
    return products


@triton.jit
def _weighted(weights, tiles, head, acc, sizes: tl.constexpr):
    """Add to acc [rows, channels] the tiles of the rows' key heads, weighted by [rows, keys]."""
    for number in tl.static_range(len(tiles)):
        served = _rows_served(weights, head, number, sizes)
        acc = tl.dot(served, tiles[number], acc, input_precision=sizes.PRECISION)
    return acc


@triton.jit
def _spread(x, BH: tl.constexpr):
    """Repeat [tokens, keys] for every head: [tokens * BH, keys]; a single token's broadcasts."""
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
def _scores(products, s, visible, query, lines, bias, scale, BH: tl.constexpr, LOCAL: tl.constexpr):
    """Return (scores [rows, keys] in units of log 2, -inf where masked; time buckets and visibility [tokens, keys]).

    products: those of queries and keys. LOCAL: a key is visible from its own token on.
    """
    scores = products * (scale * LOG2E)
    seen = lines.is_token[:, None] & visible[None, :]
    if LOCAL:
        seen = seen & (s[None, :] <= lines.t[:, None])
    bucket = tl.zeros(seen.shape, tl.int32)
    if (bias.position is not None) or (bias.time is not None):
        query_times = load_times(bias.query_times, query.begin + lines.t, lines.is_token)[:, None]
        key_times = load_times(bias.key_times, query.begin + s, visible)[None, :]
        added, bucket = table_bias(bias, lines.t[:, None] - s[None, :], seen, query_times, key_times)
        scores += _spread(added * LOG2E, BH)
    # Rows without a token or head are not masked: their results are dropped.
    mask = visible[None, :]
    if LOCAL:
        mask = mask & (s[None, :] <= lines.row_t[:, None])
    return tl.where(mask, scores, float("-inf")), bucket, seen


@triton.jit
def _attend(
    most, total, result, queries, s, visible, k, v, query, lines, bias, scale, sizes: tl.constexpr, LOCAL: tl.constexpr
):
    """Return the rows' maxima, sums and outputs with a block of keys."""
    keys = _load_key_heads(k, query.begin + s, visible, sizes.D, sizes.BD, sizes.KEY_HEADS)
    values = _load_key_heads(v, query.begin + s, visible, sizes.V, sizes.BV, sizes.KEY_HEADS)
    products = _products(queries, keys, lines.head, sizes)
    scores, _, _ = _scores(products, s, visible, query, lines, bias, scale, sizes.BH, LOCAL)
    most, total, weights, shrink = add_scores(most, total, scores)
    return most, total, _weighted(weights.to(values[0].dtype), values, lines.head, result * shrink[:, None], sizes)


@triton.jit(do_not_specialize=["G"])
def sparse_attention_fwd_kernel(
    q, k, v, indices, rows, out, lse, bias, scale, K, G,
    sizes: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of TOKENS tokens of a row of a choice, and their scores' log-sum-exp by head.

    A step takes BLOCK chosen keys, or NEAR of the group. A token without keys gets zeros.
    """
    lead = tl.program_id(1) * TOKENS
    query = find_query(rows, tl.program_id(0).to(tl.int64), G, sizes.R)
    size = tl.load(rows + 2 * G + query.row).to(tl.int32)
    if lead >= size:
        return
    ROWS: tl.constexpr = TOKENS * sizes.BH
    BV: tl.constexpr = sizes.BV
    lines = _find_lines(query, size, lead, TOKENS, sizes)
    queries = _load_lines(q.pointer, lines, q.stride_t, q.stride_h, sizes.D, sizes.BD)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BV], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, query, start, K, BLOCK)
        most, total, result = _attend(
            most, total, result, queries, s, visible, k, v, query, lines, bias, scale, sizes, False
        )
    if sizes.R > 1:
        for start in range(0, tl.minimum(lead + TOKENS, size), NEAR):
            ahead = start + tl.arange(0, NEAR)
            most, total, result = _attend(
                most,
                total,
                result,
                queries,
                query.t + ahead,
                ahead < size,
                k,
                v,
                query,
                lines,
                bias,
                scale,
                sizes,
                True,
            )
    result = tl.where(total[:, None] == 0.0, 0.0, result / total[:, None])
    _store_lines(out, lines, result, sizes.H, sizes.OUT_V, sizes.BV)
    # The weights exp2(-inf - 0) of a token without keys are zeros in the backward pass.
    tl.store(lse + lines.token * sizes.H + lines.head, log_sum(most, total), mask=lines.inside)


class Saved(NamedTuple):
    """The rows of a program in the backward pass: tiles of q and do, log-sum-exp, do . out."""

    queries: tl.tensor
    grads: tl.tensor
    logarithm: tl.tensor
    along: tl.tensor


@triton.jit
def _add_keys(sums, token, visible, share, number: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
              KEY_HEADS: tl.constexpr):  # fmt: skip
    """Add to the rows of a key head of `Sums` [T, KEY_HEADS, SIZE]."""
    column = tl.arange(0, PADDED)
    where = sums.pointer + token[:, None] * (KEY_HEADS * SIZE) + number * SIZE + column[None, :]
    add_to(where, share, sums.unit, visible[:, None] & (column < SIZE)[None, :])


@triton.jit
def _gradients(
    acc, saved, s, visible, k, v, dk, dv, tables, query, lines, bias, scale, sizes: tl.constexpr, LOCAL: tl.constexpr
):
    """Add the contribution of a block of keys: to dq, which is returned, to dk, dv and the tables' gradients."""
    keys = _load_key_heads(k, query.begin + s, visible, sizes.D, sizes.BD, sizes.KEY_HEADS)
    values = _load_key_heads(v, query.begin + s, visible, sizes.V, sizes.BV, sizes.KEY_HEADS)
    products = _products(saved.queries, keys, lines.head, sizes)
    scores, bucket, seen = _scores(products, s, visible, query, lines, bias, scale, sizes.BH, LOCAL)
    weights = tl.exp2(scores - saved.logarithm[:, None])
    dweights = _products(saved.grads, values, lines.head, sizes)
    dscores = weights * (dweights - saved.along[:, None])
    if (tables.position is not None) or (tables.time is not None):
        distance = lines.t[:, None] - s[None, :]
        value = _sum_heads(dscores, sizes.BH)
        add_to_tables(tables, value, distance, seen, bucket, query.row, POSITION_COPIES, TIME_COPIES)
    narrow = dscores.to(keys[0].dtype)
    weights = weights.to(saved.grads.dtype)
    for number in tl.static_range(len(keys)):
        served = tl.trans(_rows_served(narrow, lines.head, number, sizes))
        share = tl.dot(served, saved.queries, input_precision=sizes.PRECISION) * scale
        _add_keys(dk, query.begin + s, visible, share, number, sizes.OUT_D, sizes.BD, sizes.KEY_HEADS)
        served = tl.trans(_rows_served(weights, lines.head, number, sizes))
        share = tl.dot(served, saved.grads, input_precision=sizes.PRECISION)
        _add_keys(dv, query.begin + s, visible, share, number, sizes.OUT_V, sizes.BV, sizes.KEY_HEADS)
    return _weighted(narrow, keys, lines.head, acc, sizes)


@triton.jit(do_not_specialize=["G"])
def sparse_attention_bwd_kernel(
    do, q, k, v, out, lse, indices, rows, dq, dk, dv, tables, bias, scale, K, G,
    sizes: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Compute dq of TOKENS tokens of a row of a choice, and their share of dk, dv and the tables' gradients."""
    lead = tl.program_id(1) * TOKENS
    query = find_query(rows, tl.program_id(0).to(tl.int64), G, sizes.R)
    size = tl.load(rows + 2 * G + query.row).to(tl.int32)
    if lead >= size:
        return
    ROWS: tl.constexpr = TOKENS * sizes.BH
    BD: tl.constexpr = sizes.BD
    lines = _find_lines(query, size, lead, TOKENS, sizes)
    queries = _load_lines(q.pointer, lines, q.stride_t, q.stride_h, sizes.D, sizes.BD)
    grads = _load_lines(do.pointer, lines, do.stride_t, do.stride_h, sizes.V, sizes.BV)
    result = _load_lines(out, lines, sizes.H * sizes.OUT_V, sizes.OUT_V, sizes.OUT_V, sizes.BV)
    # Infinity gives rows without a token or head zero weight.
    logarithm = tl.load(lse + lines.token * sizes.H + lines.head, mask=lines.inside, other=float("inf"))
    saved = Saved(queries, grads, logarithm, tl.sum(grads.to(tl.float32) * result.to(tl.float32), 1))
    acc = tl.zeros([ROWS, BD], tl.float32)
    for start in range(0, K, BLOCK):
        s, visible = chosen_tokens(indices, query, start, K, BLOCK)
        acc = _gradients(acc, saved, s, visible, k, v, dk, dv, tables, query, lines, bias, scale, sizes, False)
    if sizes.R > 1:
        for start in range(0, tl.minimum(lead + TOKENS, size), NEAR):
            ahead = start + tl.arange(0, NEAR)
            s = query.t + ahead
            acc = _gradients(acc, saved, s, ahead < size, k, v, dk, dv, tables, query, lines, bias, scale, sizes, True)
    _store_lines(dq, lines, acc * scale, sizes.H, sizes.OUT_D, sizes.BD)
