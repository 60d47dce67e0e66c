"""What a run predicts: the tasks and their options."""
