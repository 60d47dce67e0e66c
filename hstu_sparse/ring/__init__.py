"""Attention over sequences that are distributed over several devices."""
