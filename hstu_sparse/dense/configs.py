"""Define tile sizes, warps and pipeline stages of the kernels: fixed, so that no batch waits for tuning.

Letters: D query/key head size, V value head size. Settings for sm_90 were measured on an H200 (docs/performance.md).
Those for sm_80 fit its shared memory; all others fit into 99 KB, the least of any later GPU (sm_86, 89 and 120).
"""

from typing import NamedTuple

import torch

from hstu_sparse.core.launch import LaunchConfig, architecture, configuration
from hstu_sparse.tiles.assembly import PROVEN_VERSION, proven


class Features(NamedTuple):
    """The properties of a call that its launch settings depend on."""

    pad_d: int  # D and V, padded to the widths of the kernels' tiles
    pad_v: int
    dtype: torch.dtype
    position: bool  # whether there is a position bias
    time: bool
    arch: int  # compute capability, 90 for 9.0
    hopper: bool = False  # whether the kernels for Hopper run, whose tiles differ

    @property
    def crowded(self) -> bool:
        """Whether values of bias tables pass through shared memory, which leaves less of it for tiles."""
        return (self.position or self.time) and not PROVEN_VERSION  # assembly keeps them in registers


@configuration
def fwd_config(f: Features) -> LaunchConfig:
    """Return the settings of the forward kernel."""
    wide = max(f.pad_d, f.pad_v) > 128
    if f.dtype == torch.float32:
        narrow = f.arch == 90 and max(f.pad_d, f.pad_v) <= 32
        return LaunchConfig(BLOCK_M=64 if narrow else 32, BLOCK_N=32, num_warps=4, num_stages=2)
    if f.arch == 90:
        if wide:
            return LaunchConfig(BLOCK_M=128, BLOCK_N=32 if f.crowded else 64, num_warps=8, num_stages=2)
        # Few registers and little shared memory, so that two or three programs share a multiprocessor: while one waits
        # for its products, another computes SiLU and bias.
        if f.time:
            registers = 128 if max(f.pad_d, f.pad_v) <= 64 else 168
            return LaunchConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3, maxnreg=registers)
        return LaunchConfig(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=3, maxnreg=128)
    if f.arch == 80:
        if wide:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1)
        return LaunchConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
    return LaunchConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1 if wide else 2)


# The least average sequence length for which `backend="auto"` chooses the kernels for Hopper: they were faster at this
# length with heads of 64 and 128, and at 4,096 with heads of 256, the shortest that were measured (docs/dense.md).
HOPPER_MIN_LENGTH = 1024


# The sizes of heads, the same for queries, keys and values, that the kernels for Hopper support.
HOPPER_SIZES = (64, 128, 256)


def hopper_supports(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the kernels for Hopper support heads of these sizes, [T, H, D] and [T, H, V]."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] in HOPPER_SIZES and q.shape[2:] == v.shape[2:]


def hopper_available(device: torch.device) -> bool:
    """Return whether the kernels for Hopper run on a device with the installed version of Triton."""
    return architecture(device) == 90 and proven(device)


def prefers_hopper(q: torch.Tensor, v: torch.Tensor, biased: bool, num_seqs: int) -> bool:
    """Return whether `backend="auto"` chooses the kernels for Hopper.

    The choice depends only on shapes, so that both passes and a captured CUDA graph make the same one.
    """
    # Compare the number of tokens last: torch.compile adds a guard for every comparison that is made.
    supported = not biased and hopper_supports(q, v) and hopper_available(q.device)
    return supported and q.shape[0] >= HOPPER_MIN_LENGTH * num_seqs


@configuration
def hopper_fwd_config(f: Features) -> LaunchConfig:
    """Return the settings of the kernel for Hopper that computes the output."""
    if f.pad_d == 256:
        return LaunchConfig(BLOCK_M=128, BLOCK_N=64, STAGES=2, TILES=1, num_warps=4)
    return LaunchConfig(BLOCK_M=128, BLOCK_N=128, STAGES=2 if f.pad_d == 128 else 3, TILES=2, num_warps=4)


@configuration
def hopper_dq_config(f: Features) -> LaunchConfig:
    """Return the settings of the kernel for Hopper that computes dq."""
    if f.pad_d == 256:
        return LaunchConfig(BLOCK_M=128, BLOCK_N=32, STAGES=3, TILES=1, num_warps=4)
    return LaunchConfig(BLOCK_M=128, BLOCK_N=64, STAGES=3 if f.pad_d == 128 else 4, TILES=2, num_warps=4)


@configuration
def hopper_dkv_config(f: Features) -> LaunchConfig:
    """Return the settings of the kernel for Hopper that computes dk and dv."""
    if f.pad_d == 256:
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, STAGES=2, TILES=1, num_warps=4)
    return LaunchConfig(BLOCK_M=64, BLOCK_N=128, STAGES=3 if f.pad_d == 128 else 4, TILES=2, num_warps=4)


