"""Find the causes that move a generator's log-probabilities away from the trainer's, and their sizes."""
