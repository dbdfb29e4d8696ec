"""The layout of a tensor over one mesh axis, with the names of torch's placements, and the rows of each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tp_plans.errors import PlanError

__all__ = ["Layout", "Partial", "Replicate", "Shard", "compute_ranges", "shard_ranges"]


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


def shard_ranges(size: int, tp: int) -> list[range]:
    """Return the rows that each rank stores: ceiling-sized chunks, as DTensor's ``Shard`` splits them."""
    chunk = -(-size // tp)
    return [range(min(size, chunk * rank), min(size, chunk * (rank + 1))) for rank in range(tp)]


def compute_ranges(
    size: int, tp: int, *, unit: int = 1, pieces: Sequence[int] = (), shared: bool = False
) -> list[list[range]]:
    """Return the rows that each rank computes with: its units of every piece, in ascending order."""
    # A unit (a head) stays together; pieces are the matrices of a fused weight. With ``shared`` a piece with fewer
    # units than ranks gives each unit to ``tp / units`` neighbouring ranks.
    pieces = tuple(pieces) or (1,)
    scale, rest = divmod(size, sum(pieces))
    if rest:
        raise PlanError(f"{size} features are not a multiple of {sum(pieces)}, the sum of the fused sizes {pieces}")
    rows: list[list[range]] = [[] for _ in range(tp)]
    start = 0
    for piece in pieces:
        for rank, own in enumerate(_split_blocks(scale * piece, tp, unit, shared=shared)):
            rows[rank].append(range(start + own.start, start + own.stop))
        start += scale * piece
    return rows


def _split_blocks(size: int, tp: int, unit: int, *, shared: bool) -> list[range]:
    """Return the rows of one piece for each rank."""
    units, rest = divmod(size, unit)
    if rest:
        raise PlanError(f"{size} features are not a multiple of {unit} (multiple_of)")
    if shared and units < tp and tp % units == 0:
        return [range(unit * (rank * units // tp), unit * (rank * units // tp + 1)) for rank in range(tp)]
    if unit > 1 and units % tp:
        legal = [n for n in range(1, units + 1) if units % n == 0]
        multiples = f", or a multiple of {units}" * shared
        raise PlanError(
            f"{units} blocks of {unit} features cannot be split over tp={tp}: use a tp out of "
            f"{', '.join(map(str, legal))}{multiples}"
        )
    return shard_ranges(size, tp)


def intersect(rows: Sequence[range], stored: range) -> list[range]:
    """Return the part of ``rows`` in a stored chunk, counted from the chunk's start, without empty ranges."""
    cuts = (range(max(r.start, stored.start), min(r.stop, stored.stop)) for r in rows)
    return [range(cut.start - stored.start, cut.stop - stored.start) for cut in cuts if cut.start < cut.stop]
