"""Tile sizes, warps and pipeline stages of the kernels: chosen, not tuned at run time, so that no batch pays for it.

Letters: D query/key head size, V value head size. For sm_90 measured on an H200 (docs/performance.md); for sm_80 made
to fit, and for all others made to fit the least shared memory that a later GPU has (99 KB, sm_86, 89 and 120).
"""

from typing import NamedTuple

import torch

from hstu_sparse.launch import LaunchConfig, configuration


class Features(NamedTuple):
    """What a launch's settings depend on."""

    pad_d: int  # D and V as the kernels' tiles have them
    pad_v: int
    dtype: torch.dtype
    position: bool  # is there a position bias
    time: bool
    arch: int  # compute capability, 90 for 9.0


@configuration
def fwd_config(f: Features) -> LaunchConfig:
    """Settings of the forward kernel."""
    wide = max(f.pad_d, f.pad_v) > 128
    if f.dtype == torch.float32:
        narrow = f.arch == 90 and max(f.pad_d, f.pad_v) <= 32
        return LaunchConfig(BLOCK_M=64 if narrow else 32, BLOCK_N=32, num_warps=4, num_stages=2)
    if f.arch == 90:
        if wide:
            return LaunchConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
        # Few registers and little shared memory, so that two or three programs share a multiprocessor: while one waits
        # for its products, another computes SiLU and bias.
        if f.time:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=3, maxnreg=168)
        return LaunchConfig(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=3, maxnreg=128)
    if f.arch == 80:
        if wide:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1)
        return LaunchConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
    return LaunchConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1 if wide else 2)


@configuration
def hopper_config(f: Features, rounds: bool) -> LaunchConfig:
    """Settings of the forward kernel in hopper.py. rounds: programs have several tiles.

    Its tiles of queries are those of the forward kernel, whose schedule it reads. Groups that take turns are faster
    where SiLU takes as long as the products (D = 64), and in rounds.
    """
    turns = rounds or f.pad_d == 64
    return LaunchConfig(BLOCK_M=fwd_config(f).BLOCK_M, BLOCK_N=128, STAGES=3, TURNS=turns, num_warps=4)


@configuration
def bwd_dq_config(f: Features) -> LaunchConfig:
    """Settings of the kernel of dq and of the bias tables' gradients. HOLD: q and do are held in registers.

    No value of a tile of scores may stand in two threads, whose sums of the tables' gradients would have it twice: four
    warps of tf32 products have 16 x 8 each, side by side where a tile is wider than high.
    """
    wide, both = max(f.pad_d, f.pad_v) > 128, f.pad_d + f.pad_v
    if f.dtype == torch.float32:
        return LaunchConfig(BLOCK_M=16, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=1 if both > 128 else 2)
    if f.arch == 90:
        if wide or both <= 64:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=2)
        return LaunchConfig(BLOCK_M=64, BLOCK_N=32, HOLD=True, num_warps=4, num_stages=3)
    if f.arch == 80:
        if wide or both <= 64 or f.time:
            return LaunchConfig(BLOCK_M=64, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=1 if wide else 2)
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, HOLD=False, num_warps=4, num_stages=1 if f.position else 2)
    return LaunchConfig(BLOCK_M=32 if wide else 64, BLOCK_N=32, HOLD=False, num_warps=4, num_stages=1)


@configuration
def bwd_dkv_config(f: Features) -> LaunchConfig:
    """Settings of the kernel of dk and dv. TMA: queries come by tensor descriptor, which needs few registers."""
    wide = max(f.pad_d, f.pad_v) > 128
    if f.dtype == torch.float32:
        if f.arch == 90 and max(f.pad_d, f.pad_v) <= 32:
            return LaunchConfig(BLOCK_M=16, BLOCK_N=64, TMA=False, num_warps=4, num_stages=1)
        rows = 32 if f.pad_d == f.pad_v == 64 else 16  # else it spills
        return LaunchConfig(BLOCK_M=rows, BLOCK_N=32, TMA=False, num_warps=4, num_stages=1)
    if f.arch == 90:
        if wide:
            return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=8, num_stages=2)
        if f.time:
            return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=True, num_warps=4, num_stages=3)
        return LaunchConfig(BLOCK_M=64, BLOCK_N=64, TMA=True, num_warps=4, num_stages=2)
    if f.arch == 80:
        if wide:
            return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=8, num_stages=1)
        return LaunchConfig(BLOCK_M=32, BLOCK_N=64, TMA=False, num_warps=4, num_stages=2)
    return LaunchConfig(BLOCK_M=32, BLOCK_N=32 if wide or f.time else 64, TMA=False, num_warps=4, num_stages=1)
