"""Define the shared parts of the dense kernels for Hopper: warps with roles, in Gluon (Triton with explicit layouts).

A program processes tiles of 128 queries (for dk and dv: keys) of one head one after another. It has nine warps: two
groups of four that multiply (`multiply`, `HALF` rows each) and one that copies (`produce`). `produce` takes the next
tile's number from a counter in memory. By tensor descriptor it copies the tile's rows, and block by block the keys and
values (for dk and dv: queries and do) to a ring in shared memory. Barriers mark each stage of the ring as full or
empty. While one group computes SiLU, the tensor cores multiply for the other.

For heads of 256, the sums of dk and dv of 64 keys need the registers of both groups: one computes dv, the other dk.

Loops over blocks start from the last block, so that a tile of queries begins with the blocks that need masks. The
kernels support no bias. docs/dense.md has a picture.

Letters: T tokens of the batch, H heads, D size of a head. t and s: the indices of queries and keys in their sequence.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hstu_sparse.tiles import ranges

find_sequence = gluon.jit(ranges.find_sequence.fn)
key_ranges = gluon.jit(ranges.key_ranges.fn)
query_ranges = gluon.jit(ranges.query_ranges.fn)
visible = gluon.jit(ranges.visible.fn)

HALF = gl.constexpr(64)  # rows of a tile for each group

# Tiles and blocks in shared memory.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Eight rows of a block, by one warp.
EIGHT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor of x [T, H, D], with its heads side by side, in blocks of `rows` rows of one head."""
    heads, size = x.shape[1:]
    if x.stride(0) < (heads - 1) * x.stride(1) + size:
        x = x.contiguous()
    return TensorDescriptor(x, [x.shape[0], (heads - 1) * x.stride(1) + size], [x.stride(0), 1], [rows, size], LAYOUT)


class Batch(NamedTuple):
    """The schedule of tiles, and the counter of the tiles that programs took after their first one."""

    schedule: gl.tensor  # see `plan.TileMap`
    slots: gl.tensor  # the schedule's length
    taken: gl.tensor
    seq_offsets: gl.tensor
    num_targets: gl.tensor
    window_size: gl.tensor


class Kind(NamedTuple):
    """The constants that a kernel is compiled for.

    TILE: rows of a tile, 128, or 64 if both groups process all rows; BLOCK: rows of a block; TILES: tiles in shared
    memory; BY_QUERY: whether tiles are of queries.
    """

    H: gl.constexpr
    TILE: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    TILES: gl.constexpr
    BY_QUERY: gl.constexpr
    HAS_TARGETS: gl.constexpr
    HAS_WINDOW: gl.constexpr


class Tile(NamedTuple):
    """A tile and its blocks, which begin at rows `first` to `last`. Those from `free` up to `masked` need no mask."""

    head: gl.tensor
    begin: gl.tensor  # the sequence's first token, int32
    sequence: ranges.Sequence
    first_row: gl.tensor
    first: gl.tensor
    free: gl.tensor
    masked: gl.tensor
    last: gl.tensor


