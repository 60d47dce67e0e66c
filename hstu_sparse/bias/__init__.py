"""Compute the relative bias, by position and by time, of every operator that scores pairs of tokens.

relative.py   `RelativeBias`, its checks, the edges of the time buckets, and a pair's bias in plain PyTorch
buckets.py    kernels compute a pair's time bucket, or the buckets that a tile of pairs covers
scores.py     kernels add the bias to scores: pair by pair, or for a tile
gradients.py  kernels sum the tables' gradients, in an arbitrary order
sums.py       a program sums in shared memory, by inline assembly

docs/bias.md says how to give an operator a relative bias.
"""
