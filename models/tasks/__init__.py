"""The tasks, that is what a run predicts, and their options."""
