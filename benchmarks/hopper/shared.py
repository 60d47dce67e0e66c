"""What the dense kernels in Gluon share: warps with roles of their own, on Hopper.

Gluon is Triton's language of explicit layouts. A program has tiles of 128 queries (or keys) of one head, 64 for each of
two groups of four warps, which multiply. One more warp (`produce`) copies the tiles, and block by block the keys and
values (or queries and do) that they meet, into a ring in shared memory, by tensor descriptor. Barriers in shared memory
say which of the ring's stages are full and which are empty. While one group computes SiLU the tensor cores multiply for
the other.

Blocks are walked from the end back, so that of a tile of queries the first one is the one with masks.

Letters: T tokens of the batch, H heads, D query/key head size, V value head size. t and s: the positions of queries and
keys in their sequence.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hstu_sparse.dense import ranges

find_sequence = gluon.jit(ranges.find_sequence.fn)
key_ranges = gluon.jit(ranges.key_ranges.fn)
query_ranges = gluon.jit(ranges.query_ranges.fn)
visible = gluon.jit(ranges.visible.fn)

HALF = gl.constexpr(64)  # rows of a tile for each group

# Tiles and blocks in shared memory.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Eight rows of a block, by one warp.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor of x [T, H, size], with its heads side by side, in blocks of `rows` rows of one head."""
    heads, size = x.shape[1:]
    if x.stride(0) < (heads - 1) * x.stride(1) + size:
        x = x.contiguous()
    return TensorDescriptor(x, [x.shape[0], (heads - 1) * x.stride(1) + size], [x.stride(0), 1], [rows, size], LAYOUT)


class Batch(NamedTuple):
    """Where a kernel reads which tiles there are, and the number of the next one that no program has taken."""

    schedule: gl.tensor
    slots: gl.tensor  # the schedule's length
    taken: gl.tensor
    seq_offsets: gl.tensor
    num_targets: gl.tensor
    window_size: gl.tensor


class Kind(NamedTuple):
    """What a kernel is compiled for. OWN: rows of a tile; OTHER: of a block."""

    H: gl.constexpr
    OWN: gl.constexpr
    OTHER: gl.constexpr
    STAGES: gl.constexpr
    HAS_TARGETS: gl.constexpr
    HAS_WINDOW: gl.constexpr
    BY_QUERY: gl.constexpr


class Tile(NamedTuple):
    """A tile and its blocks, from the row `first` to the block at `last`; those in free .. masked need no mask."""

    head: gl.tensor
    begin: gl.tensor  # the sequence's first token, int32
    sequence: ranges.Sequence
    first_row: gl.tensor
    first: gl.tensor
    free: gl.tensor
    masked: gl.tensor
    last: gl.tensor


class Queue(NamedTuple):
    """The next tiles, two at most: their numbers [2 * 3, 1] (head, sequence, tile) and the barriers of each."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Ring(NamedTuple):
    """Blocks [STAGES, OTHER, D or V] in shared memory of the two tensors that are walked, and their barriers.

    a, b    keys and values, or queries and do
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    a_full: gl.shared_memory_descriptor
    a_empty: gl.shared_memory_descriptor
    b_full: gl.shared_memory_descriptor
    b_empty: gl.shared_memory_descriptor