class Queue(NamedTuple):
    """The next tiles: their numbers [TILES * 3, 1] (head, sequence, tile) and the barriers of each."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Ring(NamedTuple):
    """Blocks [STAGES, BLOCK, D] in shared memory and their barriers. a: keys, or queries; b: values, or do."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    a_full: gl.shared_memory_descriptor
    a_empty: gl.shared_memory_descriptor
    b_full: gl.shared_memory_descriptor
    b_empty: gl.shared_memory_descriptor


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers, [COUNT, 1], each of which waits for ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_tiles(source, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT blocks of a tensor descriptor."""
    return gl.allocate_shared_memory(source.dtype, [COUNT, source.block_shape[0], source.block_shape[1]], source.layout)


@gluon.jit
def make_ring(a, b, STAGES: gl.constexpr):
    """Allocate the `Ring` for the blocks of two tensor descriptors."""
    return Ring(
        make_tiles(a, STAGES), make_tiles(b, STAGES), make_barriers(STAGES, 1), make_barriers(STAGES, 2),
        make_barriers(STAGES, 1), make_barriers(STAGES, 2),
    )  # fmt: skip


@gluon.jit
def make_queue(TENSORS: gl.constexpr, TILES: gl.constexpr):
    """Allocate the `Queue` of tiles whose rows come from TENSORS tensors."""
    numbers = gl.allocate_shared_memory(gl.int32, [TILES * 3, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(numbers, make_barriers(TILES, TENSORS + 1), make_barriers(TILES, 2))


@gluon.jit
def find_tile(head, b, index, batch, kind: gl.constexpr):
    """Return the `Tile` of an entry of a schedule, which counts tiles of queries from the sequence's end."""
    begin, sequence = find_sequence(b, batch.seq_offsets, batch.num_targets, batch.window_size)
    if kind.BY_QUERY:
        first_row = ((sequence.length + kind.TILE - 1) // kind.TILE - 1 - index) * kind.TILE
        first, free, masked, end = key_ranges(
            first_row, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, kind.TILE, kind.BLOCK
        )
    else:
        first_row = index * kind.TILE
        first, free, masked, end = query_ranges(
            first_row, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, kind.BLOCK, kind.TILE
        )
    last = (end - 1) // kind.BLOCK * kind.BLOCK
    masked = gl.minimum(masked, last)  # the last block is always masked, even a complete one
    return Tile(head, begin.to(gl.int32), sequence, first_row, first, gl.minimum(free, masked), masked, last)


@gluon.jit
def next_tile(queue, n, TILES: gl.constexpr):
    """Wait for a program's n-th tile and return (head, sequence, tile); the sequence is -1 after the last one."""
    slot = n % TILES
    mbarrier.wait(queue.full.index(slot), n // TILES % 2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    head = gl.max(queue.numbers.index(slot * 3).load(LAYOUT), 0)
    b = gl.max(queue.numbers.index(slot * 3 + 1).load(LAYOUT), 0)
    return head, b, gl.max(queue.numbers.index(slot * 3 + 2).load(LAYOUT), 0)


@gluon.jit
def put_tile(queue, slot, head, b, index):
    """Store the head, sequence and tile of a program's next tile in the queue."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    queue.numbers.index(slot * 3).store(gl.full([1], 0, gl.int32, LAYOUT) + head)
    queue.numbers.index(slot * 3 + 1).store(gl.full([1], 0, gl.int32, LAYOUT) + b)
    queue.numbers.index(slot * 3 + 2).store(gl.full([1], 0, gl.int32, LAYOUT) + index)


@gluon.jit
def clear_rows(block, inside, ROWS: gl.constexpr):
    """Set the rows of a block in shared memory from `inside` on to zero, by one warp."""
    COLUMNS: gl.constexpr = block.shape[1]
    row = gl.arange(0, 8, gl.SliceLayout(1, EIGHT_ROWS))[:, None]
    for part in gl.static_range(ROWS // 8):
        if inside < part * 8 + 8:
            for column in gl.static_range(0, COLUMNS, 64):
                rows = block.slice(part * 8, 8, 0).slice(column, 64, 1)
                rows.store(gl.where(row < inside - part * 8, rows.load(EIGHT_ROWS), 0.0))


@gluon.jit
def copy_block(source, place, block, full, inside, copied, cleared, CLEAR: gl.constexpr):
    """Copy a block from the tensor at `place` to shared memory, and arrive at the barrier `full`.

    CLEAR: set rows from `inside` on, which belong to another sequence, to zero, since a weight of zero times an
    infinity is NaN. copied: the barrier of copies that need this, used `cleared` times so far.
    """
    BYTES: gl.constexpr = source.block_shape[0] * source.block_shape[1] * 2
    if CLEAR and inside < source.block_shape[0]:
        mbarrier.expect(copied, BYTES)
        tma.async_copy_global_to_shared(source, place, copied, block)
        mbarrier.wait(copied, cleared & 1)
        clear_rows(block, inside, source.block_shape[0])
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, BYTES)
        tma.async_copy_global_to_shared(source, place, full, block)


@gluon.jit
def produce(rows, a, b, queue, ring, copied, batch, kind: gl.constexpr, CLEAR_A: gl.constexpr, CLEAR_B: gl.constexpr):
    """Copy a program's tiles and, for each, the blocks of the other side.

    Programs take tiles dynamically, so that none is idle while others have much to do.

    rows: (tensor descriptor, stride of its heads, shared memory [TILES, TILE, D]) of the tensors whose rows a tile has;
    a, b: (tensor descriptor, stride of its heads) of those in the ring. copied: two barriers for `copy_block`.
    CLEAR_A, CLEAR_B: whether to zero the rows of a and of b past the sequence's end.
    """
    i = 0
    n = 0
    cleared = 0
    number = gl.program_id(0)
    some = True
    while some:
        slot = n % kind.TILES
        mbarrier.wait(queue.empty.index(slot), n // kind.TILES % 2 ^ 1)
        entry = batch.schedule + 2 * (number // kind.H)
        inside_schedule = number < batch.slots * kind.H
        head = number % kind.H
        sequence = gl.load(entry, inside_schedule, -1)
        index = gl.load(entry + 1, inside_schedule, 0)
        some = sequence >= 0
        put_tile(queue, slot, head, sequence, index)
        if some:
            mbarrier.arrive(queue.full.index(slot), count=1)
            tile = find_tile(head, sequence, index, batch, kind)
            for which in gl.static_range(len(rows)):
                source, stride_h, target = rows[which]
                place = [tile.begin + tile.first_row, tile.head * stride_h]
                copy_block(source, place, target.index(slot), queue.full.index(slot), 0, copied.index(0), 0, False)
            for start in range(tile.last, tile.first - 1, -kind.BLOCK):
                stage = i % kind.STAGES
                phase = i // kind.STAGES & 1 ^ 1
                row = tile.begin + start
                inside = tile.sequence.length - start
                mbarrier.wait(ring.a_empty.index(stage), phase)
                place = [row, tile.head * a[1]]
                full = ring.a_full.index(stage)
                copy_block(a[0], place, ring.a.index(stage), full, inside, copied.index(0), cleared, CLEAR_A)
                mbarrier.wait(ring.b_empty.index(stage), phase)
                place = [row, tile.head * b[1]]
                full = ring.b_full.index(stage)
                copy_block(b[0], place, ring.b.index(stage), full, inside, copied.index(1), cleared, CLEAR_B)
                cleared += inside < kind.BLOCK
                i += 1
            number = gl.num_programs(0) + gl.atomic_add(batch.taken, 1, sem="relaxed")
        else:
            mbarrier.arrive(queue.full.index(slot), count=len(rows) + 1)
        n += 1


@gluon.jit
def multiply(COMPUTE: gl.constexpr, output, rows, queue, ring, batch, kind: gl.constexpr, WHICH: gl.constexpr):
    """Compute one group's part of each tile of a program: half the rows, or one of two results.

    COMPUTE(tile, block, output, rows, slot, ring, stage, phase, turn, kind, WHICH) stores a tile's results, and
    returns (stage, phase, turn) for the next one. block: rows [64, 1] of the tile and columns [1, BLOCK] of a block, in
    the layout of their scores, and zeros [64, BLOCK]; slot: the tile's place in the shared memory of `rows`; stage,
    phase: the next block's place in the ring and the phase of its barriers; turn: the phase of the barriers by which
    the groups of the forward pass alternate.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kind.BLOCK, 16])
    row = WHICH * (kind.TILE - HALF) + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))[:, None]
    column = gl.arange(0, kind.BLOCK, gl.SliceLayout(0, SCORES))[None, :]
    block = row, column, gl.zeros([HALF, kind.BLOCK], gl.float32, SCORES)
    n = 0
    stage = 0
    phase = 0
    turn = 1 - WHICH
    head, b, index = next_tile(queue, 0, kind.TILES)
    while b >= 0:
        tile = find_tile(head, b, index, batch, kind)
        slot = n % kind.TILES
        stage, phase, turn = COMPUTE(tile, block, output, rows, slot, ring, stage, phase, turn, kind, WHICH)
        fence_async_shared()  # the next copy overwrites the results in shared memory
        mbarrier.arrive(queue.empty.index(slot), count=1)
        n += 1
        head, b, index = next_tile(queue, n, kind.TILES)


