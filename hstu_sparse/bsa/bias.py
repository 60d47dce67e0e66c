"""The relative bias of a tile of scores and the gradients of its tables: device functions, and what they are given.

b(t, s) is defined in hstu_sparse/relative_bias.py. Letters: T tokens of the batch, N max_seq_len, BM queries and BN
keys of a tile, t and s positions of queries and keys in their sequence, BS block size.

Position. The table is kept backwards, `position[s - t]` with a pointer to entry 0, and with zeros around it, so that no
index of a pair that is not seen needs a bound.

Time. Of a tile one side is the far one: each of it has its lowest bucket, and so many edges behind it (reach.py). Most
chosen blocks lie so far back that there is no edge, and then one number is added; of a few edges each costs an addition
that saturates and a multiply-add a pair; else every pair's bucket is looked up.

Gradients. Of the position table there are copies, in which four neighbouring keys are added at once. To the time table
go sums over the near side, one for each of the far side and each edge; where a tile reaches many buckets, sums of rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hstu_sparse.assembly import look_up, proven, scalar
from hstu_sparse.bsa.reach import CHUNK, LEAST_TILE, MOST_EDGES, SHORT, bsa_edges_kernel, bucket_cells, find_bucket
from hstu_sparse.launch import cdiv, run
from hstu_sparse.relative_bias import bucket_edges
from hstu_sparse.tiles import COMPILED, add_to

# Entries around the position table: past its end, and for blocks of a tile that are not there yet (128 of 128 tokens).
BEHIND, BEFORE = 256, 128 * 128 + 256
# Mean keys of a tile, at most.
MEANS = 64
# Sums kept of each bucket's gradient, so that programs do not wait for another.
LANES = tl.constexpr(64)
# Buckets whose sums are taken side by side, and entries behind the time table, which tiles read or add to.
AT_ONCE = tl.constexpr(4)
BEYOND = MOST_EDGES.value + AT_ONCE.value
# Copies of the position table's gradient.
COPIES = tl.constexpr(16)


class KernelBias(NamedTuple):
    """What kernels read of a RelativeBias: pointers, or None where a table is absent."""

    position: object = None  # [s - t] fp32
    time: object = None  # [bucket] fp32, BEYOND zeros behind
    steps: object = None  # [bucket] fp32, the least whole difference in each, infinite behind
    cells: object = None  # int32, see `bucket_cells`
    key_high: object = None  # [T] fp32, times of the keys
    key_low: object = None
    query_high: object = None
    query_low: object = None
    key_spans: object = None  # [NB, 4] fp32, of each block the earliest time (high, low) and the latest
    means: object = None  # [slots, blocks] int16, see `bsa_means_kernel`
    summaries: object = None  # [slots, blocks / CHUNK] int32
    blocks: object = None
    places: object = None  # [T] fp32, queries' times since `origins`
    key_places: object = None  # [T] fp32, keys' times since their block's earliest
    own: object = None  # [T, BS] int16, buckets between queries and the keys of the block they stand in
    origins: object = None  # [slots, 2] fp32, the earliest times of the tiles of `means`
    edges: object = None  # [slots, blocks / CHUNK, 3, CHUNK] fp32, see `bsa_edges_kernel`


class TableGradients(NamedTuple):
    """Where kernels add the tables' gradients: fp32, or int64 multiples of 1 / scale, which add in any order alike."""

    ahead: object = None  # [t - s], for queries that stand side by side
    backwards: object = None  # [COPIES, s - t], for keys that do
    time: object = None  # [bucket, LANES]
    scale: object = None  # one fp32 number, with int64


@functools.cache
def bucket_steps(num_buckets: int, device: torch.device) -> torch.Tensor:
    """[num_buckets + 1 + BEYOND] fp32, the least whole number in each bucket, infinity behind."""
    steps = torch.tensor([0.0, *bucket_edges(num_buckets), *[math.inf] * BEYOND], dtype=torch.float32)
    return steps.ceil().to(device)


@triton.jit(do_not_specialize=["N", "origin", "entries", "buckets"])
def bsa_tables_kernel(
    position, time, backwards, padded, N, origin, entries, buckets, BEYOND: tl.constexpr, SIZE: tl.constexpr
):
    """Writes the position table backwards with its margins, and the time table with zeros behind."""
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if position is not None:
        distance = origin - lane
        value = tl.load(position + distance, mask=(distance >= 0) & (distance < N), other=0.0)
        tl.store(backwards + lane, value.to(tl.float32), mask=lane < entries)
    if time is not None:
        value = tl.load(time + lane, mask=lane < buckets, other=0.0)
        tl.store(padded + lane, value.to(tl.float32), mask=lane < buckets + BEYOND)


