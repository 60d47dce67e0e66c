"""The relative bias of a tile of scores, and its gradients: device functions.

Letters: BM queries and BN keys of a tile, t and s positions of queries and keys in their sequence, BS block size.

Time. Of a tile one side is the far one: each of it has its lowest bucket, and so many edges behind it (reach.py). Most
chosen blocks lie so far back that there is no edge, and then one number is added; of a few edges each costs an addition
that saturates and a multiply-add a pair; else every pair's bucket is looked up.

Gradients. Of the position table there are copies, in which four neighbouring keys are added at once. To the time table
go sums over the near side, one for each of the far side and each edge; where a tile reaches many buckets, sums of rows.
"""

import triton
import triton.language as tl

from hstu_sparse.assembly import look_up, scalar
from hstu_sparse.bias.gradients import add_to
from hstu_sparse.bsa.bias import AT_ONCE, COPIES, LANES
from hstu_sparse.bsa.reach import CHUNK, MOST_EDGES, TOGETHER, find_bucket, own_places
from hstu_sparse.tiles import COMPILED


@triton.jit
def load_origin(bias, slot, ASM: tl.constexpr):
    """The earliest time of a block's keys as (high, low); (0, 0) where there is no time table."""
    if bias.time is not None:
        place = slot.to(tl.int64) * 4
        return look_up(bias.key_spans, place, ASM), look_up(bias.key_spans, place + 1, ASM)
    else:
        return 0.0, 0.0


@triton.jit
def position_tile(bias, apart, rows, columns, ASM: tl.constexpr):
    """The position's bias of a tile whose pairs are s - t = apart + rows + columns apart; 0 without a table.

    In 64 bits, negated only there, and with `apart` one number, so that the compiler sees which neighbours read
    neighbouring addresses, and which the same.
    """
    if bias.position is not None:
        place = bias.position + tl.cast(apart, tl.int64)
        return look_up(place + rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :], ASM)
    else:
        return 0.0


