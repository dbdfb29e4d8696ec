"""The report of a check: all findings, and the valid sizes of the axis."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans.checks.divisibility import Constraint, valid_tp_sizes
from tp_plans.checks.findings import Finding
from tp_plans.errors import CheckFailedError
from tp_plans.plan import Plan


@dataclass(frozen=True)
class CheckReport:
    """All findings of one check."""

    plan: Plan
    tp: int  # the size of the axis that was asked for
    findings: tuple[Finding, ...]  # errors and warnings
    constraints: tuple[Constraint, ...] = ()  # the sizes that the plan shards over the axis

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that forbid to apply the plan."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def legal_tp(self) -> tuple[int, ...]:
        """The sizes of the axis, up to 1024, that fit everything in the plan."""
        return valid_tp_sizes(self.constraints)

    def raise_on_error(self) -> None:
        """Raise :class:`CheckFailedError` listing every error, if there is one."""
        if self.errors:
            lines = "\n".join(f"  {finding}" for finding in self.errors)
            raise CheckFailedError(
                f"{self.plan.name} does not fit the model at tp={self.tp} ({len(self.errors)} errors):\n{lines}"
                f"{self._legal_line()}"
            )

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.plan.name} fits the model at tp={self.tp}"
        return "\n".join(map(str, self.findings)) + self._legal_line()

    def _legal_line(self) -> str:
        legal = self.legal_tp
        if not legal or self.tp in legal:
            return ""
        return f"\nvalid tp sizes for this plan: {', '.join(map(str, legal))}"
