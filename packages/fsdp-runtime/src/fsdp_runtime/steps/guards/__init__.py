"""Checks of what users do around a parallelized model."""
