"""Define inline assembly that loads from memory in a tile's own layout, and the switch that enables it.

Triton has no such operations, and any release may break the assembly here and in bias/sums.py. So kernels get ASM=True
only if `proven` returns True: for architectures and Triton versions that the tests have run on. Otherwise, and in the
interpreter, they use plain operations, with the same results but slower.

Results do not depend on which thread holds which value. A tile needs at least as many values as the program has
threads, since otherwise several threads hold the same value. The assembly is fast in the layouts of wgmma and mma.
"""

import torch
import triton
import triton.language as tl

from hstu_sparse.core.launch import INTERPRET, architecture

PROVEN_ARCHITECTURES = (80, 90)
PROVEN_TRITON = ("3.6", "3.7")
PROVEN_VERSION = not INTERPRET and ".".join(triton.__version__.split(".")[:2]) in PROVEN_TRITON


def proven(device: torch.device) -> bool:
    """Return whether kernels on this device may use this file's assembly."""
    return PROVEN_VERSION and architecture(device) in PROVEN_ARCHITECTURES


@triton.jit
def look_up(table, index, ASM: tl.constexpr):
    """Load table[index] for a tile of indices, in the tile's own layout.

    table: fp32, or int32 with int64 indices. int32 indices must be >= 0.

    An ordinary load gets another layout, and converting a tile from there to the tensor cores' layout costs more than
    the load. An elementwise operation keeps its operand's layout.
    """
    if ASM:
        if index.dtype == tl.int32:
            return tl.inline_asm_elementwise(
                "{ .reg .u64 a; mad.wide.u32 a, $2, 4, $1; ld.global.nc.f32 $0, [a]; }", "=f,l,r",
                [table.to(tl.int64), index], tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        elif table.dtype.element_ty == tl.int32:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [(table + index).to(tl.int64)], tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [(table + index).to(tl.int64)], tl.float32, is_pure=True, pack=1
            )
    else:
        return tl.load(table + index)


@triton.jit
def scalar(pointer, ASM: tl.constexpr):
    """Load one number (int16 or fp32) as tl.load does, but without passing it through shared memory."""
    if ASM:
        if pointer.dtype.element_ty == tl.int16:
            return tl.inline_asm_elementwise(
                "ld.global.nc.s16 $0, [$1];", "=r,l", [pointer.to(tl.int64)], tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [pointer.to(tl.int64)], tl.float32, is_pure=True, pack=1
            )
    else:
        return tl.load(pointer)


@triton.jit
def load_edge(place, ASM: tl.constexpr):
    """Load pairs of adjacent words, (fp32, int32), in the tile's own layout."""
    if ASM:
        edge, below = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=f,=r,l", [place.to(tl.int64)], (tl.float32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        return edge, below
    else:
        return tl.load(place).to(tl.float32, bitcast=True), tl.load(place + 1)
