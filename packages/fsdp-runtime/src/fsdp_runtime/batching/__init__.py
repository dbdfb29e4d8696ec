"""Samples packed into rows: side by side, or with shared prefixes computed once."""
