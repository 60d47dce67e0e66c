"""Store keys and values in pages: the pool for serving and the RotateKV cache, and RotateKV's codes.

format.py    `PageFormat`, the content of a page and its size in bytes
pool.py      `PagePool`, the pages of all layers and their assignment to sequences
store.py     reading and writing pages in plain PyTorch: the specification of the kernels that write
files.py     a pool's sequences in one file
layout.py    options and sizes of RotateKV's codes, and their order in a page
packing.py   quantising, packing and unpacking in plain PyTorch
codec.py     the same in kernels
encode.py    the kernel that writes codes; write.py: the one that writes uncompressed keys and values; launch.py
merge.py     the kernel that merges the parts of a history that several programs attended to
"""

from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.pool import PagePool, PoolFull

__all__ = ["PageFormat", "PagePool", "PoolFull"]
