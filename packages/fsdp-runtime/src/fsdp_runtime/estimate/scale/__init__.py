"""Totals of a traced step, extended to all repeated blocks."""
