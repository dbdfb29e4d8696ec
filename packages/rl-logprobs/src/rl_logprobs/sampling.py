"""Sampling from, and log-probabilities under, filtered distributions of sharded logits; being written."""
