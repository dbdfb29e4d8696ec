"""Make a PyTorch model train on a device mesh."""

__version__ = "0.1.0"
