"""What an update of an engine took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSyncReport:
    """What an update took.

    Args:
        version: the version that the engine names now, read back.
        nbytes: bytes of the full weights.
        connect_s: seconds to form a group with the engine's workers; 0 where an earlier one served.
        check_s: seconds in which the engine tried names, dtypes and shapes.
        send_s: seconds to gather and broadcast the weights.
        apply_s: seconds in which the engine loaded them.
    """

    version: str
    nbytes: int
    connect_s: float
    check_s: float
    send_s: float
    apply_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the update."""
        return self.connect_s + self.check_s + self.send_s + self.apply_s
