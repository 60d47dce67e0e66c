"""Keys and values in pages: the pool that serving and the RotateKV cache keep them in, and RotateKV's codes.

format.py    `PageFormat`, what a page holds and how many bytes it takes
pool.py      `PagePool`, the pages of all layers and which sequence has which
store.py     pages written and read in plain PyTorch: the specification of what the kernels write
files.py     a pool's sequences in one file
layout.py    options and sizes of RotateKV's codes, and their order in a page
packing.py   quantising, packing and unpacking in plain PyTorch
codec.py     the same in kernels
encode.py    the kernel that writes codes; write.py: the one that writes keys and values as they are; launch.py
merge.py     the kernel that puts the parts of a history together which several programs attended to
"""

from hstu_sparse.pages.format import PageFormat
from hstu_sparse.pages.pool import PagePool, PoolFull

__all__ = ["PageFormat", "PagePool", "PoolFull"]
