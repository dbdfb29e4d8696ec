"""Meshes of ranks: their axes, and the rank's place from its environment."""
