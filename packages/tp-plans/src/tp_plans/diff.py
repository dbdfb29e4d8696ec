"""What differs between two plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_plans.styles import Style

if TYPE_CHECKING:
    from tp_plans.plan import Plan


@dataclass(frozen=True)
class Change:
    """One pattern on which two plans differ; ``None`` where a plan says nothing of it."""

    pattern: str
    before: Style | None
    after: Style | None


@dataclass(frozen=True)
class PlanDiff:
    """The patterns on which two plans differ, in the order of the first, then of the second."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        lines: list[str] = []
        for change in self.changes:
            if change.before is not None:
                lines.append(f"- {change.pattern}: {change.before}")
            if change.after is not None:
                lines.append(f"+ {change.pattern}: {change.after}")
        return "\n".join(lines)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """The rules that ``after`` adds to, drops from or says otherwise than ``before``."""
    patterns = dict.fromkeys([*before, *after])
    pairs = (Change(pattern, before.get(pattern), after.get(pattern)) for pattern in patterns)
    return PlanDiff(tuple(change for change in pairs if change.before != change.after))
