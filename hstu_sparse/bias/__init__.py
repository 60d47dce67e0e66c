"""The relative bias of every operator that scores pairs of tokens: by position and by time.

relative.py   `RelativeBias`, its checks, the edges of the time buckets, and a pair's bias in plain PyTorch
buckets.py    kernels find a pair's time bucket, or the buckets that a tile of pairs reaches over
scores.py     kernels add the bias to scores: pair by pair, or to a tile
gradients.py  kernels sum the tables' gradients, in an order that does not matter
sums.py       the sums of a program in shared memory, by inline assembly

docs/bias.md says how to give an operator a relative bias.
"""
