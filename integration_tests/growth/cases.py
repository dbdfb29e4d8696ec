"""All measured calls."""

from __future__ import annotations

from growth import logprobs, plans, runtime, transfers

CASES = [*plans.CASES, *transfers.CASES, *logprobs.CASES, *runtime.CASES]