@configuration
def bwd_dq_config(f: Features) -> LaunchConfig:
    """Return the settings of the kernel of dq and the bias tables' gradients. HOLD: keep q and do in registers.

    No two threads may hold the same score of a tile, or the sums of the tables' gradients would count it twice. In
    TF32 products each of four warps holds 16 x 8 scores; if a tile is wider than high, warps lie side by side.
    """
    wide, both = max(f.pad_d, f.pad_v) > 128, f.pad_d + f.pad_v
    if f.dtype == torch.float32:
        return LaunchConfig(BLOCK_M=16, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=1 if both > 128 else 2)
    if f.arch == 90:
        if wide and not (f.position or f.time):
            return LaunchConfig(BLOCK_M=128, BLOCK_N=32, HOLD=False, num_warps=8, num_stages=2)
        if wide or both <= 64:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=2)
        registers = 168 if f.time and max(f.pad_d, f.pad_v) <= 64 else None  # three programs on a multiprocessor
        return LaunchConfig(BLOCK_M=64, BLOCK_N=32, HOLD=True, num_warps=4, num_stages=3, maxnreg=registers)
    if f.arch == 80:
        if wide or both <= 64 or f.time:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=1 if wide else 2)
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, HOLD=False, num_warps=4, num_stages=1 if f.position else 2)
    return LaunchConfig(BLOCK_M=32 if wide else 64, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=1)


@configuration
def bwd_dkv_config(f: Features) -> LaunchConfig:
    """Return the settings of the kernel of dk and dv. TMA: load queries by descriptor, to save registers.

    If the sums of both do not fit into a program's registers (`separate_dkv`), each has its own launch.
    """
    wide = max(f.pad_d, f.pad_v) > 128
    if f.dtype == torch.float32:
        if f.arch == 90 and max(f.pad_d, f.pad_v) <= 32:
            return LaunchConfig(BLOCK_M=16, BLOCK_N=64, TMA=False, num_warps=4, num_stages=1)
        rows = 32 if f.pad_d == f.pad_v == 64 else 16  # more rows spill
        return LaunchConfig(BLOCK_M=rows, BLOCK_N=32, TMA=False, num_warps=4, num_stages=1)
    if f.arch == 90:
        if wide:
            return LaunchConfig(BLOCK_M=32, BLOCK_N=64 if f.crowded else 128, TMA=True, num_warps=8, num_stages=2)
        if f.time:
            registers = 168 if max(f.pad_d, f.pad_v) <= 64 else None
            return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=True, num_warps=4, num_stages=3, maxnreg=registers)
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, TMA=True, num_warps=4, num_stages=2)
    if f.arch == 80:
        if wide:
            return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=8, num_stages=1)
        return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=4, num_stages=2)
    return LaunchConfig(BLOCK_M=32, BLOCK_N=32 if wide or f.time else 64, TMA=False, num_warps=4, num_stages=1)


def separate_dkv(f: Features) -> bool:
    """Return whether the sums of dk and dv together need more than 128 registers of a thread."""
    config = bwd_dkv_config(f)
    return config.BLOCK_N * (f.pad_d + f.pad_v) > 128 * 32 * config.num_warps
