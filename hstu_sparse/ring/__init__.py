"""Compute attention over sequences that are distributed over several devices."""
