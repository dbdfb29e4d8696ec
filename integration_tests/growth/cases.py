"""All measured calls."""

from __future__ import annotations

from growth import plans

CASES = [*plans.CASES]
