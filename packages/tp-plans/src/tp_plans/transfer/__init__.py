"""Transfers of weights between two layouts: which block of which tensor goes from which rank to which, as data."""
