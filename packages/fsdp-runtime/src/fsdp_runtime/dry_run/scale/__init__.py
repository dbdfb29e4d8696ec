"""Extend the totals of a traced step to all repeated blocks."""
