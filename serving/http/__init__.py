"""Serve a recommender over HTTP: routes, the model thread, and the log of accepted events."""
