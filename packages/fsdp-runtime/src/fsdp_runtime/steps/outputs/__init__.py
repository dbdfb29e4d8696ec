"""What a parallelized model returns."""
