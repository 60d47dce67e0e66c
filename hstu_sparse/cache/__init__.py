"""Store keys and values in pages: the pool for serving and the RotateKV cache, and RotateKV's codes.

format.py    `PageFormat`, the content of a page and its size in bytes
pool.py      `PagePool`, the pages of all layers and their assignment to sequences
store.py     reading and writing pages and codes in plain PyTorch: the specification of the kernels
files.py     a pool's sequences in one file
codec.py     quantising, packing and unpacking in kernels
encode.py    the kernels that write pages; decode.py: those that restore keys and values from codes; launch.py
paged/       attention of new tokens to pages: the kernel of `paged_attention` and of rotatekv/
"""

from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.pool import PagePool, PoolFull

__all__ = ["PageFormat", "PagePool", "PoolFull"]
