"""Dense bfloat16 operations per second of accelerators, as published by their makers, without sparsity."""

from __future__ import annotations

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12, "MI325X": 1307e12}
