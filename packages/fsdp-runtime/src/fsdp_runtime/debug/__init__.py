"""Checks and descriptions of a parallelized model."""