@triton.jit
def side_times(bias, rows, QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Times (high, low) of `rows`, of queries or of keys.

    Tokens are given so, here and below: a number, and how far each is behind it (int64). Then the tokens of a tile have
    one address in common.
    """
    first, lane = rows
    if QUERIES:
        return look_up(bias.query_high + first, lane, ASM), look_up(bias.query_low + first, lane, ASM)
    else:
        return look_up(bias.key_high + first, lane, ASM), look_up(bias.key_low + first, lane, ASM)


@triton.jit
def differences(bias, far, near, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """|differences| of all times of a tile; arguments as of `time_tile`."""
    far, near = side_times(bias, far, FAR_QUERIES, ASM), side_times(bias, near, not FAR_QUERIES, ASM)
    high = tl.expand_dims(far[0], 1 - AXIS) - tl.expand_dims(near[0], AXIS)
    low = tl.expand_dims(far[1], 1 - AXIS) - tl.expand_dims(near[1], AXIS)
    return tl.abs(high + low)


@triton.jit
def near_place(bias, near, origin, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Where the near side stands, for `reached`."""
    near = side_times(bias, near, not FAR_QUERIES, ASM)
    place = (near[0] - origin[0]) + (near[1] - origin[1])
    return -place if FAR_QUERIES else place


@triton.jit
def edge_place(bias, far, origin, bucket, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """Where the far side stands by the first edge of a bucket, for `reached`. Exact near the edge: whole numbers."""
    edge = look_up(bias.steps, bucket, ASM)
    if FAR_QUERIES:
        return ((far[0] - origin[0]) - edge) + ((far[1] - origin[1]) + 1.0)
    else:
        return ((origin[0] - far[0]) - edge) + ((origin[1] - far[1]) + 1.0)


@triton.jit
def reached(far, near, AXIS: tl.constexpr):
    """1.0 for the pairs of a tile at or past an edge, 0.0 for the rest: query less key less edge plus 1, clamped."""
    far, near = tl.expand_dims(far, 1 - AXIS), tl.expand_dims(near, AXIS)
    if COMPILED:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [far, near], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.minimum(tl.maximum(far + near, 0.0), 1.0)


@triton.jit
def time_step(
    bias, far, near, origin, lowest, E: tl.constexpr, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """What the E-th edge past each lowest bucket adds to a tile."""
    step = look_up(bias.time, lowest + E, ASM) - look_up(bias.time, lowest + (E - 1), ASM)
    place = edge_place(bias, far, origin, lowest + E, FAR_QUERIES, ASM)
    return tl.expand_dims(step, 1 - AXIS) * reached(place, near, AXIS)


@triton.jit
def time_tile(bias, far, near, origin, reaches, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr):
    """The time's bias of a tile, [far, near] if AXIS is 0, else [near, far]; 0 without a table.

    far, near: tokens of both sides; FAR_QUERIES: the far side is that of the queries.
    origin: a time of the near side. reaches: as `all_reach` finds them, lowest buckets of each of the far side.
    """
    if bias.time is not None:
        M: tl.constexpr = far[1].shape[0] if AXIS == 0 else near[1].shape[0]
        N: tl.constexpr = near[1].shape[0] if AXIS == 0 else far[1].shape[0]
        lowest, edges, _, _ = reaches
        if edges > MOST_EDGES:
            bucket = find_bucket(differences(bias, far, near, AXIS, FAR_QUERIES, ASM), bias.cells, ASM)
            tile = look_up(bias.time, bucket, ASM)
        else:
            tile = tl.broadcast_to(tl.expand_dims(look_up(bias.time, lowest, ASM), 1 - AXIS), [M, N])
            if edges > 0:
                place = near_place(bias, near, origin, FAR_QUERIES, ASM)
                times = side_times(bias, far, FAR_QUERIES, ASM)
                tile += time_step(bias, times, place, origin, lowest, 1, AXIS, FAR_QUERIES, ASM)
                if edges > 1:
                    tile += time_step(bias, times, place, origin, lowest, 2, AXIS, FAR_QUERIES, ASM)
                if edges > 2:
                    tile += time_step(bias, times, place, origin, lowest, 3, AXIS, FAR_QUERIES, ASM)
                    tile += time_step(bias, times, place, origin, lowest, 4, AXIS, FAR_QUERIES, ASM)
        return tile
    else:
        return 0.0


@triton.jit
def means_edge(bias, row, first, PART: tl.constexpr, SIZE: tl.constexpr, ASM: tl.constexpr):
    """[SIZE] of bias.edges for these mean keys. PART: 0 entry, 1 what the next bucket's is more, 2 its edge."""
    lane = tl.arange(0, SIZE)
    place = (lane // CHUNK * (3 * CHUNK) + lane % CHUNK + PART * CHUNK).to(tl.int64)
    start = (row * bias.blocks + first) * 3
    if SIZE < CHUNK:  # within a chunk the parts are CHUNK apart wherever the tile begins
        start -= tl.cast(first, tl.int32) % CHUNK * 2
    return look_up(bias.edges + start, place, ASM)


@triton.jit
def means_tile(
    bias, row, first, means, queries, near, several, AXIS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The time's bias of a tile of mean keys, [means, queries] if AXIS is 0, else [queries, means].

    means, queries: their tokens; row: of the queries in the map, see `map_row`; near: their bias.places. Each mean key
    reaches one edge at most but where `several`.
    """
    SIZE: tl.constexpr = means[1].shape[0]
    if several:
        bucket = find_bucket(differences(bias, means, queries, AXIS, False, ASM), bias.cells, ASM)
        tile = look_up(bias.time, bucket, ASM)
    else:
        entry, more = means_edge(bias, row, first, 0, SIZE, ASM), means_edge(bias, row, first, 1, SIZE, ASM)
        past = reached(means_edge(bias, row, first, 2, SIZE, ASM), near, AXIS)
        tile = tl.expand_dims(entry, 1 - AXIS) + tl.expand_dims(more, 1 - AXIS) * past
    return tile


@triton.jit
def own_buckets(bias, slot, queries, keys, AXIS: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """Buckets of a tile of queries and keys of the one block that they stand in, queries on the tile's axis AXIS.

    slot: the block's; queries, keys: the first's place in it (of a query a multiple of TOGETHER), and how far each is
    behind it (int64).
    """
    tile = bias.own + (slot.to(tl.int64) * (BS * BS) + queries[0] * BS + keys[0] * TOGETHER)
    rows = tl.expand_dims(tile + own_places(queries[1], 0, BS), 1 - AXIS)
    return scalar(rows + tl.expand_dims(keys[1] * TOGETHER, AXIS), ASM).to(tl.int32)


@triton.jit
def own_tile(bias, slot, queries, keys, AXIS: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The time's bias of such a tile; 0 without a table."""
    if bias.time is not None:
        return look_up(bias.time, own_buckets(bias, slot, queries, keys, AXIS, BS, ASM), ASM)
    else:
        return 0.0


@triton.jit
def tile_place(bias, row, origin, bucket, ASM: tl.constexpr):
    """Where the earliest of the queries of a `map_row` stands by the first edge of a bucket, for `reached`.

    origin: the keys' earliest time.
    """
    high = look_up(bias.origins, 2 * row, ASM) - origin[0]
    low = look_up(bias.origins, 2 * row + 1, ASM) - origin[1]
    return (high - look_up(bias.steps, bucket, ASM)) + (low + 1.0)


@triton.jit
def _group_step(bias, lowest, row, places, origin, beside, E: tl.constexpr, ASM: tl.constexpr):
    bucket = lowest.to(tl.int64) + E
    more = look_up(bias.time, bucket, ASM) - look_up(bias.time, bucket - 1, ASM)
    return more * reached(places, beside + tile_place(bias, row, origin, bucket, ASM), 1)


@triton.jit
def group_tile(bias, reaches, row, queries, keys, origin, SEVERAL: tl.constexpr, ASM: tl.constexpr):
    """The time's bias of a tile [keys, queries] of a group's queries and a block's keys.

    reaches: the group's, see `load_reach`; without SEVERAL of one edge. row, queries, keys: the queries'
    `map_row`, and tokens; origin: the block's earliest time.
    """
    _, edges, lowest, _ = reaches
    base = look_up(bias.time, lowest.to(tl.int64), ASM)
    places = look_up(bias.places + queries[0], queries[1], ASM)
    beside = -look_up(bias.key_places + keys[0], keys[1], ASM)
    if SEVERAL:
        if edges > MOST_EDGES:
            bucket = find_bucket(differences(bias, queries, keys, 1, True, ASM), bias.cells, ASM)
            tile = look_up(bias.time, bucket, ASM)
        else:
            tile = base + _group_step(bias, lowest, row, places, origin, beside, 1, ASM)
            tile += _group_step(bias, lowest, row, places, origin, beside, 2, ASM)
            if edges > 2:
                tile += _group_step(bias, lowest, row, places, origin, beside, 3, ASM)
                tile += _group_step(bias, lowest, row, places, origin, beside, 4, ASM)
    else:
        tile = base + _group_step(bias, lowest, row, places, origin, beside, 1, ASM)
    return tile


@triton.jit
def edge_places(bias, edge, keys, origin, lowest, E: tl.constexpr, ASM: tl.constexpr):
    """What `reached` wants of a chosen block's E-th edge, past bucket `lowest`, queries on the far side.

    edge: (`Chosen`, the block's place in it, the queries' bias.places and `map_row`); keys, origin: their tokens and
    earliest time.
    """
    chosen, place, near, row = edge
    beside = -look_up(bias.key_places + keys[0], keys[1], ASM)
    if E == 1:
        return look_up(chosen.edges, place, ASM) + near, beside
    else:
        return near + tile_place(bias, row, origin, lowest.to(tl.int64) + E, ASM), beside


@triton.jit
def chosen_step(bias, edge, keys, origin, lowest, E: tl.constexpr, ASM: tl.constexpr):
    """What a chosen block's E-th edge adds to a tile; arguments as of `edge_places`."""
    far, beside = edge_places(bias, edge, keys, origin, lowest, E, ASM)
    if E == 1:
        more = look_up(edge[0].mores, edge[1], ASM)
    else:
        bucket = lowest.to(tl.int64) + E
        more = look_up(bias.time, bucket, ASM) - look_up(bias.time, bucket - 1, ASM)
    return more * reached(far, beside, 0)


@triton.jit
def chosen_bias(
    bias, edge, position, queries, keys, origin, reaches, EDGES: tl.constexpr, MOST: tl.constexpr, ASM: tl.constexpr
):
    """What `with_bias` adds for a tile of queries and a chosen block's keys that reach no edge, one, or (2) more.

    position: the position's; edge: see `edge_places`. Up to one edge both are summed, and most of a thread's pairs
    share the first sum. MOST: edges, 2 or MOST_EDGES, that are taken one by one; of more the pairs' buckets are looked
    up, and come third.
    """
    _, edges, lowest, _ = reaches
    base = look_up(edge[0].bases, edge[1], ASM)
    if EDGES == 2:
        buckets = tl.zeros([queries[1].shape[0], keys[1].shape[0]], tl.int32)
        if edges > MOST:
            buckets = find_bucket(differences(bias, queries, keys, 0, True, ASM), bias.cells, ASM)
            tile = look_up(bias.time, buckets, ASM)
        else:
            tile = base + chosen_step(bias, edge, keys, origin, lowest, 1, ASM)
            tile += chosen_step(bias, edge, keys, origin, lowest, 2, ASM)
            if edges > 2:
                for E in tl.static_range(3, MOST + 1):
                    tile += chosen_step(bias, edge, keys, origin, lowest, E, ASM)
        return position, tile, buckets
    else:
        tile = base
        if bias.position is not None:
            tile += position
        if EDGES == 1:
            tile += chosen_step(bias, edge, keys, origin, lowest, 1, ASM)
        return tile, 0.0, 0


@triton.jit
def with_bias(score, bias, added, SUMMED: tl.constexpr = False):
    """Half of the scores: half of the scaled products + a tile's biases, (`position_tile`, `time_tile`); SUMMED: both
    in the first.

    Added up only here, behind the product that made the scores: the branches of the time's then wait for no look-up of
    the position's, nor does the product.
    """
    if bias.position is not None or (SUMMED and bias.time is not None):
        score += added[0]
    if bias.time is not None and not SUMMED:
        score += added[1]
    return score


@triton.jit
def move_sum(
    tables, grad, bias, far, near, origin, lowest, cell, E: tl.constexpr, AXIS: tl.constexpr,
    FAR_QUERIES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Moves what lies past the E-th edge from the bucket before it to the one behind."""
    place = edge_place(bias, far, origin, lowest + E, FAR_QUERIES, ASM)
    past = tl.sum(grad * reached(place, near, AXIS), 1 - AXIS)
    add_to(cell + E * LANES, past, tables.scale, past != 0)
    add_to(cell + (E - 1) * LANES, -past, tables.scale, past != 0)


@triton.jit
def add_time_gradient(
    tables, grad, bias, far, near, origin, reaches, AXIS: tl.constexpr, FAR_QUERIES: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Adds a tile's gradient to the buckets that it reaches; arguments as of `time_tile`."""
    if tables.time is not None:
        lowest, edges, least, greatest = reaches
        if edges > MOST_EDGES:
            # Sums of rows, which the threads of one warp hold: no thread waits for another warp.
            apart = differences(bias, far, near, AXIS, FAR_QUERIES, ASM)
            sums = tables.time + least * LANES + tl.arange(0, grad.shape[0]) % LANES
            rest = tl.sum(grad, 1)
            for bucket in range(least + 1, greatest + 1, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    past = tl.sum(tl.where(apart >= tl.load(bias.steps + bucket + i), grad, 0.0), 1)
                    add_to(sums + i * LANES, rest - past, tables.scale, rest != past)
                    rest = past
                sums += AT_ONCE * LANES
            add_to(sums, rest, tables.scale)
        else:
            cell = tables.time + lowest * LANES + tl.arange(0, grad.shape[AXIS]) % LANES
            add_to(cell, tl.sum(grad, 1 - AXIS), tables.scale)
            if edges > 0:
                beside = near_place(bias, near, origin, FAR_QUERIES, ASM)
                times = side_times(bias, far, FAR_QUERIES, ASM)
                move_sum(tables, grad, bias, times, beside, origin, lowest, cell, 1, AXIS, FAR_QUERIES, ASM)
                if edges > 1:
                    move_sum(tables, grad, bias, times, beside, origin, lowest, cell, 2, AXIS, FAR_QUERIES, ASM)
                if edges > 2:
                    move_sum(tables, grad, bias, times, beside, origin, lowest, cell, 3, AXIS, FAR_QUERIES, ASM)
                    move_sum(tables, grad, bias, times, beside, origin, lowest, cell, 4, AXIS, FAR_QUERIES, ASM)


@triton.jit
def add_position_gradient(tables, pitch, grad, t, s, AXIS: tl.constexpr):
    """Adds a tile's gradient to the position table, for keys s that stand side by side, on the tile's axis AXIS.

    t, s: int32 positions. The copy of the table that a query adds to makes its first key's cell a multiple of COPIES:
    so four neighbours are added at once.
    """
    if tables.backwards is not None:
        row = tables.backwards + (t % COPIES).to(tl.int64) * pitch - (t // COPIES * COPIES)
        add_to(tl.expand_dims(row, AXIS) + tl.expand_dims(s, 1 - AXIS), grad, tables.scale)
