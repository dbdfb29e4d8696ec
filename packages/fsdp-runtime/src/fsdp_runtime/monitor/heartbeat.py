"""What ranks write for each other in a store: signs of life, and what one of them found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

from torch.distributed.distributed_c10d import PrefixStore, Store


@dataclass(frozen=True)
class Sign:
    """A sign of life.

    Args:
        beat: a number that grows as long as the process runs.
        phase: what the rank is doing, in the user's words.
        state: ``"left"`` once it is done, ``"failed"`` once it raised.
        message: what it raised.
    """

    beat: int = 0
    phase: str = "start"
    state: Literal["running", "left", "failed"] = "running"
    message: str = ""


@dataclass(frozen=True)
class Finding:
    """The rank that is to blame, what it was doing, and what became of it."""

    rank: int
    phase: str
    what: str


#: Pulses of rank 0 that are kept for a rank that lags behind.
_KEPT = 64


class Board:
    """The part of a store that belongs to one watch.

    Args:
        connect: opens a connection of this watch's own to the store: one serves one call at a time, and some wait.
        name: the same on every rank, and another for every watch.
        timeout: seconds after which a call gives up.
    """

    def __init__(self, connect: Callable[[], Store], name: str, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._store, self._waiting = PrefixStore(name, connect()), PrefixStore(name, connect())
        self._store.set_timeout(self._timeout)

    def post(self, rank: int, sign: Sign) -> None:
        """Write a rank's sign; rank 0's wakes those that follow it."""
        self._store.set(_key(rank), json.dumps(asdict(sign)))
        if rank == 0:
            self._store.set(_pulse(sign.beat), "")
            if sign.beat >= _KEPT:
                self._store.delete_key(_pulse(sign.beat - _KEPT))

    def follow(self, beat: int, timeout: float) -> Sign:
        """Wait for rank 0's next sign after ``beat``.

        It comes as soon as it is posted, so that what rank 0 did last is known when its process ends, and the store
        with it.

        Raises:
            RuntimeError: nothing came, or the store is gone.
        """
        self._waiting.wait([_pulse(beat + 1)], timedelta(seconds=timeout))
        return Sign(**json.loads(self._waiting.get(_key(0))))

    def signs(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """The last signs of ranks that are known to have posted one."""
        wanted = list(ranks)
        texts = self._store.multi_get([_key(rank) for rank in wanted])
        return {rank: Sign(**json.loads(text)) for rank, text in zip(wanted, texts, strict=True)}

    def absent(self, ranks: Iterable[int]) -> list[int]:
        """Those that have posted nothing after the time-out."""
        wanted = list(ranks)
        try:
            self._store.wait([_key(rank) for rank in wanted], self._timeout)
        except RuntimeError:
            return [rank for rank in wanted if not self._store.check([_key(rank)])]
        return []

    def announce(self, finding: Finding) -> None:
        """Write what was found, for all."""
        self._store.set("finding", json.dumps(asdict(finding)))

    def announced(self) -> Finding | None:
        """What was found, if anything."""
        if not self._store.check(["finding"]):
            return None
        return Finding(**json.loads(self._store.get("finding")))


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _pulse(beat: int) -> str:
    return f"pulse/{beat}"
