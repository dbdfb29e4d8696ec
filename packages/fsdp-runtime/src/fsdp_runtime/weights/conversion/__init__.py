"""Conversions between checkpoint tensors and model tensors."""
