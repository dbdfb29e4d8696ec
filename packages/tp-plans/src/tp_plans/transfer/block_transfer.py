"""One step of a transfer: a box of a tensor that goes from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tp_plans.boxes import Box


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A box of a checkpoint tensor that one rank sends to another.

    Args:
        tensor: the checkpoint tensor.
        box: the part of it.
        source: the rank that sends.
        destination: the rank that receives; the source itself where it stores the box already.
        nbytes: bytes of the box in the dtype that is sent.
        origin: the rank of the source layout from which the box came to ``source``, where ``source`` passes on what the
            destination layout stores there; ``None`` where it sends its own.
        position: bytes that the plan's transfers before it have, the same on both of its ranks; those of a chain have
            the same.
        hop: how many ranks have passed the box on before; with :attr:`direct`, would have.
    """

    tensor: str
    box: Box
    source: int
    destination: int
    nbytes: int
    origin: int | None = None
    position: int = 0
    hop: int = 0

    @property
    def is_local(self) -> bool:
        """Whether the box stays on its rank, as a copy."""
        return self.source == self.destination

    @property
    def is_relay(self) -> bool:
        """Whether the sender relays a received block."""
        return self.origin is not None

    @property
    def direct(self) -> BlockTransfer:
        """The same box from the rank of the source layout, to the same destination."""
        return self if self.origin is None else replace(self, source=self.origin, origin=None)
