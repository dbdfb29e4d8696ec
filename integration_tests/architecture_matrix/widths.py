"""Four and eight ranks of ``tp``, and ``tp`` with FSDP2: what is measured, and the section of the page about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Kinds of input on more ranks; which positions a model is told does not depend on how its weights are split.
WIDTH_KINDS = ("ids", "left padding")


@dataclass(frozen=True)
class Width:
    """One mesh and one mode of ``measure``.

    Args:
        tp: ranks of ``tp``.
        mode: ``"TP"``, ``"SP"`` or ``"transformers"``.
        dp_shard: ranks of FSDP2.
    """

    tp: int
    mode: str = "TP"
    dp_shard: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tp * self.dp_shard


#: What is measured, by its name in a row.
WIDTHS: Mapping[str, Width] = {
    "tp=4": Width(4),
    "tp=4 SP": Width(4, "SP"),
    "dp_shard=2 tp=2": Width(2, dp_shard=2),
    "dp_shard=2 tp=2 SP": Width(2, "SP", dp_shard=2),
    "transformers tp=4": Width(4, "transformers"),
    "tp=8": Width(8),
    "tp=8 SP": Width(8, "SP"),
}
