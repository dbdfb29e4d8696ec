"""The findings of a check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tp_plans.patterns import wildcard


@dataclass(frozen=True)
class Finding:
    """One error or warning of a check."""

    severity: Literal["error", "warning"]  # ``"error"`` where the model would fail or train wrongly, else ``"warning"``
    where: str  # the pattern or module path
    message: str  # the problem, with the numbers
    fix: str  # the remedy

    def __str__(self) -> str:
        return f"{self.severity}: {self.where or '(top)'}: {self.message}; {self.fix}"


def deduplicate_by_rule(findings: Iterable[Finding], rules: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Merge findings that differ only in the module and have one rule."""
    groups: dict[tuple[str, Finding], list[Finding]] = defaultdict(list)
    for finding in dict.fromkeys(findings):
        rule = next(iter(rules.get(finding.where, ())), wildcard(finding.where))
        groups[rule, replace(finding, where="")].append(finding)
    for (rule, _), group in groups.items():
        first = group[0]
        if len(group) == 1:
            yield first
        else:
            yield replace(first, where=rule, message=f"{first.message} ({len(group)} modules, first {first.where})")
