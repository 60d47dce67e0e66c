"""Launch the kernels of the catalogue loss; register torch.ops.hstu_sparse.catalogue_loss_fwd and _bwd.

Letters: T tokens, I items, E embedding size, K negatives, W rows of the matrix that a product streams.

There are four forms:
- the whole catalogue: products.py
- negatives [K]: products.py, with the gathered matrix [K, E] in place of the catalogue
- negatives of blocks of tokens: products.py, with a gathered matrix for each block
- negatives [T, K]: sampled.py, or small.py for a small catalogue
Forward saves lse and the scales of outputs and of the matrix; backward recomputes the logits (small.py saves them).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hstu_sparse.catalogue import products, rows, sampled, small
from hstu_sparse.core import launch
from hstu_sparse.core.launch import INTERPRET, LaunchConfig, cdiv, configuration, next_power_of_2, run
from hstu_sparse.core.registration import Operator
from hstu_sparse.tiles.rows import as_rows

LOG2E = math.log2(math.e)
# Logits in base 2 of at most this magnitude need no running maximum: fp32 can represent 2^-(2 * 60).
BOUND = 60.0
# The maximum number of bytes of the fp32 gradients of splits.
SPLIT_BYTES = 48 * 2**20
# The maximum number of bytes of an fp32 table for atomic additions.
ATOMIC_BYTES = 2**30
# Up to this many items, all norms are computed before tokens gather rows. With more, most norms would be unused.
FEW_ITEMS = 2**16
# The number of elements of a tile in the kernels of rows.py.
ROW_TILE = 2048
CHUNK, PIECE = 32, 1024
# The negatives of a block are padded to a multiple of this, so that no tile has negatives of two blocks.
DRAWN_TILE = 64

# Tile sizes and options of the products by dtype and padded E. Splits are chosen for `programs` on a multiprocessor.
_OPTIONS = dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, TMA=True, REGISTERS=False, programs=2)
_NARROW = LaunchConfig(**_OPTIONS | dict(BLOCK_M=128, num_stages=3))
_WIDE = LaunchConfig(**_OPTIONS)
_WIDEST = LaunchConfig(**_OPTIONS | dict(BLOCK_N=32, num_warps=8, programs=1))
_FLOAT32 = LaunchConfig(**_OPTIONS | dict(num_warps=8, TMA=False))
_WIDE_FLOAT32 = LaunchConfig(**_OPTIONS | dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, TMA=False), BLOCK_E=64)


@configuration
def product_config(part: str, dtype: torch.dtype, width: int, arch: int) -> LaunchConfig:
    """Return the configuration of a product kernel, with BLOCK_E only if it is fixed; part: "fwd", "dout", "ditems"."""
    if INTERPRET:
        return LaunchConfig(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=2, TMA=False, REGISTERS=False, programs=2)
    if dtype == torch.float32:
        config = _WIDE_FLOAT32 if width > 64 or arch < 90 else _FLOAT32
    elif width > 256:
        config = _WIDEST
    elif width > 128:
        config = _WIDE.replace(num_stages=3, REGISTERS=True) if part == "fwd" else _WIDE
    else:
        config = _NARROW.replace(programs=3) if part == "fwd" else _NARROW
    if arch < 90:
        config = config.replace(TMA=False)
    if arch != 90:  # only wgmma (Hopper) reads left operands from registers
        config = config.replace(REGISTERS=False)
    return _fitting(config, width * dtype.itemsize, _SHARED.get(arch, 99) * 1024)


# The maximum shared memory of a program in KB by architecture; 99 for others.
_SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}


def _fitting(config: LaunchConfig, row_bytes: int, limit: int) -> LaunchConfig:
    """Return the config with fewer stages or smaller tiles, so that the tiles fit into shared memory."""
    while (config.BLOCK_M + config.num_stages * config.BLOCK_N) * row_bytes + 4096 > limit:
        larger = "BLOCK_N" if config.BLOCK_N >= config.BLOCK_M else "BLOCK_M"
        if config.num_stages > 2 or config[larger] == 16:  # 16 is the minimum of tl.dot
            config = config.replace(num_stages=config.num_stages - 1)
        else:
            config = config.replace(**{larger: config[larger] // 2})
    return config


def chunk_width(size: int) -> int:
    """Return the width of a chunk: E padded if E is at most 64, otherwise 64 or 128, whichever needs less padding."""
    if size <= 64:
        return max(16, next_power_of_2(size))
    return 64 if cdiv(size, 64) % 2 else 128


def config_of(part: str, x: Tensor) -> LaunchConfig:
    """Return the configuration of a product kernel."""
    width = max(16, next_power_of_2(x.shape[1]))
    config = product_config(part, x.dtype, width, launch.architecture(x.device))
    return config.replace(**{"BLOCK_E": chunk_width(x.shape[1]), **config})


def plan_splits(
    rows: int, streamed: int, config: LaunchConfig, device: torch.device, row_bytes: int
) -> tuple[int, int]:
    """Return (splits, streamed rows of each): the fewest splits that keep 90% of the GPU busy, or the best number.

    row_bytes: the bytes of the results of a split for a resident row; all results must fit in SPLIT_BYTES.
    """
    block = config.BLOCK_N
    tiles, steps = max(1, cdiv(rows, config.BLOCK_M)), max(1, cdiv(streamed, block))
    slots = launch.multiprocessors(device) * config.programs
    most = min(steps, cdiv(4 * slots, tiles), max(1, SPLIT_BYTES // max(1, rows * row_bytes)))
    best, busiest = 1, 0.0
    for splits in range(1, most + 1):
        splits = cdiv(steps, cdiv(steps, splits))
        busy = tiles * splits / (cdiv(tiles * splits, slots) * slots)
        if busy > busiest + 0.02:
            best, busiest = splits, busy
        if busiest >= 0.9:
            break
    per_split = cdiv(steps, best) * block
    return max(1, cdiv(streamed, per_split)), per_split


def _gather_config(width: int) -> LaunchConfig:
    """Return the configuration of the kernels that gather rows, ROWS negatives at a time."""
    return LaunchConfig(1, ROWS=max(1, min(8, 1024 // width)))


def _streamed_inputs(config: LaunchConfig, matrix: Tensor, *vectors: Tensor | None):
    """Return the streamed inputs of a product kernel, tensors or tensor descriptors, and its settings."""
    if not config.TMA or not len(matrix):
        return matrix, *vectors, _settings(config, False)
    from triton.tools.tensor_descriptor import TensorDescriptor

    def described(x: Tensor | None, *block: int):
        return x if x is None else TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))

    rows = config.BLOCK_N
    return described(matrix, rows, config.BLOCK_E), *(described(x, rows) for x in vectors), _settings(config, True)


def _settings(config: LaunchConfig, tma: bool) -> LaunchConfig:
    """Return the config with TMA, and with STAGES, the number of stages of the kernels' loops."""
    return config.replace(TMA=tma, STAGES=config.num_stages)


