"""Packed rows: several documents in one row, without attention between them."""
