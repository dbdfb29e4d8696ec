"""The outputs of a parallelized model."""
