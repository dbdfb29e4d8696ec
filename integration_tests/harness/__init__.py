"""Test support shared by the three packages: persistent ranks and model parity."""
