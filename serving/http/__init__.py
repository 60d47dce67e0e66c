"""A recommender over HTTP: the routes, the thread that runs the model, the log of accepted events."""
