"""Launches, registration, checks of arguments and jagged tensors: shared by the operators on the host."""
