"""FSDP2."""
