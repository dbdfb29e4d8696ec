"""What the registry holds of one architecture."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans.decoder import Decoder, decoder_plan
from tp_plans.errors import CapabilityError
from tp_plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model class, the names of its parts, and what it can do.

    Args:
        class_name: the class as a config's ``architectures`` names it.
        model_type: the config's ``model_type``.
        decoder: the names of its parts.
        notes: what is not split, and why.
        sequence_parallel: whether it has a sequence-parallel form; ``notes`` says why not.
        largest_tp: the largest axis over which it can be split whatever its sizes, or ``None``.
        experts: whether its experts are dealt over the axis.
    """

    class_name: str
    model_type: str
    decoder: Decoder
    notes: str = ""
    sequence_parallel: bool = True
    largest_tp: int | None = None
    experts: bool = False

    def plan(self, *, sequence_parallel: bool = False, tp: int | None = None) -> Plan:
        """The architecture's plan, with sequence parallelism when asked.

        Raises:
            CapabilityError: it has no sequence-parallel form, or cannot be split over so many ranks.
        """
        if sequence_parallel and not self.sequence_parallel:
            raise CapabilityError(
                f"{self.class_name} has no sequence-parallel form ({self.notes}): pass sequence_parallel=False"
            )
        if tp is not None and self.largest_tp is not None and tp > self.largest_tp:
            raise CapabilityError(
                f"{self.class_name} can be split over {self.largest_tp} ranks at most ({self.notes}), not {tp}: "
                f"use tp={self.largest_tp}, and the other ranks on another axis"
            )
        return decoder_plan(self.decoder, name=self.class_name, sequence_parallel=sequence_parallel)
