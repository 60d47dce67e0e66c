"""Define RotateKV: a cache of keys and values that are rotated, quantised to few bits, and optionally pruned."""
