"""Store keys and values in pages: the pool for serving and the RotateKV cache, and RotateKV's codes.

format.py    `PageFormat`, the content of a page and its size in bytes
pool.py      `PagePool`, the pages of all layers and their assignment to sequences
store.py     reading and writing pages in plain PyTorch: the specification of the kernels that write
files.py     a pool's sequences in one file
packing.py   quantising, packing and unpacking in plain PyTorch
codec.py     the same in kernels
encode.py    the kernels that write pages; decode.py: those that restore keys and values from codes; launch.py
bias.py      the bias of candidates with each position of their sequence
paged/       attention of new tokens to pages: the kernel of `paged_attention` and of rotatekv/
"""

from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.pool import PagePool, PoolFull

__all__ = ["PageFormat", "PagePool", "PoolFull"]
