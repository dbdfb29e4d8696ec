"""The layout of a tensor over one mesh axis: replicated, sharded on a dim, or partial sums.

These mirror ``torch.distributed.tensor``'s placements of the same names, without importing torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tp_plans.errors import PlanError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the full tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds a contiguous chunk along ``dim``, ceiling-sized except at the end, as ``torch.chunk`` cuts."""

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise PlanError(f"{self.dim!r} is not a dim: write Shard(0), or Shard(-1) for the last one")

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a partial sum; the tensor is the sum over the ranks."""

    def __str__(self) -> str:
        return "partial"


Layout = Replicate | Shard | Partial

_SHARD = re.compile(r"shard\((-?\d{1,3})\)")


def layout_from_str(text: str) -> Layout:
    """Parse the result of ``str(layout)``: ``"replicate"``, ``"partial"`` or ``"shard(DIM)"``."""
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1]))
    raise PlanError(f"{text!r} is not a layout: write 'replicate', 'partial' or 'shard(DIM)'")
