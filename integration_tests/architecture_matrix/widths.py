"""Four and eight ranks of ``tp``, and ``tp`` with FSDP2: what is measured, and the section of the page about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Other positions and masks are measured on two ranks; they do not depend on how weights are split.
WIDTH_KINDS = ("ids",)


@dataclass(frozen=True)
class Width:
    """One mesh and one mode of ``measure``.

    Args:
        tp: ranks of ``tp``.
        mode: ``"TP"``, ``"SP"`` or ``"transformers"``.
        dp_shard: ranks of FSDP2.
        unless: what has to be refused for this to be measured.
    """

    tp: int
    mode: str = "TP"
    dp_shard: int = 1
    unless: str | None = None

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tp * self.dp_shard


#: What is measured, by its name in a row.
WIDTHS: Mapping[str, Width] = {
    "tp=4": Width(4),
    "tp=4 SP": Width(4, "SP"),
    "dp_shard=2 tp=2 SP": Width(2, "SP", dp_shard=2),
    "dp_shard=2 tp=2": Width(2, dp_shard=2, unless="dp_shard=2 tp=2 SP"),
    "transformers tp=4": Width(4, "transformers"),
    "tp=8": Width(8),
    "tp=8 SP": Width(8, "SP"),
}


def is_due(row: Mapping[str, Mapping[str, Any]], mode: str) -> bool:
    """Return whether something has still to be measured for a row."""
    other = WIDTHS[mode].unless
    return mode not in row and (other is None or row[other]["status"] != "right")
