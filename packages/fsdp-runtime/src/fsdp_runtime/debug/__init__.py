"""Checks and descriptions of parallelized models."""