class Arguments(NamedTuple):
    """The arguments of the operator, see `catalogue_loss`. reduced: whether the loss is the mean over tokens."""

    out: Tensor
    items: Tensor
    targets: Tensor
    temperature: Tensor | None
    negatives: Tensor | None
    log_q: Tensor | None
    scale: float
    normalize: bool
    smoothing: float
    reduced: bool
    block: int = 1


class _Call:
    """Values that forward and backward compute from the arguments of a call."""

    def __init__(self, arguments: Arguments):
        out, items, targets, temperature, negatives, log_q, scale, normalize, smoothing, reduced, block = arguments
        if len(out) >= 2**31 or len(items) >= 2**31:
            raise ValueError(f"the kernels take T and I below 2^31, got {len(out)} and {len(items)}")
        self.T, self.E = out.shape
        self.I = len(items)
        self.out, self.items = as_rows(out, items, align=False)
        self.targets = targets.to(torch.int32)
        if self.targets.data_ptr() % 16:  # the base of a tensor descriptor is aligned
            self.targets = self.targets.clone()
        self.temperature, self.normalize = temperature, normalize
        self.smoothing, self.reduced = smoothing, reduced
        self.scale = LOG2E if temperature is not None else LOG2E / scale
        self.bound = LOG2E / scale if temperature is None and normalize and log_q is None else math.inf
        self.width = max(16, next_power_of_2(self.E))
        self.sizes = dict(E=self.E, PAD_E=self.width, NORMALIZE=normalize)
        self.rows = dict(**self.sizes, ROWS=max(1, ROW_TILE // self.width))
        self.precision = launch.precision(out.dtype, "tf32x3")
        self.negatives, self.log_q = negatives, log_q
        self.K = 0 if negatives is None else negatives.shape[-1]
        self.drawn = _gather_config(self.width)
        self.block = block  # tokens that share negatives
        self.per_token = negatives is not None and negatives.dim() == 2 and block == 1
        self.in_blocks = negatives is not None and block > 1
        self.small = self.per_token and small.takes_products(self.I, self.K, self.E, out.dtype)

    def streamed_matrix(self):
        """Return (the matrix of items, ids of its rows, their corrections); the catalogue has no ids or corrections."""
        if self.negatives is None:
            return self.items, None, None
        ids = self.negatives.to(torch.int32)
        if self.in_blocks:
            ids = torch.nn.functional.pad(ids, (0, _padded(self.K) - self.K), value=-1).flatten()
        valid_ids = ids.clamp(min=0)
        shift = None if self.log_q is None else (self.log_q.float()[valid_ids] + math.log(max(1, self.K))) * LOG2E
        return self.items.index_select(0, valid_ids), ids, shift

    def divide(self, rows: int, streamed: int, config: LaunchConfig, row_bytes: int, streams_items: bool):
        """Return (splits, streamed rows of each, resident rows of a block or None) of a product.

        streams_items: whether programs have tokens and stream items, otherwise the reverse.
        """
        if not self.in_blocks:
            return *plan_splits(rows, streamed, config, self.out.device, row_bytes), None
        groups = self.block, _padded(self.K)
        return 1, groups[streams_items], groups[not streams_items]

    def gathered(self) -> tuple[Tensor, Tensor | None]:
        """Return (the table from which rows are gathered, contiguous [I, WIDTH]; scales of its rows, or None)."""
        table = as_rows(self.items)[0].contiguous()
        with_scales = self.normalize and self.I <= FEW_ITEMS
        return table, self.scales(self.items, 1.0, None) if with_scales else None

    def new(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.out.device)

    def over_rows(self, kernel, count: int, *arguments, **constants):
        """Launch a kernel over `count` rows; return its number of programs."""
        constants = self.rows | constants
        programs = cdiv(count, constants["ROWS"])
        if programs:
            run(kernel, programs, *arguments, **constants)
        return programs

    def scales(self, x: Tensor, factor: float, temperature: Tensor | None) -> Tensor:
        result = self.new(len(x))
        self.over_rows(rows.catalogue_loss_scale_kernel, len(x), x, x.stride(0), temperature, result, factor, len(x))
        return result

    def sum(self, x: Tensor, scales: Tensor | None, targets: Tensor | None) -> Tensor:
        """Return the sum [E] of the rows of x, times scales, without rows that have no target; see the kernel."""
        constants = {name: value for name, value in self.rows.items() if name != "NORMALIZE"}
        programs = max(1, min(512, cdiv(len(x), constants["ROWS"])))
        sums = self.new(programs, self.E)
        run(rows.catalogue_loss_sum_kernel, programs, x, x.stride(0), scales, targets, sums, len(x), **constants)
        return sums.sum(0)

    def token_weights(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (the gradient as one number, factors [T] or None for a mean).

        Factors are at most 1 in magnitude, since larger ones might overflow in fp16.
        """
        if self.reduced:
            return grad, None
        grad = torch.where(self.targets < 0, 0.0, grad.float())
        most = grad.abs().max().clamp(min=1e-37)
        return most, grad / most

    def mean(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        loss, inverse_count = self.new(), self.new(1)
        # One program, so that the order of additions is fixed.
        size = 1024 if len(parts) <= 4096 else 8192
        run(
            rows.catalogue_loss_mean_kernel, 1, parts, loss, inverse_count, len(parts), SIZE=size, num_warps=size // 512
        )  # fmt: skip
        return loss, inverse_count


def _forward(*arguments):
    """Return the loss, and lse, row_scale, item_scale, positive, inverse_count, picked, pull, along for backward."""
    call = _Call(Arguments(*arguments))
    return _forward_per_token(call) if call.per_token else forward_products(call)


def forward_products(call: _Call):
    """Return the results of `_forward` for the whole catalogue, negatives [K] or negatives of blocks."""
    matrix, ids, shift = call.streamed_matrix()
    row_scale = call.scales(call.out, call.scale, call.temperature)
    item_scale = call.scales(matrix, 1.0, None) if call.normalize else call.new(0)
    W = len(matrix)
    config = config_of("fwd", call.out)
    splits, per_split, per_group = call.divide(call.T, W, config, 4, True)
    partial = call.new(splits, call.T)
    out, matrix = as_rows(call.out, matrix)
    walk, lengths, settings = _streamed_inputs(config, matrix, item_scale if call.normalize else None)
    if call.T:
        run(
            products.catalogue_loss_fwd_kernel, cdiv(call.T, config.BLOCK_M) * splits,
            out, walk, out.stride(0), matrix.stride(0), row_scale, lengths, ids, shift, call.targets,
            partial, min(call.bound, BOUND), call.T, W, per_split, per_group, E=out.shape[1],
            BOUNDED=call.bound <= BOUND, PRECISION=call.precision, **settings,
        )  # fmt: skip
    lse, positive = call.new(call.T), call.new(call.T)
    item_sum = None
    if call.smoothing:
        item_sum = call.sum(call.items, item_scale if call.normalize else None, None)
    parts: Any = None
    losses: Any = None
    if call.reduced:
        parts = call.new(cdiv(call.T, call.rows["ROWS"]), 2)
    else:
        losses = call.new(call.T)
    call.over_rows(
        rows.catalogue_loss_rows_fwd_kernel, call.T, call.out, call.items, call.out.stride(0), call.items.stride(0),
        row_scale, call.targets, partial, item_sum, lse, positive, parts, losses, call.smoothing, call.T, call.I,
        splits, SAMPLED=ids is not None,
    )  # fmt: skip
    loss, inverse_count = call.mean(parts) if call.reduced else (losses, call.new(1).fill_(1.0))
    return loss, lse, row_scale, item_scale, positive, inverse_count, call.new(0), call.new(0), call.new(0)


def _forward_per_token(call: _Call):
    lse, parts = call.new(call.T), call.new(call.T, 2)
    table, item_scale = call.gathered()
    positive = picked = pull = along = None
    if call.small:
        positive, picked, along = call.new(call.T), call.new(call.T, call.K), call.new(call.T)
        pull = torch.empty_like(call.out, memory_format=torch.contiguous_format)
    if call.T:
        run(
            sampled.catalogue_loss_sampled_fwd_kernel, call.T,
            call.out, call.out.stride(0), call.targets, call.negatives, call.log_q, table, item_scale,
            call.temperature, lse, positive, picked, pull, along, parts, call.scale, math.log(max(1, call.K)), call.K,
            WIDTH=table.shape[1], **call.sizes, **call.drawn,
        )  # fmt: skip
    loss, inverse_count = call.mean(parts) if call.reduced else (parts[:, 0].contiguous(), call.new(1).fill_(1.0))
    # Without `normalize` the scale of all outputs is one number, a factor of the gradient of the items.
    row_scale = call.new(0 if call.normalize else 1)
    if call.T and not call.normalize:
        row_scale = call.scales(call.out[:1], call.scale, call.temperature)
    saved = (x if x is not None else call.new(0) for x in (positive, inverse_count, picked, pull, along))
    return loss, lse, row_scale, call.new(0), *saved


def _backward(grad, *inputs):
    """Return the gradients of out, items and, unless it is None, temperature."""
    *arguments, lse, row_scale, item_scale, positive, inverse_count, picked, pull, along = inputs
    call = _Call(Arguments(*arguments))
    if not call.T:
        inputs = (call.out, call.items, call.temperature)
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs if x is not None]
    dout = torch.empty_like(call.out, memory_format=torch.contiguous_format)
    grad, weights = call.token_weights(grad)
    if call.small:
        ditems = small.backward(call, grad, lse, positive, inverse_count, picked, pull, dout, weights)
        along = along if weights is None else along * weights
    elif call.per_token:
        along = call.new(call.T)
        ditems = _backward_per_token(call, grad, lse, row_scale, inverse_count, dout, along, weights)
    else:
        above, along = Above(grad, inverse_count, weights), call.new(call.T)
        ditems = backward_products(call, above, lse, row_scale, item_scale, positive, dout, along)
    gradients = [dout, ditems]
    if call.temperature is not None:
        slope = -along.sum() * inverse_count[0] * grad / call.temperature
        gradients.append(slope.to(call.temperature.dtype))
    return gradients


class Above(NamedTuple):
    """The factors of the gradient of a token: that of the loss, 1 / the number of targets, weights [T] or None."""

    grad: Tensor
    inverse_count: Tensor
    weights: Tensor | None


def backward_products(call, above: Above, lse, row_scale, item_scale, positive, dout, along, hits=None):
    """Write dout and along; return ditems. hits: targets, or -1 for targets in other parts (parts.py)."""
    grad, inverse_count, weights = above
    matrix, ids, shift = call.streamed_matrix()
    sampled = ids is not None
    logits = positive if sampled or hits is not None else None
    item_scale = item_scale if call.normalize else None
    item_sum = out_sum = None
    if call.smoothing:
        item_sum = call.sum(call.items, item_scale, None)
        factors = [x for x in (row_scale if call.normalize else None, weights) if x is not None]
        out_sum = call.sum(call.out, math.prod(factors) if factors else None, call.targets)
    W = len(matrix)
    out, matrix = as_rows(call.out, matrix)
    shape = dict(E=out.shape[1], NORMALIZE=call.normalize, PRECISION=call.precision)
    end = rows.OutputsEnd(logits, call.items, call.items.stride(0), item_sum, grad, inverse_count, weights, dout, along)
    config = config_of("dout", call.out)
    splits, per_split, per_group = call.divide(call.T, W, config, 4 * call.E, True)
    partial: Any = call.new(splits, call.T, call.E) if splits > 1 else None
    walk, lengths, settings = _streamed_inputs(config, matrix, item_scale)
    run(
        products.catalogue_loss_bwd_dout_kernel, cdiv(call.T, config.BLOCK_M) * splits,
        out, walk, out.stride(0), matrix.stride(0), row_scale, lengths, ids, shift, call.targets, lse,
        end, partial, call.smoothing, call.T, call.I, W, per_split, per_group, SIZE=call.E, **shape, **settings,
    )  # fmt: skip
    if splits > 1:
        call.over_rows(
            rows.catalogue_loss_merge_bwd_dout_kernel, call.T, partial, call.out, call.out.stride(0), row_scale,
            call.targets, lse, end, call.smoothing, call.T, call.I, splits,
        )  # fmt: skip
    del partial
    config = config_of("ditems", call.out)
    if call.in_blocks:
        config = config.replace(BLOCK_M=min(config.BLOCK_M, DRAWN_TILE))
    splits, per_split, per_group = call.divide(W, call.T, config, 4 * call.E, False)
    parts = splits > 1 or sampled
    partial = call.new(splits, W, call.E) if parts else None
    ditems = None if sampled else torch.empty_like(call.items, memory_format=torch.contiguous_format)
    items_end = rows.ItemsEnd(row_scale, out_sum, grad, inverse_count, ditems)
    walk, scales, targets, sums, factors, settings = _streamed_inputs(
        config, out, row_scale, call.targets if hits is None else hits, lse, weights
    )
    if W:
        run(
            products.catalogue_loss_bwd_ditems_kernel, cdiv(W, config.BLOCK_M) * splits,
            walk, matrix, out.stride(0), matrix.stride(0), scales, item_scale, ids, shift, targets, sums, factors,
            items_end, partial, call.smoothing, W, call.T, per_split, per_group, SIZE=call.E, **shape, **settings,
        )  # fmt: skip
    if sampled:
        drawn = partial[0] if splits == 1 else partial.sum(0)
        factor = torch.where(call.targets < 0, 0.0, torch.exp2(positive - lse) - 1.0)
        shares = factor * row_scale if call.normalize else factor
        shares = shares if weights is None else shares * weights
        return _table_gradient(call, grad, inverse_count, row_scale, ids, shares, drawn)
    if splits > 1:
        call.over_rows(
            rows.catalogue_loss_merge_bwd_ditems_kernel, W, partial, call.items, call.items.stride(0), items_end,
            call.smoothing, call.I, splits,
        )  # fmt: skip
    return ditems


def _backward_per_token(call, grad, lse, row_scale, inverse_count, dout, along, weights):
    shares: Any = None
    sums: Any = None
    table, item_scale = call.gathered()
    if 4 * call.I * call.E > ATOMIC_BYTES or torch.are_deterministic_algorithms_enabled():
        shares = call.new(call.T * (1 + call.K))
    else:
        sums = call.new(*table.shape).zero_()
    run(
        sampled.catalogue_loss_sampled_bwd_dout_kernel, call.T,
        call.out, call.out.stride(0), call.targets, call.negatives, call.log_q, table, item_scale,
        call.temperature, lse, grad, inverse_count, weights, dout, along, shares, sums, call.scale,
        math.log(max(1, call.K)), call.T, call.K, WIDTH=table.shape[1], **call.sizes, **call.drawn,
    )  # fmt: skip
    if shares is None:
        ditems = torch.empty_like(call.items, memory_format=torch.contiguous_format)
        sums = sums[:, : call.E].contiguous()
        call.over_rows(
            rows.catalogue_loss_merge_bwd_ditems_kernel, call.I, sums, call.items, call.items.stride(0),
            rows.ItemsEnd(row_scale, None, grad, inverse_count, ditems), 0.0, call.I, 1,
        )  # fmt: skip
        return ditems
    return _table_gradient(call, grad, inverse_count, row_scale, call.negatives, shares, None)


def _table_gradient(call, grad, inverse_count, row_scale, negatives, shares, drawn):
    """Return the gradient of items [I, E] from sorted entries; see sampled.py."""
    ditems = torch.zeros_like(call.items, memory_format=torch.contiguous_format)
    # The time of the sort is proportional to the bits of a key.
    key = torch.int16 if call.I < 2**15 else torch.int32
    entries = torch.cat([call.targets.to(key), negatives.flatten().to(key)])
    keys, order = torch.where(entries < 0, call.I, entries).sort(stable=True)
    windows = cdiv(len(keys), PIECE)
    slots = call.new(windows, 2, call.E)
    scalars = (row_scale, grad, inverse_count, ditems, slots, len(keys))
    # The number of entries that are processed at a time: about as many as an item has.
    rows = 16 if len(keys) < 32 * call.I else max(16, min(64, 2 * ROW_TILE // call.width))
    run(
        sampled.catalogue_loss_table_bwd_kernel, cdiv(len(keys), CHUNK),
        keys, order, call.out, call.out.stride(0), shares, drawn, call.items, call.items.stride(0), *scalars, call.T,
        call.K, call.I, **call.sizes, ROWS=rows, CHUNK=CHUNK, PIECE=PIECE,
    )  # fmt: skip
    run(
        sampled.catalogue_loss_pieces_bwd_kernel, windows, keys, call.items, call.items.stride(0), *scalars, call.I,
        **call.sizes, PIECE=PIECE,
    )  # fmt: skip
    return ditems


def _padded(negatives: int) -> int:
    """Return the number of negatives of a block, padded to a multiple of DRAWN_TILE."""
    return cdiv(negatives, DRAWN_TILE) * DRAWN_TILE


def _fake(*arguments):
    out, items, _, _, negatives, _, _, normalize, _, reduced, block = arguments

    def empty(*shape):
        return out.new_empty(shape, dtype=torch.float32)

    T, W = out.shape[0], items.shape[0]
    loss = empty() if reduced else empty(T)
    if negatives is not None and negatives.dim() == 2 and block == 1:
        uses_products = small.takes_products(W, negatives.shape[1], out.shape[1], out.dtype)
        positive, picked = (empty(T), empty(*negatives.shape)) if uses_products else (empty(0), empty(0))
        pull, along = (out.new_empty(out.shape), empty(T)) if uses_products else (empty(0), empty(0))
        return loss, empty(T), empty(0 if normalize else 1), empty(0), positive, empty(1), picked, pull, along
    if negatives is not None:
        W = negatives.shape[0] if block == 1 else negatives.shape[0] * _padded(negatives.shape[1])
    return loss, empty(T), empty(T), empty(W if normalize else 0), empty(T), empty(1), empty(0), empty(0), empty(0)


_SCHEMA = (
    "Tensor out, Tensor items, Tensor targets, Tensor? temperature, Tensor? negatives, Tensor? log_q, float scale, "
    "bool normalize, float label_smoothing, bool reduced, int block"
)
catalogue_loss_operator = Operator(
    "catalogue_loss", _SCHEMA, _forward, _backward, _fake, "out items temperature", outputs=9
)
