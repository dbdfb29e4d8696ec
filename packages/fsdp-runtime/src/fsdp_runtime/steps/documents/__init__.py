"""Packed rows: several documents in one row, none of which reads another."""
