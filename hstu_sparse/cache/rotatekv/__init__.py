"""RotateKV: a rotated, low-bit, optionally pruned cache of keys and values."""
