"""Totals of traffic over phases, for reports, charts and rankings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fsdp_runtime.dry_run.types import Traffic


def totals_by_axis(traffic: Iterable[Traffic]) -> list[Traffic]:
    """Return the traffic of all phases by axis and kind, in the order and under the phase of its first occurrence."""
    grouped: dict[str, dict[str, list[Traffic]]] = {}
    for item in traffic:
        grouped.setdefault(item.axis, {}).setdefault(item.kind, []).append(item)
    return [_sum(items) for kinds in grouped.values() for items in kinds.values()]


def total_bytes_sent(traffic: Iterable[Traffic]) -> int:
    """Return the bytes that a rank sends in a step, over all axes."""
    return sum(item.bytes_sent for item in traffic)


def bytes_sent_by_axis(traffic: Iterable[Traffic]) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by axis."""
    sent: dict[str, int] = {}
    for item in traffic:
        sent[item.axis] = sent.get(item.axis, 0) + item.bytes_sent
    return sent


def axes_without_bandwidth(traffic: Iterable[Traffic]) -> tuple[str, ...]:
    """Return the axes without a bandwidth that carry more than 0.1 % of the bytes (norms carry a few bytes)."""
    items = list(traffic)
    unknown = bytes_sent_by_axis(item for item in items if item.seconds is None)
    return tuple(axis for axis, sent in unknown.items() if sent > total_bytes_sent(items) / 1000)


def _sum(items: list[Traffic]) -> Traffic:
    known = [item.seconds for item in items if item.seconds is not None]
    return replace(
        items[0],
        count=sum(item.count for item in items),
        nbytes=sum(item.nbytes for item in items),
        bytes_sent=total_bytes_sent(items),
        seconds=sum(known) if known else None,
    )