@gluon.jit
def specialize(
    COMPUTE: gl.constexpr, output, rows, a, b, batch, kind: gl.constexpr, CLEAR_A: gl.constexpr, CLEAR_B: gl.constexpr
):
    """Give the warps of a program their roles: `multiply` for two groups, `produce` for one warp."""
    queue = make_queue(len(rows), kind.TILES)
    ring = make_ring(a[0], b[0], kind.STAGES)
    copied = make_barriers(2, 1)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (multiply, (COMPUTE, output, rows, queue, ring, batch, kind, FIRST)),
            (multiply, (COMPUTE, output, rows, queue, ring, batch, kind, SECOND)),
            (produce, (rows, a, b, queue, ring, copied, batch, kind, CLEAR_A, CLEAR_B)),
        ],
        [4, 1],
        [240, 24],  # registers of a thread of the second group and of the warp that copies
    )


@gluon.jit
def loop_bounds(tile, PART: gl.constexpr, kind: gl.constexpr):
    """Return (start, stop) of one of three loops backwards over all blocks but the last; PART 1 needs no masks."""
    if PART == 0:
        return tile.last - kind.BLOCK, tile.masked
    elif PART == 1:
        return tile.masked - kind.BLOCK, tile.free
    else:
        return tile.free - kind.BLOCK, tile.first


@gluon.jit
def tanh_approx(x):
    """Compute tanh as `tiles.rows.tanh_approx` does."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def rounded_pairs(x, DTYPE: gl.constexpr):
    """Return fp32 [ROWS, COLUMNS] as int32 pairs of 16-bit numbers: in a loop, each unpaired one takes a register."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if DTYPE.is_bf16():
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)


@gluon.jit
def left_operand(pairs, DTYPE: gl.constexpr, SUMS: gl.constexpr):
    """Return `rounded_pairs` as the left operand of a product with the layout SUMS, without moves between registers."""
    x = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    x = gl.reshape(x, [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(x, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def store_rows(target, tile, row, x, shared):
    """Store x [64, D] to the rows of the tile's sequence from `row` on, through `shared` [64, D]: 16 bytes a thread.

    target: `Rows`.
    """
    D: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    shared.store(x.to(shared.dtype))
    row += gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    rows = target.pointer + tile.head * target.stride_h + (tile.begin + row).to(gl.int64) * target.stride_t
    gl.store(rows[:, None] + column[None, :], shared.load(LAYOUT), (row < tile.sequence.length)[:, None])
