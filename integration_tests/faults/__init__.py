"""A campaign of faults against a small training job: ``python -m faults.run``."""