def prepare(
    position: torch.Tensor | None,
    time: torch.Tensor | None,
    plan: Sequence[torch.Tensor | None],
    seq_offsets: torch.Tensor,
    block_size: int,
) -> KernelBias:
    """What kernels read of the tables and of a plan's tensors."""
    if position is None and time is None:
        return KernelBias()
    device = (time if position is None else position).device
    fp32 = dict(dtype=torch.float32, device=device)
    N = origin = entries = buckets = 0
    backwards = padded = None
    # Pointers stay multiples of 16 bytes whatever N is: kernels are compiled anew where they do not.
    if position is not None:
        N = position.shape[0]
        origin = table_origin(N)
        entries = origin + BEFORE
        backwards = torch.empty(entries, **fp32)
    if time is not None:
        buckets = time.shape[0]
        padded = torch.empty(buckets + BEYOND, **fp32)
    run(
        bsa_tables_kernel, (cdiv(max(entries, buckets + BEYOND), 1024),), position, time, backwards, padded,
        N, origin, entries, buckets, BEYOND=BEYOND, SIZE=1024, num_warps=4,
    )  # fmt: skip
    backwards = None if backwards is None else backwards[origin:]
    if time is None:
        return KernelBias(backwards)
    times, spans, means, summaries, places, origins, key_places, own = plan
    steps, cells = bucket_steps(buckets - 1, device), bucket_cells(buckets - 1, device)
    edges = means.new_empty(means.numel() * 3, dtype=torch.float32)
    found = KernelBias(
        backwards,
        padded,
        steps,
        cells,
        *times,
        spans,
        means,
        summaries,
        means.shape[1],
        places,
        key_places,
        own,
        origins,
        edges,
    )
    sizes = dict(BS=block_size, TILE=max(block_size, LEAST_TILE.value), MEANS=MEANS, ASM=proven(device))
    run(bsa_edges_kernel, (means.shape[0],), seq_offsets, found, seq_offsets.shape[0] - 1, **sizes, num_warps=1)
    return found


def table_origin(N: int) -> int:
    """Where distance 0 stands in a position table that is kept backwards, or in its gradient."""
    return cdiv(N + BEHIND, 16) * 16


