"""Compute the gradient of the mean keys and values: a program has a tile of blocks and iterates over later queries.

Letters: B sequences, H heads, D query/key and V value head size, BS block size, BM queries and BN mean keys of a tile.
"""

import triton
import triton.language as tl

from hstu_sparse.bsa.bias import Side, pair_tile
from hstu_sparse.bsa.key_major import add_rows, key_step, load_gates
from hstu_sparse.tiles.rows import load_rows, load_tile, locate


@triton.jit(do_not_specialize=["B", "gates_stride_h"])
def bsa_compress_bwd_dkv_kernel(
    do, q, kbar, vbar, offsets, gates, gates_stride_h, gradients, bias, strides, call, B,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, ATOMIC: tl.constexpr, TMA: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BN mean keys and values from every later query; grid axis 2 divides the queries in turn.

    gates: by head. gradients: `KeyGradients`.
    """
    scale, inv_n, H = call.scale, call.inv_n, call.H
    b, start, length, i = locate(offsets, tl.program_id(0), B, BN * BS)
    h = tl.program_id(1)
    blocks = length // BS
    if i * BN >= blocks:
        return
    j = i * BN + tl.arange(0, BN)
    known = j < blocks
    base = (start // BS + b) * H + h
    keys = load_rows(kbar + base * D, j, H * D, known, D, BD)
    values = load_rows(vbar + base * V, j, H * V, known, V, BV)
    first = i * BN * BS + BS // 2
    side = Side(start + first, first, tl.where(known, (j - i * BN) * BS, 0).to(tl.int64))
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    origin = start.to(tl.int32)
    g_cmp = gates.cmp + h * gates_stride_h
    if not TMA:
        q += h * strides.q_h
        do += h * strides.do_h
    # The first block of the tile is complete for its own last token.
    begin = (i * BN * BS + BS - 1) // BM * BM + tl.program_id(2) * BM
    step = BM * tl.num_programs(2)
    if begin < length:
        for c in range(begin, length, step):
            t = c + tl.arange(0, BM)
            live = t < length
            biases, _ = pair_tile(bias, Side(start + c, c, tl.arange(0, BM).to(tl.int64)), side, 1, ASM)
            queries = load_tile(q, start + t, strides.q_t, live, origin + c, h * D, D, BD, TMA)
            upstream = load_tile(do, start + t, strides.do_t, live, origin + c, h * V, V, BV, TMA)
            cmp = load_gates(g_cmp, start + c, live, BM, ASM)
            gate = tl.where((j * BS + (BS - 1))[:, None] <= t[None, :], cmp[None, :], 0.0)
            acc_k, acc_v, _, _ = key_step(
                acc_k, acc_v, keys, values, queries, upstream, gate, scale, biases, FAST, PRECISION
            )
        add_rows(gradients.dkbar + base * D, j, H * D, known, acc_k * (BS * scale * inv_n), D, BD, ATOMIC)
        add_rows(gradients.dvbar + base * V, j, H * V, known, acc_v * (BS * inv_n), V, BV, ATOMIC)
