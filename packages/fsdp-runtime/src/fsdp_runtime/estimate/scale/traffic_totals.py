"""Traffic added up over phases: what a reader, a chart and a ranking ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_runtime.estimate.types import Traffic


@dataclass(frozen=True, kw_only=True)
class AxisTotal:
    """Collectives of one kind over one axis in a whole step; fields as those of ``Traffic``."""

    axis: str
    ranks: int
    kind: str
    count: int
    nbytes: int
    moved: int
    seconds: float | None


def by_axis(traffic: Iterable[Traffic]) -> list[AxisTotal]:
    """Traffic over all phases, by axis and kind, in the order in which these first occur."""
    grouped: dict[tuple[str, str], list[Traffic]] = {}
    for item in traffic:
        grouped.setdefault((item.axis, item.kind), []).append(item)
    axes = list(dict.fromkeys(axis for axis, _ in grouped))
    return [_sum(grouped[key]) for axis in axes for key in grouped if key[0] == axis]


def moved_bytes(traffic: Iterable[Traffic]) -> int:
    """Bytes that leave a rank in a step, over all axes."""
    return sum(item.moved for item in traffic)


def moved_by_axis(traffic: Iterable[Traffic]) -> dict[str, int]:
    """Bytes that leave a rank in a step, by axis."""
    found: dict[str, int] = {}
    for item in traffic:
        found[item.axis] = found.get(item.axis, 0) + item.moved
    return found


def unpriced_axes(traffic: Iterable[Traffic]) -> tuple[str, ...]:
    """Axes without a bandwidth over which more than a thousandth of the bytes goes (a norm's few bytes are nothing)."""
    items = list(traffic)
    unpriced = moved_by_axis(item for item in items if item.seconds is None)
    return tuple(axis for axis, moved in unpriced.items() if moved > moved_bytes(items) / 1000)


def _sum(items: list[Traffic]) -> AxisTotal:
    known = [item.seconds for item in items if item.seconds is not None]
    return AxisTotal(
        axis=items[0].axis,
        ranks=items[0].ranks,
        kind=items[0].kind,
        count=sum(item.count for item in items),
        nbytes=sum(item.nbytes for item in items),
        moved=sum(item.moved for item in items),
        seconds=sum(known) if known else None,
    )
