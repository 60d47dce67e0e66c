"""Compute the relative bias by position and by time, and its gradients, for every operator that scores pairs of tokens.

relative.py   `RelativeBias`, its checks, the edges of the time buckets, and the bias in plain PyTorch
buckets.py    device functions: the time bucket of a pair, the buckets of a tile of pairs
scores.py     device functions: add the bias to scores, pair by pair or by tile
gradients.py  device functions: sum the gradients of the tables
sums.py       inline assembly: sum in a program's shared memory

docs/bias.md explains how to add a relative bias to an operator.
"""
