"""Store keys and values in pages, uncompressed or as RotateKV codes.

format.py    `PageFormat`: the tensors of a page and its size in bytes
pool.py      `PagePool`: the pages of all layers and their assignment to sequences
store.py     the specification in plain PyTorch: read and write pages, quantise and pack
files.py     save sequences of a pool in a file, and load them
codec.py     device functions: quantise, pack and unpack
encode.py    kernels that write pages
decode.py    kernels that restore keys and values from codes
launch.py    launches of these kernels
paged/       attention of new tokens to pages
rotatekv/    RotateKV over jagged tensors
"""

from hstu_sparse.cache.format import PageFormat
from hstu_sparse.cache.pool import PagePool, PoolFull

__all__ = ["PageFormat", "PagePool", "PoolFull"]
