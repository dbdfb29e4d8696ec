"""Pairs of options, models, rows and calls, drawn at random and compared with one process (``nox -s soak``)."""
