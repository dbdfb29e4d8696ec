"""What the registry holds of one architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_plans.arguments import require_size
from tp_plans.decoder import Decoder, decoder_plan, optional_rules
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
        aliases: other names by which it is found.
        adjust: what the plan changes to for a model's config, where names do not tell all.
    """

    class_name: str
    model_type: str
    decoder: Decoder
    notes: str = ""
    sequence_parallel: bool = True
    largest_tp: int | None = None
    experts: bool = False
    aliases: tuple[str, ...] = ()
    adjust: Callable[[Plan, Any], Plan] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that it is found by."""
        return (self.class_name, self.model_type, *self.aliases)

    def plan(self, *, sequence_parallel: bool = False, tp: int | None = None) -> Plan:
        """The architecture's plan, with sequence parallelism when asked.

        Raises:
            CapabilityError: it has no sequence-parallel form, or cannot be split over so many ranks.
        """
        if sequence_parallel and not self.sequence_parallel:
            raise CapabilityError(
                f"{self.class_name} has no sequence-parallel form ({self.notes}): pass sequence_parallel=False"
            )
        if tp is not None:
            require_size(tp, CapabilityError)
        if tp is not None and self.largest_tp is not None and tp > self.largest_tp:
            raise CapabilityError(
                f"{self.class_name} can be split over {self.largest_tp} ranks at most ({self.notes}), not {tp}: "
                f"use tp={self.largest_tp}, and the other ranks on another axis"
            )
        return decoder_plan(self.decoder, name=self.class_name, sequence_parallel=sequence_parallel)

    def fitted(self, plan: Plan, model: Any) -> Plan:
        """The plan for one model: adjusted to its config, without the rules for what this model may and does lack."""
        if self.adjust is not None:
            plan = self.adjust(plan, getattr(model, "config", None))
        present = {pattern for path, _ in model.named_modules() for pattern in plan.match(path)}
        lacking = {p: None for p in optional_rules(self.decoder) if p in plan and p not in present}
        return plan.override(lacking)
