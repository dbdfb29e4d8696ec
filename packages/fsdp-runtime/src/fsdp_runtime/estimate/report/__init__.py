"""Estimates as text, HTML and pictures."""
