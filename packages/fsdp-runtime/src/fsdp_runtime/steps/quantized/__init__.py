"""A frozen base in packed bytes, under adapters."""
