"""What the registry holds of one architecture."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans.decoder import Decoder, decoder_plan
from tp_plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model class and the names of its parts.

    Args:
        class_name: the class as a config's ``architectures`` names it.
        model_type: the config's ``model_type``.
        decoder: the names of its parts.
        notes: what is not split, and why.
    """

    class_name: str
    model_type: str
    decoder: Decoder
    notes: str = ""

    def plan(self, *, sequence_parallel: bool = False) -> Plan:
        """The architecture's plan, with sequence parallelism when asked."""
        return decoder_plan(self.decoder, name=self.class_name, sequence_parallel=sequence_parallel)