class TableSums:
    """Memory for the tables' gradients, and their last sums.

    Under torch.use_deterministic_algorithms, whole multiples of a power of two small enough that `terms` times the
    greatest of all terms stays below 2^62.
    """

    def __init__(self, position, time, do, v, gates, terms: int):
        self.position, self.time, self.scale, self.pitch = position, time, None, 0
        kind = dict(dtype=torch.float32, device=do.device)
        if torch.are_deterministic_algorithms_enabled():
            greatest = [x.abs().amax().float() for x in (do, v)] + [
                torch.stack([g.abs().amax() for g in gates]).amax().float()
            ]
            # SiLU's slope is at most 1.1.
            greatest = 1.1 * v.shape[2] * greatest[0] * greatest[1] * greatest[2]
            power = torch.floor(62 - math.log2(terms) - torch.log2(greatest)).clamp(-100, 100)
            self.scale = torch.exp2(power).view(1)
            kind["dtype"] = torch.int64
        ahead = backwards = buckets = None
        if position is not None:
            self.origin = table_origin(position.shape[0])
            self.ahead = torch.zeros(BEFORE + self.origin, **kind)
            ahead = self.ahead[BEFORE:]
            self.pitch = self.origin + BEHIND
            self.backwards = torch.zeros(COPIES.value * self.pitch, **kind)
            backwards = self.backwards[self.origin :]
        if time is not None:
            buckets = torch.zeros(time.shape[0] + BEYOND, LANES.value, **kind)
        self.tables = TableGradients(ahead, backwards, buckets, self.scale)

    def gradients(self, factor: float) -> list[torch.Tensor]:
        """[position's, time's], those that there are, times `factor`."""
        found = []
        if self.position is not None:
            N = self.position.shape[0]
            # Copy c has distance d at origin + c - d.
            copies = self.backwards.as_strided((COPIES.value, N), (self.pitch + 1, 1), self.origin - (N - 1))
            found.append(self.tables.ahead[:N] + copies.sum(0).flip(0))
        if self.time is not None:
            found.append(self.tables.time[: self.time.shape[0]].sum(1))
        if self.scale is not None:
            found = [x.double() / self.scale for x in found]
        tables = (x for x in (self.position, self.time) if x is not None)
        return [(x * factor).to(table.dtype) for x, table in zip(found, tables)]


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
    """Times (high, low) of the tokens at `rows` (int64), of queries or of keys."""
    if QUERIES:
        return look_up(bias.query_high, rows, ASM), look_up(bias.query_low, rows, ASM)
    else:
        return look_up(bias.key_high, rows, ASM), look_up(bias.key_low, rows, ASM)


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

    far, near: tokens of both sides (int64); FAR_QUERIES: the far side is that of the queries.
    origin: a time of the near side. reaches: as `all_reach` finds them, lowest buckets of each of the far side.
    """
    if bias.time is not None:
        M: tl.constexpr = far.shape[0] if AXIS == 0 else near.shape[0]
        N: tl.constexpr = near.shape[0] if AXIS == 0 else far.shape[0]
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
def means_edges(bias, row, first, SIZE: tl.constexpr):
    """The most edges of one of the SIZE mean keys from `first` on; row: their queries' `map_row`."""
    place = (row * bias.blocks + first) // CHUNK
    edges = tl.load(bias.summaries + place) & SHORT
    for i in tl.static_range(1, SIZE // CHUNK):
        edges = tl.maximum(edges, tl.load(bias.summaries + place + i) & SHORT)
    return edges


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
def means_tile(bias, row, first, means, queries, near, AXIS: tl.constexpr, ASM: tl.constexpr):
    """The time's bias of a tile of mean keys, [means, queries] if AXIS is 0, else [queries, means].

    means, queries: their tokens (int64); row: of the queries in the map, see `map_row`; near: their bias.places.
    """
    SIZE: tl.constexpr = means.shape[0]
    if means_edges(bias, row, first, SIZE) > 1:
        bucket = find_bucket(differences(bias, means, queries, AXIS, False, ASM), bias.cells, ASM)
        tile = look_up(bias.time, bucket, ASM)
    else:
        entry, more = means_edge(bias, row, first, 0, SIZE, ASM), means_edge(bias, row, first, 1, SIZE, ASM)
        past = reached(means_edge(bias, row, first, 2, SIZE, ASM), near, AXIS)
        tile = tl.expand_dims(entry, 1 - AXIS) + tl.expand_dims(more, 1 - AXIS) * past
    return tile


@triton.jit
def own_buckets(bias, queries, places, AXIS: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """Buckets of a tile of queries and keys of the one block that they stand in, queries on the tile's axis AXIS.

    queries: their tokens (int64); places: of the keys in the block (int64).
    """
    rows = tl.expand_dims(bias.own + queries * BS, 1 - AXIS)
    return scalar(rows + tl.expand_dims(places, AXIS), ASM).to(tl.int32)


@triton.jit
def own_tile(bias, queries, places, AXIS: tl.constexpr, BS: tl.constexpr, ASM: tl.constexpr):
    """The time's bias of such a tile; 0 without a table."""
    if bias.time is not None:
        return look_up(bias.time, own_buckets(bias, queries, places, AXIS, BS, ASM), ASM)
    else:
        return 0.0


@triton.jit
def edge_places(bias, edge, keys, ASM: tl.constexpr):
    """What `reached` wants of a chosen block's first edge, queries on the far side.

    edge: (`Chosen`, the block's place in it, the queries' bias.places); keys: their tokens (int64).
    """
    chosen, place, near = edge
    return look_up(chosen.edges, place, ASM) + near, -look_up(bias.key_places, keys, ASM)


@triton.jit
def chosen_tile(bias, edge, queries, keys, edges, ASM: tl.constexpr):
    """The time's bias of a tile of queries and a chosen block's keys, one edge or more; edge: see `edge_places`."""
    chosen, place, _ = edge
    if edges > 1:
        bucket = find_bucket(differences(bias, queries, keys, 0, True, ASM), bias.cells, ASM)
        tile = look_up(bias.time, bucket, ASM)
    else:
        far, beside = edge_places(bias, edge, keys, ASM)
        tile = look_up(chosen.bases, place, ASM) + look_up(chosen.mores, place, ASM) * reached(far, beside, 0)
    return tile


@triton.jit
def with_bias(score, bias, added):
    """Scores + a tile's biases, (`position_tile`, `time_tile`).

    Added up only here, behind the product that made the scores: the branches of the time's then wait for no look-up of
    the position's, nor does the product.
    """
    if bias.position is not None:
        score += added[0]
    if bias.time is not None:
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
