"""Which cause moves a generator's log-probabilities away from the trainer's, and how far."""
