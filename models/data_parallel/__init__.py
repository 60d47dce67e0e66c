"""Training over several ranks: the step, losses whose negatives or tables are shared, and saved slices."""
