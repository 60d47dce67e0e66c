"""Define the tasks of runs and their options."""
