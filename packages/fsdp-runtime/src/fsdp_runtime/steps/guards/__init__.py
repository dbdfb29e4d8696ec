"""Checks of inputs, methods, optimizers and hooks around a parallelized model."""