@gluon.jit
def make_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """[STAGES, 1], each of which waits for so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


@gluon.jit
def make_tiles(source, COUNT: gl.constexpr):
    """Shared memory for so many tiles of a tensor descriptor."""
    return gl.allocate_shared_memory(source.dtype, [COUNT, source.block_shape[0], source.block_shape[1]], source.layout)


@gluon.jit
def make_ring(a, b, STAGES: gl.constexpr):
    """The `Ring` of blocks that come by two tensor descriptors."""
    return Ring(
        make_tiles(a, STAGES), make_tiles(b, STAGES), make_barriers(STAGES, 1), make_barriers(STAGES, 2),
        make_barriers(STAGES, 1), make_barriers(STAGES, 2),
    )  # fmt: skip


@gluon.jit
def make_queue(TENSORS: gl.constexpr):
    """The `Queue` of tiles that have rows of so many tensors."""
    numbers = gl.allocate_shared_memory(gl.int32, [6, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(numbers, make_barriers(2, TENSORS + 1), make_barriers(2, 2))


@gluon.jit
def find_tile(head, b, index, batch, kind: gl.constexpr):
    """The `Tile` of an entry of a schedule, which counts tiles of queries from the sequence's end."""
    begin, sequence = find_sequence(b, batch.seq_offsets, batch.num_targets, batch.window_size)
    if kind.BY_QUERY:
        first_row = ((sequence.length + kind.OWN - 1) // kind.OWN - 1 - index) * kind.OWN
        first, free, masked, end = key_ranges(
            first_row, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, kind.OWN, kind.OTHER
        )
    else:
        first_row = index * kind.OWN
        first, free, masked, end = query_ranges(
            first_row, sequence, kind.HAS_TARGETS, kind.HAS_WINDOW, kind.OTHER, kind.OWN
        )
    last = (end - 1) // kind.OTHER * kind.OTHER
    masked = gl.minimum(masked, last)  # a last block that is whole is masked too
    return Tile(head, begin.to(gl.int32), sequence, first_row, first, gl.minimum(free, masked), masked, last)


@gluon.jit
def take(queue, n, WARPS: gl.constexpr):
    """(head, sequence, tile) of the n-th tile of a program; the sequence is -1 behind the last one."""
    slot = n % 2
    mbarrier.wait(queue.full.index(slot), n // 2 % 2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    head = gl.max(queue.numbers.index(slot * 3).load(LAYOUT), 0)
    b = gl.max(queue.numbers.index(slot * 3 + 1).load(LAYOUT), 0)
    return head, b, gl.max(queue.numbers.index(slot * 3 + 2).load(LAYOUT), 0)


@gluon.jit
def put(queue, n, head, b, index):
    """Says which tile is a program's n-th."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = n % 2
    queue.numbers.index(slot * 3).store(gl.full([1], 0, gl.int32, LAYOUT) + head)
    queue.numbers.index(slot * 3 + 1).store(gl.full([1], 0, gl.int32, LAYOUT) + b)
    queue.numbers.index(slot * 3 + 2).store(gl.full([1], 0, gl.int32, LAYOUT) + index)


@gluon.jit
def clear_rows(block, inside, ROWS_OF_BLOCK: gl.constexpr):
    """Zeros to the rows of a block in shared memory from `inside` on, by one warp."""
    row = gl.arange(0, 8, gl.SliceLayout(1, ROWS))[:, None]
    for part in gl.static_range(ROWS_OF_BLOCK // 8):
        if inside < part * 8 + 8:
            rows = block.slice(part * 8, 8, 0)
            rows.store(gl.where(row < inside - part * 8, rows.load(ROWS), 0.0))


@gluon.jit
def copy_block(source, place, block, full, inside, copied, cleared, CLEAR: gl.constexpr):
    """A block in shared memory from the tensor at `place`; arrives at the barrier `full`.

    CLEAR: rows from `inside` on are another sequence's, and become zeros, as a weight of zero times an infinity were no
    number; copied: a barrier for that, which was used `cleared` times.
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
def produce(own, a, b, queue, ring, copied, batch, kind: gl.constexpr, CLEAR_A: gl.constexpr, CLEAR_B: gl.constexpr):
    """Copies the tiles of a program and, block by block, what they meet.

    Programs take tiles as they come to them, so that none idles while others have much to do.

    own: (tensor descriptor, stride of its heads, shared memory [2, OWN, D or V]) of the one or two tensors that tiles
    are of; a, b: (tensor descriptor, stride of its heads) of those in the ring. copied: barriers for `copy_block`.
    CLEAR_A, CLEAR_B: which of the blocks need zeros behind the sequence's end.
    """
    i = 0
    n = 0
    cleared = 0
    number = gl.program_id(0)
    some = True
    while some:
        slot = n % 2
        mbarrier.wait(queue.empty.index(slot), n // 2 % 2 ^ 1)
        entry = batch.schedule + 2 * (number // kind.H)
        inside_schedule = number < batch.slots * kind.H
        head = number % kind.H
        sequence = gl.load(entry, inside_schedule, -1)
        index = gl.load(entry + 1, inside_schedule, 0)
        some = sequence >= 0
        put(queue, n, head, sequence, index)
        if some:
            mbarrier.arrive(queue.full.index(slot), count=1)
            tile = find_tile(head, sequence, index, batch, kind)
            for which in gl.static_range(len(own)):
                source, stride_h, target = own[which]
                place = [tile.begin + tile.first_row, tile.head * stride_h]
                copy_block(source, place, target.index(slot), queue.full.index(slot), 0, copied, 0, False)
            for start in range(tile.last, tile.first - 1, -kind.OTHER):
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
                cleared += inside < kind.OTHER
                i += 1
            number = gl.num_programs(0) + gl.atomic_add(batch.taken, 1, sem="relaxed")
        else:
            mbarrier.arrive(queue.full.index(slot), count=len(own) + 1)
        n += 1


@gluon.jit
def loop_bounds(tile, PART: gl.constexpr, OTHER: gl.constexpr):
    """(start, stop) of a walk back over blocks behind the last one, in three parts; only the second needs no masks."""
    if PART == 0:
        return tile.last - OTHER, tile.masked
    elif PART == 1:
        return tile.masked - OTHER, tile.free
    else:
        return tile.free - OTHER, tile.first


@gluon.jit
def tanh_approx(x):
    """As `tiles.tanh_approx`."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def rounded_pairs(x, DTYPE: gl.constexpr):
    """fp32 [ROWS, COLUMNS] as int32 pairs of 16-bit numbers, which a loop would carry one by one."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if DTYPE.is_bf16():
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], gl.int32, True, 1)


@gluon.jit
def left_operand(pairs, DTYPE: gl.constexpr, SUMS: gl.constexpr):
    """`rounded_pairs` as the left operand of a product with the layout SUMS, without a move between registers."""
    x = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    x = gl.reshape(x, [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(x, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def store_rows(pointer, stride_t, stride_h, tile, row, x, shared):
    """x [64, SIZE] to the rows of the tile's sequence from `row` on, by way of `shared` [64, SIZE]."""
    SIZE: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    shared.store(x.to(shared.dtype))
    row += gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    rows = pointer + tile.head * stride_h + (tile.begin + row).to(gl.int64) * stride_t
    gl.store(rows[:, None] + column[None, :], shared.load(LAYOUT), (row < tile.sequence.length)[:, None])
