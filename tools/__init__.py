"""Smaller programs, for the data and for developers."""
